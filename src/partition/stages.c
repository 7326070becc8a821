// Rule 1 of partition.h: assigns each op of a loop's body to a stage's forward or
// backward. Marks claim their ancestors first; the remaining ops go to the stage of their
// latest operand.
#include <stdio.h>

#include "base/str.h"
#include "partition/partitioner.h"
#include "task/ids.h"

typedef struct assigner {
  jpp_partitioner_t* p;
  const jpp_loop_t* loop;
  uint32_t stages;
  bool last_is_unmarked;  // no mark ends the last stage
  bool* claimed;          // [body ops] some mark needs it
  bool* enters;           // [graph values] a result of a mark that the next stage needs
  uint32_t* input_of;  // [body ops] the stage whose inputs the op needs; JPP_NONE: others
  bool* scalars_only;  // [body ops] in a backward; of what stages make, uses scalars only
  jpp_u32_vec_t stack;
} assigner_t;

static uint32_t open_producer(const assigner_t* a, uint32_t value) {
  uint32_t op = jpp__producer_in_body(a->p, a->loop, value);
  if (op == JPP_NONE || a->p->segment[op] != JPP_SEGMENT_OPEN) return JPP_NONE;
  return op;
}

// Assigns every open op that `mark` needs to `segment`.
static jpp_status_t* claim_ancestors(assigner_t* a, const jpp_op_t* mark,
                                     uint32_t segment) {
  const jpp_op_t* op = mark;
  for (;;) {
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      uint32_t producer = open_producer(a, op->inputs[i]);
      if (producer == JPP_NONE) continue;
      a->p->segment[producer] = segment;
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&a->stack, producer));
    }
    if (!a->stack.count) return NULL;
    op = &a->p->ops.data[a->stack.data[--a->stack.count]];
  }
}

// Appends the text after "expected": the place of each mark, one per line, ten at most.
static void append_marks(const assigner_t* a, jpp_str_t* str) {
  uint32_t shown = 0;
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    const jpp_op_t* op = &a->p->ops.data[id];
    if (op->kind != JPP_OP_MARK) continue;
    if (++shown > 10) continue;
    jpp_str_appendf(str, "\n  mark %u at %s", op->attr, op->where ? op->where : "?");
  }
  if (shown > 10) jpp_str_appendf(str, "\n  and %u more", shown - 10);
}

static jpp_status_t* wrong_mark_count(const assigner_t* a, uint32_t found) {
  jpp_str_t str = {0};
  append_marks(a, &str);
  char* marks = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &marks));
  char other[48] = "";  // a single stage is not a pipeline
  if (found > 1)
    snprintf(other, sizeof(other), ", or give the schedule %u stages", found);
  jpp_status_t* status = jpp_status_make(
      JPP_MARKS_ERROR,
      "loop at %s: the schedule has %u stage%s, so expected %u stage mark%s (one at the "
      "end "
      "of each stage; the last may be left out), found %u%s%s\n"
      "Mark the end of each stage with mark_stage_end()%s.",
      a->loop->where ? a->loop->where : "?", a->stages, jpp__plural(a->stages), a->stages,
      jpp__plural(a->stages), found, found ? ":" : "", marks, other);
  jpp_free(marks);
  return status;
}

static jpp_status_t* check_marks(const assigner_t* a) {
  uint32_t found = 0;
  bool in_order = true;
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    const jpp_op_t* op = &a->p->ops.data[id];
    if (op->kind == JPP_OP_MARK) in_order = in_order && op->attr == found++;
    if (op->kind == JPP_OP_MARK_BACKWARD && op->attr >= a->stages) in_order = false;
  }
  if (found != a->stages && found + 1 != a->stages) return wrong_mark_count(a, found);
  if (in_order) return NULL;
  return jpp_status_make(JPP_MARKS_ERROR,
                         "loop at %s: stage marks are not numbered 0, 1, 2, ... in order",
                         a->loop->where ? a->loop->where : "?");
}

static jpp_status_t* claim_forward(assigner_t* a) {
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    const jpp_op_t* op = &a->p->ops.data[id];
    if (op->kind != JPP_OP_MARK) continue;
    JPP_RETURN_IF_ERROR(claim_ancestors(a, op, op->attr));
  }
  return NULL;
}

