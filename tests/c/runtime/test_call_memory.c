// Calls on arrays whose memory is lent, and on borrowed memory.
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "stepper.h"

static uint64_t copies_of(const stepper_t* stepper) {
  return model_stats(stepper->model).copies;
}

// A loan, with the contents that it showed at first.
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

// A lent array can still be donated; until the loan ends, that costs a copy.
static void test_a_lent_argument_is_copied_when_donated(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper = stepper_make(text, (model_options_t){.device_threads = 1});
  ASSERT_OK(stepper_call(&stepper, NULL));
  stepper_feed_back(&stepper);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  uint64_t copies = copies_of(&stepper);
  ASSERT_OK(stepper_call(&stepper, NULL));
  stepper_feed_back(&stepper);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  uint64_t each = copies_of(&stepper) - copies;  // messages between ranks

  jpp_array_t* weight = stepper.args[0];
  jpp_array_hold(weight);
  look_t looks[2] = {lend(weight), lend(weight)};
  assert_ptr_equal(looks[0].loan.memory, looks[1].loan.memory);
  assert_int_equal(looks[0].loan.shape.dtype, JPP_DTYPE_F32);
  jpp_array_reclaim(&looks[1].loan);
  copies = copies_of(&stepper);
  ASSERT_OK(stepper_call(&stepper, NULL));
  assert_true(jpp_array_is_deleted(weight));
  jpp_loan_t refused;
  ASSERT_FAILS(jpp_array_lend(weight, 0, 0, NULL, &refused), JPP_DONATED_ERROR,
               "donated");
  stepper_feed_back(&stepper);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  assert_int_equal(copies_of(&stepper) - copies, each + 1);
  expect_unchanged(&looks[0]);
  jpp_array_release(weight);
  expect_unchanged(&looks[0]);  // the loan holds the array
  uint64_t buffers = model_stats(stepper.model).live_buffers;
  jpp_array_reclaim(&looks[0].loan);
  assert_int_equal(model_stats(stepper.model).live_buffers, buffers - 1);

  // A loan that has ended costs nothing.
  looks[0] = lend(stepper.args[0]);
  jpp_array_reclaim(&looks[0].loan);
  copies = copies_of(&stepper);
  ASSERT_OK(stepper_call(&stepper, NULL));
  stepper_feed_back(&stepper);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  assert_int_equal(copies_of(&stepper) - copies, each);
  stepper_end(&stepper);
  free(text);
}

static void test_a_loan_outlives_deletion(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper = stepper_make(text, (model_options_t){0});
  ASSERT_OK(stepper_call(&stepper, NULL));
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
  stepper_end(&stepper);  // which checks that no buffer is left
  free(text);
}

// Counts the releases of the caller's memory.
static void count_release(void* user) { ++*(_Atomic uint32_t*)user; }

// An argument that borrows `data`, on one rank.
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

// Arguments in the caller's memory, donated or not, give the same results as uploaded
// ones, and the caller's release is called when the step is done with them.
static void test_borrowed_arguments_stay_the_owners(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper =
      stepper_make(text, (model_options_t){.device_threads = 2, .latency_us = 2000});
  uint32_t count = stepper_num_args(&stepper);
  ASSERT_OK(stepper_call(&stepper, NULL));
  float expected = model_read_array(stepper.results[0]);
  release_all(stepper.results, stepper_num_results(&stepper));
  release_all(stepper.args, count);
  float data[kMostArrays][64];
  _Atomic uint32_t released[kMostArrays] = {0};
  for (uint32_t a = 0; a < count; ++a) {
    for (int i = 0; i < 64; ++i) data[a][i] = (float)a;
    ASSERT_OK(borrow(stepper.model, a, 0, data[a], &released[a], &stepper.args[a]));
  }
  ASSERT_OK(stepper_call(&stepper, NULL));
  release_all(stepper.args, count);
  assert_int_equal(released[count - 1], 0);  // the step reads it
  assert_float_equal(model_read_array(stepper.results[0]), expected, 0);
  ASSERT_OK(jpp_runtime_await(stepper.model->runtime, NULL));
  release_all(stepper.results, stepper_num_results(&stepper));
  stepper_end(&stepper);
  for (uint32_t a = 0; a < count; ++a) {
    assert_int_equal(released[a], 1);
    for (int i = 0; i < 64; ++i) assert_float_equal(data[a][i], (float)a, 0);
  }
  free(text);
}

