// Compiles and runs programs on the fake device. It checks all arguments of an execution
// and allocates all results before it changes anything, so that a refused execution
// leaves every buffer as it was.
#include <string.h>

#include "base/hash.h"
#include "fake/device/fake.h"

// Takes the request's devices, else those in the text, else the client's first device.
static jpp_status_t* choose_devices(const fake_client_t* client,
                                    const jpp_compile_request_t* request,
                                    fake_program_t* program) {
  const jpp_client_info_t* info = &client->base.info;
  uint32_t count = request->device_count;
  if (!count && program->device_count) return NULL;
  uint32_t* devices = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&program->arena, count ? count : 1, &devices));
  devices[0] = client->first_id;
  for (uint32_t i = 0; i < count; ++i) {
    devices[i] = (uint32_t)info->global_devices[request->devices[i]].id;
  }
  program->devices = devices;
  program->device_count = count ? count : 1;
  return NULL;
}

static jpp_status_t* find_own(const fake_client_t* client, fake_program_t* program) {
  uint32_t* own = NULL;
  uint32_t total = client->base.info.global_device_count;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&program->arena, program->device_count, &own));
  for (uint32_t i = 0; i < program->device_count; ++i) {
    uint32_t id = program->devices[i];
    if (id >= total) {
      return jpp_status_make(JPP_DEVICES_ERROR, "compile: device %u of %u", id, total);
    }
    // Smaller ids wrap around.
    if (id - client->first_id >= client->options.device_count) continue;
    own[program->own_count++] = id - client->first_id;
  }
  program->own = own;
  if (program->own_count) return NULL;
  return jpp_status_make(JPP_DEVICES_ERROR,
                         "compile: expected a program with a partition on one of the %u "
                         "devices of node %u, found none",
                         client->options.device_count, client->options.node_id);
}

// Partitions find each other by device, so devices must differ.
static jpp_status_t* check_distinct(const fake_program_t* program) {
  for (uint32_t i = 0; i < program->device_count; ++i) {
    for (uint32_t k = 0; k < i; ++k) {
      if (program->devices[i] != program->devices[k]) continue;
      return jpp_status_make(JPP_DEVICES_ERROR,
                             "compile: a program with a collective names device %u twice",
                             program->devices[i]);
    }
  }
  return NULL;
}

static jpp_status_t* place_program(const fake_client_t* client,
                                   const jpp_compile_request_t* request,
                                   fake_program_t* program) {
  JPP_RETURN_IF_ERROR(choose_devices(client, request, program));
  JPP_RETURN_IF_ERROR(find_own(client, program));
  if (program->is_collective) JPP_RETURN_IF_ERROR(check_distinct(program));
  uint64_t hash = jpp__hash_bytes(JPP_HASH_START, request->code, request->code_size);
  program->identity = jpp__hash_bytes(
      hash, program->devices, program->device_count * sizeof(program->devices[0]));
  return NULL;
}

jpp_status_t* fake_compile(jpp_client_t* base, const jpp_compile_request_t* request,
                           jpp_executable_t** out_executable) {
  fake_client_t* client = fake_client(base);
  if (!request->format || strcmp(request->format, "fake") != 0) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "compile: expected format 'fake', found '%s'",
                           request->format ? request->format : "(none)");
  }
  fake_program_t* program = NULL;
  JPP_RETURN_IF_ERROR(fake_program_create(request->code, request->code_size, &program));
  jpp_status_t* status = place_program(client, request, program);
  pthread_mutex_lock(&client->mutex);
  if (!status) status = fake_count_call_locked(client, "compile", NULL);
  if (status) {
    fake_program_destroy(program);
  } else {
    status = fake_executable_create_locked(client, program, out_executable);
  }
  pthread_mutex_unlock(&client->mutex);
  return status;
}

jpp_status_t* fake_executable_result_count(jpp_client_t* base,
                                           jpp_executable_t* executable,
                                           uint32_t* out_count) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status =
      fake_handle_check_locked(executable, FAKE_EXECUTABLE, "result count");
  if (!status) *out_count = ((fake_handle_t*)executable)->program->result_count;
  pthread_mutex_unlock(&client->mutex);
  return status;
}

void fake_executable_destroy(jpp_client_t* base, jpp_executable_t* executable) {
  fake_client_t* client = fake_client(base);
  pthread_mutex_lock(&client->mutex);
  fake_handle_destroy_locked(client, executable);
  pthread_mutex_unlock(&client->mutex);
}

static jpp_status_t* check_count(const char* what, uint32_t expected, uint32_t found) {
  if (expected == found) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT, "execute: expected %u %s, found %u",
                         expected, what, found);
}

