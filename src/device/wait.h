// Waits that can be interrupted: in slices, with a question in between.
#ifndef JPP_DEVICE_WAIT_H_
#define JPP_DEVICE_WAIT_H_

#include <pthread.h>

#include "jaxpp/device.h"

// A condition for jpp_wait_slice().
void jpp_wait_init_condition(pthread_cond_t* condition);
// Waits for a signal, with the mutex held as for pthread_cond_wait(), and not longer than
// until the question is due; false when it was answered with yes. The mutex is unlocked
// while it is asked. `interrupt` may be NULL. The caller looks at its condition again.
bool jpp_wait_slice(pthread_cond_t* condition, pthread_mutex_t* mutex,
                    const jpp_interrupt_t* interrupt);
// Likewise without a question, for so long at most.
void jpp_wait_for(pthread_cond_t* condition, pthread_mutex_t* mutex, long nanoseconds);
// Until the event is ready, which is destroyed then and becomes NULL; how it went. It may
// be NULL before.
jpp_status_t* jpp_wait_end_of(jpp_client_t* client, jpp_event_t** event) JPP_MUST_USE;
// Until the event is ready; false: interrupted. Both may be NULL. How the event went is
// for jpp_client_event_await() to say.
bool jpp_wait_event(jpp_client_t* client, jpp_event_t* event,
                    const jpp_interrupt_t* interrupt);

// Whether the buffer's contents are there; how that went is for jpp_wait_buffer() to say.
jpp_status_t* jpp_wait_is_buffer_ready(jpp_client_t* client, jpp_buffer_t* buffer,
                                       bool* out_ready) JPP_MUST_USE;

// Until the buffer's contents are there, and how that went; JPP_CANCELLED, with `what` in
// front, if interrupted.
jpp_status_t* jpp_wait_buffer(jpp_client_t* client, jpp_buffer_t* buffer,
                              const char* what,
                              const jpp_interrupt_t* interrupt) JPP_MUST_USE;

#endif  // JPP_DEVICE_WAIT_H_
