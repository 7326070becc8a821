// Calls on arrays: promises, steps in flight, donation, and failures that are told once.
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>

#include "model.h"

enum { kMostArrays = 32 };

// --- A stepper: calls a model's runtime with its arguments ----------------------------

typedef struct stepper {
  model_t* model;
  jpp_array_t* args[kMostArrays];
  jpp_array_t* results[kMostArrays];
} stepper_t;

static uint32_t num_args(const stepper_t* stepper) {
  return stepper->model->graph->num_args;
}

static uint32_t num_results(const stepper_t* stepper) {
  return stepper->model->graph->num_outputs;
}

// An argument of `value`s on the first rank alone.
static jpp_array_t* upload(const model_t* model, uint32_t arg, float value) {
  return model_array(model, arg, 0, value, 0);
}

static stepper_t make_stepper(const char* text, model_options_t options) {
  stepper_t stepper = {.model = model_create(text, options)};
  assert_true(num_args(&stepper) <= kMostArrays && num_results(&stepper) <= kMostArrays);
  for (uint32_t a = 0; a < num_args(&stepper); ++a) {
    stepper.args[a] = upload(stepper.model, a, (float)a);
  }
  return stepper;
}

static jpp_status_t* try_call(stepper_t* stepper, const jpp_interrupt_t* interrupt) {
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = stepper->args,
                     .num_args = num_args(stepper),
                     .results = stepper->results,
                     .num_results = num_results(stepper),
                     .interrupt = interrupt};
  return jpp_runtime_call(stepper->model->runtime, &call);
}

static void drop(jpp_array_t** arrays, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    jpp_array_release(arrays[i]);
    arrays[i] = NULL;
  }
}

// The chain's new weights take the old ones' places; the other results are dropped.
static void feed_back(stepper_t* stepper) {
  uint32_t weights = num_args(stepper) - 1;
  for (uint32_t w = 0; w < weights; ++w) {
    jpp_array_release(stepper->args[w]);
    stepper->args[w] = stepper->results[w];
    stepper->results[w] = NULL;
  }
  drop(stepper->results, num_results(stepper));
}

static void end_stepper(stepper_t* stepper) {
  drop(stepper->args, num_args(stepper));
  drop(stepper->results, num_results(stepper));
  model_destroy(stepper->model);
}

// --- Steps in flight ------------------------------------------------------------------

// The last loss of a training whose steps are called one after another, however many are
// under way, on however many devices.
static float train(const char* text, model_options_t options, uint32_t steps, bool wait) {
  stepper_t stepper = make_stepper(text, options);
  float loss = 0;
  for (uint32_t i = 0; i < steps; ++i) {
    ASSERT_OK(try_call(&stepper, NULL));
    if (wait) ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
    if (i + 1 == steps)
      loss = model_read_array(stepper.results[num_results(&stepper) - 1]);
    feed_back(&stepper);
  }
  end_stepper(&stepper);
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

// Until every device is held up, calls return though nothing is done.
static void test_a_call_does_not_wait(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 4);
  stepper_t stepper = make_stepper(
      text,
      (model_options_t){.device_threads = 1, .latency_us = 20000, .steps_in_flight = 3});
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(try_call(&stepper, NULL));
    bool ready = true;
    ASSERT_OK(jpp_array_is_ready(stepper.results[0], &ready));
    assert_false(ready);
    feed_back(&stepper);
  }
  ASSERT_OK(jpp_array_await(stepper.args[0], NULL));
  bool ready = false;
  ASSERT_OK(jpp_array_is_ready(stepper.args[0], &ready));
  assert_true(ready);
  end_stepper(&stepper);
  free(text);
}

