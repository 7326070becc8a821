// Proofs that a process has the job's token: an address is sealed with an HMAC keyed by
// it, and every packet begins with one of the receiver's random number. No data is read
// before the proof in front of it is verified.
#include "transport/handshake.h"

#include <string.h>

#include "base/alloc.h"
#include "base/sha256.h"

// The head of a sealed address; name and route follow it. Both processes have the same
// byte order; otherwise the magic number does not match.
typedef struct address_head {
  uint8_t seal[kJppSha256Size];  // HMAC of everything after it
  uint64_t magic;
  uint32_t version;
  uint32_t process, num_processes;
  uint32_t name_size, route_size;
  uint8_t nonce[kJppNonceSize];
  uint32_t device_version;
} address_head_t;

static const uint64_t kMagic = UINT64_C(0x5244415f5050584a);
static const uint32_t kVersion = 3;  // of addresses and packets

static void compute_seal(const void* bytes, size_t size, const void* token,
                         size_t token_size, uint8_t out_seal[kJppSha256Size]) {
  jpp__hmac_sha256(token, token_size, (const uint8_t*)bytes + kJppSha256Size,
                   size - kJppSha256Size, out_seal);
}

jpp_status_t* jpp__address_seal(const jpp_address_t* address, const void* token,
                                size_t token_size, void** out_bytes, size_t* out_size) {
  *out_bytes = NULL;
  *out_size = 0;
  size_t size = sizeof(address_head_t) + address->name_size + address->route_size;
  if (address->name_size > kJppMostNameSize || size > kJppMostAddressSize) {
    return jpp_status_make(JPP_UNSUPPORTED,
                           "expected an address of %d bytes at most, found %zu",
                           kJppMostAddressSize, size);
  }
  uint8_t* bytes = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(size, (void**)&bytes));
  address_head_t head = {.magic = kMagic,
                         .version = kVersion,
                         .process = address->process,
                         .num_processes = address->num_processes,
                         .name_size = (uint32_t)address->name_size,
                         .route_size = (uint32_t)address->route_size,
                         .device_version = address->device_version};
  memcpy(head.nonce, address->nonce, sizeof(head.nonce));
  memcpy(bytes, &head, sizeof(head));
  memcpy(bytes + sizeof(head), address->name, address->name_size);
  memcpy(bytes + sizeof(head) + address->name_size, address->route, address->route_size);
  compute_seal(bytes, size, token, token_size, bytes);
  *out_bytes = bytes;
  *out_size = size;
  return NULL;
}

static jpp_status_t* check_seal(const void* bytes, size_t size, const void* token,
                                size_t token_size) {
  if (size < sizeof(address_head_t) || size > kJppMostAddressSize) {
    return jpp_status_make(JPP_PEER_ERROR,
                           "expected an address of %zu to %d bytes, found %zu",
                           sizeof(address_head_t), kJppMostAddressSize, size);
  }
  uint8_t seal[kJppSha256Size];
  compute_seal(bytes, size, token, token_size, seal);
  if (jpp__bytes_equal_in_constant_time(seal, bytes, sizeof(seal))) return NULL;
  return jpp_status_make(JPP_PEER_ERROR,
                         "its address was not made with this job's token, or was damaged "
                         "on its way");
}

jpp_status_t* jpp__address_open(const void* bytes, size_t size, const void* token,
                                size_t token_size, jpp_address_t* out_address) {
  *out_address = (jpp_address_t){0};
  JPP_RETURN_IF_ERROR(check_seal(bytes, size, token, token_size));
  address_head_t head;
  memcpy(&head, bytes, sizeof(head));
  if (head.magic != kMagic || head.version != kVersion) {
    return jpp_status_make(JPP_PEER_ERROR,
                           "expected an address of version %u, found version %u%s; run "
                           "the same release in all processes",
                           kVersion, head.version,
                           head.magic != kMagic ? " in another format" : "");
  }
  if (head.name_size > kJppMostNameSize ||
      (uint64_t)head.name_size + head.route_size != size - sizeof(head)) {
    return jpp_status_make(JPP_PEER_ERROR,
                           "its address has %zu bytes of name and route, found %u and %u",
                           size - sizeof(head), head.name_size, head.route_size);
  }
  const char* name = (const char*)bytes + sizeof(head);
  *out_address = (jpp_address_t){.process = head.process,
                                 .num_processes = head.num_processes,
                                 .device_version = head.device_version,
                                 .name = name,
                                 .name_size = head.name_size,
                                 .route = name + head.name_size,
                                 .route_size = head.route_size};
  memcpy(out_address->nonce, head.nonce, sizeof(head.nonce));
  return NULL;
}

void jpp__packet_proof(const void* token, size_t token_size,
                       const uint8_t nonce[kJppNonceSize], uint32_t from, uint32_t to,
                       uint8_t out_proof[kJppProofSize]) {
  struct {
    char purpose[16];
    uint8_t nonce[kJppNonceSize];
    uint32_t from, to;
  } text = {.purpose = "jaxpp packet", .from = from, .to = to};
  memcpy(text.nonce, nonce, sizeof(text.nonce));
  uint8_t digest[kJppSha256Size];
  jpp__hmac_sha256(token, token_size, &text, sizeof(text), digest);
  memcpy(out_proof, digest, kJppProofSize);
}
