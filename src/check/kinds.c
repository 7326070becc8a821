// Classifies each value's bytes (weights, gradients, activations, ...; see
// jpp_bytes_kind_t). Only the graph is used: the kind depends on how the loops read or
// make the value.
#include "check/checker.h"

// How a value depends on the loops; the outputs of an op depend on them like its most
// dependent input.
typedef enum dependence {
  OF_ARGUMENTS,   // on no loop
  OF_RESULTS,     // on results of a loop
  OF_NUMBER,      // cheap ops of the microbatch number and of values from outside
  OF_MICROBATCH,  // computed for each microbatch
} dependence_t;

enum { kReadWhole = 1, kReadByNumber = 2 };  // ways in which a loop reads a value

typedef struct kinds {
  const jpp_graph_t* graph;
  uint8_t* dependence;  // [values]
  uint8_t* reads;       // [values]
} kinds_t;

static uint8_t op_dependence(const kinds_t* k, const jpp_op_t* op) {
  if (op->kind == JPP_OP_LOOP) return OF_RESULTS;
  if (op->kind == JPP_OP_MARK || op->kind == JPP_OP_MARK_BACKWARD) return OF_MICROBATCH;
  uint8_t most = OF_ARGUMENTS;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint8_t found = k->dependence[op->inputs[i]];
    if (found > most) most = found;
  }
  bool cheap = op->flags & JPP_OP_CHEAP;
  return most == OF_NUMBER && !cheap ? OF_MICROBATCH : most;
}

static void find_dependence(kinds_t* k) {
  const jpp_graph_t* graph = k->graph;
  for (uint32_t l = 0; l < graph->num_loops; ++l) {
    k->dependence[graph->loops[l].index] = OF_NUMBER;
  }
  for (uint32_t id = 0; id < graph->num_ops; ++id) {
    const jpp_op_t* op = &graph->ops[id];
    uint8_t found = op_dependence(k, op);
    for (uint32_t i = 0; i < op->num_outputs; ++i) {
      k->dependence[op->first_output + i] = found;
    }
  }
}

// How loops read the op's inputs through this op.
static uint8_t op_reads(const kinds_t* k, const jpp_op_t* op) {
  if (!op->num_outputs) return 0;
  uint8_t dependence = k->dependence[op->first_output];
  if (dependence == OF_MICROBATCH) return kReadWhole;
  if (dependence == OF_NUMBER) return kReadByNumber;
  if (dependence == OF_RESULTS) return 0;
  uint8_t reads = 0;
  for (uint32_t i = 0; i < op->num_outputs; ++i) reads |= k->reads[op->first_output + i];
  return reads;
}

static void find_reads(kinds_t* k) {
  const jpp_graph_t* graph = k->graph;
  for (uint32_t l = 0; l < graph->num_loops; ++l) {
    const jpp_loop_t* loop = &graph->loops[l];
    for (uint32_t i = 0; i < loop->num_results; ++i) {
      k->reads[loop->results[i].value] |= kReadWhole;
    }
  }
  for (uint32_t id = graph->num_ops; id-- > 0;) {
    const jpp_op_t* op = &graph->ops[id];
    uint8_t reads = op_reads(k, op);
    for (uint32_t i = 0; i < op->num_inputs; ++i) k->reads[op->inputs[i]] |= reads;
  }
}

// The kind of a value that has one instance per step.
static uint8_t step_kind(const kinds_t* k, uint32_t value) {
  const jpp_value_t* at = &k->graph->values[value];
  if (k->reads[value] & kReadWhole) return JPP_BYTES_WEIGHTS;
  if (k->reads[value] & kReadByNumber) return JPP_BYTES_BATCH;
  bool argument = at->producer == JPP_NONE && at->loop == JPP_NONE;
  if (!argument) return JPP_BYTES_STEP_VALUES;
  return k->graph->num_loops ? JPP_BYTES_OPTIMIZER_STATE : JPP_BYTES_WEIGHTS;
}

static uint8_t result_kind(const jpp_checker_t* c, uint32_t loop, uint32_t result) {
  bool sum = c->staged->graph->loops[loop].results[result].reduce == JPP_REDUCE_ADD;
  bool gradient = sum && c->staged->loops[loop].has_backward;
  return gradient ? JPP_BYTES_GRADIENTS : JPP_BYTES_LOOP_RESULTS;
}

static uint8_t kind_of(const jpp_checker_t* c, const kinds_t* k, uint32_t value) {
  const jpp_accumulator_t* acc = jpp__check_accumulator(c, value);
  if (acc) return result_kind(c, acc->loop, acc->result);
  uint32_t producer = c->staged->values[value].producer;
  const jpp_op_t* op = producer == JPP_NONE ? NULL : &c->staged->ops[producer];
  if (op && op->kind == JPP_OP_ACCUMULATE) return result_kind(c, op->loop, op->attr);
  if (c->staged->scopes[value] == JPP_SCOPE_MICROBATCH) return JPP_BYTES_ACTIVATIONS;
  bool of_graph = value < k->graph->num_values;
  return of_graph ? step_kind(k, value) : JPP_BYTES_STEP_VALUES;
}

jpp_status_t* jpp__check_kinds(jpp_checker_t* c) {
  kinds_t k = {.graph = c->staged->graph};
  uint32_t values = k.graph->num_values;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, values, &k.dependence));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, values, &k.reads));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, c->staged->num_values, &c->kinds));
  find_dependence(&k);
  find_reads(&k);
  for (uint32_t v = 0; v < c->staged->num_values; ++v) c->kinds[v] = kind_of(c, &k, v);
  return NULL;
}
