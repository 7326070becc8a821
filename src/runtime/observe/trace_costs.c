// Estimates the stages' costs from traced steps, in the form that the simulator and the
// search take.
#include "base/alloc.h"
#include "base/null.h"
#include "jaxpp/runtime.h"
#include "runtime/step/state.h"

enum { kMeasuredRuns = 4 };

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

jpp_status_t* jpp_trace_costs(const jpp_trace_t* trace, uint32_t loop, uint32_t count,
                              jpp_cost_t* out_costs) {
  JPP_RETURN_IF_NULL(trace, out_costs);
  const jpp_staged_t* staged = trace->plan->staged;
  if (loop >= staged->graph->num_loops) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "expected a loop below %u, found %u",
                           staged->graph->num_loops, loop);
  }
  JPP_RETURN_IF_ERROR(jpp__check_count("the costs of a loop's stages",
                                       staged->loops[loop].stages, count));
  double runs = staged->graph->loops[loop].microbatches;
  for (uint32_t s = 0; s < count; ++s) out_costs[s] = (jpp_cost_t){0};
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    const jpp_trace_run_t* run = &trace->runs[i];
    const jpp_task_t* task = &staged->tasks[run->task];
    double took = (double)(run->end - run->start) / 1e6;
    if (task->loop == loop) add_run(task, took / runs, &out_costs[task->stage]);
  }
  return NULL;
}

// --- Measuring ------------------------------------------------------------------------

static uint32_t count_stages(const jpp_staged_t* staged) {
  uint32_t stages = 0;
  for (uint32_t l = 0; l < staged->graph->num_loops; ++l) {
    stages += staged->loops[l].stages;
  }
  return stages;
}

static jpp_status_t* run_once(jpp_runtime_t* runtime, jpp_array_t* const* args,
                              const jpp_interrupt_t* interrupt, jpp_array_t** results) {
  const jpp_graph_t* graph = runtime->plan->staged->graph;
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = args,
                     .num_args = graph->num_args,
                     .results = results,
                     .num_results = graph->num_outputs,
                     .interrupt = interrupt};
  JPP_RETURN_IF_ERROR(jpp_runtime_call(runtime, &call));
  jpp_status_t* status = jpp_runtime_await(runtime, interrupt);
  for (uint32_t o = 0; o < runtime->plan->staged->graph->num_outputs; ++o) {
    jpp_array_release(results[o]);
  }
  return status;
}

// `of_run` has room for as many costs as `sums`.
static jpp_status_t* add_costs(const jpp_trace_t* trace, jpp_cost_t* of_run,
                               jpp_cost_t* sums) {
  const jpp_staged_t* staged = trace->plan->staged;
  uint32_t first = 0;
  for (uint32_t l = 0; l < staged->graph->num_loops; ++l) {
    uint32_t stages = staged->loops[l].stages;
    JPP_RETURN_IF_ERROR(jpp_trace_costs(trace, l, stages, of_run + first));
    first += stages;
  }
  for (uint32_t s = 0; s < first; ++s) {
    sums[s].forward += of_run[s].forward / kMeasuredRuns;
    sums[s].backward += of_run[s].backward / kMeasuredRuns;
    sums[s].weight += of_run[s].weight / kMeasuredRuns;
  }
  return NULL;
}

static jpp_status_t* measure(jpp_runtime_t* runtime, jpp_array_t* const* args,
                             const jpp_interrupt_t* interrupt, jpp_array_t** results,
                             jpp_cost_t* of_run, jpp_cost_t* out_costs) {
  JPP_RETURN_IF_ERROR(run_once(runtime, args, interrupt, results));
  jpp_runtime_set_tracing(runtime, true);
  for (int run = 0; run < kMeasuredRuns; ++run) {
    JPP_RETURN_IF_ERROR(run_once(runtime, args, interrupt, results));
    const jpp_trace_t* trace = jpp_runtime_last_trace(runtime);
    if (!trace) return jpp_status_make(JPP_INTERNAL_ERROR, "a trial left no trace");
    JPP_RETURN_IF_ERROR(add_costs(trace, of_run, out_costs));
  }
  return NULL;
}

jpp_status_t* jpp_runtime_measure(jpp_runtime_t* runtime, jpp_array_t* const* args,
                                  const jpp_interrupt_t* interrupt, uint32_t count,
                                  jpp_cost_t* out_costs) {
  JPP_RETURN_IF_NULL(runtime, args, out_costs);
  const jpp_staged_t* staged = runtime->plan->staged;
  uint32_t stages = count_stages(staged);
  JPP_RETURN_IF_ERROR(jpp__check_count("the costs of all stages", stages, count));
  for (uint32_t s = 0; s < stages; ++s) out_costs[s] = (jpp_cost_t){0};
  jpp_cost_t* of_run = NULL;
  jpp_array_t** results = NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(stages, &of_run);
  if (!status) status = JPP_ALLOC_ARRAY(staged->graph->num_outputs, &results);
  if (!status) status = measure(runtime, args, interrupt, results, of_run, out_costs);
  jpp_free(of_run);
  jpp_free(results);
  return status;
}
