// Cuts a program without marks into stages: a dynamic program along each of several
// orders of the ops, then moves of single ops between neighbouring stages.
#include <math.h>
#include <stdbool.h>

#include "base/arena.h"
#include "base/null.h"
#include "base/struct_size.h"
#include "jaxpp/partition_cut.h"

// How much more than the least the heaviest stage may cost, so that fewer bytes are
// passed.
static const double kSlack = 1.02;

enum { kBisections = 40, kMostOrders = 256, kMostWork = 10000000 };

// Lists of numbers: those of `i` are items[first[i]] to items[first[i + 1] - 1].
typedef struct lists {
  uint32_t* first;
  uint32_t* items;
} lists_t;

typedef struct cut {
  uint32_t* stages;  // [num_ops]
  double heaviest;   // cost of the heaviest stage
  double bytes;      // that pass the boundaries
} cut_t;

typedef struct cutter {
  const jpp_cut_program_t* program;
  uint32_t num_stages;
  jpp_arena_t arena;
  lists_t made;      // the values that each op makes
  lists_t operands;  // the values that each op uses
  lists_t users;     // the ops that use each value
  // The order that is tried, and for each boundary in front of a position:
  uint32_t* order;  // [num_ops]
  uint32_t* place;  // [num_ops] of each op in the order
  double* before;   // [num_ops + 1] the cost of all ops before it
  double* passing;  // [num_ops + 1] the bytes that pass it; INFINITY if no value does
  // The dynamic program: the fewest bytes that pass the boundaries of the first k stages
  // if they have the ops before a position, for k and for k - 1.
  double *bytes, *bytes_before;  // [num_ops + 1]
  uint32_t* starts;  // [num_stages][num_ops + 1] where the last of the k stages starts
  uint32_t* window;  // [num_ops + 1]
  double* costs;     // [num_stages]
  cut_t found, best;
} cutter_t;

// --- The program ----------------------------------------------------------------------

static jpp_status_t* check_program(const jpp_cut_program_t* p) {
  for (uint32_t i = 0; i < p->num_ops; ++i) {
    if (p->costs[i] >= 0 && isfinite(p->costs[i])) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "op %u: expected a finite cost of at least 0, found %g", i,
                           p->costs[i]);
  }
  for (uint32_t v = 0; v < p->num_values; ++v) {
    if (p->makers[v] < p->num_ops) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "value %u: expected a maker below %u, found %u", v, p->num_ops,
                           p->makers[v]);
  }
  for (uint32_t u = 0; u < p->num_uses; ++u) {
    bool exists = p->used[u] < p->num_values && p->users[u] < p->num_ops;
    if (exists && p->makers[p->used[u]] < p->users[u]) continue;
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "use %u, of value %u by op %u: expected a value below %u that an "
        "earlier op makes",
        u, p->used[u], p->users[u], p->num_values);
  }
  return NULL;
}

// `items` in lists by `keys`, in order. NULL items: their own numbers.
static jpp_status_t* make_lists(jpp_arena_t* arena, uint32_t num_lists,
                                const uint32_t* keys, const uint32_t* items,
                                uint32_t num_items, lists_t* out_lists) {
  uint32_t *first = NULL, *sorted = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, (size_t)num_lists + 1, &first));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, num_items, &sorted));
  for (uint32_t i = 0; i < num_items; ++i) ++first[keys[i] + 1];
  for (uint32_t l = 0; l < num_lists; ++l) first[l + 1] += first[l];
  for (uint32_t i = 0; i < num_items; ++i)
    sorted[first[keys[i]]++] = items ? items[i] : i;
  for (uint32_t l = num_lists; l > 0; --l) first[l] = first[l - 1];
  first[0] = 0;
  *out_lists = (lists_t){first, sorted};
  return NULL;
}