// The backward of stage k + 1 computes the operands of stage k's backward mark. The
// operands of the first such mark come from the loss, which runs with the last stage's
// backward, so that none of its values are kept.
static jpp_status_t* claim_backward(assigner_t* a) {
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    const jpp_op_t* op = &a->p->ops.data[id];
    if (op->kind != JPP_OP_MARK_BACKWARD) continue;
    uint32_t stage = op->attr + 1 < a->stages ? op->attr + 1 : a->stages - 1;
    JPP_RETURN_IF_ERROR(claim_ancestors(a, op, jpp__segment_backward(a->stages, stage)));
  }
  return NULL;
}

// The last mark that input `index` of an op has passed, or NULL.
static const jpp_op_t* mark_before_input(const assigner_t* a, uint32_t id,
                                         uint32_t index) {
  const jpp_graph_t* graph = a->p->graph;
  uint32_t producer = graph->values[graph->ops[id].inputs[index]].producer;
  if (producer == JPP_NONE) return NULL;
  const jpp_op_t* op = &graph->ops[producer];
  bool is_mark = op->kind == JPP_OP_MARK || op->kind == JPP_OP_MARK_BACKWARD;
  return is_mark ? op : NULL;
}

// Whether the op makes a value in a memory other than device memory.
static bool moves_out(const assigner_t* a, const jpp_op_t* op) {
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    const jpp_value_t* value = &a->p->values.data[op->first_output + i];
    if (value->type.memory != JPP_MEMORY_DEVICE) return true;
  }
  return false;
}

// The segment in which input `index` of an op is available; JPP_NONE if no stage makes
// it. That is the segment that makes it, unless it crosses a stage boundary to get here:
//  - Through the backward mark of stage k it enters the backward of stage k.
//  - An effect runs in the stage that a value enters, not in the one that it leaves, and
//    so does an op that moves a value out of device memory.
//  - Through the mark before an unmarked last stage it enters that stage.
static uint32_t segment_of_input(const assigner_t* a, uint32_t id, uint32_t index) {
  const jpp_op_t* op = &a->p->ops.data[id];
  uint32_t producer = jpp__producer_in_stage(a->p, a->loop, op->inputs[index]);
  if (producer == JPP_NONE) return JPP_NONE;
  uint32_t made = a->p->segment[producer];
  const jpp_op_t* mark = mark_before_input(a, id, index);
  if (!mark) return made;
  uint32_t last = a->stages - 1;
  uint32_t entered = made;
  if (mark->kind == JPP_OP_MARK_BACKWARD) {
    entered = jpp__segment_backward(a->stages, mark->attr);
  } else if ((op->flags & JPP_OP_EFFECT) || moves_out(a, op)) {
    entered = mark->attr < last ? mark->attr + 1 : last;
  } else if (a->last_is_unmarked && mark->attr + 1 == last) {
    entered = last;
  }
  return entered > made ? entered : made;
}

// The latest segment in which an operand is available; JPP_NONE if no stage makes any. A
// single stage without a mark has all ops.
static uint32_t latest_operand(const assigner_t* a, uint32_t id) {
  uint32_t latest = a->last_is_unmarked && a->stages == 1 ? 0 : JPP_NONE;
  for (uint32_t i = 0; i < a->p->ops.data[id].num_inputs; ++i) {
    uint32_t segment = segment_of_input(a, id, i);
    if (segment == JPP_NONE) continue;
    if (latest == JPP_NONE || segment > latest) latest = segment;
  }
  return latest;
}

static bool has_last_mark(const assigner_t* a) {
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    const jpp_op_t* op = &a->p->ops.data[id];
    if (op->kind == JPP_OP_MARK && op->attr == a->stages - 1) return true;
  }
  return false;
}

static bool has_backward(const assigner_t* a) {
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    if (a->p->ops.data[id].flags & JPP_OP_BACKWARD) return true;
    if (a->p->ops.data[id].kind == JPP_OP_MARK_BACKWARD) return true;
  }
  return false;
}

// The segment of an op after marks have claimed theirs; JPP_NONE if neither a mark nor an
// operand determines it. Operands precede it, so their segments are final.
static uint32_t segment_by_operands(const assigner_t* a, uint32_t id) {
  uint32_t last_forward = a->stages - 1, last_backward = a->stages;
  uint32_t claimed = a->p->segment[id];
  uint32_t latest = latest_operand(a, id);
  uint32_t segment = claimed == JPP_SEGMENT_OPEN ? latest : claimed;
  // A value that is moved out of device memory does not stay there until the backward
  // that needs it.
  if (latest != JPP_NONE && moves_out(a, &a->p->ops.data[id])) segment = latest;
  bool uses_backward = latest != JPP_NONE && latest >= last_backward;
  // A term joins its sum in the stage that made the term, not in the earlier stage whose
  // mark needs the sum.
  if (uses_backward && latest < segment) segment = latest;
  bool in_last_stage = segment == last_forward || segment == last_backward;
  if (!a->last_is_unmarked || !in_last_stage) return segment;
  // No mark separates this stage's forward from its backward: its forward consists of the
  // ops that autodiff did not write and that use nothing of the backward.
  bool backward = a->p->ops.data[id].flags & JPP_OP_BACKWARD;
  return backward || uses_backward ? last_backward : last_forward;
}

