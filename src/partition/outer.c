// The tasks outside the loops.
//
// A value that several ranks make must have the same bits on all of them, but XLA may
// round differently when it fuses differently. Therefore the ops that the same ranks run
// form a group, and a task has ops of one group only: each rank of the group runs the
// same ops on the same inputs with the same outputs, as one module. jpp_task_t.repeats
// identifies these tasks.
//
// Arrays that depend on no loop and that only smaller groups use are an exception, for
// example all layers of a new model, from which each rank cuts its rows. Each task that
// uses such an array computes it: XLA then computes only the rows, and no rank holds the
// whole array.
//
// Level n of a phase uses values that other groups made at lower levels. Ops run as late
// as their users allow, so that few values cross between tasks.
//
// An op that the user wrote as a task is a group of its own, at a level above that of the
// previous such op.
//
// The ops of one level and group are one task, or several parts if they use much host
// memory.
#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "base/str.h"
#include "partition/host_parts.h"
#include "partition/partitioner.h"
#include "task/ids.h"

// An op outside the loops that runs. `order` is its position in p->outer; `group` is
// JPP_NONE if it is remade.
typedef struct placed_op {
  uint32_t op, phase, group, level, part, order;
} placed_op_t;

typedef struct leveler {
  jpp_partitioner_t* p;
  uint32_t phases;
  JPP_VEC(placed_op_t) placed;  // in the order of p->outer
  uint32_t* at;                 // [ops] its index in `placed`; JPP_NONE: it does not run
  bool* remade;                 // [ops] computed again in each task that uses its results
  // [phases] the lowest level for the next JPP_OP_TASK.
  uint32_t* next_level;
  // [placed] the elements of `placed`, by phase, group and lowest level.
  placed_op_t* lowest;
  // [ranks] tasks of the current phase.
  uint32_t* tasks_of_rank;
  // The names of tasks, each with the next number to append after a '.'.
  jpp_map_t names;
  uint32_t num_visits;
  // [ops], [values] the last visit that reached it.
  uint32_t *op_visit, *value_visit;
  // The result of visiting some ops: these ops and the remade ops that they need, and the
  // values that none of these makes.
  jpp_u32_vec_t ops, inputs;
} leveler_t;

static const uint64_t* ranks_of(const leveler_t* l, const placed_op_t* placed) {
  return jpp__run_at(l->p, placed->op);
}

// The op outside the loops that makes `value` in the same phase; NULL for arguments,
// results of loops and values of earlier phases.
static placed_op_t* producer_in_phase(const leveler_t* l, uint32_t value,
                                      uint32_t phase) {
  uint32_t op = l->p->values.data[value].producer;
  if (op == JPP_NONE || l->at[op] == JPP_NONE) return NULL;
  placed_op_t* producer = &l->placed.data[l->at[op]];
  return producer->phase == phase ? producer : NULL;
}

// --- Groups ---------------------------------------------------------------------------

// qsort() passes no context, so each element includes its rank set.
typedef struct ranks_of_op {
  const uint64_t* ranks;
  uint32_t words, at;  // `at`: index in leveler_t.placed
} ranks_of_op_t;

// Orders sets by their lowest rank, then by the others.
static int compare_ranks(const void* a, const void* b) {
  const ranks_of_op_t *x = a, *y = b;
  for (uint32_t w = 0; w < x->words; ++w) {
    uint64_t differ = x->ranks[w] ^ y->ranks[w];
    if (differ) return x->ranks[w] & (differ & -differ) ? -1 : 1;
  }
  return 0;
}

static bool is_task(const leveler_t* l, const placed_op_t* placed) {
  return l->p->ops.data[placed->op].kind == JPP_OP_TASK;
}

