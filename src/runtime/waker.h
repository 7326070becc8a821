// Waker: the issuing thread's sleep while it has nothing to do but to wait for the
// network or for devices, and its end.
#ifndef JPP_RUNTIME_WAKER_H_
#define JPP_RUNTIME_WAKER_H_

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "jaxpp/status.h"

typedef struct jpp_waker {
  int descriptor;  // an eventfd
  atomic_bool sleeps;
} jpp_waker_t;

jpp_status_t* jpp_waker_open(jpp_waker_t* waker) JPP_MUST_USE;
void jpp_waker_close(jpp_waker_t* waker);

// Any thread, also a signal handler: ends the sleep that has begun, if any.
void jpp_waker_call(jpp_waker_t* waker);

// The issuing thread: from now on a call ends the sleep. What is to be waited for is
// looked at once more in between.
void jpp_waker_begin(jpp_waker_t* waker);
// Sleeps until the call, until `descriptor` is readable (-1: none), or for so long.
void jpp_waker_sleep(jpp_waker_t* waker, int descriptor, int64_t nanoseconds);
// Instead of sleeping, or afterwards.
void jpp_waker_end(jpp_waker_t* waker);

#endif  // JPP_RUNTIME_WAKER_H_
