// Matches the ops of two tasks. The task has the pattern's ops in the same order, with
// others between them, but many of its ops compute the same. Each op therefore gets a
// hash of everything in its task from which it is computed, and an op of the pattern is
// compared only with ops of the same hash. If the task itself makes what the pattern
// takes, such as the output of an embedding, these hashes differ; a second attempt hashes
// what is computed from each op. Equal hashes decide nothing: codes, types and operands
// must match, too.
#include "partition/match.h"

#include <stdlib.h>

#include "task/ids.h"

typedef struct hashed_op {
  uint64_t hash;
  uint32_t at;  // position in the task
} hashed_op_t;

// --- Hashes ---------------------------------------------------------------------------

static uint64_t mix(uint64_t hash, uint64_t more) {
  hash = (hash ^ more) * UINT64_C(0x9e3779b97f4a7c15);
  return hash ^ hash >> 29;
}

static uint64_t hash_type(const jpp_type_t* type) {
  uint64_t hash = mix(type->dtype, type->ndim);
  for (uint32_t i = 0; i < type->ndim; ++i) hash = mix(hash, (uint64_t)type->dims[i]);
  return hash;
}

// A hash of what an op computes, without its operands; 0: unknown.
static uint64_t code_of(const jpp_matcher_t* m, const jpp_op_t* op) {
  switch ((jpp_op_kind_t)op->kind) {
    case JPP_OP_REPEAT:
      return op->code ? mix(JPP_OP_CALL, op->code) : 0;
    case JPP_OP_CALL:
    case JPP_OP_ADD:
      return op->code && !(op->flags & JPP_OP_EFFECT) ? mix(op->kind, op->code) : 0;
    case JPP_OP_INIT:
    case JPP_OP_ACCUMULATE: {
      uint8_t reduce = m->p->graph->loops[op->loop].results[op->attr].reduce;
      bool known = reduce == JPP_REDUCE_ADD || reduce == JPP_REDUCE_MAX;
      return known ? mix(op->kind, reduce) : 0;
    }
    case JPP_OP_SUM:
    case JPP_OP_PACK:
      return mix(op->kind, op->num_inputs);
    case JPP_OP_UNPACK:
      return mix(op->kind, op->attr);
    default:
      return 0;
  }
}

static uint64_t hash_op(const jpp_matcher_t* m, const jpp_op_t* op) {
  uint64_t hash = code_of(m, op);
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    hash = mix(hash, hash_type(&m->p->values.data[op->inputs[i]].type));
  }
  return hash;
}

void jpp__match_enter(const jpp_matcher_t* m, const jpp_task_t* task) {
  for (uint32_t i = 0; i < task->num_ops; ++i) m->op_at[task->ops[i]] = i;
}

void jpp__match_leave(const jpp_matcher_t* m, const jpp_task_t* task) {
  for (uint32_t i = 0; i < task->num_ops; ++i) m->op_at[task->ops[i]] = JPP_NONE;
}

bool jpp__match_is_made_here(const jpp_matcher_t* m, uint32_t value) {
  uint32_t producer = m->p->values.data[value].producer;
  return producer != JPP_NONE && m->op_at[producer] != JPP_NONE;
}

// Hashes each op with everything in the task from which it is computed.
static void hash_by_operands(const jpp_matcher_t* m, const jpp_task_t* task,
                             hashed_op_t* hashed) {
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    const jpp_op_t* op = jpp__task_op(m->p, task, i);
    uint64_t hash = hash_op(m, op);
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      bool here = jpp__match_is_made_here(m, op->inputs[k]);
      hash = mix(hash, here ? m->hashes[op->inputs[k]] : 1);
    }
    for (uint32_t k = 0; k < op->num_outputs; ++k) {
      m->hashes[op->first_output + k] = mix(hash, k);
    }
    hashed[i] = (hashed_op_t){.hash = hash, .at = i};
  }
}

