// Buffers through PJRT: copies from and to the host and between devices, and the shape of
// a buffer.
#include "base/bytes.h"
#include "device/pjrt/pjrt.h"
#include "device/wait.h"

// A plugin whose client runs programs in the call hands copies to another thread
// nevertheless. To wake it takes longer than to copy this much.
enum { kFewBytes = 1 << 16 };

jpp_status_t* jpp__pjrt_buffer_from_host(jpp_client_t* base,
                                         const jpp_host_array_t* array, uint32_t device,
                                         jpp_buffer_t** out_buffer) {
  jpp_pjrt_client_t* client = jpp__pjrt_client(base);
  JPP_PJRT_ARGS(Client_BufferFromHostBuffer, args);
  args.client = client->client;
  args.data = array->data;
  args.type = jpp__pjrt_type_from_dtype(array->dtype);
  args.dims = array->dims;
  args.num_dims = array->rank;
  args.byte_strides = array->byte_strides;
  args.num_byte_strides = array->byte_strides ? array->rank : 0;
  args.host_buffer_semantics = PJRT_HostBufferSemantics_kImmutableOnlyDuringCall;
  args.device = client->devices[device];
  if (array->memory == JPP_MEMORY_PINNED_HOST) args.memory = client->pinned_host[device];
  JPP_RETURN_IF_ERROR(
      jpp__pjrt_status(client->api, client->api->PJRT_Client_BufferFromHostBuffer(&args),
                       JPP_INVALID_ARGUMENT, "copy from host"));
  // With these semantics the plugin no longer needs the data when the call returns, so
  // the event is not needed.
  jpp__pjrt_event_destroy(base, (jpp_event_t*)args.done_with_host_buffer);
  *out_buffer = (jpp_buffer_t*)args.buffer;
  return NULL;
}

static jpp_status_t* buffer_dims(const PJRT_Api* api, PJRT_Buffer* buffer,
                                 PJRT_Buffer_Dimensions_Args* out_args) {
  *out_args = (PJRT_Buffer_Dimensions_Args){
      .struct_size = PJRT_Buffer_Dimensions_Args_STRUCT_SIZE, .buffer = buffer};
  return jpp__pjrt_status(api, api->PJRT_Buffer_Dimensions(out_args),
                          JPP_INVALID_ARGUMENT, "dimensions");
}

jpp_status_t* jpp__pjrt_buffer_check(jpp_client_t* base, jpp_buffer_t* buffer,
                                     const char* doing) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_PJRT_ARGS(Buffer_IsDeleted, args);
  args.buffer = (PJRT_Buffer*)buffer;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Buffer_IsDeleted(&args),
                                       JPP_INVALID_ARGUMENT, "deletion state"));
  if (!args.is_deleted) return NULL;
  return jpp_status_make(JPP_DONATED_ERROR,
                         "%s: the buffer was donated or deleted before", doing);
}

// A program may have been compiled to return its results with another order of
// dimensions; in host memory, the last dimension varies fastest.
static jpp_status_t* buffer_host_layout(const PJRT_Api* api, PJRT_Buffer* buffer,
                                        int64_t minor_to_major[JPP_BUFFER_MAX_RANK],
                                        PJRT_Buffer_MemoryLayout* out_layout) {
  PJRT_Buffer_Dimensions_Args dims;
  JPP_RETURN_IF_ERROR(buffer_dims(api, buffer, &dims));
  if (dims.num_dims > JPP_BUFFER_MAX_RANK) {
    return jpp_status_make(JPP_UNSUPPORTED,
                           "copy to host: expected rank %d at most, found %zu",
                           JPP_BUFFER_MAX_RANK, dims.num_dims);
  }
  for (size_t i = 0; i < dims.num_dims; ++i) {
    minor_to_major[i] = (int64_t)(dims.num_dims - 1 - i);
  }
  *out_layout = (PJRT_Buffer_MemoryLayout){
      .struct_size = PJRT_Buffer_MemoryLayout_STRUCT_SIZE,
      .type = PJRT_Buffer_MemoryLayout_Type_Tiled,
      .tiled = {.struct_size = PJRT_Buffer_MemoryLayout_Tiled_STRUCT_SIZE,
                .minor_to_major = minor_to_major,
                .minor_to_major_size = dims.num_dims}};
  return NULL;
}

jpp_status_t* jpp__pjrt_buffer_to_host(jpp_client_t* base, jpp_buffer_t* buffer,
                                       void* data, size_t size, jpp_event_t** out_event) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_RETURN_IF_ERROR(jpp__pjrt_buffer_check(base, buffer, "copy to host"));
  int64_t minor_to_major[JPP_BUFFER_MAX_RANK];
  PJRT_Buffer_MemoryLayout layout;
  JPP_RETURN_IF_ERROR(
      buffer_host_layout(api, (PJRT_Buffer*)buffer, minor_to_major, &layout));
  JPP_PJRT_ARGS(Buffer_ToHostBuffer, args);
  args.src = (PJRT_Buffer*)buffer;
  args.host_layout = &layout;
  char nothing;  // PJRT takes NULL for a question about the size
  args.dst = data || size ? data : &nothing;
  args.dst_size = size;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Buffer_ToHostBuffer(&args),
                                       JPP_INVALID_ARGUMENT, "copy to host"));
  *out_event = (jpp_event_t*)args.event;
  return NULL;
}

// --- Copies between devices ------------------------------------------------------------

