// The runs that a traced step records, and how they are shown.
#include <jansson.h>
#include <sched.h>
#include <stdlib.h>

#include "golden.h"
#include "jaxpp/view.h"
#include "model.h"

enum { kOutputs = 16 };

// Each task of the fake device takes this long.
static model_t* slow_model(const char* schedule, uint32_t latency_us) {
  char* text = model_chain(3, 3, 4);
  model_options_t options = {
      .schedule = schedule, .device_threads = 3, .latency_us = latency_us};
  model_t* model = model_create(text, options);
  free(text);
  float numbers[kOutputs];
  jpp_runtime_set_tracing(model->runtime, true);
  model_run(model, numbers);
  return model;
}

static model_t* traced_model(const char* schedule) { return slow_model(schedule, 500); }

static const jpp_trace_run_t* find_run(const jpp_trace_t* trace, const char* task,
                                       uint32_t microbatch) {
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    const jpp_trace_run_t* run = &trace->runs[i];
    const char* name = trace->plan->staged->tasks[run->task].name;
    if (run->microbatch == microbatch && strcmp(name, task) == 0) return run;
  }
  fail_msg("no run of %s", task);
  return NULL;
}

// Runs a step on a device that begins when all tasks are issued.
static void run_when_issued(model_t* model) {
  uint64_t runs = jpp_runtime_last_trace(model->runtime)->num_runs;
  model_give(model);
  uint64_t all = model_stats(model).executions + runs;
  jpp_call_t call = model_wrap(model);
  ASSERT_OK(jpp_fake_set_held(model->client, true));
  ASSERT_OK(jpp_runtime_call(model->runtime, &call));
  while (model_stats(model).executions < all) sched_yield();
  ASSERT_OK(jpp_fake_set_held(model->client, false));
  ASSERT_OK(jpp_runtime_await(model->runtime, NULL));
  model_unwrap(model, &call);
  model_take_back(model);
}

static void test_runs_follow_their_arguments(void** state) {
  (void)state;
  model_t* model = traced_model("gpipe");
  run_when_issued(model);
  const jpp_trace_t* trace = jpp_runtime_last_trace(model->runtime);
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    const jpp_trace_run_t* run = &trace->runs[i];
    assert_true(0 <= run->issued && run->issued <= run->start);
    assert_true(run->start <= run->end && run->end <= trace->length);
    if (!i) continue;
    assert_true(run->rank >= run[-1].rank);
    if (run->rank == run[-1].rank)
      assert_true(run->start >= run[-1].end || run->start == run->end);
  }
  for (uint32_t m = 0; m < 4; ++m) {
    const jpp_trace_run_t* fwd_0 = find_run(trace, "fwd_0", m);
    const jpp_trace_run_t* fwd_1 = find_run(trace, "fwd_1", m);
    assert_true(fwd_1->start >= fwd_0->end);
    assert_true(fwd_1->issued < fwd_1->start);
    assert_true(find_run(trace, "bwd_0", m)->start >= find_run(trace, "bwd_1", m)->end);
  }
  model_destroy(model);
}

// Ranks take turns on a device that they share: a run begins when the previous one of any
// of them has ended.
static void test_runs_on_a_device_follow_each_other(void** state) {
  (void)state;
  char* text = model_chain(4, 4, 4);
  model_options_t options = {
      .schedule = "1f1b", .device_threads = 1, .latency_us = 500, .ranks_per_device = 2};
  model_t* model = model_create(text, options);
  free(text);
  float numbers[kOutputs];
  jpp_runtime_set_tracing(model->runtime, true);
  for (int step = 0; step < 2; ++step) model_run(model, numbers);
  const jpp_trace_t* trace = jpp_runtime_last_trace(model->runtime);
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    const jpp_trace_run_t* a = &trace->runs[i];
    assert_true(0 <= a->start && a->issued <= a->start && a->start <= a->end);
    for (uint64_t k = 0; k < i; ++k) {
      const jpp_trace_run_t* b = &trace->runs[k];
      if (a->rank / 2 != b->rank / 2) continue;
      assert_true(a->start >= b->end || b->start >= a->end);
    }
  }
  model_destroy(model);
}

