// What jaxpp/device.h promises, on the driver that the command line names.
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver_under_test.h"

static const char* g_driver;

static int create_client(void** state) {
  *state = test_client_create(g_driver);
  return 0;
}

static jpp_client_t* client_of(void** state) { return *state; }

static int destroy_client(void** state) {
  jpp_client_t* client = *state;
  jpp_fake_stats_t stats = {0};
  if (strcmp(jpp_client_info(client)->driver, "fake") == 0) {
    jpp_status_free(jpp_fake_stats(client, &stats));
  }
  jpp_client_destroy(client);
  bool clean = !stats.live_buffers && !stats.live_events && !stats.live_executables &&
               !stats.live_bytes && !stats.misuses;
  if (!clean) print_error("handles were left, or destroyed twice\n");
  return clean ? 0 : -1;
}

static void test_info_names_platform_and_devices(void** state) {
  const jpp_client_info_t* info = jpp_client_info(client_of(state));
  assert_true(info->device_count > 0);
  assert_true(strlen(info->driver) && strlen(info->platform_name));
  assert_non_null(info->platform_version);
  for (uint32_t i = 0; i < info->device_count; ++i) {
    assert_int_equal(info->devices[i].id, i);
    assert_true(strlen(info->devices[i].kind) > 0);
    assert_true(info->devices[i].hardware_id >= 0);
  }
}

static void test_host_array_survives_the_round_trip(void** state) {
  jpp_client_t* client = client_of(state);
  static const jpp_dtype_t kDtypes[] = {
      JPP_DTYPE_BOOL,     JPP_DTYPE_S8,       JPP_DTYPE_U16,    JPP_DTYPE_BF16,
      JPP_DTYPE_S32,      JPP_DTYPE_F32,      JPP_DTYPE_F64,    JPP_DTYPE_C128,
      JPP_DTYPE_F8E4M3FN, JPP_DTYPE_S2,       JPP_DTYPE_U2,     JPP_DTYPE_S4,
      JPP_DTYPE_U4,       JPP_DTYPE_F4E2M1FN, JPP_DTYPE_F8E3M4, JPP_DTYPE_F8E4M3,
      JPP_DTYPE_F8E8M0FNU};
  unsigned char data[6 * 16];
  for (size_t i = 0; i < sizeof(data); ++i) data[i] = (unsigned char)(i % 2);
  for (size_t d = 0; d < sizeof(kDtypes) / sizeof(kDtypes[0]); ++d) {
    int64_t dims[2] = {2, 3};
    jpp_host_array_t array = {.struct_size = sizeof(array),
                              .data = data,
                              .dtype = kDtypes[d],
                              .rank = 2,
                              .dims = dims};
    size_t bytes = 6 * jpp_dtype_bits(kDtypes[d]) / 8;
    jpp_buffer_t* buffer = NULL;
    ASSERT_OK(jpp_client_buffer_from_host(client, &array,
                                          test_device(client, (uint32_t)d), &buffer));
    jpp_buffer_shape_t shape;
    ASSERT_OK(jpp_client_buffer_shape(client, buffer, &shape));
    assert_int_equal(shape.dtype, kDtypes[d]);
    assert_int_equal(shape.rank, 2);
    assert_int_equal(shape.dims[0], 2);
    assert_int_equal(shape.dims[1], 3);
    unsigned char back[sizeof(data)] = {0};
    ASSERT_OK(jpp_client_buffer_read(client, buffer, back, bytes));
    assert_memory_equal(back, data, bytes);
    jpp_client_buffer_destroy(client, buffer);
  }
}

