// The stage tasks of a loop: created empty, then filled with their ops and inputs once
// every op's stage is known.
#include <stdlib.h>

#include "base/str.h"
#include "partition/partitioner.h"
#include "task/ids.h"

static jpp_status_t* add_task(jpp_partitioner_t* p, jpp_task_kind_t kind, uint32_t loop,
                              uint32_t stage, uint32_t* out_task) {
  *out_task = (uint32_t)p->tasks.count;
  jpp_task_t task = {.kind = (uint8_t)kind,
                     .loop = loop,
                     .stage = stage,
                     .phase = loop,
                     .repeats = *out_task,
                     .next_part = JPP_NONE,
                     .pattern = JPP_NONE};
  task.rank = p->loops[loop].stage_rank[stage];
  jpp_str_t name = {0};
  if (loop) jpp_str_appendf(&name, "loop%u_", loop);
  jpp_str_appendf(&name, "%s_%u", jpp_task_kind_name(kind), stage);
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&name, &text));
  jpp_status_t* status = jpp__arena_strdup(p->arena, text, &task.name);
  jpp_free(text);
  JPP_RETURN_IF_ERROR(status);
  return JPP_VEC_PUSH(&p->tasks, task);
}

static jpp_status_t* add_tasks(jpp_partitioner_t* p, jpp_task_kind_t kind, uint32_t loop,
                               const uint32_t** out_tasks) {
  uint32_t stages = p->loops[loop].stages;
  uint32_t* tasks = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, stages, &tasks));
  for (uint32_t s = 0; s < stages; ++s) {
    JPP_RETURN_IF_ERROR(add_task(p, kind, loop, s, &tasks[s]));
  }
  *out_tasks = tasks;
  return NULL;
}

jpp_status_t* jpp__partition_make_tasks(jpp_partitioner_t* p, uint32_t loop) {
  const jpp_loop_placement_t* placement = &p->options->loops[loop];
  jpp_staged_loop_t* staged = &p->loops[loop];
  staged->split_backward = placement->split_backward && staged->has_backward;
  JPP_RETURN_IF_ERROR(jpp__arena_copy(p->arena, placement->stage_rank,
                                      staged->stages * sizeof(*placement->stage_rank),
                                      (void**)&staged->stage_rank));
  JPP_RETURN_IF_ERROR(add_tasks(p, JPP_TASK_FWD, loop, &staged->forward));
  if (!staged->has_backward) return NULL;
  jpp_task_kind_t kind = staged->split_backward ? JPP_TASK_BWD_I : JPP_TASK_BWD;
  JPP_RETURN_IF_ERROR(add_tasks(p, kind, loop, &staged->backward));
  if (!staged->split_backward) return NULL;
  return add_tasks(p, JPP_TASK_BWD_W, loop, &staged->weight);
}

uint32_t jpp__partition_task_of(const jpp_partitioner_t* p, uint32_t op) {
  uint32_t segment = p->segment[op];
  if (!jpp__segment_is_stage(segment)) return JPP_NONE;
  const jpp_staged_loop_t* loop = &p->loops[p->ops.data[op].loop];
  if (segment < loop->stages) return loop->forward[segment];
  uint32_t stage = jpp__segment_backward(loop->stages, segment);
  if (loop->split_backward && p->weight_part[op]) return loop->weight[stage];
  return loop->backward[stage];
}

// --- Ops and inputs -------------------------------------------------------------------

typedef struct filler {
  jpp_partitioner_t* p;
  uint32_t* first;       // [tasks + 1] where each task's ops begin in `own`
  uint32_t* own;         // op ids, grouped by task
  uint32_t* op_task;     // [ops] the last task to which it was added; JPP_NONE: none yet
  uint32_t* value_task;  // [values] the last task of which it became an input
  jpp_u32_vec_t ops;
  jpp_u32_vec_t inputs;
} filler_t;

