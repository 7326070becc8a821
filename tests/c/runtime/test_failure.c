// Steps that fail: each names the place, leaves nothing behind, and the next step works.
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/alloc.h"
#include "model.h"

enum { kOutputs = 16, kStepAgain = 3 };

// --- Every call -----------------------------------------------------------------------

static void expect_no_outputs(const model_t* model) {
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    uint32_t count = program->num_outputs * model->options.devices_per_rank;
    for (uint32_t i = 0; i < count; ++i) assert_null(model->outputs[r][i]);
  }
}

// Makes one call fail, counted from the step's first. Returns the step's message.
static void fail_call(model_t* model, jpp_fake_failure_t failure, char* message,
                      size_t size) {
  model_give(model);
  ASSERT_OK(jpp_fake_set_failure(model->client, failure));
  jpp_status_t* status = model_step(model);
  ASSERT_OK(jpp_fake_set_failure(model->client, (jpp_fake_failure_t){0}));
  assert_non_null(status);
  assert_int_equal(jpp_status_code(status),
                   failure.code ? failure.code : JPP_EXECUTION_ERROR);
  const char* text = strstr(jpp_status_message(status), ": ");  // after "step 7"
  snprintf(message, size, "%s", text ? text + 2 : jpp_status_message(status));
  jpp_status_free(status);
  expect_no_outputs(model);
  model_take_back(model);
  model_expect_clean(model);
}

static void expect_place(const char* message) {
  if (!strstr(message, "injected failure")) fail_msg("no reason in: %s", message);
  bool run = strstr(message, "instruction") && strstr(message, "microbatch");
  bool outer = strstr(message, "instruction") && strstr(message, "_loop_");
  bool output = strstr(message, "output");
  if (strncmp(message, "rank ", 5) != 0 || (!run && !outer && !output)) {
    fail_msg("no place in: %s", message);
  }
}

static uint64_t calls_of_a_step(model_t* model, float* numbers) {
  model_give(model);
  uint64_t before = model_stats(model).calls;
  ASSERT_OK(model_step(model));
  uint64_t calls = model_stats(model).calls - before;
  model_take_back(model);
  model_run(model, numbers);
  return calls;
}

static void fail_every_call(const char* text, model_options_t options) {
  float expected[kOutputs], found[kOutputs];
  model_t* model = model_create(text, options);
  uint64_t calls = calls_of_a_step(model, expected);
  for (uint64_t at = 1; at <= calls; ++at) {
    for (int async = 0; async < 2; ++async) {
      char message[512];
      fail_call(model, (jpp_fake_failure_t){.at = at, .async = async}, message,
                sizeof(message));
      expect_place(message);
      if (at % kStepAgain) continue;
      model_run(model, found);
      assert_memory_equal(found, expected, model->graph->num_outputs * sizeof(float));
    }
  }
  model_destroy(model);
}

static void test_every_call_may_fail(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  fail_every_call(text, (model_options_t){0});
  fail_every_call(text, (model_options_t){.device_threads = 2, .latency_us = 10});
  fail_every_call(text, (model_options_t){.device_threads = 2});
  fail_every_call(text, (model_options_t){.devices_per_rank = 2});
  fail_every_call(text, (model_options_t){.devices_per_rank = 3, .odd_have_one = true});
  fail_every_call(text, (model_options_t){.ranks_per_device = 9});
  fail_every_call(text, (model_options_t){.copies = true});
  fail_every_call(text, (model_options_t){.ranks_per_device = 2, .device_threads = 2});
  free(text);
}

