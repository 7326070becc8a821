// Tasks that only fill arrays with zeros, and have no executable: zeros are copied from
// the host. A large allocation of zeros takes no memory until it is written, which
// nothing does.
#include "base/alloc.h"
#include "base/bytes.h"
#include "runtime/step/state.h"

static uint64_t host_bytes(const jpp_type_t* type) {
  return jpp__bytes_multiply(jpp_dtype_bits(type->dtype) / 8, jpp_type_elements(type));
}

static jpp_status_t* describe_results(jpp_runtime_t* runtime, const jpp_task_t* task,
                                      jpp_host_array_t** out_arrays) {
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, task->num_outputs, out_arrays));
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    const jpp_type_t* type = &runtime->plan->staged->values[task->outputs[i]].type;
    (*out_arrays)[i] = (jpp_host_array_t){.struct_size = sizeof(jpp_host_array_t),
                                          .data = runtime->zeros,
                                          .dtype = type->dtype,
                                          .rank = type->ndim,
                                          .dims = type->dims};
  }
  return NULL;
}

static bool has_no_executable(const jpp_runtime_t* runtime, uint32_t task) {
  return !runtime->calls[task].executable && runtime->devices_per_rank == 1 &&
         jpp_staged_task_fills_zeros(runtime->plan->staged, task);
}

jpp_status_t* jpp__zeros_resolve(jpp_runtime_t* runtime) {
  const jpp_staged_t* staged = runtime->plan->staged;
  uint64_t most = 0;
  bool any = false;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    if (!has_no_executable(runtime, t)) continue;
    any = true;
    for (uint32_t i = 0; i < task->num_outputs; ++i) {
      uint64_t bytes = host_bytes(&staged->values[task->outputs[i]].type);
      if (bytes > most) most = bytes;
    }
  }
  if (!any) return NULL;
  runtime->zero_bytes = most;
  jpp_status_free(
      jpp_alloc((size_t)most, &runtime->zeros));  // jpp__zeros_fill() reports it
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    jpp_host_array_t* arrays = NULL;
    if (!has_no_executable(runtime, t)) continue;
    JPP_RETURN_IF_ERROR(describe_results(runtime, &staged->tasks[t], &arrays));
    runtime->calls[t].zeros = arrays;
  }
  return NULL;
}

jpp_status_t* jpp__zeros_fill(const jpp_actor_t* actor, const jpp_actor_instr_t* instr) {
  jpp_buffer_t** row = actor->results[0];
  if (!actor->runtime->zeros) {
    return jpp_status_make(JPP_OUT_OF_MEMORY, "zeros: allocation of %llu bytes failed",
                           (unsigned long long)actor->runtime->zero_bytes);
  }
  for (uint32_t k = 0; k < instr->num_results; ++k) {
    jpp_status_t* status = jpp_client_buffer_from_host(
        actor->runtime->client, &instr->call->zeros[k], actor->devices[0], &row[k]);
    if (!status) continue;
    while (k-- > 0) jpp_client_buffer_destroy(actor->runtime->client, row[k]);
    return status;
  }
  return NULL;
}
