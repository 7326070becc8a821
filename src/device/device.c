// The public device API: it does the checks that all drivers need and then calls the
// driver's function table.
#include "jaxpp/device.h"

#include "base/alloc.h"
#include "base/log.h"
#include "base/null.h"
#include "base/struct_size.h"
#include "device/driver.h"
#include "device/hlo.h"
#include "device/process.h"

void jpp_client_destroy(jpp_client_t* client) {
  if (client && !jpp_process_is_forked) client->vtable->destroy(client);
}

const jpp_client_info_t* jpp_client_info(const jpp_client_t* client) {
  return &client->info;
}

jpp_status_t* jpp__client_check_device(const jpp_client_t* client, uint32_t device) {
  if (device < client->info.device_count) return NULL;
  return jpp_status_make(JPP_DEVICES_ERROR,
                         "expected a device index below %u, the devices of platform %s; "
                         "found %u",
                         client->info.device_count, client->info.platform_name, device);
}

jpp_status_t* jpp_client_check_memory(const jpp_client_t* client, jpp_memory_t memory) {
  JPP_RETURN_IF_NULL(client);
  const char* name = jpp_memory_name(memory);
  if (!name) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "memory %d is not in memory.h",
                           (int)memory);
  }
  if (client->info.memories & 1u << memory) return NULL;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "expected devices of platform %s with the memory %s, found "
                         "devices with %s",
                         client->info.platform_name, name, client->info.memory_kinds);
}

jpp_status_t* jpp_client_executable_result_count(jpp_client_t* client,
                                                 jpp_executable_t* executable,
                                                 uint32_t* out_count) {
  JPP_RETURN_IF_NULL(client, executable, out_count);
  *out_count = 0;
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->executable_result_count(client, executable, out_count);
}

jpp_status_t* jpp_client_executable_collectives(jpp_client_t* client,
                                                jpp_executable_t* executable,
                                                jpp_collectives_t** out_collectives) {
  JPP_RETURN_IF_NULL(client, executable, out_collectives);
  *out_collectives = NULL;
  JPP_RETURN_IF_ERROR(jpp_process_check());
  void* module = NULL;
  size_t size = 0;
  JPP_RETURN_IF_ERROR(client->vtable->executable_hlo(client, executable, &module, &size));
  jpp_status_t* status = jpp__hlo_collectives(module, size, out_collectives);
  jpp_free(module);
  return status;
}

jpp_status_t* jpp_client_executable_memory(jpp_client_t* client,
                                           jpp_executable_t* executable,
                                           jpp_executable_memory_t* out_memory) {
  JPP_RETURN_IF_NULL(client, executable, out_memory);
  *out_memory = (jpp_executable_memory_t){0};
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->executable_memory(client, executable, out_memory);
}

void jpp_client_executable_destroy(jpp_client_t* client, jpp_executable_t* executable) {
  if (executable && !jpp_process_is_forked)
    client->vtable->executable_destroy(client, executable);
}

// Runs only after an error, so that a successful execution does not pay for it.
static void execute_clear_outputs(const jpp_execute_t* execute) {
  for (uint32_t i = 0; i < execute->device_count; ++i) {
    for (uint32_t k = 0; k < execute->result_count; ++k) execute->results[i][k] = NULL;
    if (execute->events) execute->events[i] = NULL;
  }
}

static jpp_status_t* execute_check_device(const jpp_client_t* client,
                                          const jpp_execute_t* execute) {
  if (execute->device == JPP_DEVICE_COMPILED) return NULL;
  if (execute->device_count != 1) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "an execution on device %d expects device_count 1, found %u",
                           execute->device, execute->device_count);
  }
  return jpp__client_check_device(client, (uint32_t)execute->device);
}

jpp_status_t* jpp_client_execute(jpp_client_t* client, const jpp_execute_t* execute) {
  JPP_RETURN_IF_NULL(client, execute);
  jpp_execute_t full;
  if (execute->struct_size != sizeof(full)) {  // the step loop avoids the copy
    JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_execute_t, events, execute, &full));
    execute = &full;
  }
  JPP_RETURN_IF_NULL(execute->executable);
  if (execute->arg_count) JPP_RETURN_IF_NULL(execute->args);
  if (execute->result_count) JPP_RETURN_IF_NULL(execute->results);
  jpp_status_t* status =
      jpp_process_is_forked ? jpp_process_check() : execute_check_device(client, execute);
  if (!status) status = client->vtable->execute(client, execute);
  if (status) execute_clear_outputs(execute);
  return status;
}

