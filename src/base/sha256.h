// SHA-256 (FIPS 180-4) and HMAC-SHA-256 (RFC 2104): for the names of compiled code in its
// cache, and the proof that a peer has the job's token. Implemented here because nothing
// else in the library needs a cryptographic library.
#ifndef JPP_BASE_SHA256_H_
#define JPP_BASE_SHA256_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { kJppSha256Size = 32, kJppSha256Block = 64 };

typedef struct jpp_sha256 {
  uint32_t state[8];
  uint64_t length;                 // bytes so far
  uint8_t block[kJppSha256Block];  // the last length % 64 bytes
} jpp_sha256_t;

void jpp__sha256_begin(jpp_sha256_t* hash);
void jpp__sha256_add(jpp_sha256_t* hash, const void* data, size_t size);
void jpp__sha256_end(jpp_sha256_t* hash, uint8_t out_digest[kJppSha256Size]);

void jpp__hmac_sha256(const void* key, size_t key_size, const void* data, size_t size,
                      uint8_t out_digest[kJppSha256Size]);

// Takes the same time wherever they differ.
bool jpp__bytes_equal_in_constant_time(const void* a, const void* b, size_t size);

#endif  // JPP_BASE_SHA256_H_