static void test_a_trace_stays_until_the_next_traced_step(void** state) {
  (void)state;
  model_t* model = traced_model("1f1b");
  float numbers[kOutputs];
  int64_t length = jpp_runtime_last_trace(model->runtime)->length;
  jpp_runtime_set_tracing(model->runtime, false);
  model_run(model, numbers);
  assert_true(jpp_runtime_last_trace(model->runtime)->length == length);
  jpp_runtime_set_tracing(model->runtime, true);
  model_give(model);
  jpp_fake_failure_t failure = {.at = 9, .async = true};
  ASSERT_OK(jpp_fake_set_failure(model->client, failure));
  ASSERT_FAILS(model_step(model), JPP_EXECUTION_ERROR, "injected");
  model_take_back(model);
  model_expect_clean(model);
  assert_null(jpp_runtime_last_trace(model->runtime));
  model_run(model, numbers);
  assert_non_null(jpp_runtime_last_trace(model->runtime));
  model_destroy(model);
}

// Each task of the fake device takes half a millisecond.
static void test_costs_are_those_of_the_device(void** state) {
  (void)state;
  static const char* const kSchedules[] = {"gpipe", "zb-h1"};
  for (size_t i = 0; i < 2; ++i) {
    model_t* model = traced_model(kSchedules[i]);
    const jpp_trace_t* trace = jpp_runtime_last_trace(model->runtime);
    double sum = 0;
    for (uint64_t r = 0; r < trace->num_runs; ++r) {
      const jpp_task_t* task = &trace->plan->staged->tasks[trace->runs[r].task];
      bool inside = task->loop != JPP_NONE;
      if (inside) sum += (double)(trace->runs[r].end - trace->runs[r].start) / 1e6;
    }
    jpp_cost_t costs[3];
    ASSERT_OK(jpp_trace_costs(trace, 0, 3, costs));
    ASSERT_FAILS(jpp_trace_costs(trace, 0, 2, costs), JPP_INVALID_ARGUMENT,
                 "the costs of a loop's stages: expected a count of 3, found 2");
    ASSERT_FAILS(jpp_trace_costs(trace, 1, 3, costs), JPP_INVALID_ARGUMENT,
                 "expected a loop below 1, found 1");
    for (uint32_t s = 0; s < 3; ++s) {
      sum -= 4 * (costs[s].forward + costs[s].backward + costs[s].weight);
      assert_true(costs[s].forward > 0 && costs[s].weight >= 0);
      bool same = costs[s].backward == costs[s].weight;
      assert_true(i || same);  // each half counts as half of a whole backward
    }
    assert_true(sum < 1e-6 && sum > -1e-6);
    model_destroy(model);
  }
}

static void test_costs_of_a_trial(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 2);
  for (char* at; (at = strstr(text, " donated"));) memset(at, ' ', strlen(" donated"));
  model_options_t options = {.schedule = "gpipe", .device_threads = 3, .latency_us = 500};
  model_t* model = model_create(text, options);
  free(text);
  jpp_array_t* args[kOutputs];
  uint32_t num_args = model->graph->num_args;
  for (uint32_t a = 0; a < num_args; ++a) {
    args[a] = model_array(model, a, 0, (float)a, 1.0f / 16);
  }
  jpp_cost_t costs[4] = {[3] = {.forward = -1}}, spreads[3];
  ASSERT_OK(jpp_runtime_measure(model->runtime, args, NULL, 3, costs, spreads));
  for (uint32_t s = 0; s < 3; ++s) {
    assert_true(costs[s].forward > 0 && costs[s].backward + costs[s].weight > 0);
    // A standard deviation of 8 runs is at most sqrt(7) times their mean.
    assert_true(spreads[s].forward >= 0 && spreads[s].forward < 3 * costs[s].forward);
  }
  assert_true(costs[3].forward < 0);
  for (uint32_t a = 0; a < num_args; ++a) jpp_array_release(args[a]);
  model_destroy(model);
}

// --- JSON -----------------------------------------------------------------------------

static const char* text_at(const json_t* object, const char* key) {
  const char* text = json_string_value(json_object_get(object, key));
  assert_non_null(text);
  return text;
}

static void expect_event(const json_t* event, const jpp_trace_t* trace,
                         const jpp_trace_run_t* run) {
  const jpp_task_t* task = &trace->plan->staged->tasks[run->task];
  const json_t* args = json_object_get(event, "args");
  bool outer = task->kind == JPP_TASK_OUTER;
  const char* kind = task->kind == JPP_TASK_FWD ? "forward" : "backward";
  char name[96];
  snprintf(name, sizeof(name), outer ? "%s" : "%s__%u", task->name, run->microbatch);
  assert_string_equal(text_at(event, "name"), name);
  assert_string_equal(text_at(event, "cat"), outer ? "outer" : kind);
  assert_int_equal(json_integer_value(json_object_get(event, "tid")), run->rank);
  double start = json_real_value(json_object_get(event, "ts"));
  double duration = json_real_value(json_object_get(event, "dur"));
  assert_float_equal((float)start, (float)((double)run->start / 1e3), 0.01);
  assert_float_equal((float)duration, (float)((double)(run->end - run->start) / 1e3),
                     0.01);
  assert_int_equal(json_object_size(args), outer ? 0 : 2);
  if (outer) return;
  assert_int_equal(json_integer_value(json_object_get(args, "microbatch")),
                   run->microbatch);
  assert_int_equal(json_integer_value(json_object_get(args, "stage")), task->stage);
}

