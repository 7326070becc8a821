// The program builder's working state, passed from pass to pass:
//
//   order.c     all task runs of the step, in one order in which they can run
//   sites.c     the ranks that make or take each value, and its instances there
//   emit.c      each rank's runs, sends and receives, without operands
//   repeat.c    the part of each rank's list that repeats from microbatch to microbatch
//   draft.c     one rank's operands: virtual registers, one for each definition
//   donate.c    which inputs are donated, and to which output
//   finish.c    deletions, real registers, peak bytes
//
// A step has many more operands than instructions. So only one rank's operands exist at a
// time: donate.c and finish.c draft the ranks one after the other. And of the repetitions
// in the steady state of a loop, only the first two are drafted: finish.c derives the
// registers of the others (repeat.c).
#ifndef JPP_PROGRAM_BUILDER_H_
#define JPP_PROGRAM_BUILDER_H_

#include "base/vec.h"
#include "jaxpp/program.h"

typedef struct jpp_plan_storage {
  jpp_plan_t plan;
  jpp_arena_t arena;
} jpp_plan_storage_t;

// The beginning or end of a task. The task's results are sent at its end.
typedef struct jpp_event_item {
  uint32_t task;
  uint32_t microbatch;  // JPP_NONE outside
  bool is_end;
} jpp_event_item_t;
typedef JPP_VEC(jpp_event_item_t) jpp_event_items_t;

// The use of a value on one rank: whether the rank makes it (or, for an argument,
// receives it from the caller) and whether a task there takes it.
typedef struct jpp_site {
  uint32_t rank;
  bool makes, takes;  // neither: no further sites of the value follow
  // The rank leaves it as an output.
  bool leaves;
  // Index of the value's first instance on the rank. A value has one instance per
  // microbatch, or only one; a value that moves has twice as many: those in its own
  // memory, then those in device memory. An accumulator's state, next and final value
  // share an instance: each run replaces the previous run's result.
  uint64_t first_instance;
  uint64_t first_arrival;  // for a value that other ranks send
  uint64_t first_copy;     // for a value that moves
} jpp_site_t;

// A virtual register: one definition on one actor.
typedef struct jpp_virtual {
  uint64_t instance;  // its index in `definitions`
  uint32_t value;
  uint32_t last_use;  // drafted instruction; JPP_NONE: never used
  jpp_memory_t memory;
  bool borrowed;  // an argument that the caller keeps
  bool constant;
  bool output;  // left for the caller at the end
} jpp_virtual_t;

// A message that has been sent and not yet received.
typedef struct jpp_message_draft {
  uint32_t value, microbatch;
} jpp_message_draft_t;

typedef struct jpp_channel_draft {
  jpp_plan_channel_t channel;
  JPP_VEC(jpp_message_draft_t) messages;  // all messages of the step, in order
  size_t received;
} jpp_channel_draft_t;

// An instruction without its operands.
typedef struct jpp_instr_draft {
  uint8_t kind;         // jpp_instr_kind_t; no DELETE
  uint32_t target;      // as in jpp_instr_t
  uint32_t microbatch;  // JPP_NONE outside loops
  uint32_t value;       // of SEND, RECV and MOVE
} jpp_instr_draft_t;
typedef JPP_VEC(jpp_instr_draft_t) jpp_instr_drafts_t;

// The indices in `definitions` of the virtual registers of a value's instances.
typedef struct jpp_place {
  uint64_t first;
  uint32_t value;
  bool every;  // one instance per microbatch
  jpp_memory_t memory;
} jpp_place_t;

// The steady state of a loop on one rank: instructions that repeat with later
// microbatches. Those of all repetitions but the first two are omitted from the draft.
typedef struct jpp_repetition {
  uint32_t first;    // the first instruction of the first repetition
  uint32_t length;   // instructions in each
  uint32_t shift;    // microbatches from one to the next
  uint32_t loop;     // whose microbatches they are
  uint32_t omitted;  // number of omitted repetitions
} jpp_repetition_t;

// A virtual register at the end of the first drafted repetition, and the one in its place
// at the end of the second.
typedef struct jpp_successor {
  uint32_t from, to;
} jpp_successor_t;

// The operands of one rank's drafted instructions.
typedef struct jpp_rank_draft {
  jpp_u32_vec_t operands;  // virtual registers: the operands of all instructions in order
  JPP_VEC(jpp_virtual_t) virtuals;
  JPP_VEC(jpp_program_input_t) inputs;
  JPP_VEC(jpp_program_constant_t) constants;
  JPP_VEC(jpp_program_output_t) outputs;
  // Of the virtual registers that a repetition leaves to later instructions.
  JPP_VEC(jpp_successor_t) successors;
  // Number of virtual registers at the ends of the first and the second repetition.
  uint32_t made[2];
} jpp_rank_draft_t;

