// What two processes prove to each other before either reads the other's data.
//
// Each transport draws a random number when it is created. Its address, which the caller
// passes to the peers, contains that number and is sealed with an HMAC of the job's
// token: an address that was made without the token, or changed on its way, is refused
// unread. A packet from process i to process j begins with a proof of i. Only a process
// that has the token and j's address can compute it, and it is not valid for another i,
// another j, or j's next transport.
//
// This keeps out strangers who can reach the ports. It does not hide the data from
// attackers who can read the network, and who could then also impersonate a peer: against
// them, the network itself must be trusted or encrypted at a lower layer.
#ifndef JPP_TRANSPORT_HANDSHAKE_H_
#define JPP_TRANSPORT_HANDSHAKE_H_

#include "jaxpp/transport.h"

enum {
  kJppProofSize = 16,
  kJppNonceSize = 16,
  kJppMostNameSize = 255,
  kJppMostAddressSize = 64 << 10,  // including the seal
  kJppLeastTokenSize = 16,
};

// The parts of an address. After reading, they point into the bytes from which they were
// read.
typedef struct jpp_address {
  uint32_t process, num_processes;
  uint32_t device_version;  // of the library that carries device memory; 0: none does
  uint8_t nonce[kJppNonceSize];
  const char* name;  // for messages; `name_size` bytes, no NUL
  size_t name_size;
  const void* route;  // the data that the driver needs
  size_t route_size;
} jpp_address_t;

// The caller frees the bytes with jpp_free().
jpp_status_t* jpp__address_seal(const jpp_address_t* address, const void* token,
                                size_t token_size, void** out_bytes,
                                size_t* out_size) JPP_MUST_USE;

// Checks the seal first. JPP_PEER_ERROR for an address made with another token, and for
// contents that a sealed address of this version cannot have.
jpp_status_t* jpp__address_open(const void* bytes, size_t size, const void* token,
                                size_t token_size,
                                jpp_address_t* out_address) JPP_MUST_USE;

// The proof that process `from` sends in front of its packets to process `to`, whose
// address has `nonce`.
void jpp__packet_proof(const void* token, size_t token_size,
                       const uint8_t nonce[kJppNonceSize], uint32_t from, uint32_t to,
                       uint8_t out_proof[kJppProofSize]);

#endif  // JPP_TRANSPORT_HANDSHAKE_H_
