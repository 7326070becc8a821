// Packs the scalars that a task outside the loops makes for the same tasks of other
// ranks, for example the part of each weight in a norm, or whether its gradient is
// finite: one message takes them instead of one each.
#include <stdlib.h>

#include "partition/partitioner.h"
#include "task/ids.h"

// A scalar that task `to` takes from task `from`, which does not run on all of its ranks.
// Of tasks that repeat each other, the first stands for all.
typedef struct sent {
  uint32_t from, to, value;
  uint32_t unpacked;  // the value that replaces it in task `to`; JPP_NONE: it stays
} sent_t;

// A scalar with the tasks that take it.
typedef struct scalar {
  sent_t* sents;
  uint32_t count;
  uint8_t dtype;
} scalar_t;

typedef struct packer {
  jpp_partitioner_t* p;
  uint64_t* ranks;  // [tasks * words] of a task and of those that repeat it
  uint32_t* owner;  // [ops] the last task outside the loops that runs it
  bool* stays;      // [values] must not be packed
  JPP_VEC(sent_t) sents;
  JPP_VEC(scalar_t) scalars;
  JPP_VEC(jpp_partition_made_t) packs;  // ops that pack, by task
  uint32_t* now;                        // [values] what replaces it in the task at work
  jpp_u32_vec_t ids;
} packer_t;

static bool is_first_outer(const jpp_partitioner_t* p, uint32_t task) {
  const jpp_task_t* at = &p->tasks.data[task];
  return at->kind == JPP_TASK_OUTER && at->repeats == task;
}

// --- What is sent ---------------------------------------------------------------------

static void keep_all(const packer_t* k, const uint32_t* values, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) k->stays[values[i]] = true;
}

// Fills `ranks`, `owner` and `stays`. A value stays if a stage task, a loop, a task that
// the user wrote or the caller takes it, or if several tasks run an op that takes or
// makes it.
static void find_owners(const packer_t* k) {
  const jpp_partitioner_t* p = k->p;
  for (uint32_t t = 0; t < p->tasks.count; ++t) {
    const jpp_task_t* task = &p->tasks.data[t];
    bool is_outer = task->kind == JPP_TASK_OUTER;
    bool is_written = is_outer && jpp__task_op(p, task, 0)->kind == JPP_OP_TASK;
    if (!is_outer || is_written) {
      keep_all(k, task->inputs, task->num_inputs);
    }
    jpp__ranks_add(k->ranks + (size_t)task->repeats * p->words, task->rank);
    if (!is_first_outer(p, t) || is_written) continue;
    for (uint32_t i = 0; i < task->num_ops; ++i) {
      const jpp_op_t* op = jpp__task_op(p, task, i);
      bool is_first = k->owner[task->ops[i]] == JPP_NONE;
      k->owner[task->ops[i]] = t;
      if (is_first) continue;
      keep_all(k, op->inputs, op->num_inputs);
      for (uint32_t o = 0; o < op->num_outputs; ++o)
        k->stays[op->first_output + o] = true;
    }
  }
  for (size_t i = 0; i < p->accumulators.count; ++i) {
    k->stays[p->accumulators.data[i].init] = true;
  }
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    k->stays[p->alias[p->graph->outputs[i].value]] = true;
  }
}

static bool is_packable(const packer_t* k, uint32_t value) {
  const jpp_value_t* v = &k->p->values.data[value];
  if (k->stays[value] || v->producer == JPP_NONE) return false;
  if (k->owner[v->producer] == JPP_NONE) return false;
  return v->type.memory == JPP_MEMORY_DEVICE && jpp_type_elements(&v->type) == 1;
}

static bool runs_beside(const packer_t* k, uint32_t from, uint32_t to) {
  size_t words = k->p->words;
  for (size_t w = 0; w < words; ++w) {
    if (k->ranks[to * words + w] & ~k->ranks[from * words + w]) return false;
  }
  return true;
}

static int compare_sents(const void* a, const void* b) {
  const sent_t *x = a, *y = b;
  if (x->from != y->from) return x->from < y->from ? -1 : 1;
  if (x->value != y->value) return x->value < y->value ? -1 : 1;
  return x->to < y->to ? -1 : x->to > y->to;
}

