// Hash: 64 bits over bytes, FNV-1a (http://www.isthe.com/chongo/tech/comp/fnv/). It
// detects damage and differences, not forgeries. Every step is a bijection, so texts of
// the same length that differ in one byte never have the same hash.
#ifndef JPP_BASE_HASH_H_
#define JPP_BASE_HASH_H_

#include <stddef.h>
#include <stdint.h>

// The hash of no bytes.
#define JPP_HASH_START UINT64_C(0xcbf29ce484222325)

#define JPP_HASH_FACTOR UINT64_C(0x100000001b3)

// Extends a hash by more bytes.
static inline uint64_t jpp__hash_bytes(uint64_t hash, const void* bytes, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    hash = (hash ^ ((const unsigned char*)bytes)[i]) * JPP_HASH_FACTOR;
  }
  return hash;
}

// Extends a hash by a number; the same for any byte order.
static inline uint64_t jpp__hash_u64(uint64_t hash, uint64_t number) {
  for (int i = 0; i < 8; ++i) {
    unsigned char byte = (unsigned char)(number >> 8 * i);
    hash = jpp__hash_bytes(hash, &byte, 1);
  }
  return hash;
}

#endif  // JPP_BASE_HASH_H_