// Numbers the sets of ranks in the order of compare_ranks().
static jpp_status_t* number_groups(leveler_t* l) {
  size_t count = l->placed.count;
  ranks_of_op_t* sorted = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&l->p->scratch, count, &sorted));
  for (uint32_t i = 0; i < count; ++i) {
    sorted[i] = (ranks_of_op_t){
        .ranks = ranks_of(l, &l->placed.data[i]), .words = l->p->words, .at = i};
  }
  qsort(sorted, count, sizeof(*sorted), compare_ranks);
  uint32_t group = 0;
  for (size_t i = 0; i < count; ++i) {
    if (i && compare_ranks(&sorted[i - 1], &sorted[i])) ++group;
    l->placed.data[sorted[i].at].group = group;
  }
  for (size_t i = 0; i < count; ++i) {
    if (is_task(l, &l->placed.data[i])) l->placed.data[i].group = ++group;
  }
  return NULL;
}

static jpp_status_t* list_placed_ops(leveler_t* l) {
  const jpp_partitioner_t* p = l->p;
  for (uint32_t i = 0; i < p->outer.count; ++i) {
    uint32_t op = p->outer.data[i];
    if (p->ops.data[op].kind == JPP_OP_LOOP) continue;
    if (jpp__ranks_first(jpp__run_at(p, op), p->words) == JPP_NONE) continue;
    l->at[op] = (uint32_t)l->placed.count;
    placed_op_t placed = {.op = op, .phase = p->phase[op], .order = i};
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&l->placed, placed));
  }
  return NULL;
}

// --- Ops that are remade -----------------------------------------------------------

// The values that stage tasks, loops or the caller take.
static jpp_status_t* find_exported(const leveler_t* l, bool** out_exported) {
  const jpp_partitioner_t* p = l->p;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&l->p->scratch, p->values.count, out_exported));
  for (size_t t = 0; t < p->tasks.count; ++t) {
    const jpp_task_t* task = &p->tasks.data[t];
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      (*out_exported)[task->inputs[i]] = true;
    }
  }
  for (size_t i = 0; i < p->accumulators.count; ++i) {
    (*out_exported)[p->accumulators.data[i].init] = true;
  }
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    (*out_exported)[p->alias[p->graph->outputs[i].value]] = true;
  }
  return NULL;
}

// An op that makes arrays is remade if only other groups use them, in the same phase. The
// loop runs from the last op to the first, so that it sees all users of an op before it.
static jpp_status_t* find_remade(leveler_t* l) {
  const jpp_partitioner_t* p = l->p;
  bool* kept = NULL;  // [values] exported, or used in a way that needs them in memory
  JPP_RETURN_IF_ERROR(find_exported(l, &kept));
  for (size_t i = l->placed.count; i-- > 0;) {
    placed_op_t* user = &l->placed.data[i];
    const jpp_op_t* op = &p->ops.data[user->op];
    bool remade = p->arrays[user->op] && !(op->flags & JPP_OP_EFFECT);
    for (uint32_t k = 0; k < op->num_outputs; ++k) {
      remade = remade && !kept[op->first_output + k];
    }
    l->remade[user->op] = remade;
    if (remade) user->group = JPP_NONE;
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      const placed_op_t* source = producer_in_phase(l, op->inputs[k], user->phase);
      if (!source || (!remade && source->group == user->group)) {
        kept[op->inputs[k]] = true;
      }
    }
  }
  return NULL;
}

static void begin_visit(leveler_t* l) {
  ++l->num_visits;
  l->ops.count = l->inputs.count = 0;
}

// Adds an op, and the remade ones that it needs, to the visit.
static jpp_status_t* visit_op(leveler_t* l, uint32_t op, uint32_t phase) {
  if (l->op_visit[op] == l->num_visits) return NULL;
  l->op_visit[op] = l->num_visits;
  size_t next = l->ops.count;
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&l->ops, op));
  for (; next < l->ops.count; ++next) {
    const jpp_op_t* user = &l->p->ops.data[l->ops.data[next]];
    for (uint32_t i = 0; i < user->num_inputs; ++i) {
      uint32_t value = user->inputs[i];
      const placed_op_t* source = producer_in_phase(l, value, phase);
      if (source && l->remade[source->op]) {
        if (l->op_visit[source->op] == l->num_visits) continue;
        l->op_visit[source->op] = l->num_visits;
        JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&l->ops, source->op));
      } else if (l->value_visit[value] != l->num_visits) {
        l->value_visit[value] = l->num_visits;
        JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&l->inputs, value));
      }
    }
  }
  return NULL;
}