// Outputs that are copies, and an output that another rank makes.
static void test_calls_for_outputs_may_fail(void** state) {
  (void)state;
  static const char kText[] =
      "graph \"copies\" ranks 2\n"
      "arg %w f32[4] \"w\"\n"
      "arg %x f32[8,4] \"x\"\n"
      "loop microbatches 2 stages 2 schedule \"gpipe\" index %i at \"t.py:1\" {\n"
      "  %x0:f32[4] = slice(%x, %i) cheap\n"
      "  %h0:f32[4] = relu(%x0) cost 10\n"
      "  %m0:f32[4] = @mark 0 (%h0)\n"
      "  %h1:f32[4] = dot(%m0, %w) cost 10\n"
      "  %m1:f32[4] = @mark 1 (%h1)\n"
      "} %L:f32[4] = add %m1\n"
      "out %w \"weights\"\n"
      "out %L \"loss\"\n"
      "out %L \"again\"\n";
  fail_every_call(kText, (model_options_t){0});
  fail_every_call(kText, (model_options_t){.devices_per_rank = 2, .device_threads = 2});
}

// The message contains the peak of the rank that it begins with, once.
static void expect_peak(const model_t* model, const char* message) {
  char peak[128];
  unsigned rank = 0;
  assert_int_equal(sscanf(message, "rank %u", &rank), 1);
  snprintf(peak, sizeof(peak), "; the plan's values take up to %llu bytes on each of",
           (unsigned long long)model->plan->programs[rank].peak_bytes);
  const char* found = strstr(message, peak);
  if (!found || !strstr(message, "To need less:")) fail_msg("%s", message);
  if (strstr(found + strlen(peak), "the plan's values")) fail_msg("twice: %s", message);
}

static void test_memory_may_run_out_at_every_call(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  float expected[kOutputs], found[kOutputs];
  model_t* model = model_create(text, (model_options_t){.device_threads = 2});
  uint64_t calls = calls_of_a_step(model, expected);
  for (uint64_t at = 1; at <= calls; ++at) {
    for (int async = 0; async < 2; ++async) {
      char message[1024];
      fail_call(model,
                (jpp_fake_failure_t){.at = at, .async = async, .code = JPP_OUT_OF_MEMORY},
                message, sizeof(message));
      expect_place(message);
      expect_peak(model, message);
    }
  }
  model_run(model, found);
  assert_memory_equal(found, expected, model->graph->num_outputs * sizeof(float));
  model_destroy(model);
  free(text);
}

// --- The first failure ----------------------------------------------------------------

// Returns which call of a step executes the task for the microbatch, if calls are made in
// the order of one thread.
static void test_the_first_failure_is_named(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  model_t* model =
      model_create(text, (model_options_t){.device_threads = 3, .latency_us = 200});
  float numbers[kOutputs];
  uint64_t calls = calls_of_a_step(model, numbers);
  bool found = false;
  for (uint64_t at = 1; at <= calls; ++at) {
    char early[512], late[512];
    fail_call(model, (jpp_fake_failure_t){.at = at}, early, sizeof(early));
    fail_call(model, (jpp_fake_failure_t){.at = at, .async = true}, late, sizeof(late));
    // The run that needs a copy detects that the copy failed late.
    if (!strstr(early, "execute:")) continue;
    size_t place = (size_t)(strstr(early, ": execute") - early);
    assert_memory_equal(late, early, place);
    found |=
        strstr(early, "rank 2, instruction") && strstr(early, "bwd_2 of microbatch 3");
  }
  assert_true(found);
  model_destroy(model);
  free(text);
}

static uint32_t find_task(const model_t* model, const char* name) {
  uint32_t task = 0;
  while (strcmp(model->staged->tasks[task].name, name) != 0) ++task;
  return task;
}

