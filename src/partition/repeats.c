// Finds the ops that a task repeats: the layers of a stage, or the updates of weights of
// the same types. Two blocks of ops are equal if renaming the values of one gives the
// other, and matching values have the same type.
//
// The blocks of a repeat follow each other. In the order of a task, the ops of one layer
// do, but those that update one weight do not: an optimizer computes the first moments of
// all weights, then all second moments, and so on. For these, a second order is searched,
// which lists the ops that a value depends on directly before the op that produces it.
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/null.h"
#include "jaxpp/partition.h"
#include "task/ids.h"

// The shortest block that is worth a function, and the number of ops that compute the
// same as a block's first one that may begin the second block.
enum { kFewestOps = 8, kMostStarts = 64 };

typedef struct finder {
  const jpp_staged_t* staged;
  uint32_t num_ops;
  const uint32_t* ops;  // [num_ops] in the order that is searched
  uint32_t* at;         // [staged ops] position in that order; JPP_NONE: not in the task
  uint32_t* next;       // [num_ops] position of the next op with the same code; JPP_NONE
  uint32_t* match;      // [values] of the first block: the matching one of another block
  uint32_t* match_of;   // [values] of the other block: the matching one of the first
  jpp_arena_t scratch;
} finder_t;

static const jpp_op_t* op_at(const finder_t* f, uint32_t at) {
  return &f->staged->ops[f->ops[at]];
}

// The position of the op that makes a value; JPP_NONE: the task takes it.
static uint32_t maker_of(const finder_t* f, uint32_t value) {
  uint32_t producer = f->staged->values[value].producer;
  return producer == JPP_NONE ? JPP_NONE : f->at[producer];
}

// Whether ops with the same code compute the same, however often they run.
static bool is_known(const jpp_op_t* op) {
  bool calls = op->kind == JPP_OP_CALL || op->kind == JPP_OP_ADD;
  return calls && op->code && !(op->flags & JPP_OP_EFFECT);
}

// --- Orders ---------------------------------------------------------------------------

static int compare_keys(const void* a, const void* b) {
  uint64_t x = *(const uint64_t*)a, y = *(const uint64_t*)b;
  return x < y ? -1 : x > y;
}

// Makes `ops` the order that is searched. `keys`: room for [num_ops].
static void set_order(finder_t* f, const uint32_t* ops, uint64_t* keys) {
  f->ops = ops;
  for (uint32_t i = 0; i < f->num_ops; ++i) {
    f->at[ops[i]] = i;
    keys[i] = (uint64_t)op_at(f, i)->code << 32 | i;
  }
  qsort(keys, f->num_ops, sizeof(*keys), compare_keys);
  for (uint32_t i = 0; i < f->num_ops; ++i) {
    bool last = i + 1 == f->num_ops || keys[i + 1] >> 32 != keys[i] >> 32;
    f->next[(uint32_t)keys[i]] = last ? JPP_NONE : (uint32_t)keys[i + 1];
  }
}

// Appends an op after all ops that it needs and that `placed` lacks. `stack` and
// `entered`, the number of each op's inputs that are done: room for [num_ops].
static void place_op(const finder_t* f, uint32_t at, bool* placed, uint32_t* stack,
                     uint32_t* entered, uint32_t* ops, uint32_t* count) {
  uint32_t depth = 0;
  if (placed[at]) return;
  placed[at] = true;
  stack[depth++] = at;
  while (depth) {
    uint32_t top = stack[depth - 1];
    const jpp_op_t* op = op_at(f, top);
    if (entered[top] == op->num_inputs) {
      ops[(*count)++] = f->ops[top];
      --depth;
      continue;
    }
    uint32_t maker = maker_of(f, op->inputs[entered[top]++]);
    if (maker == JPP_NONE || placed[maker]) continue;
    placed[maker] = true;
    stack[depth++] = maker;
  }
}

// The order that begins with the last op and everything that it needs.
static jpp_status_t* order_by_need(finder_t* f, uint32_t** out_ops) {
  bool* placed = NULL;
  uint32_t *stack = NULL, *entered = NULL, count = 0;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&f->scratch, f->num_ops, &placed));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&f->scratch, f->num_ops, &stack));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&f->scratch, f->num_ops, &entered));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&f->scratch, f->num_ops, out_ops));
  for (uint32_t i = f->num_ops; i-- > 0;) {
    place_op(f, i, placed, stack, entered, *out_ops, &count);
  }
  return NULL;
}

// --- Blocks ---------------------------------------------------------------------------

// Whether operand `x` of the block that begins at `a` matches operand `y` of the one at
// `b`.
static bool operands_match(const finder_t* f, uint32_t a, uint32_t b, uint32_t x,
                           uint32_t y) {
  uint32_t maker_x = maker_of(f, x), maker_y = maker_of(f, y);
  bool own_x = maker_x != JPP_NONE && maker_x >= a;
  bool own_y = maker_y != JPP_NONE && maker_y >= b;
  if (own_x || own_y) {
    return own_x && own_y && maker_x - a == maker_y - b &&
           x - op_at(f, maker_x)->first_output == y - op_at(f, maker_y)->first_output;
  }
  if (f->match[x] != JPP_NONE || f->match_of[y] != JPP_NONE) {
    return f->match[x] == y && f->match_of[y] == x;
  }
  const jpp_value_t* values = f->staged->values;
  if (!jpp_type_equal(&values[x].type, &values[y].type)) return false;
  f->match[x] = y;
  f->match_of[y] = x;
  return true;
}

