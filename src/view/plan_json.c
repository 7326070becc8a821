// Each part of a plan as JSON. A value that could not be allocated is NULL, and so is
// every value that would contain it; therefore only the last value is checked.
#include "base/json.h"
#include "base/null.h"
#include "jaxpp/view.h"
#include "view/planned.h"

static json_t* type_json(const jpp_type_t* type) {
  json_t* dims = json_array();
  for (uint32_t i = 0; i < type->ndim; ++i) {
    jpp__json_append(&dims, json_integer(type->dims[i]));
  }
  return json_pack("{s:s, s:o}", "dtype", jpp_dtype_name(type->dtype), "shape", dims);
}

static json_t* op_json(const jpp_op_t* op) {
  return json_pack(
      "{s:s, s:o, s:I, s:o, s:o, s:I, s:I, s:b, s:b, s:b, s:b, s:f, s:o}", "kind",
      jpp_op_kind_name((jpp_op_kind_t)op->kind), "name",
      jpp__json_text(op->name ? op->name : ""), "attr", (json_int_t)op->attr, "loop",
      jpp__json_id(op->loop), "inputs", jpp__json_ids(op->inputs, op->num_inputs),
      "first_output", (json_int_t)op->first_output, "num_outputs",
      (json_int_t)op->num_outputs, "cheap", (op->flags & JPP_OP_CHEAP) != 0, "backward",
      (op->flags & JPP_OP_BACKWARD) != 0, "effect", (op->flags & JPP_OP_EFFECT) != 0,
      "copies", (op->flags & JPP_OP_COPY) != 0, "cost", (double)op->cost, "where",
      jpp__json_text(op->where));
}

static json_t* ops_json(const jpp_op_t* ops, uint32_t count) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < count; ++i) jpp__json_append(&list, op_json(&ops[i]));
  return list;
}

static json_t* values_json(const jpp_value_t* values, uint32_t count) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < count; ++i) {
    const jpp_value_t* value = &values[i];
    jpp__json_append(
        &list, json_pack("{s:o, s:I, s:o, s:o, s:o}", "type", type_json(&value->type),
                         "bytes", (json_int_t)value->bytes, "producer",
                         jpp__json_id(value->producer), "loop", jpp__json_id(value->loop),
                         "name", jpp__json_text(value->name)));
  }
  return list;
}

// --- Graph ----------------------------------------------------------------------------

static json_t* loop_json(const jpp_loop_t* loop) {
  json_t* results = json_array();
  for (uint32_t i = 0; i < loop->num_results; ++i) {
    const char* reduce = jpp_reduce_kind_name((jpp_reduce_kind_t)loop->results[i].reduce);
    jpp__json_append(&results, json_pack("{s:s, s:b, s:I}", "reduce", reduce, "partial",
                                         loop->results[i].partial, "value",
                                         (json_int_t)loop->results[i].value));
  }
  return json_pack("{s:I, s:I, s:I, s:I, s:o, s:I, s:o, s:o}", "op", (json_int_t)loop->op,
                   "microbatches", (json_int_t)loop->microbatches, "index",
                   (json_int_t)loop->index, "first_op", (json_int_t)loop->first_op,
                   "results", results, "stages", (json_int_t)loop->stages, "schedule",
                   jpp__json_text(loop->schedule), "where", jpp__json_text(loop->where));
}

static json_t* graph_json(const jpp_planned_t* planned) {
  const jpp_graph_t* graph = planned->graph;
  json_t *loops = json_array(), *args = json_array(), *outputs = json_array();
  for (uint32_t i = 0; i < graph->num_loops; ++i) {
    jpp__json_append(&loops, loop_json(&graph->loops[i]));
  }
  for (uint32_t i = 0; i < graph->num_args; ++i) {
    jpp__json_append(&args,
                     json_pack("{s:I, s:b}", "value", (json_int_t)graph->args[i].value,
                               "donated", graph->args[i].donated));
  }
  for (uint32_t i = 0; i < graph->num_outputs; ++i) {
    jpp__json_append(&outputs,
                     json_pack("{s:I, s:o}", "value", (json_int_t)graph->outputs[i].value,
                               "name", jpp__json_text(graph->outputs[i].name)));
  }
  return json_pack("{s:o, s:I, s:o, s:o, s:o, s:o, s:o}", "name",
                   jpp__json_text(graph->name), "ranks", (json_int_t)graph->ranks,
                   "values", values_json(graph->values, graph->num_values), "ops",
                   ops_json(graph->ops, graph->num_ops), "loops", loops, "args", args,
                   "outputs", outputs);
}

