// The tasks outside the loops. Ops of one rank that wait for the same round of transfers
// form one task: level n uses what other ranks made at level n - 1. Ops run as late as
// their users allow, so that few values cross from one task of a rank to the next.
#include <stdlib.h>

#include "base/str.h"
#include "partition/partitioner.h"
#include "task/ids.h"

typedef struct instance {
  uint32_t op, rank, phase, level, order;
} instance_t;

typedef struct leveler {
  jpp_partitioner_t* p;
  uint32_t phases;
  uint32_t* first;                // [ops] first instance of the op
  JPP_VEC(instance_t) instances;  // by op in p->outer order, then by rank
  uint32_t* depth;                // [phases * ranks] highest level
  uint32_t* value_task;           // [values] the last task that was given it as an input
  jpp_u32_vec_t ops, inputs;      // of the task being made
} leveler_t;

// The instance of an op on one of its ranks. They are listed by rank, so as many of its
// instances come before as lower ranks run the op.
static instance_t* instance_at(const leveler_t* l, uint32_t op, uint32_t rank) {
  const uint64_t* run = jpp_run_at(l->p, op);
  uint32_t before = 0;
  for (uint32_t w = 0; w < rank / 64; ++w)
    before += (uint32_t)__builtin_popcountll(run[w]);
  uint64_t below = (UINT64_C(1) << (rank % 64)) - 1;
  before += (uint32_t)__builtin_popcountll(run[rank / 64] & below);
  return &l->instances.data[l->first[op] + before];
}

// The op that makes `value` in the same phase outside; JPP_NONE for arguments, results of
// loops and what an earlier phase made.
static uint32_t producer_in_phase(const leveler_t* l, uint32_t value, uint32_t phase) {
  uint32_t op = l->p->values.data[value].producer;
  if (op == JPP_NONE || l->p->ops.data[op].kind == JPP_OP_LOOP) return JPP_NONE;
  return l->p->phase[op] == phase ? op : JPP_NONE;
}

// The instance of an op that `rank` takes its results from: its own, or else that of the
// lowest rank that runs the op, which sends them.
static instance_t* source_of(const leveler_t* l, uint32_t op, uint32_t rank) {
  const uint64_t* run = jpp_run_at(l->p, op);
  return instance_at(l, op,
                     jpp_ranks_has(run, rank) ? rank : jpp_ranks_first(run, l->p->words));
}

static jpp_status_t* add_instances(leveler_t* l, uint32_t op) {
  const uint64_t* run = jpp_run_at(l->p, op);
  l->first[op] = (uint32_t)l->instances.count;
  if (l->p->ops.data[op].kind == JPP_OP_LOOP) return NULL;
  for (uint32_t r = 0; r < l->p->options->ranks; ++r) {
    if (!jpp_ranks_has(run, r)) continue;
    instance_t instance = {.op = op, .rank = r, .phase = l->p->phase[op]};
    instance.order = (uint32_t)l->instances.count;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&l->instances, instance));
  }
  return NULL;
}

// Gives an instance the lowest level at which all that it uses is there; what comes from
// another rank is there one level later.
static void raise_level(leveler_t* l, instance_t* instance) {
  const jpp_op_t* op = &l->p->ops.data[instance->op];
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t producer = producer_in_phase(l, op->inputs[i], instance->phase);
    if (producer == JPP_NONE) continue;
    const instance_t* source = source_of(l, producer, instance->rank);
    uint32_t level = source->level + (source->rank != instance->rank);
    if (level > instance->level) instance->level = level;
  }
  uint32_t* depth = &l->depth[instance->phase * l->p->options->ranks + instance->rank];
  if (instance->level > *depth) *depth = instance->level;
}

// Lowers the levels of an instance's operands to what this user of them allows. Instances
// come here from the last to the first, so that the user's own level is final.
static void push_users_limit(leveler_t* l, const instance_t* instance) {
  const jpp_op_t* op = &l->p->ops.data[instance->op];
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t producer = producer_in_phase(l, op->inputs[i], instance->phase);
    if (producer == JPP_NONE) continue;
    instance_t* source = source_of(l, producer, instance->rank);
    uint32_t limit = instance->level - (source->rank != instance->rank);
    if (limit < source->level) source->level = limit;
  }
}

// Lowest levels first, which give the number of levels of each rank; then every instance
// moves from the last level of its rank down to the highest that its users allow.
static void choose_levels(leveler_t* l) {
  for (size_t i = 0; i < l->instances.count; ++i) raise_level(l, &l->instances.data[i]);
  for (size_t i = 0; i < l->instances.count; ++i) {
    instance_t* instance = &l->instances.data[i];
    instance->level = l->depth[instance->phase * l->p->options->ranks + instance->rank];
  }
  for (size_t i = l->instances.count; i-- > 0;) {
    push_users_limit(l, &l->instances.data[i]);
  }
}

