// Wakeup: lets the issuing thread sleep while it can only wait for the network or for
// devices, and lets any thread end that sleep.
#ifndef JPP_RUNTIME_WAKEUP_H_
#define JPP_RUNTIME_WAKEUP_H_

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "jaxpp/status.h"

typedef struct jpp_wakeup {
  int descriptor;  // an eventfd
  atomic_bool sleeps;
} jpp_wakeup_t;

jpp_status_t* jpp__wakeup_open(jpp_wakeup_t* wakeup) JPP_MUST_USE;
void jpp__wakeup_close(jpp_wakeup_t* wakeup);

// Ends the current sleep, if any. Any thread; safe in a signal handler.
void jpp__wakeup_call(jpp_wakeup_t* wakeup);

// Issuing thread: from now on a call ends the next sleep. Check once more what you are
// about to wait for, then sleep.
void jpp__wakeup_begin(jpp_wakeup_t* wakeup);
// Sleeps until a call, until `descriptor` is readable (-1: none), or for the given time.
void jpp__wakeup_sleep(jpp_wakeup_t* wakeup, int descriptor, int64_t nanoseconds);
// Matches jpp__wakeup_begin(), whether or not the thread slept.
void jpp__wakeup_end(jpp_wakeup_t* wakeup);

#endif  // JPP_RUNTIME_WAKEUP_H_
