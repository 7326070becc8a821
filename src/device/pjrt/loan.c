// Memory that two clients share without a copy. An external reference keeps lent memory
// in place and prevents the plugin from donating it to a program that would write there;
// borrowed memory is a view.
#include "device/pjrt/pjrt.h"

// Whether the last dimension varies fastest, which a reader without layout information
// assumes.
static bool is_dense(const PJRT_Buffer_MemoryLayout* layout) {
  if (layout->type != PJRT_Buffer_MemoryLayout_Type_Tiled) return false;
  const PJRT_Buffer_MemoryLayout_Tiled* tiled = &layout->tiled;
  for (size_t i = 0; i < tiled->minor_to_major_size; ++i) {
    if (tiled->minor_to_major[i] != (int64_t)(tiled->minor_to_major_size - 1 - i)) {
      return false;
    }
  }
  return tiled->num_tiles == 0;
}

static jpp_status_t* check_layout(const PJRT_Api* api, PJRT_Buffer* buffer) {
  JPP_PJRT_ARGS(Buffer_GetMemoryLayout, args);
  args.buffer = buffer;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Buffer_GetMemoryLayout(&args),
                                       JPP_UNSUPPORTED, "memory layout"));
  if (is_dense(&args.layout)) return NULL;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "lend: expected a buffer whose last dimension varies fastest");
}

static jpp_status_t* hold(jpp_pjrt_client_t* client, PJRT_Buffer* buffer) {
  JPP_PJRT_ARGS(Buffer_IncreaseExternalReferenceCount, args);
  args.buffer = buffer;
  pthread_mutex_lock(&client->loans);
  PJRT_Error* error = client->api->PJRT_Buffer_IncreaseExternalReferenceCount(&args);
  pthread_mutex_unlock(&client->loans);
  return jpp__pjrt_status(client->api, error, JPP_UNSUPPORTED, "lend");
}

jpp_status_t* jpp__pjrt_buffer_lend(jpp_client_t* base, jpp_buffer_t* buffer,
                                    void** out_pointer) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_RETURN_IF_ERROR(jpp__pjrt_buffer_check(base, buffer, "lend"));
  JPP_RETURN_IF_ERROR(check_layout(api, (PJRT_Buffer*)buffer));
  JPP_RETURN_IF_ERROR(hold(jpp__pjrt_client(base), (PJRT_Buffer*)buffer));
  JPP_PJRT_ARGS(Buffer_OpaqueDeviceMemoryDataPointer, pointer);
  pointer.buffer = (PJRT_Buffer*)buffer;
  jpp_status_t* status =
      jpp__pjrt_status(api, api->PJRT_Buffer_OpaqueDeviceMemoryDataPointer(&pointer),
                       JPP_UNSUPPORTED, "lend");
  if (status) {
    jpp__pjrt_buffer_reclaim(base, buffer);
    return status;
  }
  *out_pointer = pointer.device_memory_ptr;
  return NULL;
}

void jpp__pjrt_buffer_reclaim(jpp_client_t* base, jpp_buffer_t* buffer) {
  jpp_pjrt_client_t* client = jpp__pjrt_client(base);
  JPP_PJRT_ARGS(Buffer_DecreaseExternalReferenceCount, args);
  args.buffer = (PJRT_Buffer*)buffer;
  pthread_mutex_lock(&client->loans);
  PJRT_Error* error = client->api->PJRT_Buffer_DecreaseExternalReferenceCount(&args);
  pthread_mutex_unlock(&client->loans);
  jpp__pjrt_ignore(client->api, error);
}

jpp_status_t* jpp__pjrt_buffer_borrow(jpp_client_t* base,
                                      const jpp_foreign_memory_t* foreign,
                                      jpp_buffer_t** out_buffer) {
  jpp_pjrt_client_t* client = jpp__pjrt_client(base);
  // These functions follow those that every plugin must have.
  if (client->api->struct_size <
          PJRT_STRUCT_SIZE(PJRT_Api, PJRT_Client_CreateViewOfDeviceBuffer) ||
      !client->api->PJRT_Client_CreateViewOfDeviceBuffer) {
    return jpp_status_make(JPP_UNSUPPORTED,
                           "borrow: the plugin does not support views of foreign memory");
  }
  JPP_PJRT_ARGS(Client_CreateViewOfDeviceBuffer, args);
  args.client = client->client;
  args.device_buffer_ptr = foreign->memory;
  args.dims = foreign->shape.dims;
  args.num_dims = foreign->shape.rank;
  args.element_type = jpp__pjrt_type_from_dtype(foreign->shape.dtype);
  args.device = client->devices[foreign->device];
  args.on_delete_callback = foreign->release;
  args.on_delete_callback_arg = foreign->user;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(
      client->api, client->api->PJRT_Client_CreateViewOfDeviceBuffer(&args),
      JPP_INVALID_ARGUMENT, "borrow"));
  *out_buffer = (jpp_buffer_t*)args.buffer;
  return NULL;
}
