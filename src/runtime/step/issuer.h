// Issuer: the loop over the actors of a step that the issuing thread runs, alone or with
// helpers, and its limits.
#ifndef JPP_RUNTIME_ISSUER_H_
#define JPP_RUNTIME_ISSUER_H_

#include "runtime/step/actor.h"

typedef enum jpp_halt {
  JPP_HALT_NO,
  JPP_HALT_FAILED,   // an actor has an error
  JPP_HALT_STUCK,    // no actor can advance
  JPP_HALT_STALLED,  // nothing arrived from other processes for too long
  JPP_HALT_LATE,     // one instruction has waited for too long; all processes are in the
                     // step
} jpp_halt_t;

// Issues `runtime->step` for all actors, until all are done or the step is halted. After
// JPP_HALT_LATE, returns the actor whose instruction is late, else NULL.
const jpp_actor_t* jpp__issuer_run(jpp_runtime_t* runtime);

// The part of thread `thread` of the crew, 0 for the issuing thread: until the step is
// done or halted, issues for actors that no other thread has taken, first for its own
// share of the ranks, whose buffers were allocated by this thread.
void jpp__issuer_share(jpp_runtime_t* runtime, uint32_t thread);

#endif  // JPP_RUNTIME_ISSUER_H_
