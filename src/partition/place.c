// Rule 5 of partition.h: decides the ranks and the phase of every op outside the loops.
//
// A forward pass gives each value that depends on a loop its "home", the ranks that can
// compute it without a transfer. A backward pass gives each value the ranks that need it
// and each op the ranks that run it. An unused op runs nowhere, unless it has an
// effect.
#include <string.h>

#include "base/bytes.h"
#include "partition/partitioner.h"
#include "task/ids.h"

enum { kDefaultSmallBytes = 4096, kFewBytes = 64 };

typedef struct placer {
  jpp_partitioner_t* p;
  uint64_t small_bytes;
  uint64_t* home;  // [values * words] for anchored values
  // [values] depends on a loop's results.
  bool* anchored;
  // [values] anchored, and made on every rank that needs it, or if none does on the first
  // rank of its home.
  bool* everywhere;
  uint64_t* weight;  // [values] how much an operand influences where its users run
  bool* is_output;   // [values] left on the ranks that make it
  bool* is_next;     // [values] of these, one that the next step takes
  uint64_t* left;    // [values * words] for outputs, the ranks that the user wants
  // [ops] a sum whose only user is another sum.
  bool* inner;
  // [values] the first phase in which an anchored value exists; for other values the
  // first phase that needs them.
  uint32_t* phase;
  uint64_t* scratch;    // [words]
  jpp_u32_vec_t order;  // the new p->outer
  jpp_add_tree_t tree;
  jpp_u32_vec_t terms;
} placer_t;

static uint64_t* home_at(const placer_t* c, uint32_t value) {
  return c->home + (size_t)value * c->p->words;
}

static uint64_t* left_at(const placer_t* c, uint32_t value) {
  return c->left + (size_t)value * c->p->words;
}

static void all_ranks(const placer_t* c, uint64_t* set) {
  memset(set, 0, c->p->words * sizeof(*set));
  for (uint32_t r = 0; r < c->p->options->ranks; ++r) jpp__ranks_add(set, r);
}

static bool is_small(const placer_t* c, uint32_t value) {
  return c->p->values.data[value].bytes <= c->small_bytes;
}

// --- Forward: homes -------------------------------------------------------------------

static bool is_fixed(const placer_t* c, uint32_t value) {
  return c->anchored[value] && !c->everywhere[value];
}

static bool is_array(const placer_t* c, uint32_t value) {
  return c->p->values.data[value].type.ndim > 0;
}

// Whether an operand, or one that is an array, has a fixed home.
static bool any_fixed(const placer_t* c, const jpp_op_t* op, bool arrays_only) {
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (is_fixed(c, value) && (!arrays_only || is_array(c, value))) return true;
  }
  return false;
}

// Stores in c->scratch the common ranks of all values with a fixed home, or of those that
// are arrays; all ranks if there are none. False if there are no such ranks.
static bool common_home(const placer_t* c, const uint32_t* values, size_t count,
                        bool arrays_only) {
  all_ranks(c, c->scratch);
  for (size_t i = 0; i < count; ++i) {
    if (!is_fixed(c, values[i]) || (arrays_only && !is_array(c, values[i]))) continue;
    jpp__ranks_intersect(c->scratch, home_at(c, values[i]), c->p->words);
  }
  return jpp__ranks_first(c->scratch, c->p->words) != JPP_NONE;
}

// The operand with the largest weight decides; of equal sizes, an array rather than a
// scalar.
static uint64_t weight_of_type(const placer_t* c, uint32_t value) {
  const jpp_value_t* v = &c->p->values.data[value];
  return jpp__bytes_add(jpp__bytes_multiply(2, v->bytes), v->type.ndim > 0);
}

static uint32_t heaviest_operand(const placer_t* c, const jpp_op_t* op) {
  uint32_t heaviest = JPP_NONE;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (!c->anchored[value]) continue;
    if (heaviest == JPP_NONE || c->weight[value] > c->weight[heaviest]) heaviest = value;
  }
  return heaviest;
}

static bool is_op_small(const placer_t* c, const jpp_op_t* op) {
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    if (c->anchored[op->inputs[i]] && !is_small(c, op->inputs[i])) return false;
  }
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    if (!is_small(c, op->first_output + i)) return false;
  }
  return true;
}

