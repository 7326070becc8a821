// A network for tests: the driver "fake" carries bytes between transports of one process,
// with delays, packets that overtake each other, and peers that die, the same ones for
// the same seed. "nccl-fake" is the driver "nccl" over it.
//
// Its address is any text; transports of one process find each other by their addresses
// as with a real network.
//
// Threads: each transport may be used by a thread of its own, one at a time.
#ifndef TESTS_C_FAKE_TRANSPORT_H_
#define TESTS_C_FAKE_TRANSPORT_H_

#include "jaxpp/transport.h"

// jpp_transport_create(), which also knows these two drivers.
jpp_status_t* test_transport_create(const jpp_transport_options_t* options,
                                    jpp_transport_t** out_transport) JPP_MUST_USE;

// Packets to this transport arrive after 1 to `rounds` calls of its progress, drawn from
// `seed`; fetching large data takes as long again. With 1, the default, they arrive in
// order, at the next call.
void jpp_transport_fake_set_delay(jpp_transport_t* transport, uint32_t rounds,
                                  uint64_t seed);

// The transport's process dies: what it sent and has not delivered is lost; its peers
// notice in their next progress call. From now on it can only be destroyed. Any thread.
void jpp_transport_fake_kill(jpp_transport_t* transport);

#endif  // TESTS_C_FAKE_TRANSPORT_H_