// --- Schedule -------------------------------------------------------------------------

static json_t* schedule_json(const jpp_schedule_t* schedule) {
  json_t* rows = json_array();
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    jpp__json_append(&rows, jpp__schedule_row_json(&schedule->rows[r]));
  }
  return json_pack("{s:o, s:I, s:I, s:I, s:o, s:o}", "name",
                   jpp__json_text(schedule->name), "stages", (json_int_t)schedule->stages,
                   "ranks", (json_int_t)schedule->ranks, "microbatches",
                   (json_int_t)schedule->microbatches, "stage_rank",
                   jpp__json_ids(schedule->stage_rank, schedule->stages), "rows", rows);
}

static json_t* schedules_json(const jpp_planned_t* planned) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < planned->graph->num_loops; ++i) {
    jpp__json_append(&list, schedule_json(planned->schedules[i]));
  }
  return list;
}

// --- Partition ------------------------------------------------------------------------

static json_t* ranks_json(const jpp_staged_t* staged, jpp_rank_set_t ranks) {
  json_t* list = json_array();
  for (uint32_t r = 0; r < staged->ranks; ++r) {
    if (jpp_rank_set_has(ranks, r)) jpp__json_append(&list, json_integer(r));
  }
  return list;
}

static json_t* ends_json(const jpp_staged_t* staged, const jpp_staged_value_t* ends,
                         uint32_t count) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < count; ++i) {
    jpp__json_append(&list, json_pack("{s:I, s:o}", "value", (json_int_t)ends[i].value,
                                      "ranks", ranks_json(staged, ends[i].ranks)));
  }
  return list;
}

static json_t* task_json(const jpp_task_t* task) {
  return json_pack(
      "{s:o, s:s, s:I, s:o, s:o, s:I, s:o, s:o, s:o, s:f}", "name",
      jpp__json_text(task->name), "kind", jpp_task_kind_name((jpp_task_kind_t)task->kind),
      "rank", (json_int_t)task->rank, "loop", jpp__json_id(task->loop), "stage",
      jpp__json_id(task->stage), "phase", (json_int_t)task->phase, "ops",
      jpp__json_ids(task->ops, task->num_ops), "inputs",
      jpp__json_ids(task->inputs, task->num_inputs), "outputs",
      jpp__json_ids(task->outputs, task->num_outputs), "cost", (double)task->cost);
}

static json_t* accumulator_json(const jpp_accumulator_t* acc) {
  return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "loop", (json_int_t)acc->loop,
                   "result", (json_int_t)acc->result, "task", (json_int_t)acc->task,
                   "init", (json_int_t)acc->init, "state", (json_int_t)acc->state, "next",
                   (json_int_t)acc->next, "final", (json_int_t)acc->final);
}

static json_t* partition_json(const jpp_planned_t* planned) {
  const jpp_staged_t* staged = planned->staged;
  json_t *tasks = json_array(), *accumulators = json_array();
  for (uint32_t i = 0; i < staged->num_tasks; ++i) {
    jpp__json_append(&tasks, task_json(&staged->tasks[i]));
  }
  for (uint32_t i = 0; i < staged->num_accumulators; ++i) {
    jpp__json_append(&accumulators, accumulator_json(&staged->accumulators[i]));
  }
  return json_pack(
      "{s:I, s:o, s:o, s:o, s:o, s:o, s:o}", "ranks", (json_int_t)staged->ranks, "values",
      values_json(staged->values, staged->num_values), "ops",
      ops_json(staged->ops, staged->num_ops), "tasks", tasks, "accumulators",
      accumulators, "args", ends_json(staged, staged->args, staged->graph->num_args),
      "outputs", ends_json(staged, staged->outputs, staged->graph->num_outputs));
}

// --- Program --------------------------------------------------------------------------

static json_t* target_json(const jpp_instr_t* instr) {
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
    case JPP_INSTR_SEND:
    case JPP_INSTR_RECV:
      return json_integer(instr->target);
    case JPP_INSTR_MOVE:
      return json_string(jpp_memory_name((jpp_memory_t)instr->target));
    case JPP_INSTR_DELETE:
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return json_null();
}