// Each of some steps under way is done before the ones after it.
static void test_the_first_steps_are_awaited_while_others_go_on(void** state) {
  (void)state;
  enum { kSteps = 4 };
  char* text = model_chain(2, 2, 4);
  stepper_t stepper = make_stepper(
      text, (model_options_t){
                .device_threads = 1, .latency_us = 10000, .steps_in_flight = kSteps});
  jpp_runtime_t* runtime = stepper.model->runtime;
  jpp_array_t* losses[kSteps];
  for (uint64_t i = 0; i < kSteps; ++i) {
    assert_int_equal(jpp_runtime_num_steps(runtime), i);
    ASSERT_OK(try_call(&stepper, NULL));
    losses[i] = stepper.results[num_results(&stepper) - 1];
    jpp_array_hold(losses[i]);
    feed_back(&stepper);
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
  end_stepper(&stepper);
  free(text);
}

static bool always(void* user) {
  ++*(int*)user;
  return true;
}

static void test_waits_are_interrupted_and_steps_go_on(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 4);
  stepper_t stepper = make_stepper(
      text,
      (model_options_t){.device_threads = 1, .latency_us = 30000, .steps_in_flight = 1});
  int asked = 0;
  jpp_interrupt_t interrupt = {.requested = always, .user = &asked};
  ASSERT_OK(try_call(&stepper, NULL));
  ASSERT_FAILS(jpp_array_await(stepper.results[0], &interrupt), JPP_CANCELLED, "wait");
  ASSERT_FAILS(jpp_runtime_await(stepper.model->runtime, &interrupt), JPP_CANCELLED,
               "wait");
  jpp_array_t* first = stepper.results[0];
  jpp_array_hold(first);
  feed_back(&stepper);
  ASSERT_FAILS(try_call(&stepper, &interrupt), JPP_CANCELLED, "turn");
  assert_true(asked >= 3);
  assert_false(jpp_array_is_deleted(first));  // nothing was claimed
  ASSERT_OK(jpp_array_await(first, NULL));
  jpp_array_release(first);
  ASSERT_OK(try_call(&stepper, NULL));
  end_stepper(&stepper);
  free(text);
}

// --- Donation -------------------------------------------------------------------------

static void test_donated_arguments_are_claimed(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper = make_stepper(text, (model_options_t){.device_threads = 1});
  jpp_array_t* second = stepper.args[1];
  stepper.args[1] = stepper.args[0];
  ASSERT_FAILS(try_call(&stepper, NULL), JPP_DONATED_ERROR,
               "arguments w0 and w1 are the same array");
  assert_false(jpp_array_is_deleted(stepper.args[0]));
  stepper.args[1] = second;
  ASSERT_OK(try_call(&stepper, NULL));
  assert_true(jpp_array_is_deleted(stepper.args[0]));
  ASSERT_FAILS(jpp_array_await(stepper.args[0], NULL), JPP_DONATED_ERROR, "donated");
  drop(stepper.results, num_results(&stepper));
  ASSERT_FAILS(try_call(&stepper, NULL), JPP_DONATED_ERROR,
               "argument w0: expected an array, found one that was deleted or donated");
  end_stepper(&stepper);
  free(text);
}

// Results may be deleted or let go before they exist; what a donated copy stands for
// goes.
static void test_promises_may_be_dropped(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper =
      make_stepper(text, (model_options_t){.device_threads = 1, .latency_us = 1000});
  jpp_array_t* origin = upload(stepper.model, 0, 1);
  jpp_array_set_origin(stepper.args[0], origin);
  jpp_array_set_origin(origin, stepper.args[0]);  // would close a circle
  ASSERT_OK(try_call(&stepper, NULL));
  assert_true(jpp_array_is_deleted(origin));
  jpp_array_release(origin);
  for (uint32_t o = 0; o < num_results(&stepper); ++o) {
    if (o % 2) jpp_array_delete(stepper.results[o]);
  }
  drop(stepper.results, num_results(&stepper));
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  end_stepper(&stepper);  // which sees that no buffer is left
  free(text);
}

// --- Memory that others see -----------------------------------------------------------

static uint64_t copies_of(const stepper_t* stepper) {
  return model_stats(stepper->model).copies;
}

// A loan with what it showed at first.
typedef struct look {
  jpp_loan_t loan;
  float seen;
} look_t;