static jpp_status_t* shape_check(const jpp_buffer_shape_t* shape) {
  if (shape->rank) JPP_RETURN_IF_NULL(shape->dims);
  if (jpp_dtype_bits(shape->dtype) == 0) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "expected a known dtype, found %d",
                           (int)shape->dtype);
  }
  if (shape->rank > JPP_BUFFER_MAX_RANK) {
    return jpp_status_make(JPP_UNSUPPORTED,
                           "expected an array of rank %d at most, found %u",
                           JPP_BUFFER_MAX_RANK, shape->rank);
  }
  for (uint32_t i = 0; i < shape->rank; ++i) {
    if (shape->dims[i] >= 0) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT, "dimension %u is negative: %lld", i,
                           (long long)shape->dims[i]);
  }
  return NULL;
}

jpp_status_t* jpp_client_buffer_from_host(jpp_client_t* client,
                                          const jpp_host_array_t* array, uint32_t device,
                                          jpp_buffer_t** out_buffer) {
  JPP_RETURN_IF_NULL(client, array, out_buffer);
  *out_buffer = NULL;
  JPP_RETURN_IF_ERROR(jpp_process_check());
  JPP_RETURN_IF_ERROR(jpp__client_check_device(client, device));
  jpp_host_array_t full;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_host_array_t, byte_strides, array, &full));
  jpp_buffer_shape_t shape = {.dtype = full.dtype, .rank = full.rank, .dims = full.dims};
  JPP_RETURN_IF_ERROR(shape_check(&shape));
  JPP_RETURN_IF_ERROR(jpp_client_check_memory(client, full.memory));
  return client->vtable->buffer_from_host(client, &full, device, out_buffer);
}

jpp_status_t* jpp_client_buffer_to_host(jpp_client_t* client, jpp_buffer_t* buffer,
                                        void* data, size_t size,
                                        jpp_event_t** out_event) {
  JPP_RETURN_IF_NULL(client, buffer, out_event);
  if (size) JPP_RETURN_IF_NULL(data);
  *out_event = NULL;
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->buffer_to_host(client, buffer, data, size, out_event);
}

jpp_status_t* jpp_client_buffer_read(jpp_client_t* client, jpp_buffer_t* buffer,
                                     void* data, size_t size) {
  JPP_RETURN_IF_NULL(client, buffer);
  if (size) JPP_RETURN_IF_NULL(data);
  jpp_event_t* event = NULL;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_to_host(client, buffer, data, size, &event));
  jpp_status_t* status = jpp_client_event_await(client, event);
  jpp_client_event_destroy(client, event);
  return status;
}

jpp_status_t* jpp_client_buffer_copy_to_memory(jpp_client_t* client, jpp_buffer_t* buffer,
                                               uint32_t device, jpp_memory_t memory,
                                               jpp_buffer_t** out_buffer) {
  JPP_RETURN_IF_NULL(client, buffer, out_buffer);
  *out_buffer = NULL;
  JPP_RETURN_IF_ERROR(jpp__client_check_device(client, device));
  JPP_RETURN_IF_ERROR(jpp_client_check_memory(client, memory));
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->buffer_copy(client, buffer, device, memory, out_buffer);
}

jpp_status_t* jpp_client_buffer_copy_to_device(jpp_client_t* client, jpp_buffer_t* buffer,
                                               uint32_t device,
                                               jpp_buffer_t** out_buffer) {
  JPP_RETURN_IF_NULL(client, buffer, out_buffer);
  return jpp_client_buffer_copy_to_memory(client, buffer, device, JPP_MEMORY_DEVICE,
                                          out_buffer);
}

void jpp_client_buffer_destroy(jpp_client_t* client, jpp_buffer_t* buffer) {
  if (buffer && !jpp_process_is_forked) client->vtable->buffer_destroy(client, buffer);
}

jpp_status_t* jpp_client_buffer_ready_event(jpp_client_t* client, jpp_buffer_t* buffer,
                                            jpp_event_t** out_event) {
  JPP_RETURN_IF_NULL(client, buffer, out_event);
  *out_event = NULL;
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->buffer_ready_event(client, buffer, out_event);
}

