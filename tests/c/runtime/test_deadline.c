// How long a wait may take before it counts as a hang: a multiple of the usual time.
#include "base/clock.h"
#include "runtime/cluster/deadline.h"
#include "test_util.h"

static const int64_t kSecond = INT64_C(1000) * JPP_NANOSECONDS_OF_MS;
static const int64_t kBegun = 100;
enum { kLeastMs = 60000 };

// A step in which an instruction waits and the rest takes `rest`, in seconds. All
// processes are in the step from its beginning.
static void step(jpp_deadline_t* deadline, jpp_deadline_wait_t* wait, int waits,
                 int rest) {
  int64_t now = kBegun;
  jpp__deadline_begin(deadline, now);
  deadline->all_begun = now;
  now += waits * kSecond;
  jpp__deadline_note(deadline, wait, waits ? kBegun : 0, now);
  jpp__deadline_end(deadline, now + rest * kSecond);
}

static void test_nothing_is_known_of_the_first_step(void** state) {
  (void)state;
  jpp_deadline_t deadline = {0};
  jpp_deadline_wait_t wait = {.share = 0.5};
  jpp__deadline_begin(&deadline, kBegun);
  assert_true(jpp__deadline_limit(&deadline, &wait, kLeastMs) == INT64_MAX);
  step(&deadline, &wait, 1, 1);
  assert_true(jpp__deadline_limit(&deadline, &wait, kLeastMs) == 60 * kSecond);
}

// The first step of a job is often the slowest; it must not set the limit for long.
static void test_of_two_steps_the_slower_counts_of_three_the_middle(void** state) {
  (void)state;
  jpp_deadline_t deadline = {0};
  jpp_deadline_wait_t wait = {0};
  step(&deadline, &wait, 50, 0);
  assert_true(jpp__deadline_limit(&deadline, &wait, kLeastMs) == 1000 * kSecond);
  step(&deadline, &wait, 5, 0);
  assert_true(jpp__deadline_limit(&deadline, &wait, kLeastMs) == 1000 * kSecond);
  step(&deadline, &wait, 5, 0);
  assert_true(jpp__deadline_limit(&deadline, &wait, kLeastMs) == 100 * kSecond);
}

static void test_each_instruction_has_a_limit_of_its_own(void** state) {
  (void)state;
  jpp_deadline_t deadline = {0};
  jpp_deadline_wait_t first = {0}, second = {0};
  for (int i = 0; i < 5; ++i) {
    jpp__deadline_begin(&deadline, kBegun);
    deadline.all_begun = kBegun;
    jpp__deadline_note(&deadline, &first, kBegun, kBegun + 5 * kSecond);
    jpp__deadline_note(&deadline, &second, kBegun + 6 * kSecond, kBegun + 7 * kSecond);
    jpp__deadline_end(&deadline, kBegun + 8 * kSecond);
  }
  assert_true(jpp__deadline_limit(&deadline, &first, 1) == 100 * kSecond);
  assert_true(jpp__deadline_limit(&deadline, &second, 1) == 20 * kSecond);
}

static void test_one_long_wait_changes_nothing(void** state) {
  (void)state;
  jpp_deadline_t deadline = {0};
  jpp_deadline_wait_t wait = {0};
  for (int i = 0; i < 50; ++i) step(&deadline, &wait, i % 4 == 3 ? 500 : 5, 0);
  assert_true(jpp__deadline_limit(&deadline, &wait, kLeastMs) == 100 * kSecond);
  // Steps that become slower for good become the usual ones.
  for (int i = 0; i < kJppDeadlineSteps; ++i) step(&deadline, &wait, 30, 0);
  assert_true(jpp__deadline_limit(&deadline, &wait, kLeastMs) == 600 * kSecond);
}

// An instruction that never had to wait, because its sender was always ahead, may begin
// to wait.
static void test_what_the_plan_predicts_counts_as_usual(void** state) {
  (void)state;
  jpp_deadline_t deadline = {0};
  jpp_deadline_wait_t wait = {.share = 0.25};
  for (int i = 0; i < 3; ++i) step(&deadline, &wait, 0, 40);
  assert_true(jpp__deadline_usual(&deadline, &wait) == 10 * kSecond);
  assert_true(jpp__deadline_limit(&deadline, &wait, kLeastMs) == 200 * kSecond);
  for (int i = 0; i < 9; ++i) step(&deadline, &wait, 20, 20);
  assert_true(jpp__deadline_usual(&deadline, &wait) == 20 * kSecond);
}

static void test_a_wait_may_be_as_long_as_a_step(void** state) {
  (void)state;
  jpp_deadline_t deadline = {0};
  jpp_deadline_wait_t wait = {0};
  for (int i = 0; i < 3; ++i) step(&deadline, &wait, 0, 300);
  assert_true(jpp__deadline_usual(&deadline, &wait) == 0);
  assert_true(jpp__deadline_limit(&deadline, &wait, kLeastMs) == 300 * kSecond);
}

static void test_a_wait_for_a_process_that_has_not_begun_counts_from_then(void** state) {
  (void)state;
  jpp_deadline_t deadline = {0};
  jpp_deadline_wait_t wait = {0};
  jpp__deadline_begin(&deadline, 5);
  assert_true(jpp__deadline_waited(&deadline, 10, 1000) == 0);
  deadline.all_begun = 600;
  assert_true(jpp__deadline_waited(&deadline, 10, 1000) == 400);
  assert_true(jpp__deadline_waited(&deadline, 700, 1000) == 300);
  // The step, too, is timed from then on.
  deadline.all_begun = 50 * kSecond;
  jpp__deadline_note(&deadline, &wait, 10, 53 * kSecond);
  jpp__deadline_end(&deadline, 54 * kSecond);
  assert_true(jpp__deadline_usual(&deadline, &wait) == 3 * kSecond);
  assert_true(deadline.step == 4 * kSecond);
  jpp__deadline_begin(&deadline, 55 * kSecond);
  assert_true(jpp__deadline_waited(&deadline, 700, 1000) == 0);
}

// A wait of at most kJppDeadlineQuiet counts whether or not all processes have begun.
static void test_short_waits_count_whoever_has_begun(void** state) {
  (void)state;
  jpp_deadline_t deadline = {0};
  jpp_deadline_wait_t wait = {0};
  jpp__deadline_begin(&deadline, 5);
  jpp__deadline_note(&deadline, &wait, 10, 10 + kJppDeadlineQuiet);
  jpp__deadline_end(&deadline, 20 + kJppDeadlineQuiet);
  assert_true(jpp__deadline_usual(&deadline, &wait) == kJppDeadlineQuiet);
  for (int i = 0; i < 2; ++i) {
    jpp__deadline_begin(&deadline, 5);
    jpp__deadline_note(&deadline, &wait, 10, 11 + kJppDeadlineQuiet);
    jpp__deadline_end(&deadline, 20 + kJppDeadlineQuiet);
  }
  assert_true(jpp__deadline_usual(&deadline, &wait) == 0);
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