static void test_json_has_every_run(void** state) {
  (void)state;
  model_t* model = traced_model("1f1b");
  const jpp_trace_t* trace = jpp_runtime_last_trace(model->runtime);
  char* text = NULL;
  ASSERT_OK(jpp_trace_to_json(&trace, 1, &text));
  json_error_t error;
  json_t* root = json_loads(text, 0, &error);
  if (!root) fail_msg("line %d: %s", error.line, error.text);
  const json_t* events = json_object_get(root, "traceEvents");
  uint64_t runs = 0, names = 0;
  for (size_t i = 0; i < json_array_size(events); ++i) {
    const json_t* event = json_array_get(events, i);
    if (strcmp(text_at(event, "ph"), "X") == 0) {
      expect_event(event, trace, &trace->runs[runs++]);
    } else if (strcmp(text_at(event, "name"), "thread_name") == 0) {
      char name[32];
      snprintf(name, sizeof(name), "rank %llu", (unsigned long long)names++);
      assert_string_equal(text_at(json_object_get(event, "args"), "name"), name);
    }
  }
  assert_int_equal(runs, trace->num_runs);
  assert_int_equal(names, 3);
  json_decref(root);
  jpp_text_free(text);
  model_destroy(model);
}

// --- Pictures -------------------------------------------------------------------------

static const jpp_task_t kTasks[] = {
    {.name = "fwd_0", .kind = JPP_TASK_FWD, .stage = 0},
    {.name = "fwd_1", .kind = JPP_TASK_FWD, .stage = 1},
    {.name = "bwd_1", .kind = JPP_TASK_BWD, .stage = 1},
    {.name = "bwd_i_0", .kind = JPP_TASK_BWD_I, .stage = 0},
    {.name = "bwd_w_0", .kind = JPP_TASK_BWD_W, .stage = 0},
    {.name = "after \"loop\"\n", .kind = JPP_TASK_OUTER, .stage = JPP_NONE},
};

// {rank, task, microbatch, issued, start, end}. Two of the runs are in one column.
static const jpp_trace_run_t kRuns[] = {
    {0, 0, 10, 0, 0, 1000},
    {0, 0, 11, 5, 1000, 2000},
    {0, 3, 10, 10, 5000, 7000},
    {0, 4, 10, 15, 7000, 8000},
    {0, 3, 11, 20, 8010, 8230},
    {0, 4, 11, 20, 8230, 8600},
    {0, 5, JPP_NONE, 25, 9000, 12000},
    {1, 1, 10, 30, 1020, 2020},
    {1, 2, 10, 35, 2020, 4020},
    {1, 2, 11, 40, 4020, 6001},
};

static jpp_trace_t handmade_trace(void) {
  static const jpp_graph_t kGraph = {.name = "hand\"made\""};
  static const jpp_staged_t kStaged = {.graph = &kGraph, .ranks = 2, .tasks = kTasks};
  static const jpp_plan_t kPlan = {.staged = &kStaged, .ranks = 2};
  return (jpp_trace_t){.plan = &kPlan,
                       .num_runs = sizeof(kRuns) / sizeof(kRuns[0]),
                       .runs = kRuns,
                       .length = 12500};
}

static void expect_picture(const char* golden, uint32_t columns, bool color) {
  jpp_trace_t trace = handmade_trace();
  char *json = NULL, *text = NULL;
  ASSERT_OK(jpp_trace_to_json(&(const jpp_trace_t*){&trace}, 1, &json));
  jpp_trace_text_t trace_text = {
      .name = "handmade", .text = json, .length = strlen(json)};
  jpp_spans_t* spans = NULL;
  ASSERT_OK(jpp_spans_read(&trace_text, 1, &spans));
  ASSERT_OK(jpp_spans_draw(spans, columns, color, &text));
  assert_golden(golden, text);
  jpp_spans_destroy(spans);
  jpp_text_free(text);
  jpp_text_free(json);
}