// bwd_0 gets an executable though it has no ops: only its event can report a failure.
static void test_a_run_without_results_may_fail(void** state) {
  (void)state;
  for (uint32_t threads = 0; threads < 3; ++threads) {
    model_options_t options = {.device_threads = threads, .devices_per_rank = 2};
    model_t* model = model_plan(kModelOutputs, options);
    uint32_t task = find_task(model, "bwd_0");
    assert_int_equal(model->staged->tasks[task].num_outputs, 0);
    model->executables[task].executable = model_compile_task(model, task);
    ASSERT_OK(model_try_create_runtime(model));
    jpp_runtime_set_tracing(model->runtime, true);
    float numbers[kOutputs];
    uint64_t calls = calls_of_a_step(model, numbers);
    uint32_t named = 0;
    for (uint64_t at = 1; at <= calls; ++at) {
      char message[512];
      fail_call(model, (jpp_fake_failure_t){.at = at, .async = true}, message,
                sizeof(message));
      named += strstr(message, ", bwd_0 of microbatch") && strstr(message, "execute:");
    }
    // Without threads of the device, several threads make the calls, in any order.
    if (threads) assert_int_equal(named, model->plan->bindings[task].runs);
    model_destroy(model);
  }
}

// --- Programs that do not fit together ------------------------------------------------

static jpp_instr_t* find_instr(const model_t* model, uint32_t rank, jpp_instr_kind_t kind,
                               uint32_t nth) {
  const jpp_program_t* program = &model->plan->programs[rank];
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    if (program->instrs[i].kind == kind && nth-- == 0) {
      return (jpp_instr_t*)&program->instrs[i];
    }
  }
  return NULL;
}

static void test_a_wrong_message_is_named_at_both_ends(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 3);
  model_t* model = model_plan(text, (model_options_t){.schedule = "gpipe"});
  find_instr(model, 0, JPP_INSTR_SEND, 1)->microbatch = 2;
  ASSERT_OK(model_try_create_runtime(model));
  model_give(model);
  jpp_status_t* status = model_step(model);
  assert_int_equal(jpp_status_code(status), JPP_INTERNAL_ERROR);
  const char* message = jpp_status_message(status);
  assert_non_null(strstr(message, "of microbatch 1 from rank 0"));
  assert_non_null(strstr(message, "found 'rank 0, instruction"));
  assert_non_null(strstr(message, "from fwd_0 of microbatch 2 to rank 1"));
  jpp_status_free(status);
  model_take_back(model);
  model_expect_clean(model);
  model_destroy(model);
  free(text);
}

// Rank 1 waits for one more message than rank 0 sends.
static void test_programs_that_wait_for_each_other_are_named(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 3);
  model_t* model = model_plan(text, (model_options_t){.schedule = "gpipe"});
  find_instr(model, 0, JPP_INSTR_SEND, 2)->kind = JPP_INSTR_DELETE;
  ASSERT_OK(model_try_create_runtime(model));
  model_give(model);
  jpp_status_t* status = model_step(model);
  assert_int_equal(jpp_status_code(status), JPP_INTERNAL_ERROR);
  const char* message = jpp_status_message(status);
  assert_non_null(strstr(message, "wait for each other"));
  assert_non_null(strstr(message, "of microbatch 2 from rank 0 (0 of 2 slots full)"));
  assert_non_null(strstr(message, "rank 2, instruction"));
  jpp_status_free(status);
  model_take_back(model);
  model_expect_clean(model);
  model_destroy(model);
  free(text);
}

// --- Create ---------------------------------------------------------------------------

static void test_create_names_what_does_not_fit(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  model_t* model = model_plan(text, (model_options_t){0});
  jpp_runtime_t** runtime = &model->runtime;
  uint32_t device = model->devices[1];
  model->devices[1] = 7;
  ASSERT_FAILS(model_try_create_runtime(model), JPP_DEVICES_ERROR,
               "rank 1: expected device 0 of the rank below 2");
  model->devices[1] = device;
  uint32_t task = find_instr(model, 1, JPP_INSTR_RUN, 1)->target;
  jpp_executable_t* executable = model->executables[task].executable;
  model->executables[task].executable = NULL;
  ASSERT_FAILS(model_try_create_runtime(model), JPP_INVALID_ARGUMENT, "found none of 0");
  model->executables[task].executable = executable;
  model->options.devices_per_rank = 0;
  ASSERT_FAILS(model_try_create_runtime(model), JPP_INVALID_ARGUMENT, "at least 1");
  model->options.devices_per_rank = 1;
  assert_null(*runtime);
  model_destroy(model);
  free(text);
}

