// Advice on a plan that does not fit: which built-in schedules would fit, and what
// searches under memory limits find.
#include <stdlib.h>

#include "base/alloc.h"
#include "golden.h"
#include "jaxpp/advise.h"
#include "plan_util.h"

// Plans a graph of tests/golden with this limit on every rank, and asks for advice.
static jpp_status_t* plan_within(const char* name, const char* schedule, uint64_t bytes) {
  char* text = graph_text(name);
  jpp_graph_t* graph = NULL;
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &graph));
  free(text);
  uint64_t each[16];
  for (uint32_t r = 0; r < graph->ranks; ++r) each[r] = bytes;
  jpp_memory_limits_t limits = {.bytes = each};
  jpp_loop_schedule_t loops[PLAN_MAX_LOOPS] = {0};
  for (uint32_t l = 0; l < graph->num_loops; ++l)
    loops[l] = (jpp_loop_schedule_t){.struct_size = sizeof(*loops), .built_in = schedule};
  jpp_plan_options_t options = {.struct_size = sizeof(options), .loops = loops};
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_plan_graph(graph, &options, &planned));
  jpp_status_t* status = jpp_advise_fit(planned, &limits);
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
  return status;
}

static void append_refusal(const char* graph, const char* schedule, uint64_t bytes,
                           char* text, size_t size) {
  jpp_status_t* status = plan_within(graph, schedule, bytes);
  assert_int_equal(jpp_status_code(status), JPP_OUT_OF_MEMORY);
  size_t at = strlen(text);
  snprintf(text + at, size - at, "# %s, %s, %llu bytes\n%s\n\n", graph,
           schedule ? schedule : "as it says", (unsigned long long)bytes,
           jpp_status_message(status));
  jpp_status_free(status);
}

static void test_refusals_are_as_their_golden_file(void** state) {
  (void)state;
  char text[8192] = "";
  append_refusal("mlp4", "gpipe", 520, text, sizeof(text));
  append_refusal("mlp4", "gpipe", 300, text, sizeof(text));
  append_refusal("interleaved", NULL, 540, text, sizeof(text));
  append_refusal("two_loops", NULL, 900, text, sizeof(text));
  append_refusal("forward", NULL, 500, text, sizeof(text));
  assert_golden("advise/limits.txt", text);
}

// A schedule that the advice says fits does fit.
static void test_the_schedule_that_is_named_fits(void** state) {
  (void)state;
  jpp_status_t* status = plan_within("mlp4", "gpipe", 520);
  char name[64] = "";
  const char* at = strstr(jpp_status_message(status), "\nschedule ");
  assert_non_null(at);
  assert_int_equal(sscanf(at, "\nschedule %63s", name), 1);
  jpp_status_free(status);
  ASSERT_OK(plan_within("mlp4", name, 520));
}

static void test_limits_hold_for_the_peaks(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("mlp4", NULL, &planned));
  uint64_t peaks[4];
  for (uint32_t r = 0; r < 4; ++r) peaks[r] = planned.report->actors[r].peak_bytes;
  jpp_memory_limits_t limits = {.bytes = peaks};
  ASSERT_OK(jpp_advise_fit(planned.made, &limits));
  --peaks[3];
  ASSERT_FAILS(jpp_advise_fit(planned.made, &limits), JPP_OUT_OF_MEMORY,
               "memory limit: rank 3");
  plan_free(&planned);
}

static jpp_status_t* search(const planned_t* like, uint64_t limit,
                            jpp_search_result_t* out_result) {
  static const jpp_cost_t kCosts[] = {{1, 1, 1}, {1, 1, 1}, {2, 2, 2}, {3, 3, 3}};
  jpp_memory_limits_t limits = {.bytes = (uint64_t[]){limit, limit}};
  jpp_advise_search_t step = {.graph = like->graph,
                              .schedules = like->schedules,
                              .like = like->plan,
                              .limits = limit ? &limits : NULL};
  jpp_search_options_t options = {.struct_size = sizeof(options),
                                  .stages = 4,
                                  .ranks = 2,
                                  .microbatches = 4,
                                  .costs = kCosts,
                                  .seconds = 0.05};
  return jpp_advise_search(&step, &options, out_result);
}

static uint64_t peak_under(jpp_schedule_t* schedule) {
  planned_t planned = {.ranks = 2, .given = {schedule}};
  char* text = graph_text("interleaved");
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &planned.graph));
  free(text);
  ASSERT_OK(plan_scheduled(&planned, 0));
  uint64_t peak = planned.plan->programs[0].peak_bytes;
  uint64_t other = planned.plan->programs[1].peak_bytes;
  plan_free(&planned);  // the schedule too
  return peak > other ? peak : other;
}

