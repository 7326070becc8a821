// Declarations that the files of the PJRT driver share. Handles are the plugin's own: a
// jpp_buffer_t* is a PJRT_Buffer*, a jpp_executable_t* a PJRT_LoadedExecutable*, a
// jpp_event_t* a PJRT_Event*, so nothing is wrapped and no call allocates.
#ifndef JPP_DEVICE_PJRT_PJRT_H_
#define JPP_DEVICE_PJRT_PJRT_H_

#include <pjrt_c_api.h>
#include <pthread.h>

#include "base/arena.h"
#include "base/vec.h"
#include "device/driver.h"
#include "device/process.h"

typedef struct jpp__pjrt_client {
  jpp_client_t base;
  const PJRT_Api* api;  // owned by the plugin; lives as long as the process
  PJRT_Client* client;
  // Addressable; owned by the plugin, valid as long as the client.
  PJRT_Device* const* devices;
  PJRT_Memory** pinned_host;    // [device_count] NULL for a device without it
  jpp_key_value_store_t store;  // its address is given to the plugin
  // For the names in base.info.
  jpp_arena_t arena;
  // Guards the external references of all buffers, which plugins list without a lock.
  pthread_mutex_t loans;
  // Programs that were not compiled here.
  pthread_mutex_t loaded_lock;
  JPP_VEC(PJRT_LoadedExecutable*) loaded;
} jpp_pjrt_client_t;

static inline jpp_pjrt_client_t* jpp__pjrt_client(jpp_client_t* client) {
  return (jpp_pjrt_client_t*)client;
}

// An argument struct, zeroed except for its size.
#define JPP_PJRT_ARGS(call, name) \
  PJRT_##call##_Args name = {.struct_size = PJRT_##call##_Args_STRUCT_SIZE}

// plugin.c: loads and initialises the plugin, or finds it loaded. Any thread.
jpp_status_t* jpp__pjrt_plugin_load(const char* path, const PJRT_Api** out_api);

// error.c: takes `error` (NULL is success). Its codes for exhausted memory, unimplemented
// features and cancellation are kept, all others become `code`; `doing` names the call.
jpp_status_t* jpp__pjrt_status(const PJRT_Api* api, PJRT_Error* error,
                               jpp_status_code_t code, const char* doing);
PJRT_Error_Code jpp__pjrt_error_code(const PJRT_Api* api, const PJRT_Error* error);
// For calls whose failure the caller cannot handle.
void jpp__pjrt_ignore(const PJRT_Api* api, PJRT_Error* error);

// store.c: makes the plugin use the store, whose address must not change.
void jpp__pjrt_store_give(jpp_key_value_store_t* store, PJRT_Client_Create_Args* args);

// nodes.c: reads the devices of all nodes; the client's own devices have been read
// already. JPP_UNSUPPORTED unless there are as many nodes as `options` say.
jpp_status_t* jpp__pjrt_nodes_read(jpp_pjrt_client_t* client,
                                   const jpp_pjrt_options_t* options);
// memory.c: reads the memories of all devices into client->base.info.
jpp_status_t* jpp__pjrt_memories_read(jpp_pjrt_client_t* client);

// client.c
jpp_status_t* jpp__pjrt_device_description(const PJRT_Api* api, PJRT_Device* device,
                                           PJRT_DeviceDescription** out_description);
jpp_status_t* jpp__pjrt_device_read(jpp_pjrt_client_t* client,
                                    PJRT_DeviceDescription* description,
                                    jpp_device_info_t* out_info);

// buffer.c: JPP_DONATED_ERROR for a buffer that was donated or deleted.
jpp_status_t* jpp__pjrt_buffer_check(jpp_client_t* base, jpp_buffer_t* buffer,
                                     const char* doing);

// dtype.c
PJRT_Buffer_Type jpp__pjrt_type_from_dtype(jpp_dtype_t dtype);
jpp_dtype_t jpp__pjrt_type_to_dtype(PJRT_Buffer_Type type);

// The rows of the driver's table: executable.c, buffer.c, loan.c, event.c, custom_call.c.
jpp_status_t* jpp__pjrt_compile(jpp_client_t* base, const jpp_compile_request_t* request,
                                jpp_executable_t** out_executable);
jpp_status_t* jpp__pjrt_executable_serialize(jpp_client_t* base,
                                             jpp_executable_t* executable,
                                             void** out_bytes, size_t* out_size);
jpp_status_t* jpp__pjrt_executable_load(jpp_client_t* base,
                                        const jpp_compile_request_t* request,
                                        const void* bytes, size_t size,
                                        jpp_executable_t** out_executable);
jpp_status_t* jpp__pjrt_executable_result_count(jpp_client_t* base,
                                                jpp_executable_t* executable,
                                                uint32_t* out_count);
jpp_status_t* jpp__pjrt_executable_hlo(jpp_client_t* base, jpp_executable_t* executable,
                                       void** out_bytes, size_t* out_size);
jpp_status_t* jpp__pjrt_executable_memory(jpp_client_t* base,
                                          jpp_executable_t* executable,
                                          jpp_executable_memory_t* out_memory);
void jpp__pjrt_executable_destroy(jpp_client_t* base, jpp_executable_t* executable);
jpp_status_t* jpp__pjrt_execute(jpp_client_t* base, const jpp_execute_t* execute);

jpp_status_t* jpp__pjrt_buffer_from_host(jpp_client_t* base,
                                         const jpp_host_array_t* array, uint32_t device,
                                         jpp_buffer_t** out_buffer);
jpp_status_t* jpp__pjrt_buffer_to_host(jpp_client_t* base, jpp_buffer_t* buffer,
                                       void* data, size_t size, jpp_event_t** out_event);
jpp_status_t* jpp__pjrt_buffer_copy(jpp_client_t* base, jpp_buffer_t* buffer,
                                    uint32_t device, jpp_memory_t memory,
                                    jpp_buffer_t** out_buffer);
void jpp__pjrt_buffer_destroy(jpp_client_t* base, jpp_buffer_t* buffer);
jpp_status_t* jpp__pjrt_buffer_ready_event(jpp_client_t* base, jpp_buffer_t* buffer,
                                           jpp_event_t** out_event);
jpp_status_t* jpp__pjrt_buffer_shape(jpp_client_t* base, jpp_buffer_t* buffer,
                                     jpp_buffer_shape_t* out_shape);
jpp_status_t* jpp__pjrt_buffer_lend(jpp_client_t* base, jpp_buffer_t* buffer,
                                    void** out_pointer);
void jpp__pjrt_buffer_reclaim(jpp_client_t* base, jpp_buffer_t* buffer);
jpp_status_t* jpp__pjrt_buffer_borrow(jpp_client_t* base,
                                      const jpp_foreign_memory_t* foreign,
                                      jpp_buffer_t** out_buffer);

jpp_status_t* jpp__pjrt_event_await(jpp_client_t* base, jpp_event_t* event);
jpp_status_t* jpp__pjrt_event_is_ready(jpp_client_t* base, jpp_event_t* event,
                                       bool* out_ready);
jpp_status_t* jpp__pjrt_event_on_ready(jpp_client_t* base, jpp_event_t* event,
                                       jpp_event_waiter_t* waiter);
void jpp__pjrt_event_destroy(jpp_client_t* base, jpp_event_t* event);

jpp_status_t* jpp__pjrt_register_custom_call(jpp_client_t* base,
                                             const jpp_custom_call_t* custom_call);

#endif  // JPP_DEVICE_PJRT_PJRT_H_
