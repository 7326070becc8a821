// Tests only the fake: its accounts, injected failures, dead handles and programs.
#include "base/alloc.h"
#include "driver_under_test.h"

static jpp_client_t* create(uint32_t threads) {
  jpp_fake_options_t options = {
      .struct_size = sizeof(options), .device_count = 2, .threads = threads};
  jpp_client_t* client = NULL;
  ASSERT_OK(jpp_client_create_fake(&options, &client));
  return client;
}

static jpp_fake_stats_t stats_of(jpp_client_t* client) {
  jpp_fake_stats_t stats;
  ASSERT_OK(jpp_fake_stats(client, &stats));
  return stats;
}

static void expect_nothing_live(jpp_client_t* client) {
  jpp_fake_stats_t stats = stats_of(client);
  assert_int_equal(stats.live_buffers, 0);
  assert_int_equal(stats.live_events, 0);
  assert_int_equal(stats.live_executables, 0);
  assert_int_equal(stats.live_bytes, 0);
  assert_int_equal(stats.misuses, 0);
}

static jpp_status_t* compile_text(jpp_client_t* client, const char* text,
                                  jpp_executable_t** out_executable) {
  jpp_compile_request_t request = {.struct_size = sizeof(request),
                                   .code = text,
                                   .code_size = strlen(text),
                                   .format = "fake"};
  return jpp_client_compile(client, &request, out_executable);
}

static void test_device_count_is_checked(void** state) {
  (void)state;
  jpp_client_t* client = NULL;
  jpp_fake_options_t none = {.struct_size = sizeof(none)};
  jpp_fake_options_t many = {.struct_size = sizeof(many),
                             .device_count = JPP_FAKE_MAX_DEVICES + 1};
  ASSERT_FAILS(jpp_client_create_fake(&none, &client), JPP_DEVICES_ERROR, "found 0");
  ASSERT_FAILS(jpp_client_create_fake(&many, &client), JPP_DEVICES_ERROR, "found 65");
}

static void test_accounts_are_exact(void** state) {
  (void)state;
  jpp_client_t* client = create(2);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_executable_t* donate = test_compile(client, TEST_ADD_DONATE);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* b = test_upload(client, 0, 2);
  jpp_buffer_t *sum = NULL, *in_place = NULL, *copy = NULL;
  ASSERT_OK(test_execute(client, add, a, b, &sum));
  ASSERT_OK(test_execute(client, donate, sum, b, &in_place));
  ASSERT_OK(jpp_client_buffer_copy_to_device(client, in_place, 1, &copy));
  jpp_fake_stats_t stats = stats_of(client);
  assert_int_equal(stats.live_buffers, 5);
  assert_int_equal(stats.live_executables, 2);
  assert_int_equal(stats.live_bytes, 64);
  assert_int_equal(stats.device_live_bytes[0], 48);
  assert_int_equal(stats.device_peak_bytes[0], 48);
  assert_int_equal(stats.device_peak_bytes[1], 16);
  assert_int_equal(stats.executions, 2);
  assert_int_equal(stats.copies, 1);
  assert_int_equal(stats.uploads, 2);
  assert_int_equal(stats.calls, 7);
  test_expect(client, copy, 5, 3);
  jpp_buffer_t* all[] = {a, b, sum, in_place, copy};
  for (int i = 0; i < 5; ++i) jpp_client_buffer_destroy(client, all[i]);
  jpp_client_executable_destroy(client, add);
  jpp_client_executable_destroy(client, donate);
  expect_nothing_live(client);
  assert_int_equal(stats_of(client).device_peak_bytes[0], 48);
  jpp_client_destroy(client);
}