jpp_status_t* jpp_client_buffer_shape(jpp_client_t* client, jpp_buffer_t* buffer,
                                      jpp_buffer_shape_t* out_shape) {
  JPP_RETURN_IF_NULL(client, buffer, out_shape);
  *out_shape = (jpp_buffer_shape_t){0};
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->buffer_shape(client, buffer, out_shape);
}

jpp_status_t* jpp_client_buffer_lend(jpp_client_t* client, jpp_buffer_t* buffer,
                                     void** out_pointer) {
  JPP_RETURN_IF_NULL(client, buffer, out_pointer);
  *out_pointer = NULL;
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->buffer_lend(client, buffer, out_pointer);
}

void jpp_client_buffer_reclaim(jpp_client_t* client, jpp_buffer_t* buffer) {
  if (!jpp_process_is_forked) client->vtable->buffer_reclaim(client, buffer);
}

jpp_status_t* jpp_client_buffer_borrow(jpp_client_t* client,
                                       const jpp_foreign_memory_t* foreign,
                                       jpp_buffer_t** out_buffer) {
  JPP_RETURN_IF_NULL(client, foreign, out_buffer);
  *out_buffer = NULL;
  JPP_RETURN_IF_ERROR(jpp_process_check());
  JPP_RETURN_IF_ERROR(jpp__client_check_device(client, foreign->device));
  JPP_RETURN_IF_ERROR(shape_check(&foreign->shape));
  return client->vtable->buffer_borrow(client, foreign, out_buffer);
}

jpp_status_t* jpp_client_event_await(jpp_client_t* client, jpp_event_t* event) {
  JPP_RETURN_IF_NULL(client, event);
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->event_await(client, event);
}

jpp_status_t* jpp_client_event_is_ready(jpp_client_t* client, jpp_event_t* event,
                                        bool* out_ready) {
  JPP_RETURN_IF_NULL(client, event, out_ready);
  *out_ready = false;
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->event_is_ready(client, event, out_ready);
}

jpp_status_t* jpp_client_event_on_ready(jpp_client_t* client, jpp_event_t* event,
                                        jpp_event_waiter_t* waiter) {
  JPP_RETURN_IF_NULL(client, event, waiter);
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->event_on_ready(client, event, waiter);
}

void jpp_client_event_destroy(jpp_client_t* client, jpp_event_t* event) {
  if (event && !jpp_process_is_forked) client->vtable->event_destroy(client, event);
}

jpp_status_t* jpp_client_register_custom_call(jpp_client_t* client,
                                              const jpp_custom_call_t* custom_call) {
  JPP_RETURN_IF_NULL(client, custom_call);
  JPP_RETURN_IF_NULL(custom_call->name, custom_call->platform);
  JPP_RETURN_IF_ERROR(jpp_process_check());
  return client->vtable->register_custom_call(client, custom_call);
}

jpp_status_t* jpp__client_executable_serialize_unsupported(jpp_client_t* client,
                                                           jpp_executable_t* executable,
                                                           void** out_bytes,
                                                           size_t* out_size) {
  (void)executable, (void)out_bytes, (void)out_size;
  return jpp_status_make(JPP_UNSUPPORTED, "driver %s cannot write compiled programs",
                         client->info.driver);
}

jpp_status_t* jpp__client_executable_load_unsupported(
    jpp_client_t* client, const jpp_compile_request_t* request, const void* bytes,
    size_t size, jpp_executable_t** out_executable) {
  (void)request, (void)bytes, (void)size, (void)out_executable;
  return jpp_status_make(JPP_UNSUPPORTED, "driver %s cannot load compiled programs",
                         client->info.driver);
}

jpp_status_t* jpp__client_executable_hlo_unsupported(jpp_client_t* client,
                                                     jpp_executable_t* executable,
                                                     void** out_bytes, size_t* out_size) {
  (void)executable, (void)out_bytes, (void)out_size;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "driver %s cannot return the text of compiled programs",
                         client->info.driver);
}

jpp_status_t* jpp__client_executable_memory_unsupported(
    jpp_client_t* client, jpp_executable_t* executable,
    jpp_executable_memory_t* out_memory) {
  (void)executable, (void)out_memory;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "driver %s cannot tell how much memory programs need",
                         client->info.driver);
}

jpp_status_t* jpp__client_register_custom_call_unsupported(
    jpp_client_t* client, const jpp_custom_call_t* custom_call) {
  return jpp_status_make(JPP_UNSUPPORTED,
                         "custom call %s: driver %s supports no custom calls",
                         custom_call->name, client->info.driver);
}
