// Plans a graph text for tests, with every part of the planner.
#ifndef TESTS_C_PLAN_UTIL_H_
#define TESTS_C_PLAN_UTIL_H_

#include "jaxpp/plan.h"

// How to plan; 0 and NULL: as the text says.
typedef struct plan_options {
  const char* schedule;
  uint32_t stages, ranks, slots;
  uint32_t microbatches;  // of every loop
} plan_options_t;

enum { PLAN_MAX_LOOPS = 4 };

typedef struct planned {
  jpp_graph_t* graph;                     // owned
  jpp_schedule_t* given[PLAN_MAX_LOOPS];  // owned; NULL where the planner built one
  jpp_planned_t* made;                    // owned, as what follows
  uint32_t ranks;
  const jpp_schedule_t* const* schedules;
  const jpp_staged_t* staged;
  const jpp_plan_t* plan;
  const jpp_check_report_t* report;
  bool offload;  // every value counts as 4 KiB, and activations are offloaded
} planned_t;

// For jpp_plan_options_t.offload.
extern const bool kAllRanks[8];

// Free *out_planned with plan_free(), also after a failure.
jpp_status_t* plan_text(const char* text, const plan_options_t* options,
                        planned_t* out_planned);
// Plans a file of tests/golden/graphs, by its name without ".jpp".
jpp_status_t* plan_file(const char* name, const plan_options_t* options,
                        planned_t* out_planned);
// Plans the graph with the given schedules, on planned->ranks.
jpp_status_t* plan_scheduled(planned_t* planned, uint32_t slots);
void plan_free(planned_t* planned);

// Returns the text of tests/golden/graphs/NAME.jpp, which the caller frees; fails the
// test if there is none.
char* graph_text(const char* name);
// The same with so many microbatches in every loop.
char* graph_text_of(const char* name, uint32_t microbatches);

// The graphs in that folder that can be planned; NULL after the last one.
extern const char* const kGraphs[];

#endif  // TESTS_C_PLAN_UTIL_H_