static look_t lend(jpp_array_t* array) {
  look_t look;
  uint32_t rank = jpp_array_layout(array)->ranks[0];
  ASSERT_OK(jpp_array_lend(array, rank, 0, NULL, &look.loan));
  look.seen = *(const float*)look.loan.memory;
  return look;
}

static void expect_unchanged(const look_t* look) {
  assert_float_equal(*(const float*)look->loan.memory, look->seen, 0);
}

// What is lent can be donated all the same, and costs a copy until it is given back.
static void test_a_lent_argument_is_copied_when_donated(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper = make_stepper(text, (model_options_t){.device_threads = 1});
  ASSERT_OK(try_call(&stepper, NULL));
  feed_back(&stepper);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  uint64_t copies = copies_of(&stepper);
  ASSERT_OK(try_call(&stepper, NULL));
  feed_back(&stepper);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  uint64_t each = copies_of(&stepper) - copies;  // what ranks send to each other

  jpp_array_t* weight = stepper.args[0];
  jpp_array_hold(weight);
  look_t looks[2] = {lend(weight), lend(weight)};
  assert_ptr_equal(looks[0].loan.memory, looks[1].loan.memory);
  assert_int_equal(looks[0].loan.shape.dtype, JPP_DTYPE_F32);
  jpp_array_reclaim(&looks[1].loan);
  copies = copies_of(&stepper);
  ASSERT_OK(try_call(&stepper, NULL));
  assert_true(jpp_array_is_deleted(weight));
  jpp_loan_t refused;
  ASSERT_FAILS(jpp_array_lend(weight, 0, 0, NULL, &refused), JPP_DONATED_ERROR,
               "donated");
  feed_back(&stepper);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  assert_int_equal(copies_of(&stepper) - copies, each + 1);
  expect_unchanged(&looks[0]);
  jpp_array_release(weight);
  expect_unchanged(&looks[0]);  // the loan holds the array
  uint64_t buffers = model_stats(stepper.model).live_buffers;
  jpp_array_reclaim(&looks[0].loan);
  assert_int_equal(model_stats(stepper.model).live_buffers, buffers - 1);

  // A loan that is over costs nothing.
  looks[0] = lend(stepper.args[0]);
  jpp_array_reclaim(&looks[0].loan);
  copies = copies_of(&stepper);
  ASSERT_OK(try_call(&stepper, NULL));
  feed_back(&stepper);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  assert_int_equal(copies_of(&stepper) - copies, each);
  end_stepper(&stepper);
  free(text);
}

static void test_a_loan_outlives_deletion(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper = make_stepper(text, (model_options_t){0});
  ASSERT_OK(try_call(&stepper, NULL));
  jpp_array_t* result = stepper.results[0];
  jpp_loan_t refused;
  ASSERT_FAILS(jpp_array_lend(result, 9, 0, NULL, &refused), JPP_INVALID_ARGUMENT,
               "no shard 0 on rank 9");
  look_t look = lend(result);
  jpp_array_delete(result);
  expect_unchanged(&look);
  ASSERT_FAILS(jpp_array_lend(result, 0, 0, NULL, &refused), JPP_DONATED_ERROR,
               "deleted");
  jpp_array_release(result);
  stepper.results[0] = NULL;
  expect_unchanged(&look);
  jpp_array_reclaim(&look.loan);
  end_stepper(&stepper);  // which sees that no buffer is left
  free(text);
}

// Counts in the caller's memory.
static void count_release(void* user) { ++*(_Atomic uint32_t*)user; }

// An argument over `data`, on one rank.
static jpp_status_t* borrow(const model_t* model, uint32_t arg, uint32_t rank,
                            float* data, _Atomic uint32_t* released,
                            jpp_array_t** out_array) {
  const jpp_type_t* type = &model->staged->values[model->graph->args[arg].value].type;
  jpp_foreign_memory_t memory = {
      .memory = data,
      .shape = {.dtype = JPP_DTYPE_F32, .rank = type->ndim, .dims = type->dims},
      .device = model->devices[rank]};
  jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                               .client = model->client,
                               .num_ranks = 1,
                               .devices_per_rank = 1,
                               .ranks = &rank};
  return jpp_array_borrow(&layout, &memory, count_release, (void*)released, out_array);
}