static json_t* instr_json(const jpp_program_t* program, const jpp_instr_t* instr) {
  const uint32_t* operands = program->operands + instr->first_operand;
  return json_pack("{s:s, s:o, s:o, s:o, s:o, s:o}", "kind",
                   jpp_instr_kind_name((jpp_instr_kind_t)instr->kind), "target",
                   target_json(instr), "microbatch", jpp__json_id(instr->microbatch),
                   "args", jpp__json_ids(operands, instr->num_args), "results",
                   jpp__json_ids(operands + instr->num_args, instr->num_results),
                   "values",
                   jpp__json_ids(program->operand_values + instr->first_value,
                                 instr->num_args + instr->num_results));
}

static json_t* inputs_json(const jpp_program_t* program) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    const jpp_program_input_t* input = &program->inputs[i];
    jpp__json_append(
        &list, json_pack("{s:I, s:I, s:b}", "register", (json_int_t)input->reg, "arg",
                         (json_int_t)input->arg, "owned", input->owned));
  }
  return list;
}

static json_t* constants_json(const jpp_program_t* program) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < program->num_constants; ++i) {
    const jpp_program_constant_t* constant = &program->constants[i];
    jpp__json_append(&list, json_pack("{s:I, s:I}", "register", (json_int_t)constant->reg,
                                      "microbatch", (json_int_t)constant->microbatch));
  }
  return list;
}

static json_t* outputs_json(const jpp_program_t* program) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    const jpp_program_output_t* output = &program->outputs[i];
    jpp__json_append(
        &list, json_pack("{s:I, s:I, s:b}", "register", (json_int_t)output->reg, "output",
                         (json_int_t)output->output, "copy", output->copy));
  }
  return list;
}

static json_t* actor_json(const jpp_program_t* program) {
  json_t* instrs = json_array();
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    jpp__json_append(&instrs, instr_json(program, &program->instrs[i]));
  }
  return json_pack(
      "{s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o, s:o, s:o}", "rank",
      (json_int_t)program->rank, "registers", (json_int_t)program->num_registers,
      "peak_bytes", (json_int_t)program->peak_bytes, "peak_instruction",
      (json_int_t)program->peak_instr, "reserved_bytes",
      (json_int_t)program->reserved_bytes, "peak_host_bytes",
      (json_int_t)program->peak_host_bytes, "inputs", inputs_json(program), "constants",
      constants_json(program), "instructions", instrs, "outputs", outputs_json(program));
}

static json_t* bindings_json(const jpp_plan_t* plan) {
  json_t* list = json_array();
  for (uint32_t t = 0; t < plan->staged->num_tasks; ++t) {
    json_t* donated_to = json_array();
    for (uint32_t i = 0; i < plan->staged->tasks[t].num_inputs; ++i) {
      jpp__json_append(&donated_to, jpp__json_id(plan->bindings[t].donated_to[i]));
    }
    jpp__json_append(&list,
                     json_pack("{s:I, s:o}", "runs", (json_int_t)plan->bindings[t].runs,
                               "donated_to", donated_to));
  }
  return list;
}

static json_t* program_json(const jpp_planned_t* planned) {
  const jpp_plan_t* plan = planned->plan;
  json_t *channels = json_array(), *actors = json_array();
  for (uint32_t i = 0; i < plan->num_channels; ++i) {
    const jpp_plan_channel_t* channel = &plan->channels[i];
    jpp__json_append(
        &channels,
        json_pack("{s:I, s:I, s:I, s:I, s:I}", "src", (json_int_t)channel->src, "dst",
                  (json_int_t)channel->dst, "slots", (json_int_t)channel->slots,
                  "max_bytes", (json_int_t)channel->max_bytes, "messages",
                  (json_int_t)channel->messages));
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    jpp__json_append(&actors, actor_json(&plan->programs[r]));
  }
  return json_pack("{s:o, s:o, s:o}", "channels", channels, "actors", actors, "bindings",
                   bindings_json(plan));
}

// --- Check ----------------------------------------------------------------------------

// For each kind of bytes that the actor ever holds on a device, and for pinned host
// memory: the bytes before the first instruction and after each instruction.
static json_t* curve_json(const jpp_memory_point_t* points, uint32_t count) {
  json_t* curve = json_object();
  json_t* host = json_array();
  bool any_on_host = false;
  for (uint32_t i = 0; i < count; ++i) {
    any_on_host = any_on_host || points[i].host_bytes;
    jpp__json_append(&host, json_integer((json_int_t)points[i].host_bytes));
  }
  if (!any_on_host) {
    json_decref(host);
  } else if (json_object_set_new(curve, jpp_memory_name(JPP_MEMORY_PINNED_HOST), host)) {
    json_decref(curve);
    return NULL;
  }
  for (int k = 0; curve && k < JPP_BYTES_KIND_COUNT; ++k) {
    json_t* list = json_array();
    bool any = false;
    for (uint32_t i = 0; i < count; ++i) {
      any = any || points[i].bytes[k];
      jpp__json_append(&list, json_integer((json_int_t)points[i].bytes[k]));
    }
    if (!any) {
      json_decref(list);
    } else if (json_object_set_new(curve, jpp_bytes_kind_name((jpp_bytes_kind_t)k),
                                   list)) {
      json_decref(curve);
      curve = NULL;
    }
  }
  return curve;
}

