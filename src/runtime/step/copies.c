// Tasks without an executable, which only copy: see jpp_plan_task_copies(). The device's
// memory is the host's.
#include "base/alloc.h"
#include "device/wait.h"
#include "runtime/cluster/network.h"
#include "runtime/step/state.h"

static bool divides(uint64_t part, uint64_t whole) {
  return part ? whole % part == 0 : whole == 0;
}

// The argument is cut into as many shards as the result.
static jpp_status_t* cut_result(jpp_arena_t* arena, const uint64_t* shard_dims,
                                jpp_type_t* type, jpp_copy_t* copy) {
  int64_t* dims = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, type->ndim, &dims));
  for (uint32_t d = 0; d < type->ndim; ++d) {
    uint64_t whole = (uint64_t)type->dims[d], part = shard_dims[d];
    if (!divides(part, whole)) {
      return jpp_status_make(
          JPP_INVALID_ARGUMENT,
          "dimension %u of a shard: expected a divisor of %llu, found %llu", d,
          (unsigned long long)whole, (unsigned long long)part);
    }
    uint64_t shards = part ? whole / part : 1;
    copy->first /= shards;
    copy->row /= shards;
    dims[d] = (int64_t)part;
  }
  type->dims = dims;
  return NULL;
}

static jpp_status_t* resolve_task(jpp_runtime_t* runtime, const uint64_t* shard_dims,
                                  uint32_t id) {
  const jpp_staged_t* staged = runtime->plan->staged;
  const jpp_task_t* task = &staged->tasks[id];
  jpp_copy_t* copies = NULL;
  jpp_type_t* types = NULL;
  if (runtime->calls[id].executable) return NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, task->num_outputs, &copies));
  if (!jpp_plan_task_copies(runtime->plan, id, copies)) return NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, task->num_outputs, &types));
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    types[i] = staged->values[task->outputs[i]].type;
    if (shard_dims) {
      JPP_RETURN_IF_ERROR_IN(
          cut_result(&runtime->arena, shard_dims, &types[i], &copies[i]),
          "task %s, result %u", task->name, i);
      shard_dims += types[i].ndim;
    }
    uint64_t bytes = jpp_type_host_bytes(&types[i]);
    bool is_largest = copies[i].input == JPP_NONE && bytes > runtime->zero_bytes;
    if (is_largest) runtime->zero_bytes = bytes;
  }
  runtime->calls[id].copies = copies;
  runtime->calls[id].shard_types = types;
  return NULL;
}

jpp_status_t* jpp__copies_resolve(jpp_runtime_t* runtime,
                                  const uint64_t* const* shard_dims) {
  for (uint32_t t = 0; t < runtime->plan->staged->num_tasks; ++t) {
    JPP_RETURN_IF_ERROR(resolve_task(runtime, shard_dims ? shard_dims[t] : NULL, t));
  }
  if (!runtime->zero_bytes) return NULL;
  // A large allocation of zeros takes no memory until it is written, which nothing does.
  // copy_zeros() reports a failure.
  jpp_status_free(jpp_alloc((size_t)runtime->zero_bytes, &runtime->zeros));
  return NULL;
}

// --- One array ------------------------------------------------------------------------

// Where an array comes from and where it goes.
typedef struct jpp_copying {
  jpp_runtime_t* runtime;
  const jpp_type_t* type;  // of the result
  uint32_t device;
  jpp_buffer_t* source;  // NULL for zeros
  jpp_dtype_t source_dtype;
  uint64_t first;  // element of the source
} jpp_copying_t;

static jpp_status_t* upload(const jpp_copying_t* c, const void* data,
                            jpp_buffer_t** out_buffer) {
  jpp_host_array_t array = {.struct_size = sizeof(array),
                            .data = data,
                            .dtype = c->type->dtype,
                            .rank = c->type->ndim,
                            .dims = c->type->dims};
  return jpp_client_buffer_from_host(c->runtime->client, &array, c->device, out_buffer);
}

static void widen(const uint16_t* from, uint64_t count, uint32_t* to) {
  for (uint64_t i = 0; i < count; ++i) to[i] = (uint32_t)from[i] << 16;
}