// Whether an array is there, and small enough for the calling thread to copy it.
static jpp_status_t* is_small(jpp_client_t* client, jpp_buffer_t* buffer,
                              jpp_buffer_shape_t* out_shape, bool* out_small) {
  JPP_RETURN_IF_ERROR(jpp__pjrt_buffer_shape(client, buffer, out_shape));
  uint64_t elements = 1;
  for (uint32_t i = 0; i < out_shape->rank; ++i) {
    elements = jpp__bytes_multiply(elements, (uint64_t)out_shape->dims[i]);
  }
  uint64_t bytes = jpp_dtype_device_bytes(out_shape->dtype, elements);
  // Elements of less than a byte are packed on devices, but not in host arrays.
  if (bytes < elements || !bytes || bytes > kFewBytes) return NULL;
  return jpp__wait_is_buffer_ready(client, buffer, out_small);
}

// Leaves *out_buffer NULL if the plugin has to copy.
static jpp_status_t* copy_small(jpp_client_t* client, jpp_buffer_t* buffer,
                                uint32_t device, jpp_buffer_t** out_buffer) {
  jpp_buffer_shape_t shape;
  bool small = false;
  void* data = NULL;
  JPP_RETURN_IF_ERROR(is_small(client, buffer, &shape, &small));
  if (!small) return NULL;
  JPP_RETURN_IF_ERROR(jpp__pjrt_buffer_lend(client, buffer, &data));
  jpp_host_array_t array = {.struct_size = sizeof(array),
                            .data = data,
                            .dtype = shape.dtype,
                            .rank = shape.rank,
                            .dims = shape.dims};
  jpp_status_t* status = jpp__pjrt_buffer_from_host(client, &array, device, out_buffer);
  jpp__pjrt_buffer_reclaim(client, buffer);
  return status;
}

static PJRT_Error* copy_to_device(const jpp_pjrt_client_t* client, PJRT_Buffer* buffer,
                                  uint32_t device, jpp_buffer_t** out_buffer) {
  JPP_PJRT_ARGS(Buffer_CopyToDevice, args);
  args.buffer = buffer;
  args.dst_device = client->devices[device];
  PJRT_Error* error = client->api->PJRT_Buffer_CopyToDevice(&args);
  if (!error) *out_buffer = (jpp_buffer_t*)args.dst_buffer;
  return error;
}

static PJRT_Error* copy_to_pinned_host(const jpp_pjrt_client_t* client,
                                       PJRT_Buffer* buffer, uint32_t device,
                                       jpp_buffer_t** out_buffer) {
  JPP_PJRT_ARGS(Buffer_CopyToMemory, args);
  args.buffer = buffer;
  args.dst_memory = client->pinned_host[device];
  PJRT_Error* error = client->api->PJRT_Buffer_CopyToMemory(&args);
  if (!error) *out_buffer = (jpp_buffer_t*)args.dst_buffer;
  return error;
}

jpp_status_t* jpp__pjrt_buffer_copy(jpp_client_t* base, jpp_buffer_t* buffer,
                                    uint32_t device, jpp_memory_t memory,
                                    jpp_buffer_t** out_buffer) {
  jpp_pjrt_client_t* client = jpp__pjrt_client(base);
  bool to_host = memory == JPP_MEMORY_PINNED_HOST;
  if (!to_host && client->base.info.runs_in_call) {
    // The plugin is asked after any error here, and reports it.
    jpp_status_free(copy_small(base, buffer, device, out_buffer));
    if (*out_buffer) return NULL;
  }
  const char* doing = to_host ? "copy to pinned_host" : "copy to device";
  PJRT_Error* error = (to_host ? copy_to_pinned_host : copy_to_device)(
      client, (PJRT_Buffer*)buffer, device, out_buffer);
  if (!error) return NULL;
  jpp_status_t* status =
      jpp__pjrt_status(client->api, error, JPP_INVALID_ARGUMENT, doing);
  jpp_status_t* donated = jpp__pjrt_buffer_check(base, buffer, doing);
  if (!donated) return status;
  jpp_status_free(status);
  return donated;
}

void jpp__pjrt_buffer_destroy(jpp_client_t* base, jpp_buffer_t* buffer) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_PJRT_ARGS(Buffer_Destroy, args);
  args.buffer = (PJRT_Buffer*)buffer;
  jpp__pjrt_ignore(api, api->PJRT_Buffer_Destroy(&args));
}

jpp_status_t* jpp__pjrt_buffer_ready_event(jpp_client_t* base, jpp_buffer_t* buffer,
                                           jpp_event_t** out_event) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_PJRT_ARGS(Buffer_ReadyEvent, args);
  args.buffer = (PJRT_Buffer*)buffer;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Buffer_ReadyEvent(&args),
                                       JPP_INVALID_ARGUMENT, "ready event"));
  *out_event = (jpp_event_t*)args.event;
  return NULL;
}

jpp_status_t* jpp__pjrt_buffer_shape(jpp_client_t* base, jpp_buffer_t* buffer,
                                     jpp_buffer_shape_t* out_shape) {
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  JPP_PJRT_ARGS(Buffer_ElementType, type);
  type.buffer = (PJRT_Buffer*)buffer;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Buffer_ElementType(&type),
                                       JPP_INVALID_ARGUMENT, "element type"));
  PJRT_Buffer_Dimensions_Args dims;
  JPP_RETURN_IF_ERROR(buffer_dims(api, (PJRT_Buffer*)buffer, &dims));
  *out_shape = (jpp_buffer_shape_t){.dtype = jpp__pjrt_type_to_dtype(type.type),
                                    .rank = (uint32_t)dims.num_dims,
                                    .dims = dims.dims};
  return NULL;
}