static void test_pictures(void** state) {
  (void)state;
  expect_picture("runtime/trace_25.txt", 25, false);
  expect_picture("runtime/trace_80.txt", 80, false);
  expect_picture("runtime/trace_color.txt", 25, true);
}

static void test_json_of_a_handmade_trace(void** state) {
  (void)state;
  jpp_trace_t trace = handmade_trace();
  char* text = NULL;
  ASSERT_OK(jpp_trace_to_json(&(const jpp_trace_t*){&trace}, 1, &text));
  assert_golden("runtime/trace.json", text);
  json_t* root = json_loads(text, 0, NULL);
  assert_non_null(root);
  json_decref(root);
  jpp_text_free(text);
}

// A rank begins its next step while others still finish this one.
static void test_steps_that_overlap(void** state) {
  (void)state;
  // Steps overlap by one task, which must take longer than a thread waits for a core.
  model_t* model = slow_model("zb-h1", 10000);
  jpp_array_t *args[kOutputs], *results[2][kOutputs];
  uint32_t num_args = model->graph->num_args, num_results = model->graph->num_outputs;
  for (uint32_t a = 0; a < num_args; ++a) {
    args[a] = model_array(model, a, 0, (float)a, 1.0f / 16);
  }
  // The chain's new weights come first, in the order of the old ones.
  for (int step = 0; step < 2; ++step) {
    jpp_call_t call = {.struct_size = sizeof(call),
                       .args = args,
                       .num_args = num_args,
                       .results = results[step],
                       .num_results = num_results};
    ASSERT_OK(jpp_runtime_call(model->runtime, &call));
    for (uint32_t a = 0; a + 1 < num_args; ++a) {
      jpp_array_release(args[a]);
      args[a] = results[step][a];
      results[step][a] = NULL;
    }
  }
  ASSERT_OK(jpp_runtime_await(model->runtime, NULL));
  const jpp_trace_t* traces[2] = {jpp_runtime_trace(model->runtime, 1),
                                  jpp_runtime_trace(model->runtime, 0)};
  assert_int_equal(traces[0]->step + 1, traces[1]->step);
  int64_t offset = traces[1]->start - traces[0]->start;
  assert_true(offset >= 0 && offset < traces[0]->length);
  const jpp_trace_run_t* first = find_run(traces[1], "fwd_0", 0);
  assert_true(offset + first->start < traces[0]->length);

  char* text = NULL;
  ASSERT_OK(jpp_trace_to_json(traces, 2, &text));
  json_t* root = json_loads(text, 0, NULL);
  const json_t* events = json_object_get(root, "traceEvents");
  size_t index, runs = 0;
  double last = 0;
  const json_t* event;
  json_array_foreach(events, index, event) {
    if (strcmp(text_at(event, "ph"), "X") != 0) continue;
    ++runs;
    double start = json_real_value(json_object_get(event, "ts"));
    last = start > last ? start : last;
  }
  assert_int_equal(runs, traces[0]->num_runs + traces[1]->num_runs);
  assert_true(last * 1e3 > (double)offset);
  json_decref(root);
  jpp_text_free(text);
  for (uint32_t a = 0; a < num_args; ++a) jpp_array_release(args[a]);
  for (uint32_t o = num_args - 1; o < num_results; ++o) {
    for (int step = 0; step < 2; ++step) jpp_array_release(results[step][o]);
  }
  model_destroy(model);
}

static void test_nothing_to_draw_is_refused(void** state) {
  (void)state;
  jpp_spans_t spans = {.ranks = 1, .end = 1};
  char* text = NULL;
  ASSERT_FAILS(jpp_spans_draw(&spans, 0, false, &text), JPP_INVALID_ARGUMENT, "1 column");
  spans.end = 0;
  ASSERT_FAILS(jpp_spans_draw(&spans, 9, false, &text), JPP_INVALID_ARGUMENT, "found 9");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_runs_follow_their_arguments),
      cmocka_unit_test(test_costs_are_those_of_the_device),
      cmocka_unit_test(test_costs_of_a_trial),
      cmocka_unit_test(test_runs_on_a_device_follow_each_other),
      cmocka_unit_test(test_a_trace_stays_until_the_next_traced_step),
      cmocka_unit_test(test_json_has_every_run),
      cmocka_unit_test(test_pictures),
      cmocka_unit_test(test_json_of_a_handmade_trace),
      cmocka_unit_test(test_steps_that_overlap),
      cmocka_unit_test(test_nothing_to_draw_is_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
