// Block: a range of indices along each axis of an array, [ndim][2], each start and stop.
#ifndef JPP_ARRAY_BLOCK_H_
#define JPP_ARRAY_BLOCK_H_

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "base/bytes.h"

static inline bool jpp__block_equal(const int64_t* a, const int64_t* b, uint32_t ndim) {
  return !ndim || !memcmp(a, b, ndim * 2 * sizeof(*a));
}

static inline bool jpp__block_is_valid(const int64_t* block, uint32_t ndim) {
  for (uint32_t i = 0; i < ndim; ++i) {
    if (block[2 * i] < 0 || block[2 * i] > block[2 * i + 1]) return false;
  }
  return true;
}

// The number of elements.
static inline uint64_t jpp__block_size(const int64_t* block, uint32_t ndim) {
  uint64_t size = 1;
  for (uint32_t i = 0; i < ndim; ++i) {
    size = jpp__bytes_multiply(size, (uint64_t)(block[2 * i + 1] - block[2 * i]));
  }
  return size;
}

// Stores the intersection of two blocks in `out`. Returns false if it is empty.
static inline bool jpp__block_intersect(const int64_t* a, const int64_t* b, uint32_t ndim,
                                        int64_t* out) {
  bool some = true;
  for (uint32_t i = 0; i < ndim; ++i) {
    out[2 * i] = a[2 * i] > b[2 * i] ? a[2 * i] : b[2 * i];
    out[2 * i + 1] = a[2 * i + 1] < b[2 * i + 1] ? a[2 * i + 1] : b[2 * i + 1];
    some &= out[2 * i] < out[2 * i + 1];
  }
  return some;
}

#endif  // JPP_ARRAY_BLOCK_H_
