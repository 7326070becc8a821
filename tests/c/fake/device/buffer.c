// Buffers of the fake device. Copies are queued tasks, as executions are, so that a
// program that reads too early fails its test.
#include <string.h>

#include "fake/device/fake.h"

// Copies one dimension of a strided array to dense memory; returns the end of the copy.
static char* copy_strided(const jpp_host_array_t* array, uint32_t dim, const char* source,
                          char* destination, size_t element) {
  if (dim == array->rank) {
    memcpy(destination, source, element);
    return destination + element;
  }
  for (int64_t i = 0; i < array->dims[dim]; ++i) {
    destination = copy_strided(array, dim + 1, source + i * array->byte_strides[dim],
                               destination, element);
  }
  return destination;
}

static void fill_from_host(const jpp_host_array_t* array, fake_value_t* value) {
  if (array->byte_strides) {
    copy_strided(array, 0, array->data, value->data, jpp_dtype_bits(array->dtype) / 8);
  } else if (value->bytes) {
    memcpy(value->data, array->data, value->bytes);
  }
}

static jpp_status_t* from_host_locked(fake_client_t* client,
                                      const jpp_host_array_t* array, uint32_t device,
                                      jpp_buffer_t** out_buffer) {
  fake_shape_t shape = {.dtype = array->dtype, .rank = array->rank};
  if (array->rank) memcpy(shape.dims, array->dims, array->rank * sizeof(shape.dims[0]));
  jpp_status_t* failure = NULL;
  fake_completion_t* completion = NULL;
  fake_value_t* value = NULL;
  JPP_RETURN_IF_ERROR(fake_count_call_locked(client, "copy from host", &failure));
  jpp_status_t* status = fake_completion_create(&completion);
  if (!status) status = fake_value_create_locked(&shape, device, completion, &value);
  if (!status) status = fake_buffer_create_locked(client, value, out_buffer);
  if (!status) {
    value->memory = array->memory;
    fill_from_host(array, value);
    completion->done = true;
    completion->error = jpp_status_clone(failure);
    fake_handle_account_locked(client, (fake_handle_t*)*out_buffer);
    ++client->stats.uploads;
  }
  fake_value_release_locked(value);
  fake_completion_release_locked(completion);
  jpp_status_free(failure);
  return status;
}

jpp_status_t* fake_buffer_from_host(jpp_client_t* base, const jpp_host_array_t* array,
                                    uint32_t device, jpp_buffer_t** out_buffer) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status = from_host_locked(client, array, device, out_buffer);
  pthread_mutex_unlock(&client->mutex);
  return status;
}

static void run_to_host(const fake_task_t* task) {
  if (task->values[0]->bytes) {
    memcpy(task->host_data, task->values[0]->data, task->values[0]->bytes);
  }
}

// Creates a task that copies one value; the caller fills in the destination.
static jpp_status_t* copy_task_locked(fake_client_t* client, jpp_buffer_t* buffer,
                                      const char* what, uint32_t output_count,
                                      fake_task_t** out_task) {
  jpp_status_t* failure = NULL;
  JPP_RETURN_IF_ERROR(fake_handle_check_locked(buffer, FAKE_BUFFER, what));
  JPP_RETURN_IF_ERROR(fake_count_call_locked(client, what, &failure));
  jpp_status_t* status = fake_task_create(1, output_count, out_task);
  if (status) {
    jpp_status_free(failure);
    return status;
  }
  (*out_task)->failure = failure;
  (*out_task)->values[0] = ((fake_handle_t*)buffer)->value;
  ++(*out_task)->values[0]->refs;
  return NULL;
}

static jpp_status_t* to_host_locked(fake_client_t* client, jpp_buffer_t* buffer,
                                    size_t size, fake_task_t** task,
                                    jpp_event_t** out_event) {
  JPP_RETURN_IF_ERROR(copy_task_locked(client, buffer, "copy to host", 0, task));
  size_t bytes = (*task)->values[0]->bytes;
  if (size < bytes) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "copy to host: expected room for %zu bytes, found %zu", bytes,
                           size);
  }
  (*task)->run = run_to_host;
  JPP_RETURN_IF_ERROR(fake_event_create_locked(client, (*task)->completion, out_event));
  ++client->stats.downloads;
  return NULL;
}

jpp_status_t* fake_buffer_to_host(jpp_client_t* base, jpp_buffer_t* buffer, void* data,
                                  size_t size, jpp_event_t** out_event) {
  fake_client_t* client = fake_client(base);
  fake_task_t* task = NULL;
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status = to_host_locked(client, buffer, size, &task, out_event);
  if (status) fake_task_discard_locked(task);
  pthread_mutex_unlock(&client->mutex);
  if (status) return status;
  task->host_data = data;
  fake_task_submit(client, task);
  return NULL;
}

static void run_copy(const fake_task_t* task) {
  if (task->values[0]->bytes) {
    memcpy(task->values[1]->data, task->values[0]->data, task->values[0]->bytes);
  }
}

