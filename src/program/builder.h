// The program builder's working state, handed from pass to pass:
//
//   order.c     all task runs of the step in one order that can run
//   sites.c     for each value, the ranks that make it and those that take it, and its
//               instances there
//   emit.c      instructions over virtual registers, one for each definition
//   donate.c    which inputs give their memory to an output
//   finish.c    deletions, real registers, peak bytes
#ifndef JPP_PROGRAM_BUILDER_H_
#define JPP_PROGRAM_BUILDER_H_

#include "base/vec.h"
#include "jaxpp/program.h"

typedef struct jpp_plan_storage {
  jpp_plan_t plan;
  jpp_arena_t arena;
} jpp_plan_storage_t;

// A task begins or ends. Its results are sent when it ends.
typedef struct jpp_event_item {
  uint32_t task;
  uint32_t microbatch;  // JPP_NONE outside
  bool is_end;
} jpp_event_item_t;
typedef JPP_VEC(jpp_event_item_t) jpp_event_items_t;

// Where a value is made (or given, for an argument) and taken in.
typedef struct jpp_site {
  uint32_t rank;
  bool makes, takes;        // neither: the value has no further sites
  uint64_t first_instance;  // of one a microbatch, or of only one
} jpp_site_t;

// A value of one microbatch (or of the step) on one rank.
typedef struct jpp_instance {
  uint32_t definition;  // virtual register; JPP_NONE: not made or received yet
  uint32_t coming;      // channel of the message that brings it; JPP_NONE: none
} jpp_instance_t;

// A virtual register: one definition on one actor.
typedef struct jpp_virtual {
  uint32_t value;
  uint32_t last_use;  // instruction; JPP_NONE: never used
  bool borrowed;      // an argument that the caller keeps
  bool constant;
  bool output;  // left for the caller at the end
} jpp_virtual_t;

// A message that is sent and not yet received.
typedef struct jpp_message_draft {
  uint32_t value, microbatch;
} jpp_message_draft_t;

typedef struct jpp_channel_draft {
  jpp_plan_channel_t channel;
  JPP_VEC(jpp_message_draft_t) messages;  // all of the step, in order
  size_t received;
} jpp_channel_draft_t;

typedef struct jpp_actor_draft {
  JPP_VEC(jpp_instr_t) instrs;
  jpp_u32_vec_t operands;  // virtual registers
  JPP_VEC(jpp_virtual_t) virtuals;
  JPP_VEC(jpp_program_input_t) inputs;
  JPP_VEC(jpp_program_constant_t) constants;
  JPP_VEC(jpp_program_output_t) outputs;
} jpp_actor_draft_t;

typedef struct jpp_program_builder {
  const jpp_staged_t* staged;
  const jpp_program_options_t* options;
  jpp_arena_t* arena;  // of the plan
  jpp_arena_t scratch;
  const uint64_t* value_bytes;
  jpp_event_items_t events;
  uint32_t* first_site;  // [values + 1]
  jpp_site_t* sites;
  jpp_instance_t* instances;
  uint32_t* accumulator_of;   // [values] the accumulator that a value is the `next` of
  jpp_actor_draft_t* actors;  // [ranks]
  uint32_t* channel_at;       // [ranks * ranks] by source, then destination
  JPP_VEC(jpp_channel_draft_t) channels;
  jpp_task_binding_t* bindings;  // [tasks]
} jpp_program_builder_t;

jpp_status_t* jpp__program_order(jpp_program_builder_t* b) JPP_MUST_USE;
jpp_status_t* jpp__program_find_sites(jpp_program_builder_t* b) JPP_MUST_USE;
jpp_status_t* jpp__program_emit(jpp_program_builder_t* b) JPP_MUST_USE;
jpp_status_t* jpp__program_donate(jpp_program_builder_t* b) JPP_MUST_USE;
jpp_status_t* jpp__program_finish(jpp_program_builder_t* b,
                                  jpp_plan_t* plan) JPP_MUST_USE;

void jpp__actor_draft_deinit(jpp_actor_draft_t* actor);
// The rank that sends a value to others: the lowest one that makes it.
uint32_t jpp__program_source(const jpp_program_builder_t* b, uint32_t value);
// A value on a rank in a microbatch (any, for values that are made once a step); NULL if
// the rank neither makes nor takes it.
jpp_instance_t* jpp__program_instance(const jpp_program_builder_t* b, uint32_t rank,
                                      uint32_t value, uint32_t microbatch);

// log.c: logs the finished plan.
void jpp__program_log(const jpp_plan_t* plan, const jpp_program_options_t* options);

#endif  // JPP_PROGRAM_BUILDER_H_
