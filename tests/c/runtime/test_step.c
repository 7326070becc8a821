// Steps that succeed.
#include <pthread.h>
#include <stdlib.h>

#include "model.h"

enum { kOutputs = 16 };

static void run_chain(uint32_t stages, uint32_t microbatches, model_options_t options,
                      float* numbers) {
  char* text = model_chain(stages, stages, microbatches);
  model_t* model = model_create(text, options);
  float again[kOutputs] = {0};
  model_run(model, numbers);
  model_run(model, again);
  assert_memory_equal(again, numbers, model->graph->num_outputs * sizeof(float));
  model_destroy(model);
  free(text);
}

static void test_schedules_give_the_same_numbers(void** state) {
  (void)state;
  float gpipe[kOutputs], other[kOutputs];
  run_chain(4, 8, (model_options_t){.schedule = "gpipe"}, gpipe);
  run_chain(4, 8, (model_options_t){.schedule = "1f1b"}, other);
  assert_memory_equal(other, gpipe, 9 * sizeof(float));
  // Updates are separate tasks there; only gradients and the loss are compared.
  run_chain(4, 8, (model_options_t){.schedule = "interleaved-1f1b", .ranks = 2}, other);
  assert_memory_equal(other + 4, gpipe + 4, 5 * sizeof(float));
  for (int i = 0; i < 9; ++i) {
    for (int k = 0; k < i; ++k) assert_true(gpipe[i] != gpipe[k]);
  }
}

static void test_devices_and_portability_do_not_change_numbers(void** state) {
  (void)state;
  static const model_options_t kOptions[] = {
      {.portable = true},
      {.devices_per_rank = 2},
      {.devices_per_rank = 2, .device_threads = 3, .latency_us = 20},
      {.device_threads = 3, .latency_us = 50},
      {.devices_per_rank = 2, .device_threads = 2},
      {.ranks_per_device = 4},
      {.ranks_per_device = 2, .portable = true, .device_threads = 2, .latency_us = 20},
      {.ranks_per_device = 2, .devices_per_rank = 2},
      {.devices_per_rank = 4, .odd_have_one = true, .device_threads = 2},
      {.devices_per_rank = 2, .odd_have_one = true, .ranks_per_device = 2},
  };
  float expected[kOutputs], found[kOutputs];
  run_chain(4, 6, (model_options_t){0}, expected);
  for (size_t i = 0; i < sizeof(kOptions) / sizeof(kOptions[0]); ++i) {
    run_chain(4, 6, kOptions[i], found);
    assert_memory_equal(found, expected, 9 * sizeof(float));
  }
}

static void expect_peaks(const model_t* model) {
  const jpp_trace_t* trace = jpp_runtime_last_trace(model->runtime);
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    assert_int_equal(trace->peak_live_bytes[r], model->plan->programs[r].peak_bytes);
  }
}

static void test_peak_bytes_are_the_plans(void** state) {
  (void)state;
  static const char* const kSchedules[] = {"gpipe", "1f1b", "interleaved-1f1b"};
  char* text = model_chain(4, 4, 8);
  for (int i = 0; i < 3; ++i) {
    model_options_t options = {.schedule = kSchedules[i], .ranks = i == 2 ? 2 : 0};
    model_t* model = model_create(text, options);
    float numbers[kOutputs];
    assert_null(jpp_runtime_last_trace(model->runtime));
    jpp_runtime_set_tracing(model->runtime, true);
    model_run(model, numbers);
    expect_peaks(model);
    model_destroy(model);
  }
  free(text);
}

static void test_outputs_are_copied_where_others_hold_them(void** state) {
  (void)state;
  for (uint32_t threads = 0; threads < 3; ++threads) {
    model_options_t options = {.devices_per_rank = 1 + threads % 2,
                               .device_threads = threads};
    model_t* model = model_create(kModelOutputs, options);
    float numbers[kOutputs];
    jpp_runtime_set_tracing(model->runtime, true);
    model_run(model, numbers);
    expect_peaks(model);
    assert_float_equal(numbers[0], 0 + 3.0 / 16, 0);
    assert_float_equal(numbers[1], numbers[2], 0);
    assert_float_equal(numbers[3], 1 + 3.0 / 16, 0);
    assert_float_equal(numbers[4], 1 + 3.0 / 16, 0);
    model_destroy(model);
  }
}

