// Interruptible waits: in slices, with a call of the caller's function in between.
#ifndef JPP_DEVICE_WAIT_H_
#define JPP_DEVICE_WAIT_H_

#include <pthread.h>

#include "jaxpp/device.h"

// A condition for jpp__wait_slice().
void jpp__wait_init_condition(pthread_cond_t* condition);
// Waits for a signal, with the mutex held as for pthread_cond_wait(), at most until
// `interrupt` is due; returns false if `interrupt` ended the wait. The mutex is unlocked
// while `interrupt` is called. `interrupt` may be NULL. The caller checks its condition
// again.
bool jpp__wait_slice(pthread_cond_t* condition, pthread_mutex_t* mutex,
                     const jpp_interrupt_t* interrupt);
// The same without `interrupt`, with a time limit.
void jpp__wait_for(pthread_cond_t* condition, pthread_mutex_t* mutex, long nanoseconds);
// Waits until the event is ready, destroys it and sets it to NULL; returns its status.
// *event may be NULL.
jpp_status_t* jpp__wait_end_of(jpp_client_t* client, jpp_event_t** event) JPP_MUST_USE;
// Waits until the event is ready; false: interrupted. Both may be NULL.
// jpp_client_event_await() returns the event's status.
bool jpp__wait_event(jpp_client_t* client, jpp_event_t* event,
                     const jpp_interrupt_t* interrupt);

// Whether the event is ready or NULL; false, too, if the device does not answer.
bool jpp__wait_is_event_ready(jpp_client_t* client, jpp_event_t* event);
// Whether the buffer's contents are ready; jpp__wait_buffer() returns their status.
jpp_status_t* jpp__wait_is_buffer_ready(jpp_client_t* client, jpp_buffer_t* buffer,
                                        bool* out_ready) JPP_MUST_USE;

// Waits until the buffer's contents are ready and returns their status; JPP_CANCELLED,
// which `what` precedes, if interrupted.
jpp_status_t* jpp__wait_buffer(jpp_client_t* client, jpp_buffer_t* buffer,
                               const char* what,
                               const jpp_interrupt_t* interrupt) JPP_MUST_USE;

#endif  // JPP_DEVICE_WAIT_H_
