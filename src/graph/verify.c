// Checks one op as it is added: inputs are defined before it and visible to it, and its
// types fit its kind. An op that passes needs no later check, so building stays linear.
#include "graph/graph_internal.h"

static const char* op_where(const jpp_op_t* op) { return op->where ? op->where : "?"; }

static bool is_loop_state_ok(const jpp_graph_t* graph, uint32_t value, uint32_t loop) {
  uint32_t home = graph->values[value].loop;
  return home == JPP_NONE || home == loop;
}

static jpp_status_t* verify_inputs(const jpp_graph_t* graph, uint32_t id) {
  const jpp_op_t* op = &graph->ops[id];
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (value >= op->first_output || value >= graph->num_values) {
      return jpp_status_make(JPP_GRAPH_ERROR,
                             "op %u (%s, %s): input %u is value %%%u, which "
                             "is not defined before it",
                             id, op->name, op_where(op), i, value);
    }
    if (!is_loop_state_ok(graph, value, op->loop)) {
      return jpp_status_make(JPP_GRAPH_ERROR,
                             "op %u (%s, %s): input %u is value %%%u of "
                             "a loop's body; only the loop's results are "
                             "visible outside",
                             id, op->name, op_where(op), i, value);
    }
  }
  return NULL;
}

static jpp_status_t* verify_identity_types(const jpp_graph_t* graph, uint32_t id) {
  const jpp_op_t* op = &graph->ops[id];
  if (op->num_inputs != op->num_outputs) {
    return jpp_status_make(
        JPP_GRAPH_ERROR,
        "op %u (%s, %s): a mark has %u inputs and %u outputs; expected "
        "as many outputs as inputs",
        id, op->name, op_where(op), op->num_inputs, op->num_outputs);
  }
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    if (!jpp_type_equal(&graph->values[op->inputs[i]].type,
                        &graph->values[op->first_output + i].type)) {
      return jpp_status_make(JPP_GRAPH_ERROR,
                             "op %u (%s, %s): output %u of a mark differs in "
                             "type from its input",
                             id, op->name, op_where(op), i);
    }
  }
  return NULL;
}

static jpp_status_t* verify_add_types(const jpp_graph_t* graph, uint32_t id) {
  const jpp_op_t* op = &graph->ops[id];
  bool ok = op->num_inputs == 2 && op->num_outputs == 1;
  for (uint32_t i = 0; ok && i < 2; ++i) {
    ok = jpp_type_equal(&graph->values[op->inputs[i]].type,
                        &graph->values[op->first_output].type);
  }
  if (ok) return NULL;
  return jpp_status_make(JPP_GRAPH_ERROR,
                         "op %u (%s, %s): a sum takes two values of its output's type",
                         id, op->name, op_where(op));
}

static jpp_status_t* verify_place(const jpp_graph_t* graph, uint32_t id) {
  const jpp_op_t* op = &graph->ops[id];
  bool ok = op->num_inputs >= 1 && op->num_outputs == 1 && op->loop == JPP_NONE;
  if (ok && jpp_type_equal(&graph->values[op->inputs[0]].type,
                           &graph->values[op->first_output].type)) {
    return NULL;
  }
  return jpp_status_make(
      JPP_GRAPH_ERROR,
      "op %u (%s, %s): @place belongs outside loops and returns its first input", id,
      op->name, op_where(op));
}

static jpp_status_t* verify_ranks(const jpp_graph_t* graph, const uint32_t* ranks,
                                  uint32_t count, const char* what, uint32_t index,
                                  const char* verb) {
  for (uint32_t i = 0; i < count; ++i) {
    if (i && ranks[i] <= ranks[i - 1]) {
      return jpp_status_make(JPP_GRAPH_ERROR,
                             "%s %u is %s on rank %u, then on %u; expected each rank "
                             "once, in their order",
                             what, index, verb, ranks[i - 1], ranks[i]);
    }
    if (graph->ranks && ranks[i] >= graph->ranks) {
      return jpp_status_make(JPP_GRAPH_ERROR,
                             "%s %u is %s on rank %u; expected one of %u ranks", what,
                             index, verb, ranks[i], graph->ranks);
    }
  }
  return NULL;
}

static jpp_status_t* verify_task(const jpp_graph_t* graph, uint32_t id) {
  const jpp_op_t* op = &graph->ops[id];
  if (op->loop != JPP_NONE) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "op %u (%s, %s): a @task belongs outside loops", id, op->name,
                           op_where(op));
  }
  if (!op->num_ranks) {
    return jpp_status_make(JPP_GRAPH_ERROR, "op %u (%s, %s): a @task runs on no rank", id,
                           op->name, op_where(op));
  }
  return verify_ranks(graph, op->ranks, op->num_ranks, "op", id, "run");
}

