// Partition: assigns each op of the step to a task, and each task to ranks.
//
// In: a graph, and which rank each stage runs on. Out: a staged graph, whose tasks are
//
//  - in a loop, for each stage: its forward (fwd_2) and its backward (bwd_2), or the two
//    parts of the backward: input gradients (bwd_i_2) and weight gradients (bwd_w_2).
//    They run once per microbatch.
//  - outside: before_loop_, between_loops_ and after_loop_ tasks, named NUMBER_RANK. They
//    run once per step. When several ranks make a value, the same task makes it on each
//    of them: same ops, same inputs, same outputs, and so one module.
//
// The rules (docs/partition.md walks through them):
//  1. Forward marks cut the body in order: fwd_k has the ops that mark k needs and that
//     no earlier mark took. The backward marks cut the rest from the last stage to the
//     first. An op that no mark needs joins the task that makes its latest operand, and
//     so does an op that moves a value out of device memory, even if a mark needs it. An
//     op of the backward that makes arrays of scalars and of values from outside joins
//     its first user instead. A stage that has all ops of an inner stage, and more, runs
//     these ops as a separate task, so that the stages share its module. Where a schedule
//     with whole backwards runs a forward many times a step, and that forward takes no
//     longer than a call, the backward computes again what it needs of it, if it then
//     takes fewer values and the graph is not sharded. If the last stage's backward
//     always follows its forward, both are one task instead: bwd_k, and fwd_k has no ops.
//  2. Every task that needs a cheap op of the loop index and of values from outside
//     computes it again. Other ops that only use values from outside leave the loop.
//  3. If the terms of a summed result come from several tasks (a weight that stages
//     share), each task has an accumulator, and the parts are summed after the loop. A
//     loop of one microbatch has no accumulators: its tasks make its results. A small
//     stage has one accumulator for all of its small sums of a dtype, if the graph is not
//     sharded. A sum of zeros depends on no loop and has no accumulator.
//  4. Outside the loops, copies of a value are equal to the bit: one rank makes it and
//     sends it, or all ranks that make it run the same task on inputs that are equal too.
//  5. An op outside the loops that depends on no loop runs on every rank that needs its
//     result, unless it makes small values of a large one: then a rank that holds the
//     large one runs it and sends them. One that depends on a loop runs where @place
//     says, or else on ranks that have all of its operands or, if there are none, all of
//     its arrays. If no rank has these either, a small op runs on each rank that needs
//     its result, a large sum on all ranks that have a term, and any other large op on
//     the ranks that have its largest operand. Scalars of a dtype that one task makes for
//     the same tasks of other ranks are sent in one array.
//  6. A result that becomes an argument of the next step is left on all ranks that need
//     it there; if it depends on no loop, each of these ranks computes it.
//
// Threads: any thread, several at once, also on the same graph, which is only read. Any
// number of threads may read a finished staged graph; destroy it when no thread uses it.
#ifndef JAXPP_PARTITION_H_
#define JAXPP_PARTITION_H_

#include "jaxpp/graph.h"
#include "jaxpp/task.h"

typedef struct jpp_task {
  const char* name;  // "fwd_0", "bwd_i_2", "after_loop_0_3"
  uint8_t kind;      // jpp_task_kind_t
  uint32_t rank;
  uint32_t loop, stage;  // JPP_NONE outside loops
  // Outside loops: tasks of phase p run before loop p, those of the last phase after all.
  uint32_t phase;
  // The first task with the same ops, inputs and outputs, of the lowest rank that runs
  // them; its own id if there is no other. Such tasks donate the same inputs.
  uint32_t repeats;
  // The task that must follow this one directly, in a loop wherever a schedule runs the
  // stage; JPP_NONE: none.
  uint32_t next_part;
  // The task with the same ops on operands of the same types whose module this task
  // shares, provided that both can donate the same inputs; JPP_NONE: none known.
  uint32_t pattern;
  uint32_t num_ops, num_inputs, num_outputs;
  const uint32_t* ops;      // staged op ids, in an order that can run
  const uint32_t* inputs;   // value ids
  const uint32_t* outputs;  // value ids
  float cost;
} jpp_task_t;

// The running reduction of a result in a loop of several microbatches. Once per
// microbatch, `task` computes `next` from `state`; the first state is `init`, the last
// one `final`. If the state has several sums in one array, `result` is the first of
// these.
typedef struct jpp_accumulator {
  uint32_t loop, result, task;
  uint32_t init, state, next, final;  // value ids
} jpp_accumulator_t;

typedef enum jpp_value_scope {
  JPP_SCOPE_STEP,        // one instance per step
  JPP_SCOPE_MICROBATCH,  // one instance per microbatch
  JPP_SCOPE_STATE,       // an accumulator's state or next
} jpp_value_scope_t;

// A set of ranks: bit r % 64 of word r / 64.
typedef const uint64_t* jpp_rank_set_t;
JPP_API bool jpp_rank_set_has(jpp_rank_set_t set, uint32_t rank);

