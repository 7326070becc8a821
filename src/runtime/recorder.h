// Recorder: tells the flight recorder (flight/record.h) what the runtime's ranks do.
#ifndef JPP_RUNTIME_RECORDER_H_
#define JPP_RUNTIME_RECORDER_H_

#include "runtime/actor.h"

// With JPP_FLIGHT=FOLDER: makes the runtime's file there. Actors are resolved.
jpp_status_t* jpp_recorder_open(jpp_runtime_t* runtime) JPP_MUST_USE;

#endif  // JPP_RUNTIME_RECORDER_H_
