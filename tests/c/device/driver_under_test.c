// Puts the fake driver and a PJRT plugin behind one interface: each program is written in
// the format of both.
#include "driver_under_test.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct program_text {
  const char* fake;
  const char* mlir;
  const char* options;  // a CompileOptionsProto, for "mlir"; NULL: any one device
  size_t options_size;
} program_text_t;

#define OPTIONS(bytes) .options = bytes, .options_size = sizeof(bytes) - 1

// executable_build_options (3) {num_replicas (4): 1, num_partitions (5): 1}
#define ONE_DEVICE "\x1a\x04\x20\x01\x28\x01"
// num_replicas: 2, device_assignment (9) {replica_count (1): 2, computation_count (2): 1,
// computation_devices (3) {replica_device_ids (1): 0, 1}}
#define TWO_DEVICES \
  "\x1a\x10\x20\x02\x28\x01\x4a\x0a\x08\x02\x10\x01\x1a\x04\x0a\x02\x00\x01"

#define MLIR_ADD(attributes, a_attributes)                                              \
  "module @add" attributes " { func.func public @main(%a: tensor<4xf32>" a_attributes   \
  ", %b: tensor<4xf32>) -> tensor<4xf32> { %0 = stablehlo.add %a, %b : tensor<4xf32>\n" \
  "    return %0 : tensor<4xf32> } }"

#define MLIR_TWO_RESULTS                                    \
  "module @two { func.func public @main(%a: tensor<4xf32>," \
  " %b: tensor<4xf32>) -> (tensor<4xf32>, tensor<4xf32>) {" \
  " %0 = stablehlo.add %a, %b : tensor<4xf32>\n"            \
  "    %1 = stablehlo.multiply %a, %b : tensor<4xf32>\n"    \
  "    return %0, %1 : tensor<4xf32>, tensor<4xf32> } }"

static const program_text_t kPrograms[TEST_PROGRAM_COUNT] = {
    [TEST_ADD] = {"f32[4] = sum 0 1\n", MLIR_ADD("", ""), OPTIONS(ONE_DEVICE)},
    [TEST_ADD_PORTABLE] = {"f32[4] = sum 0 1", MLIR_ADD("", "")},
    [TEST_ADD_DONATE] = {"donate 0\nf32[4] = sum 0 1",
                         MLIR_ADD("", " {tf.aliasing_output = 0 : i32}"),
                         OPTIONS(ONE_DEVICE)},
    [TEST_TWO_RESULTS] = {"f32[4] = sum 0 1\nf32[4] = mul 0 1", MLIR_TWO_RESULTS,
                          OPTIONS(ONE_DEVICE)},
    [TEST_ADD_PAIR] = {"devices 0 1\nf32[4] = sum 0 1",
                       MLIR_ADD(" attributes {mhlo.num_replicas = 2 : i32}", ""),
                       OPTIONS(TWO_DEVICES)},
    [TEST_BROKEN] = {"no program", "no program", OPTIONS(ONE_DEVICE)},
};

const char* test_plugin_path(void) { return test_variable("JPP_TEST_PLUGIN"); }

bool test_skip_without_plugin(void) {
  if (test_plugin_path()) return false;
  printf("1..0 # SKIP JPP_TEST_PLUGIN is not set\n");
  return true;
}

enum { kDevices = 4 };

static jpp_client_t* create_pjrt(bool in_call) {
  static const jpp_client_option_t kOnCpu[] = {
      {.name = "cpu_device_count", .type = JPP_OPTION_INT64, .int64_value = kDevices},
      {.name = "asynchronous", .type = JPP_OPTION_BOOL, .bool_value = false}};
  static const jpp_client_option_t kOnGpu = {
      .name = "preallocate", .type = JPP_OPTION_BOOL, .bool_value = false};
  bool gpu = strstr(test_plugin_path(), "xla_cuda") != NULL;
  jpp_pjrt_options_t options = {.struct_size = sizeof(options),
                                .plugin_path = test_plugin_path(),
                                .options = gpu ? &kOnGpu : kOnCpu,
                                .option_count = !gpu && in_call ? 2 : 1};
  jpp_client_t* client = NULL;
  ASSERT_OK(jpp_client_create_pjrt(&options, &client));
  return client;
}

