// Predictions from traces: a predicted step, written as a trace and read again, predicts
// itself.
#include <math.h>
#include <stdio.h>

#include "jaxpp/str.h"
#include "jaxpp/view.h"
#include "random_step.h"
#include "test_util.h"

enum { kSeeds = 100 };

static jpp_spans_t* read_trace(const char* text) {
  jpp_trace_text_t trace = {.name = "trace", .text = text, .length = strlen(text)};
  jpp_spans_t* spans = NULL;
  ASSERT_OK(jpp_spans_read(&trace, 1, &spans));
  return spans;
}

static void predict_again(uint64_t seed) {
  uint32_t slots = 0;
  planned_t planned = random_step(seed, &slots);
  ASSERT_OK(plan_scheduled(&planned, slots));
  double* times = calloc(planned.staged->num_tasks, sizeof(*times));
  for (uint32_t t = 0; t < planned.staged->num_tasks; ++t) {
    // Traces do not contain tasks without ops.
    if (planned.staged->tasks[t].num_ops) times[t] = 1 + (double)(t * 7 % 11);
  }
  jpp_machine_t machine = {.struct_size = sizeof(machine),
                           .cores = (uint32_t)seed % 4,
                           .processes = planned.ranks,
                           .link = {0.5, 1000}};
  jpp_predict_options_t options = {
      .struct_size = sizeof(options), .task_times = times, .machine = &machine};
  jpp_prediction_t *first = NULL, *second = NULL;
  char* text = NULL;
  ASSERT_OK(jpp_predict(planned.plan, &options, &first));
  ASSERT_OK(jpp_prediction_to_trace(first, &text));
  jpp_spans_t* spans = read_trace(text);
  options.task_times = NULL;
  ASSERT_OK(jpp_spans_predict(spans, planned.plan, &options, &second));
  if (fabs(first->makespan - second->makespan) > 1e-4 * first->makespan) {
    fail_msg("seed %llu: %g, expected %g", (unsigned long long)seed, second->makespan,
             first->makespan);
  }
  jpp_spans_destroy(spans);
  jpp_text_free(text);
  jpp_prediction_destroy(first);
  jpp_prediction_destroy(second);
  free(times);
  plan_free(&planned);
}

static void test_a_predicted_trace_predicts_itself(void** state) {
  (void)state;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) predict_again(seed);
}

// Predicts mlp2 from traces of `count` steps. A task of its loop runs four times a step,
// and takes `times[k]` in step k.
static double predict_from_steps(const double* times, uint32_t count) {
  planned_t planned;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  double* of_tasks = calloc(planned.staged->num_tasks, sizeof(*of_tasks));
  jpp_trace_text_t texts[8] = {0};
  jpp_machine_t machine = {
      .struct_size = sizeof(machine), .processes = 2, .link.latency = 0.25};
  jpp_predict_options_t options = {
      .struct_size = sizeof(options), .task_times = of_tasks, .machine = &machine};
  jpp_prediction_t* prediction = NULL;
  for (uint32_t k = 0; k < count; ++k) {
    for (uint32_t t = 0; t < planned.staged->num_tasks; ++t) {
      of_tasks[t] = planned.staged->tasks[t].loop == 0 ? times[k] : 0;
    }
    char *text = NULL, *noted = NULL;
    jpp_spans_t* spans = NULL;
    ASSERT_OK(jpp_predict(planned.plan, &options, &prediction));
    ASSERT_OK(jpp_prediction_to_trace(prediction, &text));
    jpp_prediction_destroy(prediction);
    spans = read_trace(text);
    spans->step = 1 + k;
    spans->clock = (int64_t)1e18 + (int64_t)1e9 * k;
    ASSERT_OK(jpp_spans_to_json(spans, &noted));
    texts[k] = (jpp_trace_text_t){.name = "t", .text = noted, .length = strlen(noted)};
    jpp_spans_destroy(spans);
    jpp_text_free(text);
  }
  jpp_spans_t* joined = NULL;
  ASSERT_OK(jpp_spans_read(texts, count, &joined));
  machine.link.latency = 0;  // unknown, so it is measured in the traces
  ASSERT_OK(jpp_spans_predict(joined, planned.plan, &options, &prediction));
  double makespan = prediction->makespan;
  jpp_prediction_destroy(prediction);
  jpp_spans_destroy(joined);
  for (uint32_t k = 0; k < count; ++k) jpp_text_free((char*)texts[k].text);
  free(of_tasks);
  plan_free(&planned);
  return makespan;
}

