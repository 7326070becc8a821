// Makes stage marks identities: after this pass, every use names the value from before
// the mark. Of equal results of a loop, every use names the first.
#include "partition/partitioner.h"

static void alias_mark(jpp_partitioner_t* p, const jpp_op_t* op) {
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    p->alias[op->first_output + i] = p->alias[op->inputs[i]];
  }
}

// Whether scalars `a` and `b` are the same results of a loop. Custom reductions may
// differ in what they compute.
static bool are_equal(const jpp_partitioner_t* p, const jpp_op_t* op, uint32_t a,
                      uint32_t b) {
  const jpp_loop_result_t* results = p->graph->loops[op->attr].results;
  const jpp_value_t* outputs = &p->graph->values[op->first_output];
  bool known = results[a].reduce == JPP_REDUCE_ADD || results[a].reduce == JPP_REDUCE_MAX;
  return known && jpp_type_equal(&outputs[a].type, &outputs[b].type) &&
         results[a].reduce == results[b].reduce &&
         results[a].partial == results[b].partial &&
         p->alias[results[a].value] == p->alias[results[b].value];
}

// A loss that is also a metric is summed once. Arrays may differ in their shardings,
// which the planner does not know.
static void alias_results(jpp_partitioner_t* p, const jpp_op_t* op) {
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    uint32_t first = p->graph->values[op->first_output + i].type.ndim ? i : 0;
    while (first < i && !are_equal(p, op, first, i)) ++first;
    p->alias[op->first_output + i] = op->first_output + first;
  }
}

static jpp_status_t* copy_op(jpp_partitioner_t* p, const jpp_op_t* op) {
  jpp_op_t copy = *op;
  uint32_t* inputs = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, op->num_inputs, &inputs));
  for (uint32_t i = 0; i < op->num_inputs; ++i) inputs[i] = p->alias[op->inputs[i]];
  copy.inputs = inputs;
  return JPP_VEC_PUSH(&p->ops, copy);
}

// An op of a body whose results nothing uses; front ends leave some behind.
static bool is_unused(const jpp_partitioner_t* p, const jpp_op_t* op) {
  bool mark = op->kind == JPP_OP_MARK || op->kind == JPP_OP_MARK_BACKWARD;
  if (op->loop == JPP_NONE || mark || op->flags & JPP_OP_EFFECT) return false;
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    if (p->uses[op->first_output + i]) return false;
  }
  return true;
}

static void count_uses(jpp_partitioner_t* p) {
  const jpp_graph_t* graph = p->graph;
  for (uint32_t l = 0; l < graph->num_loops; ++l) {
    const jpp_loop_t* loop = &graph->loops[l];
    uint32_t output = graph->ops[loop->op].first_output;
    for (uint32_t i = 0; i < loop->num_results; ++i, ++output) {
      if (p->alias[output] == output) ++p->uses[p->alias[loop->results[i].value]];
    }
  }
  for (uint32_t i = 0; i < graph->num_outputs; ++i) {
    ++p->uses[p->alias[graph->outputs[i].value]];
  }
  // From the last op to the first, so that all users of an op come before it.
  for (size_t id = p->ops.count; id-- > 0;) {
    const jpp_op_t* op = &p->ops.data[id];
    p->unused[id] = is_unused(p, op);
    if (p->unused[id]) continue;
    for (uint32_t i = 0; i < op->num_inputs; ++i) ++p->uses[op->inputs[i]];
  }
}

jpp_status_t* jpp__partition_resolve_marks(jpp_partitioner_t* p) {
  const jpp_graph_t* graph = p->graph;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_values, &p->alias));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_values, &p->uses));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_ops, &p->unused));
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(&p->values, graph->num_values));
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(&p->origins, graph->num_values));
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(&p->ops, graph->num_ops));
  for (uint32_t i = 0; i < graph->num_values; ++i) {
    p->alias[i] = i;
    p->values.data[p->values.count++] = graph->values[i];
    p->origins.data[p->origins.count++] = i;
  }
  for (uint32_t i = 0; i < graph->num_ops; ++i) {
    const jpp_op_t* op = &graph->ops[i];
    if (op->kind == JPP_OP_MARK || op->kind == JPP_OP_MARK_BACKWARD) alias_mark(p, op);
    if (op->kind == JPP_OP_LOOP) alias_results(p, op);
    JPP_RETURN_IF_ERROR(copy_op(p, op));
  }
  count_uses(p);
  return NULL;
}
