// Tests only real plugins: clients share them, they refuse options, run FFI handlers, and
// report failures of running programs.
#include "driver_under_test.h"
#include "ffi_handler.h"

static int create_client(void** state) {
  *state = test_client_create("pjrt");
  return 0;
}

static int destroy_client(void** state) {
  jpp_client_destroy(*state);
  return 0;
}

static void test_second_client_shares_the_plugin(void** state) {
  jpp_client_t* first = *state;
  jpp_client_t* second = test_client_create("pjrt");
  jpp_buffer_t* a = test_upload(first, 3, 1);
  jpp_buffer_t* b = test_upload(second, 3, 2);
  test_expect(first, a, 1, 1);
  test_expect(second, b, 2, 1);
  jpp_client_buffer_destroy(first, a);
  jpp_client_buffer_destroy(second, b);
  jpp_client_destroy(second);
}

static void test_option_of_a_wrong_type_is_refused(void** state) {
  (void)state;
  jpp_client_option_t option = {
      .name = "cpu_device_count", .type = JPP_OPTION_STRING, .string_value = "many"};
  jpp_pjrt_options_t options = {.struct_size = sizeof(options),
                                .plugin_path = test_plugin_path(),
                                .options = &option,
                                .option_count = 1};
  jpp_client_t* client = NULL;
  ASSERT_FAILS(jpp_client_create_pjrt(&options, &client), JPP_PLUGIN_ERROR,
               "cannot make a client");
  assert_null(client);
}

static void test_fake_calls_refuse_other_clients(void** state) {
  jpp_fake_stats_t stats;
  ASSERT_FAILS(jpp_fake_stats(*state, &stats), JPP_INVALID_ARGUMENT,
               "expected a client of driver fake, found pjrt");
}

// Adds one to its only argument.
static XLA_FFI_Error* ffi_increment(XLA_FFI_CallFrame* frame) {
  if (ffi_answer_metadata(frame)) return NULL;
  const XLA_FFI_Buffer* source = frame->args.args[0];
  const XLA_FFI_Buffer* result = frame->rets.rets[0];
  for (int i = 0; i < 4; ++i) {
    ((float*)result->data)[i] = ((const float*)source->data)[i] + 1;
  }
  return NULL;
}

static XLA_FFI_Error* ffi_broken(XLA_FFI_CallFrame* frame) {
  if (ffi_answer_metadata(frame)) return NULL;
  return ffi_fail(frame, "the handler is broken", XLA_FFI_Error_Code_INTERNAL);
}

