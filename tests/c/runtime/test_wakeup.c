// The sleep of the issuing thread, and how other threads end it at any moment.
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include "base/clock.h"
#include "runtime/cluster/wakeup.h"
#include "test_util.h"

// A test that sleeps this long exceeds its time limit and fails.
static const int64_t kForever = INT64_C(3600) * 1000000000;
enum { kRounds = 2000 };

static void test_what_is_readable_ends_it(void** state) {
  (void)state;
  jpp_wakeup_t wakeup = {0};
  int ends[2];
  ASSERT_OK(jpp__wakeup_open(&wakeup));
  assert_int_equal(pipe(ends), 0);
  assert_int_equal(write(ends[1], "x", 1), 1);
  jpp__wakeup_begin(&wakeup);
  jpp__wakeup_sleep(&wakeup, ends[0], kForever);
  jpp__wakeup_end(&wakeup);
  close(ends[0]);
  close(ends[1]);
  jpp__wakeup_close(&wakeup);
}

static void test_time_ends_it(void** state) {
  (void)state;
  jpp_wakeup_t wakeup = {0};
  ASSERT_OK(jpp__wakeup_open(&wakeup));
  // A call that finds no sleeper does not end the next sleep.
  jpp__wakeup_call(&wakeup);
  int64_t begin = jpp__clock_now();
  jpp__wakeup_begin(&wakeup);
  jpp__wakeup_sleep(&wakeup, -1, 2000000);
  jpp__wakeup_end(&wakeup);
  assert_true(jpp__clock_now() - begin >= 2000000);
  jpp__wakeup_close(&wakeup);
}

typedef struct caller {
  jpp_wakeup_t wakeup;
  atomic_uint made, seen;
} caller_t;

// Changes the state, calls, and waits until the other thread has seen it.
static void* make_all(void* user) {
  caller_t* caller = user;
  for (uint32_t i = 1; i <= kRounds; ++i) {
    atomic_store(&caller->made, i);
    jpp__wakeup_call(&caller->wakeup);
    while (atomic_load(&caller->seen) < i) sched_yield();
  }
  return NULL;
}

// No call is missed, whether it comes before the sleep, while it begins or during it.
static void test_no_call_is_missed(void** state) {
  (void)state;
  caller_t caller = {0};
  pthread_t thread;
  ASSERT_OK(jpp__wakeup_open(&caller.wakeup));
  assert_int_equal(pthread_create(&thread, NULL, make_all, &caller), 0);
  for (uint32_t i = 1; i <= kRounds; ++i) {
    while (atomic_load(&caller.made) < i) {
      jpp__wakeup_begin(&caller.wakeup);
      if (atomic_load(&caller.made) < i) {
        jpp__wakeup_sleep(&caller.wakeup, -1, kForever);
      }
      jpp__wakeup_end(&caller.wakeup);
    }
    atomic_store(&caller.seen, i);
  }
  pthread_join(thread, NULL);
  jpp__wakeup_close(&caller.wakeup);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_what_is_readable_ends_it),
      cmocka_unit_test(test_time_ends_it),
      cmocka_unit_test(test_no_call_is_missed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
