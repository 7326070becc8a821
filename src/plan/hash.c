// Hashes the planner's input and its results, each part separately, so that an error can
// name the part that differs.
#include "base/hash.h"

#include <string.h>

#include "jaxpp/plan.h"

// NULL and "" have different hashes.
static uint64_t hash_text(uint64_t hash, const char* text) {
  hash = jpp__hash_u64(hash, text ? strlen(text) : UINT64_MAX);
  return text ? jpp__hash_bytes(hash, text, strlen(text)) : hash;
}

static uint64_t hash_ids(uint64_t hash, const uint32_t* ids, uint32_t count) {
  hash = jpp__hash_u64(hash, count);
  for (uint32_t i = 0; i < count; ++i) hash = jpp__hash_u64(hash, ids[i]);
  return hash;
}

// --- The planner's input -------------------------------------------------------

static uint64_t hash_type(uint64_t hash, const jpp_type_t* type) {
  hash = hash_text(hash, jpp_dtype_name(type->dtype));
  hash = jpp__hash_u64(hash, type->ndim);
  for (uint32_t i = 0; i < type->ndim; ++i) {
    hash = jpp__hash_u64(hash, (uint64_t)type->dims[i]);
  }
  return type->memory ? hash_text(hash, jpp_memory_name(type->memory)) : hash;
}

static uint64_t hash_arguments(const jpp_graph_t* graph) {
  uint64_t hash = jpp__hash_u64(JPP_HASH_START, graph->num_args);
  for (uint32_t a = 0; a < graph->num_args; ++a) {
    const jpp_value_t* value = &graph->values[graph->args[a].value];
    hash = hash_type(hash, &value->type);
    hash = hash_text(hash, value->name);
    hash = jpp__hash_u64(hash, graph->args[a].donated);
    if (graph->args[a].num_ranks) {
      hash = hash_ids(hash, graph->args[a].ranks, graph->args[a].num_ranks);
    }
  }
  hash = jpp__hash_u64(hash, graph->num_outputs);
  for (uint32_t o = 0; o < graph->num_outputs; ++o) {
    hash = hash_type(hash, &graph->values[graph->outputs[o].value].type);
  }
  return hash;
}

// An op's name is hashed if the op is opaque to the planner.
static uint64_t hash_op(uint64_t hash, const jpp_op_t* op) {
  hash = hash_text(hash, jpp_op_kind_name((jpp_op_kind_t)op->kind));
  if (op->kind == JPP_OP_CALL || op->kind == JPP_OP_TASK)
    hash = hash_text(hash, op->name);
  hash = jpp__hash_u64(hash, op->flags);
  hash = jpp__hash_u64(hash, op->attr);
  hash = jpp__hash_u64(hash, op->loop);
  hash = hash_ids(hash, op->inputs, op->num_inputs);
  hash = jpp__hash_u64(hash, op->first_output);
  if (op->num_ranks) hash = hash_ids(hash, op->ranks, op->num_ranks);
  return jpp__hash_u64(hash, op->num_outputs);
}

static uint64_t hash_loop(uint64_t hash, const jpp_loop_t* loop) {
  hash = jpp__hash_u64(hash, loop->op);
  hash = jpp__hash_u64(hash, loop->microbatches);
  hash = jpp__hash_u64(hash, loop->index);
  hash = jpp__hash_u64(hash, loop->num_results);
  for (uint32_t k = 0; k < loop->num_results; ++k) {
    hash = jpp__hash_u64(hash, loop->results[k].reduce);
    if (loop->results[k].partial) hash = jpp__hash_u64(hash, JPP_NONE);
    hash = jpp__hash_u64(hash, loop->results[k].value);
  }
  return hash;
}

static uint64_t hash_graph(const jpp_graph_t* graph) {
  uint64_t hash = jpp__hash_u64(JPP_HASH_START, graph->num_values);
  for (uint32_t v = 0; v < graph->num_values; ++v) {
    hash = hash_type(hash, &graph->values[v].type);
  }
  hash = jpp__hash_u64(hash, graph->num_ops);
  for (uint32_t i = 0; i < graph->num_ops; ++i) hash = hash_op(hash, &graph->ops[i]);
  for (uint32_t l = 0; l < graph->num_loops; ++l) {
    hash = hash_loop(hash, &graph->loops[l]);
  }
  for (uint32_t o = 0; o < graph->num_outputs; ++o) {
    hash = jpp__hash_u64(hash, graph->outputs[o].value);
  }
  return hash;
}

// --- Schedules ------------------------------------------------------------------------

static uint64_t hash_schedule(uint64_t hash, const jpp_schedule_t* schedule) {
  hash = jpp__hash_u64(hash, schedule->microbatches);
  hash = hash_ids(hash, schedule->stage_rank, schedule->stages);
  hash = jpp__hash_u64(hash, schedule->ranks);
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    const jpp_schedule_row_t* row = &schedule->rows[r];
    hash = jpp__hash_u64(hash, row->count);
    for (uint32_t i = 0; i < row->count; ++i) {
      const jpp_schedule_task_t* task = &row->tasks[i];
      hash = hash_text(hash, jpp_task_kind_name((jpp_task_kind_t)task->kind));
      hash = jpp__hash_u64(hash, task->joins_next);
      hash = jpp__hash_u64(hash, task->latency);
      hash = jpp__hash_u64(hash, task->stage);
      hash = jpp__hash_u64(hash, task->microbatch);
    }
  }
  return hash;
}

