// Calls on arrays: arrays that do not exist yet, steps in flight, donation, and failures,
// which are reported once.
#include <pthread.h>
#include <stdlib.h>

#include "stepper.h"

// --- Steps in flight ------------------------------------------------------------------

// Returns the last loss of a training whose steps are called one after another; it does
// not depend on the number of steps in flight or of devices.
static float train(const char* text, model_options_t options, uint32_t steps, bool wait) {
  stepper_t stepper = stepper_make(text, options);
  float loss = 0;
  for (uint32_t i = 0; i < steps; ++i) {
    ASSERT_OK(stepper_call(&stepper, NULL));
    if (wait) ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
    if (i + 1 == steps)
      loss = model_read_array(stepper.results[stepper_num_results(&stepper) - 1]);
    stepper_feed_back(&stepper);
  }
  stepper_end(&stepper);
  return loss;
}

static void test_steps_in_flight_train_alike(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  float expected = train(text, (model_options_t){.steps_in_flight = 1}, 20, true);
  for (uint32_t in_flight = 1; in_flight <= 4; ++in_flight) {
    for (uint32_t per_rank = 1; per_rank <= 2; ++per_rank) {
      model_options_t options = {.steps_in_flight = in_flight,
                                 .devices_per_rank = per_rank,
                                 .device_threads = 2,
                                 .latency_us = 30};
      assert_float_equal(train(text, options, 20, false), expected, 0);
    }
  }
  free(text);
}

// Calls return before anything is done, until every device is held up.
static void test_a_call_does_not_wait(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 4);
  stepper_t stepper = stepper_make(
      text,
      (model_options_t){.device_threads = 1, .latency_us = 20000, .steps_in_flight = 3});
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(stepper_call(&stepper, NULL));
    bool ready = true;
    ASSERT_OK(jpp_array_is_ready(stepper.results[0], &ready));
    assert_false(ready);
    stepper_feed_back(&stepper);
  }
  ASSERT_OK(jpp_array_await(stepper.args[0], NULL));
  bool ready = false;
  ASSERT_OK(jpp_array_is_ready(stepper.args[0], &ready));
  assert_true(ready);
  stepper_end(&stepper);
  free(text);
}

// Each of several steps in flight is done before the ones after it.
static void test_the_first_steps_are_awaited_while_others_go_on(void** state) {
  (void)state;
  enum { kSteps = 4 };
  char* text = model_chain(2, 2, 4);
  stepper_t stepper = stepper_make(
      text, (model_options_t){
                .device_threads = 1, .latency_us = 10000, .steps_in_flight = kSteps});
  jpp_runtime_t* runtime = stepper.model->runtime;
  jpp_array_t* losses[kSteps];
  for (uint64_t i = 0; i < kSteps; ++i) {
    assert_int_equal(jpp_runtime_num_steps(runtime), i);
    ASSERT_OK(stepper_call(&stepper, NULL));
    losses[i] = stepper.results[stepper_num_results(&stepper) - 1];
    jpp_array_hold(losses[i]);
    stepper_feed_back(&stepper);
  }
  for (uint64_t i = 0; i < kSteps; ++i) {
    ASSERT_OK(jpp_runtime_await_steps(runtime, i + 1, NULL));
    bool ready = false, last_is_ready = true;
    ASSERT_OK(jpp_array_is_ready(losses[i], &ready));
    assert_true(ready);
    if (i == 0) {
      ASSERT_OK(jpp_array_is_ready(losses[kSteps - 1], &last_is_ready));
      assert_false(last_is_ready);
    }
    jpp_array_release(losses[i]);
  }
  ASSERT_OK(jpp_runtime_await_steps(runtime, 1000, NULL));  // there are no more
  stepper_end(&stepper);
  free(text);
}

static bool always(void* user) {
  ++*(int*)user;
  return true;
}

