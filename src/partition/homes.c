// The homes of values outside the loops: of those that depend on a loop, and of small
// ones that are made of a large value.
#include "base/bytes.h"
#include "partition/placer.h"

typedef struct finder {
  jpp_placer_t* c;
  // [values * words] the ranks whose stage tasks take the value or a large value that is
  // made of it, directly or not; if there are none, those of the largest value that it is
  // made of.
  uint64_t* held;
  // [ops] a sum whose only user is another sum.
  bool* inner;
  jpp_add_tree_t tree;
  jpp_u32_vec_t terms;
} finder_t;

static uint64_t* held_at(const finder_t* f, uint32_t value) {
  return f->held + (size_t)value * f->c->p->words;
}

// An array with a fixed home, but not a small one that is made of a large one.
static bool is_fixed_array(const jpp_placer_t* c, uint32_t value) {
  return jpp__is_fixed(c, value) && jpp__is_array(c, value) && !c->floats[value];
}

// Whether an operand, or one that is an array, has a fixed home.
static bool any_fixed(const jpp_placer_t* c, const jpp_op_t* op, bool arrays_only) {
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (arrays_only ? is_fixed_array(c, value) : jpp__is_fixed(c, value)) return true;
  }
  return false;
}

// Stores in c->scratch the common ranks of all values with a fixed home, or of those that
// are arrays; all ranks if there are none. False if there are no such ranks.
static bool common_home(const jpp_placer_t* c, const uint32_t* values, size_t count,
                        bool arrays_only) {
  jpp__all_ranks(c, c->scratch);
  for (size_t i = 0; i < count; ++i) {
    bool counts =
        arrays_only ? is_fixed_array(c, values[i]) : jpp__is_fixed(c, values[i]);
    if (!counts) continue;
    jpp__ranks_intersect(c->scratch, jpp__home_at(c, values[i]), c->p->words);
  }
  return jpp__ranks_first(c->scratch, c->p->words) != JPP_NONE;
}

// The operand with the largest weight decides; of equal sizes, an array rather than a
// scalar.
static uint64_t weight_of_type(const jpp_placer_t* c, uint32_t value) {
  const jpp_value_t* v = &c->p->values.data[value];
  return jpp__bytes_add(jpp__bytes_multiply(2, v->bytes), v->type.ndim > 0);
}

static uint32_t heaviest_operand(const jpp_placer_t* c, const jpp_op_t* op) {
  uint32_t heaviest = JPP_NONE;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (!c->anchored[value]) continue;
    if (heaviest == JPP_NONE || c->weight[value] > c->weight[heaviest]) heaviest = value;
  }
  return heaviest;
}

static bool makes_small(const jpp_placer_t* c, const jpp_op_t* op) {
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    if (!jpp__is_small_value(c, op->first_output + i)) return false;
  }
  return true;
}

static bool is_op_small(const jpp_placer_t* c, const jpp_op_t* op) {
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    if (c->anchored[op->inputs[i]] && !jpp__is_small_value(c, op->inputs[i]))
      return false;
  }
  return makes_small(c, op);
}

// Whether the op makes an array and only scalars tie it to a rank, for example when it
// updates an optimizer's state under a condition. Scalars cost little to send, so the
// users of the array decide where it is made.
static bool spreads_scalars(const jpp_placer_t* c, const jpp_op_t* op) {
  if (any_fixed(c, op, true)) return false;
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    if (jpp__is_array(c, op->first_output + i)) return true;
  }
  return false;
}

// The parts of a shared weight's gradient are summed on all ranks that hold the weight,
// so that its replicas stay equal.
static bool sums_parts(const jpp_placer_t* c, const jpp_op_t* op) {
  if (op->kind != JPP_OP_SUM) return false;
  uint32_t producer = c->p->values.data[op->inputs[0]].producer;
  return producer != JPP_NONE && jpp__ends_loop(c->p, producer);
}

// A large sum over ranks runs on all of them; any other large op runs on the ranks of its
// largest operand. The result is in c->scratch.
static void home_of_mixed(const jpp_placer_t* c, const jpp_op_t* op) {
  memset(c->scratch, 0, c->p->words * sizeof(*c->scratch));
  uint32_t largest = JPP_NONE;  // operand
  const jpp_value_t* values = c->p->values.data;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (!jpp__is_fixed(c, value)) continue;
    if (op->kind == JPP_OP_SUM || op->kind == JPP_OP_ADD) {
      jpp__ranks_unite(c->scratch, jpp__home_at(c, value), c->p->words);
    } else if (largest == JPP_NONE || values[value].bytes > values[largest].bytes) {
      largest = value;
      memcpy(c->scratch, jpp__home_at(c, value), c->p->words * sizeof(*c->scratch));
    }
  }
}