static void settle_by_operands(assigner_t* a) {
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    uint32_t claimed = a->p->segment[id];
    if (claimed != JPP_SEGMENT_OPEN && !jpp__segment_is_stage(claimed)) continue;
    uint32_t segment = segment_by_operands(a, id);
    a->p->segment[id] = segment == JPP_NONE ? JPP_SEGMENT_OPEN : segment;
  }
}

static bool takes_any(const jpp_op_t* op, const jpp_op_t* operands_of) {
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    for (uint32_t k = 0; k < operands_of->num_inputs; ++k) {
      if (op->inputs[i] == operands_of->inputs[k]) return true;
    }
  }
  return false;
}

// The first stage that uses an operand of an effect, for an effect whose operands no
// stage makes, so that no value is sent only for the effect; JPP_NONE if no stage uses
// one.
static uint32_t stage_beside(const assigner_t* a, const jpp_op_t* effect) {
  uint32_t first = JPP_NONE;
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    uint32_t segment = a->p->segment[id];
    if (!jpp__segment_is_stage(segment) || segment >= first) continue;
    if (takes_any(&a->p->ops.data[id], effect)) first = segment;
  }
  return first;
}

// Some segments; `first` is JPP_NONE if there are none.
typedef struct segment_range {
  uint32_t first, last;
} segment_range_t;

static void include_range(segment_range_t* range, segment_range_t other) {
  if (other.first == JPP_NONE) return;
  if (range->first == JPP_NONE || other.first < range->first) range->first = other.first;
  if (range->last == JPP_NONE || other.last > range->last) range->last = other.last;
}

// The value that `value` is a view of, such as the weight of a transposed weight: what
// ops that each user runs again make of one operand.
static uint32_t viewed(const assigner_t* a, uint32_t value) {
  for (;;) {
    uint32_t producer = jpp__producer_in_body(a->p, a->loop, value);
    if (producer == JPP_NONE || a->p->segment[producer] != JPP_SEGMENT_CLONE ||
        a->p->ops.data[producer].num_inputs != 1) {
      return value;
    }
    value = a->p->ops.data[producer].inputs[0];
  }
}

// Finds the segments that use each value, also through views, and the results of each
// open op, also through open ops.
static void find_users(const assigner_t* a, segment_range_t* of_values,
                       segment_range_t* of_ops) {
  for (uint32_t id = a->loop->op; id-- > a->loop->first_op;) {
    const jpp_op_t* op = &a->p->ops.data[id];
    uint32_t segment = a->p->segment[id];
    bool open = segment == JPP_SEGMENT_OPEN;
    if (!open && !jpp__segment_is_stage(segment)) continue;
    segment_range_t range = {segment, segment};
    if (open) range = of_ops[id - a->loop->first_op];
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      if (!open) include_range(&of_values[viewed(a, op->inputs[i])], range);
      uint32_t producer = open_producer(a, op->inputs[i]);
      if (producer == JPP_NONE) continue;
      include_range(&of_ops[producer - a->loop->first_op], range);
    }
  }
}

// Whether a value is an array from outside the loop.
static bool is_outside_array(const assigner_t* a, uint32_t value) {
  uint32_t producer = jpp__producer_in_body(a->p, a->loop, value);
  bool outside = producer == JPP_NONE || a->p->segment[producer] == JPP_SEGMENT_OUTER;
  return outside && a->p->values.data[value].type.ndim;
}