// Hashes each op with everything in the task that is computed from it.
static void hash_by_users(const jpp_matcher_t* m, const jpp_task_t* task,
                          hashed_op_t* hashed) {
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    const jpp_op_t* op = jpp__task_op(m->p, task, i);
    for (uint32_t k = 0; k < op->num_outputs; ++k) m->hashes[op->first_output + k] = 0;
  }
  for (uint32_t i = task->num_ops; i-- > 0;) {
    const jpp_op_t* op = jpp__task_op(m->p, task, i);
    uint64_t hash = hash_op(m, op);
    for (uint32_t k = 0; k < op->num_outputs; ++k) {
      hash = mix(hash, m->hashes[op->first_output + k]);
    }
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t value = op->inputs[k];
      if (jpp__match_is_made_here(m, value)) m->hashes[value] += mix(hash, k);
    }
    hashed[i] = (hashed_op_t){.hash = hash, .at = i};
  }
}

static int compare_hashed(const void* a, const void* b) {
  const hashed_op_t *x = a, *y = b;
  if (x->hash != y->hash) return x->hash < y->hash ? -1 : 1;
  return x->at < y->at ? -1 : x->at > y->at;
}

// --- Matching -------------------------------------------------------------------------

typedef struct pair {
  const jpp_task_t *pattern, *task;
  hashed_op_t* of_pattern;  // [pattern ops] in the order of the task
  hashed_op_t* of_task;     // [task ops] sorted
  uint32_t* ops;            // [pattern ops] position of the matching op in the task
} pair_t;

// Whether an operand of the pattern may match one of the task. `made`: the pattern makes
// the operand.
static bool operands_match(const jpp_matcher_t* m, uint32_t a, uint32_t b, bool made) {
  const jpp_value_t *x = &m->p->values.data[a], *y = &m->p->values.data[b];
  if (m->match[a] != JPP_NONE || m->match_of[b] != JPP_NONE) {
    return m->match[a] == b && m->match_of[b] == a;
  }
  if (made || !jpp_type_equal(&x->type, &y->type)) return false;
  bool is_index = x->loop != JPP_NONE && m->p->graph->loops[x->loop].index == a;
  return !is_index || a == b;
}

static bool ops_match(const jpp_matcher_t* m, const jpp_op_t* x, const jpp_op_t* y) {
  const jpp_value_t* values = m->p->values.data;
  if (!code_of(m, x) || code_of(m, x) != code_of(m, y)) return false;
  if (x->num_inputs != y->num_inputs || x->num_outputs != y->num_outputs) return false;
  for (uint32_t i = 0; i < x->num_inputs; ++i) {
    if (!operands_match(m, x->inputs[i], y->inputs[i],
                        jpp__match_is_made_here(m, x->inputs[i]))) {
      return false;
    }
  }
  for (uint32_t k = 0; k < x->num_outputs; ++k) {
    if (!jpp_type_equal(&values[x->first_output + k].type,
                        &values[y->first_output + k].type)) {
      return false;
    }
  }
  return true;
}

static void note_match(const jpp_matcher_t* m, uint32_t a, uint32_t b) {
  m->match[a] = b;
  m->match_of[b] = a;
}

static void match_ops(const jpp_matcher_t* m, const jpp_op_t* x, const jpp_op_t* y) {
  for (uint32_t i = 0; i < x->num_inputs; ++i) note_match(m, x->inputs[i], y->inputs[i]);
  for (uint32_t k = 0; k < x->num_outputs; ++k) {
    note_match(m, x->first_output + k, y->first_output + k);
  }
}

static void forget_matches(const jpp_matcher_t* m, const pair_t* pair, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const jpp_op_t *x = jpp__task_op(m->p, pair->pattern, i),
                   *y = jpp__task_op(m->p, pair->task, pair->ops[i]);
    for (uint32_t k = 0; k < x->num_inputs; ++k) {
      m->match[x->inputs[k]] = m->match_of[y->inputs[k]] = JPP_NONE;
    }
    for (uint32_t k = 0; k < x->num_outputs; ++k) {
      m->match[x->first_output + k] = m->match_of[y->first_output + k] = JPP_NONE;
    }
  }
}

