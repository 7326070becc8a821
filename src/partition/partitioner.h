// The partitioner's working state, passed from pass to pass. Each pass fills in what
// later passes read; jpp_partition() has their order.
#ifndef JPP_PARTITION_PARTITIONER_H_
#define JPP_PARTITION_PARTITIONER_H_

#include "base/vec.h"
#include "jaxpp/partition.h"

typedef struct jpp_staged_storage {
  jpp_staged_t staged;
  jpp_arena_t arena;
} jpp_staged_storage_t;

// The segment of an op in a body. Stage segments are numbered in the order in which they
// can run: fwd_s is s, bwd_s is 2 * stages - 1 - s.
enum {
  JPP_SEGMENT_OUTER = UINT32_MAX,      // outside every loop, or leaves its loop
  JPP_SEGMENT_CLONE = UINT32_MAX - 1,  // recomputed in each task that needs it
  // A mark, an op that nothing uses, or one that equals another; does not run.
  JPP_SEGMENT_ALIAS = UINT32_MAX - 2,
  JPP_SEGMENT_OPEN = UINT32_MAX - 3,  // not assigned yet
  JPP_SEGMENT_FIRST_SPECIAL = UINT32_MAX - 3,
};

typedef struct jpp_partition_made {
  uint32_t op, task;
} jpp_partition_made_t;

typedef struct jpp_partitioner {
  const jpp_graph_t* graph;
  const jpp_partition_options_t* options;
  jpp_arena_t* arena;  // the arena of the result
  jpp_arena_t scratch;

  // The graph's tables, extended by the planner's own values and ops.
  JPP_VEC(jpp_value_t) values;
  JPP_VEC(jpp_op_t) ops;  // inputs look through marks
  jpp_u32_vec_t origins;  // [values] as in jpp_staged_t

  // [graph values] the value without the marks that it passed, and of equal ones the
  // first.
  uint32_t* alias;
  uint32_t* uses;     // [graph values] by ops, loop results and outputs of the step
  bool* unused;       // [graph ops] of a body, whose results nothing uses
  uint32_t* segment;  // [graph ops]
  // [graph ops] a cloned op that ops outside the loop need as well.
  bool* outer_copy;
  // [graph ops] the task that provides the results of a cloned op to others; JPP_NONE:
  // each task that uses them runs the op.
  uint32_t* handed_by;
  bool* weight_part;  // [graph ops] runs in BWD_W; only if the schedule has that
  // [stages of the loop at work] takes no longer than a call; NULL: no stage does.
  bool* small_stages;

  JPP_VEC(jpp_task_t) tasks;
  JPP_VEC(jpp_partition_made_t) made;  // ops made for stage tasks
  JPP_VEC(jpp_accumulator_t) accumulators;
  JPP_VEC(jpp_partition_note_t) notes;
  jpp_staged_loop_t* loops;
  // Ops outside the loops and loop ops, in an order in which they can run.
  jpp_u32_vec_t outer;

  // Values and ops outside the loops, as jpp__partition_place() places them.
  uint32_t words;   // number of uint64_t words of a rank set
  uint64_t* need;   // [values * words] ranks that use the value
  uint64_t* run;    // [ops * words] ranks that run the op
  uint32_t* phase;  // [ops]
  // [ops] makes arrays of more than a few numbers, and depends on no loop.
  bool* arrays;
} jpp_partitioner_t;

// --- Passes, in order -----------------------------------------------------------------

// alias.c: copies the tables and makes uses bypass marks.
jpp_status_t* jpp__partition_resolve_marks(jpp_partitioner_t* p) JPP_MUST_USE;
// classify.c: finds the ops of a body that leave it, and those that are recomputed where
// needed.
jpp_status_t* jpp__partition_classify(jpp_partitioner_t* p) JPP_MUST_USE;
// merge.c: merges equal ops among those that leave it.
jpp_status_t* jpp__partition_merge_hoisted(jpp_partitioner_t* p) JPP_MUST_USE;
// classify.c: finds the cheap ops that the remaining hoisted ops need.
void jpp__partition_find_outer_copies(jpp_partitioner_t* p);
// stages.c: assigns a segment to every other op of a body.
jpp_status_t* jpp__partition_assign_stages(jpp_partitioner_t* p,
                                           uint32_t loop) JPP_MUST_USE;