// Arguments of the caller's memory, donated and not, give what uploaded ones give, and
// the caller hears of it when the step is done with them.
static void test_borrowed_arguments_stay_the_owners(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper =
      make_stepper(text, (model_options_t){.device_threads = 2, .latency_us = 2000});
  uint32_t count = num_args(&stepper);
  ASSERT_OK(try_call(&stepper, NULL));
  float expected = model_read_array(stepper.results[0]);
  drop(stepper.results, num_results(&stepper));
  drop(stepper.args, count);
  float data[kMostArrays][64];
  _Atomic uint32_t released[kMostArrays] = {0};
  for (uint32_t a = 0; a < count; ++a) {
    for (int i = 0; i < 64; ++i) data[a][i] = (float)a;
    ASSERT_OK(borrow(stepper.model, a, 0, data[a], &released[a], &stepper.args[a]));
  }
  ASSERT_OK(try_call(&stepper, NULL));
  drop(stepper.args, count);
  assert_int_equal(released[count - 1], 0);  // the step looks at it
  assert_float_equal(model_read_array(stepper.results[0]), expected, 0);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  drop(stepper.results, num_results(&stepper));
  end_stepper(&stepper);
  for (uint32_t a = 0; a < count; ++a) {
    assert_int_equal(released[a], 1);
    for (int i = 0; i < 64; ++i) assert_float_equal(data[a][i], (float)a, 0);
  }
  free(text);
}

static void test_what_can_not_be_borrowed_is_given_back(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper = make_stepper(text, (model_options_t){0});
  _Atomic uint32_t released = 0;
  float data[64] = {0};
  uint32_t right = stepper.model->devices[0];
  stepper.model->devices[0] = JPP_FAKE_MAX_DEVICES;
  jpp_array_t* array = stepper.args[0];
  ASSERT_FAILS(borrow(stepper.model, 0, 0, data, &released, &array), JPP_DEVICES_ERROR,
               "device index");
  assert_null(array);
  assert_int_equal(released, 1);
  stepper.model->devices[0] = right;
  end_stepper(&stepper);
  free(text);
}

// Whatever fails, copies for the step too, what is lent stays and nothing is left over.
static void test_failures_with_loans_leave_nothing(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  for (uint64_t at = 1; at <= 12; ++at) {
    stepper_t stepper = make_stepper(text, (model_options_t){.device_threads = 1});
    _Atomic uint32_t released = 0;
    float data[64] = {3};
    jpp_array_release(stepper.args[1]);
    ASSERT_OK(borrow(stepper.model, 1, 1, data, &released, &stepper.args[1]));
    look_t look = lend(stepper.args[0]);
    jpp_fake_failure_t failure = {.at = at, .async = at % 2};
    ASSERT_OK(jpp_fake_set_failure(stepper.model->client, failure));
    ASSERT_OK(try_call(&stepper, NULL));
    jpp_status_free(jpp_runtime_await(stepper.model->runtime, NULL));
    ASSERT_OK(jpp_fake_set_failure(stepper.model->client, (jpp_fake_failure_t){0}));
    expect_unchanged(&look);
    jpp_array_reclaim(&look.loan);
    end_stepper(&stepper);
    assert_int_equal(released, 1);
  }
  free(text);
}