static void test_memories_have_accounts_of_their_own(void** state) {
  (void)state;
  jpp_client_t* client = create(2);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t *host = NULL, *there = NULL, *sum = NULL;
  const jpp_memory_t pinned = JPP_MEMORY_PINNED_HOST;
  ASSERT_OK(jpp_client_buffer_copy_to_memory(client, a, 0, pinned, &host));
  ASSERT_OK(jpp_client_buffer_copy_to_memory(client, host, 1, pinned, &there));
  jpp_fake_stats_t stats = stats_of(client);
  assert_int_equal(stats.live_bytes, 48);
  assert_int_equal(stats.device_live_bytes[0], 16);
  assert_int_equal(stats.host_live_bytes[0], 16);
  assert_int_equal(stats.device_peak_bytes[1], 0);
  assert_int_equal(stats.host_peak_bytes[1], 16);
  assert_int_equal(stats.copies, 2);
  ASSERT_FAILS(test_execute(client, add, a, host, &sum), JPP_INVALID_ARGUMENT,
               "expected argument 1 in device memory, found pinned_host");
  jpp_client_buffer_destroy(client, a);
  jpp_client_buffer_destroy(client, host);
  jpp_client_buffer_destroy(client, there);
  jpp_client_executable_destroy(client, add);
  expect_nothing_live(client);
  assert_int_equal(stats_of(client).host_live_bytes[0], 0);
  assert_int_equal(stats_of(client).host_peak_bytes[0], 16);
  jpp_client_destroy(client);
}

static void test_a_memory_that_devices_lack_is_refused(void** state) {
  (void)state;
  jpp_fake_options_t options = {
      .struct_size = sizeof(options), .device_count = 1, .device_memory_only = true};
  jpp_client_t* client = NULL;
  ASSERT_OK(jpp_client_create_fake(&options, &client));
  jpp_buffer_t *a = test_upload(client, 0, 1), *copy = a;
  ASSERT_OK(jpp_client_check_memory(client, JPP_MEMORY_DEVICE));
  ASSERT_FAILS(
      jpp_client_buffer_copy_to_memory(client, a, 0, JPP_MEMORY_PINNED_HOST, &copy),
      JPP_UNSUPPORTED,
      "expected devices of platform cpu with the memory pinned_host, found devices with "
      "device");
  assert_null(copy);
  jpp_client_buffer_destroy(client, a);
  expect_nothing_live(client);
  jpp_client_destroy(client);
}

static void test_dead_handles_are_errors(void** state) {
  (void)state;
  jpp_client_t* client = create(0);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* dead = test_upload(client, 0, 1);
  jpp_buffer_t* result = NULL;
  jpp_event_t* event = NULL;
  jpp_client_buffer_destroy(client, dead);
  ASSERT_FAILS(test_execute(client, add, a, dead, &result), JPP_DONATED_ERROR,
               "argument 1: execute: expected a live buffer, found one destroyed");
  ASSERT_FAILS(jpp_client_buffer_ready_event(client, dead, &event), JPP_DONATED_ERROR,
               "ready event");
  jpp_client_executable_destroy(client, add);
  ASSERT_FAILS(test_execute(client, add, a, a, &result), JPP_DONATED_ERROR,
               "expected a live executable, found one destroyed");
  jpp_client_buffer_destroy(client, a);
  jpp_client_buffer_destroy(client, a);
  assert_int_equal(stats_of(client).misuses, 1);
  jpp_client_destroy(client);
}