// small.c: saves calls, arguments and results of stages that do little.
jpp_status_t* jpp__partition_shrink_calls(jpp_partitioner_t* p,
                                          uint32_t loop) JPP_MUST_USE;
// halves.c: finds the part of each backward that makes weight gradients.
jpp_status_t* jpp__partition_split_backwards(jpp_partitioner_t* p,
                                             uint32_t loop) JPP_MUST_USE;
// notes.c: finds ops of a loop to which a scalar draws arrays of other ranks.
jpp_status_t* jpp__partition_note_stage_moves(jpp_partitioner_t* p,
                                              uint32_t loop) JPP_MUST_USE;
// tasks.c: creates the stage tasks of a loop, still empty.
jpp_status_t* jpp__partition_make_tasks(jpp_partitioner_t* p, uint32_t loop) JPP_MUST_USE;
// reduce.c: creates the accumulators of a loop's results, and the sums after the loop.
jpp_status_t* jpp__partition_reduce(jpp_partitioner_t* p, uint32_t loop) JPP_MUST_USE;
// tasks.c: fills in the ops and inputs of the stage tasks.
jpp_status_t* jpp__partition_fill_tasks(jpp_partitioner_t* p) JPP_MUST_USE;
// share.c: divides stage tasks so that one part equals another stage's task.
jpp_status_t* jpp__partition_share_stages(jpp_partitioner_t* p) JPP_MUST_USE;
// place.c: decides the ranks and the phase of every op outside the loops.
jpp_status_t* jpp__partition_place(jpp_partitioner_t* p) JPP_MUST_USE;
// outer.c: decides levels, and creates the tasks outside the loops.
jpp_status_t* jpp__partition_make_outer_tasks(jpp_partitioner_t* p) JPP_MUST_USE;
// pack.c: sends scalars of these tasks together.
jpp_status_t* jpp__partition_pack_scalars(jpp_partitioner_t* p) JPP_MUST_USE;
// share.c: divides these tasks like those of stages.
jpp_status_t* jpp__partition_share_outer(jpp_partitioner_t* p) JPP_MUST_USE;
// outputs.c: finds the outputs of every task, once all inputs are known.
jpp_status_t* jpp__partition_find_outputs(jpp_partitioner_t* p) JPP_MUST_USE;

// notes.c: called for an op outside the loops once it is placed; `bytes` of its operands
// must be sent to `rank`, where it runs.
jpp_status_t* jpp__partition_note_moves(jpp_partitioner_t* p, uint32_t op, uint32_t rank,
                                        uint64_t bytes) JPP_MUST_USE;
// notes.c: called for an op that gives input and weight gradients together, with its
// share of the stage's backward.
jpp_status_t* jpp__partition_note_unsplit(jpp_partitioner_t* p, uint32_t op,
                                          uint32_t stage, float share) JPP_MUST_USE;

// --- Shared by passes -----------------------------------------------------------------

// The task of a body op with a stage segment.
uint32_t jpp__partition_task_of(const jpp_partitioner_t* p, uint32_t op);
// Inputs are copied.
jpp_status_t* jpp__partition_add_op(jpp_partitioner_t* p, const jpp_op_t* op,
                                    uint32_t* out_op) JPP_MUST_USE;
// A value with the type and sharding of `like`.
jpp_status_t* jpp__partition_add_value(jpp_partitioner_t* p, uint32_t like, uint32_t loop,
                                       uint32_t producer,
                                       uint32_t* out_value) JPP_MUST_USE;
// Adds an op and its only output, a value like `like` in the body of `loop` (JPP_NONE:
// outside the loops).
jpp_status_t* jpp__partition_define(jpp_partitioner_t* p, const jpp_op_t* op,
                                    uint32_t like, uint32_t loop, uint32_t* out_op,
                                    uint32_t* out_value) JPP_MUST_USE;