static jpp_status_t* find_sents(packer_t* k) {
  const jpp_partitioner_t* p = k->p;
  for (uint32_t t = 0; t < p->tasks.count; ++t) {
    const jpp_task_t* task = &p->tasks.data[t];
    if (!is_first_outer(p, t)) continue;
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      uint32_t value = task->inputs[i];
      if (!is_packable(k, value)) continue;
      uint32_t from = k->owner[p->values.data[value].producer];
      if (runs_beside(k, from, t)) continue;
      sent_t sent = {from, t, value, JPP_NONE};
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&k->sents, sent));
    }
  }
  if (!k->sents.count) return NULL;
  qsort(k->sents.data, k->sents.count, sizeof(sent_t), compare_sents);
  for (size_t i = 0; i < k->sents.count; ++i) {
    sent_t* sent = &k->sents.data[i];
    if (!i || sent->value != sent[-1].value) {
      uint8_t dtype = (uint8_t)p->values.data[sent->value].type.dtype;
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&k->scalars, (scalar_t){sent, 0, dtype}));
    }
    ++k->scalars.data[k->scalars.count - 1].count;
  }
  return NULL;
}

// --- Packs ----------------------------------------------------------------------------

// 0 if two scalars can be in one pack; otherwise their order.
static int compare_packs(const scalar_t* a, const scalar_t* b) {
  if (a->sents->from != b->sents->from) return a->sents->from < b->sents->from ? -1 : 1;
  if (a->dtype != b->dtype) return a->dtype < b->dtype ? -1 : 1;
  if (a->count != b->count) return a->count < b->count ? -1 : 1;
  for (uint32_t i = 0; i < a->count; ++i) {
    if (a->sents[i].to != b->sents[i].to) return a->sents[i].to < b->sents[i].to ? -1 : 1;
  }
  return 0;
}

static int compare_scalars(const void* a, const void* b) {
  const scalar_t *x = a, *y = b;
  int order = compare_packs(x, y);
  if (order) return order;
  return x->sents->value < y->sents->value ? -1 : x->sents->value > y->sents->value;
}

static jpp_status_t* unpack(packer_t* k, uint32_t pack, uint32_t element, sent_t* sent) {
  jpp_op_t op = {.kind = JPP_OP_UNPACK,
                 .attr = element,
                 .loop = JPP_NONE,
                 .num_inputs = 1,
                 .inputs = &pack,
                 .num_outputs = 1,
                 .name = "unpack"};
  uint32_t id = 0;
  return jpp__partition_define(k->p, &op, sent->value, JPP_NONE, &id, &sent->unpacked);
}

static jpp_status_t* pack(packer_t* k, const scalar_t* scalars, uint32_t count) {
  uint32_t from = scalars[0].sents->from, first = scalars[0].sents->value;
  k->ids.count = 0;
  for (uint32_t i = 0; i < count; ++i) {
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&k->ids, scalars[i].sents->value));
  }
  jpp_op_t op = {.kind = JPP_OP_PACK,
                 .loop = JPP_NONE,
                 .num_inputs = count,
                 .inputs = k->ids.data,
                 .num_outputs = 1,
                 .name = "pack"};
  uint32_t id = 0, value = 0;
  JPP_RETURN_IF_ERROR(jpp__partition_define(k->p, &op, first, JPP_NONE, &id, &value));
  uint64_t bytes = k->p->values.data[first].bytes * count;
  JPP_RETURN_IF_ERROR(jpp__partition_flatten(k->p, value, count, bytes));
  for (uint32_t i = 0; i < count; ++i) {
    for (uint32_t s = 0; s < scalars[i].count; ++s) {
      JPP_RETURN_IF_ERROR(unpack(k, value, i, &scalars[i].sents[s]));
    }
  }
  return JPP_VEC_PUSH(&k->packs, (jpp_partition_made_t){.op = id, .task = from});
}

static jpp_status_t* pack_all(packer_t* k) {
  const scalar_t* scalars = k->scalars.data;
  size_t count = k->scalars.count;
  qsort(k->scalars.data, count, sizeof(*scalars), compare_scalars);
  for (size_t first = 0, end = 0; first < count; first = end) {
    while (end < count && !compare_packs(&scalars[first], &scalars[end])) ++end;
    if (end - first == 1) continue;
    JPP_RETURN_IF_ERROR(pack(k, &scalars[first], (uint32_t)(end - first)));
  }
  return NULL;
}

// --- Tasks ----------------------------------------------------------------------------

static int compare_takers(const void* a, const void* b) {
  const sent_t *x = a, *y = b;
  if (x->to != y->to) return x->to < y->to ? -1 : 1;
  return x->unpacked < y->unpacked ? -1 : x->unpacked > y->unpacked;
}

static jpp_status_t* replace_inputs(const packer_t* k, jpp_op_t* op) {
  uint32_t* inputs = NULL;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t now = k->now[op->inputs[i]];
    if (now == JPP_NONE) continue;
    if (!inputs) {
      JPP_RETURN_IF_ERROR(jpp__arena_copy(
          k->p->arena, op->inputs, op->num_inputs * sizeof(*inputs), (void**)&inputs));
    }
    inputs[i] = now;
  }
  if (inputs) op->inputs = inputs;
  return NULL;
}