static void test_memory_that_is_shared_is_not_donated(void** state) {
  (void)state;
  jpp_client_t* client = create(0);
  jpp_executable_t* donate = test_compile(client, TEST_ADD_DONATE);
  jpp_buffer_t* lent = test_upload(client, 0, 1);
  jpp_buffer_t* b = test_upload(client, 0, 2);
  _Atomic uint32_t released = 0;
  jpp_buffer_t* view = test_borrow(client, lent, &released);
  jpp_buffer_t* sum = NULL;
  void* memory = NULL;
  assert_int_equal(stats_of(client).live_bytes, 32);
  ASSERT_FAILS(test_execute(client, donate, lent, b, &sum), JPP_INVALID_ARGUMENT,
               "is lent");
  ASSERT_FAILS(test_execute(client, donate, view, b, &sum), JPP_INVALID_ARGUMENT,
               "is borrowed");
  jpp_client_buffer_destroy(client, view);
  assert_int_equal(released, 1);
  jpp_client_buffer_reclaim(client, lent);
  ASSERT_OK(test_execute(client, donate, lent, b, &sum));
  jpp_client_buffer_destroy(client, sum);
  jpp_client_buffer_destroy(client, lent);
  assert_int_equal(stats_of(client).misuses, 0);
  ASSERT_OK(jpp_client_buffer_lend(client, b, &memory));
  jpp_client_buffer_destroy(client, b);
  assert_int_equal(stats_of(client).misuses, 1);
  jpp_client_executable_destroy(client, donate);
  jpp_client_destroy(client);
}

static void test_what_is_left_goes_with_the_client(void** state) {
  (void)state;
  jpp_client_t* client = create(1);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* sum = NULL;
  jpp_event_t* event = NULL;
  ASSERT_OK(test_execute(client, add, a, a, &sum));
  ASSERT_OK(jpp_client_buffer_ready_event(client, sum, &event));
  assert_int_equal(stats_of(client).live_events, 1);
  jpp_client_destroy(client);
}

static void test_argument_on_another_device_is_refused(void** state) {
  (void)state;
  jpp_client_t* client = create(0);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  jpp_buffer_t* far = test_upload(client, 1, 1);
  jpp_buffer_t* sum = NULL;
  ASSERT_FAILS(test_execute(client, add, a, far, &sum), JPP_INVALID_ARGUMENT,
               "expected argument 1 on device 0, found device 1");
  jpp_client_destroy(client);
}

static void test_programs_compute(void** state) {
  (void)state;
  jpp_client_t* client = create(0);
  jpp_executable_t* program = NULL;
  ASSERT_OK(compile_text(client,
                         "# halves and mixes\n"
                         "args 2\n"
                         "f32[4] = scale 0 0.5\n"
                         "f32[] = hash 0 1\n",
                         &program));
  float hashes[2] = {0};
  for (int swap = 0; swap < 2; ++swap) {
    test_call_t call = {.executable = program,
                        .device = 1,
                        .arg_count = 2,
                        .result_count = 2,
                        .args = {test_upload(client, 1, (float)swap),
                                 test_upload(client, 1, (float)(1 - swap))}};
    ASSERT_OK(test_call(client, &call));
    test_expect(client, call.results[0], 0.5f * (float)swap, 0.5f);
    ASSERT_OK(jpp_client_buffer_read(client, call.results[1], &hashes[swap], 4));
    assert_true(hashes[swap] >= 0 && hashes[swap] < 1);
  }
  assert_true(hashes[0] != hashes[1]);
  jpp_client_destroy(client);
}

static void test_malformed_programs_name_their_line(void** state) {
  (void)state;
  static const struct {
    const char* text;
    const char* error;
  } kCases[] = {
      {"f32[4] = sum 0\nf32[4 = sum 0", "fake program:2: expected f32[dims]"},
      {"f32[-1] = sum 0", "fake program:1: expected f32[dims], found 'f32[-1]'"},
      {"f64[4] = sum 0", "expected f32[dims], found 'f64[4]'"},
      {"f32[4] sum 0", "expected '=', found 'sum'"},
      {"f32[4] =", "found 'end of line'"},
      {"f32[4] = divide 0",
       "expected sum, mul, copy, scale, hash, all_sum or all_hash, found 'divide'"},
      {"f32[4] = sum", "expected another number of arguments, found 'sum'"},
      {"f32[4] = copy 0 1", "expected another number of arguments, found 'copy'"},
      {"f32[4] = sum x", "expected an index, found 'x'"},
      {"f32[4] = scale 0 fast", "expected a factor, found 'fast'"},
      {"args 1\nf32[4] = copy 1", "expected fewer arguments used"},
  };
  jpp_client_t* client = create(0);
  jpp_executable_t* program = NULL;
  for (size_t i = 0; i < sizeof(kCases) / sizeof(kCases[0]); ++i) {
    ASSERT_FAILS(compile_text(client, kCases[i].text, &program), JPP_PARSE_ERROR,
                 kCases[i].error);
  }
  ASSERT_FAILS(compile_text(client, "devices 2\nf32[4] = copy 0", &program),
               JPP_DEVICES_ERROR, "device 2 of 2");
  jpp_client_destroy(client);
}