// The first segment of the only stage that uses an array that the op takes, if the
// results of the op have users in that stage and, before it, in another; else JPP_NONE.
static uint32_t segment_of_weights(const assigner_t* a, const jpp_op_t* op,
                                   segment_range_t users,
                                   const segment_range_t* of_values) {
  if (users.first == JPP_NONE) return JPP_NONE;
  uint32_t stage = jpp__segment_stage(a->stages, users.last);
  if (jpp__segment_stage(a->stages, users.first) == stage) return JPP_NONE;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = viewed(a, op->inputs[i]);
    segment_range_t range = of_values[value];
    if (range.first == JPP_NONE || range.first > users.first) continue;
    if (jpp__segment_stage(a->stages, range.first) == stage &&
        jpp__segment_stage(a->stages, range.last) == stage &&
        is_outside_array(a, value)) {
      return range.first;
    }
  }
  return JPP_NONE;
}

// Assigns open ops that take a stage's weights, and whose results this stage and others
// use, to that stage: otherwise the first user's rank would need the weights, too. A
// penalty on what the first stage computes from the batch has such ops.
static jpp_status_t* settle_beside_weights(const assigner_t* a) {
  segment_range_t *of_values = NULL, *of_ops = NULL;
  uint32_t first = a->loop->first_op, ops = a->loop->op - first;
  uint32_t values = a->p->graph->num_values;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&a->p->scratch, values, &of_values));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&a->p->scratch, ops, &of_ops));
  for (uint32_t i = 0; i < values; ++i) of_values[i].first = of_values[i].last = JPP_NONE;
  for (uint32_t i = 0; i < ops; ++i) of_ops[i].first = of_ops[i].last = JPP_NONE;
  find_users(a, of_values, of_ops);
  for (uint32_t i = 0; i < ops; ++i) {
    if (a->p->segment[first + i] != JPP_SEGMENT_OPEN) continue;
    if (latest_operand(a, first + i) != JPP_NONE) continue;
    const jpp_op_t* op = &a->p->ops.data[first + i];
    uint32_t segment = segment_of_weights(a, op, of_ops[i], of_values);
    if (segment != JPP_NONE) a->p->segment[first + i] = segment;
  }
  return NULL;
}

static void settle_effects(const assigner_t* a) {
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    const jpp_op_t* op = &a->p->ops.data[id];
    if (!(op->flags & JPP_OP_EFFECT) || a->p->segment[id] != JPP_SEGMENT_OPEN) continue;
    uint32_t stage = stage_beside(a, op);
    if (stage != JPP_NONE) a->p->segment[id] = stage;
  }
}

// Records a use of `value` in `segment`, if an op of the body makes it and no earlier
// segment uses it.
static void note_use(const assigner_t* a, uint32_t value, uint32_t segment,
                     uint32_t* earliest_use) {
  uint32_t producer = jpp__producer_in_body(a->p, a->loop, value);
  if (producer == JPP_NONE) return;
  uint32_t* earliest = &earliest_use[producer - a->loop->first_op];
  if (segment < *earliest) *earliest = segment;
}

// Finds the ops of the backward that use values from outside and nothing that a stage
// makes but scalars, directly or through such ops: the gradient of a sum of squares of a
// weight.
static void find_scalars_only(const assigner_t* a) {
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    const jpp_op_t* op = &a->p->ops.data[id];
    uint32_t segment = a->p->segment[id];
    bool backward = segment >= a->stages || (op->flags & JPP_OP_BACKWARD);
    bool found =
        jpp__segment_is_stage(segment) && backward && !(op->flags & JPP_OP_EFFECT);
    for (uint32_t i = 0; i < op->num_inputs && found; ++i) {
      uint32_t producer = jpp__producer_in_stage(a->p, a->loop, op->inputs[i]);
      if (producer == JPP_NONE) continue;
      found = !a->p->values.data[op->inputs[i]].type.ndim ||
              a->scalars_only[producer - a->loop->first_op];
    }
    a->scalars_only[id - a->loop->first_op] = found;
  }
}

// Finds the results of forward marks that ops of the next stage take, which has them
// whatever else uses them.
static void find_entering(const assigner_t* a) {
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    const jpp_op_t* op = &a->p->graph->ops[id];
    uint32_t segment = a->p->segment[id];
    if (!jpp__segment_is_stage(segment)) continue;
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      const jpp_op_t* mark = mark_before_input(a, id, i);
      if (!mark || mark->kind != JPP_OP_MARK || mark->attr + 1 >= a->stages) continue;
      uint32_t stage = mark->attr + 1;
      if (segment == stage || segment == jpp__segment_backward(a->stages, stage)) {
        a->enters[op->inputs[i]] = true;
      }
    }
  }
}

