// Compiles programs, and copies compiled ones to other devices.
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/null.h"
#include "base/struct_size.h"
#include "device/assignment.h"
#include "device/driver.h"
#include "device/process.h"

jpp_status_t* jpp__compile_request_read(const jpp_compile_request_t* given,
                                        jpp_compile_request_t* out_request) {
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_compile_request_t, identity_size, given, out_request));
  const jpp_compile_request_t* request = out_request;
  JPP_RETURN_IF_NULL(request->code, request->format);
  if (request->device_count) JPP_RETURN_IF_NULL(request->devices);
  return NULL;
}

static jpp_status_t* check_assignment(const jpp_client_t* client,
                                      const jpp_compile_request_t* request) {
  const jpp_client_info_t* info = &client->info;
  bool has_own = false;
  for (uint32_t i = 0; i < request->device_count; ++i) {
    uint32_t device = request->devices[i];
    has_own |= device < info->device_count;
    // A client without other nodes reports a wrong device as in every other call.
    if (info->global_device_count == info->device_count) {
      JPP_RETURN_IF_ERROR(jpp__client_check_device(client, device));
    } else if (device >= info->global_device_count) {
      return jpp_status_make(JPP_DEVICES_ERROR,
                             "expected a device index below %u, the devices of all nodes "
                             "of platform %s; found %u",
                             info->global_device_count, info->platform_name, device);
    }
  }
  if (has_own) return NULL;
  return jpp_status_make(JPP_DEVICES_ERROR,
                         "compile: expected a program with a partition on one of the %u "
                         "devices of node %u, found none",
                         info->device_count, info->node_id);
}

// Adds the assignment of devices, if there is one, to the options. They are valid until
// jpp_str_deinit(storage).
static jpp_status_t* add_assignment(const jpp_client_t* client,
                                    jpp_compile_request_t* request, jpp_str_t* storage) {
  if (!request->device_count) return NULL;
  JPP_RETURN_IF_ERROR(check_assignment(client, request));
  jpp__assignment_append(client, request, storage);
  jpp_status_t* status = storage->error;
  storage->error = NULL;
  request->options = storage->data;
  request->options_size = storage->length;
  return status;
}

static jpp_status_t* compile(jpp_client_t* client, jpp_compile_request_t request,
                             jpp_executable_t** out_executable) {
  JPP_LOG(JPP_LOG_DEBUG, "compiling %zu bytes of code", request.code_size);
  jpp_str_t options = {0};
  jpp_status_t* status = add_assignment(client, &request, &options);
  if (!status) status = client->vtable->compile(client, &request, out_executable);
  jpp_str_deinit(&options);
  return status;
}

jpp_status_t* jpp_client_compile(jpp_client_t* client,
                                 const jpp_compile_request_t* request,
                                 jpp_executable_t** out_executable) {
  JPP_RETURN_IF_NULL(client, request, out_executable);
  *out_executable = NULL;
  jpp_compile_request_t full;
  JPP_RETURN_IF_ERROR(jpp__compile_request_read(request, &full));
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return compile(client, full, out_executable);
}

// --- Compiled programs ----------------------------------------------------------------

bool jpp__compile_spans_nodes(const jpp_client_t* client,
                              const jpp_compile_request_t* request) {
  for (uint32_t i = 0; i < request->device_count; ++i) {
    if (request->devices[i] >= client->info.device_count) return true;
  }
  return false;
}

bool jpp__compile_fits_all_devices(const jpp_client_t* client) {
  static const char* const kPlatforms[] = {"cpu", "cuda", "rocm"};
  for (size_t i = 0; i < sizeof(kPlatforms) / sizeof(*kPlatforms); ++i) {
    if (strcmp(client->info.platform_name, kPlatforms[i]) == 0) return true;
  }
  return false;
}

jpp_status_t* jpp__compile_load(jpp_client_t* client, jpp_compile_request_t request,
                                const void* bytes, size_t size,
                                jpp_executable_t** out_executable) {
  jpp_str_t options = {0};
  jpp_status_t* status = add_assignment(client, &request, &options);
  if (!status) {
    status =
        client->vtable->executable_load(client, &request, bytes, size, out_executable);
  }
  jpp_str_deinit(&options);
  return status;
}

static jpp_status_t* copy(jpp_client_t* client, jpp_executable_t* compiled,
                          const jpp_compile_request_t* request,
                          jpp_executable_t** out_executable) {
  void* bytes = NULL;
  size_t size = 0;
  JPP_RETURN_IF_ERROR(
      client->vtable->executable_serialize(client, compiled, &bytes, &size));
  jpp_status_t* status = jpp__compile_load(client, *request, bytes, size, out_executable);
  jpp_free(bytes);
  return status;
}

jpp_status_t* jpp_client_compile_again(jpp_client_t* client, jpp_executable_t* compiled,
                                       const jpp_compile_request_t* request,
                                       jpp_executable_t** out_executable) {
  JPP_RETURN_IF_NULL(client, compiled, request, out_executable);
  *out_executable = NULL;
  jpp_compile_request_t full;
  JPP_RETURN_IF_ERROR(jpp__compile_request_read(request, &full));
  JPP_RETURN_IF_ERROR(jpp_process_check());
  if (jpp__compile_fits_all_devices(client) && !jpp__compile_spans_nodes(client, &full)) {
    jpp_status_t* status = copy(client, compiled, &full, out_executable);
    if (!status) return NULL;
    JPP_LOG(JPP_LOG_INFO, "a program is compiled again, for other devices: %s",
            jpp_status_message(status));
    jpp_status_free(status);
  }
  return compile(client, full, out_executable);
}
