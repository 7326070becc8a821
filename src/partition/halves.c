// Splits the backwards of a loop's stages in two, where the schedule does: the part that
// the previous stage waits for, and the part that makes the gradients of weights, which
// can wait for a bubble (BWD_W).
//
// An op that gives both belongs to the first part, and so does cheap work on the
// gradients of weights that it makes, such as a cast: they are then added up there, and
// no microbatch keeps them until its second part.
#include "partition/partitioner.h"

// How a value is used: for input gradients, or as a weight gradient, directly or after
// work that is cheap compared with computing it (sums, changes of shape).
enum { kForInputs = 1, kIsWeightGradient = 2 };

typedef struct halver {
  jpp_partitioner_t* p;
  const jpp_loop_t* loop;
  uint32_t stages;
  uint8_t* uses;  // [graph values]
} halver_t;

static bool is_backward(const halver_t* h, uint32_t id) {
  return jpp__segment_is_backward(h->stages, h->p->segment[id]);
}

// A backward op belongs to the input-gradient part if a mark or another task needs it.
static void find_weight_parts(const halver_t* h) {
  const jpp_partitioner_t* p = h->p;
  bool* weight_part = p->weight_part;
  for (uint32_t id = h->loop->first_op; id < h->loop->op; ++id) {
    weight_part[id] = is_backward(h, id);
  }
  for (uint32_t id = h->loop->op; id-- > h->loop->first_op;) {
    const jpp_op_t* op = &p->ops.data[id];
    bool is_mark = op->kind == JPP_OP_MARK_BACKWARD;
    uint32_t segment = p->segment[id];
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      uint32_t producer = jpp__producer_in_body(p, h->loop, op->inputs[i]);
      if (producer == JPP_NONE || !weight_part[producer]) continue;
      bool leaves = jpp__segment_is_stage(segment) && segment != p->segment[producer];
      bool feeds = jpp__segment_is_stage(segment) && !weight_part[id];
      if (is_mark || leaves || feeds) weight_part[producer] = false;
    }
  }
}

// How the results of an op are used.
static uint8_t use_of_results(const halver_t* h, const jpp_op_t* op) {
  uint8_t use = 0;
  for (uint32_t k = 0; k < op->num_outputs; ++k) use |= h->uses[op->first_output + k];
  return use;
}

static bool is_cheap(const halver_t* h, const jpp_op_t* op) {
  double bytes = 0;
  for (uint32_t k = 0; k < op->num_outputs; ++k) {
    bytes += (double)h->p->values.data[op->first_output + k].bytes;
  }
  return op->cost <= bytes;
}

// How an op of the weight-gradient part uses its operands.
static uint8_t use_in_weight_part(const halver_t* h, const jpp_op_t* op) {
  return is_cheap(h, op) ? use_of_results(h, op) & kIsWeightGradient : 0;
}

static void find_uses(const halver_t* h) {
  const jpp_partitioner_t* p = h->p;
  for (uint32_t i = 0; i < h->loop->num_results; ++i) {
    h->uses[p->alias[h->loop->results[i].value]] |= kIsWeightGradient;
  }
  for (uint32_t id = h->loop->op; id-- > h->loop->first_op;) {
    const jpp_op_t* op = &p->ops.data[id];
    uint8_t use = p->weight_part[id] ? use_in_weight_part(h, op) : kForInputs;
    for (uint32_t i = 0; i < op->num_inputs; ++i) h->uses[op->inputs[i]] |= use;
  }
}

// --- Ops that give both ---------------------------------------------------------------

// Whether an op of the input-gradient part also makes weight gradients.
static bool gives_both(const halver_t* h, uint32_t id) {
  if (!is_backward(h, id) || h->p->weight_part[id]) return false;
  const jpp_op_t* op = &h->p->ops.data[id];
  bool inputs = false, weights = false;
  for (uint32_t k = 0; k < op->num_outputs; ++k) {
    uint8_t use = h->uses[op->first_output + k];
    inputs = inputs || (use & kForInputs);
    weights = weights || use == kIsWeightGradient;
  }
  return inputs && weights;
}

static jpp_status_t* note_unsplit_ops(const halver_t* h) {
  jpp_partitioner_t* p = h->p;
  double* costs = NULL;  // [stages] of the backward
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, h->stages, &costs));
  for (uint32_t id = h->loop->first_op; id < h->loop->op; ++id) {
    if (!is_backward(h, id)) continue;
    costs[jpp__segment_backward(h->stages, p->segment[id])] += p->ops.data[id].cost;
  }
  for (uint32_t id = h->loop->first_op; id < h->loop->op; ++id) {
    if (!gives_both(h, id)) continue;
    uint32_t stage = jpp__segment_backward(h->stages, p->segment[id]);
    float share = costs[stage] > 0 ? (float)(p->ops.data[id].cost / costs[stage]) : 0;
    JPP_RETURN_IF_ERROR(jpp__partition_note_unsplit(p, id, stage, share));
  }
  return NULL;
}

// Whether an op of the weight-gradient part is cheap work on weight gradients that the
// input-gradient part makes and does not use.
static bool follows_operands(const halver_t* h, uint32_t id) {
  const jpp_partitioner_t* p = h->p;
  const jpp_op_t* op = &p->ops.data[id];
  if (!is_cheap(h, op) || use_of_results(h, op) != kIsWeightGradient) return false;
  bool found = false;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t producer = jpp__producer_in_stage(p, h->loop, op->inputs[i]);
    if (producer == JPP_NONE) continue;
    found = p->segment[producer] == p->segment[id] && !p->weight_part[producer] &&
            h->uses[op->inputs[i]] == kIsWeightGradient;
    if (!found) return false;
  }
  return found;
}

jpp_status_t* jpp__partition_split_backwards(jpp_partitioner_t* p, uint32_t loop) {
  const jpp_loop_placement_t* placement = &p->options->loops[loop];
  if (!placement->split_backward) return NULL;
  halver_t h = {.p = p, .loop = &p->graph->loops[loop], .stages = placement->stages};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, p->graph->num_values, &h.uses));
  find_weight_parts(&h);
  find_uses(&h);
  JPP_RETURN_IF_ERROR(note_unsplit_ops(&h));
  for (uint32_t id = h.loop->first_op; id < h.loop->op; ++id) {
    if (p->weight_part[id] && follows_operands(&h, id)) p->weight_part[id] = false;
  }
  return NULL;
}
