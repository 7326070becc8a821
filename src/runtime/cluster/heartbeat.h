// Heartbeat: a thread that drives the network while the issuing thread cannot. A plugin
// may run a whole task inside the call that issues it; without this thread, the other
// processes would then count this one as dead.
#ifndef JPP_RUNTIME_HEARTBEAT_H_
#define JPP_RUNTIME_HEARTBEAT_H_

#include <pthread.h>
#include <stdatomic.h>

#include "jaxpp/runtime.h"

typedef struct jpp_heartbeat {
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  pthread_t thread;
  bool running, stopping;
  _Atomic uint64_t rounds;  // how often the issuing thread has driven the network
} jpp_heartbeat_t;

// Call it when the runtime's network is open.
jpp_status_t* jpp__heartbeat_start(jpp_runtime_t* runtime) JPP_MUST_USE;
// Call before the network is closed. Does nothing if the thread was never started.
void jpp__heartbeat_stop(jpp_runtime_t* runtime);

#endif  // JPP_RUNTIME_HEARTBEAT_H_
