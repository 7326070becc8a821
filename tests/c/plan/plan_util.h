// A graph text taken through the whole planner, for tests.
#ifndef TESTS_C_PLAN_UTIL_H_
#define TESTS_C_PLAN_UTIL_H_

#include "jaxpp/check.h"

// What to plan with; 0 and NULL: what the text says.
typedef struct plan_options {
  const char* schedule;
  uint32_t stages, ranks, slots;
} plan_options_t;

// One loop's schedule is enough for all loops of the same microbatches: each gets its
// own.
enum { PLAN_MAX_LOOPS = 4 };

typedef struct planned {
  jpp_graph_t* graph;
  uint32_t ranks;
  jpp_schedule_t* schedules[PLAN_MAX_LOOPS];
  jpp_staged_t* staged;
  jpp_plan_t* plan;
  jpp_check_report_t* report;
} planned_t;

// Each goes as far as it can; what was made is in *out_planned also after a failure.
jpp_status_t* plan_text(const char* text, const plan_options_t* options,
                        planned_t* out_planned);
// A file of tests/golden/graphs, by its name without ".jpp".
jpp_status_t* plan_file(const char* name, const plan_options_t* options,
                        planned_t* out_planned);
// Schedules to plan.
jpp_status_t* plan_scheduled(planned_t* planned, uint32_t slots);
void plan_free(planned_t* planned);

// The text of tests/golden/graphs/NAME.jpp, to be freed; fails the test if there is none.
char* graph_text(const char* name);

// The graphs there that can be planned; NULL behind the last.
extern const char* const kGraphs[];

#endif  // TESTS_C_PLAN_UTIL_H_