static int compare_instances(const void* a, const void* b) {
  const instance_t *x = a, *y = b;
  if (x->phase != y->phase) return x->phase < y->phase ? -1 : 1;
  if (x->level != y->level) return x->level < y->level ? -1 : 1;
  if (x->rank != y->rank) return x->rank < y->rank ? -1 : 1;
  return x->order < y->order ? -1 : 1;
}

static bool same_task(const instance_t* a, const instance_t* b) {
  return a->phase == b->phase && a->level == b->level && a->rank == b->rank;
}

static jpp_status_t* name_task(const leveler_t* l, const instance_t* at,
                               const char** out_name) {
  *out_name = NULL;
  jpp_str_t str = {0};
  if (at->phase == 0 && l->phases > 1) {
    jpp_str_append(&str, "before_loop");
  } else if (at->phase + 1 == l->phases) {
    jpp_str_append(&str, "after_loop");
  } else {
    jpp_str_appendf(&str, "between_loops_%u", at->phase);
  }
  jpp_str_appendf(&str, "_%u_%u", at->level, at->rank);
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status = jpp_arena_strdup(l->p->arena, text, out_name);
  jpp_free(text);
  return status;
}

// Is `value` made by the task that `at` belongs to?
static bool is_inside(const leveler_t* l, const instance_t* at, uint32_t value) {
  uint32_t producer = producer_in_phase(l, value, at->phase);
  if (producer == JPP_NONE) return false;
  if (!jpp_ranks_has(jpp_run_at(l->p, producer), at->rank)) return false;
  return instance_at(l, producer, at->rank)->level == at->level;
}

static jpp_status_t* take_inputs(leveler_t* l, const instance_t* at) {
  const jpp_op_t* op = &l->p->ops.data[at->op];
  uint32_t task = (uint32_t)l->p->tasks.count;  // the one being made
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    if (l->value_task[value] == task || is_inside(l, at, value)) continue;
    l->value_task[value] = task;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&l->inputs, value));
  }
  return NULL;
}

static jpp_status_t* add_outer_task(leveler_t* l, const instance_t* first, size_t count) {
  jpp_partitioner_t* p = l->p;
  jpp_task_t task = {.kind = JPP_TASK_OUTER,
                     .rank = first->rank,
                     .loop = JPP_NONE,
                     .stage = JPP_NONE,
                     .phase = first->phase,
                     .level = first->level};
  l->ops.count = l->inputs.count = 0;
  for (size_t i = 0; i < count; ++i) {
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&l->ops, first[i].op));
    JPP_RETURN_IF_ERROR(take_inputs(l, &first[i]));
    task.cost += p->ops.data[first[i].op].cost;
  }
  task.num_ops = (uint32_t)l->ops.count;
  task.num_inputs = (uint32_t)l->inputs.count;
  JPP_RETURN_IF_ERROR(name_task(l, first, &task.name));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&l->ops, p->arena, &task.ops));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&l->inputs, p->arena, &task.inputs));
  return JPP_VEC_PUSH(&p->tasks, task);
}

static jpp_status_t* add_outer_tasks(leveler_t* l) {
  size_t count = l->instances.count;
  instance_t* sorted = NULL;
  JPP_RETURN_IF_ERROR(jpp_arena_copy(&l->p->scratch, l->instances.data,
                                     count * sizeof(*sorted), (void**)&sorted));
  qsort(sorted, count, sizeof(*sorted), compare_instances);
  for (size_t begin = 0, end = 0; begin < count; begin = end) {
    while (end < count && same_task(&sorted[begin], &sorted[end])) ++end;
    JPP_RETURN_IF_ERROR(add_outer_task(l, &sorted[begin], end - begin));
  }
  return NULL;
}

static jpp_status_t* make_outer_tasks(leveler_t* l) {
  jpp_partitioner_t* p = l->p;
  l->phases = p->graph->num_loops + 1;
  uint32_t ranks = p->options->ranks;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, p->ops.count, &l->first));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, (size_t)l->phases * ranks, &l->depth));
  JPP_RETURN_IF_ERROR(jpp_ids_create(&p->scratch, p->values.count, &l->value_task));
  for (size_t i = 0; i < p->outer.count; ++i) {
    JPP_RETURN_IF_ERROR(add_instances(l, p->outer.data[i]));
  }
  choose_levels(l);
  return add_outer_tasks(l);
}

jpp_status_t* jpp_partition_make_outer_tasks(jpp_partitioner_t* p) {
  leveler_t leveler = {.p = p};
  jpp_status_t* status = make_outer_tasks(&leveler);
  jpp_vec_deinit(&leveler.instances);
  jpp_vec_deinit(&leveler.ops);
  jpp_vec_deinit(&leveler.inputs);
  return status;
}