// --- Levels ---------------------------------------------------------------------------

// Gives an op the lowest level at which all its operands exist.
static jpp_status_t* raise_level(leveler_t* l, placed_op_t* placed) {
  begin_visit(l);
  JPP_RETURN_IF_ERROR(visit_op(l, placed->op, placed->phase));
  for (size_t i = 0; i < l->inputs.count; ++i) {
    const placed_op_t* source = producer_in_phase(l, l->inputs.data[i], placed->phase);
    if (!source) continue;
    uint32_t level = source->level + (source->group != placed->group);
    if (level > placed->level) placed->level = level;
  }
  if (!is_task(l, placed)) return NULL;
  uint32_t* next = &l->next_level[placed->phase];
  if (*next > placed->level) placed->level = *next;
  *next = placed->level + 1;
  return NULL;
}

static int compare_levels(const void* a, const void* b) {
  const placed_op_t *x = a, *y = b;
  if (x->phase != y->phase) return x->phase < y->phase ? -1 : 1;
  if (x->group != y->group) return x->group < y->group ? -1 : 1;
  return x->level < y->level ? -1 : x->level > y->level;
}

// The highest level, up to `most`, that is the lowest level of some op of the group: thus
// a group gets no more tasks than it needs. The op's own level always qualifies.
static uint32_t latest_level(const leveler_t* l, const placed_op_t* placed,
                             uint32_t most) {
  placed_op_t key = {.phase = placed->phase, .group = placed->group, .level = most};
  size_t low = 0, high = l->placed.count;  // lowest[low - 1] <= key < lowest[high]
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (compare_levels(&l->lowest[middle], &key) <= 0) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return l->lowest[low - 1].level;
}

// Lowers the limits of an op's operands to the level that this user allows. The user's
// own level must be final.
static jpp_status_t* limit_operands(leveler_t* l, const placed_op_t* placed,
                                    uint32_t* limits) {
  begin_visit(l);
  JPP_RETURN_IF_ERROR(visit_op(l, placed->op, placed->phase));
  for (size_t i = 0; i < l->inputs.count; ++i) {
    const placed_op_t* source = producer_in_phase(l, l->inputs.data[i], placed->phase);
    if (!source) continue;
    uint32_t* limit = &limits[source - l->placed.data];
    uint32_t most = placed->level - (source->group != placed->group);
    if (most < *limit) *limit = most;
  }
  return NULL;
}

static jpp_status_t* choose_levels(leveler_t* l) {
  size_t count = l->placed.count;
  uint32_t* limits = NULL;  // [placed]
  JPP_RETURN_IF_ERROR(jpp__ids_create(&l->p->scratch, count, &limits));
  for (size_t i = 0; i < count; ++i) {
    if (l->remade[l->placed.data[i].op]) continue;
    JPP_RETURN_IF_ERROR(raise_level(l, &l->placed.data[i]));
  }
  JPP_RETURN_IF_ERROR(jpp__arena_copy(&l->p->scratch, l->placed.data,
                                      count * sizeof(*l->lowest), (void**)&l->lowest));
  qsort(l->lowest, count, sizeof(*l->lowest), compare_levels);
  for (size_t i = count; i-- > 0;) {
    placed_op_t* placed = &l->placed.data[i];
    if (l->remade[placed->op]) continue;
    placed->level = latest_level(l, placed, limits[i]);
    JPP_RETURN_IF_ERROR(limit_operands(l, placed, limits));
  }
  return NULL;
}

// --- Tasks ----------------------------------------------------------------------------

static int compare_tasks(const void* a, const void* b) {
  const placed_op_t *x = a, *y = b;
  if (x->phase != y->phase) return x->phase < y->phase ? -1 : 1;
  if (x->level != y->level) return x->level < y->level ? -1 : 1;
  if (x->group != y->group) return x->group < y->group ? -1 : 1;
  if (x->part != y->part) return x->part < y->part ? -1 : 1;
  return x->order < y->order ? -1 : 1;
}