typedef struct jpp_staged_value {
  uint32_t value;
  jpp_rank_set_t ranks;
} jpp_staged_value_t;

typedef struct jpp_staged_loop {
  uint32_t stages;
  bool has_backward;           // false: forward only, `backward` and `weight` are NULL
  bool split_backward;         // false: `weight` is NULL
  const uint32_t* stage_rank;  // [stages]
  const uint32_t* forward;     // [stages] task ids
  const uint32_t* backward;    // [stages] task ids of bwd, or of bwd_i when split
  const uint32_t* weight;      // [stages] task ids of bwd_w
} jpp_staged_loop_t;

// A cost of the partition that a user may not expect and may want to avoid.
typedef enum jpp_partition_note_kind {
  // An op outside the loops uses arrays of several ranks: `bytes` are sent.
  JPP_NOTE_MOVES,
  // One op computes input and weight gradients, so the weight gradients cannot be
  // deferred: `share` of the backward of `stage`.
  JPP_NOTE_UNSPLIT,
} jpp_partition_note_kind_t;

typedef struct jpp_partition_note {
  uint8_t kind;    // jpp_partition_note_kind_t
  uint32_t op;     // the first such op on its source line
  uint32_t rank;   // JPP_NOTE_MOVES: the destination
  uint64_t bytes;  // per step
  uint32_t stage;  // JPP_NOTE_UNSPLIT
  float share;     // 0 to 1, of the stage's cost
} jpp_partition_note_t;

typedef struct jpp_staged {
  const jpp_graph_t* graph;  // borrowed: must outlive this
  uint32_t ranks;
  // The graph's values and ops under their own ids, followed by those that the planner
  // made. Inputs of these ops look through marks.
  uint32_t num_values, num_ops, num_tasks, num_accumulators;
  const jpp_value_t* values;
  const jpp_op_t* ops;
  // [num_values] jpp_value_scope_t.
  const uint8_t* scopes;
  // [num_values] For a value that the planner made: the value of the graph that it is a
  // part of, with the same type and sharding; for several values in one array, the first
  // of these. For a value of the graph: the value itself.
  const uint32_t* origins;
  const jpp_task_t* tasks;
  const jpp_accumulator_t* accumulators;
  const jpp_staged_loop_t* loops;  // [graph->num_loops]
  // [graph->num_args] The ranks on which each is passed.
  const jpp_staged_value_t* args;
  // [graph->num_outputs] The ranks on which each is left.
  const jpp_staged_value_t* outputs;
  uint32_t num_notes;
  const jpp_partition_note_t* notes;
} jpp_staged_t;

typedef struct jpp_partition_options {
  size_t struct_size;  // sizeof(jpp_partition_options_t)
  uint32_t ranks;
  const jpp_loop_placement_t* loops;  // [graph->num_loops]
  uint64_t small_bytes;               // the limit of "small" in rule 5; 0: 4096
} jpp_partition_options_t;

// The graph is borrowed and must outlive the result.
JPP_API jpp_status_t* jpp_partition(const jpp_graph_t* graph,
                                    const jpp_partition_options_t* options,
                                    jpp_staged_t** out_staged) JPP_MUST_USE;
JPP_API void jpp_staged_destroy(jpp_staged_t* staged);
// Whether a value is several values in one array of one dimension.
JPP_API bool jpp_staged_is_packed(const jpp_staged_t* staged, uint32_t value);
// The cost of one microbatch in a stage, in the unit of the graph's costs. It includes
// all parts of the stage's tasks.
JPP_API jpp_cost_t jpp_staged_stage_cost(const jpp_staged_t* staged, uint32_t loop,
                                         uint32_t stage);

// Blocks of ops of a task that follow each other and compute the same, each from other
// values of the same types: the layers of a stage, or the updates of its weights.
typedef struct jpp_repeat {
  uint32_t first;   // position of the first block's first op
  uint32_t length;  // ops in a block
  uint32_t count;   // blocks, at least 2
} jpp_repeat_t;
// Finds the repeats of a task, so that the ops of a block can be compiled as one
// function. `ops` gets the task's ops, [num_ops], in an order that can run and in which
// the blocks follow each other. `repeats`, room for [num_ops / 2], gets `*out_count` of
// them, ascending and disjoint.
JPP_API jpp_status_t* jpp_staged_find_repeats(const jpp_staged_t* staged, uint32_t task,
                                              uint32_t* ops, jpp_repeat_t* repeats,
                                              uint32_t* out_count) JPP_MUST_USE;
// One note as a sentence that begins with the user's line; free with jpp_text_free().
JPP_API jpp_status_t* jpp_staged_print_note(const jpp_staged_t* staged, uint32_t note,
                                            char** out_text) JPP_MUST_USE;
// Text; free with jpp_text_free().
JPP_API jpp_status_t* jpp_staged_print(const jpp_staged_t* staged,
                                       char** out_text) JPP_MUST_USE;

#endif  // JAXPP_PARTITION_H_
