// A network for tests: the driver "fake" carries bytes between transports of one process,
// with delays, packets that overtake each other, and peers that die, the same ones for
// the same seed.
//
// Its address is any text; transports of one process find each other by their addresses
// as with a real network.
//
// Threads: each transport may be used by a thread of its own, one at a time.
#ifndef JAXPP_TRANSPORT_FAKE_H_
#define JAXPP_TRANSPORT_FAKE_H_

#include "jaxpp/transport.h"

// Packets to this transport arrive after 1 to `rounds` calls of its progress, drawn from
// `seed`; fetching large data takes as long again. 1, as at first: in order, at the next
// call.
JPP_API void jpp_transport_fake_set_delay(jpp_transport_t* transport, uint32_t rounds,
                                          uint64_t seed);

// The transport's process dies: what it sent and what was not taken yet is lost, its
// peers notice at their next progress. It can only be destroyed from now on. Any thread.
JPP_API void jpp_transport_fake_kill(jpp_transport_t* transport);

#endif  // JAXPP_TRANSPORT_FAKE_H_