static uint64_t hash_schedules(const jpp_planned_t* planned) {
  uint64_t hash = jpp__hash_u64(JPP_HASH_START, planned->graph->num_loops);
  for (uint32_t l = 0; l < planned->graph->num_loops; ++l) {
    hash = hash_schedule(hash, planned->schedules[l]);
  }
  return hash;
}

// --- The planner's results ------------------------------------------------------------

static uint64_t hash_task(uint64_t hash, const jpp_plan_t* plan, uint32_t id) {
  const jpp_task_t* task = &plan->staged->tasks[id];
  hash = hash_text(hash, task->name);
  hash = jpp__hash_u64(hash, task->rank);
  hash = hash_ids(hash, task->inputs, task->num_inputs);
  hash = hash_ids(hash, task->outputs, task->num_outputs);
  hash = hash_ids(hash, plan->bindings[id].donated_to, task->num_inputs);
  hash = jpp__hash_u64(hash, task->num_ops);
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    hash = hash_op(hash, &plan->staged->ops[task->ops[i]]);
  }
  return hash;
}

static uint64_t hash_instr(uint64_t hash, const jpp_program_t* program,
                           const jpp_instr_t* instr) {
  hash = hash_text(hash, jpp_instr_kind_name((jpp_instr_kind_t)instr->kind));
  hash = jpp__hash_u64(hash, instr->target);
  hash = jpp__hash_u64(hash, instr->microbatch);
  hash = jpp__hash_u64(hash, instr->num_args);
  return hash_ids(hash, program->operands + instr->first_operand,
                  instr->num_args + instr->num_results);
}

static uint64_t hash_program(uint64_t hash, const jpp_program_t* program) {
  hash = jpp__hash_u64(hash, program->num_registers);
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    const jpp_program_input_t* input = &program->inputs[i];
    uint32_t ids[] = {input->reg, input->arg, input->owned};
    hash = hash_ids(hash, ids, 3);
  }
  for (uint32_t i = 0; i < program->num_constants; ++i) {
    uint32_t ids[] = {program->constants[i].reg, program->constants[i].microbatch};
    hash = hash_ids(hash, ids, 2);
  }
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    const jpp_program_output_t* output = &program->outputs[i];
    uint32_t ids[] = {output->reg, output->output, output->copy};
    hash = hash_ids(hash, ids, 3);
  }
  hash = jpp__hash_u64(hash, program->num_instrs);
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    hash = hash_instr(hash, program, &program->instrs[i]);
  }
  hash = jpp__hash_u64(hash, program->peak_bytes);
  if (program->peak_host_bytes) hash = jpp__hash_u64(hash, program->peak_host_bytes);
  return jpp__hash_u64(hash, program->reserved_bytes);
}

static uint64_t hash_plan(const jpp_plan_t* plan) {
  uint64_t hash = jpp__hash_u64(JPP_HASH_START, plan->ranks);
  hash = jpp__hash_u64(hash, plan->staged->num_tasks);
  for (uint32_t t = 0; t < plan->staged->num_tasks; ++t) hash = hash_task(hash, plan, t);
  hash = jpp__hash_u64(hash, plan->staged->num_values);
  for (uint32_t v = 0; v < plan->staged->num_values; ++v) {
    hash = jpp__hash_u64(hash, plan->value_bytes[v]);
  }
  for (uint32_t i = 0; i < plan->num_channels; ++i) {
    const jpp_plan_channel_t* channel = &plan->channels[i];
    uint32_t ids[] = {channel->src, channel->dst, channel->slots, channel->messages};
    hash = jpp__hash_u64(hash_ids(hash, ids, 4), channel->max_bytes);
  }
  for (uint32_t r = 0; r < plan->ranks; ++r)
    hash = hash_program(hash, &plan->programs[r]);
  return hash;
}

// --- All ------------------------------------------------------------------------------

void jpp_planned_hash(const jpp_planned_t* planned, jpp_plan_hashes_t* out_hashes) {
  *out_hashes = (jpp_plan_hashes_t){.arguments = hash_arguments(planned->graph),
                                    .graph = hash_graph(planned->graph),
                                    .schedule = hash_schedules(planned),
                                    .program = hash_plan(planned->plan)};
}

const char* jpp_plan_hashes_difference(const jpp_plan_hashes_t* a,
                                       const jpp_plan_hashes_t* b) {
  if (a->arguments != b->arguments) return "arguments";
  if (a->graph != b->graph) return "graph";
  if (a->schedule != b->schedule) return "schedule";
  return a->program != b->program ? "program" : NULL;
}
