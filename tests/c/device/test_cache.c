// A folder of compiled programs, on the driver that the command line names. The fake
// cannot serialize its programs: every compilation must still succeed there.
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "driver_under_test.h"

static const char* g_driver;

typedef struct cache {
  jpp_client_t* client;
  char folder[64];
  char file[128];
  bool can_keep;
} cache_t;

static int make_cache(void** state) {
  static cache_t cache;
  cache.client = test_client_create(g_driver);
  cache.can_keep = strcmp(g_driver, "fake") != 0;
  snprintf(cache.folder, sizeof(cache.folder), "/tmp/jaxpp-cache-XXXXXX");
  if (!mkdtemp(cache.folder)) return -1;
  snprintf(cache.file, sizeof(cache.file), "%s/jaxpp-k1", cache.folder);
  *state = &cache;
  return 0;
}

static int drop_cache(void** state) {
  cache_t* cache = *state;
  unlink(cache->file);
  jpp_client_destroy(cache->client);
  return rmdir(cache->folder);  // fails if a temporary file was left
}

// Runs the program on arguments of the device, and destroys it. `where`: the device to
// name in the call.
static void run(cache_t* cache, jpp_executable_t* add, int32_t where, uint32_t device) {
  test_call_t call = {.executable = add,
                      .device = where,
                      .arg_count = 2,
                      .result_count = 1,
                      .args = {test_upload(cache->client, device, 1),
                               test_upload(cache->client, device, 10)}};
  ASSERT_OK(test_call(cache->client, &call));
  test_expect(cache->client, call.results[0], 11, 2);
  jpp_client_buffer_destroy(cache->client, call.results[0]);
  for (int i = 0; i < 2; ++i) jpp_client_buffer_destroy(cache->client, call.args[i]);
  jpp_client_executable_destroy(cache->client, add);
}

// Compiles with the cache in `folder` and runs the result.
static jpp_cache_outcome_t compile_and_run(cache_t* cache, const char* folder) {
  jpp_compile_request_t request = test_request(cache->client, TEST_ADD_PORTABLE);
  jpp_executable_t* add = NULL;
  jpp_cache_outcome_t outcome;
  ASSERT_OK(
      jpp_client_compile_cached(cache->client, &request, folder, "k1", &add, &outcome));
  run(cache, add, 2, 2);
  return outcome;
}

static void expect_compiled(cache_t* cache) {
  jpp_cache_outcome_t expected = cache->can_keep ? JPP_CACHE_KEPT : JPP_CACHE_NOT_KEPT;
  assert_int_equal(compile_and_run(cache, cache->folder), expected);
}

static void expect_loaded(cache_t* cache) {
  jpp_cache_outcome_t expected = cache->can_keep ? JPP_CACHE_LOADED : JPP_CACHE_NOT_KEPT;
  assert_int_equal(compile_and_run(cache, cache->folder), expected);
}

static void test_the_second_compilation_loads(void** state) {
  expect_compiled(*state);
  expect_loaded(*state);
}

static void write_file(const char* path, const void* bytes, size_t size) {
  FILE* file = fopen(path, "wb");
  assert_non_null(file);
  assert_int_equal(fwrite(bytes, 1, size, file), size);
  fclose(file);
}

static long file_size(const char* path) {
  struct stat info;
  return stat(path, &info) == 0 ? (long)info.st_size : -1;
}

static void change_byte(const char* path, long at) {
  FILE* file = fopen(path, "r+b");
  assert_non_null(file);
  assert_int_equal(fseek(file, at, SEEK_SET), 0);
  int byte = fgetc(file);
  assert_int_equal(fseek(file, at, SEEK_SET), 0);
  fputc(byte ^ 1, file);
  fclose(file);
}

static void test_damaged_files_are_replaced(void** state) {
  cache_t* cache = *state;
  expect_compiled(cache);
  if (!cache->can_keep) return;
  long size = file_size(cache->file);
  assert_true(size > 34);
  const long places[] = {0, 8, 16, 24, 32, 34, size / 2, size - 1};
  for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); ++i) {
    change_byte(cache->file, places[i]);
    expect_compiled(cache);
    expect_loaded(cache);
  }
  const long lengths[] = {0, 7, 31, 32, 34, size / 2, size - 1};
  for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); ++i) {
    assert_int_equal(truncate(cache->file, lengths[i]), 0);
    expect_compiled(cache);
    expect_loaded(cache);
  }
}

static void test_a_size_that_the_file_does_not_have(void** state) {
  cache_t* cache = *state;
  unsigned char head[32] = "JPPCODE3";
  memset(head + 8, 0xff, 16);
  write_file(cache->file, head, sizeof(head));
  expect_compiled(cache);
}

