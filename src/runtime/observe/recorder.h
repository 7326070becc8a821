// Recorder: tells the flight recorder (flight/record.h) what the runtime's ranks do.
#ifndef JPP_RUNTIME_RECORDER_H_
#define JPP_RUNTIME_RECORDER_H_

#include "runtime/step/actor.h"

// The part of an instruction that involves another rank; without its text.
jpp_flight_instr_t jpp__recorder_instr(const jpp_plan_t* plan,
                                       const jpp_program_t* program,
                                       const jpp_instr_t* instr);

// With JPP_FLIGHT=FOLDER: makes the runtime's file there, or says on standard error why
// it cannot, as on a full disk. Actors are resolved.
void jpp__recorder_open(jpp_runtime_t* runtime);

#endif  // JPP_RUNTIME_RECORDER_H_