static jpp_status_t* verify_loop(const jpp_graph_t* graph, uint32_t id) {
  const jpp_op_t* op = &graph->ops[id];
  const jpp_loop_t* loop = &graph->loops[op->attr];
  for (uint32_t i = 0; i < loop->num_results; ++i) {
    uint32_t value = loop->results[i].value;
    if (value >= op->first_output || !is_loop_state_ok(graph, value, op->attr)) {
      return jpp_status_make(JPP_GRAPH_ERROR,
                             "loop %u (%s): result %u is value %%%u, which "
                             "its body does not make",
                             op->attr, op_where(op), i, value);
    }
    if (loop->results[i].partial && loop->results[i].reduce != JPP_REDUCE_ADD) {
      return jpp_status_make(
          JPP_GRAPH_ERROR,
          "loop %u (%s): result %u under '%s' is partial; only sums can "
          "be",
          op->attr, op_where(op), i, jpp_reduce_kind_name(loop->results[i].reduce));
    }
    jpp_memory_t memory = graph->values[op->first_output + i].type.memory;
    if (memory == JPP_MEMORY_DEVICE) memory = graph->values[value].type.memory;
    if (memory != JPP_MEMORY_DEVICE) {
      return jpp_status_make(
          JPP_GRAPH_ERROR,
          "loop %u (%s): result %u is in %s; expected device memory, in which a loop "
          "reduces its results: move it after the loop",
          op->attr, op_where(op), i, jpp_memory_name(memory));
    }
    if (loop->results[i].reduce > JPP_REDUCE_MAX) continue;
    if (!jpp_type_equal(&graph->values[value].type,
                        &graph->values[op->first_output + i].type)) {
      return jpp_status_make(
          JPP_GRAPH_ERROR,
          "loop %u (%s): result %u under '%s' differs in type from its value", op->attr,
          op_where(op), i, jpp_reduce_kind_name(loop->results[i].reduce));
    }
  }
  return NULL;
}

// Whether the output fits in the input, from the op's row on.
static bool copy_fits(const jpp_graph_t* graph, const jpp_op_t* op) {
  if (op->num_inputs < 1 || op->num_inputs > 2 || op->num_outputs != 1) return false;
  const jpp_type_t* from = &graph->values[op->inputs[0]].type;
  uint64_t elements = jpp_type_elements(&graph->values[op->first_output].type);
  uint64_t all = jpp_type_elements(from);
  if (!all || elements > all) return false;
  if (op->num_inputs == 2) {
    const jpp_type_t* index = &graph->values[op->inputs[1]].type;
    bool is_integer = index->dtype == JPP_DTYPE_S32 || index->dtype == JPP_DTYPE_U32;
    if (!is_integer || index->ndim || !from->ndim) return false;
  }
  if (!op->attr) return true;
  return from->ndim && op->attr <= (all - elements) / (all / (uint64_t)from->dims[0]);
}

static jpp_status_t* verify_copy(const jpp_graph_t* graph, uint32_t id) {
  const jpp_op_t* op = &graph->ops[id];
  if (op->kind == JPP_OP_CALL && copy_fits(graph, op)) return NULL;
  return jpp_status_make(JPP_GRAPH_ERROR,
                         "op %u (%s, %s): a copy from row %u on: expected an output that "
                         "fits in the rest of the first input, and at most a second "
                         "input, an s32[] or u32[]",
                         id, op->name, op_where(op), op->attr);
}

jpp_status_t* jpp__graph_verify_op(const jpp_graph_t* graph, uint32_t id) {
  const jpp_op_t* op = &graph->ops[id];
  JPP_RETURN_IF_ERROR(verify_inputs(graph, id));
  if (op->flags & JPP_OP_COPY) JPP_RETURN_IF_ERROR(verify_copy(graph, id));
  switch (op->kind) {
    case JPP_OP_CALL:
      return NULL;
    case JPP_OP_MARK:
    case JPP_OP_MARK_BACKWARD:
      return verify_identity_types(graph, id);
    case JPP_OP_ADD:
      return verify_add_types(graph, id);
    case JPP_OP_PLACE:
      return verify_place(graph, id);
    case JPP_OP_TASK:
      return verify_task(graph, id);
    case JPP_OP_LOOP:
      return verify_loop(graph, id);
    default:
      return jpp_status_make(JPP_GRAPH_ERROR,
                             "op %u (%s): only the planner makes kind %u", id, op->name,
                             op->kind);
  }
}

// Arguments and loop indices have no producer; an index belongs to its loop.
static bool is_arg(const jpp_graph_t* graph, uint32_t value) {
  return value < graph->num_values && graph->values[value].producer == JPP_NONE &&
         graph->values[value].loop == JPP_NONE;
}

static jpp_status_t* verify_next(const jpp_graph_t* graph, uint32_t index) {
  const jpp_graph_output_t* output = &graph->outputs[index];
  if (!is_arg(graph, output->next)) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "output %u is %%%u of the next step, which is not an argument",
                           index, output->next);
  }
  if (!jpp_type_equal(&graph->values[output->value].type,
                      &graph->values[output->next].type)) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "output %u is argument %%%u of the next step; expected one of "
                           "its own type",
                           index, output->next);
  }
  for (uint32_t i = 0; i < index; ++i) {
    if (graph->outputs[i].next != output->next) continue;
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "outputs %u and %u are both argument %%%u of the next step", i,
                           index, output->next);
  }
  return NULL;
}

jpp_status_t* jpp__graph_verify_arg(const jpp_graph_t* graph, uint32_t index) {
  const jpp_graph_arg_t* arg = &graph->args[index];
  return verify_ranks(graph, arg->ranks, arg->num_ranks, "argument", index, "given");
}

jpp_status_t* jpp__graph_verify_output(const jpp_graph_t* graph, uint32_t index) {
  uint32_t value = graph->outputs[index].value;
  if (value >= graph->num_values || graph->values[value].loop != JPP_NONE) {
    return jpp_status_make(
        JPP_GRAPH_ERROR,
        "output %u is value %%%u, which is not defined outside the loops", index, value);
  }
  const jpp_graph_output_t* output = &graph->outputs[index];
  JPP_RETURN_IF_ERROR(
      verify_ranks(graph, output->ranks, output->num_ranks, "output", index, "left"));
  return output->next == JPP_NONE ? NULL : verify_next(graph, index);
}
