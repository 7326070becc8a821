// How long a wait may be that is not taken for a hang: a multiple of what is usual.
#include "base/clock.h"
#include "runtime/pace.h"
#include "test_util.h"

static const int64_t kSecond = INT64_C(1000) * JPP_NANOSECONDS_OF_MS;
enum { kLeastMs = 60000 };

// A step that all have begun at `begun`, with waits of these seconds, one after another.
static void step(jpp_pace_t* pace, int64_t begun, const int* waits, int count) {
  int64_t now = begun;
  jpp_pace_begin(pace);
  for (int i = 0; i < count; ++i) {
    pace->all_begun = begun;
    jpp_pace_note(pace, now, now + waits[i] * kSecond);
    now += waits[i] * kSecond;
  }
  jpp_pace_end(pace);
}

static void test_nothing_is_known_of_the_first_step(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  jpp_pace_begin(&pace);
  assert_true(jpp_pace_limit(&pace, kLeastMs) == INT64_MAX);
  step(&pace, 100, (const int[]){1, 2}, 2);
  assert_true(jpp_pace_limit(&pace, kLeastMs) == 60 * kSecond);
}

// The first step of a job is often the slowest: it does not set the limit for long.
static void test_of_two_steps_the_slower_counts_of_three_the_middle(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  step(&pace, 100, (const int[]){50}, 1);
  assert_true(jpp_pace_limit(&pace, kLeastMs) == 1000 * kSecond);
  step(&pace, 100, (const int[]){5}, 1);
  assert_true(jpp_pace_limit(&pace, kLeastMs) == 1000 * kSecond);
  step(&pace, 100, (const int[]){5}, 1);
  assert_true(jpp_pace_limit(&pace, kLeastMs) == 100 * kSecond);
}

static void test_the_longest_wait_counts_not_the_step(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  for (int i = 0; i < 5; ++i) step(&pace, 100, (const int[]){2, 5, 1, 4, 3}, 5);
  assert_true(jpp_pace_limit(&pace, kLeastMs) == 100 * kSecond);
}

static void test_one_long_wait_changes_nothing(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  for (int i = 0; i < 50; ++i) {
    step(&pace, 100, i % 4 == 3 ? (const int[]){500} : (const int[]){5}, 1);
  }
  assert_true(jpp_pace_limit(&pace, kLeastMs) == 100 * kSecond);
  // Steps that become slower are slow steps in the end.
  for (int i = 0; i < kJppPaceSteps; ++i) step(&pace, 100, (const int[]){30}, 1);
  assert_true(jpp_pace_limit(&pace, kLeastMs) == 600 * kSecond);
}

static void test_a_wait_for_a_process_that_has_not_begun_counts_from_then(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  jpp_pace_begin(&pace);
  assert_true(jpp_pace_wait(&pace, 10, 1000) == 0);
  pace.all_begun = 600;
  assert_true(jpp_pace_wait(&pace, 10, 1000) == 400);
  assert_true(jpp_pace_wait(&pace, 700, 1000) == 300);
  jpp_pace_begin(&pace);
  assert_true(jpp_pace_wait(&pace, 700, 1000) == 0);
}

static void test_steps_that_never_wait(void** state) {
  (void)state;
  jpp_pace_t pace = {0};
  for (int i = 0; i < 3; ++i) step(&pace, 100, NULL, 0);
  assert_true(jpp_pace_limit(&pace, kLeastMs) == 60 * kSecond);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_nothing_is_known_of_the_first_step),
      cmocka_unit_test(test_of_two_steps_the_slower_counts_of_three_the_middle),
      cmocka_unit_test(test_the_longest_wait_counts_not_the_step),
      cmocka_unit_test(test_one_long_wait_changes_nothing),
      cmocka_unit_test(test_a_wait_for_a_process_that_has_not_begun_counts_from_then),
      cmocka_unit_test(test_steps_that_never_wait),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
