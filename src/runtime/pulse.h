// Pulse: keeps the network moving while the issuing thread can not. A plugin may run a
// task in the call that issues it, for as long as that takes; other processes are not to
// think meanwhile that this one is dead.
#ifndef JPP_RUNTIME_PULSE_H_
#define JPP_RUNTIME_PULSE_H_

#include <pthread.h>
#include <stdatomic.h>

#include "jaxpp/runtime.h"

typedef struct jpp_pulse {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  pthread_t thread;
  bool running, stopping;
  _Atomic uint64_t rounds;  // of progress that the issuing thread has made
} jpp_pulse_t;

// Of a runtime with a network, once that is open.
jpp_status_t* jpp_pulse_start(jpp_runtime_t* runtime) JPP_MUST_USE;
// Before the network is closed. One that has not begun is fine.
void jpp_pulse_stop(jpp_runtime_t* runtime);

#endif  // JPP_RUNTIME_PULSE_H_