jpp_client_t* test_client_create(const char* driver) {
  bool in_call = strcmp(driver, "pjrt-in-call") == 0;
  if (in_call || strcmp(driver, "pjrt") == 0) return create_pjrt(in_call);
  jpp_fake_options_t options = {.struct_size = sizeof(options), .device_count = kDevices};
  if (strcmp(driver, "fake-threads") == 0) {
    options.threads = 3;
    options.latency_us = 200;
  }
  jpp_client_t* client = NULL;
  ASSERT_OK(jpp_client_create_fake(&options, &client));
  return client;
}

uint32_t test_device(jpp_client_t* client, uint32_t n) {
  return n % jpp_client_info(client)->device_count;
}

bool test_is_host(jpp_client_t* client) {
  const jpp_client_info_t* info = jpp_client_info(client);
  return strcmp(info->driver, "fake") == 0 || strcmp(info->platform_name, "cpu") == 0;
}

jpp_compile_request_t test_request(jpp_client_t* client, test_program_t program) {
  const program_text_t* text = &kPrograms[program];
  bool fake = strcmp(jpp_client_info(client)->driver, "fake") == 0;
  const char* code = fake ? text->fake : text->mlir;
  return (jpp_compile_request_t){.struct_size = sizeof(jpp_compile_request_t),
                                 .code = code,
                                 .code_size = strlen(code),
                                 .format = fake ? "fake" : "mlir",
                                 .options = text->options,
                                 .options_size = text->options_size};
}

jpp_status_t* test_try_compile(jpp_client_t* client, test_program_t program,
                               jpp_executable_t** out_executable) {
  jpp_compile_request_t request = test_request(client, program);
  return jpp_client_compile(client, &request, out_executable);
}

jpp_executable_t* test_compile(jpp_client_t* client, test_program_t program) {
  jpp_executable_t* executable = NULL;
  ASSERT_OK(test_try_compile(client, program, &executable));
  return executable;
}

jpp_buffer_t* test_upload(jpp_client_t* client, uint32_t device, float first) {
  float data[4] = {first, first + 1, first + 2, first + 3};
  int64_t dims[1] = {4};
  jpp_host_array_t array = {.struct_size = sizeof(array),
                            .data = data,
                            .dtype = JPP_DTYPE_F32,
                            .rank = 1,
                            .dims = dims};
  jpp_buffer_t* buffer = NULL;
  ASSERT_OK(jpp_client_buffer_from_host(client, &array, device, &buffer));
  memset(data, 0xff, sizeof(data));
  return buffer;
}

static void count_release(void* memory, void* user) {
  assert_non_null(memory);
  ++*(_Atomic uint32_t*)user;
}

jpp_buffer_t* test_borrow(jpp_client_t* client, jpp_buffer_t* owner,
                          _Atomic uint32_t* released) {
  jpp_foreign_memory_t foreign = {.release = count_release, .user = (void*)released};
  ASSERT_OK(jpp_client_buffer_lend(client, owner, &foreign.memory));
  ASSERT_OK(jpp_client_buffer_shape(client, owner, &foreign.shape));
  jpp_buffer_t* view = NULL;
  ASSERT_OK(jpp_client_buffer_borrow(client, &foreign, &view));
  return view;
}

void test_expect(jpp_client_t* client, jpp_buffer_t* buffer, float first, float step) {
  float data[4] = {0};
  ASSERT_OK(jpp_client_buffer_read(client, buffer, data, sizeof(data)));
  for (int i = 0; i < 4; ++i) {
    assert_float_equal(data[i], first + step * (float)i, 0);
  }
}

jpp_status_t* test_call(jpp_client_t* client, test_call_t* call) {
  jpp_buffer_t* const* args[1] = {call->args};
  jpp_buffer_t** results[1] = {call->results};
  jpp_execute_t execute = {.struct_size = sizeof(execute),
                           .executable = call->executable,
                           .device_count = 1,
                           .arg_count = call->arg_count,
                           .result_count = call->result_count,
                           .device = call->device,
                           .args = args,
                           .results = results,
                           .events = call->want_event ? &call->event : NULL};
  return jpp_client_execute(client, &execute);
}

jpp_status_t* test_execute(jpp_client_t* client, jpp_executable_t* executable,
                           jpp_buffer_t* a, jpp_buffer_t* b, jpp_buffer_t** out_result) {
  test_call_t call = {.executable = executable,
                      .device = JPP_DEVICE_COMPILED,
                      .arg_count = 2,
                      .result_count = 1,
                      .args = {a, b}};
  jpp_status_t* status = test_call(client, &call);
  *out_result = call.results[0];
  return status;
}