static jpp_status_t* prepare(cutter_t* c) {
  const jpp_cut_program_t* p = c->program;
  jpp_arena_t* arena = &c->arena;
  size_t positions = (size_t)p->num_ops + 1;
  JPP_RETURN_IF_ERROR(
      make_lists(arena, p->num_ops, p->makers, NULL, p->num_values, &c->made));
  JPP_RETURN_IF_ERROR(
      make_lists(arena, p->num_ops, p->users, p->used, p->num_uses, &c->operands));
  JPP_RETURN_IF_ERROR(
      make_lists(arena, p->num_values, p->used, p->users, p->num_uses, &c->users));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, positions, &c->order));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, positions, &c->place));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, positions, &c->before));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, positions, &c->passing));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, positions, &c->bytes));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, positions, &c->bytes_before));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, positions * c->num_stages, &c->starts));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, positions, &c->window));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, c->num_stages, &c->costs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, positions, &c->found.stages));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, positions, &c->best.stages));
  c->best.heaviest = INFINITY;
  return NULL;
}

// --- Orders ---------------------------------------------------------------------------

static void keep_order(cutter_t* c) {
  for (uint32_t i = 0; i < c->program->num_ops; ++i) c->order[i] = c->place[i] = i;
}

static uint32_t random_below(uint64_t* state, uint32_t end) {
  *state = *state * 6364136223846793005u + 1442695040888963407u;
  return (uint32_t)(*state >> 33) % end;
}

// Orders the ops from the last to the first. Of those whose users are all in the order,
// the one that became so last comes next, which keeps the ops of a branch together and
// puts an op next to its users; or, every other time, a random one. `random` NULL: never.
static void order_backward(cutter_t* c, uint64_t* random) {
  uint32_t ops = c->program->num_ops, num_ready = 0, place = ops;
  uint32_t *ready = c->window, *uses = c->starts;  // free until the dynamic program
  for (uint32_t i = 0; i < ops; ++i) uses[i] = 0;
  for (uint32_t u = 0; u < c->program->num_uses; ++u) {
    ++uses[c->program->makers[c->program->used[u]]];
  }
  for (uint32_t i = 0; i < ops; ++i) {
    if (!uses[i]) ready[num_ready++] = i;
  }
  while (num_ready) {
    uint32_t last = num_ready - 1;
    bool any = random && random_below(random, 2);
    uint32_t at = any ? random_below(random, num_ready) : last;
    uint32_t op = ready[at];
    ready[at] = ready[last];
    --num_ready;
    c->place[op] = --place;
    c->order[place] = op;
    for (uint32_t i = c->operands.first[op]; i < c->operands.first[op + 1]; ++i) {
      uint32_t maker = c->program->makers[c->operands.items[i]];
      if (!--uses[maker]) ready[num_ready++] = maker;
    }
  }
}

static void measure_order(cutter_t* c) {
  const jpp_cut_program_t* p = c->program;
  uint32_t* passing = c->window;  // how many values pass each boundary
  for (uint32_t i = 0; i <= p->num_ops; ++i) {
    c->passing[i] = 0;
    passing[i] = 0;
  }
  // The values that begin to pass at a boundary, less those that end there; then their
  // sums.
  for (uint32_t v = 0; v < p->num_values; ++v) {
    uint32_t made = c->place[p->makers[v]], last = made;
    for (uint32_t i = c->users.first[v]; i < c->users.first[v + 1]; ++i) {
      uint32_t used = c->place[c->users.items[i]];
      if (used > last) last = used;
    }
    c->passing[made + 1] += (double)p->bytes[v];
    c->passing[last + 1] -= (double)p->bytes[v];
    ++passing[made + 1];
    --passing[last + 1];
  }
  c->before[0] = 0;
  for (uint32_t i = 0; i < p->num_ops; ++i) {
    c->before[i + 1] = c->before[i] + p->costs[c->order[i]];
    c->passing[i + 1] += c->passing[i];
    passing[i + 1] += passing[i];
  }
  for (uint32_t i = 0; i <= p->num_ops; ++i) {
    if (!passing[i]) c->passing[i] = INFINITY;
  }
}

// --- The dynamic program --------------------------------------------------------------