// Gives the outputs the home in c->scratch or, if they are made everywhere, the home of
// the operand with the largest weight. `phase` JPP_NONE: they depend on no loop.
static void set_outputs(const jpp_placer_t* c, const jpp_op_t* op, bool everywhere,
                        uint32_t phase) {
  uint32_t heaviest = heaviest_operand(c, op);
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    uint32_t value = op->first_output + i;
    c->anchored[value] = true;
    c->everywhere[value] = everywhere;
    c->floats[value] = phase == JPP_NONE;
    if (phase != JPP_NONE) c->phase[value] = phase;
    c->weight[value] = everywhere ? c->weight[heaviest] : weight_of_type(c, value);
    const uint64_t* home = everywhere ? jpp__home_at(c, heaviest) : c->scratch;
    memcpy(jpp__home_at(c, value), home, c->p->words * sizeof(*home));
  }
}

// The first phase in which all operands exist; JPP_NONE if none depends on a loop.
static uint32_t phase_of_operands(const jpp_placer_t* c, const jpp_op_t* op) {
  uint32_t latest = JPP_NONE;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (!c->anchored[value] || c->floats[value]) continue;
    if (latest == JPP_NONE || c->phase[value] > latest) latest = c->phase[value];
  }
  return latest;
}

static bool any_anchored(const jpp_placer_t* c, const jpp_op_t* op) {
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    if (c->anchored[op->inputs[i]]) return true;
  }
  return false;
}

// The ranks of the values beside which the user placed this one: their homes or, if they
// depend on no loop, the ranks whose loops need them. If there are none, all ranks.
static void home_beside(const jpp_placer_t* c, const jpp_op_t* op) {
  memset(c->scratch, 0, c->p->words * sizeof(*c->scratch));
  for (uint32_t i = 1; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    const uint64_t* ranks =
        c->anchored[value] ? jpp__home_at(c, value) : jpp__need_at(c->p, value);
    jpp__ranks_unite(c->scratch, ranks, c->p->words);
  }
  if (jpp__ranks_first(c->scratch, c->p->words) == JPP_NONE)
    jpp__all_ranks(c, c->scratch);
}

static uint32_t largest_operand(const jpp_placer_t* c, const jpp_op_t* op) {
  uint32_t largest = JPP_NONE;
  const jpp_value_t* values = c->p->values.data;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (largest == JPP_NONE || values[value].bytes > values[largest].bytes)
      largest = value;
  }
  return largest;
}

static bool is_held(const finder_t* f, uint32_t value) {
  return jpp__ranks_first(held_at(f, value), f->c->p->words) != JPP_NONE;
}

// Of the largest operands, one that some rank holds, if there is one: the difference from
// a copy of the weight that no stage uses belongs with the weight.
static uint32_t largest_held_operand(const finder_t* f, const jpp_op_t* op) {
  const jpp_value_t* values = f->c->p->values.data;
  uint32_t largest = largest_operand(f->c, op);
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (values[value].bytes == values[largest].bytes && is_held(f, value)) return value;
  }
  return largest;
}

// Whether the op makes only small values, of a large one that has no fixed home: then the
// ranks that hold the large one, if any do, are in c->scratch. An example is the norm of
// a weight, scaled or not by a number from the loop: its rank computes and sends it, and
// the weight stays where it is.
static bool reduces_held(const finder_t* f, const jpp_op_t* op) {
  const jpp_placer_t* c = f->c;
  if (op->kind != JPP_OP_CALL || (op->flags & JPP_OP_EFFECT)) return false;
  uint32_t largest = largest_held_operand(f, op);
  if (largest == JPP_NONE || jpp__is_small_value(c, largest)) return false;
  if (!makes_small(c, op)) return false;
  memcpy(c->scratch, held_at(f, largest), c->p->words * sizeof(*c->scratch));
  return jpp__ranks_first(c->scratch, c->p->words) != JPP_NONE;
}

static void find_home(const finder_t* f, uint32_t id) {
  const jpp_placer_t* c = f->c;
  const jpp_op_t* op = &c->p->ops.data[id];
  uint32_t phase = phase_of_operands(c, op);
  if (op->kind == JPP_OP_TASK || op->kind == JPP_OP_PLACE) {
    if (phase == JPP_NONE) phase = 0;
    c->p->phase[id] = phase;
    if (op->kind == JPP_OP_TASK) {
      memset(c->scratch, 0, c->p->words * sizeof(*c->scratch));
      jpp__ranks_add_all(c->scratch, op->ranks, op->num_ranks);
    } else {
      home_beside(c, op);
    }
    set_outputs(c, op, false, phase);
    return;
  }
  bool reduces = !any_fixed(c, op, false) && reduces_held(f, op);
  if (!reduces && !any_anchored(c, op)) return;
  c->p->phase[id] = phase;
  bool everywhere = !reduces;
  if (any_fixed(c, op, false)) {
    if (common_home(c, op->inputs, op->num_inputs, false)) {
      everywhere = spreads_scalars(c, op);
    } else if (any_fixed(c, op, true) &&
               common_home(c, op->inputs, op->num_inputs, true)) {
      everywhere = false;  // scalars come to their arrays
    } else {
      everywhere = is_op_small(c, op) && !sums_parts(c, op);
      if (!everywhere) home_of_mixed(c, op);
    }
  }
  set_outputs(c, op, everywhere, phase);
}

