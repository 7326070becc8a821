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

// Holds a plan with all its parts against `limits`, [ranks] bytes on each device.
// JPP_OUT_OF_MEMORY if a rank's peak is over its limit, as jpp_check_memory_limit() says
// it, and besides: of the built-in schedules that serve these stages, ranks and
// microbatches, the one with the shortest simulated loops whose own plan fits, or else
// the smallest limit that one fits. Where a value's bytes on a device are not known,
// because it stays inside a task of the plan, the whole value counts.
JPP_API jpp_status_t* jpp_advise_fit(const jpp_planned_t* planned,
                                     const uint64_t* limits) JPP_MUST_USE;

// A search for the schedule of one loop of a step.
typedef struct jpp_advise_search {
  const jpp_graph_t* graph;
  uint32_t loop;
  const jpp_schedule_t* const* schedules;  // [loops]; that of `loop` is not read
  // A plan of the same step under any schedules and numbers of microbatches: what the
  // bytes of values on a device are taken from.
  const jpp_plan_t* like;
  const uint64_t* limits;  // [ranks] bytes on each device; NULL: none
} jpp_advise_search_t;

// jpp_schedule_search(), under limits on all that the step keeps: each schedule that
// would be the best so far is planned, and taken if its plan fits. `options` says the
// rest; its accept and context are not read. JPP_OUT_OF_MEMORY names the smallest limit
// that something of what was tried fits.
JPP_API jpp_status_t* jpp_advise_search(const jpp_advise_search_t* step,
                                        const jpp_search_options_t* options,
                                        jpp_search_result_t* out_result) JPP_MUST_USE;

#endif  // JAXPP_ADVISE_H_