// Whether the op makes an array and only scalars tie it to a rank, for example when it
// updates an optimizer's state under a condition. Scalars cost little to send, so the
// users of the array decide where it is made.
static bool spreads_scalars(const placer_t* c, const jpp_op_t* op) {
  if (any_fixed(c, op, true)) return false;
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    if (is_array(c, op->first_output + i)) return true;
  }
  return false;
}

// Whether the op makes results of a loop.
static bool ends_loop(const jpp_partitioner_t* p, uint32_t op) {
  uint8_t kind = p->ops.data[op].kind;
  return kind == JPP_OP_LOOP || kind == JPP_OP_ACCUMULATE || kind == JPP_OP_UNPACK;
}

// The parts of a shared weight's gradient are summed on all ranks that hold the weight,
// so that its replicas stay equal.
static bool sums_parts(const placer_t* c, const jpp_op_t* op) {
  if (op->kind != JPP_OP_SUM) return false;
  uint32_t producer = c->p->values.data[op->inputs[0]].producer;
  return producer != JPP_NONE && ends_loop(c->p, producer);
}

// A large sum over ranks runs on all of them; any other large op runs on the ranks of its
// largest operand. The result is in c->scratch.
static void home_of_mixed(const placer_t* c, const jpp_op_t* op) {
  memset(c->scratch, 0, c->p->words * sizeof(*c->scratch));
  uint32_t largest = JPP_NONE;  // operand
  const jpp_value_t* values = c->p->values.data;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (!is_fixed(c, value)) continue;
    if (op->kind == JPP_OP_SUM || op->kind == JPP_OP_ADD) {
      jpp__ranks_unite(c->scratch, home_at(c, value), c->p->words);
    } else if (largest == JPP_NONE || values[value].bytes > values[largest].bytes) {
      largest = value;
      memcpy(c->scratch, home_at(c, value), c->p->words * sizeof(*c->scratch));
    }
  }
}

// Gives the outputs the home in c->scratch or, if they are made everywhere, the home of
// the operand with the largest weight.
static void set_outputs(const placer_t* c, const jpp_op_t* op, bool everywhere,
                        uint32_t phase) {
  uint32_t heaviest = heaviest_operand(c, op);
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    uint32_t value = op->first_output + i;
    c->anchored[value] = true;
    c->everywhere[value] = everywhere;
    c->phase[value] = phase;
    c->weight[value] = everywhere ? c->weight[heaviest] : weight_of_type(c, value);
    const uint64_t* home = everywhere ? home_at(c, heaviest) : c->scratch;
    memcpy(home_at(c, value), home, c->p->words * sizeof(*home));
  }
}

// Returns false if the op depends on no loop.
static bool anchored_phase(const placer_t* c, const jpp_op_t* op, uint32_t* out_phase) {
  bool found = false;
  *out_phase = 0;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (!c->anchored[value]) continue;
    found = true;
    if (c->phase[value] > *out_phase) *out_phase = c->phase[value];
  }
  return found;
}

// The ranks of the values beside which the user placed this one: their homes or, if they
// depend on no loop, the ranks whose loops need them. If there are none, all ranks.
static void home_beside(const placer_t* c, const jpp_op_t* op) {
  memset(c->scratch, 0, c->p->words * sizeof(*c->scratch));
  for (uint32_t i = 1; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    const uint64_t* ranks =
        c->anchored[value] ? home_at(c, value) : jpp__need_at(c->p, value);
    jpp__ranks_unite(c->scratch, ranks, c->p->words);
  }
  if (jpp__ranks_first(c->scratch, c->p->words) == JPP_NONE) all_ranks(c, c->scratch);
}

