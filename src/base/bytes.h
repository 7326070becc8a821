// Numbers of bytes that saturate: sums and products beyond the largest number stay at it.
// Callers refuse a saturated number where the exact value matters.
#ifndef JPP_BASE_BYTES_H_
#define JPP_BASE_BYTES_H_

#include <stdbool.h>
#include <stdint.h>

// The most that JSON's integers hold.
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
