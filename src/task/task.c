// One table with the properties of each kind of task.
#include "jaxpp/task.h"

#include <stddef.h>

typedef struct kind_info {
  const char* name;
  uint16_t latency;
  bool forward, backward, weight;  // the parts of a stage's cost that the task takes
} kind_info_t;

static const kind_info_t kKinds[] = {
    [JPP_TASK_IDLE] = {.name = "idle"},
    [JPP_TASK_FWD] = {.name = "fwd", .latency = 1, .forward = true},
    [JPP_TASK_BWD] = {.name = "bwd", .latency = 2, .backward = true, .weight = true},
    [JPP_TASK_BWD_I] = {.name = "bwd_i", .latency = 1, .backward = true},
    [JPP_TASK_BWD_W] = {.name = "bwd_w", .latency = 1, .weight = true},
    [JPP_TASK_OUTER] = {.name = "outer"},
};
_Static_assert(sizeof(kKinds) / sizeof(*kKinds) == JPP_TASK_KIND_COUNT,
               "a row for each kind");

static const kind_info_t* find_kind(jpp_task_kind_t kind) {
  return (unsigned)kind < JPP_TASK_KIND_COUNT ? &kKinds[kind] : NULL;
}

const char* jpp_task_kind_name(jpp_task_kind_t kind) {
  const kind_info_t* info = find_kind(kind);
  return info ? info->name : NULL;
}

uint16_t jpp_task_default_latency(jpp_task_kind_t kind) {
  const kind_info_t* info = find_kind(kind);
  return info ? info->latency : 0;
}

double jpp_task_cost(const jpp_cost_t* cost, jpp_task_kind_t kind) {
  const kind_info_t* info = find_kind(kind);
  if (!info) return 0;
  double parts = 0;
  if (info->forward) parts += cost->forward;
  if (info->backward) parts += cost->backward;
  if (info->weight) parts += cost->weight;
  return parts;
}