static void test_scalar_and_empty_arrays(void** state) {
  jpp_client_t* client = client_of(state);
  int32_t value = 42;
  int32_t back = 0;
  jpp_host_array_t scalar = {
      .struct_size = sizeof(scalar), .data = &value, .dtype = JPP_DTYPE_S32};
  jpp_buffer_t* buffer = NULL;
  ASSERT_OK(jpp_client_buffer_from_host(client, &scalar, 0, &buffer));
  ASSERT_OK(jpp_client_buffer_read(client, buffer, &back, sizeof(back)));
  assert_int_equal(back, 42);
  jpp_client_buffer_destroy(client, buffer);
  int64_t dims[2] = {0, 3};
  jpp_host_array_t empty = {.struct_size = sizeof(empty),
                            .data = &value,
                            .dtype = JPP_DTYPE_S32,
                            .rank = 2,
                            .dims = dims};
  ASSERT_OK(jpp_client_buffer_from_host(client, &empty, 0, &buffer));
  ASSERT_OK(jpp_client_buffer_read(client, buffer, &back, 0));
  jpp_client_buffer_destroy(client, buffer);
}

static void test_byte_strides_are_followed(void** state) {
  jpp_client_t* client = client_of(state);
  float data[6] = {0, 1, 2, 3, 4, 5};
  int64_t dims[2] = {3, 2};
  int64_t strides[2] = {sizeof(float), 3 * sizeof(float)};  // the transpose of [2, 3]
  jpp_host_array_t array = {.struct_size = sizeof(array),
                            .data = data,
                            .dtype = JPP_DTYPE_F32,
                            .rank = 2,
                            .dims = dims,
                            .byte_strides = strides};
  jpp_buffer_t* buffer = NULL;
  ASSERT_OK(jpp_client_buffer_from_host(client, &array, test_device(client, 1), &buffer));
  float back[6] = {0};
  ASSERT_OK(jpp_client_buffer_read(client, buffer, back, sizeof(back)));
  const float expected[6] = {0, 3, 1, 4, 2, 5};
  assert_memory_equal(back, expected, sizeof(expected));
  jpp_client_buffer_destroy(client, buffer);
}

// Where the contents are.
static void* look_at(jpp_client_t* client, jpp_buffer_t* buffer) {
  void* pointer = NULL;
  ASSERT_OK(jpp_client_buffer_lend(client, buffer, &pointer));
  jpp_client_buffer_reclaim(client, buffer);
  assert_non_null(pointer);
  return pointer;
}

static void test_lent_contents_stay_where_they_are(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* one = test_upload(client, 0, 1);
  jpp_buffer_t* sum = NULL;
  ASSERT_OK(test_execute(client, add, one, one, &sum));
  test_expect(client, sum, 2, 2);
  void *first = NULL, *second = NULL, *pointer = NULL;
  ASSERT_OK(jpp_client_buffer_lend(client, sum, &first));
  ASSERT_OK(jpp_client_buffer_lend(client, sum, &second));
  pointer = look_at(client, sum);
  assert_ptr_equal(first, pointer);
  assert_ptr_equal(second, pointer);
  jpp_client_buffer_reclaim(client, sum);
  if (test_is_host(client)) assert_float_equal(((const float*)first)[3], 8, 0);
  jpp_client_buffer_reclaim(client, sum);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_buffer_destroy(client, one);
  jpp_client_executable_destroy(client, add);
}

typedef struct lend_job {
  jpp_client_t* client;
  jpp_buffer_t* buffer;
  const void* contents;
  int failures;
} lend_job_t;

static void* lend_many_times(void* user) {
  lend_job_t* job = user;
  for (int i = 0; i < 2000; ++i) {
    void* first = NULL;
    void* second = NULL;
    jpp_status_t* status = jpp_client_buffer_lend(job->client, job->buffer, &first);
    if (!status) status = jpp_client_buffer_lend(job->client, job->buffer, &second);
    job->failures += status || first != job->contents || second != job->contents;
    jpp_status_free(status);
    if (first) jpp_client_buffer_reclaim(job->client, job->buffer);
    if (second) jpp_client_buffer_reclaim(job->client, job->buffer);
  }
  return NULL;
}

