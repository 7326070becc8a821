// The latency of messages from measured runs: the time from the end of the run that made
// a message to the start of the run that waited for it.
#include <math.h>
#include <stdlib.h>

#include "base/null.h"
#include "predict/machine.h"
#include "predict/wiring.h"

typedef struct run_key {
  uint32_t task, microbatch;
  uint64_t run;  // measured
} run_key_t;

static int compare_keys(const void* left, const void* right) {
  const run_key_t *a = left, *b = right;
  if (a->task != b->task) return a->task < b->task ? -1 : 1;
  return (a->microbatch > b->microbatch) - (a->microbatch < b->microbatch);
}

// Finds the measured run for each run of the wiring; NULL for a run that was not
// measured.
static jpp_status_t* match_runs(const jpp_wiring_t* wiring, const jpp_task_run_t* runs,
                                uint64_t num_runs, jpp_arena_t* scratch,
                                const jpp_task_run_t*** out_found) {
  run_key_t* keys = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, num_runs, &keys));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, wiring->num_runs, out_found));
  for (uint64_t i = 0; i < num_runs; ++i) {
    keys[i] = (run_key_t){runs[i].task, runs[i].microbatch, i};
  }
  qsort(keys, num_runs, sizeof(*keys), compare_keys);
  for (uint32_t i = 0; i < wiring->num_runs; ++i) {
    run_key_t key = {wiring->runs[i].task, wiring->runs[i].microbatch, 0};
    const run_key_t* found = bsearch(&key, keys, num_runs, sizeof(*keys), compare_keys);
    if (found) (*out_found)[i] = &runs[found->run];
  }
  return NULL;
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

static jpp_status_t* find_latency(const jpp_plan_t* plan, const jpp_machine_t* machine,
                                  const jpp_task_run_t* runs, uint64_t num_runs,
                                  jpp_arena_t* scratch, double* out_latency) {
  jpp_wiring_t wiring;
  jpp_machine_t full;
  const jpp_task_run_t** found = NULL;
  double* waits = NULL;
  uint32_t count = 0;
  JPP_RETURN_IF_ERROR(jpp__machine_complete(machine, plan->ranks, scratch, &full));
  JPP_RETURN_IF_ERROR(jpp__wiring_create(plan, scratch, &wiring));
  JPP_RETURN_IF_ERROR(match_runs(&wiring, runs, num_runs, scratch, &found));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, wiring.num_runs, &waits));
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    double rank_end = -INFINITY;
    for (uint32_t i = 0; i < plan->programs[r].num_instrs; ++i) {
      const jpp_wired_instr_t* instr = &wiring.instrs[r][i];
      if (instr->kind != JPP_INSTR_RUN) continue;
      double wait = measure_wait(&wiring, &full, found, instr, rank_end);
      if (wait >= 0) waits[count++] = wait;
      if (found[instr->number]) rank_end = fmax(rank_end, found[instr->number]->end);
    }
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