// Ranks on one device: a value that its rank no longer needs moves, so a chain copies
// nothing. Between two groups of ranks only the values that cross the boundary are
// copied.
static void test_ranks_on_one_device_hand_buffers_over(void** state) {
  (void)state;
  enum { kStages = 4, kMicrobatches = 6 };
  static const uint32_t kSharing[] = {4, 2, 1};
  static const uint64_t kCrossings[] = {0, 1, 3};
  char* text = model_chain(kStages, kStages, kMicrobatches);
  for (int i = 0; i < 3; ++i) {
    model_options_t options = {.ranks_per_device = kSharing[i]};
    model_t* model = model_create(text, options);
    float numbers[kOutputs];
    uint64_t before = model_stats(model).copies;
    model_run(model, numbers);
    assert_int_equal(model_stats(model).copies - before,
                     kCrossings[i] * 2 * kMicrobatches);
    model_destroy(model);
  }
  free(text);
}

// %L goes to rank 1 and is an output of rank 0 as well: it stays and is copied.
static void test_a_value_that_is_still_needed_is_copied_on_one_device(void** state) {
  (void)state;
  float apart[kOutputs], together[kOutputs];
  model_t* model = model_create(kModelOutputs, (model_options_t){0});
  model_run(model, apart);
  uint32_t outputs = model->graph->num_outputs, ranks = model->plan->ranks;
  model_destroy(model);
  model = model_create(kModelOutputs, (model_options_t){.ranks_per_device = ranks});
  model_run(model, together);
  assert_memory_equal(together, apart, outputs * sizeof(float));
  model_expect_clean(model);
  model_destroy(model);
}

static void test_a_task_without_ops_is_skipped(void** state) {
  (void)state;
  model_t* model = model_create(kModelOutputs, (model_options_t){0});
  uint64_t all = 0, empty = 0;
  float numbers[kOutputs];
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    for (uint32_t i = 0; i < program->num_instrs; ++i) {
      if (program->instrs[i].kind != JPP_INSTR_RUN) continue;
      ++all;
      empty += !model->staged->tasks[program->instrs[i].target].num_ops;
    }
  }
  assert_int_equal(empty, 3);
  uint64_t before = model_stats(model).executions;
  model_run(model, numbers);
  assert_int_equal(model_stats(model).executions - before, all - empty);
  model_destroy(model);
}

// --- Several threads ------------------------------------------------------------------

static void* step_once(void* model) { return model_step(model); }

static void test_two_threads_step_one_after_another(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  model_options_t options = {.device_threads = 2, .latency_us = 100};
  // The second model lends its arrays; its client and runtime are not used.
  model_t* model = model_create(text, options);
  model_t* lender = model_create(text, options);
  jpp_client_t* client = lender->client;
  jpp_runtime_t* runtime = lender->runtime;
  lender->client = model->client;
  lender->runtime = model->runtime;
  model_give(model);
  model_give(lender);
  model_t* models[] = {model, lender};
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) {
    assert_int_equal(pthread_create(&threads[i], NULL, step_once, models[i]), 0);
  }
  for (int i = 0; i < 2; ++i) {
    void* status = NULL;
    pthread_join(threads[i], &status);
    ASSERT_OK(status);
  }
  model_take_back(model);
  model_take_back(lender);
  lender->client = client;
  lender->runtime = runtime;
  model_expect_clean(model);
  model_destroy(lender);
  model_destroy(model);
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_schedules_give_the_same_numbers),
      cmocka_unit_test(test_devices_and_portability_do_not_change_numbers),
      cmocka_unit_test(test_peak_bytes_are_the_plans),
      cmocka_unit_test(test_outputs_are_copied_where_others_hold_them),
      cmocka_unit_test(test_ranks_on_one_device_hand_buffers_over),
      cmocka_unit_test(test_a_value_that_is_still_needed_is_copied_on_one_device),
      cmocka_unit_test(test_a_task_without_ops_is_skipped),
      cmocka_unit_test(test_two_threads_step_one_after_another),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