static void test_waits_are_interrupted_and_steps_go_on(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 4);
  stepper_t stepper = stepper_make(
      text,
      (model_options_t){.device_threads = 1, .latency_us = 30000, .steps_in_flight = 1});
  int asked = 0;
  jpp_interrupt_t interrupt = {.requested = always, .user = &asked};
  ASSERT_OK(stepper_call(&stepper, NULL));
  ASSERT_FAILS(jpp_array_await(stepper.results[0], &interrupt), JPP_CANCELLED, "wait");
  ASSERT_FAILS(jpp_runtime_await(stepper.model->runtime, &interrupt), JPP_CANCELLED,
               "wait");
  jpp_array_t* first = stepper.results[0];
  jpp_array_hold(first);
  stepper_feed_back(&stepper);
  ASSERT_FAILS(stepper_call(&stepper, &interrupt), JPP_CANCELLED, "turn");
  assert_true(asked >= 3);
  assert_false(jpp_array_is_deleted(first));  // no array was claimed
  ASSERT_OK(jpp_array_await(first, NULL));
  jpp_array_release(first);
  ASSERT_OK(stepper_call(&stepper, NULL));
  stepper_end(&stepper);
  free(text);
}

// --- Donation -------------------------------------------------------------------------

static void test_donated_arguments_are_claimed(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper = stepper_make(text, (model_options_t){.device_threads = 1});
  jpp_array_t* second = stepper.args[1];
  stepper.args[1] = stepper.args[0];
  ASSERT_FAILS(stepper_call(&stepper, NULL), JPP_DONATED_ERROR,
               "arguments w0 and w1 are the same array");
  assert_false(jpp_array_is_deleted(stepper.args[0]));
  stepper.args[1] = second;
  ASSERT_OK(stepper_call(&stepper, NULL));
  assert_true(jpp_array_is_deleted(stepper.args[0]));
  ASSERT_FAILS(jpp_array_await(stepper.args[0], NULL), JPP_DONATED_ERROR, "donated");
  release_all(stepper.results, stepper_num_results(&stepper));
  ASSERT_FAILS(stepper_call(&stepper, NULL), JPP_DONATED_ERROR,
               "argument w0: expected an array, found one that was deleted or donated");
  stepper_end(&stepper);
  free(text);
}

// Results may be deleted or released before they exist; donating a copy deletes the array
// that it was made from.
static void test_promises_may_be_dropped(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper =
      stepper_make(text, (model_options_t){.device_threads = 1, .latency_us = 1000});
  jpp_array_t* origin = stepper_upload(stepper.model, 0, 1);
  jpp_array_set_origin(stepper.args[0], origin);
  jpp_array_set_origin(origin, stepper.args[0]);  // would be a cycle
  ASSERT_OK(stepper_call(&stepper, NULL));
  assert_true(jpp_array_is_deleted(origin));
  jpp_array_release(origin);
  for (uint32_t o = 0; o < stepper_num_results(&stepper); ++o) {
    if (o % 2) jpp_array_delete(stepper.results[o]);
  }
  release_all(stepper.results, stepper_num_results(&stepper));
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  stepper_end(&stepper);  // which checks that no buffer is left
  free(text);
}

// --- Failures -------------------------------------------------------------------------

static void inject(const stepper_t* stepper, bool async) {
  jpp_fake_failure_t failure = {.at = 9, .async = async};
  ASSERT_OK(jpp_fake_set_failure(stepper->model->client, failure));
}

// A step that depends on a failed step fails with the same error, which is reported once.
static void fail_in_flight(bool async, bool look) {
  char* text = model_chain(3, 3, 4);
  stepper_t stepper = stepper_make(
      text,
      (model_options_t){.device_threads = 2, .latency_us = 3000, .steps_in_flight = 3});
  ASSERT_OK(stepper_call(&stepper, NULL));
  stepper_feed_back(&stepper);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  inject(&stepper, async);
  ASSERT_OK(stepper_call(&stepper, NULL));
  jpp_array_t* failed = stepper.results[0];
  jpp_array_hold(failed);
  stepper_feed_back(&stepper);
  jpp_status_t* status = stepper_call(&stepper, NULL);  // the step may have failed by now
  if (look && !status) {
    ASSERT_FAILS(jpp_array_await(stepper.results[0], NULL), JPP_EXECUTION_ERROR,
                 "step 2: rank ");
    ASSERT_FAILS(jpp_array_await(failed, NULL), JPP_DONATED_ERROR, "step that failed");
    ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  } else if (!status) {
    ASSERT_FAILS(jpp_runtime_await(stepper.model->runtime, NULL), JPP_EXECUTION_ERROR,
                 "step 2: rank ");
    ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  } else {
    assert_int_equal(jpp_status_code(status), JPP_EXECUTION_ERROR);
    assert_non_null(strstr(jpp_status_message(status), "step 2: rank "));
    jpp_status_free(status);
  }
  ASSERT_OK(jpp_fake_set_failure(stepper.model->client, (jpp_fake_failure_t){0}));
  jpp_array_release(failed);
  // The runtime continues with other arguments.
  release_all(stepper.args, stepper_num_args(&stepper));
  release_all(stepper.results, stepper_num_results(&stepper));
  for (uint32_t a = 0; a < stepper_num_args(&stepper); ++a) {
    stepper.args[a] = stepper_upload(stepper.model, a, (float)a);
  }
  ASSERT_OK(stepper_call(&stepper, NULL));
  ASSERT_OK(jpp_array_await(stepper.results[0], NULL));
  stepper_end(&stepper);
  free(text);
}