// One more stage: bytes from bytes_before. The positions at which it can start and cost
// at most `limit` are a window that only moves on; `window` holds those of them that a
// later one does not beat.
static void add_stage(cutter_t* c, double limit, uint32_t* starts) {
  uint32_t head = 0, tail = 0;
  c->bytes[0] = INFINITY;
  for (uint32_t end = 1; end <= c->program->num_ops; ++end) {
    uint32_t start = end - 1;
    double bytes = c->bytes_before[start] + c->passing[start];
    if (isfinite(bytes)) {
      while (tail > head) {
        uint32_t other = c->window[tail - 1];
        if (c->bytes_before[other] + c->passing[other] < bytes) break;
        --tail;
      }
      c->window[tail++] = start;
    }
    while (head < tail && c->before[end] - c->before[c->window[head]] > limit) ++head;
    c->bytes[end] = INFINITY;
    if (head == tail) continue;
    starts[end] = c->window[head];
    c->bytes[end] = c->bytes_before[starts[end]] + c->passing[starts[end]];
  }
}

// Whether the order can be cut so that no stage costs more than `limit`.
static bool run_program(cutter_t* c, double limit) {
  uint32_t ops = c->program->num_ops;
  for (uint32_t end = 0; end <= ops; ++end) {
    c->bytes_before[end] = end && c->before[end] <= limit ? 0 : INFINITY;
    c->starts[end] = 0;
  }
  for (uint32_t k = 1; k < c->num_stages; ++k) {
    add_stage(c, limit, c->starts + (size_t)k * (ops + 1));
    double* bytes = c->bytes_before;
    c->bytes_before = c->bytes;
    c->bytes = bytes;
  }
  return isfinite(c->bytes_before[ops]);
}

static void measure_cut(cutter_t* c, cut_t* cut) {
  const jpp_cut_program_t* p = c->program;
  cut->heaviest = cut->bytes = 0;
  for (uint32_t s = 0; s < c->num_stages; ++s) c->costs[s] = 0;
  for (uint32_t i = 0; i < p->num_ops; ++i) c->costs[cut->stages[i]] += p->costs[i];
  for (uint32_t s = 0; s < c->num_stages; ++s) {
    cut->heaviest = fmax(cut->heaviest, c->costs[s]);
  }
  for (uint32_t v = 0; v < p->num_values; ++v) {
    uint32_t made = cut->stages[p->makers[v]], last = made;
    for (uint32_t i = c->users.first[v]; i < c->users.first[v + 1]; ++i) {
      uint32_t used = cut->stages[c->users.items[i]];
      if (used > last) last = used;
    }
    cut->bytes += (double)p->bytes[v] * (last - made);
  }
}

// Cuts the order; false if it has too few boundaries, or if another one was better.
static bool cut_order(cutter_t* c) {
  uint32_t ops = c->program->num_ops;
  measure_order(c);
  double high = c->before[ops], low = high / c->num_stages;
  // An order that is far from the best cut is left without a search.
  if (!run_program(c, fmin(high, c->best.heaviest * kSlack))) return false;
  high = fmin(high, c->best.heaviest * kSlack);
  for (int i = 0; i < kBisections && low < high; ++i) {
    double middle = low + (high - low) / 2;
    *(run_program(c, middle) ? &high : &low) = middle;
  }
  run_program(c, high * kSlack);
  uint32_t end = ops;
  for (uint32_t k = c->num_stages; k-- > 0;) {
    uint32_t start = c->starts[(size_t)k * (ops + 1) + end];
    for (uint32_t i = start; i < end; ++i) c->found.stages[c->order[i]] = k;
    end = start;
  }
  measure_cut(c, &c->found);
  return true;
}

// --- Moves ----------------------------------------------------------------------------

// Whether an op can be one stage earlier or later than it is.
static bool can_move(const cutter_t* c, uint32_t op, bool later) {
  const uint32_t* stages = c->found.stages;
  if (later) {
    for (uint32_t i = c->made.first[op]; i < c->made.first[op + 1]; ++i) {
      uint32_t value = c->made.items[i];
      for (uint32_t u = c->users.first[value]; u < c->users.first[value + 1]; ++u) {
        if (stages[c->users.items[u]] == stages[op]) return false;
      }
    }
    return stages[op] + 1 < c->num_stages;
  }
  for (uint32_t i = c->operands.first[op]; i < c->operands.first[op + 1]; ++i) {
    if (stages[c->program->makers[c->operands.items[i]]] == stages[op]) return false;
  }
  return stages[op] > 0;
}

