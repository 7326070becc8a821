// Chooses the activations that wait in pinned host memory for their backward.
#include "partition/offload.h"

enum { kFewBytes = 4096 };  // a transfer of so few takes longer than it saves

typedef struct offload {
  jpp_staged_t* staged;
  const uint64_t* value_bytes;
} offload_t;

// Whether one of the parts of a task takes the value. `task` JPP_NONE: no task.
static bool takes(const jpp_staged_t* staged, uint32_t task, uint32_t value) {
  for (; task != JPP_NONE; task = staged->tasks[task].next_part) {
    const jpp_task_t* part = &staged->tasks[task];
    for (uint32_t i = 0; i < part->num_inputs; ++i) {
      if (part->inputs[i] == value) return true;
    }
  }
  return false;
}

// Those of `values` that the stage's backward takes.
static void offload_values(const offload_t* o, const jpp_staged_loop_t* loop,
                           uint32_t stage, const uint32_t* values, uint32_t count) {
  jpp_value_t* table = (jpp_value_t*)o->staged->values;  // the partition's own
  uint32_t weight = loop->split_backward ? loop->weight[stage] : JPP_NONE;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t value = values[i];
    bool is_index = table[value].producer == JPP_NONE;
    if (is_index || o->staged->scopes[value] != JPP_SCOPE_MICROBATCH) continue;
    if (o->value_bytes[value] < kFewBytes) continue;
    if (takes(o->staged, loop->backward[stage], value) ||
        takes(o->staged, weight, value)) {
      table[value].type.memory = JPP_MEMORY_PINNED_HOST;
    }
  }
}

void jpp__staged_offload(jpp_staged_t* staged, const uint64_t* value_bytes) {
  offload_t o = {.staged = staged, .value_bytes = value_bytes};
  for (uint32_t l = 0; l < staged->graph->num_loops; ++l) {
    const jpp_staged_loop_t* loop = &staged->loops[l];
    if (!loop->has_backward) continue;
    for (uint32_t s = 0; s + 1 < loop->stages; ++s) {
      for (uint32_t t = loop->forward[s]; t != JPP_NONE; t = staged->tasks[t].next_part) {
        const jpp_task_t* task = &staged->tasks[t];
        offload_values(&o, loop, s, task->inputs, task->num_inputs);
        offload_values(&o, loop, s, task->outputs, task->num_outputs);
      }
    }
  }
}
