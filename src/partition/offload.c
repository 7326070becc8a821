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

bool jpp__staged_backward_takes(const jpp_staged_t* staged, uint32_t loop, uint32_t stage,
                                uint32_t value) {
  const jpp_staged_loop_t* of = &staged->loops[loop];
  uint32_t weight = of->split_backward ? of->weight[stage] : JPP_NONE;
  return takes(staged, of->backward[stage], value) || takes(staged, weight, value);
}

// Offloads the values that the stage's backward takes.
static void offload_values(const offload_t* o, uint32_t loop, uint32_t stage,
                           const uint32_t* values, uint32_t count) {
  jpp_value_t* table = (jpp_value_t*)o->staged->values;  // the partition's own
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t value = values[i];
    bool is_index = table[value].producer == JPP_NONE;
    if (is_index || o->staged->scopes[value] != JPP_SCOPE_MICROBATCH) continue;
    if (o->value_bytes[value] < kFewBytes) continue;
    if (jpp__staged_backward_takes(o->staged, loop, stage, value)) {
      table[value].type.memory = JPP_MEMORY_PINNED_HOST;
    }
  }
}

void jpp__staged_offload(jpp_staged_t* staged, const bool* ranks,
                         const uint64_t* value_bytes) {
  offload_t o = {.staged = staged, .value_bytes = value_bytes};
  for (uint32_t l = 0; l < staged->graph->num_loops; ++l) {
    const jpp_staged_loop_t* loop = &staged->loops[l];
    if (!loop->has_backward) continue;
    for (uint32_t s = 0; s + 1 < loop->stages; ++s) {
      if (!ranks[loop->stage_rank[s]]) continue;
      for (uint32_t t = loop->forward[s]; t != JPP_NONE; t = staged->tasks[t].next_part) {
        const jpp_task_t* task = &staged->tasks[t];
        offload_values(&o, l, s, task->inputs, task->num_inputs);
        offload_values(&o, l, s, task->outputs, task->num_outputs);
      }
    }
  }
}
