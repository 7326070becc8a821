// Checks the other rules of jaxpp/device.h on the driver that the command line names:
// executions, events, threads and forks. test_buffers.c checks buffers.
#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "conformance.h"

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

static jpp_execute_t on_two_devices(jpp_executable_t* add,
                                    jpp_buffer_t* const* const* arg_rows,
                                    jpp_buffer_t** const* result_rows) {
  return (jpp_execute_t){.struct_size = sizeof(jpp_execute_t),
                         .executable = add,
                         .device_count = 2,
                         .arg_count = 2,
                         .result_count = 1,
                         .device = JPP_DEVICE_COMPILED,
                         .args = arg_rows,
                         .results = result_rows};
}

static void test_one_execution_spans_two_devices(void** state) {
  jpp_client_t* client = client_of(state);
  const jpp_client_info_t* info = jpp_client_info(client);
  if (info->device_count < 2 || info->shares_buffers) return;
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
  jpp_execute_t execute = on_two_devices(add, arg_rows, result_rows);
  execute.events = events;
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

static void test_shared_buffers_need_programs_for_one_device(void** state) {
  jpp_client_t* client = client_of(state);
  if (!jpp_client_info(client)->shares_buffers) return;
  jpp_executable_t* add = test_compile(client, TEST_ADD_PAIR);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t *args[2] = {a, a}, *results[2] = {NULL, NULL};
  jpp_buffer_t* const* arg_rows[2] = {args, args};
  jpp_buffer_t** result_rows[2] = {&results[0], &results[1]};
  jpp_execute_t execute = on_two_devices(add, arg_rows, result_rows);
  ASSERT_FAILS(jpp_client_execute(client, &execute), JPP_UNSUPPORTED,
               "expected a program for one device");
  jpp_client_buffer_destroy(client, a);
  jpp_client_executable_destroy(client, add);
}

static void test_a_program_takes_buffers_of_other_devices(void** state) {
  jpp_client_t* client = client_of(state);
  const jpp_client_info_t* info = jpp_client_info(client);
  if (info->device_count < 2 || !info->shares_buffers) return;
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* b = test_upload(client, 1, 2);
  jpp_buffer_t* sum = NULL;
  ASSERT_OK(test_execute(client, add, a, b, &sum));
  test_expect(client, sum, 3, 2);
  jpp_client_buffer_destroy(client, a);
  jpp_client_buffer_destroy(client, b);
  jpp_client_buffer_destroy(client, sum);
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
  // Copies to each other device, and from the last one to itself.
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

static void test_copies_cross_memories(void** state) {
  jpp_client_t* client = client_of(state);
  const jpp_client_info_t* info = jpp_client_info(client);
  if (!(info->memories & 1u << JPP_MEMORY_PINNED_HOST)) skip();
  assert_non_null(strstr(info->memory_kinds, "pinned_host"));
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* a = test_upload(client, 0, 7);
  const jpp_memory_t memories[] = {JPP_MEMORY_PINNED_HOST, JPP_MEMORY_PINNED_HOST,
                                   JPP_MEMORY_DEVICE,      JPP_MEMORY_DEVICE,
                                   JPP_MEMORY_PINNED_HOST, JPP_MEMORY_DEVICE};
  for (size_t i = 0; i < sizeof(memories) / sizeof(*memories); ++i) {
    // Also copies to another device and back.
    uint32_t device = i == 4 ? test_device(client, 1) : 0;
    jpp_buffer_t* copy = NULL;
    ASSERT_OK(jpp_client_buffer_copy_to_memory(client, a, device, memories[i], &copy));
    jpp_client_buffer_destroy(client, a);
    a = copy;
    test_expect(client, a, 7, 1);
    jpp_buffer_shape_t shape;
    ASSERT_OK(jpp_client_buffer_shape(client, a, &shape));
    assert_int_equal(shape.dims[0], 4);
  }
  jpp_buffer_t* sum = NULL;
  ASSERT_OK(test_execute(client, add, a, a, &sum));
  test_expect(client, sum, 14, 2);
  jpp_client_buffer_destroy(client, a);
  jpp_client_buffer_destroy(client, sum);
  jpp_client_executable_destroy(client, add);
}

static void test_uploads_to_pinned_host(void** state) {
  jpp_client_t* client = client_of(state);
  if (!(jpp_client_info(client)->memories & 1u << JPP_MEMORY_PINNED_HOST)) skip();
  const float data[4] = {3, 4, 5, 6};
  const int64_t dims[1] = {4};
  jpp_host_array_t array = {.struct_size = sizeof(array),
                            .data = data,
                            .dtype = JPP_DTYPE_F32,
                            .rank = 1,
                            .dims = dims,
                            .memory = JPP_MEMORY_PINNED_HOST};
  jpp_buffer_t *buffer = NULL, *copy = NULL;
  uint32_t device = test_device(client, 1);
  ASSERT_OK(jpp_client_buffer_from_host(client, &array, device, &buffer));
  test_expect(client, buffer, 3, 1);
  ASSERT_OK(jpp_client_buffer_copy_to_device(client, buffer, device, &copy));
  jpp_client_buffer_destroy(client, buffer);
  test_expect(client, copy, 3, 1);
  jpp_client_buffer_destroy(client, copy);
  array.memory = JPP_MEMORY_COUNT;
  ASSERT_FAILS(jpp_client_buffer_from_host(client, &array, 0, &buffer),
               JPP_INVALID_ARGUMENT, "memory 2 is not in memory.h");
  assert_null(buffer);
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

// Signals the test from the thread that the driver calls on.
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

// device -> next device -> ..., as an actor runs a chain of tasks.
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

// Runs in a forked child, where every handle belongs to the parent.
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

int main(int argc, char** argv) {
  const struct CMUnitTest tests[] = {
      ON_CLIENT(test_info_names_platform_and_devices),
      ON_CLIENT(test_unknown_devices_are_refused),
      ON_CLIENT(test_executions_chain_without_waiting),
      ON_CLIENT(test_two_results_come_in_order),
      ON_CLIENT(test_portable_executable_runs_on_every_device),
      ON_CLIENT(test_one_execution_spans_two_devices),
      ON_CLIENT(test_shared_buffers_need_programs_for_one_device),
      ON_CLIENT(test_a_program_takes_buffers_of_other_devices),
      ON_CLIENT(test_donated_buffer_is_gone_but_still_to_destroy),
      ON_CLIENT(test_donation_of_one_buffer_twice_is_refused),
      ON_CLIENT(test_copy_crosses_devices_and_outlives_its_source),
      ON_CLIENT(test_copies_cross_memories),
      ON_CLIENT(test_uploads_to_pinned_host),
      ON_CLIENT(test_wrong_argument_count_is_refused),
      ON_CLIENT(test_broken_program_does_not_compile),
      ON_CLIENT(test_ready_event_becomes_ready),
      ON_CLIENT(test_waiters_are_called_once_each),
      ON_CLIENT(test_compilations_run_in_parallel),
      ON_CLIENT(test_threads_issue_at_the_same_time),
      ON_CLIENT(test_destroying_nothing_is_fine),
      ON_CLIENT(test_a_forked_child_is_refused_and_ends),
  };
  return conformance_run(argc, argv, "device conformance", tests,
                         sizeof(tests) / sizeof(*tests));
}