static size_t first_of_hash(const pair_t* pair, uint64_t hash) {
  size_t low = 0, high = pair->task->num_ops;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (pair->of_task[middle].hash < hash) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Finds an op of the task for each op of the pattern, in the same order. The pattern must
// be entered.
static bool match_all(const jpp_matcher_t* m, pair_t* pair) {
  uint32_t next = 0, matched = 0;  // ops of the task and of the pattern
  for (; matched < pair->pattern->num_ops; ++matched) {
    uint64_t hash = pair->of_pattern[matched].hash;
    const jpp_op_t* op = jpp__task_op(m->p, pair->pattern, matched);
    bool found = false;
    for (size_t k = first_of_hash(pair, hash);
         !found && k < pair->task->num_ops && pair->of_task[k].hash == hash; ++k) {
      uint32_t at = pair->of_task[k].at;
      if (at < next) continue;
      found = ops_match(m, op, jpp__task_op(m->p, pair->task, at));
      if (found) pair->ops[matched] = at;
    }
    if (!found) break;
    match_ops(m, op, jpp__task_op(m->p, pair->task, pair->ops[matched]));
    next = pair->ops[matched] + 1;
  }
  forget_matches(m, pair, matched);
  return matched == pair->pattern->num_ops;
}

typedef void (*hash_ops_t)(const jpp_matcher_t* m, const jpp_task_t* task,
                           hashed_op_t* hashed);

static bool match_by(const jpp_matcher_t* m, pair_t* pair, hash_ops_t hash_ops) {
  jpp__match_enter(m, pair->task);
  hash_ops(m, pair->task, pair->of_task);
  jpp__match_leave(m, pair->task);
  qsort(pair->of_task, pair->task->num_ops, sizeof(*pair->of_task), compare_hashed);
  jpp__match_enter(m, pair->pattern);
  hash_ops(m, pair->pattern, pair->of_pattern);
  bool matches = match_all(m, pair);
  jpp__match_leave(m, pair->pattern);
  return matches;
}

bool jpp__match_knows(const jpp_matcher_t* m, const jpp_task_t* task) {
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    if (!code_of(m, jpp__task_op(m->p, task, i))) return false;
  }
  return true;
}

jpp_status_t* jpp__match_hash(const jpp_matcher_t* m, const jpp_task_t* task,
                              uint64_t* out_hash) {
  hashed_op_t* hashed = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(task->num_ops, &hashed));
  jpp__match_enter(m, task);
  hash_by_operands(m, task, hashed);
  jpp__match_leave(m, task);
  *out_hash = 0;
  for (uint32_t i = 0; i < task->num_ops; ++i) *out_hash += hashed[i].hash;
  jpp_free(hashed);
  return NULL;
}

jpp_status_t* jpp__match_find(const jpp_matcher_t* m, const jpp_task_t* pattern,
                              const jpp_task_t* task, uint32_t* ops, bool* out_found) {
  pair_t pair = {.pattern = pattern, .task = task, .ops = ops};
  *out_found = false;
  if (task->num_ops < pattern->num_ops) return NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(pattern->num_ops, &pair.of_pattern);
  if (!status) status = JPP_ALLOC_ARRAY(task->num_ops, &pair.of_task);
  if (!status) {
    *out_found =
        match_by(m, &pair, hash_by_operands) || match_by(m, &pair, hash_by_users);
  }
  jpp_free(pair.of_pattern);
  jpp_free(pair.of_task);
  return status;
}

jpp_status_t* jpp__matcher_init(jpp_matcher_t* m, jpp_partitioner_t* p) {
  size_t values = p->values.count;
  m->p = p;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &m->hashes));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, values, &m->match));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, values, &m->match_of));
  return jpp__ids_create(&p->scratch, p->ops.count, &m->op_at);
}