// Random steps, looks, ends of looks and deletions: no look ever changes.
static void test_random_looks_never_change(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 2);
  for (unsigned seed = 0; seed < 20; ++seed) {
    unsigned random = seed;
    stepper_t stepper = make_stepper(
        text, (model_options_t){.device_threads = 2, .steps_in_flight = 1 + seed % 3});
    look_t looks[24];
    uint32_t count = 0;
    for (int turn = 0; turn < 60; ++turn) {
      uint32_t pick = (uint32_t)rand_r(&random);
      jpp_array_t* array = stepper.args[pick / 8 % num_args(&stepper)];
      if (pick % 8 < 3 && count < 24) {
        looks[count++] = lend(array);
      } else if (pick % 8 < 5 && count) {
        uint32_t over = pick / 8 % count;
        expect_unchanged(&looks[over]);
        jpp_array_reclaim(&looks[over].loan);
        looks[over] = looks[--count];
      } else {
        ASSERT_OK(try_call(&stepper, NULL));
        if (pick % 8 == 5) jpp_array_delete(stepper.results[num_results(&stepper) - 1]);
        feed_back(&stepper);
      }
      for (uint32_t i = 0; i < count; ++i) expect_unchanged(&looks[i]);
    }
    model_t* model = stepper.model;
    drop(stepper.args, num_args(&stepper));
    ASSERT_OK(jpp_runtime_await(model->runtime, NULL));
    for (uint32_t i = 0; i < count; ++i) {
      expect_unchanged(&looks[i]);
      jpp_array_reclaim(&looks[i].loan);
    }
    end_stepper(&stepper);
  }
  free(text);
}

// --- Failures -------------------------------------------------------------------------

static void inject(const stepper_t* stepper, bool async) {
  jpp_fake_failure_t failure = {.at = 9, .async = async};
  ASSERT_OK(jpp_fake_set_failure(stepper->model->client, failure));
}

// A step that depends on one that fails has the same failure, which is told once.
static void fail_in_flight(bool async, bool look) {
  char* text = model_chain(3, 3, 4);
  stepper_t stepper = make_stepper(
      text,
      (model_options_t){.device_threads = 2, .latency_us = 3000, .steps_in_flight = 3});
  ASSERT_OK(try_call(&stepper, NULL));
  feed_back(&stepper);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  inject(&stepper, async);
  ASSERT_OK(try_call(&stepper, NULL));
  jpp_array_t* failed = stepper.results[0];
  jpp_array_hold(failed);
  feed_back(&stepper);
  jpp_status_t* status = try_call(&stepper, NULL);  // it may have failed by now
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
  // The runtime goes on, with other arguments.
  drop(stepper.args, num_args(&stepper));
  drop(stepper.results, num_results(&stepper));
  for (uint32_t a = 0; a < num_args(&stepper); ++a) {
    stepper.args[a] = upload(stepper.model, a, (float)a);
  }
  ASSERT_OK(try_call(&stepper, NULL));
  ASSERT_OK(jpp_array_await(stepper.results[0], NULL));
  end_stepper(&stepper);
  free(text);
}

static void test_failures_are_told_once(void** state) {
  (void)state;
  for (int i = 0; i < 20; ++i) fail_in_flight(i % 2, i % 4 < 2);
}

// The next call tells of what nobody waited for, and has taken nothing then.
static void test_the_next_call_tells(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper = make_stepper(text, (model_options_t){.device_threads = 1});
  inject(&stepper, false);
  ASSERT_OK(try_call(&stepper, NULL));
  bool ready = false;
  while (!ready) ASSERT_OK(jpp_array_is_ready(stepper.results[0], &ready));
  drop(stepper.results, num_results(&stepper));
  for (uint32_t a = 0; a + 1 < num_args(&stepper); ++a) {
    jpp_array_release(stepper.args[a]);
    stepper.args[a] = upload(stepper.model, a, 1);
  }
  ASSERT_FAILS(try_call(&stepper, NULL), JPP_EXECUTION_ERROR, "step 1: rank ");
  assert_false(jpp_array_is_deleted(stepper.args[0]));
  ASSERT_OK(try_call(&stepper, NULL));
  end_stepper(&stepper);
  free(text);
}