static json_t* memory_json(const jpp_plan_t* plan, uint32_t rank) {
  uint32_t count = plan->programs[rank].num_instrs + 1;
  jpp_memory_point_t* points = NULL;
  json_t* curve = NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(count, &points);
  if (!status) status = jpp_check_memory_curve(plan, rank, count, points);
  if (!status) curve = curve_json(points, count);
  jpp_free(points);
  jpp_status_free(
      status);  // without a curve the result is NULL, which the caller reports
  return curve;
}

static json_t* checked_actor_json(const jpp_check_report_t* report, uint32_t rank) {
  const jpp_check_actor_t* actor = &report->actors[rank];
  json_t* kinds = json_object();
  for (int i = 0; i < JPP_BYTES_KIND_COUNT; ++i) {
    const char* name = jpp_bytes_kind_name((jpp_bytes_kind_t)i);
    if (!json_object_set_new(kinds, name,
                             json_integer((json_int_t)actor->bytes_at_peak[i])))
      continue;
    json_decref(kinds);
    return NULL;
  }
  return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:o, s:o}", "runs",
                   (json_int_t)actor->runs, "sends", (json_int_t)actor->sends, "recvs",
                   (json_int_t)actor->recvs, "deletes", (json_int_t)actor->deletes,
                   "moves", (json_int_t)actor->moves, "peak_host_bytes",
                   (json_int_t)actor->peak_host_bytes, "peak_bytes",
                   (json_int_t)actor->peak_bytes, "peak_instruction",
                   (json_int_t)actor->peak_instr, "bytes_at_peak", kinds, "curve",
                   memory_json(report->plan, rank));
}

static json_t* check_json(const jpp_planned_t* planned) {
  const jpp_check_report_t* report = planned->report;
  json_t *actors = json_array(), *channels = json_array();
  for (uint32_t r = 0; r < report->plan->ranks; ++r) {
    jpp__json_append(&actors, checked_actor_json(report, r));
  }
  for (uint32_t i = 0; i < report->plan->num_channels; ++i) {
    const jpp_check_channel_t* channel = &report->channels[i];
    jpp__json_append(
        &channels, json_pack("{s:I, s:I, s:I}", "messages", (json_int_t)channel->messages,
                             "bytes", (json_int_t)channel->bytes, "slots_needed",
                             (json_int_t)channel->slots_needed));
  }
  return json_pack("{s:o, s:o}", "actors", actors, "channels", channels);
}

// --- All ------------------------------------------------------------------------------

typedef json_t* (*part_json_t)(const jpp_planned_t* planned);

static const part_json_t kParts[JPP_PART_COUNT] = {
    [JPP_PART_GRAPH] = graph_json,         [JPP_PART_SCHEDULE] = schedules_json,
    [JPP_PART_PARTITION] = partition_json, [JPP_PART_PROGRAM] = program_json,
    [JPP_PART_CHECK] = check_json,
};

static json_t* all_json(const jpp_planned_t* planned) {
  json_t* all = json_object();
  for (int part = 0; all && part < JPP_PART_COUNT; ++part) {
    const char* name = jpp_plan_part_name((jpp_plan_part_t)part);
    if (!json_object_set_new(all, name, kParts[part](planned))) continue;
    json_decref(all);
    all = NULL;
  }
  return all;
}

jpp_status_t* jpp_planned_print_json(const jpp_planned_t* planned, jpp_plan_part_t part,
                                     char** out_text) {
  JPP_RETURN_IF_NULL(planned, out_text);
  *out_text = NULL;
  jpp_plan_part_t last = part < JPP_PART_COUNT ? part : JPP_PART_CHECK;
  JPP_RETURN_IF_ERROR(jpp__planned_expect(planned, last));
  jpp_str_t str = {0};
  json_t* value = part < JPP_PART_COUNT ? kParts[part](planned) : all_json(planned);
  jpp__json_take(value, JSON_INDENT(1), &str);
  jpp_str_append(&str, "\n");
  return jpp_str_finish(&str, out_text);
}