// Rounds to the nearest bfloat16, ties to even. A NaN stays one.
static void narrow(const uint32_t* from, uint64_t count, uint16_t* to) {
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t bits = from[i];
    bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    to[i] = (uint16_t)(is_nan ? bits >> 16 | 0x40 : rounded);
  }
}

static jpp_status_t* convert(const jpp_copying_t* c, const void* data,
                             jpp_buffer_t** out_buffer) {
  uint64_t count = jpp_type_elements(c->type);
  void* converted = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc((size_t)jpp_type_host_bytes(c->type), &converted));
  if (c->type->dtype == JPP_DTYPE_BF16) {
    narrow(data, count, converted);
  } else {
    widen(data, count, converted);
  }
  jpp_status_t* status = upload(c, converted, out_buffer);
  jpp_free(converted);
  return status;
}

// Exchanges messages of earlier steps with other processes in the meantime.
static bool wait_should_end(void* user) {
  jpp_runtime_t* runtime = user;
  jpp__network_progress(runtime);
  return jpp__step_is_halted(runtime, runtime->step);
}

// JAX or an earlier step may still be computing the source. Nothing that is issued later
// has to happen first, so the wait ends.
static jpp_status_t* await_source(const jpp_copying_t* c) {
  const jpp_interrupt_t interrupt = {
      .requested = wait_should_end,
      .user = c->runtime,
      .period_us = c->runtime->network ? kJppNetworkPeriodUs : 0};
  return jpp__wait_buffer(c->runtime->client, c->source, "copy", &interrupt);
}

static jpp_status_t* copy_part(const jpp_copying_t* c, jpp_buffer_t** out_buffer) {
  void* data = NULL;
  JPP_RETURN_IF_ERROR(await_source(c));
  JPP_RETURN_IF_ERROR(jpp_client_buffer_lend(c->runtime->client, c->source, &data));
  const char* part = (char*)data + c->first * (jpp_dtype_bits(c->source_dtype) / 8);
  bool is_cast = c->source_dtype != c->type->dtype;
  jpp_status_t* status = (is_cast ? convert : upload)(c, part, out_buffer);
  jpp_client_buffer_reclaim(c->runtime->client, c->source);
  return status;
}

static jpp_status_t* copy_zeros(const jpp_copying_t* c, jpp_buffer_t** out_buffer) {
  if (c->runtime->zeros) return upload(c, c->runtime->zeros, out_buffer);
  return jpp_status_make(JPP_OUT_OF_MEMORY, "zeros: allocation of %llu bytes failed",
                         (unsigned long long)c->runtime->zero_bytes);
}

// --- A task ---------------------------------------------------------------------------

static jpp_status_t* make_shard(const jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                                uint32_t result, uint32_t device) {
  jpp_runtime_t* runtime = actor->runtime;
  const jpp_staged_t* staged = runtime->plan->staged;
  const jpp_instr_t* run = &actor->program->instrs[instr->source];
  const jpp_task_t* task = &staged->tasks[run->target];
  const jpp_copy_t* copy = &instr->call->copies[result];
  jpp_buffer_t** out_buffer = &actor->results[device][result];
  jpp_copying_t c = {.runtime = runtime,
                     .type = &instr->call->shard_types[result],
                     .device = actor->devices[device]};
  if (copy->input == JPP_NONE) return copy_zeros(&c, out_buffer);
  uint64_t rows = run->microbatch < copy->last ? run->microbatch : copy->last;
  uint32_t reg = instr->operands[copy->input];
  c.source = actor->regs[(size_t)reg * runtime->devices_per_rank + device];
  c.source_dtype = staged->values[task->inputs[copy->input]].type.dtype;
  c.first = copy->first + rows * copy->row;
  return copy_part(&c, out_buffer);
}

jpp_status_t* jpp__copies_make(const jpp_actor_t* actor, const jpp_actor_instr_t* instr) {
  uint32_t results = instr->num_results, count = results * actor->num_devices;
  for (uint32_t k = 0; k < count; ++k) {
    jpp_status_t* status = make_shard(actor, instr, k % results, k / results);
    if (!status) continue;
    while (k-- > 0) {
      jpp_buffer_t* made = actor->results[k / results][k % results];
      jpp_client_buffer_destroy(actor->runtime->client, made);
    }
    return status;
  }
  return NULL;
}
