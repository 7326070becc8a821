// Plan: the single entry to the planner, from a graph to a proved plan.
//
// In: a graph, and for each of its loops a schedule or what to build or search one from.
// Out: the results of all parts of the planner in order, the last of them the proof.
//
// Threads: any thread, several plannings at once, also of the same graph: they only read
// the graph, the options and what these point to. A planning runs on its caller's thread
// and calls back on it.
#ifndef JAXPP_PLAN_H_
#define JAXPP_PLAN_H_

#include "jaxpp/check.h"
#include "jaxpp/search.h"

// The parts of a plan, in the order in which the planner makes them.
typedef enum jpp_plan_part {
  JPP_PART_GRAPH,
  JPP_PART_SCHEDULE,
  JPP_PART_PARTITION,
  JPP_PART_PROGRAM,
  JPP_PART_CHECK,
  JPP_PART_COUNT,
} jpp_plan_part_t;

// "graph", "schedule", "partition", "program", "check"; lifetime static. NULL for an
// unknown part.
JPP_API const char* jpp_plan_part_name(jpp_plan_part_t part);

// Where a loop's schedule comes from: the first of these that is not NULL. If all are
// NULL, the schedule that the graph names for the loop is built.
typedef struct jpp_loop_schedule {
  size_t struct_size;           // sizeof(jpp_loop_schedule_t)
  const jpp_schedule_t* given;  // borrowed, must outlive the result; verified again
  // The name of a schedule to build for the loop's sizes.
  const char* built_in;
  // Options of a search; the loop's sizes replace theirs.
  const jpp_search_options_t* search;
} jpp_loop_schedule_t;

typedef struct jpp_plan_options {
  size_t struct_size;  // sizeof(jpp_plan_options_t)
  uint32_t ranks;      // 0: the graph's number
  // Stages of loops whose schedule is built; 0: the loop's own number.
  uint32_t stages;
  // [graph->num_loops]; NULL: the schedules that the graph names.
  const jpp_loop_schedule_t* loops;
  bool fuse_steady_state;  // as in jpp_schedule_params_t
  // [ranks] whose activations of 4 KiB or more on a device wait in pinned host memory
  // between the forward and the backward of a stage, except for the last stage; NULL:
  // none.
  const bool* offload;
  // Further ranks do so if their devices exceed these limits; NULL: none.
  const jpp_memory_limits_t* offload_over;
  uint32_t channel_slots;  // minimum for each channel; 0: 2
  // Called once the partition is known: out_bytes holds the bytes of every value on one
  // device according to the types' shards, [staged->num_values], which the callback may
  // correct. NULL: they need no correction. Called on the caller's thread; its error ends
  // the planning.
  jpp_status_t* (*measure)(void* context, const jpp_staged_t* staged,
                           uint64_t* out_bytes);
  void* context;
  jpp_plan_part_t last;  // schedule or a later part: planning stops after it; 0: check
} jpp_plan_options_t;

// Parts after options->last are NULL.
typedef struct jpp_planned {
  const jpp_graph_t* graph;  // borrowed
  uint32_t ranks;
  uint32_t channel_slots;                  // as in jpp_plan_options_t
  const bool* offload;                     // [ranks] that offload activations
  const jpp_schedule_t* const* schedules;  // [graph->num_loops]
  const jpp_staged_t* staged;
  const jpp_plan_t* plan;
  const jpp_check_report_t* report;
} jpp_planned_t;

// Plans a step: builds and verifies the schedules, partitions the graph accordingly, and
// builds and proves the programs. The graph must outlive the result, which owns
// everything else; free it with jpp_planned_destroy(). jpp_advise_fit() checks it against
// memory limits.
//
// JPP_INVALID_ARGUMENT: neither the options nor the graph give the ranks, or a loop's
// stages or schedule; otherwise the errors of jpp_schedule_build(),
// jpp_schedule_verify(), jpp_partition() and jpp_program_build(). JPP_PROGRAM_ERROR
// reports a bug in the planner: its plan failed its proof.
JPP_API jpp_status_t* jpp_plan_graph(const jpp_graph_t* graph,
                                     JPP_OPTIONAL const jpp_plan_options_t* options,
                                     jpp_planned_t** out_planned) JPP_MUST_USE;
// Takes NULL.
JPP_API void jpp_planned_destroy(jpp_planned_t* planned);

// The identity of a step as numbers: processes that run a step together compare them, and
// loading compares a plan with the one that was saved. They ignore costs, lines of the
// user's code and the names of schedules. Its layout is final.
typedef struct jpp_plan_hashes {
  uint64_t arguments;  // types, names and donation of arguments, types of results
  uint64_t graph;      // ops: kinds, names, operands, types
  uint64_t schedule;   // of all loops' task lists
  uint64_t program;    // tasks, instructions, channels, bytes on devices
} jpp_plan_hashes_t;

// Hashes a complete plan. With one version of the library, the result is the same on
// every machine.
JPP_API void jpp_planned_hash(const jpp_planned_t* planned,
                              jpp_plan_hashes_t* out_hashes);
// "arguments", "graph", "schedule" or "program": the first hash that differs, which is
// likely to be the cause of the others; NULL: all are equal. Lifetime static.
JPP_API const char* jpp_plan_hashes_difference(const jpp_plan_hashes_t* a,
                                               const jpp_plan_hashes_t* b);

#endif  // JAXPP_PLAN_H_
