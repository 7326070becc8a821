// Saturating byte counts: sums and products that exceed the largest number are clamped to
// it. Callers refuse a saturated number if they need the exact value.
#ifndef JPP_BASE_BYTES_H_
#define JPP_BASE_BYTES_H_

#include <stdbool.h>
#include <stdint.h>

// The largest integer that JSON holds.
#define JPP_MOST_BYTES ((uint64_t)INT64_MAX)

static inline uint64_t jpp__bytes_add(uint64_t a, uint64_t b) {
  if (a >= JPP_MOST_BYTES || b >= JPP_MOST_BYTES - a) return JPP_MOST_BYTES;
  return a + b;
}

static inline uint64_t jpp__bytes_multiply(uint64_t a, uint64_t b) {
  uint64_t product;
  if (__builtin_mul_overflow(a, b, &product)) return JPP_MOST_BYTES;
  return product < JPP_MOST_BYTES ? product : JPP_MOST_BYTES;
}

// False for a saturated number.
static inline bool jpp__bytes_fit(uint64_t bytes) { return bytes < JPP_MOST_BYTES; }

#endif  // JPP_BASE_BYTES_H_
