// Network: messages to and from the ranks of other processes.
#ifndef JPP_RUNTIME_NETWORK_H_
#define JPP_RUNTIME_NETWORK_H_

#include "runtime/step/actor.h"

// How often a waiting issuing thread drives the network.
enum { kJppNetworkPeriodUs = 300 };

// Opens the channels that begin or end in another process.
jpp_status_t* jpp__network_open(jpp_runtime_t* runtime) JPP_MUST_USE;
// Sends messages until all routes are known to work; JPP_PEER_ERROR after `timeout_ms`.
jpp_status_t* jpp__network_warm_up(jpp_runtime_t* runtime,
                                   uint32_t timeout_ms) JPP_MUST_USE;
// Delivers parcels, closes the channels and destroys the transport.
void jpp__network_close(jpp_runtime_t* runtime);

// Sends messages that are ready and drives the transport. Issuing thread. Returns whether
// anything happened.
bool jpp__network_progress(jpp_runtime_t* runtime);
// The same, on another thread while the issuing thread is busy.
void jpp__network_beat(jpp_runtime_t* runtime);
// Drives the transport and, if nothing happened, sleeps until it has work or the issuing
// thread is called, a millisecond at most, or 50 between two steps. Call it between
// jpp__wakeup_begin() and jpp__wakeup_end().
void jpp__network_wait(jpp_runtime_t* runtime, bool between_steps);
// Breaks the runtime if a channel has failed. Issuing thread, while it uses no channel.
void jpp__network_check(jpp_runtime_t* runtime);
// Fails the other ends of all channels with `status`, which is only read. Any thread.
void jpp__network_abort(jpp_runtime_t* runtime, const jpp_status_t* status);

// Like a local send and receive: `out_done` says whether there was a free parcel, or a
// message.
jpp_status_t* jpp__network_send(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                                bool* out_done) JPP_MUST_USE;
jpp_status_t* jpp__network_recv(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                                bool* out_done) JPP_MUST_USE;

#endif  // JPP_RUNTIME_NETWORK_H_
