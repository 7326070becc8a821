// Advice: what would fit where a plan does not.
//
// In: a step that was planned, and limits on the memory of its ranks. Out: the built-in
// schedule that fits them, or one that a search finds. Every candidate is planned as a
// whole, so advice takes about as long as planning all of them.
//
// Threads: as for plans (plan.h).
#ifndef JAXPP_ADVISE_H_
#define JAXPP_ADVISE_H_

#include "jaxpp/plan.h"

// Holds a plan with all its parts against limits. JPP_OUT_OF_MEMORY if a peak is over
// one, as jpp_check_memory_limit() says it, and besides: of the built-in schedules that
// serve these stages, ranks and microbatches, the one with the shortest simulated loops
// whose own plan fits, or else the smallest limit that one fits. Where a value's bytes on
// a device are not known, because it stays inside a task of the plan, the whole value
// counts.
JPP_API jpp_status_t* jpp_advise_fit(const jpp_planned_t* planned,
                                     const jpp_memory_limits_t* limits) JPP_MUST_USE;

// --- A search with measured costs -----------------------------------------------------
//
// 1. Plan a trial of the step: the same graph, but with kJppTrialMicrobatches in the
//    loops that have no schedule, under jpp_advise_placeholders().
// 2. Run it: jpp_runtime_measure() (runtime.h) gives the costs of each loop's stages.
// 3. jpp_advise_search(), a loop after the other, `like` the trial's plan, with
//    placeholders of the step itself in the place of what is not found yet.

// Each task runs twice: its first run costs more than the others.
enum { kJppTrialMicrobatches = 2 };

// Schedules for the loops that have none: where given[l] is NULL, jpp_schedule_one_pass()
// for the loop's microbatches and as many stages as it has marks. `given`: [loops], or
// NULL. `out_made`: [loops], for the caller to destroy; NULL where one was given.
// JPP_MARKS_ERROR for a loop without marks, JPP_INVALID_ARGUMENT unless the graph has
// `loops` of them.
JPP_API jpp_status_t* jpp_advise_placeholders(
    const jpp_graph_t* graph, uint32_t ranks,
    JPP_OPTIONAL const jpp_schedule_t* const* given, uint32_t loops,
    jpp_schedule_t** out_made) JPP_MUST_USE;

// A search for the schedule of one loop of a step.
typedef struct jpp_advise_search {
  const jpp_graph_t* graph;
  uint32_t loop;
  const jpp_schedule_t* const* schedules;  // [loops]; that of `loop` is not read
  // A plan of the same step under any schedules and numbers of microbatches: what the
  // bytes of values on a device are taken from.
  const jpp_plan_t* like;
  const jpp_memory_limits_t* limits;  // NULL: none
} jpp_advise_search_t;

// jpp_schedule_search(), under limits on all that the step keeps: each schedule that
// would be the best so far is planned, and taken if its plan fits. `options` says the
// rest; its accept and context are not read. JPP_OUT_OF_MEMORY names the smallest limit
// that something of what was tried fits.
JPP_API jpp_status_t* jpp_advise_search(const jpp_advise_search_t* step,
                                        const jpp_search_options_t* options,
                                        jpp_search_result_t* out_result) JPP_MUST_USE;

#endif  // JAXPP_ADVISE_H_