static bool shapes_equal(const fake_shape_t* a, const fake_shape_t* b) {
  return a->dtype == b->dtype && a->rank == b->rank &&
         memcmp(a->dims, b->dims, a->rank * sizeof(a->dims[0])) == 0;
}

static jpp_status_t* check_arg_locked(const void* buffer, uint32_t device, uint32_t arg) {
  JPP_RETURN_IF_ERROR_IN(fake_handle_check_locked(buffer, FAKE_BUFFER, "execute"),
                         "argument %u", arg);
  const fake_value_t* value = ((const fake_handle_t*)buffer)->value;
  if (value->device != device) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "execute: expected argument %u on device %u, found device %u",
                           arg, device, value->device);
  }
  if (value->memory != JPP_MEMORY_DEVICE) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "execute: expected argument %u in device memory, found %s",
                           arg, jpp_memory_name(value->memory));
  }
  return NULL;
}

static jpp_status_t* check_result_args_locked(const fake_result_t* result,
                                              jpp_buffer_t* const* args) {
  for (uint32_t i = 0; i < result->arg_count; ++i) {
    const fake_value_t* value = ((fake_handle_t*)args[result->args[i]])->value;
    bool any = result->op == FAKE_HASH || result->op == FAKE_ALL_HASH;
    bool fits = any || shapes_equal(&value->shape, &result->shape);
    if (fits) continue;
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "execute: argument %u is %s of rank %u and %zu bytes, its result f32 of rank %u "
        "and %zu bytes",
        result->args[i], jpp_dtype_name(value->shape.dtype), value->shape.rank,
        value->bytes, result->shape.rank, fake_shape_bytes(&result->shape));
  }
  return NULL;
}

// A donated argument must be passed once and have no other reader.
static jpp_status_t* check_donations(const fake_program_t* program,
                                     jpp_buffer_t* const* args) {
  for (uint32_t d = 0; d < program->donate_count; ++d) {
    const fake_handle_t* handle = (fake_handle_t*)args[program->donate[d]];
    if (handle->loans || handle->value->release) {
      return jpp_status_make(JPP_INVALID_ARGUMENT,
                             "execute: argument %u is donated, but its memory is %s",
                             program->donate[d], handle->loans ? "lent" : "borrowed");
    }
    for (uint32_t i = 0; i < program->arg_count; ++i) {
      if (i == program->donate[d] || args[i] != args[program->donate[d]]) continue;
      return jpp_status_make(JPP_INVALID_ARGUMENT,
                             "execute: argument %u is donated and also argument %u",
                             program->donate[d], i);
    }
  }
  return NULL;
}

static uint32_t row_device(const fake_program_t* program, const jpp_execute_t* execute,
                           uint32_t row) {
  return execute->device < 0 ? program->own[row] : (uint32_t)execute->device;
}

static jpp_status_t* execute_check_locked(const jpp_execute_t* execute) {
  JPP_RETURN_IF_ERROR(
      fake_handle_check_locked(execute->executable, FAKE_EXECUTABLE, "execute"));
  const fake_program_t* program = ((fake_handle_t*)execute->executable)->program;
  uint32_t rows = execute->device < 0 ? program->own_count : 1;
  if (program->is_collective && execute->device >= 0) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "execute: expected a program with a collective on the devices "
                           "that it was compiled for, found device %d",
                           execute->device);
  }
  JPP_RETURN_IF_ERROR(check_count("device rows", rows, execute->device_count));
  JPP_RETURN_IF_ERROR(check_count("arguments", program->arg_count, execute->arg_count));
  JPP_RETURN_IF_ERROR(
      check_count("results", program->result_count, execute->result_count));
  for (uint32_t row = 0; row < rows; ++row) {
    jpp_buffer_t* const* args = execute->args[row];
    for (uint32_t i = 0; i < program->arg_count; ++i) {
      JPP_RETURN_IF_ERROR(
          check_arg_locked(args[i], row_device(program, execute, row), i));
    }
    for (uint32_t k = 0; k < program->result_count; ++k) {
      JPP_RETURN_IF_ERROR(check_result_args_locked(&program->results[k], args));
    }
    JPP_RETURN_IF_ERROR(check_donations(program, args));
  }
  return NULL;
}

static void run_execute(const fake_task_t* task) {
  const fake_program_t* program = task->program;
  for (uint32_t k = 0; k < program->result_count; ++k) {
    if (fake_op_is_collective(program->results[k].op))
      continue;  // computed at the rendezvous
    fake_result_compute(&program->results[k], task->values,
                        task->values[task->input_count + k]);
  }
}

