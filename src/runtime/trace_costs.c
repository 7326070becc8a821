// Estimates the stages' costs from a traced step, as the simulator and the search take
// them.
#include "jaxpp/runtime.h"

static void add_run(const jpp_task_t* task, double took, jpp_cost_t* cost) {
  switch (task->kind) {
    case JPP_TASK_FWD:
      cost->forward += took;
      break;
    case JPP_TASK_BWD:
      cost->backward += took / 2;
      cost->weight += took / 2;
      break;
    case JPP_TASK_BWD_I:
      cost->backward += took;
      break;
    case JPP_TASK_BWD_W:
      cost->weight += took;
      break;
    default:
      break;
  }
}

void jpp_trace_costs(const jpp_trace_t* trace, uint32_t loop, jpp_cost_t* out_costs) {
  const jpp_staged_t* staged = trace->plan->staged;
  double runs = staged->graph->loops[loop].microbatches;
  for (uint32_t s = 0; s < staged->loops[loop].stages; ++s) {
    out_costs[s] = (jpp_cost_t){0};
  }
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    const jpp_trace_run_t* run = &trace->runs[i];
    const jpp_task_t* task = &staged->tasks[run->task];
    double took = (double)(run->end - run->start) / 1e6;
    if (task->loop == loop) add_run(task, took / runs, &out_costs[task->stage]);
  }
}
