// Makes a plugin set itself up before the first step.
#include <string.h>

#include "base/null.h"
#include "jaxpp/device.h"

// A product with a transposed operand, as in the gradient of a weight: the plugin for
// CPUs generates its kernels at the first one.
static const char kProgram[] =
    "module { func.func @main(%0: tensor<16x16xf32>) -> tensor<16x16xf32> {\n"
    "  %1 = stablehlo.dot_general %0, %0, contracting_dims = [0] x [0]\n"
    "      : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>\n"
    "  return %1 : tensor<16x16xf32>\n"
    "} }";

static jpp_status_t* multiply_zeros(jpp_client_t* client, jpp_executable_t* executable) {
  static const float kZeros[16 * 16];
  static const int64_t kDims[] = {16, 16};
  jpp_host_array_t zeros = {.struct_size = sizeof(zeros),
                            .data = kZeros,
                            .dtype = JPP_DTYPE_F32,
                            .rank = 2,
                            .dims = kDims};
  jpp_buffer_t *argument = NULL, *result = NULL;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_from_host(client, &zeros, 0, &argument));
  jpp_buffer_t* const* args = &argument;
  jpp_buffer_t** results = &result;
  jpp_execute_t execute = {.struct_size = sizeof(execute),
                           .executable = executable,
                           .device_count = 1,
                           .arg_count = 1,
                           .result_count = 1,
                           .args = &args,
                           .results = &results};
  jpp_status_t* status = jpp_client_execute(client, &execute);
  jpp_client_buffer_destroy(client, result);
  jpp_client_buffer_destroy(client, argument);
  return status;
}

jpp_status_t* jpp_client_warm_up(jpp_client_t* client) {
  JPP_RETURN_IF_NULL(client);
  if (strcmp(jpp_client_info(client)->platform_name, "cpu") != 0) return NULL;
  jpp_compile_request_t request = {.struct_size = sizeof(request),
                                   .code = kProgram,
                                   .code_size = sizeof(kProgram) - 1,
                                   .format = "mlir"};
  jpp_executable_t* executable = NULL;
  JPP_RETURN_IF_ERROR(jpp_client_compile(client, &request, &executable));
  jpp_status_t* status = multiply_zeros(client, executable);
  jpp_client_executable_destroy(client, executable);
  return status;
}