static void test_a_file_of_another_key(void** state) {
  cache_t* cache = *state;
  expect_compiled(cache);
  if (!cache->can_keep) return;
  // The file is intact, but it names the key "k1".
  char other[sizeof(cache->file)];
  snprintf(other, sizeof(other), "%s/jaxpp-k2", cache->folder);
  assert_int_equal(rename(cache->file, other), 0);
  jpp_compile_request_t request = test_request(cache->client, TEST_ADD_PORTABLE);
  for (int i = 0; i < 2; ++i) {
    jpp_executable_t* add = NULL;
    jpp_cache_outcome_t outcome;
    ASSERT_OK(jpp_client_compile_cached(cache->client, &request, cache->folder, "k2",
                                        &add, &outcome));
    assert_int_equal(outcome, i ? JPP_CACHE_LOADED : JPP_CACHE_KEPT);
    jpp_client_executable_destroy(cache->client, add);
  }
  unlink(other);
}

static void test_a_pipe_is_not_waited_for(void** state) {
  cache_t* cache = *state;
  assert_int_equal(mkfifo(cache->file, 0666), 0);
  expect_compiled(cache);
  expect_loaded(cache);
}

static void test_a_folder_that_is_not_there_only_costs_time(void** state) {
  cache_t* cache = *state;
  assert_int_equal(compile_and_run(cache, "/no/such/folder"),
                   cache->can_keep ? JPP_CACHE_NOT_WRITTEN : JPP_CACHE_NOT_KEPT);
}

static void test_a_program_that_does_not_compile_leaves_nothing(void** state) {
  cache_t* cache = *state;
  jpp_compile_request_t request = test_request(cache->client, TEST_BROKEN);
  jpp_executable_t* executable = NULL;
  jpp_cache_outcome_t outcome;
  jpp_status_t* status = jpp_client_compile_cached(cache->client, &request, cache->folder,
                                                   "k1", &executable, &outcome);
  assert_non_null(status);
  jpp_status_free(status);
  assert_null(executable);
  assert_int_equal(file_size(cache->file), -1);
}

static void key_of(const cache_t* cache, const jpp_compile_request_t* request,
                   char key[kJppCacheKeySize]) {
  ASSERT_OK(jpp_client_cache_key(cache->client, request, key));
  assert_int_equal(strlen(key), kJppCacheKeySize - 1);
  assert_int_equal(strspn(key, "0123456789abcdef"), kJppCacheKeySize - 1);
}

// The key changes with everything that changes the code, and with nothing else.
static void test_what_the_key_stands_for(void** state) {
  cache_t* cache = *state;
  enum { kRequests = 8 };
  static const uint32_t kDevices[] = {1, 0, 2};
  jpp_compile_request_t plain = {
      .struct_size = sizeof(plain), .code = "abc", .code_size = 3, .format = "mlir"};
  jpp_compile_request_t requests[kRequests];
  for (int i = 0; i < kRequests; ++i) requests[i] = plain;
  requests[1].code = "abd";
  requests[2].code_size = 2;
  requests[3].format = "fake";
  requests[4].options = "abc";
  requests[4].options_size = 3;
  requests[5].devices = kDevices;
  requests[5].device_count = 1;
  requests[6].devices = kDevices;
  requests[6].device_count = 2;
  requests[7].identity = "x";
  requests[7].identity_size = 1;
  char keys[kRequests][kJppCacheKeySize], again[kJppCacheKeySize];
  for (int i = 0; i < kRequests; ++i) {
    key_of(cache, &requests[i], keys[i]);
    for (int k = 0; k < i; ++k) assert_string_not_equal(keys[i], keys[k]);
  }
  requests[6].devices = kDevices + 1;
  key_of(cache, &requests[6], again);
  assert_string_equal(again, keys[6]);
  jpp_compile_request_t moved = {
      .struct_size = sizeof(moved), .code = "abc at line 7", .code_size = 13};
  moved.format = "mlir";
  moved.identity = "abc";
  moved.identity_size = 3;
  key_of(cache, &moved, again);
  assert_string_equal(again, keys[0]);

  setenv("XLA_FLAGS", " --xla_dump_to=/tmp  --xla_force_host_platform_device_count=8\t",
         1);
  key_of(cache, &plain, again);
  assert_string_equal(again, keys[0]);
  setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true", 1);
  key_of(cache, &plain, again);
  assert_string_not_equal(again, keys[0]);
  unsetenv("XLA_FLAGS");
}

static jpp_compile_request_t request_for(const cache_t* cache, const uint32_t* device) {
  jpp_compile_request_t request = test_request(cache->client, TEST_ADD);
  request.devices = device;
  request.device_count = 1;
  return request;
}

