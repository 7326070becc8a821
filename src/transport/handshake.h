// What two processes prove to each other before either looks at what the other sends.
//
// Each transport draws a random number when it is made. Its address, which the caller
// carries to the peers, has that number and is sealed with an HMAC of the job's token: an
// address that was made without the token, or changed on its way, is refused unread. A
// packet from process i to process j begins with a proof of i, which only who has the
// token and j's address can compute, and which is of no use for another i, another j, or
// j's next transport.
//
// This keeps strangers out who can reach the ports. It does not hide what is sent from
// those who can read the network, who could then also pretend to be a peer: for that the
// network itself must be trusted, or encrypted below.
#ifndef JPP_TRANSPORT_HANDSHAKE_H_
#define JPP_TRANSPORT_HANDSHAKE_H_

#include "jaxpp/transport.h"

enum {
  kJppProofSize = 16,
  kJppNonceSize = 16,
  kJppMostNameSize = 255,
  kJppMostAddressSize = 64 << 10,  // sealed
  kJppLeastTokenSize = 16,
};

// The parts of an address. Read ones borrow from the bytes they were read from.
typedef struct jpp_address {
  uint32_t process, num_processes;
  uint32_t device_version;  // of what carries device memory; 0: nothing does
  uint8_t nonce[kJppNonceSize];
  const char* name;  // for messages; `name_size` bytes, no NUL
  size_t name_size;
  const void* route;  // what the driver needs
  size_t route_size;
} jpp_address_t;

// Bytes to be freed with jpp_free().
jpp_status_t* jpp_address_seal(const jpp_address_t* address, const void* token,
                               size_t token_size, void** out_bytes,
                               size_t* out_size) JPP_MUST_USE;

// Checks the seal first. JPP_PEER_ERROR for one of another token, and for what a sealed
// address of this version cannot have.
jpp_status_t* jpp_address_open(const void* bytes, size_t size, const void* token,
                               size_t token_size,
                               jpp_address_t* out_address) JPP_MUST_USE;

// The proof that process `from` puts before its packets to process `to`, whose address
// has `nonce`.
void jpp_packet_proof(const void* token, size_t token_size,
                      const uint8_t nonce[kJppNonceSize], uint32_t from, uint32_t to,
                      uint8_t out_proof[kJppProofSize]);

#endif  // JPP_TRANSPORT_HANDSHAKE_H_
