// Bare loop: what benchmarks compare the runtime with. It makes the same client calls as
// a step, in the same order, for ranks of one device, and nothing else: no channels, no
// events, no way to say what failed. Not for use.
#ifndef BENCHMARKS_BARE_H_
#define BENCHMARKS_BARE_H_

#include "jaxpp/runtime.h"

typedef struct jpp_bare jpp_bare_t;

// Options as for jpp_runtime_create(); JPP_UNSUPPORTED for more than one device a rank.
jpp_status_t* jpp_bare_create(const jpp_runtime_options_t* options,
                              jpp_bare_t** out_bare) JPP_MUST_USE;
// Takes NULL.
void jpp_bare_destroy(jpp_bare_t* bare);
// As jpp_runtime_call(), on arguments that are where they are needed; waits. After an
// error nothing is cleaned up.
jpp_status_t* jpp_bare_call(jpp_bare_t* bare, const jpp_call_t* call) JPP_MUST_USE;
// Client calls that the step's instructions stand for: all but receives.
uint64_t jpp_bare_instructions(const jpp_bare_t* bare);

#endif  // BENCHMARKS_BARE_H_