// A copy does not need the code, which shows that nothing is compiled.
static void test_other_devices_get_a_copy(void** state) {
  cache_t* cache = *state;
  static const uint32_t kFirst = 0, kSecond = 2;
  jpp_compile_request_t first = request_for(cache, &kFirst);
  jpp_compile_request_t second = request_for(cache, &kSecond);
  if (cache->can_keep) second.code = "none";
  jpp_executable_t *add = NULL, *copy = NULL;
  ASSERT_OK(jpp_client_compile(cache->client, &first, &add));
  ASSERT_OK(jpp_client_compile_again(cache->client, add, &second, &copy));
  run(cache, add, JPP_DEVICE_COMPILED, kFirst);
  run(cache, copy, JPP_DEVICE_COMPILED, kSecond);
}

// The plugin loses a part of a program that it has loaded when it serializes it.
static void test_a_copy_is_not_copied(void** state) {
  cache_t* cache = *state;
  static const uint32_t kDevices[] = {0, 1, 2};
  jpp_executable_t* made[3] = {NULL};
  for (uint32_t i = 0; i < 3; ++i) {
    jpp_compile_request_t request = request_for(cache, &kDevices[i]);
    ASSERT_OK(i ? jpp_client_compile_again(cache->client, made[i - 1], &request, &made[i])
                : jpp_client_compile(cache->client, &request, &made[i]));
  }
  for (uint32_t i = 0; i < 3; ++i) run(cache, made[i], JPP_DEVICE_COMPILED, kDevices[i]);
}

static void test_a_file_is_for_all_devices(void** state) {
  cache_t* cache = *state;
  if (!cache->can_keep) return;
  char key[kJppCacheKeySize], path[160];
  for (uint32_t device = 0; device < 3; ++device) {
    jpp_compile_request_t request = request_for(cache, &device);
    jpp_executable_t* add = NULL;
    jpp_cache_outcome_t outcome;
    ASSERT_OK(jpp_client_compile_cached(cache->client, &request, cache->folder, NULL,
                                        &add, &outcome));
    assert_int_equal(outcome, device ? JPP_CACHE_LOADED : JPP_CACHE_KEPT);
    run(cache, add, JPP_DEVICE_COMPILED, device);
    key_of(cache, &request, key);
  }
  snprintf(path, sizeof(path), "%s/jaxpp-%s", cache->folder, key);
  assert_int_equal(unlink(path), 0);
}

static void test_a_key_that_the_library_makes(void** state) {
  cache_t* cache = *state;
  jpp_compile_request_t request = test_request(cache->client, TEST_ADD_PORTABLE);
  char key[kJppCacheKeySize], path[sizeof(cache->folder) + sizeof(key) + 8];
  key_of(cache, &request, key);
  snprintf(path, sizeof(path), "%s/jaxpp-%s", cache->folder, key);
  for (int i = 0; i < 2; ++i) {
    jpp_executable_t* add = NULL;
    jpp_cache_outcome_t outcome;
    ASSERT_OK(jpp_client_compile_cached(cache->client, &request, cache->folder, NULL,
                                        &add, &outcome));
    jpp_cache_outcome_t kept = i ? JPP_CACHE_LOADED : JPP_CACHE_KEPT;
    assert_int_equal(outcome, cache->can_keep ? kept : JPP_CACHE_NOT_KEPT);
    jpp_client_executable_destroy(cache->client, add);
  }
  assert_int_equal(unlink(path), cache->can_keep ? 0 : -1);
}

#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_cache, drop_cache)

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: %s fake|pjrt\n", argv[0]);
    return 2;
  }
  g_driver = argv[1];
  if (strcmp(g_driver, "pjrt") == 0 && test_skip_without_plugin()) return 0;
  const struct CMUnitTest tests[] = {
      IN_FOLDER(test_the_second_compilation_loads),
      IN_FOLDER(test_damaged_files_are_replaced),
      IN_FOLDER(test_what_the_key_stands_for),
      IN_FOLDER(test_other_devices_get_a_copy),
      IN_FOLDER(test_a_copy_is_not_copied),
      IN_FOLDER(test_a_file_is_for_all_devices),
      IN_FOLDER(test_a_key_that_the_library_makes),
      IN_FOLDER(test_a_size_that_the_file_does_not_have),
      IN_FOLDER(test_a_file_of_another_key),
      IN_FOLDER(test_a_pipe_is_not_waited_for),
      IN_FOLDER(test_a_folder_that_is_not_there_only_costs_time),
      IN_FOLDER(test_a_program_that_does_not_compile_leaves_nothing),
  };
  return cmocka_run_group_tests_name("device cache", tests, NULL, NULL);
}