static void test_all_steps_are_cancelled(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 4);
  stepper_t stepper = make_stepper(
      text,
      (model_options_t){.device_threads = 1, .latency_us = 50000, .steps_in_flight = 3});
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(try_call(&stepper, NULL));
    feed_back(&stepper);
  }
  jpp_runtime_cancel(stepper.model->runtime);
  ASSERT_FAILS(jpp_array_await(stepper.args[0], NULL), JPP_CANCELLED, "cancelled");
  end_stepper(&stepper);
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
    ASSERT_OK(try_call(&caller->stepper, NULL));
    feed_back(&caller->stepper);
  }
  caller->number = model_read_array(caller->stepper.args[0]);
  return NULL;
}

static void test_threads_share_a_runtime(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 3);
  stepper_t first = make_stepper(text, (model_options_t){.device_threads = 2});
  caller_t callers[3] = {0};
  for (int i = 0; i < 3; ++i) {
    callers[i].stepper.model = first.model;
    for (uint32_t a = 0; a < num_args(&first); ++a) {
      callers[i].stepper.args[a] = upload(first.model, a, (float)a);
    }
    assert_int_equal(pthread_create(&callers[i].thread, NULL, call_often, &callers[i]),
                     0);
  }
  for (int i = 0; i < 3; ++i) {
    pthread_join(callers[i].thread, NULL);
    assert_float_equal(callers[i].number, callers[0].number, 0);
    drop(callers[i].stepper.args, num_args(&first));
  }
  end_stepper(&first);
  free(text);
}

// Looks at the array that is now the first weight, while the other thread donates it.
typedef struct looker {
  pthread_mutex_t mutex;
  jpp_array_t* array;  // held; NULL: stop
  uint32_t looks;
  pthread_t thread;
} looker_t;

static jpp_array_t* array_to_look_at(looker_t* looker) {
  pthread_mutex_lock(&looker->mutex);
  jpp_array_t* array = looker->array;
  if (array) jpp_array_hold(array);
  pthread_mutex_unlock(&looker->mutex);
  return array;
}

static void show(looker_t* looker, jpp_array_t* array) {
  if (array) jpp_array_hold(array);
  pthread_mutex_lock(&looker->mutex);
  jpp_array_t* before = looker->array;
  looker->array = array;
  pthread_mutex_unlock(&looker->mutex);
  jpp_array_release(before);
}

static void* look_often(void* user) {
  looker_t* looker = user;
  for (jpp_array_t* array; (array = array_to_look_at(looker));) {
    jpp_loan_t loan;
    jpp_status_t* status = jpp_array_lend(array, 0, 0, NULL, &loan);
    if (status) {
      assert_int_equal(jpp_status_code(status), JPP_DONATED_ERROR);
      jpp_status_free(status);
    } else {
      float seen = *(const float*)loan.memory;
      sched_yield();
      assert_float_equal(*(const float*)loan.memory, seen, 0);
      jpp_array_reclaim(&loan);
      ++looker->looks;
    }
    jpp_array_release(array);
  }
  return NULL;
}

static void test_looking_and_donating_race(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper =
      make_stepper(text, (model_options_t){.device_threads = 2, .steps_in_flight = 2});
  looker_t looker = {.mutex = PTHREAD_MUTEX_INITIALIZER};
  show(&looker, stepper.args[0]);
  assert_int_equal(pthread_create(&looker.thread, NULL, look_often, &looker), 0);
  for (int i = 0; i < 200; ++i) {
    ASSERT_OK(try_call(&stepper, NULL));
    feed_back(&stepper);
    show(&looker, stepper.args[0]);
  }
  ASSERT_OK(jpp_array_await(stepper.args[0], NULL));
  show(&looker, NULL);
  pthread_join(looker.thread, NULL);
  assert_true(looker.looks > 0);
  end_stepper(&stepper);
  free(text);
}

// --- Types and shapes of arguments ----------------------------------------------------

