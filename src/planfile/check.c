// Checks that the parts of a plan file's contents agree, whether they are saved or
// loaded.
#include "base/bytes.h"
#include "base/hash.h"
#include "planfile/format.h"

uint64_t jpp__planfile_hash(const unsigned char* bytes, size_t size) {
  const size_t behind = JPP_PLANFILE_HASH_AT + 8;
  uint64_t hash = jpp__hash_bytes(JPP_HASH_START, bytes, JPP_PLANFILE_HASH_AT);
  return jpp__hash_bytes(hash, bytes + behind, size - behind);
}

static jpp_status_t* check_modules(const jpp_planfile_contents_t* contents) {
  const jpp_staged_t* staged = contents->planned->staged;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    uint32_t module = contents->task_modules[t];
    if (task->num_ops ? module < contents->num_modules : module == JPP_NONE) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "task %s of %u ops: expected %s %u modules, found number %d",
                           task->name, task->num_ops,
                           task->num_ops ? "one of the" : "none of the",
                           contents->num_modules, (int)module);
  }
  return NULL;
}

static jpp_status_t* check_shard_dims(const jpp_planfile_contents_t* contents) {
  const jpp_planned_t* planned = contents->planned;
  for (uint32_t t = 0; contents->shard_dims && t < planned->staged->num_tasks; ++t) {
    if (!contents->shard_dims[t] || jpp_plan_task_copies(planned->plan, t, NULL))
      continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "task %s: expected no dims of shards, because it does more "
                           "than copy, found some",
                           planned->staged->tasks[t].name);
  }
  return NULL;
}

static jpp_status_t* check_constants(const jpp_planfile_contents_t* contents) {
  const jpp_graph_t* graph = contents->planned->graph;
  if (contents->num_constants > graph->num_args) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected at most %u constants, as many as there are "
                           "arguments, found %u",
                           graph->num_args, contents->num_constants);
  }
  uint32_t first = graph->num_args - contents->num_constants;
  for (uint32_t c = 0; c < contents->num_constants; ++c) {
    uint64_t expected = jpp_type_host_bytes(jpp__planfile_type(graph, first + c));
    if (contents->constants[c].size == expected) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "constant %u: expected %llu bytes, found %zu", c,
                           (unsigned long long)expected, contents->constants[c].size);
  }
  return NULL;
}

static jpp_status_t* check_devices(const jpp_planfile_contents_t* contents,
                                   uint32_t rank) {
  uint32_t count = jpp__planfile_count_devices(contents, rank);
  const int32_t* ids = contents->device_ids + (size_t)rank * contents->devices_per_rank;
  for (uint32_t d = 0; d < count; ++d) {
    if (ids[d] >= 0) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "rank %u, device %u: expected the id of a device, found %d",
                           rank, d, ids[d]);
  }
  uint64_t devices = 1;
  for (uint32_t a = 0; a < contents->num_axes; ++a) {
    uint32_t size = contents->axis_sizes[(size_t)rank * contents->num_axes + a];
    devices = jpp__bytes_multiply(devices, size);
  }
  if (!contents->num_axes || devices == count) return NULL;
  return jpp_status_make(
      JPP_INVALID_ARGUMENT,
      "axes of the mesh of rank %u: expected sizes whose product is %u, "
      "the devices of the rank, found %llu",
      rank, count, (unsigned long long)devices);
}

static bool is_inside(const jpp_type_t* type, const jpp_planfile_layout_t* layout,
                      uint32_t devices) {
  for (uint64_t i = 0; i < (uint64_t)devices * type->ndim; ++i) {
    int64_t whole = type->dims[i % type->ndim], size = layout->dims[i % type->ndim];
    int64_t start = layout->starts[i];
    if (size < 0 || start < 0 || size > whole || start > whole - size) return false;
  }
  return true;
}

static jpp_status_t* check_layouts(const jpp_planfile_contents_t* contents) {
  const jpp_graph_t* graph = contents->planned->graph;
  uint32_t count = graph->num_args + graph->num_outputs;
  for (uint32_t i = 0; contents->layouts && i < count; ++i) {
    bool is_arg = i < graph->num_args;
    const jpp_type_t* type = jpp__planfile_type(graph, i);
    if (is_inside(type, &contents->layouts[i], contents->devices_per_rank)) continue;
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "layout of %s %u: expected a part of the array on each device, "
        "found one beyond it",
        is_arg ? "argument" : "result", is_arg ? i : i - graph->num_args);
  }
  return NULL;
}

jpp_status_t* jpp__planfile_check(const jpp_planfile_contents_t* contents) {
  if (!contents->planned || !contents->planned->report) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "expected a plan with its proof");
  }
  if (!contents->platform || !contents->format || !contents->devices_per_rank) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected a platform, the modules' format and at least 1 "
                           "device a rank, found %s, %s and %u",
                           contents->platform ? contents->platform : "none",
                           contents->format ? contents->format : "none",
                           contents->devices_per_rank);
  }
  for (uint32_t r = 0; r < contents->planned->ranks; ++r) {
    JPP_RETURN_IF_ERROR(check_devices(contents, r));
  }
  JPP_RETURN_IF_ERROR(check_modules(contents));
  JPP_RETURN_IF_ERROR(check_shard_dims(contents));
  JPP_RETURN_IF_ERROR(check_constants(contents));
  return check_layouts(contents);
}
