// A naive interpreter: what a step computes, with numbers for arrays. It shares nothing
// with the planner or the checker.
//
// Every op hashes its name and inputs, but for sums, which add modulo 2^64 (so that they
// may be regrouped), and reductions, which are what their names say.
//
// Beside its number each array has bits, as a compiler might round it: a hash of the
// whole task that made it, of its position there and of the bits of all inputs. Copies
// whose bits are equal were made by the same task from equal copies.
#ifndef TESTS_C_INTERPRETER_H_
#define TESTS_C_INTERPRETER_H_

#include "jaxpp/program.h"

// The step as the graph says it, microbatch by microbatch: [num_outputs], to be freed.
uint64_t* interpret_graph(const jpp_graph_t* graph);

typedef enum outcome {
  OUTCOME_SAME,       // every output on every rank is what the graph computes
  OUTCOME_DIFFERENT,  // some output is not, or is missing
  OUTCOME_DRIFTED,    // copies of an output on two ranks may be rounded differently
  OUTCOME_STUCK,      // actors wait for each other for ever
  OUTCOME_BROKEN,     // reads an empty register, leaks, or names what there is not
} outcome_t;

// The step as the programs say it; `expected` is interpret_graph()'s.
outcome_t interpret_plan(const jpp_plan_t* plan, const uint64_t* expected);

#endif  // TESTS_C_INTERPRETER_H_
