// SHA-256 and HMAC as in FIPS 180-4 and RFC 2104: a block of 64 bytes at a time is mixed
// into eight words, and a key is hashed in before and after the message.
#include "base/sha256.h"

#include <string.h>

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
static const uint32_t kRoundConstants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
    0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
    0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
    0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
    0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
    0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
    0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
    0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
    0xc67178f2};

static uint32_t rotate_right(uint32_t x, int bits) {
  return x >> bits | x << (32 - bits);
}

static uint32_t read_big_endian(const uint8_t* bytes) {
  return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 |
         bytes[3];
}

static void sha256_expand(const uint8_t* block, uint32_t words[64]) {
  for (int i = 0; i < 16; ++i) words[i] = read_big_endian(block + (size_t)i * 4);
  for (int i = 16; i < 64; ++i) {
    uint32_t a = words[i - 15], b = words[i - 2];
    uint32_t s0 = rotate_right(a, 7) ^ rotate_right(a, 18) ^ a >> 3;
    uint32_t s1 = rotate_right(b, 17) ^ rotate_right(b, 19) ^ b >> 10;
    words[i] = words[i - 16] + s0 + words[i - 7] + s1;
  }
}

static void sha256_compress(uint32_t state[8], const uint8_t* block) {
  uint32_t words[64], v[8];
  sha256_expand(block, words);
  memcpy(v, state, sizeof(v));
  for (int i = 0; i < 64; ++i) {
    uint32_t s1 = rotate_right(v[4], 6) ^ rotate_right(v[4], 11) ^ rotate_right(v[4], 25);
    uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]);
    uint32_t t1 = v[7] + s1 + choice + kRoundConstants[i] + words[i];
    uint32_t s0 = rotate_right(v[0], 2) ^ rotate_right(v[0], 13) ^ rotate_right(v[0], 22);
    uint32_t majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
    memmove(v + 1, v, 7 * sizeof(*v));
    v[4] += t1;
    v[0] = t1 + s0 + majority;
  }
  for (int i = 0; i < 8; ++i) state[i] += v[i];
}

void jpp__sha256_begin(jpp_sha256_t* hash) {
  static const uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memcpy(hash->state, kInitial, sizeof(kInitial));
  hash->length = 0;
}

void jpp__sha256_add(jpp_sha256_t* hash, const void* data, size_t size) {
  const uint8_t* at = data;
  while (size) {
    size_t used = hash->length % kJppSha256Block;
    size_t part = size < kJppSha256Block - used ? size : kJppSha256Block - used;
    memcpy(hash->block + used, at, part);
    hash->length += part;
    if (used + part == kJppSha256Block) sha256_compress(hash->state, hash->block);
    at += part;
    size -= part;
  }
}

void jpp__sha256_end(jpp_sha256_t* hash, uint8_t out_digest[kJppSha256Size]) {
  static const uint8_t kPadding[kJppSha256Block] = {0x80};
  uint64_t bits = hash->length * 8;
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = (uint8_t)(bits >> (56 - 8 * i));
  size_t used = hash->length % kJppSha256Block;
  jpp__sha256_add(hash, kPadding, used < 56 ? 56 - used : 120 - used);
  jpp__sha256_add(hash, length, sizeof(length));
  for (int i = 0; i < kJppSha256Size; ++i) {
    out_digest[i] = (uint8_t)(hash->state[i / 4] >> (24 - 8 * (i % 4)));
  }
}

void jpp__hmac_sha256(const void* key, size_t key_size, const void* data, size_t size,
                      uint8_t out_digest[kJppSha256Size]) {
  uint8_t padded[kJppSha256Block] = {0}, inner[kJppSha256Block], outer[kJppSha256Block];
  jpp_sha256_t hash;
  if (key_size > sizeof(padded)) {
    jpp__sha256_begin(&hash);
    jpp__sha256_add(&hash, key, key_size);
    jpp__sha256_end(&hash, padded);
  } else if (key_size) {
    memcpy(padded, key, key_size);
  }
  for (size_t i = 0; i < sizeof(padded); ++i) {
    inner[i] = padded[i] ^ 0x36;
    outer[i] = padded[i] ^ 0x5c;
  }
  jpp__sha256_begin(&hash);
  jpp__sha256_add(&hash, inner, sizeof(inner));
  jpp__sha256_add(&hash, data, size);
  jpp__sha256_end(&hash, out_digest);
  jpp__sha256_begin(&hash);
  jpp__sha256_add(&hash, outer, sizeof(outer));
  jpp__sha256_add(&hash, out_digest, kJppSha256Size);
  jpp__sha256_end(&hash, out_digest);
}

bool jpp__bytes_equal_in_constant_time(const void* a, const void* b, size_t size) {
  uint64_t difference = 0;
  for (size_t i = 0; i < size; i += sizeof(difference)) {
    uint64_t x = 0, y = 0;
    size_t part = size - i < sizeof(x) ? size - i : sizeof(x);
    memcpy(&x, (const char*)a + i, part);
    memcpy(&y, (const char*)b + i, part);
    difference |= x ^ y;
    __asm__("" : "+r"(difference));  // keeps the compiler from leaving a loop early
  }
  return difference == 0;
}