// The op that unpacks a scalar.
static uint32_t unpacking(const packer_t* k, const sent_t* sent) {
  return k->p->values.data[sent->unpacked].producer;
}

// The task unpacks what it takes before its own ops, and packs what it makes after them.
static jpp_status_t* change_ops(packer_t* k, jpp_task_t* task, const sent_t* sents,
                                size_t num_sents, const jpp_partition_made_t* packs,
                                size_t num_packs) {
  k->ids.count = 0;
  for (size_t i = 0; i < num_sents; ++i) {
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&k->ids, unpacking(k, &sents[i])));
  }
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    if (num_sents) {
      JPP_RETURN_IF_ERROR(replace_inputs(k, &k->p->ops.data[task->ops[i]]));
    }
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&k->ids, task->ops[i]));
  }
  for (size_t i = 0; i < num_packs; ++i) {
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&k->ids, packs[i].op));
  }
  task->num_ops = (uint32_t)k->ids.count;
  return JPP_VEC_TO_ARENA(&k->ids, k->p->arena, &task->ops);
}

static jpp_status_t* change_inputs(packer_t* k, jpp_task_t* task, const sent_t* sents,
                                   size_t num_sents) {
  k->ids.count = 0;
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    if (k->now[task->inputs[i]] != JPP_NONE) continue;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&k->ids, task->inputs[i]));
  }
  uint32_t last = JPP_NONE;  // what one pack has is unpacked by consecutive ops
  for (size_t i = 0; i < num_sents; ++i) {
    uint32_t packed = k->p->ops.data[unpacking(k, &sents[i])].inputs[0];
    if (packed != last) JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&k->ids, packed));
    last = packed;
  }
  task->num_inputs = (uint32_t)k->ids.count;
  return JPP_VEC_TO_ARENA(&k->ids, k->p->arena, &task->inputs);
}

static jpp_status_t* change_task(packer_t* k, uint32_t task, const sent_t* sents,
                                 size_t num_sents, const jpp_partition_made_t* packs,
                                 size_t num_packs) {
  jpp_task_t* at = &k->p->tasks.data[task];
  for (size_t i = 0; i < num_sents; ++i) k->now[sents[i].value] = sents[i].unpacked;
  JPP_RETURN_IF_ERROR(change_ops(k, at, sents, num_sents, packs, num_packs));
  if (num_sents) JPP_RETURN_IF_ERROR(change_inputs(k, at, sents, num_sents));
  for (size_t i = 0; i < num_sents; ++i) k->now[sents[i].value] = JPP_NONE;
  for (uint32_t t = task + 1; t < k->p->tasks.count; ++t) {
    jpp_task_t* other = &k->p->tasks.data[t];
    if (other->repeats != task) break;
    other->num_ops = at->num_ops;
    other->ops = at->ops;
    other->num_inputs = at->num_inputs;
    other->inputs = at->inputs;
  }
  return NULL;
}

static jpp_status_t* change_tasks(packer_t* k) {
  size_t kept = 0;
  for (size_t i = 0; i < k->sents.count; ++i) {
    if (k->sents.data[i].unpacked != JPP_NONE) k->sents.data[kept++] = k->sents.data[i];
  }
  k->sents.count = kept;
  qsort(k->sents.data, kept, sizeof(sent_t), compare_takers);
  size_t sent = 0, made = 0;
  for (uint32_t t = 0; t < k->p->tasks.count; ++t) {
    size_t first_sent = sent, first_made = made;
    while (sent < kept && k->sents.data[sent].to == t) ++sent;
    while (made < k->packs.count && k->packs.data[made].task == t) ++made;
    if (first_sent == sent && first_made == made) continue;
    JPP_RETURN_IF_ERROR(change_task(k, t, k->sents.data + first_sent, sent - first_sent,
                                    k->packs.data + first_made, made - first_made));
  }
  return NULL;
}

static jpp_status_t* pack_scalars(packer_t* k) {
  jpp_partitioner_t* p = k->p;
  size_t tasks = p->tasks.count, values = p->values.count;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, tasks * p->words, &k->ranks));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, p->ops.count, &k->owner));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &k->stays));
  find_owners(k);
  JPP_RETURN_IF_ERROR(find_sents(k));
  if (!k->scalars.count) return NULL;
  JPP_RETURN_IF_ERROR(pack_all(k));
  if (!k->packs.count) return NULL;
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, p->values.count, &k->now));
  return change_tasks(k);
}

jpp_status_t* jpp__partition_pack_scalars(jpp_partitioner_t* p) {
  packer_t packer = {.p = p};
  jpp_status_t* status = pack_scalars(&packer);
  jpp_vec_deinit(&packer.sents);
  jpp_vec_deinit(&packer.scalars);
  jpp_vec_deinit(&packer.packs);
  jpp_vec_deinit(&packer.ids);
  return status;
}
