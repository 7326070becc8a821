// Candidates: a step planned again under other schedules, to find out how much memory it
// needs.
#ifndef JPP_ADVISE_CANDIDATES_H_
#define JPP_ADVISE_CANDIDATES_H_

#include "jaxpp/advise.h"

// State that all candidates of a step share, and the smallest memory need of any of them.
typedef struct jpp_candidates {
  const jpp_graph_t* graph;
  uint32_t ranks;
  // This and the next two are as in jpp_plan_options_t; 0 or NULL at first.
  uint32_t channel_slots;
  const bool* offload;
  const jpp_memory_limits_t* offload_over;
  const jpp_memory_limits_t* limits;
  // [graph values] on one device; 0: unknown.
  uint64_t* origin_bytes;
  // Name of the candidate that needs least memory; NULL: none yet.
  const char* smallest_name;
  uint64_t smallest;  // its peak on the devices with the largest peak
} jpp_candidates_t;

// Takes the bytes of values from a plan of the step. Deinit it even after an error.
jpp_status_t* jpp__candidates_init(jpp_candidates_t* candidates, const jpp_graph_t* graph,
                                   const jpp_plan_t* like,
                                   const jpp_memory_limits_t* limits) JPP_MUST_USE;
void jpp__candidates_deinit(jpp_candidates_t* candidates);

// Plans the step with the given schedule for each loop, up to its programs.
jpp_status_t* jpp__candidates_plan(const jpp_candidates_t* candidates,
                                   const jpp_schedule_t* const* schedules,
                                   jpp_planned_t** out_planned) JPP_MUST_USE;

// Whether all ranks are within their limits, and the peak on the devices with the largest
// peak; records the smallest such peak. `name` must outlive the candidates.
bool jpp__candidates_fit(jpp_candidates_t* candidates, const jpp_plan_t* plan,
                         const char* name, uint64_t* out_peak);

#endif  // JPP_ADVISE_CANDIDATES_H_
