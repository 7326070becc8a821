// Prints a graph as the text that the parser reads; printing a parsed text gives the same
// text again.
#include "graph/print.h"

#include "base/null.h"
#include "base/str.h"
#include "base/vec.h"
#include "graph/graph_internal.h"

void jpp__type_append(jpp_str_t* str, const jpp_type_t* type) {
  jpp_str_appendf(str, "%s[", jpp_dtype_name(type->dtype));
  for (uint32_t i = 0; i < type->ndim; ++i) {
    jpp_str_appendf(str, "%s%lld", i ? "," : "", (long long)type->dims[i]);
  }
  jpp_str_append(str, "]");
  if (type->shards > 1) jpp_str_appendf(str, "/%u", type->shards);
  if (type->memory) jpp_str_appendf(str, "@%s", jpp_memory_name(type->memory));
}

static void append_typed_value(jpp_str_t* str, const jpp_value_t* values, uint32_t id) {
  jpp_str_appendf(str, "%%%u:", id);
  jpp__type_append(str, &values[id].type);
}

// Appends `before` and the ranks; nothing if there are none.
static void append_ranks(jpp_str_t* str, const char* before, const uint32_t* ranks,
                         uint32_t count) {
  for (uint32_t k = 0; k < count; ++k) {
    jpp_str_appendf(str, "%s%u", k ? ", " : before, ranks[k]);
  }
}

static void append_op_head(jpp_str_t* str, const jpp_op_t* op) {
  switch ((jpp_op_kind_t)op->kind) {
    case JPP_OP_MARK:
      jpp_str_appendf(str, "@mark %u ", op->attr);
      return;
    case JPP_OP_MARK_BACKWARD:
      jpp_str_appendf(str, "@mark_backward %u ", op->attr);
      return;
    case JPP_OP_ADD:
      jpp_str_append(str, "@add");
      return;
    case JPP_OP_PLACE:
      jpp_str_append(str, "@place");
      return;
    case JPP_OP_TASK:
      jpp_str_append(str, "@task");
      append_ranks(str, " ", op->ranks, op->num_ranks);
      jpp_str_appendf(str, " %s", op->name);
      return;
    case JPP_OP_INIT:
      jpp_str_appendf(str, "@init %u ", op->attr);
      return;
    case JPP_OP_ACCUMULATE:
      jpp_str_appendf(str, "@accumulate %u ", op->attr);
      return;
    case JPP_OP_SUM:
      jpp_str_append(str, "@sum");
      return;
    case JPP_OP_PACK:
      jpp_str_append(str, "@pack");
      return;
    case JPP_OP_UNPACK:
      jpp_str_appendf(str, "@unpack %u ", op->attr);
      return;
    case JPP_OP_REPEAT:
      jpp_str_appendf(str, "@repeat %u ", op->attr);
      return;
    case JPP_OP_CALL:
    case JPP_OP_LOOP:
    case JPP_OP_KIND_COUNT:
      jpp_str_append(str, op->name);
  }
}

void jpp__op_append(jpp_str_t* str, const jpp_value_t* values, const jpp_op_t* op) {
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    if (i) jpp_str_append(str, ", ");
    append_typed_value(str, values, op->first_output + i);
  }
  jpp_str_append(str, op->num_outputs ? " = " : "= ");
  append_op_head(str, op);
  jpp_str_append(str, "(");
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    jpp_str_appendf(str, "%s%%%u", i ? ", " : "", op->inputs[i]);
  }
  jpp_str_append(str, ")");
  if (op->flags & JPP_OP_CHEAP) jpp_str_append(str, " cheap");
  if (op->flags & JPP_OP_BACKWARD) jpp_str_append(str, " backward");
  if (op->flags & JPP_OP_EFFECT) jpp_str_append(str, " effect");
  if (op->flags & JPP_OP_ZEROS) jpp_str_append(str, " zeros");
  if (op->flags & JPP_OP_BODY) jpp_str_append(str, " body");
  if (op->flags & JPP_OP_LINEAR) jpp_str_append(str, " linear");
  if (op->flags & JPP_OP_COPY) jpp_str_appendf(str, " copies %u", op->attr);
  if (op->code) jpp_str_appendf(str, " code %u", op->code);
  if (op->cost > 0) jpp_str_appendf(str, " cost %.9g", (double)op->cost);
  if (op->where) {
    jpp_str_append(str, " at ");
    jpp__str_append_quoted(str, op->where);
  }
  jpp_str_append(str, "\n");
}