static void test_threads_borrow_the_same_buffer(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_buffer_t* buffer = test_upload(client, 0, 1);
  test_expect(client, buffer, 1, 1);
  void* contents = NULL;
  contents = look_at(client, buffer);
  lend_job_t jobs[4];
  pthread_t threads[4];
  for (int i = 0; i < 4; ++i) {
    jobs[i] = (lend_job_t){.client = client, .buffer = buffer, .contents = contents};
    assert_int_equal(pthread_create(&threads[i], NULL, lend_many_times, &jobs[i]), 0);
  }
  for (int i = 0; i < 4; ++i) pthread_join(threads[i], NULL);
  for (int i = 0; i < 4; ++i) assert_int_equal(jobs[i].failures, 0);
  jpp_client_buffer_destroy(client, buffer);
}

static void test_what_is_gone_can_not_be_lent(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD_DONATE);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* b = test_upload(client, 0, 2);
  jpp_buffer_t* sum = NULL;
  ASSERT_OK(test_execute(client, add, a, b, &sum));
  void* pointer = client;
  ASSERT_FAILS(jpp_client_buffer_lend(client, a, &pointer), JPP_DONATED_ERROR, "lend");
  assert_null(pointer);
  jpp_client_buffer_destroy(client, a);
  jpp_client_buffer_destroy(client, b);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_executable_destroy(client, add);
}

// What one buffer lends another one borrows, as between two clients.
static void test_borrowed_memory_is_used_where_it_is(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* owner = test_upload(client, 0, 5);
  test_expect(client, owner, 5, 1);
  _Atomic uint32_t released = 0;
  jpp_buffer_t* view = test_borrow(client, owner, &released);
  test_expect(client, view, 5, 1);
  void *memory = NULL, *pointer = NULL;
  memory = look_at(client, owner);
  pointer = look_at(client, view);
  assert_ptr_equal(pointer, memory);
  jpp_buffer_t *sum = NULL, *copy = NULL;
  ASSERT_OK(test_execute(client, add, view, owner, &sum));
  // To its own device too: a copy for somebody who is to write there.
  for (uint32_t d = 0; d < 2; ++d) {
    ASSERT_OK(
        jpp_client_buffer_copy_to_device(client, view, test_device(client, d), &copy));
    test_expect(client, copy, 5, 1);
    pointer = look_at(client, copy);
    assert_ptr_not_equal(pointer, memory);
    jpp_client_buffer_destroy(client, copy);
  }
  test_expect(client, sum, 10, 2);
  assert_int_equal(released, 0);
  jpp_client_buffer_destroy(client, view);
  while (!released) usleep(100);
  assert_int_equal(released, 1);
  test_expect(client, owner, 5, 1);  // the owner's still
  jpp_client_buffer_reclaim(client, owner);
  jpp_client_buffer_destroy(client, owner);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_executable_destroy(client, add);
}

static void never_release(void* memory, void* user) {
  (void)memory, (void)user;
  fail();
}

static void test_what_can_not_be_borrowed_is_refused(void** state) {
  jpp_client_t* client = client_of(state);
  float memory[4] = {0};
  int64_t dims[1] = {-1};
  jpp_foreign_memory_t foreign = {
      .memory = memory,
      .shape = {.dtype = JPP_DTYPE_F32, .rank = 1, .dims = dims},
      .release = never_release};
  jpp_buffer_t* view = (jpp_buffer_t*)client;
  ASSERT_FAILS(jpp_client_buffer_borrow(client, &foreign, &view), JPP_INVALID_ARGUMENT,
               "negative");
  assert_null(view);
  dims[0] = 4;
  foreign.device = jpp_client_info(client)->device_count;
  ASSERT_FAILS(jpp_client_buffer_borrow(client, &foreign, &view), JPP_DEVICES_ERROR,
               "device index");
  foreign.shape.dtype = JPP_DTYPE_INVALID;
  foreign.device = 0;
  ASSERT_FAILS(jpp_client_buffer_borrow(client, &foreign, &view), JPP_INVALID_ARGUMENT,
               "dtype");
}

