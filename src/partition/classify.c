// Finds the ops of a loop's body that belong to no stage: an op that uses only values
// from outside leaves the loop and runs once, and a cheap op of the loop index and of
// such values is recomputed in every task that needs it, unless several values would have
// to be sent there instead of its result.
#include "base/bytes.h"
#include "partition/partitioner.h"
#include "task/ids.h"

enum { kInvariant = 1, kAvailable = 2 };  // of a value

enum { kMostSteps = 8 };  // see clone_terms()

typedef struct classifier {
  jpp_partitioner_t* p;
  bool* ends_stage;  // [graph ops] a mark takes a result of the op
  uint8_t* known;    // [graph values] kInvariant | kAvailable
  uint64_t* sent;    // [graph values] the bytes of the hoisted values that it is made of
} classifier_t;

static uint8_t op_knowledge(const classifier_t* c, const jpp_op_t* op) {
  uint8_t result = kInvariant | kAvailable;
  for (uint32_t i = 0; i < op->num_inputs; ++i) result &= c->known[op->inputs[i]];
  return result;
}

static uint64_t bytes_sent(const classifier_t* c, const jpp_op_t* op) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    bytes = jpp__bytes_add(bytes, c->sent[op->inputs[i]]);
  }
  return bytes;
}

// Whether an op combines hoisted values into one that takes fewer bytes than they do, so
// that tasks should receive its result instead of them.
static bool is_join(const classifier_t* c, const jpp_op_t* op) {
  uint32_t count = 0;
  for (uint32_t i = 0; i < op->num_inputs; ++i) count += c->sent[op->inputs[i]] != 0;
  return count > 1 && op->num_outputs == 1 &&
         c->p->values.data[op->first_output].bytes < bytes_sent(c, op);
}

// Nothing is hoisted out of a loop that runs once: that would save nothing, and the
// stages do all the work of the body.
static uint32_t classify_body_op(const classifier_t* c, uint32_t id, uint8_t* knowledge) {
  const jpp_op_t* op = &c->p->ops.data[id];
  *knowledge = op_knowledge(c, op);
  bool invariant = *knowledge & kInvariant;
  bool cheap = (op->flags & JPP_OP_CHEAP) && !c->ends_stage[id];
  if (cheap && (*knowledge & kAvailable) && !(invariant && is_join(c, op))) {
    return JPP_SEGMENT_CLONE;
  }
  if (invariant && c->p->graph->loops[op->loop].microbatches != 1) {
    *knowledge |= kAvailable;
    return JPP_SEGMENT_OUTER;
  }
  *knowledge = 0;
  return JPP_SEGMENT_OPEN;
}

static void classify_op(const classifier_t* c, uint32_t id) {
  jpp_partitioner_t* p = c->p;
  const jpp_op_t* op = &p->ops.data[id];
  uint8_t knowledge = kInvariant | kAvailable;
  if (op->loop == JPP_NONE) {
    p->segment[id] = JPP_SEGMENT_OUTER;
  } else if (op->kind == JPP_OP_MARK || op->kind == JPP_OP_MARK_BACKWARD ||
             p->unused[id]) {
    p->segment[id] = JPP_SEGMENT_ALIAS;
  } else if (op->flags & JPP_OP_EFFECT) {
    knowledge = 0;
    p->segment[id] = JPP_SEGMENT_OPEN;
  } else {
    p->segment[id] = classify_body_op(c, id, &knowledge);
  }
  bool hoisted = op->loop != JPP_NONE && p->segment[id] == JPP_SEGMENT_OUTER;
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    uint32_t value = op->first_output + i;
    c->known[value] = knowledge;
    c->sent[value] = hoisted ? p->values.data[value].bytes : bytes_sent(c, op);
  }
}

// An op whose result a mark takes belongs to that mark's stage, however cheap it is.
static void find_stage_ends(const classifier_t* c) {
  const jpp_partitioner_t* p = c->p;
  for (uint32_t id = 0; id < p->graph->num_ops; ++id) {
    const jpp_op_t* op = &p->ops.data[id];
    if (op->kind != JPP_OP_MARK && op->kind != JPP_OP_MARK_BACKWARD) continue;
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      uint32_t producer = p->values.data[op->inputs[i]].producer;
      if (producer != JPP_NONE) c->ends_stage[producer] = true;
    }
  }
}

