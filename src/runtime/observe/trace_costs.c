// Estimates the stages' costs from traced steps, in the form that the simulator and the
// search take.
#include <math.h>

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

// --- Equal tasks ----------------------------------------------------------------------

// The runs of a task and of the tasks that run the same executable.
typedef struct task_sample {
  uint64_t count;
  double sum, squares;  // ms
} task_sample_t;

static void add_runs(const jpp_trace_t* trace, task_sample_t* samples) {
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    const jpp_trace_run_t* run = &trace->runs[i];
    double took = (double)(run->end - run->start) / 1e6;
    task_sample_t* sample = &samples[run->task];
    ++sample->count;
    sample->sum += took;
    sample->squares += took * took;
  }
}

// Adds the runs of equal tasks to the first of them, whose number is in firsts[task].
static void join_equal_tasks(const jpp_runtime_t* runtime, task_sample_t* samples,
                             uint32_t* firsts) {
  const jpp_staged_t* staged = runtime->plan->staged;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_executable_t* executable = runtime->calls[t].executable;
    firsts[t] = 0;
    while (firsts[t] < t && (!executable || !samples[t].count ||
                             runtime->calls[firsts[t]].executable != executable ||
                             !samples[firsts[t]].count)) {
      ++firsts[t];
    }
    if (firsts[t] == t) continue;
    task_sample_t* first = &samples[firsts[t]];
    first->count += samples[t].count;
    first->sum += samples[t].sum;
    first->squares += samples[t].squares;
  }
}

// Costs and spreads of all loops' stages, one loop after the other.
static void sum_stages(const jpp_runtime_t* runtime, const task_sample_t* samples,
                       const uint32_t* firsts, jpp_cost_t* costs, jpp_cost_t* spreads) {
  const jpp_staged_t* staged = runtime->plan->staged;
  uint32_t first_stage = 0;
  for (uint32_t l = 0; l < staged->graph->num_loops; ++l) {
    double microbatches = staged->graph->loops[l].microbatches;
    for (uint32_t t = 0; t < staged->num_tasks; ++t) {
      const jpp_task_t* task = &staged->tasks[t];
      const task_sample_t* sample = &samples[firsts[t]];
      if (task->loop != l || !sample->count) continue;
      double mean = sample->sum / (double)sample->count;
      double variance = sample->squares / (double)sample->count - mean * mean;
      double share = runtime->plan->bindings[t].runs / microbatches;
      uint32_t stage = first_stage + task->stage;
      add_run(task, mean * share, &costs[stage]);
      add_run(task, sqrt(fmax(variance, 0)) * share, &spreads[stage]);
    }
    first_stage += staged->loops[l].stages;
  }
}

// --- Trial runs -----------------------------------------------------------------------

typedef struct trial {
  jpp_array_t** results;   // [outputs]
  task_sample_t* samples;  // [tasks]
  uint32_t* firsts;        // [tasks]
} trial_t;

static jpp_status_t* run_trial(jpp_runtime_t* runtime, jpp_array_t* const* args,
                               const jpp_interrupt_t* interrupt, trial_t* trial) {
  JPP_RETURN_IF_ERROR(run_once(runtime, args, interrupt, trial->results));
  jpp_runtime_set_tracing(runtime, true);
  for (int run = 0; run < kMeasuredRuns; ++run) {
    JPP_RETURN_IF_ERROR(run_once(runtime, args, interrupt, trial->results));
    const jpp_trace_t* trace = jpp_runtime_last_trace(runtime);
    if (!trace) return jpp_status_make(JPP_INTERNAL_ERROR, "a trial left no trace");
    add_runs(trace, trial->samples);
  }
  return NULL;
}

jpp_status_t* jpp_runtime_measure(jpp_runtime_t* runtime, jpp_array_t* const* args,
                                  const jpp_interrupt_t* interrupt, uint32_t count,
                                  jpp_cost_t* out_costs, jpp_cost_t* out_spreads) {
  JPP_RETURN_IF_NULL(runtime, args, out_costs, out_spreads);
  const jpp_staged_t* staged = runtime->plan->staged;
  JPP_RETURN_IF_ERROR(
      jpp__check_count("the costs of all stages", count_stages(staged), count));
  for (uint32_t s = 0; s < count; ++s) out_costs[s] = out_spreads[s] = (jpp_cost_t){0};
  trial_t trial = {0};
  jpp_status_t* status = JPP_ALLOC_ARRAY(staged->graph->num_outputs, &trial.results);
  if (!status) status = JPP_ALLOC_ARRAY(staged->num_tasks, &trial.samples);
  if (!status) status = JPP_ALLOC_ARRAY(staged->num_tasks, &trial.firsts);
  if (!status) status = run_trial(runtime, args, interrupt, &trial);
  if (!status) {
    join_equal_tasks(runtime, trial.samples, trial.firsts);
    sum_stages(runtime, trial.samples, trial.firsts, out_costs, out_spreads);
  }
  jpp_free(trial.results);
  jpp_free(trial.samples);
  jpp_free(trial.firsts);
  return status;
}