// Builds the task, the result buffers and the event of a row.
static jpp_status_t* row_build_locked(fake_client_t* client, const jpp_execute_t* execute,
                                      uint32_t row, fake_task_t* task) {
  const fake_program_t* program = ((fake_handle_t*)execute->executable)->program;
  task->program = program;
  task->run = run_execute;
  task->device_id = client->first_id + row_device(program, execute, row);
  task->latency_us = client->options.latency_us;
  for (uint32_t i = 0; i < program->arg_count; ++i) {
    task->values[i] = ((fake_handle_t*)execute->args[row][i])->value;
    ++task->values[i]->refs;
  }
  for (uint32_t k = 0; k < program->result_count; ++k) {
    fake_value_t** value = &task->values[program->arg_count + k];
    JPP_RETURN_IF_ERROR(fake_value_create_locked(&program->results[k].shape,
                                                 row_device(program, execute, row),
                                                 task->completion, value));
    JPP_RETURN_IF_ERROR(
        fake_buffer_create_locked(client, *value, &execute->results[row][k]));
  }
  if (!execute->events) return NULL;
  return fake_event_create_locked(client, task->completion, &execute->events[row]);
}

// Links the tasks of all rows in order.
static jpp_status_t* rows_build_locked(fake_client_t* client,
                                       const jpp_execute_t* execute,
                                       const jpp_status_t* failure,
                                       fake_task_t** out_tasks) {
  const fake_program_t* program = ((fake_handle_t*)execute->executable)->program;
  fake_task_t** link = out_tasks;
  for (uint32_t row = 0; row < execute->device_count; ++row) {
    JPP_RETURN_IF_ERROR(
        fake_task_create(program->arg_count, program->result_count, link));
    (*link)->failure = jpp_status_clone(failure);
    JPP_RETURN_IF_ERROR(row_build_locked(client, execute, row, *link));
    link = &(*link)->next;
  }
  return NULL;
}

static void rows_discard_locked(fake_client_t* client, const jpp_execute_t* execute,
                                fake_task_t* tasks) {
  while (tasks) {
    fake_task_t* next = tasks->next;
    fake_task_discard_locked(tasks);
    tasks = next;
  }
  for (uint32_t row = 0; row < execute->device_count; ++row) {
    for (uint32_t k = 0; k < execute->result_count; ++k) {
      fake_handle_destroy_locked(client, execute->results[row][k]);
    }
    if (execute->events) fake_handle_destroy_locked(client, execute->events[row]);
  }
}

// Counts donations before results: the results may reuse the donated memory.
static void rows_account_locked(fake_client_t* client, const jpp_execute_t* execute) {
  const fake_program_t* program = ((fake_handle_t*)execute->executable)->program;
  for (uint32_t row = 0; row < execute->device_count; ++row) {
    for (uint32_t d = 0; d < program->donate_count; ++d) {
      fake_handle_donate_locked(client,
                                (fake_handle_t*)execute->args[row][program->donate[d]]);
    }
    for (uint32_t k = 0; k < program->result_count; ++k) {
      fake_handle_account_locked(client, (fake_handle_t*)execute->results[row][k]);
    }
  }
  ++client->stats.executions;
}

static jpp_status_t* execute_locked(fake_client_t* client, const jpp_execute_t* execute,
                                    fake_task_t** out_tasks) {
  jpp_status_t* failure = NULL;
  JPP_RETURN_IF_ERROR(execute_check_locked(execute));
  JPP_RETURN_IF_ERROR(fake_count_call_locked(client, "execute", &failure));
  for (uint32_t row = 0; row < execute->device_count; ++row) {
    for (uint32_t k = 0; k < execute->result_count; ++k) execute->results[row][k] = NULL;
    if (execute->events) execute->events[row] = NULL;
  }
  jpp_status_t* status = rows_build_locked(client, execute, failure, out_tasks);
  jpp_status_free(failure);
  const fake_program_t* program = ((fake_handle_t*)execute->executable)->program;
  if (!status && program->is_collective) {
    status = fake_rendezvous_join_locked(client, *out_tasks);
  }
  if (status) {
    rows_discard_locked(client, execute, *out_tasks);
    return status;
  }
  rows_account_locked(client, execute);
  return NULL;
}

jpp_status_t* fake_execute(jpp_client_t* base, const jpp_execute_t* execute) {
  fake_client_t* client = fake_client(base);
  fake_task_t* tasks = NULL;
  pthread_mutex_lock(&client->mutex);
  jpp_status_t* status = execute_locked(client, execute, &tasks);
  pthread_mutex_unlock(&client->mutex);
  if (status) return status;
  while (tasks) {
    fake_task_t* next = tasks->next;
    tasks->next = NULL;
    fake_task_submit(client, tasks);
    tasks = next;
  }
  return NULL;
}
