// Outbox: the sending end of a channel to a rank of another process.
//
// A value is copied to a parcel as soon as the device has made it, and the parcel is sent
// when the receiver has a slot. The sender's program waits only for a free parcel; there
// are as many parcels as the channel has slots.
//
// A parcel is in host memory or, if the transport takes device memory, consists of copies
// on the devices, because a later task may reuse the value's own memory.
#ifndef JPP_RUNTIME_OUTBOX_H_
#define JPP_RUNTIME_OUTBOX_H_

#include "runtime/step/actor.h"

// Creates the outbox of a channel whose shards have up to `most_bytes` bytes, in the
// runtime's arena. Close it after the channel.
jpp_status_t* jpp__outbox_create(jpp_runtime_t* runtime, jpp_link_t* link,
                                 uint64_t most_bytes) JPP_MUST_USE;
// Drops parcels that have not been sent. The transport may still read the others and
// calls `jpp__outbox_sent` for them.
void jpp__outbox_drop(jpp_outbox_t* outbox);
void jpp__outbox_close(jpp_outbox_t* outbox);

// `out_done` says whether there was a free parcel.
jpp_status_t* jpp__outbox_send(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                               bool* out_done) JPP_MUST_USE;
// Sends parcels that are ready. Returns whether anything happened.
bool jpp__outbox_progress(jpp_outbox_t* outbox);
// The channel's jpp_channel_sent_t: the transport no longer needs the parcel that is the
// cookie.
void jpp__outbox_sent(void* user, void* cookie);

// Whether there are parcels that are filled or that the transport still needs.
bool jpp__outbox_is_busy(const jpp_outbox_t* outbox);
// Whether the oldest unsent message waits for the sender's device; also returns the
// message's step and the index of its SEND in the sender's program.
bool jpp__outbox_is_unmade(const jpp_outbox_t* outbox, uint64_t* out_step,
                           uint32_t* out_instr);

#endif  // JPP_RUNTIME_OUTBOX_H_