static void find_home(const placer_t* c, uint32_t id) {
  const jpp_op_t* op = &c->p->ops.data[id];
  if (op->kind == JPP_OP_TASK) {
    (void)anchored_phase(c, op, &c->p->phase[id]);
    memset(c->scratch, 0, c->p->words * sizeof(*c->scratch));
    jpp__ranks_add_all(c->scratch, op->ranks, op->num_ranks);
    set_outputs(c, op, false, c->p->phase[id]);
    return;
  }
  if (op->kind == JPP_OP_PLACE) {
    (void)anchored_phase(c, op, &c->p->phase[id]);
    home_beside(c, op);
    set_outputs(c, op, false, c->p->phase[id]);
    return;
  }
  uint32_t phase = 0;
  if (!anchored_phase(c, op, &phase)) return;
  c->p->phase[id] = phase;
  bool everywhere = true;
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

static bool same_home(const placer_t* c, uint32_t a, uint32_t b) {
  if (!c->anchored[a] || !c->anchored[b]) return true;
  if (c->everywhere[a] || c->everywhere[b]) return c->everywhere[a] && c->everywhere[b];
  return memcmp(home_at(c, a), home_at(c, b), c->p->words * sizeof(uint64_t)) == 0;
}

// Adds a sum of the leaves that have the same home as leaf `first`, and clears them from
// the tree.
static jpp_status_t* add_partial(placer_t* c, size_t first, uint32_t* out_value) {
  jpp_u32_vec_t* leaves = &c->tree.leaves;
  uint32_t anchor = leaves->data[first];
  c->terms.count = 0;
  for (size_t i = first; i < leaves->count; ++i) {
    uint32_t leaf = leaves->data[i];
    if (leaf == JPP_NONE || !same_home(c, anchor, leaf)) continue;
    if (!c->anchored[anchor] && c->anchored[leaf]) anchor = leaf;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&c->terms, leaf));
    leaves->data[i] = JPP_NONE;
  }
  *out_value = anchor;
  if (c->terms.count == 1) return NULL;
  jpp_op_t op = {.kind = JPP_OP_SUM,
                 .loop = JPP_NONE,
                 .num_inputs = (uint32_t)c->terms.count,
                 .inputs = c->terms.data,
                 .num_outputs = 1,
                 .name = "sum"};
  uint32_t id = 0;
  JPP_RETURN_IF_ERROR(jpp__partition_define(c->p, &op, anchor, JPP_NONE, &id, out_value));
  find_home(c, id);
  return JPP_VEC_PUSH(&c->order, id);
}

// Regroups a tree of sums whose terms are on different ranks: each rank sums its own
// terms, and only the partial sums are sent.
static jpp_status_t* regroup_sums(placer_t* c, uint32_t root) {
  jpp_partitioner_t* p = c->p;
  JPP_RETURN_IF_ERROR(
      jpp__add_tree_collect(p, p->ops.data[root].first_output, JPP_NONE, &c->tree));
  if (c->tree.leaves.count < 3) return NULL;
  if (common_home(c, c->tree.leaves.data, c->tree.leaves.count, false)) return NULL;
  jpp_u32_vec_t partials = {0};
  jpp_status_t* status = NULL;
  for (size_t i = 0; i < c->tree.leaves.count && !status; ++i) {
    if (c->tree.leaves.data[i] == JPP_NONE) continue;
    uint32_t value = 0;
    status = add_partial(c, i, &value);
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
static void find_inner_adds(placer_t* c) {
  const jpp_partitioner_t* p = c->p;
  for (size_t i = 0; i < p->outer.count; ++i) {
    const jpp_op_t* op = &p->ops.data[p->outer.data[i]];
    if (op->kind != JPP_OP_ADD || op->loop != JPP_NONE) continue;
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t producer = p->values.data[op->inputs[k]].producer;
      if (producer == JPP_NONE || p->uses[op->inputs[k]] != 1) continue;
      c->inner[producer] = true;
    }
  }
}

static jpp_status_t* place_forward(placer_t* c) {
  find_inner_adds(c);
  for (size_t i = 0; i < c->p->outer.count; ++i) {
    uint32_t id = c->p->outer.data[i];
    uint8_t kind = c->p->ops.data[id].kind;
    if (kind == JPP_OP_ADD && !c->inner[id]) JPP_RETURN_IF_ERROR(regroup_sums(c, id));
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&c->order, id));
    if (kind != JPP_OP_LOOP && kind != JPP_OP_INIT) find_home(c, id);
  }
  return NULL;
}

