// How long a wait may be that is not taken for a hang: a multiple of what is usual.
#include "base/clock.h"
#include "runtime/pace.h"
#include "test_util.h"

static const int64_t kSecond = INT64_C(1000) * JPP_NANOSECONDS_OF_MS;
static const int64_t kBegun = 100;
enum { kLeastMs = 60000 };

// A step in which an instruction waits, and all else takes `rest`; seconds. All processes
// are in it from its beginning.
static void step(jpp_pace_t* pace, jpp_pace_wait_t* wait, int waits, int rest) {
  int64_t now = kBegun;
  jpp_pace_begin(pace, now);
  pace->all_begun = now;
  now += waits * kSecond;
  jpp_pace_note(pace, wait, waits ? kBegun : 0, now);
  jpp_pace_end(pace, now + rest * kSecond);
}

static void test_nothing_is_known_of_the_first_step(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  jpp_pace_wait_t wait = {.share = 0.5};
  jpp_pace_begin(&pace, kBegun);
  assert_true(jpp_pace_limit(&pace, &wait, kLeastMs) == INT64_MAX);
  step(&pace, &wait, 1, 1);
  assert_true(jpp_pace_limit(&pace, &wait, kLeastMs) == 60 * kSecond);
}

// The first step of a job is often the slowest: it does not set the limit for long.
static void test_of_two_steps_the_slower_counts_of_three_the_middle(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  jpp_pace_wait_t wait = {0};
  step(&pace, &wait, 50, 0);
  assert_true(jpp_pace_limit(&pace, &wait, kLeastMs) == 1000 * kSecond);
  step(&pace, &wait, 5, 0);
  assert_true(jpp_pace_limit(&pace, &wait, kLeastMs) == 1000 * kSecond);
  step(&pace, &wait, 5, 0);
  assert_true(jpp_pace_limit(&pace, &wait, kLeastMs) == 100 * kSecond);
}

static void test_each_instruction_has_a_limit_of_its_own(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  jpp_pace_wait_t first = {0}, second = {0};
  for (int i = 0; i < 5; ++i) {
    jpp_pace_begin(&pace, kBegun);
    pace.all_begun = kBegun;
    jpp_pace_note(&pace, &first, kBegun, kBegun + 5 * kSecond);
    jpp_pace_note(&pace, &second, kBegun + 6 * kSecond, kBegun + 7 * kSecond);
    jpp_pace_end(&pace, kBegun + 8 * kSecond);
  }
  assert_true(jpp_pace_limit(&pace, &first, 1) == 100 * kSecond);
  assert_true(jpp_pace_limit(&pace, &second, 1) == 20 * kSecond);
}

static void test_one_long_wait_changes_nothing(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  jpp_pace_wait_t wait = {0};
  for (int i = 0; i < 50; ++i) step(&pace, &wait, i % 4 == 3 ? 500 : 5, 0);
  assert_true(jpp_pace_limit(&pace, &wait, kLeastMs) == 100 * kSecond);
  // Steps that become slower are slow steps in the end.
  for (int i = 0; i < kJppPaceSteps; ++i) step(&pace, &wait, 30, 0);
  assert_true(jpp_pace_limit(&pace, &wait, kLeastMs) == 600 * kSecond);
}

// One that never had to wait, since its sender was always ahead, does once that is not.
static void test_what_the_plan_predicts_counts_as_usual(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  jpp_pace_wait_t wait = {.share = 0.25};
  for (int i = 0; i < 3; ++i) step(&pace, &wait, 0, 40);
  assert_true(jpp_pace_usual(&pace, &wait) == 10 * kSecond);
  assert_true(jpp_pace_limit(&pace, &wait, kLeastMs) == 200 * kSecond);
  for (int i = 0; i < 9; ++i) step(&pace, &wait, 20, 20);
  assert_true(jpp_pace_usual(&pace, &wait) == 20 * kSecond);
}

static void test_a_wait_may_be_as_long_as_a_step(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  jpp_pace_wait_t wait = {0};
  for (int i = 0; i < 3; ++i) step(&pace, &wait, 0, 300);
  assert_true(jpp_pace_usual(&pace, &wait) == 0);
  assert_true(jpp_pace_limit(&pace, &wait, kLeastMs) == 300 * kSecond);
}

static void test_a_wait_for_a_process_that_has_not_begun_counts_from_then(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  jpp_pace_wait_t wait = {0};
  jpp_pace_begin(&pace, 5);
  assert_true(jpp_pace_waited(&pace, 10, 1000) == 0);
  pace.all_begun = 600;
  assert_true(jpp_pace_waited(&pace, 10, 1000) == 400);
  assert_true(jpp_pace_waited(&pace, 700, 1000) == 300);
  // The step, too, takes from then on.
  pace.all_begun = 50 * kSecond;
  jpp_pace_note(&pace, &wait, 10, 53 * kSecond);
  jpp_pace_end(&pace, 54 * kSecond);
  assert_true(jpp_pace_usual(&pace, &wait) == 3 * kSecond);
  assert_true(pace.step == 4 * kSecond);
  jpp_pace_begin(&pace, 55 * kSecond);
  assert_true(jpp_pace_waited(&pace, 700, 1000) == 0);
}

// Whether all were in the step is asked later than that.
static void test_short_waits_count_whoever_has_begun(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  jpp_pace_wait_t wait = {0};
  jpp_pace_begin(&pace, 5);
  jpp_pace_note(&pace, &wait, 10, 10 + kJppPaceQuiet);
  jpp_pace_end(&pace, 20 + kJppPaceQuiet);
  assert_true(jpp_pace_usual(&pace, &wait) == kJppPaceQuiet);
  for (int i = 0; i < 2; ++i) {
    jpp_pace_begin(&pace, 5);
    jpp_pace_note(&pace, &wait, 10, 11 + kJppPaceQuiet);
    jpp_pace_end(&pace, 20 + kJppPaceQuiet);
  }
  assert_true(jpp_pace_usual(&pace, &wait) == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_nothing_is_known_of_the_first_step),
      cmocka_unit_test(test_of_two_steps_the_slower_counts_of_three_the_middle),
      cmocka_unit_test(test_each_instruction_has_a_limit_of_its_own),
      cmocka_unit_test(test_one_long_wait_changes_nothing),
      cmocka_unit_test(test_what_the_plan_predicts_counts_as_usual),
      cmocka_unit_test(test_a_wait_may_be_as_long_as_a_step),
      cmocka_unit_test(test_a_wait_for_a_process_that_has_not_begun_counts_from_then),
      cmocka_unit_test(test_short_waits_count_whoever_has_begun),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
