// The StableHLO of a task, for graphs whose ops are named as in StableHLO: those that
// work element by element, and dynamic_slice for a row of a batch.
#ifndef EXAMPLES_C_STABLEHLO_H_
#define EXAMPLES_C_STABLEHLO_H_

#include <jaxpp/jaxpp.h>

// A module with a function from the task's inputs to its outputs. An input that the plan
// donates lends its memory to an output. Free the text with jpp_text_free().
jpp_status_t* task_code(const jpp_plan_t* plan, uint32_t task, char** out_code);

#endif  // EXAMPLES_C_STABLEHLO_H_