static bool same_task(const placed_op_t* a, const placed_op_t* b) {
  return a->phase == b->phase && a->level == b->level && a->group == b->group &&
         a->part == b->part;
}

static size_t end_of_task(const leveler_t* l, size_t begin) {
  size_t end = begin + 1;
  while (end < l->placed.count &&
         same_task(&l->placed.data[begin], &l->placed.data[end])) {
    ++end;
  }
  return end;
}

// Sorts the placed ops by task.
static void sort_placed(leveler_t* l) {
  placed_op_t* ops = l->placed.data;
  qsort(ops, l->placed.count, sizeof(*ops), compare_tasks);
  for (uint32_t i = 0; i < l->placed.count; ++i) l->at[ops[i].op] = i;
}

static jpp_status_t* divide_tasks(leveler_t* l) {
  jpp_partitioner_t* p = l->p;
  uint32_t *ops = NULL, *parts = NULL, *positions = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, l->placed.count, &ops));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, l->placed.count, &parts));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, p->ops.count, &positions));
  for (size_t begin = 0, end = 0; begin < l->placed.count; begin = end) {
    end = end_of_task(l, begin);
    placed_op_t* task = &l->placed.data[begin];
    uint32_t count = (uint32_t)(end - begin);
    if (l->remade[task->op]) continue;
    for (uint32_t i = 0; i < count; ++i) ops[i] = task[i].op;
    JPP_RETURN_IF_ERROR(jpp__partition_divide_for_host(p, ops, count, positions, parts));
    for (uint32_t i = 0; i < count; ++i) task[i].part = parts[i];
  }
  return NULL;
}

static void append_outer_name(const leveler_t* l, const jpp_task_t* task,
                              jpp_str_t* str) {
  if (task->phase == 0 && l->phases > 1) {
    jpp_str_append(str, "before_loop");
  } else if (task->phase + 1 == l->phases) {
    jpp_str_append(str, "after_loop");
  } else {
    jpp_str_appendf(str, "between_loops_%u", task->phase);
  }
  jpp_str_appendf(str, "_%u_%u", l->tasks_of_rank[task->rank]++, task->rank);
}

// Appends the user's name, or "name.1", "name.2" and so on if a task has that name
// already.
static void append_given_name(const leveler_t* l, const char* name, jpp_str_t* str) {
  uint32_t* next = jpp__map_find(&l->names, name, (uint32_t)strlen(name));
  jpp_str_append(str, name);
  if (next) jpp_str_appendf(str, ".%u", (*next)++);
}

static jpp_status_t* note_name(leveler_t* l, const char* name, bool* out_added) {
  return jpp__map_add(&l->names, name, (uint32_t)strlen(name), 1, out_added);
}

static jpp_status_t* name_task(leveler_t* l, const placed_op_t* first, jpp_task_t* task) {
  jpp_str_t str = {0};
  const char* given = is_task(l, first) ? l->p->ops.data[first->op].name : NULL;
  if (given) {
    append_given_name(l, given, &str);
  } else {
    append_outer_name(l, task, &str);
  }
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status = jpp__arena_strdup(l->p->arena, text, &task->name);
  jpp_free(text);
  if (status || !given) return status;
  // The user may have given a task this name, too.
  bool added = false;
  JPP_RETURN_IF_ERROR(note_name(l, task->name, &added));
  return added ? NULL : name_task(l, first, task);
}