static void test_create_may_fail_at_every_call(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 3);
  model_t* model = model_plan(text, (model_options_t){.devices_per_rank = 2});
  uint64_t before = model_stats(model).calls;
  ASSERT_OK(model_try_create_runtime(model));
  uint64_t calls = model_stats(model).calls - before;
  jpp_runtime_destroy(model->runtime);
  assert_true(calls > 0);
  for (uint64_t at = 1; at <= calls; ++at) {
    for (int async = 0; async < 2; ++async) {
      jpp_fake_failure_t failure = {.at = at, .async = async};
      ASSERT_OK(jpp_fake_set_failure(model->client, failure));
      ASSERT_FAILS(model_try_create_runtime(model), JPP_EXECUTION_ERROR, "rank ");
      assert_int_equal(model_stats(model).live_buffers, 0);
      assert_int_equal(model_stats(model).live_events, 0);
    }
  }
  model_destroy(model);
  free(text);
}

static void test_create_may_fail_at_every_allocation(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 3);
  model_t* model = model_plan(text, (model_options_t){0});
  jpp_status_t* status = NULL;
  int64_t at = 0;
  for (; at < 1000; ++at) {
    jpp__alloc_fail_after(at);
    status = model_try_create_runtime(model);
    jpp__alloc_fail_after(-1);
    if (!status) break;
    assert_int_equal(jpp_status_code(status), JPP_OUT_OF_MEMORY);
    jpp_status_free(status);
  }
  assert_null(status);
  assert_true(at > 10);
  model_destroy(model);
  free(text);
}

// --- Cancel ---------------------------------------------------------------------------

typedef struct canceller {
  jpp_runtime_t* runtime;
  atomic_bool done;
} canceller_t;

// Again and again: a cancel before the step is submitted does nothing.
static void* keep_cancelling(void* user) {
  canceller_t* canceller = user;
  while (!atomic_load(&canceller->done)) {
    struct timespec nap = {.tv_nsec = 3000000};
    nanosleep(&nap, NULL);
    jpp_runtime_cancel(canceller->runtime);
  }
  return NULL;
}

static void test_a_step_is_cancelled(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  model_options_t options = {.device_threads = 2, .latency_us = 40000};
  model_t* model = model_create(text, options);
  float before[kOutputs], after[kOutputs];
  pthread_t thread;
  model_run(model, before);
  model_give(model);
  canceller_t canceller = {.runtime = model->runtime};
  assert_int_equal(pthread_create(&thread, NULL, keep_cancelling, &canceller), 0);
  jpp_status_t* status = model_step(model);
  atomic_store(&canceller.done, true);
  pthread_join(thread, NULL);
  ASSERT_FAILS(status, JPP_CANCELLED, "cancelled");
  expect_no_outputs(model);
  model_take_back(model);
  model_expect_clean(model);
  // Nothing runs, so nothing fails.
  jpp_runtime_cancel(model->runtime);
  model_run(model, after);
  assert_memory_equal(after, before, model->graph->num_outputs * sizeof(float));
  model_destroy(model);
  free(text);
}

// --- Devices that go on after a failure -----------------------------------------------

typedef struct holder {
  jpp_client_t* client;
  atomic_bool left;  // the step has ended, or the holder waits no longer
} holder_t;

// Holds the device some time after the step began, until it has ended.
static void* hold_device(void* user) {
  holder_t* holder = user;
  struct timespec nap = {.tv_nsec = 500000000};
  nanosleep(&nap, NULL);
  ASSERT_OK(jpp_fake_set_held(holder->client, true));
  for (int i = 0; i < 40 && !atomic_load(&holder->left); ++i) nanosleep(&nap, NULL);
  atomic_store(&holder->left, true);
  ASSERT_OK(jpp_fake_set_held(holder->client, false));
  return NULL;
}

