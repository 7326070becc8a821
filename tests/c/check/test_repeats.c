// Plans with so many microbatches that the planner omits repetitions and the checker
// skips them: both give what they give when they visit every instruction.
#include <stdio.h>
#include <stdlib.h>

#include "check/checker.h"
#include "interpreter.h"
#include "jaxpp/schedule_csv.h"
#include "plan_util.h"
#include "program/builder.h"
#include "random_step.h"
#include "test_util.h"

typedef struct counts {
  uint64_t instrs, repeated;
  uint64_t plans;  // with repetitions
} counts_t;

static void compare_texts(char* text, char* expected, const char* name) {
  if (strcmp(text, expected) != 0)
    fail_msg("%s:\n%s\nexpected\n%s", name, text, expected);
  jpp_text_free(text);
  jpp_text_free(expected);
}

static void compare_programs(const planned_t* planned, uint32_t slots, const char* name) {
  jpp_program_options_t options = {.struct_size = sizeof(options),
                                   .schedules = planned->schedules,
                                   .value_bytes = planned->plan->value_bytes,
                                   .channel_slots = slots};
  jpp_plan_t* whole = NULL;
  char *text = NULL, *expected = NULL;
  ASSERT_OK(jpp__program_build(planned->staged, &options, true, &whole));
  ASSERT_OK(jpp_plan_print(planned->plan, &text));
  ASSERT_OK(jpp_plan_print(whole, &expected));
  compare_texts(text, expected, name);
  jpp_plan_destroy(whole);
}

static void compare_reports(const planned_t* planned, const char* name,
                            counts_t* counts) {
  jpp_check_report_t *report = NULL, *whole = NULL;
  uint64_t repeated = 0, none = 0;
  char *text = NULL, *expected = NULL;
  ASSERT_OK(jpp__check_plan(planned->plan, false, &repeated, &report));
  ASSERT_OK(jpp__check_plan(planned->plan, true, &none, &whole));
  assert_int_equal(none, 0);
  ASSERT_OK(jpp_check_report_print(report, &text));
  ASSERT_OK(jpp_check_report_print(whole, &expected));
  compare_texts(text, expected, name);
  jpp_check_report_destroy(report);
  jpp_check_report_destroy(whole);
  counts->repeated += repeated;
  counts->plans += repeated > 0;
}

static void compare_curves(const planned_t* planned, counts_t* counts) {
  for (uint32_t r = 0; r < planned->ranks; ++r) {
    uint32_t count = planned->plan->programs[r].num_instrs + 1;
    jpp_memory_point_t* points = calloc(count, sizeof(*points));
    jpp_memory_point_t* expected = calloc(count, sizeof(*points));
    ASSERT_OK(jpp__check_memory_curve(planned->plan, r, false, points));
    ASSERT_OK(jpp__check_memory_curve(planned->plan, r, true, expected));
    assert_memory_equal(points, expected, count * sizeof(*points));
    free(points);
    free(expected);
    counts->instrs += count - 1;
  }
}

static void compare(const planned_t* planned, uint32_t slots, const char* name,
                    counts_t* counts) {
  compare_programs(planned, slots, name);
  compare_reports(planned, name, counts);
  compare_curves(planned, counts);
}

static void test_graphs_with_many_microbatches(void** state) {
  (void)state;
  static const char* const kSchedules[] = {
      NULL,   "1f1b",       "eager-1f1b", "gpipe", "zb-h1", "interleaved-1f1b",
      "zb-v", "dualpipe-v",
  };
  static const uint32_t kMicrobatches[] = {3, 4, 5, 7, 8, 12, 16, 23, 32, 64};
  counts_t counts = {0};
  for (uint32_t g = 0; kGraphs[g]; ++g) {
    for (size_t s = 0; s < sizeof(kSchedules) / sizeof(*kSchedules); ++s) {
      for (size_t m = 0; m < sizeof(kMicrobatches) / sizeof(*kMicrobatches); ++m) {
        planned_t planned;
        plan_options_t options = {.schedule = kSchedules[s],
                                  .microbatches = kMicrobatches[m]};
        jpp_status_t* status = plan_file(kGraphs[g], &options, &planned);
        // Not every schedule accepts these stages or this number.
        if (!status) compare(&planned, 0, kGraphs[g], &counts);
        jpp_status_free(status);
        plan_free(&planned);
      }
    }
  }
  print_message("# %llu of %llu instructions repeat others\n",
                (unsigned long long)counts.repeated, (unsigned long long)counts.instrs);
  assert_true(counts.repeated * 4 > counts.instrs);
}

static void test_random_steps_with_many_microbatches(void** state) {
  (void)state;
  const char* times = test_variable("JPP_TEST_TIMES");
  uint64_t count = times ? strtoull(times, NULL, 10) : 600;
  counts_t counts = {0};
  for (uint64_t seed = 1; seed <= count; ++seed) {
    uint32_t slots = 0;
    planned_t planned = random_long_step(seed, (uint32_t)(seed % 7) + 2, &slots);
    ASSERT_OK(plan_scheduled(&planned, slots));
    char name[32];
    snprintf(name, sizeof(name), "seed %llu", (unsigned long long)seed);
    compare(&planned, slots, name, &counts);
    uint64_t* expected = interpret_graph(planned.graph);
    assert_int_equal(interpret_plan(planned.plan, expected), OUTCOME_SAME);
    free(expected);
    plan_free(&planned);
  }
  print_message("# %llu of %llu instructions repeat others, in %llu of %llu plans\n",
                (unsigned long long)counts.repeated, (unsigned long long)counts.instrs,
                (unsigned long long)counts.plans, (unsigned long long)count);
  assert_true(counts.plans * 4 > count);
}

// The last microbatches of the lists are the first ones: those after the repetitions
// cannot become earlier.
static void test_lists_that_end_with_their_first_microbatches(void** state) {
  (void)state;
  enum { kRanks = 3, kMicrobatches = 16 };
  jpp_str_t rows = {0};
  for (uint32_t r = 0; r < kRanks; ++r) {
    for (uint32_t m = 2; m < kMicrobatches + 2; ++m) {
      jpp_str_appendf(&rows, "%s%uF%u", m == 2 ? "" : ",", r, m % kMicrobatches);
    }
    jpp_str_append(&rows, "\n");
  }
  char *csv = NULL, *text = graph_text_of("forward", kMicrobatches);
  ASSERT_OK(jpp_str_finish(&rows, &csv));
  planned_t planned = {.ranks = kRanks};
  counts_t counts = {0};
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &planned.graph));
  ASSERT_OK(jpp_schedule_from_csv("late", csv, strlen(csv), NULL, &planned.given[0]));
  ASSERT_OK(plan_scheduled(&planned, 0));
  compare(&planned, 0, "late", &counts);
  assert_true(counts.repeated > 0);
  plan_free(&planned);
  jpp_text_free(csv);
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_graphs_with_many_microbatches),
      cmocka_unit_test(test_random_steps_with_many_microbatches),
      cmocka_unit_test(test_lists_that_end_with_their_first_microbatches),
  };
  return cmocka_run_group_tests_name("check_repeats", tests, NULL, NULL);
}