// A counting sort by task of the ops that stage tasks run; gather_ops() adds the cheap
// ops, which several tasks may need.
static jpp_status_t* group_ops_by_task(filler_t* f) {
  jpp_partitioner_t* p = f->p;
  size_t ops = p->ops.count, tasks = p->tasks.count;
  uint32_t* task_of = NULL;  // [ops]
  uint32_t* next = NULL;     // [tasks] the index in `own` of the task's next op
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, ops, &task_of));
  for (uint32_t id = 0; id < p->graph->num_ops; ++id) {
    task_of[id] = jpp__partition_task_of(p, id);
  }
  for (size_t i = 0; i < p->made.count; ++i) {
    task_of[p->made.data[i].op] = p->made.data[i].task;
  }
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, tasks + 1, &f->first));
  for (size_t id = 0; id < ops; ++id) {
    if (task_of[id] != JPP_NONE) ++f->first[task_of[id] + 1];
  }
  for (size_t t = 0; t < tasks; ++t) f->first[t + 1] += f->first[t];
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, f->first[tasks], &f->own));
  JPP_RETURN_IF_ERROR(
      jpp__arena_copy(&p->scratch, f->first, tasks * sizeof(*next), (void**)&next));
  for (uint32_t id = 0; id < ops; ++id) {
    if (task_of[id] != JPP_NONE) f->own[next[task_of[id]]++] = id;
  }
  return NULL;
}

static bool is_clone(const jpp_partitioner_t* p, uint32_t op) {
  return op < p->graph->num_ops && p->segment[op] == JPP_SEGMENT_CLONE;
}

// Collects the task's own ops and, transitively, the cheap ops that they need.
static jpp_status_t* gather_ops(filler_t* f, uint32_t task) {
  f->ops.count = 0;
  for (uint32_t i = f->first[task]; i < f->first[task + 1]; ++i) {
    f->op_task[f->own[i]] = task;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&f->ops, f->own[i]));
  }
  for (size_t at = 0; at < f->ops.count; ++at) {
    const jpp_op_t* op = &f->p->ops.data[f->ops.data[at]];
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      uint32_t producer = f->p->values.data[op->inputs[i]].producer;
      if (producer == JPP_NONE || f->op_task[producer] == task) continue;
      if (!is_clone(f->p, producer)) continue;
      f->op_task[producer] = task;
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&f->ops, producer));
    }
  }
  if (f->ops.count) qsort(f->ops.data, f->ops.count, sizeof(uint32_t), jpp__ids_compare);
  return NULL;
}

static jpp_status_t* gather_inputs(filler_t* f, uint32_t task) {
  f->inputs.count = 0;
  for (size_t at = 0; at < f->ops.count; ++at) {
    const jpp_op_t* op = &f->p->ops.data[f->ops.data[at]];
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      uint32_t value = op->inputs[i];
      uint32_t producer = f->p->values.data[value].producer;
      if (producer != JPP_NONE && f->op_task[producer] == task) continue;
      if (f->value_task[value] == task) continue;
      f->value_task[value] = task;
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&f->inputs, value));
    }
  }
  return NULL;
}

static jpp_status_t* fill_task(filler_t* f, uint32_t id) {
  jpp_partitioner_t* p = f->p;
  JPP_RETURN_IF_ERROR(gather_ops(f, id));
  JPP_RETURN_IF_ERROR(gather_inputs(f, id));
  jpp_task_t* task = &p->tasks.data[id];
  for (size_t i = 0; i < f->ops.count; ++i)
    task->cost += p->ops.data[f->ops.data[i]].cost;
  task->num_ops = (uint32_t)f->ops.count;
  task->num_inputs = (uint32_t)f->inputs.count;
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&f->ops, p->arena, &task->ops));
  return JPP_VEC_TO_ARENA(&f->inputs, p->arena, &task->inputs);
}

static jpp_status_t* fill_stage_tasks(filler_t* f) {
  jpp_partitioner_t* p = f->p;
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, p->ops.count, &f->op_task));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, p->values.count, &f->value_task));
  JPP_RETURN_IF_ERROR(group_ops_by_task(f));
  for (uint32_t t = 0; t < p->tasks.count; ++t) JPP_RETURN_IF_ERROR(fill_task(f, t));
  return NULL;
}

jpp_status_t* jpp__partition_fill_tasks(jpp_partitioner_t* p) {
  filler_t filler = {.p = p};
  jpp_status_t* status = fill_stage_tasks(&filler);
  jpp_vec_deinit(&filler.ops);
  jpp_vec_deinit(&filler.inputs);
  return status;
}
