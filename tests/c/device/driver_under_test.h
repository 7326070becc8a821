// Shared by the device tests: a driver, the same few programs for each driver, and
// helpers for f32 arrays.
#ifndef TESTS_C_DEVICE_DRIVER_UNDER_TEST_H_
#define TESTS_C_DEVICE_DRIVER_UNDER_TEST_H_

#include "fake/device.h"
#include "jaxpp/device.h"
#include "test_util.h"

// All take f32[4] arguments unless the comment says otherwise.
typedef enum test_program {
  TEST_ADD,           // (a, b) -> a + b, on device 0
  TEST_ADD_PORTABLE,  // the same, on the device that the call names
  TEST_ADD_DONATE,    // the same on device 0; a is donated
  TEST_TWO_RESULTS,   // (a, b) -> (a + b, a * b), on device 0
  TEST_ADD_PAIR,      // a + b on devices 0 and 1 at once
  TEST_BROKEN,        // not a valid program
  TEST_PROGRAM_COUNT
} test_program_t;

// JPP_TEST_PLUGIN from the environment, or NULL.
const char* test_plugin_path(void);
// Returns true, and tells the harness, if there is none. For main(): cmocka's skip()
// prints a "not ok" that meson takes for a failure.
bool test_skip_without_plugin(void);

// "fake", "fake-threads", "pjrt", or "pjrt-in-call": a plugin that runs programs in the
// call, if it can.
jpp_client_t* test_client_create(const char* driver);
// The n-th device, counting from the first again after the last. There are four with the
// fake, or as many as a plugin for a real accelerator finds.
uint32_t test_device(jpp_client_t* client, uint32_t n);
// True if the devices use host memory.
bool test_is_host(jpp_client_t* client);
jpp_compile_request_t test_request(jpp_client_t* client, test_program_t program);
jpp_status_t* test_try_compile(jpp_client_t* client, test_program_t program,
                               jpp_executable_t** out_executable);
jpp_executable_t* test_compile(jpp_client_t* client, test_program_t program);

// f32[4] with elements first, first + 1, ...
jpp_buffer_t* test_upload(jpp_client_t* client, uint32_t device, float first);
// A buffer on device 0 that borrows the memory of another one, which is lent for it.
// `released` counts calls of the release function.
jpp_buffer_t* test_borrow(jpp_client_t* client, jpp_buffer_t* owner,
                          _Atomic uint32_t* released);
// Checks that the buffer is f32[4] and holds first, first + step, ...
void test_expect(jpp_client_t* client, jpp_buffer_t* buffer, float first, float step);

// Executes on one device. `results` has room for `result_count`.
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

// Calls a program with two arguments and one result on the device that it was compiled
// for.
jpp_status_t* test_execute(jpp_client_t* client, jpp_executable_t* executable,
                           jpp_buffer_t* a, jpp_buffer_t* b, jpp_buffer_t** out_result);

#endif  // TESTS_C_DEVICE_DRIVER_UNDER_TEST_H_