// Fills l->ops and l->inputs for a task with these ops.
static jpp_status_t* collect_task(leveler_t* l, const placed_op_t* first, size_t count) {
  begin_visit(l);
  for (size_t i = 0; i < count; ++i) {
    JPP_RETURN_IF_ERROR(visit_op(l, first[i].op, first->phase));
  }
  size_t inputs = 0;
  for (size_t i = 0; i < l->inputs.count; ++i) {
    const placed_op_t* source = producer_in_phase(l, l->inputs.data[i], first->phase);
    if (source && same_task(source, first)) continue;
    l->inputs.data[inputs++] = l->inputs.data[i];
  }
  l->inputs.count = inputs;
  if (l->ops.count == count) return NULL;
  // Remade ops precede the ops that use them.
  for (size_t i = 0; i < l->ops.count; ++i) {
    l->ops.data[i] = l->placed.data[l->at[l->ops.data[i]]].order;
  }
  qsort(l->ops.data, l->ops.count, sizeof(*l->ops.data), jpp__ids_compare);
  for (size_t i = 0; i < l->ops.count; ++i) {
    l->ops.data[i] = l->p->outer.data[l->ops.data[i]];
  }
  return NULL;
}

// Adds the task with these ops, on each rank of their group.
static jpp_status_t* add_outer_tasks(leveler_t* l, const placed_op_t* first,
                                     size_t count) {
  jpp_partitioner_t* p = l->p;
  jpp_task_t task = {.kind = JPP_TASK_OUTER,
                     .loop = JPP_NONE,
                     .stage = JPP_NONE,
                     .phase = first->phase,
                     .repeats = (uint32_t)p->tasks.count,
                     .next_part = JPP_NONE,
                     .pattern = JPP_NONE};
  JPP_RETURN_IF_ERROR(collect_task(l, first, count));
  for (size_t i = 0; i < l->ops.count; ++i) {
    task.cost += p->ops.data[l->ops.data[i]].cost;
  }
  task.num_ops = (uint32_t)l->ops.count;
  task.num_inputs = (uint32_t)l->inputs.count;
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&l->ops, p->arena, &task.ops));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&l->inputs, p->arena, &task.inputs));
  for (task.rank = 0; task.rank < p->options->ranks; ++task.rank) {
    if (!jpp__ranks_has(ranks_of(l, first), task.rank)) continue;
    JPP_RETURN_IF_ERROR(name_task(l, first, &task));
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&p->tasks, task));
  }
  return NULL;
}

static jpp_status_t* make_outer_tasks(leveler_t* l) {
  jpp_partitioner_t* p = l->p;
  uint32_t ranks = p->options->ranks;
  l->phases = p->graph->num_loops + 1;
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, p->ops.count, &l->at));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, p->ops.count, &l->remade));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, p->ops.count, &l->op_visit));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, p->values.count, &l->value_visit));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, ranks, &l->tasks_of_rank));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, l->phases, &l->next_level));
  JPP_RETURN_IF_ERROR(list_placed_ops(l));
  if (!l->placed.count) return NULL;
  JPP_RETURN_IF_ERROR(number_groups(l));
  JPP_RETURN_IF_ERROR(find_remade(l));
  JPP_RETURN_IF_ERROR(choose_levels(l));
  sort_placed(l);
  JPP_RETURN_IF_ERROR(divide_tasks(l));
  sort_placed(l);
  const placed_op_t* ops = l->placed.data;
  for (size_t t = 0; t < p->tasks.count; ++t) {
    JPP_RETURN_IF_ERROR(note_name(l, p->tasks.data[t].name, NULL));
  }
  uint32_t phase = 0;
  for (size_t begin = 0, end = 0; begin < l->placed.count; begin = end) {
    end = end_of_task(l, begin);
    if (ops[begin].phase != phase) {
      phase = ops[begin].phase;
      memset(l->tasks_of_rank, 0, ranks * sizeof(*l->tasks_of_rank));
    }
    if (l->remade[ops[begin].op]) continue;
    JPP_RETURN_IF_ERROR(add_outer_tasks(l, &ops[begin], end - begin));
  }
  return NULL;
}

jpp_status_t* jpp__partition_make_outer_tasks(jpp_partitioner_t* p) {
  leveler_t leveler = {.p = p};
  jpp_status_t* status = make_outer_tasks(&leveler);
  jpp_vec_deinit(&leveler.placed);
  jpp_vec_deinit(&leveler.ops);
  jpp_vec_deinit(&leveler.inputs);
  jpp__map_deinit(&leveler.names);
  return status;
}