// Whether each stage has an op, and each boundary passes a value.
static bool is_connected(const cutter_t* c, const uint32_t* stages) {
  const jpp_cut_program_t* p = c->program;
  for (uint32_t s = 0; s < c->num_stages; ++s) {
    bool has_op = false, passes = s + 1 == c->num_stages;
    for (uint32_t i = 0; i < p->num_ops && !has_op; ++i) has_op = stages[i] == s;
    for (uint32_t u = 0; u < p->num_uses && !passes; ++u) {
      passes = stages[p->makers[p->used[u]]] <= s && stages[p->users[u]] > s;
    }
    if (!has_op || !passes) return false;
  }
  return true;
}

// Moves an op to the stage beside it if that makes the two stages more equal.
static bool move_op(cutter_t* c, uint32_t op, bool later) {
  if (!can_move(c, op, later)) return false;
  uint32_t from = c->found.stages[op], to = later ? from + 1 : from - 1;
  double cost = c->program->costs[op];
  if (cost <= 0 || c->costs[to] + cost >= c->costs[from]) return false;
  c->found.stages[op] = to;
  if (!is_connected(c, c->found.stages)) {
    c->found.stages[op] = from;
    return false;
  }
  c->costs[from] -= cost;
  c->costs[to] += cost;
  return true;
}

// Each move lowers the sum of the squares of the stages' costs, so that the moves end.
static void move_ops(cutter_t* c) {
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t i = 0; i < c->program->num_ops; ++i) {
      moved |= move_op(c, i, true) || move_op(c, i, false);
    }
  }
  measure_cut(c, &c->found);
}

// --- The best -------------------------------------------------------------------------

static void keep_if_better(cutter_t* c) {
  const cut_t *found = &c->found, *best = &c->best;
  bool lighter = found->heaviest * kSlack < best->heaviest;
  bool heavier = best->heaviest * kSlack < found->heaviest;
  if (heavier || (!lighter && found->bytes >= best->bytes)) return;
  c->best.heaviest = found->heaviest;
  c->best.bytes = found->bytes;
  for (uint32_t i = 0; i < c->program->num_ops; ++i) best->stages[i] = found->stages[i];
}

static void try_order(cutter_t* c) {
  if (!cut_order(c)) return;
  keep_if_better(c);
  move_ops(c);
  keep_if_better(c);
}

static jpp_status_t* cannot_cut(const cutter_t* c) {
  return jpp_status_make(
      JPP_INVALID_ARGUMENT,
      "%u ops cannot be cut into %u stages: each stage needs an op, and "
      "a value that it passes to the next one; use fewer stages",
      c->program->num_ops, c->num_stages);
}

static jpp_status_t* find_cut(cutter_t* c, uint32_t* out_stages) {
  if (c->num_stages > c->program->num_ops) return cannot_cut(c);
  JPP_RETURN_IF_ERROR(prepare(c));
  double work = (double)(c->program->num_ops + c->program->num_uses) * c->num_stages;
  uint64_t random = 1;
  keep_order(c);
  try_order(c);
  order_backward(c, NULL);
  try_order(c);
  for (uint32_t i = 0; i < kMostOrders && i * work < kMostWork; ++i) {
    order_backward(c, &random);
    try_order(c);
  }
  if (isinf(c->best.heaviest)) return cannot_cut(c);
  for (uint32_t i = 0; i < c->program->num_ops; ++i) out_stages[i] = c->best.stages[i];
  return NULL;
}

jpp_status_t* jpp_cut_stages(const jpp_cut_program_t* program, uint32_t num_stages,
                             uint32_t* out_stages) {
  JPP_RETURN_IF_NULL(program, out_stages);
  jpp_cut_program_t copy;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_cut_program_t, users, program, &copy));
  JPP_RETURN_IF_NULL(copy.costs, copy.makers, copy.bytes, copy.used, copy.users);
  JPP_RETURN_IF_ERROR(check_program(&copy));
  if (!num_stages) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "expected at least 1 stage, found 0");
  }
  cutter_t cutter = {.program = &copy, .num_stages = num_stages};
  jpp__arena_init(&cutter.arena);
  jpp_status_t* status = find_cut(&cutter, out_stages);
  jpp__arena_deinit(&cutter.arena);
  return status;
}
