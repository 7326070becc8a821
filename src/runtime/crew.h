// Crew: the threads that issue, and how they stop.
#ifndef JPP_RUNTIME_CREW_H_
#define JPP_RUNTIME_CREW_H_

#include <pthread.h>
#include <stdatomic.h>

#include "runtime/actor.h"

typedef enum jpp_halt {
  JPP_HALT_NO,
  JPP_HALT_FAILED,   // an actor has an error
  JPP_HALT_STUCK,    // no actor can go on
  JPP_HALT_STALLED,  // nothing has come from other processes for too long
  JPP_HALT_LATE,     // the same for an instruction, and all of them are in the step
} jpp_halt_t;

// Issue thread `index` issues for actors index, index + count, ...
typedef struct jpp_issuer {
  jpp_runtime_t* runtime;
  uint32_t index;
  pthread_t thread;  // of all but issuer 0, which is the issuing thread
  // The runtime's `progress` when the last round that issued nothing began, or one of the
  // special values in crew.c.
  _Atomic uint64_t idle_since;
} jpp_issuer_t;

typedef struct jpp_crew {
  uint32_t count;  // issuers, the issuing thread included
  uint32_t started;
  jpp_issuer_t* issuers;
  const jpp_actor_t* late;  // of a step halted for it: who waits for too long
  pthread_mutex_t mutex;    // of the rest
  pthread_cond_t changed;
  uint64_t step;     // incremented to begin a step
  uint32_t working;  // issuers that have not finished it, without the issuing thread
  bool stopping;
} jpp_crew_t;

jpp_status_t* jpp_crew_start(jpp_runtime_t* runtime, uint32_t count) JPP_MUST_USE;
void jpp_crew_stop(jpp_runtime_t* runtime);
// Issues the step at hand for all actors, until all are done or it is halted.
void jpp_crew_issue(jpp_runtime_t* runtime);

#endif  // JPP_RUNTIME_CREW_H_
