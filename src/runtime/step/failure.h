// Failure: error messages that say what failed and where.
#ifndef JPP_RUNTIME_FAILURE_H_
#define JPP_RUNTIME_FAILURE_H_

#include "runtime/step/actor.h"

enum { kJppPlaceSize = 256 };

// An instruction of the program: "rank 2, instruction 14, bwd_2 of microbatch 3".
void jpp__failure_describe(const jpp_actor_t* actor, uint32_t at,
                           char text[kJppPlaceSize]);
void jpp__failure_describe_instr(const jpp_plan_t* plan, uint32_t rank, uint32_t at,
                                 char text[kJppPlaceSize]);
// The same text without the rank: "instruction 14, bwd_2 of microbatch 3".
const char* jpp__failure_behind_rank(const char* text);
// Prefixes an error with its place: "rank 2, instruction 14, bwd_2 of microbatch 3".
jpp_status_t* jpp__failure_locate(const jpp_actor_t* actor, uint32_t instr,
                                  jpp_status_t* status);
// "rank 2, output 3 ('loss')".
jpp_status_t* jpp__failure_locate_output(const jpp_actor_t* actor, uint32_t output,
                                         jpp_status_t* status);
// A message other than the one that the receiver expected. Without its place.
jpp_status_t* jpp__failure_mismatch(const jpp_actor_t* actor,
                                    const jpp_actor_instr_t* instr, uint64_t found_tag);
// Names what every unfinished actor waits for: in a deadlock, or from other processes.
jpp_status_t* jpp__failure_stuck(jpp_runtime_t* runtime);
jpp_status_t* jpp__failure_stalled(jpp_runtime_t* runtime);
// The same for an actor that has waited too long although all processes are in the step.
jpp_status_t* jpp__failure_late(const jpp_actor_t* actor);

#endif  // JPP_RUNTIME_FAILURE_H_