// A hoisted op may need cheap ops that are cloned into tasks; these are then computed
// outside the loop as well.
void jpp__partition_find_outer_copies(jpp_partitioner_t* p) {
  for (uint32_t id = p->graph->num_ops; id-- > 0;) {
    const jpp_op_t* op = &p->ops.data[id];
    if (op->loop == JPP_NONE) continue;
    if (p->segment[id] != JPP_SEGMENT_OUTER && !p->outer_copy[id]) continue;
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      uint32_t producer = p->values.data[op->inputs[i]].producer;
      if (producer != JPP_NONE && p->segment[producer] == JPP_SEGMENT_CLONE) {
        p->outer_copy[producer] = true;
      }
    }
  }
}

// The number of elementwise steps in which a hoisted op makes an array from values that
// exist anyway; more than kMostSteps if it does not, or from a larger one.
static uint32_t count_steps(const jpp_partitioner_t* p, const jpp_op_t* op,
                            const uint32_t* steps) {
  const jpp_value_t* out = &p->values.data[op->first_output];
  bool elementwise = (op->kind == JPP_OP_CALL || op->kind == JPP_OP_ADD) &&
                     !(op->flags & JPP_OP_EFFECT) && op->num_outputs == 1 &&
                     out->type.ndim && op->cost <= (float)jpp_type_elements(&out->type);
  uint32_t count = elementwise ? 1 : kMostSteps + 1;
  for (uint32_t i = 0; i < op->num_inputs && count <= kMostSteps; ++i) {
    const jpp_value_t* in = &p->values.data[op->inputs[i]];
    count += in->bytes > out->bytes ? kMostSteps : steps[op->inputs[i]];
  }
  return count;
}

// A hoisted array that tasks only add to other values becomes cloned if a few steps make
// it. The gradients of a penalty on the weights, kept through the loop, would take as
// much memory as the weights, and reading them takes as long as making them.
static jpp_status_t* clone_terms(jpp_partitioner_t* p) {
  uint32_t *steps = NULL, *added = NULL;  // [graph values] added: by how many such sums
  const jpp_graph_t* graph = p->graph;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_values, &steps));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_values, &added));
  for (uint32_t id = 0; id < graph->num_ops; ++id) {
    const jpp_op_t* op = &p->ops.data[id];
    if (op->loop == JPP_NONE || p->segment[id] != JPP_SEGMENT_OUTER) continue;
    for (uint32_t i = 0; i < op->num_outputs; ++i) {
      uint32_t value = op->first_output + i;
      steps[value] = p->values.data[value].type.ndim ? count_steps(p, op, steps) : 0;
    }
  }
  for (uint32_t id = graph->num_ops; id-- > 0;) {
    const jpp_op_t* op = &p->ops.data[id];
    uint32_t value = op->first_output;
    bool adds = op->kind == JPP_OP_ADD && p->segment[id] == JPP_SEGMENT_OPEN;
    if (op->loop != JPP_NONE && p->segment[id] == JPP_SEGMENT_OUTER && steps[value] &&
        steps[value] <= kMostSteps && added[value] == p->uses[value]) {
      p->segment[id] = JPP_SEGMENT_CLONE;
      adds = true;
    }
    for (uint32_t i = 0; i < op->num_inputs; ++i) added[op->inputs[i]] += adds;
  }
  return NULL;
}

jpp_status_t* jpp__partition_classify(jpp_partitioner_t* p) {
  const jpp_graph_t* graph = p->graph;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_ops, &p->segment));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_ops, &p->outer_copy));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, graph->num_ops, &p->handed_by));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_ops, &p->weight_part));
  classifier_t c = {.p = p};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_ops, &c.ends_stage));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_values, &c.known));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, graph->num_values, &c.sent));
  for (uint32_t i = 0; i < graph->num_args; ++i) {
    c.known[graph->args[i].value] = kInvariant | kAvailable;
  }
  for (uint32_t i = 0; i < graph->num_loops; ++i) {
    c.known[graph->loops[i].index] = kAvailable;
  }
  find_stage_ends(&c);
  for (uint32_t id = 0; id < graph->num_ops; ++id) classify_op(&c, id);
  return clone_terms(p);
}
