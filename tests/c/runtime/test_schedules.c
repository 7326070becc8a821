// Every built-in schedule on the fake device: each rank runs its list, in that order.
#include <stdlib.h>

#include "model.h"

enum { kOutputs = 80 };

static bool is_run(const model_t* model, const jpp_trace_run_t* run,
                   const jpp_schedule_task_t* entry) {
  const jpp_task_t* task = &model->staged->tasks[run->task];
  return task->kind == entry->kind && task->stage == entry->stage &&
         run->microbatch == entry->microbatch;
}

// Idle entries, the input gradient of stage 0, which nothing reads, and the forward of
// the last stage if its backward does its work: these have no ops.
static bool may_miss(const model_t* model, const jpp_schedule_task_t* entry) {
  const jpp_staged_loop_t* loop = &model->staged->loops[0];
  const uint32_t* tasks = entry->kind == JPP_TASK_FWD ? loop->forward : loop->backward;
  bool may_be_empty = entry->kind == JPP_TASK_FWD || entry->kind == JPP_TASK_BWD_I;
  return entry->kind == JPP_TASK_IDLE ||
         (may_be_empty && !model->staged->tasks[tasks[entry->stage]].num_ops);
}

static void expect_row(const model_t* model, const jpp_schedule_t* schedule,
                       uint32_t rank) {
  const jpp_trace_t* trace = jpp_runtime_last_trace(model->runtime);
  const jpp_schedule_row_t* row = &schedule->rows[rank];
  uint32_t entry = 0;
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    const jpp_trace_run_t* run = &trace->runs[i];
    if (run->rank != rank || run->microbatch == JPP_NONE) continue;
    while (entry < row->count && !is_run(model, run, &row->tasks[entry]) &&
           may_miss(model, &row->tasks[entry])) {
      ++entry;
    }
    assert_true(entry < row->count && is_run(model, run, &row->tasks[entry]));
    ++entry;
  }
  while (entry < row->count && may_miss(model, &row->tasks[entry])) ++entry;
  assert_int_equal(entry, row->count);
}

static bool run_one(const char* name, const jpp_schedule_params_t* params) {
  jpp_schedule_t* schedule = NULL;
  jpp_status_t* status = jpp_schedule_build(name, params, &schedule);
  if (status) {  // does not take these sizes
    jpp_status_free(status);
    return false;
  }
  float numbers[kOutputs];
  char* text = model_chain(params->stages, params->ranks, params->microbatches);
  model_t* model = model_create(text, (model_options_t){.schedule = name});
  jpp_runtime_set_tracing(model->runtime, true);
  model_run(model, numbers);
  for (uint32_t r = 0; r < params->ranks; ++r) expect_row(model, schedule, r);
  model_destroy(model);
  free(text);
  jpp_schedule_destroy(schedule);
  return true;
}

static void test_ranks_run_their_lists(void** state) {
  (void)state;
  static const uint32_t kMicrobatches[] = {1, 2, 5, 11, 24};
  uint32_t runs = 0;
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    for (uint32_t n = 0; n < 8 * 4 * 5; ++n) {
      uint32_t ranks = n % 8 + 1, stages = ranks * (n / 8 % 4 + 1);
      jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                      .stages = stages,
                                      .ranks = ranks,
                                      .microbatches = kMicrobatches[n / 32]};
      runs += run_one(jpp_schedule_info_at(i)->name, &params);
    }
  }
  assert_true(runs > 1000);
}

int main(void) {
  const struct CMUnitTest tests[] = {cmocka_unit_test(test_ranks_run_their_lists)};
  return cmocka_run_group_tests(tests, NULL, NULL);
}