static void test_what_can_not_be_borrowed_is_given_back(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  stepper_t stepper = stepper_make(text, (model_options_t){0});
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
  stepper_end(&stepper);
  free(text);
}

// Whatever fails, including copies for the step, lent arrays stay and nothing leaks.
static void test_failures_with_loans_leave_nothing(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  for (uint64_t at = 1; at <= 12; ++at) {
    stepper_t stepper = stepper_make(text, (model_options_t){.device_threads = 1});
    _Atomic uint32_t released = 0;
    float data[64] = {3};
    jpp_array_release(stepper.args[1]);
    ASSERT_OK(borrow(stepper.model, 1, 1, data, &released, &stepper.args[1]));
    look_t look = lend(stepper.args[0]);
    jpp_fake_failure_t failure = {.at = at, .async = at % 2};
    ASSERT_OK(jpp_fake_set_failure(stepper.model->client, failure));
    ASSERT_OK(stepper_call(&stepper, NULL));
    jpp_status_free(jpp_runtime_await(stepper.model->runtime, NULL));
    ASSERT_OK(jpp_fake_set_failure(stepper.model->client, (jpp_fake_failure_t){0}));
    expect_unchanged(&look);
    jpp_array_reclaim(&look.loan);
    stepper_end(&stepper);
    assert_int_equal(released, 1);
  }
  free(text);
}

// Random steps, loans, ends of loans and deletions: the contents of a loan never change.
static void test_random_looks_never_change(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 2);
  for (unsigned seed = 0; seed < 20; ++seed) {
    unsigned random = seed;
    stepper_t stepper = stepper_make(
        text, (model_options_t){.device_threads = 2, .steps_in_flight = 1 + seed % 3});
    look_t looks[24];
    uint32_t count = 0;
    for (int turn = 0; turn < 60; ++turn) {
      uint32_t pick = (uint32_t)rand_r(&random);
      jpp_array_t* array = stepper.args[pick / 8 % stepper_num_args(&stepper)];
      if (pick % 8 < 3 && count < 24) {
        looks[count++] = lend(array);
      } else if (pick % 8 < 5 && count) {
        uint32_t over = pick / 8 % count;
        expect_unchanged(&looks[over]);
        jpp_array_reclaim(&looks[over].loan);
        looks[over] = looks[--count];
      } else {
        ASSERT_OK(stepper_call(&stepper, NULL));
        if (pick % 8 == 5)
          jpp_array_delete(stepper.results[stepper_num_results(&stepper) - 1]);
        stepper_feed_back(&stepper);
      }
      for (uint32_t i = 0; i < count; ++i) expect_unchanged(&looks[i]);
    }
    model_t* model = stepper.model;
    release_all(stepper.args, stepper_num_args(&stepper));
    ASSERT_OK(jpp_runtime_await(model->runtime, NULL));
    for (uint32_t i = 0; i < count; ++i) {
      expect_unchanged(&looks[i]);
      jpp_array_reclaim(&looks[i].loan);
    }
    stepper_end(&stepper);
  }
  free(text);
}

// --- Threads --------------------------------------------------------------------------

// Lends the array that is now the first weight, while the other thread donates it.
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
      stepper_make(text, (model_options_t){.device_threads = 2, .steps_in_flight = 2});
  looker_t looker = {.mutex = PTHREAD_MUTEX_INITIALIZER};
  show(&looker, stepper.args[0]);
  assert_int_equal(pthread_create(&looker.thread, NULL, look_often, &looker), 0);
  for (int i = 0; i < 200; ++i) {
    ASSERT_OK(stepper_call(&stepper, NULL));
    stepper_feed_back(&stepper);
    show(&looker, stepper.args[0]);
  }
  ASSERT_OK(jpp_array_await(stepper.args[0], NULL));
  show(&looker, NULL);
  pthread_join(looker.thread, NULL);
  assert_true(looker.looks > 0);
  stepper_end(&stepper);
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_lent_argument_is_copied_when_donated),
      cmocka_unit_test(test_a_loan_outlives_deletion),
      cmocka_unit_test(test_borrowed_arguments_stay_the_owners),
      cmocka_unit_test(test_what_can_not_be_borrowed_is_given_back),
      cmocka_unit_test(test_failures_with_loans_leave_nothing),
      cmocka_unit_test(test_random_looks_never_change),
      cmocka_unit_test(test_looking_and_donating_race),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