static void test_read_into_too_little_room_fails(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_buffer_t* buffer = test_upload(client, 0, 1);
  float data[4];
  ASSERT_FAILS(jpp_client_buffer_read(client, buffer, data, 8), JPP_INVALID_ARGUMENT,
               "copy to host");
  jpp_client_buffer_destroy(client, buffer);
}

static void test_unknown_devices_are_refused(void** state) {
  jpp_client_t* client = client_of(state);
  uint32_t devices = jpp_client_info(client)->device_count;
  char expected[64], found[64];
  snprintf(expected, sizeof(expected), "expected a device index below %u", devices);
  snprintf(found, sizeof(found), "found %u", devices);
  jpp_buffer_t* buffer = test_upload(client, 0, 1);
  jpp_buffer_t* other = buffer;
  ASSERT_FAILS(jpp_client_buffer_copy_to_device(client, buffer, devices, &other),
               JPP_DEVICES_ERROR, expected);
  assert_null(other);
  jpp_executable_t* add = test_compile(client, TEST_ADD_PORTABLE);
  test_call_t call = {.executable = add,
                      .device = (int32_t)devices,
                      .arg_count = 2,
                      .result_count = 1,
                      .args = {buffer, buffer},
                      .results = {buffer}};
  ASSERT_FAILS(test_call(client, &call), JPP_DEVICES_ERROR, found);
  assert_null(call.results[0]);
  jpp_client_buffer_destroy(client, buffer);
  jpp_client_executable_destroy(client, add);
}

static void test_executions_chain_without_waiting(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* one = test_upload(client, 0, 1);
  jpp_buffer_t* sum = test_upload(client, 0, 0);
  for (int i = 0; i < 20; ++i) {
    jpp_buffer_t* next = NULL;
    ASSERT_OK(test_execute(client, add, sum, one, &next));
    jpp_client_buffer_destroy(client, sum);
    sum = next;
  }
  test_expect(client, sum, 20, 21);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_buffer_destroy(client, one);
  jpp_client_executable_destroy(client, add);
}

static void test_two_results_come_in_order(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* program = test_compile(client, TEST_TWO_RESULTS);
  uint32_t count = 0;
  ASSERT_OK(jpp_client_executable_result_count(client, program, &count));
  assert_int_equal(count, 2);
  test_call_t call = {.executable = program,
                      .device = JPP_DEVICE_COMPILED,
                      .arg_count = 2,
                      .result_count = 2,
                      .want_event = true};
  call.args[0] = test_upload(client, 0, 2);
  call.args[1] = test_upload(client, 0, 2);
  ASSERT_OK(test_call(client, &call));
  jpp_client_executable_destroy(client, program);
  ASSERT_OK(jpp_client_event_await(client, call.event));
  test_expect(client, call.results[0], 4, 2);
  float product[4];
  ASSERT_OK(jpp_client_buffer_read(client, call.results[1], product, sizeof(product)));
  assert_float_equal(product[3], 25, 0);
  for (int i = 0; i < 2; ++i) {
    jpp_client_buffer_destroy(client, call.args[i]);
    jpp_client_buffer_destroy(client, call.results[i]);
  }
  jpp_client_event_destroy(client, call.event);
}

static void test_portable_executable_runs_on_every_device(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD_PORTABLE);
  for (uint32_t device = 0; device < jpp_client_info(client)->device_count; ++device) {
    jpp_buffer_t* a = test_upload(client, device, (float)device);
    test_call_t call = {.executable = add,
                        .device = (int32_t)device,
                        .arg_count = 2,
                        .result_count = 1,
                        .args = {a, a}};
    ASSERT_OK(test_call(client, &call));
    test_expect(client, call.results[0], 2 * (float)device, 2);
    jpp_client_buffer_destroy(client, a);
    jpp_client_buffer_destroy(client, call.results[0]);
  }
  jpp_client_executable_destroy(client, add);
}