static void anchor_value(const placer_t* c, uint32_t value, uint32_t rank,
                         uint32_t phase) {
  jpp__ranks_add(home_at(c, value), rank);
  c->anchored[value] = true;
  c->weight[value] = weight_of_type(c, value);
  c->phase[value] = phase;
}

// An accumulator's initial state, and a loop's results, have the rank of their task as
// home.
static void anchor_results(placer_t* c) {
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
static void anchor_args(placer_t* c) {
  for (uint32_t i = 0; i < c->p->graph->num_args; ++i) {
    const jpp_graph_arg_t* arg = &c->p->graph->args[i];
    if (!arg->num_ranks) continue;
    jpp__ranks_add_all(home_at(c, arg->value), arg->ranks, arg->num_ranks);
    c->anchored[arg->value] = true;
    c->weight[arg->value] = weight_of_type(c, arg->value);
    c->phase[arg->value] = 0;
  }
}

// --- Backward: needs ------------------------------------------------------------------

static void need_by_stage_tasks(placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (size_t t = 0; t < p->tasks.count; ++t) {
    const jpp_task_t* task = &p->tasks.data[t];
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      uint32_t value = task->inputs[i];
      jpp__ranks_add(jpp__need_at(p, value), task->rank);
      if (!c->anchored[value] && task->loop < c->phase[value]) {
        c->phase[value] = task->loop;
      }
    }
  }
}

// Adds the needs of ops that run on every rank that needs their results, as far as these
// needs are known before outputs are placed.
static void need_of_unfixed(const placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (size_t i = c->order.count; i-- > 0;) {
    const jpp_op_t* op = &p->ops.data[c->order.data[i]];
    if (!op->num_outputs || is_fixed(c, op->first_output)) continue;
    if (op->flags & JPP_OP_EFFECT) continue;  // runs once
    memset(c->scratch, 0, p->words * sizeof(*c->scratch));
    for (uint32_t k = 0; k < op->num_outputs; ++k) {
      jpp__ranks_unite(c->scratch, jpp__need_at(p, op->first_output + k), p->words);
    }
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      jpp__ranks_unite(jpp__need_at(p, op->inputs[k]), c->scratch, p->words);
    }
  }
}

static bool is_unneeded(const placer_t* c, uint32_t value) {
  return jpp__ranks_first(jpp__need_at(c->p, value), c->p->words) == JPP_NONE;
}

// Adds a need of each array for the next step that depends on no loop and that nothing
// else uses, for example the moving average of a frozen weight: a rank that needs one of
// the values from which it is computed.
static jpp_status_t* need_beside_operands(const placer_t* c) {
  jpp_partitioner_t* p = c->p;
  // [values] a rank that needs it or, if none does, a value that it is computed from.
  uint32_t* near = NULL;
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, p->values.count, &near));
  for (uint32_t value = 0; value < p->values.count; ++value) {
    near[value] = jpp__ranks_first(jpp__need_at(p, value), p->words);
  }
  for (size_t i = 0; i < c->order.count; ++i) {
    const jpp_op_t* op = &p->ops.data[c->order.data[i]];
    uint32_t rank = JPP_NONE;
    for (uint32_t k = 0; k < op->num_inputs && rank == JPP_NONE; ++k) {
      if (is_array(c, op->inputs[k])) rank = near[op->inputs[k]];
    }
    for (uint32_t k = 0; k < op->num_outputs && rank != JPP_NONE; ++k) {
      uint32_t value = op->first_output + k;
      if (near[value] != JPP_NONE) continue;
      near[value] = rank;
      bool stays = c->is_next[value] && is_array(c, value) && !c->anchored[value];
      if (stays) jpp__ranks_add(jpp__need_at(p, value), rank);
    }
  }
  return NULL;
}

// A small output that depends on no loop is left on all ranks. An array that the step
// passes on unchanged, or that the next step takes, stays on the ranks that take it.
static bool is_left_on_all(const placer_t* c, uint32_t value) {
  bool passed_on = c->p->values.data[value].producer == JPP_NONE || c->is_next[value];
  bool stays = passed_on && is_array(c, value) && !is_unneeded(c, value);
  return is_small(c, value) && !stays;
}