// Makes six counted calls: two uploads, an execution, a donating one, a copy to the other
// device, a read. Destroys everything that it made, also after a failure.
#define CHAIN_CALLS 6
static jpp_status_t* run_chain(jpp_client_t* client, jpp_executable_t* add,
                               jpp_executable_t* donate, float* out_data) {
  float ones[4] = {1, 1, 1, 1};
  int64_t dims[1] = {4};
  jpp_host_array_t array = {.struct_size = sizeof(array),
                            .data = ones,
                            .dtype = JPP_DTYPE_F32,
                            .rank = 1,
                            .dims = dims};
  jpp_buffer_t* b[5] = {NULL};
  jpp_status_t* status = jpp_client_buffer_from_host(client, &array, 0, &b[0]);
  if (!status) status = jpp_client_buffer_from_host(client, &array, 0, &b[1]);
  if (!status) status = test_execute(client, add, b[0], b[1], &b[2]);
  if (!status) status = test_execute(client, donate, b[2], b[1], &b[3]);
  if (!status) status = jpp_client_buffer_copy_to_device(client, b[3], 1, &b[4]);
  if (!status) status = jpp_client_buffer_read(client, b[4], out_data, 16);
  for (int i = 0; i < 5; ++i) jpp_client_buffer_destroy(client, b[i]);
  return status;
}

static void chain_with_failure(uint32_t threads, jpp_fake_failure_t failure) {
  jpp_client_t* client = create(threads);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_executable_t* donate = test_compile(client, TEST_ADD_DONATE);
  float data[4] = {0};
  ASSERT_OK(jpp_fake_set_failure(client, failure));
  ASSERT_FAILS(run_chain(client, add, donate, data), JPP_EXECUTION_ERROR,
               "injected failure");
  assert_int_equal(stats_of(client).live_buffers, 0);
  assert_int_equal(stats_of(client).live_bytes, 0);
  ASSERT_OK(run_chain(client, add, donate, data));
  assert_float_equal(data[3], 3, 0);
  jpp_client_executable_destroy(client, add);
  jpp_client_executable_destroy(client, donate);
  expect_nothing_live(client);
  jpp_client_destroy(client);
}

static void test_failure_at_every_call_leaks_nothing(void** state) {
  (void)state;
  for (uint64_t at = 1; at <= CHAIN_CALLS; ++at) {
    for (uint32_t threads = 0; threads < 3; ++threads) {
      chain_with_failure(threads, (jpp_fake_failure_t){.at = at});
      chain_with_failure(threads, (jpp_fake_failure_t){.at = at, .async = true});
    }
  }
}

static void test_failed_allocation_anywhere_leaks_nothing(void** state) {
  (void)state;
  jpp_client_t* client = create(0);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_executable_t* donate = test_compile(client, TEST_ADD_DONATE);
  float data[4] = {0};
  for (int64_t n = 0;; ++n) {
    jpp__alloc_fail_after(n);
    jpp_status_t* status = run_chain(client, add, donate, data);
    jpp__alloc_fail_after(-1);
    assert_int_equal(stats_of(client).live_buffers, 0);
    assert_int_equal(stats_of(client).live_events, 0);
    assert_int_equal(stats_of(client).live_bytes, 0);
    if (!status) break;
    ASSERT_FAILS(status, JPP_OUT_OF_MEMORY, "host memory");
  }
  assert_float_equal(data[0], 3, 0);
  jpp_client_destroy(client);
}

