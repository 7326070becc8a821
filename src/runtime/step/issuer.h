// Issuer: the loop of the issuing thread over the actors of a step, and when it gives up.
#ifndef JPP_RUNTIME_ISSUER_H_
#define JPP_RUNTIME_ISSUER_H_

#include "runtime/step/actor.h"

typedef enum jpp_halt {
  JPP_HALT_NO,
  JPP_HALT_FAILED,   // an actor has an error
  JPP_HALT_STUCK,    // no actor can go on
  JPP_HALT_STALLED,  // nothing has arrived from other processes for too long
  JPP_HALT_LATE,     // one instruction has waited for too long; all processes are in the
                     // step
} jpp_halt_t;

// Issues `runtime->step` for all actors, until all are done or the step is halted. Gives
// the actor whose instruction is late after JPP_HALT_LATE, else NULL.
const jpp_actor_t* jpp__issuer_run(jpp_runtime_t* runtime);

#endif  // JPP_RUNTIME_ISSUER_H_