// Under a limit the search finds another, longer schedule that really fits, and it
// reaches the limit that it reports as the smallest.
static void test_searches_keep_their_limits(void** state) {
  (void)state;
  planned_t planned;
  jpp_search_result_t result;
  ASSERT_OK(plan_file("interleaved", NULL, &planned));
  ASSERT_OK(search(&planned, 0, &result));
  double fastest = result.makespan;
  uint64_t free_peak = peak_under(result.schedule);
  jpp_status_t* status = search(&planned, 1, &result);
  assert_int_equal(jpp_status_code(status), JPP_OUT_OF_MEMORY);
  const char* at = strstr(jpp_status_message(status), "smallest takes ");
  unsigned long long least = 0;
  assert_non_null(at);
  assert_int_equal(sscanf(at, "smallest takes %llu", &least), 1);
  jpp_status_free(status);
  assert_true(least < free_peak);
  ASSERT_OK(search(&planned, least, &result));
  assert_true(result.makespan >= fastest);
  assert_true(peak_under(result.schedule) <= least);
  plan_free(&planned);
}

// Each loop without a schedule gets one; with them the step can be planned.
static void test_placeholders_of_a_trial(void** state) {
  (void)state;
  char* text = graph_text("two_loops");
  jpp_graph_t* graph = NULL;
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &graph));
  free(text);
  assert_int_equal(graph->num_loops, 2);
  jpp_schedule_t *made[2], *none[2];
  ASSERT_OK(jpp_advise_placeholders(graph, graph->ranks, NULL, 2, made));
  jpp_loop_schedule_t loops[2] = {0};
  for (uint32_t l = 0; l < 2; ++l) {
    assert_int_equal(made[l]->microbatches, graph->loops[l].microbatches);
    assert_int_equal(made[l]->ranks, graph->ranks);
    loops[l] = (jpp_loop_schedule_t){.struct_size = sizeof(*loops), .given = made[l]};
  }
  jpp_plan_options_t options = {.struct_size = sizeof(options), .loops = loops};
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_plan_graph(graph, &options, &planned));
  jpp_planned_destroy(planned);

  const jpp_schedule_t* given[2] = {made[0], NULL};
  ASSERT_OK(jpp_advise_placeholders(graph, graph->ranks, given, 2, none));
  assert_null(none[0]);
  assert_non_null(none[1]);
  jpp_schedule_destroy(none[1]);
  for (int64_t n = 0, failed = 1; failed; ++n) {
    jpp__alloc_fail_after(n);
    jpp_status_t* status = jpp_advise_placeholders(graph, graph->ranks, NULL, 2, none);
    jpp__alloc_fail_after(-1);
    failed = status != NULL;
    if (failed) assert_int_equal(jpp_status_code(status), JPP_OUT_OF_MEMORY);
    for (uint32_t l = 0; l < 2; ++l) {
      assert_true(!failed || !none[l]);
      jpp_schedule_destroy(none[l]);
    }
    jpp_status_free(status);
  }
  for (uint32_t l = 0; l < 2; ++l) jpp_schedule_destroy(made[l]);
  jpp_graph_destroy(graph);
}

static void test_every_allocation_may_fail(void** state) {
  (void)state;
  char* text = graph_text("mlp2");
  jpp_graph_t* graph = NULL;
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &graph));
  free(text);
  jpp_memory_limits_t limits = {.bytes = (uint64_t[]){1, 1}};
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_plan_graph(graph, NULL, &planned));
  int64_t n = 0;
  for (bool done = false; !done; n += 7) {
    jpp__alloc_fail_after(n);
    jpp_status_t* status = jpp_advise_fit(planned, &limits);
    assert_int_equal(jpp_status_code(status), JPP_OUT_OF_MEMORY);
    done = strstr(jpp_status_message(status), "smallest limit") != NULL;
    jpp_status_free(status);
  }
  jpp__alloc_fail_after(-1);
  assert_true(n > 100);
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_refusals_are_as_their_golden_file),
      cmocka_unit_test(test_the_schedule_that_is_named_fits),
      cmocka_unit_test(test_limits_hold_for_the_peaks),
      cmocka_unit_test(test_searches_keep_their_limits),
      cmocka_unit_test(test_placeholders_of_a_trial),
      cmocka_unit_test(test_every_allocation_may_fail),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
