// The latency of messages from measured runs: the time from the end of the run that made
// a message to the start of the run that waited for it.
#include <math.h>
#include <stdlib.h>

#include "base/null.h"
#include "predict/machine.h"
#include "predict/wiring.h"

typedef struct run_key {
  uint32_t step, task, microbatch;
  uint64_t run;  // measured
} run_key_t;

static int compare_keys(const void* left, const void* right) {
  const run_key_t *a = left, *b = right;
  if (a->step != b->step) return a->step < b->step ? -1 : 1;
  if (a->task != b->task) return a->task < b->task ? -1 : 1;
  return (a->microbatch > b->microbatch) - (a->microbatch < b->microbatch);
}

// The keys of all runs, [num_runs], in order.
static jpp_status_t* sort_runs(const jpp_task_run_t* runs, uint64_t num_runs,
                               jpp_arena_t* scratch, run_key_t** out_keys) {
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, num_runs, out_keys));
  for (uint64_t i = 0; i < num_runs; ++i) {
    (*out_keys)[i] = (run_key_t){runs[i].step, runs[i].task, runs[i].microbatch, i};
  }
  qsort(*out_keys, num_runs, sizeof(**out_keys), compare_keys);
  return NULL;
}

// Finds the measured run for each run of the wiring, among the keys of a step; NULL for a
// run that was not measured.
static void match_runs(const jpp_wiring_t* wiring, const jpp_task_run_t* runs,
                       const run_key_t* keys, uint64_t num_keys,
                       const jpp_task_run_t** out_found) {
  for (uint32_t i = 0; i < wiring->num_runs; ++i) {
    run_key_t key = {keys->step, wiring->runs[i].task, wiring->runs[i].microbatch, 0};
    const run_key_t* found = bsearch(&key, keys, num_keys, sizeof(*keys), compare_keys);
    out_found[i] = found ? &runs[found->run] : NULL;
  }
}

// The time from the end of the last run for which the instruction's run waits to the
// start of that run; NAN unless a message from another process arrived last.
static double measure_wait(const jpp_wiring_t* wiring, const jpp_machine_t* machine,
                           const jpp_task_run_t* const* found,
                           const jpp_wired_instr_t* instr, double rank_end) {
  const jpp_task_run_t* run = found[instr->number];
  double last = rank_end;
  bool crosses = false;
  for (uint32_t i = 0; run && i < instr->num_needs; ++i) {
    const jpp_wired_message_t* message =
        &wiring->messages[wiring->needs[instr->first_need + i]];
    if (message->source >= wiring->num_runs) return NAN;  // passed on
    const jpp_task_run_t* source = found[message->source];
    if (!source) return NAN;
    if (source->end <= last) continue;
    const jpp_plan_channel_t* channel = &wiring->plan->channels[message->channel];
    last = source->end;
    crosses = machine->rank_process[channel->src] != machine->rank_process[channel->dst];
  }
  return crosses ? run->start - last : NAN;
}

static int compare_times(const void* left, const void* right) {
  double a = *(const double*)left, b = *(const double*)right;
  return (a > b) - (a < b);
}

// Adds the waits of a step to out_waits, [*count]. `rank_ends`: when each rank ended its
// last run.
static void measure_step(const jpp_wiring_t* wiring, const jpp_machine_t* machine,
                         const jpp_task_run_t* const* found, double* rank_ends,
                         double* out_waits, uint64_t* count) {
  for (uint32_t r = 0; r < wiring->plan->ranks; ++r) {
    double* end = &rank_ends[r];
    for (uint32_t i = 0; i < wiring->plan->programs[r].num_instrs; ++i) {
      const jpp_wired_instr_t* instr = &wiring->instrs[r][i];
      if (instr->kind != JPP_INSTR_RUN) continue;
      double wait = measure_wait(wiring, machine, found, instr, *end);
      if (wait >= 0) out_waits[(*count)++] = wait;
      if (found[instr->number]) *end = fmax(*end, found[instr->number]->end);
    }
  }
}

static jpp_status_t* find_latency(const jpp_plan_t* plan, const jpp_machine_t* machine,
                                  const jpp_task_run_t* runs, uint64_t num_runs,
                                  jpp_arena_t* scratch, double* out_latency) {
  jpp_wiring_t wiring;
  jpp_machine_t full;
  run_key_t* keys = NULL;
  const jpp_task_run_t** found = NULL;
  double *waits = NULL, *rank_ends = NULL;
  uint64_t count = 0;
  JPP_RETURN_IF_ERROR(jpp__machine_complete(machine, plan->ranks, scratch, &full));
  JPP_RETURN_IF_ERROR(jpp__wiring_create(plan, scratch, &wiring));
  JPP_RETURN_IF_ERROR(sort_runs(runs, num_runs, scratch, &keys));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, wiring.num_runs, &found));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, num_runs, &waits));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, plan->ranks, &rank_ends));
  for (uint32_t r = 0; r < plan->ranks; ++r) rank_ends[r] = -INFINITY;
  for (uint64_t begin = 0, end = 0; begin < num_runs; begin = end) {
    while (end < num_runs && keys[end].step == keys[begin].step) ++end;
    match_runs(&wiring, runs, &keys[begin], end - begin, found);
    measure_step(&wiring, &full, found, rank_ends, waits, &count);
  }
  qsort(waits, count, sizeof(*waits), compare_times);
  *out_latency = count ? waits[count / 2] : 0;
  return NULL;
}

jpp_status_t* jpp_predict_latency(const jpp_plan_t* plan, const jpp_machine_t* machine,
                                  const jpp_task_run_t* runs, uint64_t num_runs,
                                  double* out_latency) {
  JPP_RETURN_IF_NULL(plan, machine, runs, out_latency);
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status =
      find_latency(plan, machine, runs, num_runs, &scratch, out_latency);
  jpp__arena_deinit(&scratch);
  return status;
}