// --- Sums over ranks ------------------------------------------------------------------

static bool same_home(const jpp_placer_t* c, uint32_t a, uint32_t b) {
  if (!c->anchored[a] || !c->anchored[b]) return true;
  if (c->everywhere[a] || c->everywhere[b]) return c->everywhere[a] && c->everywhere[b];
  return memcmp(jpp__home_at(c, a), jpp__home_at(c, b), c->p->words * sizeof(uint64_t)) ==
         0;
}

// Adds a sum of the leaves that have the same home as leaf `first`, and clears them from
// the tree.
static jpp_status_t* add_partial(finder_t* f, size_t first, uint32_t* out_value) {
  jpp_placer_t* c = f->c;
  jpp_u32_vec_t* leaves = &f->tree.leaves;
  uint32_t anchor = leaves->data[first];
  f->terms.count = 0;
  for (size_t i = first; i < leaves->count; ++i) {
    uint32_t leaf = leaves->data[i];
    if (leaf == JPP_NONE || !same_home(c, anchor, leaf)) continue;
    if (!c->anchored[anchor] && c->anchored[leaf]) anchor = leaf;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&f->terms, leaf));
    leaves->data[i] = JPP_NONE;
  }
  *out_value = anchor;
  if (f->terms.count == 1) return NULL;
  jpp_op_t op = {.kind = JPP_OP_SUM,
                 .loop = JPP_NONE,
                 .num_inputs = (uint32_t)f->terms.count,
                 .inputs = f->terms.data,
                 .num_outputs = 1,
                 .name = "sum"};
  uint32_t id = 0;
  JPP_RETURN_IF_ERROR(jpp__partition_define(c->p, &op, anchor, JPP_NONE, &id, out_value));
  find_home(f, id);
  return JPP_VEC_PUSH(&c->order, id);
}

// Regroups a tree of sums whose terms are on different ranks: each rank sums its own
// terms, and only the partial sums are sent.
static jpp_status_t* regroup_sums(finder_t* f, uint32_t root) {
  jpp_placer_t* c = f->c;
  jpp_partitioner_t* p = c->p;
  JPP_RETURN_IF_ERROR(
      jpp__add_tree_collect(p, p->ops.data[root].first_output, JPP_NONE, &f->tree));
  if (f->tree.leaves.count < 3) return NULL;
  if (common_home(c, f->tree.leaves.data, f->tree.leaves.count, false)) return NULL;
  jpp_u32_vec_t partials = {0};
  jpp_status_t* status = NULL;
  for (size_t i = 0; i < f->tree.leaves.count && !status; ++i) {
    if (f->tree.leaves.data[i] == JPP_NONE) continue;
    uint32_t value = 0;
    status = add_partial(f, i, &value);
    if (!status) status = JPP_VEC_PUSH(&partials, value);
  }
  jpp_op_t* op = &p->ops.data[root];
  op->kind = JPP_OP_SUM;
  op->name = "sum";
  op->num_inputs = (uint32_t)partials.count;
  if (!status) status = JPP_VEC_TO_ARENA(&partials, p->arena, &op->inputs);
  jpp_vec_deinit(&partials);
  return status;
}

// Marks sums whose only user is another sum.
static void find_inner_adds(finder_t* f) {
  const jpp_partitioner_t* p = f->c->p;
  for (size_t i = 0; i < p->outer.count; ++i) {
    const jpp_op_t* op = &p->ops.data[p->outer.data[i]];
    if (op->kind != JPP_OP_ADD) continue;
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t producer = p->values.data[op->inputs[k]].producer;
      if (producer == JPP_NONE || p->uses[op->inputs[k]] != 1) continue;
      f->inner[producer] = true;
    }
  }
}

static jpp_status_t* place_forward(finder_t* f) {
  jpp_placer_t* c = f->c;
  find_inner_adds(f);
  for (size_t i = 0; i < c->p->outer.count; ++i) {
    uint32_t id = c->p->outer.data[i];
    uint8_t kind = c->p->ops.data[id].kind;
    if (kind == JPP_OP_ADD && !f->inner[id]) JPP_RETURN_IF_ERROR(regroup_sums(f, id));
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&c->order, id));
    if (kind != JPP_OP_LOOP && kind != JPP_OP_INIT) find_home(f, id);
  }
  return NULL;
}

