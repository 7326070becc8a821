// What a device driver implements: pjrt/, and the fake device in tests.
#ifndef JPP_DEVICE_DRIVER_H_
#define JPP_DEVICE_DRIVER_H_

#include "jaxpp/device.h"

// Every row is filled. device.c has checked device indices, and has set what `out_`
// points to to NULL or 0; the comments in jaxpp/device.h are the contract.
typedef struct jpp_client_vtable {
  void (*destroy)(jpp_client_t* client);
  jpp_status_t* (*compile)(jpp_client_t* client, const jpp_compile_request_t* request,
                           jpp_executable_t** out_executable);
  // Serializes compiled code for executable_load() of the same platform and version; the
  // caller frees the bytes with jpp_free().
  jpp_status_t* (*executable_serialize)(jpp_client_t* client,
                                        jpp_executable_t* executable, void** out_bytes,
                                        size_t* out_size);
  // Loads what executable_serialize() wrote. `request` has the options, which include the
  // assignment of `devices`; the program may have been compiled for others.
  jpp_status_t* (*executable_load)(jpp_client_t* client,
                                   const jpp_compile_request_t* request,
                                   const void* bytes, size_t size,
                                   jpp_executable_t** out_executable);
  jpp_status_t* (*executable_result_count)(jpp_client_t* client,
                                           jpp_executable_t* executable,
                                           uint32_t* out_count);
  // Returns the compiled program, a serialized HloModuleProto; free it with jpp_free().
  jpp_status_t* (*executable_hlo)(jpp_client_t* client, jpp_executable_t* executable,
                                  void** out_bytes, size_t* out_size);
  jpp_status_t* (*executable_memory)(jpp_client_t* client, jpp_executable_t* executable,
                                     jpp_executable_memory_t* out_memory);
  void (*executable_destroy)(jpp_client_t* client, jpp_executable_t* executable);
  jpp_status_t* (*execute)(jpp_client_t* client, const jpp_execute_t* execute);
  jpp_status_t* (*buffer_from_host)(jpp_client_t* client, const jpp_host_array_t* array,
                                    uint32_t device, jpp_buffer_t** out_buffer);
  jpp_status_t* (*buffer_to_host)(jpp_client_t* client, jpp_buffer_t* buffer, void* data,
                                  size_t size, jpp_event_t** out_event);
  // Copies to a memory in info.memories.
  jpp_status_t* (*buffer_copy)(jpp_client_t* client, jpp_buffer_t* buffer,
                               uint32_t device, jpp_memory_t memory,
                               jpp_buffer_t** out_buffer);
  void (*buffer_destroy)(jpp_client_t* client, jpp_buffer_t* buffer);
  jpp_status_t* (*buffer_ready_event)(jpp_client_t* client, jpp_buffer_t* buffer,
                                      jpp_event_t** out_event);
  jpp_status_t* (*buffer_shape)(jpp_client_t* client, jpp_buffer_t* buffer,
                                jpp_buffer_shape_t* out_shape);
  jpp_status_t* (*buffer_lend)(jpp_client_t* client, jpp_buffer_t* buffer,
                               void** out_pointer);
  void (*buffer_reclaim)(jpp_client_t* client, jpp_buffer_t* buffer);
  jpp_status_t* (*buffer_borrow)(jpp_client_t* client,
                                 const jpp_foreign_memory_t* foreign,
                                 jpp_buffer_t** out_buffer);
  jpp_status_t* (*event_await)(jpp_client_t* client, jpp_event_t* event);
  jpp_status_t* (*event_is_ready)(jpp_client_t* client, jpp_event_t* event,
                                  bool* out_ready);
  jpp_status_t* (*event_on_ready)(jpp_client_t* client, jpp_event_t* event,
                                  jpp_event_waiter_t* waiter);
  void (*event_destroy)(jpp_client_t* client, jpp_event_t* event);
  jpp_status_t* (*register_custom_call)(jpp_client_t* client,
                                        const jpp_custom_call_t* custom_call);
} jpp_client_vtable_t;

// The first member of every driver's client.
struct jpp_client {
  const jpp_client_vtable_t* vtable;
  // Filled in before create returns, then constant.
  jpp_client_info_t info;
  uint64_t build;  // distinguishes builds of the same version; 0: unknown
};

// device.c: JPP_DEVICES_ERROR unless the client has the device.
jpp_status_t* jpp__client_check_device(const jpp_client_t* client,
                                       uint32_t device) JPP_MUST_USE;

// compile.c: converts a caller's request of any version to this version.
jpp_status_t* jpp__compile_request_read(const jpp_compile_request_t* given,
                                        jpp_compile_request_t* out_request) JPP_MUST_USE;
// Whether the program runs on devices of several nodes, which compile it together.
bool jpp__compile_spans_nodes(const jpp_client_t* client,
                              const jpp_compile_request_t* request);
// Whether a program's code is the same for all devices of its platform. On TPUs, it may
// depend on the links between them.
bool jpp__compile_fits_all_devices(const jpp_client_t* client);
// Loads a serialized program for the devices of a request that
// jpp__compile_request_read() has returned.
jpp_status_t* jpp__compile_load(jpp_client_t* client, jpp_compile_request_t request,
                                const void* bytes, size_t size,
                                jpp_executable_t** out_executable) JPP_MUST_USE;

// Rows for drivers without these operations.
jpp_status_t* jpp__client_executable_serialize_unsupported(jpp_client_t* client,
                                                           jpp_executable_t* executable,
                                                           void** out_bytes,
                                                           size_t* out_size);
jpp_status_t* jpp__client_executable_load_unsupported(
    jpp_client_t* client, const jpp_compile_request_t* request, const void* bytes,
    size_t size, jpp_executable_t** out_executable);
jpp_status_t* jpp__client_executable_hlo_unsupported(jpp_client_t* client,
                                                     jpp_executable_t* executable,
                                                     void** out_bytes, size_t* out_size);
jpp_status_t* jpp__client_executable_memory_unsupported(
    jpp_client_t* client, jpp_executable_t* executable,
    jpp_executable_memory_t* out_memory);
jpp_status_t* jpp__client_register_custom_call_unsupported(
    jpp_client_t* client, const jpp_custom_call_t* custom_call);

#endif  // JPP_DEVICE_DRIVER_H_
