// Recorder: tells the flight recorder (flight/record.h) what the runtime's ranks do.
#ifndef JPP_RUNTIME_RECORDER_H_
#define JPP_RUNTIME_RECORDER_H_

#include "runtime/step/actor.h"

// The part of an instruction that involves another rank; without its text.
jpp_flight_instr_t jpp__recorder_instr(const jpp_plan_t* plan,
                                       const jpp_program_t* program,
                                       const jpp_instr_t* instr);

// With JPP_FLIGHT=FOLDER: creates the runtime's file there, or reports on standard error
// why it cannot, for example on a full disk. Call it once the actors are resolved.
void jpp__recorder_open(jpp_runtime_t* runtime);

#endif  // JPP_RUNTIME_RECORDER_H_