static jpp_status_t* copy_locked(fake_client_t* client, jpp_buffer_t* buffer,
                                 uint32_t device, jpp_memory_t memory, fake_task_t** task,
                                 jpp_buffer_t** out_buffer) {
  const char* what = memory ? "copy to pinned_host" : "copy to device";
  JPP_RETURN_IF_ERROR(copy_task_locked(client, buffer, what, 1, task));
  JPP_RETURN_IF_ERROR(fake_value_create_locked(&(*task)->values[0]->shape, device,
                                               (*task)->completion, &(*task)->values[1]));
  (*task)->values[1]->memory = memory;
  (*task)->run = run_copy;
  JPP_RETURN_IF_ERROR(fake_buffer_create_locked(client, (*task)->values[1], out_buffer));
  fake_handle_account_locked(client, (fake_handle_t*)*out_buffer);
  ++client->stats.copies;
  return NULL;
}

jpp_status_t* fake_buffer_copy(jpp_client_t* base, jpp_buffer_t* buffer, uint32_t device,
                               jpp_memory_t memory, jpp_buffer_t** out_buffer) {
  fake_client_t* client = fake_client(base);
  fake_task_t* task = NULL;
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status = copy_locked(client, buffer, device, memory, &task, out_buffer);
  if (status) fake_task_discard_locked(task);
  pthread_mutex_unlock(&client->mutex);
  if (!status) fake_task_submit(client, task);
  return status;
}

void fake_buffer_destroy(jpp_client_t* base, jpp_buffer_t* buffer) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  fake_handle_destroy_locked(client, buffer);
  pthread_mutex_unlock(&client->mutex);
}

jpp_status_t* fake_buffer_ready_event(jpp_client_t* base, jpp_buffer_t* buffer,
                                      jpp_event_t** out_event) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status = fake_handle_check_locked(buffer, FAKE_BUFFER, "ready event");
  if (!status) {
    fake_completion_t* completion = ((fake_handle_t*)buffer)->value->completion;
    status = fake_event_create_locked(client, completion, out_event);
  }
  pthread_mutex_unlock(&client->mutex);
  return status;
}

// Finds the value behind a live buffer: constant except for its bytes while the buffer
// lives.
static jpp_status_t* buffer_value(jpp_client_t* base, jpp_buffer_t* buffer,
                                  const char* what, const fake_value_t** out_value) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status = fake_handle_check_locked(buffer, FAKE_BUFFER, what);
  if (!status) *out_value = ((fake_handle_t*)buffer)->value;
  pthread_mutex_unlock(&client->mutex);
  return status;
}

jpp_status_t* fake_buffer_shape(jpp_client_t* base, jpp_buffer_t* buffer,
                                jpp_buffer_shape_t* out_shape) {
  const fake_value_t* value = NULL;
  JPP_RETURN_IF_ERROR(buffer_value(base, buffer, "shape", &value));
  *out_shape = (jpp_buffer_shape_t){
      .dtype = value->shape.dtype, .rank = value->shape.rank, .dims = value->shape.dims};
  return NULL;
}

jpp_status_t* fake_buffer_lend(jpp_client_t* base, jpp_buffer_t* buffer,
                               void** out_pointer) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  fake_handle_t* handle = (fake_handle_t*)buffer;
  jpp_status_t* status = fake_handle_check_locked(buffer, FAKE_BUFFER, "lend");
  if (!status) {
    ++handle->loans;
    *out_pointer = handle->value->data;
  }
  pthread_mutex_unlock(&client->mutex);
  return status;
}

void fake_buffer_reclaim(jpp_client_t* base, jpp_buffer_t* buffer) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  fake_handle_t* handle = (fake_handle_t*)buffer;
  if (handle->loans) {
    --handle->loans;
  } else {
    ++client->stats.misuses;
  }
  pthread_mutex_unlock(&client->mutex);
}

static jpp_status_t* borrow_locked(fake_client_t* client,
                                   const jpp_foreign_memory_t* foreign,
                                   jpp_buffer_t** out_buffer) {
  fake_shape_t shape = {.dtype = foreign->shape.dtype, .rank = foreign->shape.rank};
  for (uint32_t i = 0; i < shape.rank; ++i) shape.dims[i] = foreign->shape.dims[i];
  fake_completion_t* completion = NULL;
  fake_value_t* value = NULL;
  JPP_RETURN_IF_ERROR(fake_completion_create(&completion));
  completion->done = true;
  jpp_status_t* status =
      fake_value_create_locked(&shape, foreign->device, completion, &value);
  if (!status) status = fake_buffer_create_locked(client, value, out_buffer);
  if (!status) {
    jpp_free(value->data);
    value->data = foreign->memory;
    value->release = foreign->release;
    value->user = foreign->user;
  }
  fake_value_release_locked(value);
  fake_completion_release_locked(completion);
  return status;
}

jpp_status_t* fake_buffer_borrow(jpp_client_t* base, const jpp_foreign_memory_t* foreign,
                                 jpp_buffer_t** out_buffer) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status = borrow_locked(client, foreign, out_buffer);
  pthread_mutex_unlock(&client->mutex);
  return status;
}