static bool ops_match(const finder_t* f, uint32_t a, uint32_t b, uint32_t offset) {
  const jpp_op_t *x = op_at(f, a + offset), *y = op_at(f, b + offset);
  const jpp_value_t* values = f->staged->values;
  if (!is_known(x) || !is_known(y) || x->kind != y->kind || x->code != y->code) {
    return false;
  }
  if (x->num_inputs != y->num_inputs || x->num_outputs != y->num_outputs) return false;
  for (uint32_t k = 0; k < x->num_inputs; ++k) {
    if (!operands_match(f, a, b, x->inputs[k], y->inputs[k])) return false;
  }
  for (uint32_t k = 0; k < x->num_outputs; ++k) {
    if (!jpp_type_equal(&values[x->first_output + k].type,
                        &values[y->first_output + k].type)) {
      return false;
    }
  }
  return true;
}

static bool blocks_match(const finder_t* f, uint32_t a, uint32_t b, uint32_t length) {
  uint32_t same = 0;
  while (same < length && ops_match(f, a, b, same)) ++same;
  for (uint32_t i = 0; i < length && i <= same; ++i) {
    const jpp_op_t *x = op_at(f, a + i), *y = op_at(f, b + i);
    for (uint32_t k = 0; k < x->num_inputs; ++k) f->match[x->inputs[k]] = JPP_NONE;
    for (uint32_t k = 0; k < y->num_inputs; ++k) f->match_of[y->inputs[k]] = JPP_NONE;
  }
  return same == length;
}

// The number of ops that need not be lowered again.
static uint32_t saved_by(const jpp_repeat_t* repeat) {
  return repeat->count ? (repeat->count - 1) * repeat->length : 0;
}

// The blocks that begin at a position and save the most ops; a count of 0: none.
static jpp_repeat_t best_at(const finder_t* f, uint32_t first) {
  jpp_repeat_t best = {.first = first};
  uint32_t second = f->next[first];
  for (uint32_t i = 0; i < kMostStarts && second != JPP_NONE; ++i) {
    jpp_repeat_t found = {.first = first, .length = second - first, .count = 1};
    uint32_t end = second;  // of the last block
    second = f->next[second];
    if (found.length < kFewestOps) continue;
    while (found.length <= f->num_ops - end &&
           blocks_match(f, first, end, found.length)) {
      ++found.count;
      end += found.length;
    }
    if (saved_by(&found) > saved_by(&best)) best = found;
  }
  return best;
}

// Returns the number of ops that are saved. `repeats`: room for [num_ops / 2].
static uint32_t find_repeats(const finder_t* f, jpp_repeat_t* repeats,
                             uint32_t* out_count) {
  uint32_t saved = 0;
  *out_count = 0;
  for (uint32_t i = 0; i < f->num_ops;) {
    jpp_repeat_t best = best_at(f, i);
    i += best.count ? best.count * best.length : 1;
    if (!best.count) continue;
    repeats[(*out_count)++] = best;
    saved += saved_by(&best);
  }
  return saved;
}

// --- A task ---------------------------------------------------------------------------

// Other ops may depend on their order: effects, and parts of an equation that JAX lowers
// together. Those of the planner do not.
static bool may_reorder(const finder_t* f) {
  for (uint32_t i = 0; i < f->num_ops; ++i) {
    const jpp_op_t* op = op_at(f, i);
    if (!is_known(op) && op->kind < JPP_OP_INIT) return false;
  }
  return true;
}

static jpp_status_t* search(finder_t* f, const jpp_task_t* task, uint32_t* ops,
                            jpp_repeat_t* repeats, uint32_t* out_count) {
  const jpp_staged_t* staged = f->staged;
  uint64_t* keys = NULL;
  jpp_repeat_t* others = NULL;
  uint32_t *by_need = NULL, num_others = 0;
  JPP_RETURN_IF_ERROR(jpp__ids_create(&f->scratch, staged->num_ops, &f->at));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&f->scratch, f->num_ops, &f->next));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&f->scratch, staged->num_values, &f->match));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&f->scratch, staged->num_values, &f->match_of));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&f->scratch, f->num_ops, &keys));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&f->scratch, f->num_ops / 2, &others));
  memcpy(ops, task->ops, f->num_ops * sizeof(*ops));
  set_order(f, task->ops, keys);
  uint32_t saved = find_repeats(f, repeats, out_count);
  if (!may_reorder(f)) return NULL;
  JPP_RETURN_IF_ERROR(order_by_need(f, &by_need));
  set_order(f, by_need, keys);
  if (find_repeats(f, others, &num_others) <= saved) return NULL;
  memcpy(ops, by_need, f->num_ops * sizeof(*ops));
  memcpy(repeats, others, num_others * sizeof(*others));
  *out_count = num_others;
  return NULL;
}

jpp_status_t* jpp_staged_find_repeats(const jpp_staged_t* staged, uint32_t task,
                                      uint32_t* ops, jpp_repeat_t* repeats,
                                      uint32_t* out_count) {
  JPP_RETURN_IF_NULL(staged, ops, repeats, out_count);
  const jpp_task_t* of = &staged->tasks[task];
  finder_t finder = {.staged = staged, .num_ops = of->num_ops};
  jpp_status_t* status = search(&finder, of, ops, repeats, out_count);
  jpp__arena_deinit(&finder.scratch);
  return status;
}
