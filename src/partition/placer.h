// Rule 5 of partition.h in two files: homes.c gives values their homes, the ranks that
// can compute them without a transfer, and place.c decides from these which ranks run an
// op.
#ifndef JPP_PARTITION_PLACER_H_
#define JPP_PARTITION_PLACER_H_

#include <string.h>

#include "partition/partitioner.h"

typedef struct jpp_placer {
  jpp_partitioner_t* p;
  uint64_t small_bytes;
  uint64_t* home;  // [values * words] for anchored values
  // [values] depends on a loop's results, or is small and made of a large value.
  bool* anchored;
  // [values] anchored, and made on every rank that needs it, or if none does on the first
  // rank of its home.
  bool* everywhere;
  // [values] anchored, but depends on no loop: it is made when it is first needed.
  bool* floats;
  uint64_t* weight;  // [values] how much an operand influences where its users run
  bool* is_output;   // [values] left on the ranks that make it
  bool* is_next;     // [values] of these, one that the next step takes
  uint64_t* left;    // [values * words] for outputs, the ranks that the user wants
  // [values] the first phase in which a value that depends on a loop exists; for other
  // values the first phase that needs them.
  uint32_t* phase;
  uint64_t* scratch;    // [words]
  jpp_u32_vec_t order;  // the new p->outer
} jpp_placer_t;

// homes.c: fills `home`, `anchored`, `everywhere`, `floats`, `weight`, `phase` of
// anchored values and `order`. Needs of stage tasks must be known.
jpp_status_t* jpp__placer_find_homes(jpp_placer_t* c) JPP_MUST_USE;
// homes.c: stores in c->scratch the ranks that have all operands with a fixed home or, if
// there are none, those that have the largest operand or a term.
void jpp__placer_home_of_operands(const jpp_placer_t* c, const jpp_op_t* op);

static inline uint64_t* jpp__home_at(const jpp_placer_t* c, uint32_t value) {
  return c->home + (size_t)value * c->p->words;
}

static inline void jpp__all_ranks(const jpp_placer_t* c, uint64_t* set) {
  memset(set, 0, c->p->words * sizeof(*set));
  for (uint32_t r = 0; r < c->p->options->ranks; ++r) jpp__ranks_add(set, r);
}

static inline bool jpp__is_small_value(const jpp_placer_t* c, uint32_t value) {
  return c->p->values.data[value].bytes <= c->small_bytes;
}

static inline bool jpp__is_array(const jpp_placer_t* c, uint32_t value) {
  return c->p->values.data[value].type.ndim > 0;
}

static inline bool jpp__is_fixed(const jpp_placer_t* c, uint32_t value) {
  return c->anchored[value] && !c->everywhere[value];
}

// Whether the op makes results of a loop.
static inline bool jpp__ends_loop(const jpp_partitioner_t* p, uint32_t op) {
  uint8_t kind = p->ops.data[op].kind;
  return kind == JPP_OP_LOOP || kind == JPP_OP_ACCUMULATE || kind == JPP_OP_UNPACK;
}

#endif  // JPP_PARTITION_PLACER_H_