// Returns stage s if operand `index` of an op depends on inputs of s and values from
// outside only, and JPP_NONE if it depends on anything else. Sets *made_outside if no
// stage makes the operand.
static uint32_t stage_of_inputs(const assigner_t* a, uint32_t id, uint32_t index,
                                bool* made_outside) {
  const jpp_op_t* op = &a->p->ops.data[id];
  uint32_t producer = jpp__producer_in_stage(a->p, a->loop, op->inputs[index]);
  *made_outside = producer == JPP_NONE;
  if (*made_outside) return JPP_NONE;
  const jpp_op_t* mark = mark_before_input(a, id, index);
  if (!mark) return a->input_of[producer - a->loop->first_op];
  return a->enters[a->p->graph->ops[id].inputs[index]] ? mark->attr + 1 : JPP_NONE;
}

// Finds the ops that a stage can run on its inputs alone, such as the transpose of an
// input.
static void find_ops_of_inputs(const assigner_t* a) {
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    uint32_t stage = JPP_NONE;
    bool found = jpp__segment_is_stage(a->p->segment[id]);
    for (uint32_t i = 0; i < a->p->ops.data[id].num_inputs && found; ++i) {
      bool made_outside = false;
      uint32_t of_input = stage_of_inputs(a, id, i, &made_outside);
      if (made_outside) continue;
      found = of_input != JPP_NONE && (stage == JPP_NONE || of_input == stage);
      stage = of_input;
    }
    a->input_of[id - a->loop->first_op] = found ? stage : JPP_NONE;
  }
}

static bool makes_arrays(const assigner_t* a, const jpp_op_t* op) {
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    if (a->p->values.data[op->first_output + i].type.ndim) return true;
  }
  return false;
}

// Whether an op computes at most one operation per element of its operands and results,
// unlike a product.
static bool is_light(const assigner_t* a, const jpp_op_t* op) {
  const jpp_value_t* values = a->p->values.data;
  uint64_t elements = 0;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    elements += jpp_type_elements(&values[op->inputs[i]].type);
  }
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    elements += jpp_type_elements(&values[op->first_output + i].type);
  }
  return (double)op->cost <= (double)elements;
}

// Whether an op belongs with its first user, in a later segment. Ops that a mark claimed
// stay, except in the forward of an unmarked last stage: no mark ends it, and the mark
// that claimed its ops is one of the backward. Products stay there, too, so that the
// forward keeps its share of the work in a step that drops the loss.
static bool follows_user(const assigner_t* a, uint32_t id, uint32_t use) {
  const jpp_op_t* op = &a->p->ops.data[id];
  uint32_t index = id - a->loop->first_op, segment = a->p->segment[id];
  bool open_forward = a->last_is_unmarked && segment == a->stages - 1;
  if (a->claimed[index] && !(open_forward && is_light(a, op))) return false;
  if (use == JPP_NONE || use <= segment || moves_out(a, op)) return false;
  bool own_backward =
      segment < a->stages && use == jpp__segment_backward(a->stages, segment);
  uint32_t stage = a->input_of[index];
  bool has_operands = stage != JPP_NONE && use == jpp__segment_backward(a->stages, stage);
  return own_backward || has_operands || (a->scalars_only[index] && makes_arrays(a, op));
}

// Assigns ops by their users, if neither marks nor operands assigned them. Walks
// backwards, so that the users of an op are final before the op itself.
//  - An op of the loop index alone goes with its first user, or to stage 0 without any.
//  - An op of a stage's forward that no forward mark claimed and that only the backward
//    of the same stage uses moves to the backward: keeping its operands is enough, unless
//    the op moves them out of device memory.
//  - An op of one stage's inputs whose first user is that stage's backward moves there:
//    the transpose of an input runs where the input is sent anyway.
//  - An op of the backward that makes arrays of scalars and of values from outside moves
//    to its first user's stage, so that scalars are sent and that stage alone needs the
//    rest.
// A loop result counts as a use in stage 0, so that its operands do not move.
static jpp_status_t* settle_by_users(assigner_t* a) {
  uint32_t* earliest_use = NULL;  // [body ops] segment; JPP_NONE: not used
  uint32_t first = a->loop->first_op;
  uint32_t count = a->loop->op - first;
  JPP_RETURN_IF_ERROR(jpp__ids_create(&a->p->scratch, count, &earliest_use));
  for (uint32_t i = 0; i < a->loop->num_results; ++i) {
    note_use(a, a->p->alias[a->loop->results[i].value], 0, earliest_use);
  }
  for (uint32_t i = count; i-- > 0;) {
    uint32_t* segment = &a->p->segment[first + i];
    uint32_t use = earliest_use[i];
    if (*segment == JPP_SEGMENT_OPEN) {
      *segment = use == JPP_NONE ? 0 : use;
    } else if (jpp__segment_is_stage(*segment) && follows_user(a, first + i, use)) {
      *segment = use;
    }
    if (!jpp__segment_is_stage(*segment)) continue;
    const jpp_op_t* op = &a->p->ops.data[first + i];
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      note_use(a, op->inputs[k], *segment, earliest_use);
    }
  }
  return NULL;
}