static void append_loop_head(jpp_str_t* str, const jpp_loop_t* loop) {
  jpp_str_appendf(str, "loop microbatches %u", loop->microbatches);
  if (loop->stages) jpp_str_appendf(str, " stages %u", loop->stages);
  if (loop->schedule) {
    jpp_str_append(str, " schedule ");
    jpp__str_append_quoted(str, loop->schedule);
  }
  jpp_str_appendf(str, " index %%%u", loop->index);
  if (loop->where) {
    jpp_str_append(str, " at ");
    jpp__str_append_quoted(str, loop->where);
  }
  jpp_str_append(str, " {\n");
}

static void append_loop_tail(jpp_str_t* str, const jpp_graph_t* graph,
                             const jpp_loop_t* loop) {
  uint32_t first = graph->ops[loop->op].first_output;
  jpp_str_append(str, "}");
  for (uint32_t i = 0; i < loop->num_results; ++i) {
    jpp_str_append(str, i ? ",\n  " : " ");
    append_typed_value(str, graph->values, first + i);
    const jpp_loop_result_t* result = &loop->results[i];
    jpp_str_appendf(str, " = %s%s %%%u", jpp_reduce_kind_name(result->reduce),
                    result->partial ? " partial" : "", result->value);
  }
  jpp_str_append(str, "\n");
}

static void append_args(jpp_str_t* str, const jpp_graph_t* graph) {
  for (uint32_t i = 0; i < graph->num_args; ++i) {
    const jpp_value_t* value = &graph->values[graph->args[i].value];
    jpp_str_appendf(str, "arg %%%u ", graph->args[i].value);
    jpp__type_append(str, &value->type);
    if (value->name) {
      jpp_str_append(str, " ");
      jpp__str_append_quoted(str, value->name);
    }
    append_ranks(str, " on ", graph->args[i].ranks, graph->args[i].num_ranks);
    jpp_str_append(str, graph->args[i].donated ? " donated\n" : "\n");
  }
}

static void append_ops(jpp_str_t* str, const jpp_graph_t* graph) {
  uint32_t next_loop = 0;
  for (uint32_t i = 0; i < graph->num_ops; ++i) {
    if (next_loop < graph->num_loops && graph->loops[next_loop].first_op == i) {
      append_loop_head(str, &graph->loops[next_loop++]);
    }
    const jpp_op_t* op = &graph->ops[i];
    if (op->kind == JPP_OP_LOOP) {
      append_loop_tail(str, graph, &graph->loops[op->attr]);
      continue;
    }
    if (op->loop != JPP_NONE) jpp_str_append(str, "  ");
    jpp__op_append(str, graph->values, op);
  }
}

static void append_outputs(jpp_str_t* str, const jpp_graph_t* graph) {
  for (uint32_t i = 0; i < graph->num_outputs; ++i) {
    const jpp_graph_output_t* output = &graph->outputs[i];
    jpp_str_appendf(str, "out %%%u", output->value);
    if (output->name) {
      jpp_str_append(str, " ");
      jpp__str_append_quoted(str, output->name);
    }
    append_ranks(str, " on ", output->ranks, output->num_ranks);
    if (output->next != JPP_NONE) jpp_str_appendf(str, " next %%%u", output->next);
    jpp_str_append(str, "\n");
  }
}

jpp_status_t* jpp_graph_print(const jpp_graph_t* graph, char** out_text) {
  JPP_RETURN_IF_NULL(graph, out_text);
  jpp_str_t str = {0};
  jpp_str_append(&str, "graph ");
  jpp__str_append_quoted(&str, graph->name);
  if (graph->ranks) jpp_str_appendf(&str, " ranks %u", graph->ranks);
  if (graph->sharded && !jpp__graph_has_shards(graph)) jpp_str_append(&str, " sharded");
  jpp_str_append(&str, "\n");
  append_args(&str, graph);
  append_ops(&str, graph);
  append_outputs(&str, graph);
  return jpp_str_finish(&str, out_text);
}

jpp_status_t* jpp_graph_print_sharded(const jpp_graph_t* graph,
                                      const uint64_t* device_bytes, char** out_text) {
  JPP_RETURN_IF_NULL(graph, device_bytes, out_text);
  *out_text = NULL;
  jpp_value_t* values = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(graph->num_values, &values));
  for (uint32_t v = 0; v < graph->num_values; ++v) {
    values[v] = graph->values[v];
    if (!device_bytes[v]) continue;
    uint64_t shards = values[v].bytes / device_bytes[v];
    if (jpp__type_divides(&values[v].type, shards))
      values[v].type.shards = (uint32_t)shards;
  }
  jpp_graph_t sharded = *graph;
  sharded.values = values;
  jpp_status_t* status = jpp_graph_print(&sharded, out_text);
  jpp_free(values);
  return status;
}