// An array of zeros with as many dims as are not 0, on rank 0.
static jpp_array_t* upload_zeros(const model_t* model, jpp_dtype_t dtype, int64_t rows,
                                 int64_t columns) {
  enum { kMostDevices = 8 };
  static const double kZeros[64];
  const int64_t dims[] = {rows, columns};
  const uint32_t rank = 0;
  jpp_host_array_t shards[kMostDevices];
  for (uint32_t d = 0; d < kMostDevices; ++d) {
    shards[d] = (jpp_host_array_t){.struct_size = sizeof(jpp_host_array_t),
                                   .data = kZeros,
                                   .dtype = dtype,
                                   .rank = columns ? 2 : 1,
                                   .dims = dims};
  }
  jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                               .client = model->client,
                               .num_ranks = 1,
                               .devices_per_rank = model->options.devices_per_rank,
                               .ranks = &rank};
  jpp_array_t* array = NULL;
  ASSERT_OK(jpp_array_upload(&layout, shards, model->devices, &array));
  return array;
}

// A call with another argument in the place of one.
static jpp_status_t* call_with_zeros(stepper_t* stepper, uint32_t arg, jpp_dtype_t dtype,
                                     int64_t rows, int64_t columns) {
  jpp_array_t* good = stepper->args[arg];
  stepper->args[arg] = upload_zeros(stepper->model, dtype, rows, columns);
  jpp_status_t* status = try_call(stepper, NULL);
  drop(stepper->results, num_results(stepper));
  jpp_array_release(stepper->args[arg]);
  stepper->args[arg] = good;
  return status;
}

static void test_types_and_shapes_of_arguments_are_compared(void** state) {
  (void)state;
  stepper_t stepper = make_stepper(kModelOutputs, (model_options_t){0});
  ASSERT_FAILS(call_with_zeros(&stepper, 3, JPP_DTYPE_S32, 8, 4), JPP_INVALID_ARGUMENT,
               "argument x: expected f32[8,4], found s32[8,4]");
  ASSERT_FAILS(call_with_zeros(&stepper, 3, JPP_DTYPE_F32, 4, 8), JPP_INVALID_ARGUMENT,
               "argument x: expected f32[8,4], found f32[4,8]");
  ASSERT_FAILS(call_with_zeros(&stepper, 0, JPP_DTYPE_F32, 1, 4), JPP_INVALID_ARGUMENT,
               "argument w: expected f32[4], found f32[1,4]");
  ASSERT_FAILS(call_with_zeros(&stepper, 0, JPP_DTYPE_F32, 2, 0), JPP_INVALID_ARGUMENT,
               "argument w: expected f32[4], found f32[2]");
  jpp_array_t* good = stepper.args[2];
  stepper.args[2] = NULL;
  ASSERT_FAILS(try_call(&stepper, NULL), JPP_INVALID_ARGUMENT,
               "argument unused: expected an array, found NULL");
  stepper.args[2] = good;
  for (uint32_t a = 0; a < num_args(&stepper); ++a) {
    assert_false(jpp_array_is_deleted(stepper.args[a]));
  }
  ASSERT_OK(try_call(&stepper, NULL));
  // A promise is compared as well: %L is f32[4], x is not.
  good = stepper.args[3];
  stepper.args[3] = stepper.results[1];
  jpp_array_t* results[kMostArrays];
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = stepper.args,
                     .num_args = num_args(&stepper),
                     .results = results,
                     .num_results = num_results(&stepper)};
  ASSERT_FAILS(jpp_runtime_call(stepper.model->runtime, &call), JPP_INVALID_ARGUMENT,
               "argument x: expected f32[8,4], found f32[4]");
  --call.num_results;
  ASSERT_FAILS(jpp_runtime_call(stepper.model->runtime, &call), JPP_INVALID_ARGUMENT,
               "the results of a call: expected a count of");
  ++call.num_args;
  ASSERT_FAILS(jpp_runtime_call(stepper.model->runtime, &call), JPP_INVALID_ARGUMENT,
               "the arguments of a call: expected a count of");
  stepper.args[3] = good;
  end_stepper(&stepper);
}

