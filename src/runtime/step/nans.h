// NaNs: checks the results of every run for NaNs and infinities, for debugging.
#ifndef JPP_RUNTIME_NANS_H_
#define JPP_RUNTIME_NANS_H_

#include "runtime/step/actor.h"

// Waits for the results of the run that was just issued and checks them.
jpp_status_t* jpp__nans_check(const jpp_actor_t* actor,
                              const jpp_actor_instr_t* instr) JPP_MUST_USE;

#endif  // JPP_RUNTIME_NANS_H_