// --- Where homes begin ----------------------------------------------------------------

static void anchor_value(const jpp_placer_t* c, uint32_t value, uint32_t rank,
                         uint32_t phase) {
  jpp__ranks_add(jpp__home_at(c, value), rank);
  c->anchored[value] = true;
  c->weight[value] = weight_of_type(c, value);
  c->phase[value] = phase;
}

// An accumulator's initial state, and a loop's results, have the rank of their task as
// home.
static void anchor_results(jpp_placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (size_t i = 0; i < p->accumulators.count; ++i) {
    const jpp_accumulator_t* acc = &p->accumulators.data[i];
    uint32_t rank = p->tasks.data[acc->task].rank;
    anchor_value(c, acc->init, rank, acc->loop);
    anchor_value(c, acc->final, rank, acc->loop + 1);
    jpp__ranks_add(jpp__need_at(p, acc->init), rank);
    p->phase[p->values.data[acc->init].producer] = acc->loop;
  }
  for (size_t i = 0; i < p->made.count; ++i) {
    const jpp_op_t* op = &p->ops.data[p->made.data[i].op];
    if (p->values.data[op->first_output].loop != JPP_NONE) continue;
    anchor_value(c, op->first_output, p->tasks.data[p->made.data[i].task].rank,
                 op->loop + 1);
  }
}

// An argument that the user passes on some ranks has these as home.
static void anchor_args(jpp_placer_t* c) {
  for (uint32_t i = 0; i < c->p->graph->num_args; ++i) {
    const jpp_graph_arg_t* arg = &c->p->graph->args[i];
    if (!arg->num_ranks) continue;
    jpp__ranks_add_all(jpp__home_at(c, arg->value), arg->ranks, arg->num_ranks);
    c->anchored[arg->value] = true;
    c->weight[arg->value] = weight_of_type(c, arg->value);
    c->phase[arg->value] = 0;
  }
}

static void hold_operands(const finder_t* f, const jpp_op_t* op) {
  const jpp_placer_t* c = f->c;
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    uint32_t made = op->first_output + i;
    if (jpp__is_small_value(c, made)) continue;
    const uint64_t* ranks =
        jpp__is_fixed(c, made) ? jpp__home_at(c, made) : held_at(f, made);
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      jpp__ranks_unite(held_at(f, op->inputs[k]), ranks, c->p->words);
    }
  }
}

static void hold_results(const finder_t* f, const jpp_op_t* op) {
  uint32_t largest = largest_held_operand(f, op);
  for (uint32_t i = 0; i < op->num_outputs && largest != JPP_NONE; ++i) {
    uint32_t made = op->first_output + i;
    if (is_held(f, made)) continue;
    jpp__ranks_unite(held_at(f, made), held_at(f, largest), f->c->p->words);
  }
}

// An optimizer's state is held where it is updated, so homes are found once without this.
static void find_held(const finder_t* f) {
  const jpp_partitioner_t* p = f->c->p;
  for (size_t i = 0; i < p->outer.count; ++i) {
    uint8_t kind = p->ops.data[p->outer.data[i]].kind;
    if (kind != JPP_OP_LOOP && kind != JPP_OP_INIT) find_home(f, p->outer.data[i]);
  }
  for (size_t v = 0; v < p->values.count * p->words; ++v) f->held[v] |= p->need[v];
  for (size_t i = p->outer.count; i-- > 0;) {
    hold_operands(f, &p->ops.data[p->outer.data[i]]);
  }
  for (size_t i = 0; i < p->outer.count; ++i) {
    hold_results(f, &p->ops.data[p->outer.data[i]]);
  }
}

static jpp_status_t* find_homes(finder_t* f) {
  jpp_partitioner_t* p = f->c->p;
  size_t words = (p->values.count + p->outer.count) * p->words;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, words, &f->held));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&p->scratch, p->ops.count + p->outer.count, &f->inner));
  anchor_args(f->c);
  anchor_results(f->c);
  find_held(f);
  return place_forward(f);
}

jpp_status_t* jpp__placer_find_homes(jpp_placer_t* c) {
  finder_t finder = {.c = c};
  jpp_status_t* status = find_homes(&finder);
  jpp__add_tree_deinit(&finder.tree);
  jpp_vec_deinit(&finder.terms);
  return status;
}

void jpp__placer_home_of_operands(const jpp_placer_t* c, const jpp_op_t* op) {
  if (!common_home(c, op->inputs, op->num_inputs, false)) home_of_mixed(c, op);
}