static bool is_in_backward(const assigner_t* a, uint32_t id) {
  return jpp__segment_is_backward(a->stages, a->p->segment[id]);
}

// The bytes that the backward no longer takes of the forward if the forward of `stage`
// runs the op: 0 if that lacks an operand. It has scalars from outside the loop and what
// each user makes again. `uses`: [values] number of operands of backwards.
static uint64_t bytes_saved(const assigner_t* a, const jpp_op_t* op, uint32_t stage,
                            const uint32_t* uses) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    uint32_t producer = jpp__producer_in_body(a->p, a->loop, value);
    uint32_t made = producer == JPP_NONE ? JPP_NONE : a->p->segment[producer];
    bool lacks = jpp__segment_is_stage(made) ? made != stage : is_outside_array(a, value);
    if (lacks) return 0;
    if (made != stage || uses[value] != 1) continue;
    bytes += jpp_type_bytes(&a->p->values.data[value].type);
  }
  return bytes;
}

// Moves ops that autodiff did not write from a stage's backward to its forward, if the
// backward then takes fewer bytes of the forward: the mask of a ReLU, not its operand.
static jpp_status_t* settle_by_size(const assigner_t* a) {
  const jpp_value_t* values = a->p->values.data;
  uint32_t* uses = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&a->p->scratch, a->p->values.count, &uses));
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    const jpp_op_t* op = &a->p->ops.data[id];
    if (!is_in_backward(a, id)) continue;
    for (uint32_t i = 0; i < op->num_inputs; ++i) ++uses[op->inputs[i]];
  }
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    const jpp_op_t* op = &a->p->ops.data[id];
    bool fixed = op->kind != JPP_OP_CALL || moves_out(a, op) ||
                 op->flags & (JPP_OP_BACKWARD | JPP_OP_EFFECT);
    if (fixed || !is_in_backward(a, id)) continue;
    uint32_t stage = jpp__segment_stage(a->stages, a->p->segment[id]);
    uint64_t made = 0;
    for (uint32_t k = 0; k < op->num_outputs; ++k) {
      made += jpp_type_bytes(&values[op->first_output + k].type);
    }
    if (made < bytes_saved(a, op, stage, uses)) a->p->segment[id] = stage;
  }
  return NULL;
}

static jpp_status_t* assign_segments(assigner_t* a) {
  JPP_RETURN_IF_ERROR(check_marks(a));
  a->last_is_unmarked = !has_last_mark(a);
  JPP_RETURN_IF_ERROR(claim_forward(a));
  JPP_RETURN_IF_ERROR(claim_backward(a));
  uint32_t ops = a->loop->op - a->loop->first_op;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&a->p->scratch, ops, &a->claimed));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&a->p->scratch, ops, &a->scalars_only));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&a->p->scratch, ops, &a->input_of));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&a->p->scratch, a->p->graph->num_values, &a->enters));
  for (uint32_t id = a->loop->first_op; id < a->loop->op; ++id) {
    a->claimed[id - a->loop->first_op] = a->p->segment[id] != JPP_SEGMENT_OPEN;
  }
  settle_by_operands(a);
  settle_effects(a);
  JPP_RETURN_IF_ERROR(settle_beside_weights(a));
  settle_by_operands(a);  // ops that use the results of these
  find_scalars_only(a);
  find_entering(a);
  find_ops_of_inputs(a);
  JPP_RETURN_IF_ERROR(settle_by_users(a));
  return settle_by_size(a);
}

jpp_status_t* jpp__partition_assign_stages(jpp_partitioner_t* p, uint32_t loop) {
  assigner_t assigner = {
      .p = p, .loop = &p->graph->loops[loop], .stages = p->options->loops[loop].stages};
  p->loops[loop].stages = assigner.stages;
  jpp_status_t* status = assign_segments(&assigner);
  p->loops[loop].has_backward = has_backward(&assigner);
  jpp_vec_deinit(&assigner.stack);
  return status;
}