static void test_one_execution_spans_two_devices(void** state) {
  jpp_client_t* client = client_of(state);
  if (jpp_client_info(client)->device_count < 2) return;
  jpp_executable_t* add = test_compile(client, TEST_ADD_PAIR);
  jpp_buffer_t* args[2][2];
  jpp_buffer_t* results[2][1];
  jpp_event_t* events[2];
  for (uint32_t d = 0; d < 2; ++d) {
    args[d][0] = test_upload(client, d, (float)d);
    args[d][1] = test_upload(client, d, 10);
  }
  jpp_buffer_t* const* arg_rows[2] = {args[0], args[1]};
  jpp_buffer_t** result_rows[2] = {results[0], results[1]};
  jpp_execute_t execute = {.struct_size = sizeof(execute),
                           .executable = add,
                           .device_count = 2,
                           .arg_count = 2,
                           .result_count = 1,
                           .device = JPP_DEVICE_COMPILED,
                           .args = arg_rows,
                           .results = result_rows,
                           .events = events};
  ASSERT_OK(jpp_client_execute(client, &execute));
  for (uint32_t d = 0; d < 2; ++d) {
    ASSERT_OK(jpp_client_event_await(client, events[d]));
    test_expect(client, results[d][0], 10 + (float)d, 2);
    jpp_client_event_destroy(client, events[d]);
    jpp_client_buffer_destroy(client, results[d][0]);
    jpp_client_buffer_destroy(client, args[d][0]);
    jpp_client_buffer_destroy(client, args[d][1]);
  }
  jpp_client_executable_destroy(client, add);
}

static void test_donated_buffer_is_gone_but_still_to_destroy(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD_DONATE);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* b = test_upload(client, 0, 2);
  jpp_buffer_t* sum = NULL;
  ASSERT_OK(test_execute(client, add, a, b, &sum));
  test_expect(client, sum, 3, 2);
  jpp_buffer_t* again = sum;
  ASSERT_FAILS(test_execute(client, add, a, b, &again), JPP_DONATED_ERROR, "donated");
  assert_null(again);
  ASSERT_FAILS(test_execute(client, add, sum, a, &again), JPP_DONATED_ERROR,
               "argument 1");
  test_expect(client, sum, 3, 2);
  ASSERT_FAILS(
      jpp_client_buffer_copy_to_device(client, a, test_device(client, 1), &again),
      JPP_DONATED_ERROR, "donated");
  float data[4];
  ASSERT_FAILS(jpp_client_buffer_read(client, a, data, sizeof(data)), JPP_DONATED_ERROR,
               "donated");
  jpp_client_buffer_destroy(client, a);
  jpp_client_buffer_destroy(client, b);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_executable_destroy(client, add);
}

static void test_donation_of_one_buffer_twice_is_refused(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD_DONATE);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* sum = NULL;
  jpp_status_t* status = test_execute(client, add, a, a, &sum);
  assert_non_null(status);
  assert_null(sum);
  jpp_status_free(status);
  jpp_client_buffer_destroy(client, a);
  jpp_client_executable_destroy(client, add);
}

static void test_copy_crosses_devices_and_outlives_its_source(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_buffer_t* buffer = test_upload(client, 0, 7);
  // To each of the others, and from the last one to itself.
  uint32_t devices = jpp_client_info(client)->device_count;
  for (uint32_t i = 1; i <= devices; ++i) {
    uint32_t device = i < devices ? i : devices - 1;
    jpp_buffer_t* copy = NULL;
    ASSERT_OK(jpp_client_buffer_copy_to_device(client, buffer, device, &copy));
    jpp_client_buffer_destroy(client, buffer);
    buffer = copy;
  }
  test_expect(client, buffer, 7, 1);
  jpp_client_buffer_destroy(client, buffer);
}