typedef struct jpp_program_builder {
  const jpp_staged_t* staged;
  const jpp_program_options_t* options;
  jpp_arena_t* arena;  // the arena of the plan
  jpp_arena_t scratch;
  const uint64_t* value_bytes;
  jpp_event_items_t events;
  uint32_t* first_site;  // [values + 1]
  jpp_site_t* sites;
  uint64_t most_instances;  // on any rank
  uint64_t num_arrivals, num_copies;
  jpp_instr_drafts_t* instrs;     // [ranks]
  bool drafts_all;                // nothing is omitted
  jpp_repetition_t* repetitions;  // [ranks]
  jpp_rank_draft_t draft;         // the rank that was drafted last
  // [most_instances] virtual registers; JPP_NONE: none yet, and everywhere between
  // drafts.
  uint32_t* definitions;
  // [microbatches of all loops] virtual registers of microbatch numbers; JPP_NONE:
  // unused.
  uint32_t* constants;
  uint32_t* first_constant;  // [loops + 1]
  bool* takes_index;         // [tasks] the task takes the number of the microbatch
  // [values] the initial value of an accumulator's state.
  uint32_t* init_of;
  // [tasks] places of the inputs, then of the outputs; NULL: not known yet.
  const jpp_place_t** places;
  JPP_VEC(jpp_channel_draft_t) channels;
  jpp_task_binding_t* bindings;  // [tasks]
} jpp_program_builder_t;

// jpp_program_build() with complete options. `drafts_all`: every repetition is drafted,
// which takes longer and gives the same plan.
jpp_status_t* jpp__program_build(const jpp_staged_t* staged,
                                 const jpp_program_options_t* options, bool drafts_all,
                                 jpp_plan_t** out_plan) JPP_MUST_USE;

jpp_status_t* jpp__program_order(jpp_program_builder_t* b) JPP_MUST_USE;
jpp_status_t* jpp__program_find_sites(jpp_program_builder_t* b) JPP_MUST_USE;
jpp_status_t* jpp__program_emit(jpp_program_builder_t* b) JPP_MUST_USE;
jpp_status_t* jpp__program_find_repetitions(jpp_program_builder_t* b) JPP_MUST_USE;
// Replaces b->draft with the draft of `rank`.
jpp_status_t* jpp__program_draft(jpp_program_builder_t* b, uint32_t rank) JPP_MUST_USE;
jpp_status_t* jpp__program_donate(jpp_program_builder_t* b) JPP_MUST_USE;
jpp_status_t* jpp__program_finish(jpp_program_builder_t* b,
                                  jpp_plan_t* plan) JPP_MUST_USE;

// Of a rank's drafted instructions: their number, and one's index in b->instrs[rank].
uint32_t jpp__drafted_count(const jpp_program_builder_t* b, uint32_t rank);
uint32_t jpp__drafted_index(const jpp_program_builder_t* b, uint32_t rank, uint32_t at);
// The drafted instruction after the first repetition, and the one after the second.
uint32_t jpp__repetition_end(const jpp_repetition_t* repetition, uint32_t which);
// Whether the instruction belongs to a microbatch of the loop.
bool jpp__instr_of_loop(const jpp_program_builder_t* b, const jpp_instr_draft_t* instr,
                        uint32_t loop);
// Finds the successors in b->draft. *out_same: every virtual register that is used later
// has one, so the omitted repetitions are like the second one.
jpp_status_t* jpp__repetition_prove(jpp_program_builder_t* b, uint32_t rank,
                                    bool* out_same) JPP_MUST_USE;

// The numbers of args and of results among an instruction's operands.
uint32_t jpp__instr_num_args(const jpp_program_builder_t* b,
                             const jpp_instr_draft_t* instr);
uint32_t jpp__instr_num_results(const jpp_program_builder_t* b,
                                const jpp_instr_draft_t* instr);

// The rank that sends a value to others: the lowest rank that makes it.
uint32_t jpp__program_source(const jpp_program_builder_t* b, uint32_t value);
// NULL if the rank neither makes nor takes the value.
jpp_site_t* jpp__program_site(const jpp_program_builder_t* b, uint32_t rank,
                              uint32_t value);
// The number of instances of a value on a rank, in one memory.
uint32_t jpp__program_instances(const jpp_program_builder_t* b, uint32_t value);
// Whether the value lives in host memory, so that tasks take a copy of it.
bool jpp__program_moves(const jpp_program_builder_t* b, uint32_t value);
// Whether the value has one instance per microbatch.
bool jpp__value_of_microbatch(const jpp_program_builder_t* b, uint32_t value);

// log.c: logs the finished plan.
void jpp__program_log(const jpp_plan_t* plan, const jpp_program_options_t* options);

#endif  // JPP_PROGRAM_BUILDER_H_