static void test_traces_of_several_steps(void** state) {
  (void)state;
  // The predicted step has as many microbatches as the first traced one, and takes only
  // its times. More steps do not change the latency.
  double one = predict_from_steps((double[]){1}, 1);
  assert_true(fabs(predict_from_steps((double[]){1, 1, 1}, 3) - one) < 1e-4);
  assert_true(fabs(predict_from_steps((double[]){1, 7, 9}, 3) - one) < 1e-4);
}

static void test_texts_and_a_missing_task(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  double* times = calloc(planned.staged->num_tasks, sizeof(*times));
  for (uint32_t t = 0; t < planned.staged->num_tasks; ++t) {
    times[t] = planned.staged->tasks[t].loop == 0;
  }
  jpp_predict_options_t options = {
      .struct_size = sizeof(options), .task_times = times, .steps = 2};
  jpp_prediction_t* prediction = NULL;
  char* text = NULL;
  ASSERT_OK(jpp_predict(planned.plan, &options, &prediction));
  ASSERT_OK(jpp_prediction_print(prediction, &text));
  assert_non_null(strstr(text, "step: 10.000 ms, bubble 20.0%\n2 steps: 10.000 ms from"));
  assert_non_null(strstr(text, "  0 -> 1         4          256\n"));
  jpp_text_free(text);
  ASSERT_OK(jpp_prediction_print_json(prediction, &text));
  assert_non_null(strstr(text, "\"makespan\": 10.0,"));
  jpp_text_free(text);
  jpp_prediction_destroy(prediction);
  free(times);

  jpp_spans_t* spans = read_trace(
      "[{\"ph\": \"X\", \"name\": \"fwd_0__1\", \"tid\": 5, \"ts\": 0, \"dur\": 4,"
      " \"args\": {\"microbatch\": 1, \"stage\": 0}}]");
  ASSERT_FAILS(jpp_spans_predict(spans, planned.plan, &options, &prediction),
               JPP_INVALID_ARGUMENT,
               "trace: expected a run of each of the plan's tasks, found none of ");
  ASSERT_FAILS(jpp_spans_predict(spans, planned.plan, &options, &prediction),
               JPP_INVALID_ARGUMENT, "and give the traces of all processes of its job");
  jpp_spans_destroy(spans);
  plan_free(&planned);
}

// The memory that this needs does not depend on the number of the trace's ranks.
static void predict_with_ranks_from(uint32_t first, const char* refusal) {
  planned_t planned;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  jpp_str_t str = {0};
  for (uint32_t t = 0; t < planned.staged->num_tasks; ++t) {
    jpp_str_appendf(&str,
                    "%s{\"ph\": \"X\", \"name\": \"%s\", \"tid\": %u, \"ts\": %u, "
                    "\"dur\": 1000}",
                    t ? "," : "[", planned.staged->tasks[t].name, first + t, 1000 * t);
  }
  jpp_str_append(&str, "]");
  char* text = NULL;
  ASSERT_OK(jpp_str_finish(&str, &text));
  jpp_spans_t* spans = read_trace(text);
  jpp_machine_t machine = {.struct_size = sizeof(machine), .cores = 2};
  jpp_predict_options_t options = {.struct_size = sizeof(options), .machine = &machine};
  jpp_prediction_t* prediction = NULL;
  if (refusal) {
    ASSERT_FAILS(jpp_spans_predict(spans, planned.plan, &options, &prediction),
                 JPP_PARSE_ERROR, refusal);
  } else {
    ASSERT_OK(jpp_spans_predict(spans, planned.plan, &options, &prediction));
    assert_true(prediction->makespan >= 1);
  }
  jpp_prediction_destroy(prediction);
  jpp_spans_destroy(spans);
  jpp_text_free(text);
  plan_free(&planned);
}

static void test_a_trace_with_more_ranks(void** state) {
  (void)state;
  predict_with_ranks_from(2, NULL);
  predict_with_ranks_from(1000000, NULL);
  predict_with_ranks_from(1048576,
                          "at 0 ms: expected a rank below 1048576 as tid, found 1048576");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_predicted_trace_predicts_itself),
      cmocka_unit_test(test_traces_of_several_steps),
      cmocka_unit_test(test_texts_and_a_missing_task),
      cmocka_unit_test(test_a_trace_with_more_ranks),
  };
  return cmocka_run_group_tests_name("view_prediction", tests, NULL, NULL);
}