// Makes a value one-dimensional.
jpp_status_t* jpp__partition_flatten(jpp_partitioner_t* p, uint32_t value,
                                     uint64_t elements, uint64_t bytes) JPP_MUST_USE;
// The leaves of a tree of JPP_OP_ADD whose inner sums have no other use, left to right.
typedef struct jpp_add_tree {
  jpp_u32_vec_t leaves;  // value ids
  jpp_u32_vec_t adds;    // op ids inside the tree, root included
  jpp_u32_vec_t stack;
} jpp_add_tree_t;
// If no sum in `loop`'s body (JPP_NONE: outside the loops) makes the value, it is its own
// only leaf.
jpp_status_t* jpp__add_tree_collect(const jpp_partitioner_t* p, uint32_t root_value,
                                    uint32_t loop, jpp_add_tree_t* tree) JPP_MUST_USE;
void jpp__add_tree_deinit(jpp_add_tree_t* tree);

static inline bool jpp__segment_is_stage(uint32_t segment) {
  return segment < JPP_SEGMENT_FIRST_SPECIAL;
}

static inline bool jpp__segment_is_backward(uint32_t stages, uint32_t segment) {
  return jpp__segment_is_stage(segment) && segment >= stages;
}

// The segment of the stage's backward; of a backward's segment, the stage.
static inline uint32_t jpp__segment_backward(uint32_t stages, uint32_t stage) {
  return 2 * stages - 1 - stage;
}

static inline uint32_t jpp__segment_stage(uint32_t stages, uint32_t segment) {
  return segment < stages ? segment : jpp__segment_backward(stages, segment);
}

static inline const jpp_op_t* jpp__task_op(const jpp_partitioner_t* p,
                                           const jpp_task_t* task, uint32_t at) {
  return &p->ops.data[task->ops[at]];
}

// The op of the loop's body that makes the value. JPP_NONE if none does: the value comes
// from outside, or the planner has added the op that makes it.
static inline uint32_t jpp__producer_in_body(const jpp_partitioner_t* p,
                                             const jpp_loop_t* loop, uint32_t value) {
  uint32_t op = p->values.data[value].producer;
  return op >= loop->first_op && op < loop->op ? op : JPP_NONE;
}

// The same, if a stage runs the op.
static inline uint32_t jpp__producer_in_stage(const jpp_partitioner_t* p,
                                              const jpp_loop_t* loop, uint32_t value) {
  uint32_t op = jpp__producer_in_body(p, loop, value);
  return op != JPP_NONE && jpp__segment_is_stage(p->segment[op]) ? op : JPP_NONE;
}

static inline uint64_t* jpp__need_at(const jpp_partitioner_t* p, uint32_t value) {
  return p->need + (size_t)value * p->words;
}
static inline uint64_t* jpp__run_at(const jpp_partitioner_t* p, uint32_t op) {
  return p->run + (size_t)op * p->words;
}
static inline bool jpp__ranks_has(const uint64_t* set, uint32_t rank) {
  return set[rank / 64] >> (rank % 64) & 1;
}
// The lowest rank of the set; JPP_NONE if it is empty.
static inline uint32_t jpp__ranks_first(const uint64_t* set, uint32_t words) {
  for (uint32_t w = 0; w < words; ++w) {
    if (set[w]) return w * 64 + (uint32_t)__builtin_ctzll(set[w]);
  }
  return JPP_NONE;
}
static inline void jpp__ranks_unite(uint64_t* set, const uint64_t* other,
                                    uint32_t words) {
  for (uint32_t w = 0; w < words; ++w) set[w] |= other[w];
}
static inline void jpp__ranks_intersect(uint64_t* set, const uint64_t* other,
                                        uint32_t words) {
  for (uint32_t w = 0; w < words; ++w) set[w] &= other[w];
}
static inline void jpp__ranks_add(uint64_t* set, uint32_t rank) {
  set[rank / 64] |= UINT64_C(1) << (rank % 64);
}
static inline void jpp__ranks_add_all(uint64_t* set, const uint32_t* ranks,
                                      uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) jpp__ranks_add(set, ranks[i]);
}

#endif  // JPP_PARTITION_PARTITIONER_H_
