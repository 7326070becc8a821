// Inbox: the receiving end of a channel from a rank of another process.
//
// A receive copies from the slot to the device. A slot in host memory is copied before
// the call returns, and released at once. A slot in device memory is copied by the device
// later, and released after that.
#ifndef JPP_RUNTIME_INBOX_H_
#define JPP_RUNTIME_INBOX_H_

#include "runtime/step/actor.h"

// Allocated in the runtime's arena.
jpp_status_t* jpp__inbox_create(jpp_runtime_t* runtime, jpp_link_t* link) JPP_MUST_USE;
// Waits until the devices have copied all slots.
void jpp__inbox_close(jpp_inbox_t* inbox);

// `out_done` says whether there was a message.
jpp_status_t* jpp__inbox_recv(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                              bool* out_done) JPP_MUST_USE;
// Whether slots wait for the device.
bool jpp__inbox_awaits_device(const jpp_inbox_t* inbox);
// Releases slots that have been copied. Returns whether anything happened.
bool jpp__inbox_progress(jpp_inbox_t* inbox);

#endif  // JPP_RUNTIME_INBOX_H_