static void test_failures_are_told_once(void** state) {
  (void)state;
  for (int i = 0; i < 20; ++i) fail_in_flight(i % 2, i % 4 < 2);
}

// If no caller waited for a failed step, the next call reports it and takes nothing.
static void test_the_next_call_tells(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper = stepper_make(text, (model_options_t){.device_threads = 1});
  inject(&stepper, false);
  ASSERT_OK(stepper_call(&stepper, NULL));
  bool ready = false;
  while (!ready) ASSERT_OK(jpp_array_is_ready(stepper.results[0], &ready));
  release_all(stepper.results, stepper_num_results(&stepper));
  for (uint32_t a = 0; a + 1 < stepper_num_args(&stepper); ++a) {
    jpp_array_release(stepper.args[a]);
    stepper.args[a] = stepper_upload(stepper.model, a, 1);
  }
  ASSERT_FAILS(stepper_call(&stepper, NULL), JPP_EXECUTION_ERROR, "step 1: rank ");
  assert_false(jpp_array_is_deleted(stepper.args[0]));
  ASSERT_OK(stepper_call(&stepper, NULL));
  stepper_end(&stepper);
  free(text);
}

static void test_all_steps_are_cancelled(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 4);
  stepper_t stepper = stepper_make(
      text,
      (model_options_t){.device_threads = 1, .latency_us = 50000, .steps_in_flight = 3});
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(stepper_call(&stepper, NULL));
    stepper_feed_back(&stepper);
  }
  jpp_runtime_cancel(stepper.model->runtime);
  ASSERT_FAILS(jpp_array_await(stepper.args[0], NULL), JPP_CANCELLED, "cancelled");
  stepper_end(&stepper);
  free(text);
}

// --- Threads --------------------------------------------------------------------------

typedef struct caller {
  stepper_t stepper;
  float number;
  pthread_t thread;
} caller_t;

static void* call_often(void* user) {
  caller_t* caller = user;
  for (int i = 0; i < 10; ++i) {
    ASSERT_OK(stepper_call(&caller->stepper, NULL));
    stepper_feed_back(&caller->stepper);
  }
  caller->number = model_read_array(caller->stepper.args[0]);
  return NULL;
}

static void test_threads_share_a_runtime(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 3);
  stepper_t first = stepper_make(text, (model_options_t){.device_threads = 2});
  caller_t callers[3] = {0};
  for (int i = 0; i < 3; ++i) {
    callers[i].stepper.model = first.model;
    for (uint32_t a = 0; a < stepper_num_args(&first); ++a) {
      callers[i].stepper.args[a] = stepper_upload(first.model, a, (float)a);
    }
    assert_int_equal(pthread_create(&callers[i].thread, NULL, call_often, &callers[i]),
                     0);
  }
  for (int i = 0; i < 3; ++i) {
    pthread_join(callers[i].thread, NULL);
    assert_float_equal(callers[i].number, callers[0].number, 0);
    release_all(callers[i].stepper.args, stepper_num_args(&first));
  }
  stepper_end(&first);
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_steps_in_flight_train_alike),
      cmocka_unit_test(test_a_call_does_not_wait),
      cmocka_unit_test(test_the_first_steps_are_awaited_while_others_go_on),
      cmocka_unit_test(test_waits_are_interrupted_and_steps_go_on),
      cmocka_unit_test(test_donated_arguments_are_claimed),
      cmocka_unit_test(test_promises_may_be_dropped),
      cmocka_unit_test(test_failures_are_told_once),
      cmocka_unit_test(test_the_next_call_tells),
      cmocka_unit_test(test_all_steps_are_cancelled),
      cmocka_unit_test(test_threads_share_a_runtime),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
