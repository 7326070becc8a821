// What the device tests share: a driver, the same few programs for each, and handling of
// f32 arrays.
#ifndef TESTS_C_DEVICE_DRIVER_UNDER_TEST_H_
#define TESTS_C_DEVICE_DRIVER_UNDER_TEST_H_

#include "fake/device.h"
#include "jaxpp/device.h"
#include "test_util.h"

// All work on f32[4] unless said otherwise.
typedef enum test_program {
  TEST_ADD,           // (a, b) -> a + b, on device 0
  TEST_ADD_PORTABLE,  // the same, on the device named at the call
  TEST_ADD_DONATE,    // the same on device 0, a is donated
  TEST_TWO_RESULTS,   // (a, b) -> (a + b, a * b), on device 0
  TEST_ADD_PAIR,      // a + b on devices 0 and 1 at once
  TEST_BROKEN,        // no program at all
  TEST_PROGRAM_COUNT
} test_program_t;

// The environment's JPP_TEST_PLUGIN, or NULL.
const char* test_plugin_path(void);
// True, and says so to the harness, when there is none. For main(): cmocka's skip()
// prints a "not ok" that meson takes for a failure.
bool test_skip_without_plugin(void);

// "fake", "fake-threads" or "pjrt".
jpp_client_t* test_client_create(const char* driver);
// The n-th of its devices, from the first again after the last. Four, or what the plugin
// of a real accelerator finds.
uint32_t test_device(jpp_client_t* client, uint32_t n);
// Whether the devices' memory is the host's.
bool test_is_host(jpp_client_t* client);
jpp_compile_request_t test_request(jpp_client_t* client, test_program_t program);
jpp_status_t* test_try_compile(jpp_client_t* client, test_program_t program,
                               jpp_executable_t** out_executable);
jpp_executable_t* test_compile(jpp_client_t* client, test_program_t program);

// f32[4] with elements first, first + 1, ...
jpp_buffer_t* test_upload(jpp_client_t* client, uint32_t device, float first);
// A buffer on device 0 over the memory of another one, which is lent for it.
// `released` counts calls of the release.
jpp_buffer_t* test_borrow(jpp_client_t* client, jpp_buffer_t* owner,
                          _Atomic uint32_t* released);
// The buffer is f32[4] and holds first, first + step, ...
void test_expect(jpp_client_t* client, jpp_buffer_t* buffer, float first, float step);

// One device row. `results` has room for `result_count`.
typedef struct test_call {
  jpp_executable_t* executable;
  int32_t device;
  uint32_t arg_count;
  uint32_t result_count;
  jpp_buffer_t* args[2];
  jpp_buffer_t* results[2];
  jpp_event_t* event;
  bool want_event;
} test_call_t;
jpp_status_t* test_call(jpp_client_t* client, test_call_t* call);

// Calls a two-argument, one-result program on its compiled device.
jpp_status_t* test_execute(jpp_client_t* client, jpp_executable_t* executable,
                           jpp_buffer_t* a, jpp_buffer_t* b, jpp_buffer_t** out_result);

#endif  // TESTS_C_DEVICE_DRIVER_UNDER_TEST_H_