static XLA_FFI_Error* ffi_greedy(XLA_FFI_CallFrame* frame) {
  if (ffi_answer_metadata(frame)) return NULL;
  return ffi_fail(frame, "the handler wants more", XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
}

// The second result makes the program too big to run inside the call.
#define MLIR_CALL(target)                                             \
  "module @call { func.func public @main(%a: tensor<4xf32>,"          \
  " %b: tensor<4xf32>) -> (tensor<4xf32>, tensor<4x4096xf32>) {"      \
  " %0 = stablehlo.custom_call @" target                              \
  "(%a) {api_version = 4 : i32, backend_config = {}}"                 \
  " : (tensor<4xf32>) -> tensor<4xf32>\n"                             \
  " %1 = stablehlo.iota dim = 1 : tensor<4x4096xf32>\n"               \
  " %2 = stablehlo.broadcast_in_dim %b, dims = [0] : (tensor<4xf32>)" \
  " -> tensor<4x4096xf32>\n"                                          \
  " %3 = stablehlo.multiply %1, %2 : tensor<4x4096xf32>\n"            \
  " return %0, %3 : tensor<4xf32>, tensor<4x4096xf32> } }"

// Compiles the program and issues it; the result may fail later.
static jpp_buffer_t* call_handler(jpp_client_t* client, const char* mlir,
                                  const jpp_custom_call_t* custom_call) {
  ASSERT_OK(jpp_client_register_custom_call(client, custom_call));
  jpp_compile_request_t request = {.struct_size = sizeof(request),
                                   .code = mlir,
                                   .code_size = strlen(mlir),
                                   .format = "mlir",
                                   .options = "\x1a\x04\x20\x01\x28\x01",
                                   .options_size = 6};
  jpp_executable_t* executable = NULL;
  ASSERT_OK(jpp_client_compile(client, &request, &executable));
  jpp_buffer_t* a = test_upload(client, 0, 1);
  test_call_t call = {.executable = executable,
                      .device = JPP_DEVICE_COMPILED,
                      .arg_count = 2,
                      .result_count = 2,
                      .args = {a, a}};
  ASSERT_OK(test_call(client, &call));
  jpp_client_buffer_destroy(client, a);
  jpp_client_buffer_destroy(client, call.results[1]);
  jpp_client_executable_destroy(client, executable);
  return call.results[0];
}

static void test_custom_call_runs(void** state) {
  jpp_custom_call_t call = {
      .name = "jpp_increment", .platform = "Host", .handler = (void*)ffi_increment};
  jpp_buffer_t* result = call_handler(*state, MLIR_CALL("jpp_increment"), &call);
  test_expect(*state, result, 2, 1);
  jpp_client_buffer_destroy(*state, result);
}

static void keep_status(void* user, jpp_status_t* status) {
  *(jpp_status_t**)user = status;
}

// The failure reaches the result's event, a waiter, a copy of the result, and a program
// that reads it.
static void test_failure_travels_with_buffers_and_events(void** state) {
  jpp_client_t* client = *state;
  jpp_custom_call_t call = {
      .name = "jpp_broken", .platform = "Host", .handler = (void*)ffi_broken};
  jpp_buffer_t* failed = call_handler(client, MLIR_CALL("jpp_broken"), &call);
  jpp_event_t* event = NULL;
  ASSERT_OK(jpp_client_buffer_ready_event(client, failed, &event));
  ASSERT_FAILS(jpp_client_event_await(client, event), JPP_EXECUTION_ERROR,
               "the handler is broken");
  jpp_status_t* kept = NULL;
  jpp_event_waiter_t waiter = {.callback = keep_status, .user = &kept};
  ASSERT_OK(jpp_client_event_on_ready(client, event, &waiter));
  ASSERT_FAILS(kept, JPP_EXECUTION_ERROR, "the handler is broken");
  jpp_client_event_destroy(client, event);
  jpp_executable_t* add = test_compile(client, TEST_ADD);
  jpp_buffer_t* sum = NULL;
  float data[4];
  ASSERT_OK(test_execute(client, add, failed, failed, &sum));
  ASSERT_FAILS(jpp_client_buffer_read(client, sum, data, sizeof(data)),
               JPP_EXECUTION_ERROR, "the handler is broken");
  jpp_client_buffer_destroy(client, sum);
  jpp_buffer_t* copy = NULL;
  ASSERT_OK(jpp_client_buffer_copy_to_device(client, failed, 1, &copy));
  ASSERT_FAILS(jpp_client_buffer_read(client, copy, data, sizeof(data)),
               JPP_EXECUTION_ERROR, "the handler is broken");
  jpp_client_buffer_destroy(client, copy);
  jpp_client_buffer_destroy(client, failed);
  jpp_client_executable_destroy(client, add);
}

static void test_exhausted_resources_are_out_of_memory(void** state) {
  jpp_custom_call_t call = {
      .name = "jpp_greedy", .platform = "Host", .handler = (void*)ffi_greedy};
  jpp_buffer_t* failed = call_handler(*state, MLIR_CALL("jpp_greedy"), &call);
  float data[4];
  ASSERT_FAILS(jpp_client_buffer_read(*state, failed, data, sizeof(data)),
               JPP_OUT_OF_MEMORY, "the handler wants more");
  jpp_client_buffer_destroy(*state, failed);
}

static void test_programs_run_after_the_warm_up(void** state) {
  ASSERT_OK(jpp_client_warm_up(*state));
  ASSERT_OK(jpp_client_warm_up(*state));
  test_custom_call_runs(state);
}

#define ON_CLIENT(test) \
  cmocka_unit_test_setup_teardown(test, create_client, destroy_client)

int main(void) {
  if (test_skip_without_plugin()) return 0;
  const struct CMUnitTest tests[] = {
      ON_CLIENT(test_second_client_shares_the_plugin),
      cmocka_unit_test(test_option_of_a_wrong_type_is_refused),
      ON_CLIENT(test_fake_calls_refuse_other_clients),
      ON_CLIENT(test_custom_call_runs),
      ON_CLIENT(test_failure_travels_with_buffers_and_events),
      ON_CLIENT(test_exhausted_resources_are_out_of_memory),
      ON_CLIENT(test_programs_run_after_the_warm_up),
  };
  return cmocka_run_group_tests_name("pjrt device", tests, NULL, NULL);
}