// Each of the two devices of the rank has half of x: of its rows or of its columns.
static void test_pieces_of_a_cut_argument_are_compared(void** state) {
  (void)state;
  static const char kCut[] =
      "graph \"cut\" ranks 1\n"
      "arg %x f32[8,4]/2 \"x\"\n"
      "%y:f32[8,4]/2 = relu(%x) cost 10\n"
      "out %y\n";
  stepper_t stepper = {.model =
                           model_create(kCut, (model_options_t){.devices_per_rank = 2})};
  stepper.args[0] = upload_zeros(stepper.model, JPP_DTYPE_F32, 4, 4);
  ASSERT_OK(try_call(&stepper, NULL));
  drop(stepper.results, 1);
  ASSERT_OK(call_with_zeros(&stepper, 0, JPP_DTYPE_F32, 8, 2));
  ASSERT_FAILS(call_with_zeros(&stepper, 0, JPP_DTYPE_F32, 8, 4), JPP_INVALID_ARGUMENT,
               "argument x: expected f32[8,4]/2, cut into pieces of 64 bytes a device, "
               "found f32[8,4], 128 bytes a device");
  ASSERT_FAILS(call_with_zeros(&stepper, 0, JPP_DTYPE_F32, 1, 16), JPP_INVALID_ARGUMENT,
               "found f32[1,16], 64 bytes a device");
  end_stepper(&stepper);
}

static void test_shards_of_one_array_are_alike(void** state) {
  (void)state;
  stepper_t stepper = make_stepper(kModelOutputs, (model_options_t){0});
  static const float kZeros[8];
  const int64_t dims[] = {4, 8};
  jpp_host_array_t shards[] = {{.struct_size = sizeof(*shards),
                                .data = kZeros,
                                .dtype = JPP_DTYPE_F32,
                                .rank = 1,
                                .dims = &dims[0]},
                               {.struct_size = sizeof(*shards),
                                .data = kZeros,
                                .dtype = JPP_DTYPE_F32,
                                .rank = 1,
                                .dims = &dims[1]}};
  const uint32_t rank = 0, devices[] = {0, 1};
  jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                               .client = stepper.model->client,
                               .num_ranks = 1,
                               .devices_per_rank = 2,
                               .ranks = &rank};
  jpp_array_t* array = NULL;
  ASSERT_FAILS(jpp_array_upload(&layout, shards, devices, &array), JPP_INVALID_ARGUMENT,
               "expected shards of one type and shape");
  shards[1].struct_size = 0;
  ASSERT_FAILS(jpp_array_upload(&layout, shards, devices, &array), JPP_INVALID_ARGUMENT,
               "in element 1 of a list, as in the first one, found 0");
  assert_null(array);
  end_stepper(&stepper);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_steps_in_flight_train_alike),
      cmocka_unit_test(test_a_call_does_not_wait),
      cmocka_unit_test(test_the_first_steps_are_awaited_while_others_go_on),
      cmocka_unit_test(test_waits_are_interrupted_and_steps_go_on),
      cmocka_unit_test(test_types_and_shapes_of_arguments_are_compared),
      cmocka_unit_test(test_pieces_of_a_cut_argument_are_compared),
      cmocka_unit_test(test_shards_of_one_array_are_alike),
      cmocka_unit_test(test_donated_arguments_are_claimed),
      cmocka_unit_test(test_promises_may_be_dropped),
      cmocka_unit_test(test_a_lent_argument_is_copied_when_donated),
      cmocka_unit_test(test_a_loan_outlives_deletion),
      cmocka_unit_test(test_borrowed_arguments_stay_the_owners),
      cmocka_unit_test(test_what_can_not_be_borrowed_is_given_back),
      cmocka_unit_test(test_failures_with_loans_leave_nothing),
      cmocka_unit_test(test_random_looks_never_change),
      cmocka_unit_test(test_failures_are_told_once),
      cmocka_unit_test(test_the_next_call_tells),
      cmocka_unit_test(test_all_steps_are_cancelled),
      cmocka_unit_test(test_threads_share_a_runtime),
      cmocka_unit_test(test_looking_and_donating_race),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