static void test_wrong_argument_count_is_refused(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  test_call_t call = {.executable = add,
                      .device = JPP_DEVICE_COMPILED,
                      .arg_count = 1,
                      .result_count = 1,
                      .args = {a},
                      .results = {a},
                      .want_event = true,
                      .event = (jpp_event_t*)a};
  ASSERT_FAILS(test_call(client, &call), JPP_INVALID_ARGUMENT, "execute");
  assert_null(call.results[0]);
  assert_null(call.event);
  jpp_client_buffer_destroy(client, a);
  jpp_client_executable_destroy(client, add);
}

static void test_broken_program_does_not_compile(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* executable = (jpp_executable_t*)client;
  jpp_status_t* status = test_try_compile(client, TEST_BROKEN, &executable);
  assert_non_null(status);
  assert_null(executable);
  assert_true(jpp_status_code(status) == JPP_INVALID_ARGUMENT ||
              jpp_status_code(status) == JPP_PARSE_ERROR);
  jpp_status_free(status);
}

static void test_ready_event_becomes_ready(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* sum = NULL;
  jpp_event_t* event = NULL;
  ASSERT_OK(test_execute(client, add, a, a, &sum));
  ASSERT_OK(jpp_client_buffer_ready_event(client, sum, &event));
  ASSERT_OK(jpp_client_event_await(client, event));
  bool ready = false;
  ASSERT_OK(jpp_client_event_is_ready(client, event, &ready));
  assert_true(ready);
  ASSERT_OK(jpp_client_event_await(client, event));
  jpp_client_event_destroy(client, event);
  jpp_client_buffer_destroy(client, a);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_executable_destroy(client, add);
}

// Signals the test from whatever thread the driver calls on.
typedef struct bell {
  pthread_mutex_t mutex;
  pthread_cond_t rang;
  int count;
  jpp_status_t* status;
} bell_t;

static void ring(void* user, jpp_status_t* status) {
  bell_t* bell = user;
  pthread_mutex_lock(&bell->mutex);
  ++bell->count;
  bell->status = status;
  pthread_cond_signal(&bell->rang);
  pthread_mutex_unlock(&bell->mutex);
}

static void bell_wait(bell_t* bell, int count) {
  pthread_mutex_lock(&bell->mutex);
  while (bell->count < count) pthread_cond_wait(&bell->rang, &bell->mutex);
  pthread_mutex_unlock(&bell->mutex);
}

static void test_waiters_are_called_once_each(void** state) {
  jpp_client_t* client = client_of(state);
  bell_t bell = {.mutex = PTHREAD_MUTEX_INITIALIZER, .rang = PTHREAD_COND_INITIALIZER};
  jpp_event_waiter_t waiters[3];
  for (int i = 0; i < 3; ++i) {
    waiters[i] = (jpp_event_waiter_t){.callback = ring, .user = &bell};
  }
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* sum = NULL;
  jpp_event_t* event = NULL;
  ASSERT_OK(test_execute(client, add, a, a, &sum));
  ASSERT_OK(jpp_client_buffer_ready_event(client, sum, &event));
  ASSERT_OK(jpp_client_event_on_ready(client, event, &waiters[0]));
  ASSERT_OK(jpp_client_event_on_ready(client, event, &waiters[1]));
  bell_wait(&bell, 2);
  ASSERT_OK(jpp_client_event_on_ready(client, event, &waiters[2]));
  bell_wait(&bell, 3);
  assert_null(bell.status);
  jpp_client_event_destroy(client, event);
  jpp_client_buffer_destroy(client, a);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_executable_destroy(client, add);
  assert_int_equal(bell.count, 3);
}

typedef struct compile_job {
  jpp_client_t* client;
  jpp_executable_t* executable;
  jpp_status_t* status;
} compile_job_t;

static void* compile_one(void* user) {
  compile_job_t* job = user;
  job->status = test_try_compile(job->client, TEST_ADD, &job->executable);
  return NULL;
}