// An output of the step is left on the ranks of its users; without users it is left on
// its home, on all ranks if it is small and depends on no loop, or else on one rank.
static void need_as_output(placer_t* c, uint32_t value) {
  uint64_t* need = jpp__need_at(c->p, value);
  uint32_t words = c->p->words;
  jpp__ranks_unite(need, left_at(c, value), words);
  if (!c->is_output[value]) return;
  if (is_fixed(c, value)) {
    jpp__ranks_unite(need, home_at(c, value), words);
  } else if (!c->anchored[value] && is_left_on_all(c, value)) {
    all_ranks(c, need);
  } else if (jpp__ranks_first(need, words) == JPP_NONE) {
    jpp__ranks_add(need,
                   c->anchored[value] ? jpp__ranks_first(home_at(c, value), words) : 0);
  }
}

// An op with an effect runs once: on the first rank that needs its results or, if none
// does, where its operands are. A task that the user wrote runs on the user's ranks.
static void run_once(const placer_t* c, const jpp_op_t* op, uint64_t* run) {
  if (op->kind == JPP_OP_TASK) {
    memset(run, 0, c->p->words * sizeof(*run));
    jpp__ranks_add_all(run, op->ranks, op->num_ranks);
    return;
  }
  uint32_t rank = jpp__ranks_first(run, c->p->words);
  if (rank == JPP_NONE) {
    if (!common_home(c, op->inputs, op->num_inputs, false)) home_of_mixed(c, op);
    rank = jpp__ranks_first(c->scratch, c->p->words);
  }
  memset(run, 0, c->p->words * sizeof(*run));
  jpp__ranks_add(run, rank);
}

// An op runs on those ranks of its home that need it. If there are none, the first rank
// of its home runs it and sends the result.
static void choose_ranks(placer_t* c, uint32_t id) {
  jpp_partitioner_t* p = c->p;
  const jpp_op_t* op = &p->ops.data[id];
  uint64_t* run = jpp__run_at(p, id);
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    uint32_t value = op->first_output + i;
    need_as_output(c, value);
    jpp__ranks_unite(run, jpp__need_at(p, value), p->words);
  }
  if (op->flags & JPP_OP_EFFECT) {
    run_once(c, op, run);
    return;
  }
  if (!op->num_outputs || jpp__ranks_first(run, p->words) == JPP_NONE) return;
  if (!is_fixed(c, op->first_output)) return;
  const uint64_t* home = home_at(c, op->first_output);
  jpp__ranks_intersect(run, home, p->words);
  if (jpp__ranks_first(run, p->words) == JPP_NONE) {
    jpp__ranks_add(run, jpp__ranks_first(home, p->words));
  }
}

static void choose_phase(placer_t* c, uint32_t id) {
  const jpp_op_t* op = &c->p->ops.data[id];
  if (!op->num_outputs || c->anchored[op->first_output]) return;
  uint32_t phase = c->p->graph->num_loops;
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    uint32_t first = c->phase[op->first_output + i];
    if (first < phase) phase = first;
    uint64_t bytes = c->p->values.data[op->first_output + i].bytes;
    if (bytes > kFewBytes) c->p->arrays[id] = true;
  }
  c->p->phase[id] = phase;
}

// Bytes of the op's operands that must be sent to `rank`; 0 for sums, which are
// regrouped, and for ops that the user placed.
static uint64_t bytes_moved(const placer_t* c, const jpp_op_t* op, uint32_t rank) {
  if (op->kind != JPP_OP_CALL) return 0;
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    bool here = !is_fixed(c, value) || jpp__ranks_has(home_at(c, value), rank);
    if (!here) bytes += c->p->values.data[value].bytes;
  }
  return bytes;
}

