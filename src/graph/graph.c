// Types, names of kinds, and the destruction of graphs. A finished graph is immutable and
// lives in one arena.
#include <string.h>

#include "graph/graph_internal.h"

uint64_t jpp_type_elements(const jpp_type_t* type) {
  uint64_t elements = 1;
  for (uint32_t i = 0; i < type->ndim; ++i) {
    if (!type->dims[i]) return 0;
    elements = jpp__bytes_multiply(elements, (uint64_t)type->dims[i]);
  }
  return elements;
}

uint64_t jpp_type_bytes(const jpp_type_t* type) {
  return jpp_dtype_device_bytes(type->dtype, jpp_type_elements(type));
}

uint64_t jpp_type_host_bytes(const jpp_type_t* type) {
  return jpp__bytes_multiply(jpp_dtype_bits(type->dtype) / 8, jpp_type_elements(type));
}

bool jpp_type_equal(const jpp_type_t* a, const jpp_type_t* b) {
  return a->dtype == b->dtype && a->memory == b->memory && a->ndim == b->ndim &&
         (a->ndim == 0 || memcmp(a->dims, b->dims, a->ndim * sizeof(*a->dims)) == 0);
}

// Divides `shards` by its greatest common divisor with each dimension in turn. The number
// of elements itself may be too large for an integer.
bool jpp__type_divides(const jpp_type_t* type, uint64_t shards) {
  uint64_t left = shards;
  for (uint32_t i = 0; i < type->ndim && left > 1; ++i) {
    uint64_t a = left, b = (uint64_t)type->dims[i];
    while (b) {
      uint64_t rest = a % b;
      a = b;
      b = rest;
    }
    left /= a;
  }
  return left <= 1;
}

uint64_t jpp_value_device_bytes(const jpp_value_t* value) {
  return value->bytes / (value->type.shards ? value->type.shards : 1);
}

const char* jpp_op_kind_name(jpp_op_kind_t kind) {
  static const char* const kNames[] = {
      [JPP_OP_CALL] = "call",
      [JPP_OP_MARK] = "mark",
      [JPP_OP_MARK_BACKWARD] = "mark_backward",
      [JPP_OP_ADD] = "add",
      [JPP_OP_PLACE] = "place",
      [JPP_OP_TASK] = "task",
      [JPP_OP_LOOP] = "loop",
      [JPP_OP_INIT] = "init",
      [JPP_OP_ACCUMULATE] = "accumulate",
      [JPP_OP_SUM] = "sum",
      [JPP_OP_PACK] = "pack",
      [JPP_OP_UNPACK] = "unpack",
      [JPP_OP_REPEAT] = "repeat",
  };
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_OP_KIND_COUNT, "a name a kind");
  return (unsigned)kind < JPP_OP_KIND_COUNT ? kNames[kind] : NULL;
}

const char* jpp_reduce_kind_name(jpp_reduce_kind_t kind) {
  static const char* const kNames[] = {
      [JPP_REDUCE_ADD] = "add",
      [JPP_REDUCE_MAX] = "max",
      [JPP_REDUCE_CONCAT] = "concat",
      [JPP_REDUCE_CUSTOM] = "custom",
  };
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_REDUCE_KIND_COUNT,
                 "a name a kind");
  return (unsigned)kind < JPP_REDUCE_KIND_COUNT ? kNames[kind] : NULL;
}

void jpp_graph_destroy(jpp_graph_t* graph) {
  if (!graph) return;
  jpp_graph_storage_t* storage = (jpp_graph_storage_t*)graph;
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage);
}
