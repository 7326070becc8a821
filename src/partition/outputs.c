// Finds the outputs of each task: values that another task takes, or that the step
// returns.
#include "partition/partitioner.h"

typedef struct finder {
  jpp_partitioner_t* p;
  uint64_t* taken;  // [values * words] ranks on which a task takes the value
  bool* is_output;  // [values] outputs of the step
  jpp_u32_vec_t outputs;
} finder_t;

static uint64_t* taken_at(const finder_t* f, uint32_t value) {
  return f->taken + (size_t)value * f->p->words;
}

// Tasks that repeat each other have the same outputs, even if only some of their ranks
// need them.
static bool hands_out(const finder_t* f, const jpp_task_t* task, uint32_t op,
                      uint32_t value) {
  const jpp_partitioner_t* p = f->p;
  bool taken = jpp__ranks_first(taken_at(f, value), p->words) != JPP_NONE;
  if (task->kind == JPP_TASK_OUTER) return taken || f->is_output[value];
  bool cloned = op < p->graph->num_ops && p->segment[op] == JPP_SEGMENT_CLONE;
  if (cloned) {
    uint32_t by = p->handed_by[op];
    return taken && by != JPP_NONE && task == &p->tasks.data[by];
  }
  return taken || p->ops.data[op].kind == JPP_OP_ACCUMULATE;
}

static jpp_status_t* find_task_outputs(finder_t* f, jpp_task_t* task) {
  f->outputs.count = 0;
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    const jpp_op_t* op = jpp__task_op(f->p, task, i);
    for (uint32_t k = 0; k < op->num_outputs; ++k) {
      uint32_t value = op->first_output + k;
      if (!hands_out(f, task, task->ops[i], value)) continue;
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&f->outputs, value));
    }
  }
  task->num_outputs = (uint32_t)f->outputs.count;
  return JPP_VEC_TO_ARENA(&f->outputs, f->p->arena, &task->outputs);
}

static jpp_status_t* find_all_outputs(finder_t* f) {
  jpp_partitioner_t* p = f->p;
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&p->scratch, p->values.count * p->words, &f->taken));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, p->values.count, &f->is_output));
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    f->is_output[p->alias[p->graph->outputs[i].value]] = true;
  }
  for (size_t t = 0; t < p->tasks.count; ++t) {
    const jpp_task_t* task = &p->tasks.data[t];
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      jpp__ranks_add(taken_at(f, task->inputs[i]), task->rank);
    }
  }
  for (size_t i = 0; i < p->accumulators.count; ++i) {
    const jpp_accumulator_t* acc = &p->accumulators.data[i];
    jpp__ranks_add(taken_at(f, acc->init), p->tasks.data[acc->task].rank);
  }
  for (size_t t = 0; t < p->tasks.count; ++t) {
    JPP_RETURN_IF_ERROR(find_task_outputs(f, &p->tasks.data[t]));
  }
  return NULL;
}

jpp_status_t* jpp__partition_find_outputs(jpp_partitioner_t* p) {
  finder_t finder = {.p = p};
  jpp_status_t* status = find_all_outputs(&finder);
  jpp_vec_deinit(&finder.outputs);
  return status;
}