static void test_failed_allocation_in_compile_and_create(void** state) {
  (void)state;
  for (int64_t n = 0;; ++n) {
    jpp_fake_options_t options = {
        .struct_size = sizeof(options), .device_count = 1, .threads = 1};
    jpp_client_t* client = NULL;
    jpp_executable_t* add = NULL;
    jpp__alloc_fail_after(n);
    jpp_status_t* status = jpp_client_create_fake(&options, &client);
    if (!status) status = test_try_compile(client, TEST_ADD_DONATE, &add);
    jpp__alloc_fail_after(-1);
    jpp_client_destroy(client);
    if (!status) break;
    ASSERT_FAILS(status, JPP_OUT_OF_MEMORY, "host memory");
  }
}

static void keep_status(void* user, jpp_status_t* status) {
  *(jpp_status_t**)user = status;
}

static void test_failed_execution_fails_events_and_consumers(void** state) {
  (void)state;
  jpp_client_t* client = create(0);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* a = test_upload(client, 0, 1);
  test_call_t call = {.executable = add,
                      .device = JPP_DEVICE_COMPILED,
                      .arg_count = 2,
                      .result_count = 1,
                      .args = {a, a},
                      .want_event = true};
  ASSERT_OK(jpp_fake_set_failure(client, (jpp_fake_failure_t){.at = 1, .async = true}));
  ASSERT_OK(test_call(client, &call));
  ASSERT_FAILS(jpp_client_event_await(client, call.event), JPP_EXECUTION_ERROR,
               "execute: injected failure of call 3");
  jpp_buffer_t* consumer = NULL;
  jpp_event_t* event = NULL;
  jpp_status_t* kept = NULL;
  jpp_event_waiter_t waiter = {.callback = keep_status, .user = &kept};
  ASSERT_OK(test_execute(client, add, a, call.results[0], &consumer));
  ASSERT_OK(jpp_client_buffer_ready_event(client, consumer, &event));
  ASSERT_OK(jpp_client_event_on_ready(client, event, &waiter));
  ASSERT_FAILS(kept, JPP_EXECUTION_ERROR, "execute: injected failure of call 3");
  jpp_client_destroy(client);
}

static void test_custom_calls_and_foreign_clients_are_refused(void** state) {
  (void)state;
  jpp_client_t* client = create(0);
  jpp_custom_call_t call = {.name = "lapack", .platform = "Host"};
  ASSERT_FAILS(jpp_client_register_custom_call(client, &call), JPP_UNSUPPORTED,
               "custom call lapack: driver fake supports no custom calls");
  jpp_client_destroy(client);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_device_count_is_checked),
      cmocka_unit_test(test_accounts_are_exact),
      cmocka_unit_test(test_memories_have_accounts_of_their_own),
      cmocka_unit_test(test_a_memory_that_devices_lack_is_refused),
      cmocka_unit_test(test_dead_handles_are_errors),
      cmocka_unit_test(test_memory_that_is_shared_is_not_donated),
      cmocka_unit_test(test_what_is_left_goes_with_the_client),
      cmocka_unit_test(test_argument_on_another_device_is_refused),
      cmocka_unit_test(test_programs_compute),
      cmocka_unit_test(test_malformed_programs_name_their_line),
      cmocka_unit_test(test_failure_at_every_call_leaks_nothing),
      cmocka_unit_test(test_failed_allocation_anywhere_leaks_nothing),
      cmocka_unit_test(test_failed_allocation_in_compile_and_create),
      cmocka_unit_test(test_failed_execution_fails_events_and_consumers),
      cmocka_unit_test(test_custom_calls_and_foreign_clients_are_refused),
  };
  return cmocka_run_group_tests_name("fake device", tests, NULL, NULL);
}