// As with an allocator that waits in every run: the runs that do not depend on the failed
// one never end.
static void test_a_failed_step_does_not_wait_long(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 8);
  model_options_t options = {
      .device_threads = 1, .latency_us = 40000, .step_timeout_ms = 100};
  model_t* model = model_create(text, options);
  float before[kOutputs], after[kOutputs];
  holder_t holder = {.client = model->client};
  pthread_t thread;
  model_run(model, before);
  model_give(model);
  ASSERT_OK(
      jpp_fake_set_failure(model->client, (jpp_fake_failure_t){.at = 2, .async = true}));
  assert_int_equal(pthread_create(&thread, NULL, hold_device, &holder), 0);
  jpp_status_t* status = model_step(model);
  // In time, it was not the end of the hold that ended the step.
  bool held = !atomic_exchange(&holder.left, true);
  pthread_join(thread, NULL);
  ASSERT_FAILS(status, JPP_EXECUTION_ERROR, ": execute: injected failure of call");
  assert_true(held);
  assert_true(jpp_runtime_has_given_up(model->runtime));
  expect_no_outputs(model);
  model_take_back(model);
  model_expect_clean(model);
  model_run(model, after);
  assert_memory_equal(after, before, model->graph->num_outputs * sizeof(float));
  model_destroy(model);
  free(text);
}

// The runs that do not depend on the failed one end after it, but soon.
static void test_a_failed_step_waits_for_its_runs(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 8);
  model_t* model =
      model_create(text, (model_options_t){.device_threads = 1, .latency_us = 40000});
  model_give(model);
  ASSERT_OK(
      jpp_fake_set_failure(model->client, (jpp_fake_failure_t){.at = 2, .async = true}));
  ASSERT_FAILS(model_step(model), JPP_EXECUTION_ERROR, ": execute: injected failure of");
  assert_false(jpp_runtime_has_given_up(model->runtime));
  expect_no_outputs(model);
  model_take_back(model);
  model_expect_clean(model);
  model_destroy(model);
  free(text);
}

static uint64_t executions(const model_t* model) {
  jpp_fake_stats_t stats;
  ASSERT_OK(jpp_fake_stats(model->client, &stats));
  return stats.executions;
}

// As with an allocator that waits in every call: no call follows the one that failed,
// except those of other threads that issue at the same time, one for each other rank.
static void test_a_failure_in_a_slow_call_is_noticed(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 8);
  model_options_t options = {.latency_us = 1200000};  // a call does its work
  model_t* model = model_create(text, options);
  model_give(model);
  uint64_t before = executions(model);
  ASSERT_OK(
      jpp_fake_set_failure(model->client, (jpp_fake_failure_t){.at = 2, .async = true}));
  jpp_status_t* status = model_step(model);
  ASSERT_FAILS(status, JPP_EXECUTION_ERROR, ": execute: injected failure of call");
  assert_in_range(executions(model) - before, 2, 4);
  expect_no_outputs(model);
  model_take_back(model);
  model_expect_clean(model);
  model_destroy(model);
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_every_call_may_fail),
      cmocka_unit_test(test_calls_for_outputs_may_fail),
      cmocka_unit_test(test_memory_may_run_out_at_every_call),
      cmocka_unit_test(test_the_first_failure_is_named),
      cmocka_unit_test(test_a_run_without_results_may_fail),
      cmocka_unit_test(test_a_wrong_message_is_named_at_both_ends),
      cmocka_unit_test(test_programs_that_wait_for_each_other_are_named),
      cmocka_unit_test(test_create_names_what_does_not_fit),
      cmocka_unit_test(test_create_may_fail_at_every_call),
      cmocka_unit_test(test_create_may_fail_at_every_allocation),
      cmocka_unit_test(test_a_step_is_cancelled),
      cmocka_unit_test(test_a_failed_step_does_not_wait_long),
      cmocka_unit_test(test_a_failed_step_waits_for_its_runs),
      cmocka_unit_test(test_a_failure_in_a_slow_call_is_noticed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
