// Crew: the threads that issue a step together when the client runs a program inside the
// call that executes it. One thread alone would then run one program at a time.
//
// The issuing thread calls its helpers for every step and waits until all have left it.
// Each of them visits the actors in turn, takes one that no other thread has taken, and
// issues for it. A thread that could issue nothing in a whole round sleeps until another
// one has; the last one that is awake looks once more instead, and thus finds a deadlock.
#ifndef JPP_RUNTIME_CREW_H_
#define JPP_RUNTIME_CREW_H_

#include <pthread.h>
#include <stdatomic.h>

#include "jaxpp/runtime.h"

typedef struct jpp_helper jpp_helper_t;

typedef struct jpp_crew {
  uint32_t num_helpers;   // that were started; 0: the issuing thread works alone
  jpp_helper_t* helpers;  // [num_helpers]
  pthread_mutex_t mutex;  // guards the fields below, except as they say
  pthread_cond_t changed;
  bool open;                  // helpers may join the step
  bool stopping;              // helpers end
  uint32_t joined;            // threads in the step
  uint64_t calls;             // steps for which the helpers were called
  _Atomic uint32_t asleep;    // threads; read without the mutex
  _Atomic uint64_t progress;  // grows with each visit that issued something; no mutex
} jpp_crew_t;

void jpp__crew_init(jpp_crew_t* crew);
// Starts the helpers: for a client that runs programs inside the call, and a runtime
// whose ranks have one device each and are all in this process, one fewer than there are
// cores or ranks; else none.
jpp_status_t* jpp__crew_start(jpp_runtime_t* runtime) JPP_MUST_USE;
void jpp__crew_stop(jpp_crew_t* crew);
void jpp__crew_deinit(jpp_crew_t* crew);

// Calls the helpers to the runtime's step: each one runs jpp__issuer_share().
void jpp__crew_call(jpp_crew_t* crew);
// Waits until the helpers have left the step.
void jpp__crew_dismiss(jpp_crew_t* crew);

// Tells sleeping threads that an actor advanced, or that the step has ended.
void jpp__crew_note_progress(jpp_crew_t* crew);
// Waits for progress beyond `seen`. False: all others sleep already.
bool jpp__crew_await_progress(jpp_crew_t* crew, uint64_t seen);

#endif  // JPP_RUNTIME_CREW_H_
