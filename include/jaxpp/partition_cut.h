// Cut: divides a program without stage marks into pipeline stages.
//
// In: the ops of a forward computation, what each costs, and the values between them.
// Out: a stage for each op. An op is never in an earlier stage than the ops that make its
// operands. The stage that costs most costs as little as possible; of the cuts that come
// within 2 % of that, the one whose boundaries pass the fewest bytes is taken. A value
// passes every boundary between its maker and its last user, as it does in a pipeline.
//
// The best cut of a general program takes exponential time to find. Along one order of
// the ops it takes O(stages * ops): a dynamic program over the positions of the
// boundaries. This is done for the order of the program and for others, in which the ops
// of a branch are together. Then ops move between neighbouring stages as long as that
// makes them more equal.
//
// Threads: any thread.
#ifndef JAXPP_PARTITION_CUT_H_
#define JAXPP_PARTITION_CUT_H_

#include <stddef.h>
#include <stdint.h>

#include "jaxpp/status.h"

typedef struct jpp_cut_program {
  size_t struct_size;  // sizeof(jpp_cut_program_t)
  uint32_t num_ops, num_values, num_uses;
  const double* costs;     // [num_ops] in any unit, in an order in which the ops can run
  const uint32_t* makers;  // [num_values] the op that makes each value
  const uint64_t* bytes;   // [num_values]
  const uint32_t* used;    // [num_uses] a value,
  const uint32_t* users;   // [num_uses] and an op that uses it
} jpp_cut_program_t;

// Writes the stage of each op to out_stages[num_ops]. Each stage has an op, and some
// value passes each boundary. JPP_INVALID_ARGUMENT: an op or value that does not exist, a
// value that is used before it is made, a cost that is negative or not finite, or a
// program that cannot be divided into so many stages.
JPP_API jpp_status_t* jpp_cut_stages(const jpp_cut_program_t* program,
                                     uint32_t num_stages,
                                     uint32_t* out_stages) JPP_MUST_USE;

#endif  // JAXPP_PARTITION_CUT_H_
