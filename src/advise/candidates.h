// Candidates: a step planned anew under other schedules, to see what it would take.
#ifndef JPP_ADVISE_CANDIDATES_H_
#define JPP_ADVISE_CANDIDATES_H_

#include "jaxpp/advise.h"

// What all candidates of a step share, and the least that one of them needs.
typedef struct jpp_candidates {
  const jpp_graph_t* graph;
  uint32_t ranks;
  const jpp_memory_limits_t* limits;
  uint64_t* origin_bytes;     // [graph values] on one device, 0: not known
  const char* smallest_name;  // of the candidate that needs least; NULL: none yet
  uint64_t smallest;          // its peak on the devices that have to hold most
} jpp_candidates_t;

// Takes the bytes of values from a plan of the step. Deinit it in any case.
jpp_status_t* jpp_candidates_init(jpp_candidates_t* candidates, const jpp_graph_t* graph,
                                  const jpp_plan_t* like,
                                  const jpp_memory_limits_t* limits) JPP_MUST_USE;
void jpp_candidates_deinit(jpp_candidates_t* candidates);

// Plans the step under schedules, a loop each, up to its programs.
jpp_status_t* jpp_candidates_plan(const jpp_candidates_t* candidates,
                                  const jpp_schedule_t* const* schedules,
                                  jpp_planned_t** out_planned) JPP_MUST_USE;

// Whether all ranks are within their limits, and the peak on the devices that have to
// hold most; keeps the smallest. `name` must outlive the candidates.
bool jpp_candidates_fit(jpp_candidates_t* candidates, const jpp_plan_t* plan,
                        const char* name, uint64_t* out_peak);

#endif  // JPP_ADVISE_CANDIDATES_H_
