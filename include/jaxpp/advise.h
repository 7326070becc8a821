// Advice: which schedule would fit where a plan does not.
//
// In: a step that was planned, and limits on the memory of its ranks. Out: the built-in
// schedule that fits them, or the schedule that a search finds. Every candidate is
// planned as a whole, so advice takes about as long as planning all of them.
//
// Threads: as for plans (plan.h).
#ifndef JAXPP_ADVISE_H_
#define JAXPP_ADVISE_H_

#include "jaxpp/plan.h"

// Checks a plan with all its parts against memory limits. JPP_OUT_OF_MEMORY if a peak
// exceeds a limit: the message of jpp_check_memory_limit(), followed by advice. The
// advice is, of the built-in schedules that support these stages, ranks and microbatches,
// the one with the shortest simulated loops whose own plan fits, or else the smallest
// limit that any of them fits. A value that stays inside a task of the plan has no known
// size on a device; all of its bytes count.
JPP_API jpp_status_t* jpp_advise_fit(const jpp_planned_t* planned,
                                     const jpp_memory_limits_t* limits) JPP_MUST_USE;

// --- A search with measured costs -----------------------------------------------------
//
// 1. Plan a trial of the step: the same graph, but with kJppTrialMicrobatches in the
//    loops that have no schedule, under jpp_advise_placeholders().
// 2. Run it: jpp_runtime_measure() (runtime.h) gives the costs of each loop's stages.
// 3. Call jpp_advise_search() for one loop after the other, with the trial's plan as
//    `like`, and placeholders for the loops whose schedules are not found yet.

// A task's first run costs more than the others, so each task runs twice.
enum { kJppTrialMicrobatches = 2 };

// Makes schedules for the loops that have none: where given[l] is NULL,
// jpp_schedule_one_pass() for the loop's microbatches and one stage per mark. `given`:
// [loops], or NULL. `out_made`: [loops], for the caller to destroy; NULL where one was
// given. JPP_MARKS_ERROR for a loop without marks, JPP_INVALID_ARGUMENT unless `loops` is
// the graph's number of loops.
JPP_API jpp_status_t* jpp_advise_placeholders(
    const jpp_graph_t* graph, uint32_t ranks,
    JPP_OPTIONAL const jpp_schedule_t* const* given, uint32_t loops,
    jpp_schedule_t** out_made) JPP_MUST_USE;

// A search for the schedule of one loop of a step.
typedef struct jpp_advise_search {
  const jpp_graph_t* graph;
  uint32_t loop;
  // [loops] the entry of `loop` is not read.
  const jpp_schedule_t* const* schedules;
  // A plan of the same step, under any schedules and numbers of microbatches: the source
  // of the bytes of values on a device.
  const jpp_plan_t* like;
  const jpp_memory_limits_t* limits;  // NULL: none
  const bool* offload;                // as in jpp_plan_options_t
  // As in jpp_plan_options_t, but only if no schedule fits without.
  const jpp_memory_limits_t* offload_over;
} jpp_advise_search_t;

// jpp_schedule_search() with limits on everything that the step keeps: it plans each
// schedule that would be the best so far, and accepts it if its plan fits. The smallest
// limits are tried last. `options` gives all other settings; its accept, context and
// smallest are not read. JPP_OUT_OF_MEMORY names a limit under which every search
// succeeds, whatever its costs: the least memory that a schedule takes which does not
// depend on them.
JPP_API jpp_status_t* jpp_advise_search(const jpp_advise_search_t* step,
                                        const jpp_search_options_t* options,
                                        jpp_search_result_t* out_result) JPP_MUST_USE;

#endif  // JAXPP_ADVISE_H_
