// A naive interpreter that computes a step with numbers in place of arrays. It shares
// nothing with the planner or the checker.
//
// Every op hashes its name and inputs, except sums, which add modulo 2^64 (and may
// therefore be regrouped), linear ops, which multiply, and reductions, which do what
// their names say.
//
// Besides its number each array has bits, which model a compiler's rounding: a hash of
// the task that made it, of its position in the task and of the bits of all inputs.
// Copies whose bits are equal were made by the same task from equal copies.
#ifndef TESTS_C_INTERPRETER_H_
#define TESTS_C_INTERPRETER_H_

#include "jaxpp/program.h"

// Computes the step from the graph, microbatch by microbatch, as [num_outputs]; the
// caller frees it.
uint64_t* interpret_graph(const jpp_graph_t* graph);

typedef enum outcome {
  OUTCOME_SAME,       // every output on every rank equals the graph's
  OUTCOME_DIFFERENT,  // an output differs or is missing
  OUTCOME_DRIFTED,    // copies of an output on two ranks may be rounded differently
  OUTCOME_STUCK,      // actors wait for each other for ever
  OUTCOME_BROKEN,     // reads an empty register, leaks, or names what does not exist
} outcome_t;

// Computes the step from the programs; `expected` is the result of interpret_graph().
outcome_t interpret_plan(const jpp_plan_t* plan, const uint64_t* expected);

#endif  // TESTS_C_INTERPRETER_H_