static void test_compilations_run_in_parallel(void** state) {
  jpp_client_t* client = client_of(state);
  compile_job_t jobs[4];
  pthread_t threads[4];
  for (int i = 0; i < 4; ++i) {
    jobs[i] = (compile_job_t){.client = client};
    assert_int_equal(pthread_create(&threads[i], NULL, compile_one, &jobs[i]), 0);
  }
  for (int i = 0; i < 4; ++i) pthread_join(threads[i], NULL);
  for (int i = 0; i < 4; ++i) {
    ASSERT_OK(jobs[i].status);
    jpp_client_executable_destroy(client, jobs[i].executable);
  }
}

typedef struct issue_job {
  jpp_client_t* client;
  jpp_executable_t* add;
  uint32_t device;
  jpp_buffer_t* result;
  jpp_status_t* status;
} issue_job_t;

// device -> next device -> ..., as an actor does.
static void* issue_chain(void* user) {
  issue_job_t* job = user;
  for (int i = 0; i < 20 && !job->status; ++i) {
    test_call_t call = {.executable = job->add,
                        .device = (int32_t)job->device,
                        .arg_count = 2,
                        .result_count = 1,
                        .args = {job->result, job->result}};
    jpp_buffer_t* moved = NULL;
    job->status = test_call(job->client, &call);
    job->device = test_device(job->client, job->device + 1);
    if (!job->status) {
      job->status = jpp_client_buffer_copy_to_device(job->client, call.results[0],
                                                     job->device, &moved);
    }
    jpp_client_buffer_destroy(job->client, call.results[0]);
    jpp_client_buffer_destroy(job->client, job->result);
    job->result = moved;
  }
  return NULL;
}

static void test_threads_issue_at_the_same_time(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_executable_t* add = test_compile(client, TEST_ADD_PORTABLE);
  issue_job_t jobs[3];
  pthread_t threads[3];
  for (uint32_t i = 0; i < 3; ++i) {
    uint32_t device = test_device(client, i);
    jobs[i] = (issue_job_t){.client = client, .add = add, .device = device};
    jobs[i].result = test_upload(client, device, 1);
    assert_int_equal(pthread_create(&threads[i], NULL, issue_chain, &jobs[i]), 0);
  }
  for (int i = 0; i < 3; ++i) pthread_join(threads[i], NULL);
  for (int i = 0; i < 3; ++i) {
    ASSERT_OK(jobs[i].status);
    test_expect(client, jobs[i].result, 1 << 20, 1 << 20);
    jpp_client_buffer_destroy(client, jobs[i].result);
  }
  jpp_client_executable_destroy(client, add);
}

static void test_destroying_nothing_is_fine(void** state) {
  jpp_client_t* client = client_of(state);
  jpp_client_buffer_destroy(client, NULL);
  jpp_client_event_destroy(client, NULL);
  jpp_client_executable_destroy(client, NULL);
  jpp_client_destroy(NULL);
}

// --- Forks ----------------------------------------------------------------------------

static bool is_refused(jpp_status_t* status) {
  bool refused = jpp_status_code(status) == JPP_UNSUPPORTED &&
                 strstr(jpp_status_message(status), "forked") != NULL;
  jpp_status_free(status);
  return refused;
}

// What a forked child sees; every handle is its parent's.
static bool is_refused_in_child(jpp_client_t* client, test_call_t call,
                                jpp_event_t* event) {
  jpp_buffer_t* other = NULL;
  float values[4] = {0};
  int64_t dims[1] = {4};
  jpp_host_array_t array = {.struct_size = sizeof(array),
                            .data = values,
                            .dtype = JPP_DTYPE_F32,
                            .rank = 1,
                            .dims = dims};
  bool refused =
      is_refused(test_call(client, &call)) &&
      is_refused(jpp_client_buffer_from_host(client, &array, 0, &other)) &&
      is_refused(jpp_client_buffer_copy_to_device(client, call.args[0], 0, &other)) &&
      is_refused(jpp_client_buffer_read(client, call.args[0], values, sizeof(values))) &&
      is_refused(jpp_client_event_await(client, event)) &&
      is_refused(test_try_compile(client, TEST_ADD, &call.executable));
  jpp_client_event_destroy(client, event);
  jpp_client_buffer_destroy(client, call.args[0]);
  jpp_client_executable_destroy(client, call.executable);
  jpp_client_destroy(client);
  return refused;
}

