#include <string.h>

#include "graph/graph_internal.h"

uint64_t jpp_type_bytes(const jpp_type_t* type) {
  uint64_t elements = 1;
  for (uint32_t i = 0; i < type->ndim; ++i) {
    if (!type->dims[i]) return 0;
    elements = jpp_bytes_multiply(elements, (uint64_t)type->dims[i]);
  }
  return jpp_dtype_device_bytes(type->dtype, elements);
}

bool jpp_type_equal(const jpp_type_t* a, const jpp_type_t* b) {
  return a->dtype == b->dtype && a->ndim == b->ndim &&
         (a->ndim == 0 || memcmp(a->dims, b->dims, a->ndim * sizeof(*a->dims)) == 0);
}

const char* jpp_reduce_kind_name(jpp_reduce_kind_t kind) {
  static const char* const names[] = {"add", "max", "concat", "custom"};
  return (unsigned)kind < 4 ? names[kind] : "invalid";
}

void jpp_graph_destroy(jpp_graph_t* graph) {
  if (!graph) return;
  jpp_graph_storage_t* storage = (jpp_graph_storage_t*)graph;
  jpp_arena_deinit(&storage->arena);
  jpp_free(storage);
}