static jpp_status_t* place_backward(placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (size_t i = c->order.count; i-- > 0;) {
    uint32_t id = c->order.data[i];
    const jpp_op_t* op = &p->ops.data[id];
    if (op->kind == JPP_OP_LOOP) continue;
    choose_ranks(c, id);
    if (jpp__ranks_first(jpp__run_at(p, id), p->words) == JPP_NONE) continue;
    choose_phase(c, id);
    uint32_t rank = jpp__ranks_first(jpp__run_at(p, id), p->words);
    JPP_RETURN_IF_ERROR(jpp__partition_note_moves(p, id, rank, bytes_moved(c, op, rank)));
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t value = op->inputs[k];
      jpp__ranks_unite(jpp__need_at(p, value), jpp__run_at(p, id), p->words);
      if (!c->anchored[value] && p->phase[id] < c->phase[value]) {
        c->phase[value] = p->phase[id];
      }
    }
  }
  return NULL;
}

// Adds the needs of outputs that no op outside the loops makes: arguments and loop
// results.
static void need_of_plain_outputs(placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    uint32_t value = p->alias[p->graph->outputs[i].value];
    uint32_t producer = p->values.data[value].producer;
    bool plain = producer == JPP_NONE || ends_loop(p, producer);
    if (plain) need_as_output(c, value);
  }
}

// An output that becomes an argument of the next step is sent to the ranks that need that
// argument, for example weights that stages share when only one of their ranks updates
// them.
static void need_as_next_args(placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    const jpp_graph_output_t* output = &p->graph->outputs[i];
    if (output->next == JPP_NONE || output->num_ranks) continue;
    jpp__ranks_unite(jpp__need_at(p, p->alias[output->value]),
                     jpp__need_at(p, output->next), p->words);
  }
}

// Regrouping a tree of sums adds at most one value for each of its inner sums.
static jpp_status_t* allocate_tables(placer_t* c) {
  jpp_partitioner_t* p = c->p;
  size_t values = p->values.count + p->outer.count;
  size_t ops = p->ops.count + p->outer.count;
  p->words = (p->options->ranks + 63) / 64;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, values * p->words, &p->need));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, ops * p->words, &p->run));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, ops, &p->phase));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, ops, &p->arrays));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values * p->words, &c->home));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->anchored));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->everywhere));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->weight));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->is_output));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->is_next));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values * p->words, &c->left));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, ops, &c->inner));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->phase));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, p->words, &c->scratch));
  for (size_t i = 0; i < values; ++i) c->phase[i] = p->graph->num_loops;
  return NULL;
}

static void note_outputs(const placer_t* c) {
  const jpp_partitioner_t* p = c->p;
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    const jpp_graph_output_t* output = &p->graph->outputs[i];
    uint32_t value = p->alias[output->value];
    if (!output->num_ranks) {
      c->is_output[value] = true;
      c->is_next[value] |= output->next != JPP_NONE;
    }
    jpp__ranks_add_all(left_at(c, value), output->ranks, output->num_ranks);
  }
}

static jpp_status_t* place_all(placer_t* c) {
  jpp_partitioner_t* p = c->p;
  JPP_RETURN_IF_ERROR(allocate_tables(c));
  note_outputs(c);
  anchor_args(c);
  anchor_results(c);
  need_by_stage_tasks(c);
  JPP_RETURN_IF_ERROR(place_forward(c));
  // Ops run on the ranks that need their results in the next step: first, those whose
  // loops need them, for example weights; then, those that update these.
  for (int i = 0; i < 2; ++i) {
    need_of_unfixed(c);
    need_as_next_args(c);
  }
  JPP_RETURN_IF_ERROR(need_beside_operands(c));
  JPP_RETURN_IF_ERROR(place_backward(c));
  need_of_plain_outputs(c);
  need_as_next_args(c);
  jpp_u32_vec_t replaced = p->outer;
  p->outer = c->order;
  c->order = replaced;
  return NULL;
}

jpp_status_t* jpp__partition_place(jpp_partitioner_t* p) {
  placer_t placer = {.p = p, .small_bytes = p->options->small_bytes};
  if (!placer.small_bytes) placer.small_bytes = kDefaultSmallBytes;
  jpp_status_t* status = place_all(&placer);
  jpp_vec_deinit(&placer.order);
  jpp__add_tree_deinit(&placer.tree);
  jpp_vec_deinit(&placer.terms);
  return status;
}