static void test_a_forked_child_is_refused_and_ends(void** state) {
  jpp_client_t* client = client_of(state);
  test_call_t call = {.executable = test_compile(client, TEST_ADD),
                      .device = JPP_DEVICE_COMPILED,
                      .arg_count = 2,
                      .result_count = 1};
  jpp_event_t* event = NULL;
  call.args[0] = call.args[1] = test_upload(client, 0, 1);
  ASSERT_OK(jpp_client_buffer_ready_event(client, call.args[0], &event));
  pid_t child = fork();
  if (child == 0) _exit(is_refused_in_child(client, call, event) ? 0 : 1);
  int outcome = -1;
  assert_int_equal(waitpid(child, &outcome, 0), child);
  assert_int_equal(outcome, 0);
  ASSERT_OK(test_call(client, &call));
  test_expect(client, call.results[0], 2, 2);
  jpp_client_buffer_destroy(client, call.results[0]);
  jpp_client_event_destroy(client, event);
  jpp_client_buffer_destroy(client, call.args[0]);
  jpp_client_executable_destroy(client, call.executable);
}

#define ON_CLIENT(test) \
  cmocka_unit_test_setup_teardown(test, create_client, destroy_client)

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s fake|fake-threads|pjrt\n", argv[0]);
    return 2;
  }
  g_driver = argv[1];
  if (strcmp(g_driver, "pjrt") == 0 && test_skip_without_plugin()) return 0;
  const struct CMUnitTest tests[] = {
      ON_CLIENT(test_info_names_platform_and_devices),
      ON_CLIENT(test_host_array_survives_the_round_trip),
      ON_CLIENT(test_scalar_and_empty_arrays),
      ON_CLIENT(test_byte_strides_are_followed),
      ON_CLIENT(test_lent_contents_stay_where_they_are),
      ON_CLIENT(test_threads_borrow_the_same_buffer),
      ON_CLIENT(test_what_is_gone_can_not_be_lent),
      ON_CLIENT(test_borrowed_memory_is_used_where_it_is),
      ON_CLIENT(test_what_can_not_be_borrowed_is_refused),
      ON_CLIENT(test_read_into_too_little_room_fails),
      ON_CLIENT(test_unknown_devices_are_refused),
      ON_CLIENT(test_executions_chain_without_waiting),
      ON_CLIENT(test_two_results_come_in_order),
      ON_CLIENT(test_portable_executable_runs_on_every_device),
      ON_CLIENT(test_one_execution_spans_two_devices),
      ON_CLIENT(test_donated_buffer_is_gone_but_still_to_destroy),
      ON_CLIENT(test_donation_of_one_buffer_twice_is_refused),
      ON_CLIENT(test_copy_crosses_devices_and_outlives_its_source),
      ON_CLIENT(test_wrong_argument_count_is_refused),
      ON_CLIENT(test_broken_program_does_not_compile),
      ON_CLIENT(test_ready_event_becomes_ready),
      ON_CLIENT(test_waiters_are_called_once_each),
      ON_CLIENT(test_compilations_run_in_parallel),
      ON_CLIENT(test_threads_issue_at_the_same_time),
      ON_CLIENT(test_destroying_nothing_is_fine),
      ON_CLIENT(test_a_forked_child_is_refused_and_ends),
  };
  return cmocka_run_group_tests_name("device conformance", tests, NULL, NULL);
}
