// Plan: the one door to the planner, from a graph to a proved plan.
//
// In: a graph, and for each of its loops a schedule or what to build or search one from.
// Out: what every part of the planner made, in the order in which it was made, the last
// of them the proof.
//
// Threads: any thread, several plannings at once, also of one graph: graph, options and
// what they point to are only read. A planning stays on its caller's thread, and calls
// back on it.
#ifndef JAXPP_PLAN_H_
#define JAXPP_PLAN_H_

#include "jaxpp/check.h"
#include "jaxpp/search.h"

// What the planner makes, in order.
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

// Where a loop's schedule comes from: the first of these that is not NULL. With none the
// loop's own name is built, as the graph has it.
typedef struct jpp_loop_schedule {
  size_t struct_size;           // sizeof(jpp_loop_schedule_t)
  const jpp_schedule_t* given;  // borrowed, must outlive the result; proved again
  const char* built_in;         // a name, of the loop's sizes
  // The options of a search; its sizes are not read, they are the loop's.
  const jpp_search_options_t* search;
} jpp_loop_schedule_t;

typedef struct jpp_plan_options {
  size_t struct_size;                // sizeof(jpp_plan_options_t)
  uint32_t ranks;                    // 0: as many as the graph says
  uint32_t stages;                   // of loops whose schedule is built; 0: the loop's
  const jpp_loop_schedule_t* loops;  // [graph->num_loops]; NULL: each loop's own name
  bool fuse_steady_state;            // as in jpp_schedule_params_t
  // Activations of 4 KiB or more on a device wait in pinned host memory between the
  // forward and the backward of a stage, except for the last stage.
  bool offload;
  uint32_t channel_slots;  // minimum for each channel; 0: 2
  // Called once the partition is known: out_bytes holds the bytes of every value on one
  // device by the types' shards, [staged->num_values], which it may correct. NULL: they
  // are right. From the caller's thread; its error ends the planning.
  jpp_status_t* (*measure)(void* context, const jpp_staged_t* staged,
                           uint64_t* out_bytes);
  void* context;
  jpp_plan_part_t last;  // from schedule on: nothing behind it is made; 0: all of it
} jpp_plan_options_t;

// Later parts than options->last are NULL.
typedef struct jpp_planned {
  const jpp_graph_t* graph;  // borrowed
  uint32_t ranks;
  bool offload;                            // as in the options
  const jpp_schedule_t* const* schedules;  // [graph->num_loops]
  const jpp_staged_t* staged;
  const jpp_plan_t* plan;
  const jpp_check_report_t* report;
} jpp_planned_t;

// Plans a step: schedules are built and proved, the graph is partitioned by them, and the
// programs are made and proved. The graph must outlive the result, which owns the rest;
// free it with jpp_planned_destroy(). jpp_advise_fit() holds it against memory limits.
//
// JPP_INVALID_ARGUMENT: neither options nor graph say the ranks, or a loop's stages or
// schedule; otherwise the errors of jpp_schedule_build(), jpp_schedule_verify(),
// jpp_partition() and jpp_program_build(). JPP_PROGRAM_ERROR is a defect of the planner:
// its plan failed its proof.
JPP_API jpp_status_t* jpp_plan_graph(const jpp_graph_t* graph,
                                     JPP_OPTIONAL const jpp_plan_options_t* options,
                                     jpp_planned_t** out_planned) JPP_MUST_USE;
// Takes NULL.
JPP_API void jpp_planned_destroy(jpp_planned_t* planned);

// What makes a step the same step, as numbers: processes that run one together compare
// them, and so does a plan that comes back from a file. Costs, lines of the user's code
// and the names of schedules are no part of it.
// Its layout is final.
typedef struct jpp_plan_hashes {
  uint64_t arguments;  // types, names and donation of arguments, types of results
  uint64_t graph;      // ops: kinds, names, operands, types
  uint64_t schedule;   // of all loops, task by task
  uint64_t program;    // tasks, instructions, channels, bytes on devices
} jpp_plan_hashes_t;

// Of a complete plan. The same on every machine, for one version of the library.
JPP_API void jpp_planned_hash(const jpp_planned_t* planned,
                              jpp_plan_hashes_t* out_hashes);
// "arguments", "graph", "schedule" or "program": the first in which they differ, the
// likely cause for the others; NULL: they are equal. Lifetime static.
JPP_API const char* jpp_plan_hashes_difference(const jpp_plan_hashes_t* a,
                                               const jpp_plan_hashes_t* b);

#endif  // JAXPP_PLAN_H_
