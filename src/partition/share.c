// Divides the tasks of stages that do more than others (an embedding in the first stage,
// a head and the loss in the last one). The ops that they share with the other stages
// become a separate task: the same ops on operands of the same types, and therefore one
// module, which is compiled once.
//
// The pattern is the task of stage 1, which has only the ops that every stage has. An op
// of another stage's task matches an op of the pattern if both compute the same from
// matching operands, and if the ops that lead to them (or use them) match, too. The
// remaining ops run before the matching part or after it.
//
// The price is one or two more calls per microbatch, so small tasks are not divided.
//
// Tasks outside the loops that fill accumulators and make masks are divided in the same
// way, by those of rank 1. There the price is one or two calls per step. Updates of
// weights stay whole, because XLA rounds them differently in another module.
#include <stdlib.h>

#include "base/str.h"
#include "partition/partitioner.h"
#include "task/ids.h"

// The smallest pattern that is worth a call: of this cost, in floating-point operations,
// which takes a CPU core as long as about twenty calls, and with this many ops to
// compile.
static const float kLeastCost = 1e7F;
enum { kFewestOps = 8 };

// The smallest pattern outside the loops: filling this many bytes takes about as long as
// a call.
static const uint64_t kLeastBytes = 1 << 16;

enum { PART_BEFORE = 1, PART_SHARED = 2, PART_AFTER = 4 };  // bits

typedef struct hashed_op {
  uint64_t hash;
  uint32_t at;  // position in the task
} hashed_op_t;

typedef struct sharer {
  jpp_partitioner_t* p;
  bool* taken;         // [values] another stage task takes it
  uint32_t* op_at;     // [ops] position in the entered task; JPP_NONE: not in it
  uint64_t* hashes;    // [values] of the entered task
  uint32_t* match;     // [values] of the pattern: the matching value of the task
  uint32_t* match_of;  // [values] of the task: the matching value of the pattern
  uint8_t* part;       // [ops] PART_ bits of an op of the task that is being divided
  bool* leaves;        // [values] another part takes it from the shared part
  uint32_t* input_of;  // [values] the last part that got it as an input
  uint32_t num_parts;  // number of parts so far
  bool outside;        // the tasks are outside the loops
  jpp_u32_vec_t ops, inputs;
} sharer_t;

static const jpp_op_t* op_of(const sharer_t* s, const jpp_task_t* task, uint32_t at) {
  return &s->p->ops.data[task->ops[at]];
}

// Whether each task that uses a cheap op runs it.
static bool is_clone(const sharer_t* s, uint32_t op) {
  return !s->outside && op < s->p->graph->num_ops &&
         s->p->segment[op] == JPP_SEGMENT_CLONE;
}

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
static uint64_t code_of(const sharer_t* s, const jpp_op_t* op) {
  switch ((jpp_op_kind_t)op->kind) {
    case JPP_OP_CALL:
    case JPP_OP_ADD:
      return op->code && !(op->flags & JPP_OP_EFFECT) ? mix(op->kind, op->code) : 0;
    case JPP_OP_INIT:
    case JPP_OP_ACCUMULATE: {
      uint8_t reduce = s->p->graph->loops[op->loop].results[op->attr].reduce;
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

static uint64_t hash_op(const sharer_t* s, const jpp_op_t* op) {
  uint64_t hash = code_of(s, op);
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    hash = mix(hash, hash_type(&s->p->values.data[op->inputs[i]].type));
  }
  return hash;
}

static void enter_task(const sharer_t* s, const jpp_task_t* task) {
  for (uint32_t i = 0; i < task->num_ops; ++i) s->op_at[task->ops[i]] = i;
}

static void leave_task(const sharer_t* s, const jpp_task_t* task) {
  for (uint32_t i = 0; i < task->num_ops; ++i) s->op_at[task->ops[i]] = JPP_NONE;
}

static bool is_made_here(const sharer_t* s, uint32_t value) {
  uint32_t producer = s->p->values.data[value].producer;
  return producer != JPP_NONE && s->op_at[producer] != JPP_NONE;
}

// Hashes each op with everything in the task from which it is computed.
static void hash_by_operands(const sharer_t* s, const jpp_task_t* task,
                             hashed_op_t* hashed) {
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    const jpp_op_t* op = op_of(s, task, i);
    uint64_t hash = hash_op(s, op);
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      bool here = is_made_here(s, op->inputs[k]);
      hash = mix(hash, here ? s->hashes[op->inputs[k]] : 1);
    }
    for (uint32_t k = 0; k < op->num_outputs; ++k) {
      s->hashes[op->first_output + k] = mix(hash, k);
    }
    hashed[i] = (hashed_op_t){.hash = hash, .at = i};
  }
}

// Hashes each op with everything in the task that is computed from it.
static void hash_by_users(const sharer_t* s, const jpp_task_t* task,
                          hashed_op_t* hashed) {
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    const jpp_op_t* op = op_of(s, task, i);
    for (uint32_t k = 0; k < op->num_outputs; ++k) s->hashes[op->first_output + k] = 0;
  }
  for (uint32_t i = task->num_ops; i-- > 0;) {
    const jpp_op_t* op = op_of(s, task, i);
    uint64_t hash = hash_op(s, op);
    for (uint32_t k = 0; k < op->num_outputs; ++k) {
      hash = mix(hash, s->hashes[op->first_output + k]);
    }
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      if (is_made_here(s, op->inputs[k])) s->hashes[op->inputs[k]] += mix(hash, k);
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

typedef struct matching {
  const jpp_task_t *pattern, *task;
  hashed_op_t* of_pattern;  // [pattern ops] in the order of the task
  hashed_op_t* of_task;     // [task ops] sorted
  uint32_t* ops;            // [pattern ops] position of the matching op in the task
} matching_t;

// Whether an operand of the pattern may match one of the task. `made`: the pattern makes
// the operand.
static bool operands_match(const sharer_t* s, uint32_t a, uint32_t b, bool made) {
  const jpp_value_t *x = &s->p->values.data[a], *y = &s->p->values.data[b];
  if (s->match[a] != JPP_NONE || s->match_of[b] != JPP_NONE) {
    return s->match[a] == b && s->match_of[b] == a;
  }
  if (made || !jpp_type_equal(&x->type, &y->type)) return false;
  bool is_index = x->loop != JPP_NONE && s->p->graph->loops[x->loop].index == a;
  return !is_index || a == b;
}

static bool ops_match(const sharer_t* s, const jpp_op_t* x, const jpp_op_t* y) {
  const jpp_value_t* values = s->p->values.data;
  if (!code_of(s, x) || code_of(s, x) != code_of(s, y)) return false;
  if (x->num_inputs != y->num_inputs || x->num_outputs != y->num_outputs) return false;
  for (uint32_t i = 0; i < x->num_inputs; ++i) {
    if (!operands_match(s, x->inputs[i], y->inputs[i], is_made_here(s, x->inputs[i]))) {
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

static void note_match(const sharer_t* s, uint32_t a, uint32_t b) {
  s->match[a] = b;
  s->match_of[b] = a;
}

static void match_ops(const sharer_t* s, const jpp_op_t* x, const jpp_op_t* y) {
  for (uint32_t i = 0; i < x->num_inputs; ++i) note_match(s, x->inputs[i], y->inputs[i]);
  for (uint32_t k = 0; k < x->num_outputs; ++k) {
    note_match(s, x->first_output + k, y->first_output + k);
  }
}

static void forget_matches(const sharer_t* s, const matching_t* m, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const jpp_op_t *x = op_of(s, m->pattern, i), *y = op_of(s, m->task, m->ops[i]);
    for (uint32_t k = 0; k < x->num_inputs; ++k) {
      s->match[x->inputs[k]] = s->match_of[y->inputs[k]] = JPP_NONE;
    }
    for (uint32_t k = 0; k < x->num_outputs; ++k) {
      s->match[x->first_output + k] = s->match_of[y->first_output + k] = JPP_NONE;
    }
  }
}

static size_t first_of_hash(const matching_t* m, uint64_t hash) {
  size_t low = 0, high = m->task->num_ops;
  while (low < high) {
    size_t middle = low + (high - low) / 2;
    if (m->of_task[middle].hash < hash) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Finds an op of the task for each op of the pattern, in the same order. The pattern must
// be entered.
static bool match_all(const sharer_t* s, matching_t* m) {
  uint32_t next = 0;  // position in the task
  for (uint32_t i = 0; i < m->pattern->num_ops; ++i) {
    uint64_t hash = m->of_pattern[i].hash;
    bool found = false;
    for (size_t k = first_of_hash(m, hash);
         !found && k < m->task->num_ops && m->of_task[k].hash == hash; ++k) {
      uint32_t at = m->of_task[k].at;
      if (at < next) continue;
      found = ops_match(s, op_of(s, m->pattern, i), op_of(s, m->task, at));
      if (found) m->ops[i] = at;
    }
    if (!found) {
      forget_matches(s, m, i);
      return false;
    }
    match_ops(s, op_of(s, m->pattern, i), op_of(s, m->task, m->ops[i]));
    next = m->ops[i] + 1;
  }
  return true;
}

typedef void (*hash_ops_t)(const sharer_t* s, const jpp_task_t* task,
                           hashed_op_t* hashed);

static bool match_by(const sharer_t* s, matching_t* m, hash_ops_t hash_ops) {
  enter_task(s, m->task);
  hash_ops(s, m->task, m->of_task);
  leave_task(s, m->task);
  qsort(m->of_task, m->task->num_ops, sizeof(*m->of_task), compare_hashed);
  enter_task(s, m->pattern);
  hash_ops(s, m->pattern, m->of_pattern);
  bool matches = match_all(s, m);
  leave_task(s, m->pattern);
  return matches;
}

// --- Parts ----------------------------------------------------------------------------

static uint8_t* part_of_producer(const sharer_t* s, uint32_t value) {
  return &s->part[s->p->values.data[value].producer];
}

// Marks each op of the entered task with the parts that run it: ops that use results of
// the shared part run after it, all others before.
static void assign_parts(const sharer_t* s, const matching_t* m) {
  const jpp_task_t* task = m->task;
  for (uint32_t i = 0; i < task->num_ops; ++i) s->part[task->ops[i]] = PART_BEFORE;
  for (uint32_t i = 0; i < m->pattern->num_ops; ++i) {
    s->part[task->ops[m->ops[i]]] = PART_SHARED;
  }
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    uint8_t* part = &s->part[task->ops[i]];
    const jpp_op_t* op = op_of(s, task, i);
    if (is_clone(s, task->ops[i])) *part &= PART_SHARED;
    for (uint32_t k = 0; *part == PART_BEFORE && k < op->num_inputs; ++k) {
      if (!is_made_here(s, op->inputs[k])) continue;
      if (*part_of_producer(s, op->inputs[k]) & ~PART_BEFORE) *part = PART_AFTER;
    }
  }
  // A cheap op runs in each part that uses it, except that the shared part runs only
  // cheap ops that the pattern has: it takes the results of others from the part before.
  for (uint32_t i = task->num_ops; i-- > 0;) {
    const jpp_op_t* op = op_of(s, task, i);
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t producer = s->p->values.data[op->inputs[k]].producer;
      if (!is_made_here(s, op->inputs[k]) || !is_clone(s, producer)) continue;
      uint8_t users = s->part[task->ops[i]];
      bool is_shared = s->part[producer] & PART_SHARED;
      if (!is_shared && users & PART_SHARED) users ^= PART_SHARED | PART_BEFORE;
      s->part[producer] |= users;
    }
  }
}

// Only one task provides a cheap op's results to others, so that they have one producer.
static bool may_hand_out(const sharer_t* s, uint32_t clone) {
  return !s->p->outer_copy[clone] && s->p->handed_by[clone] == JPP_NONE;
}

// Whether the shared part has exactly the ops of the pattern, uses nothing that is made
// after it, and provides the same values as the pattern. The task must be entered.
static bool parts_are_sound(const sharer_t* s, const matching_t* m) {
  const jpp_task_t* task = m->task;
  uint32_t num_shared = 0;
  bool sound = true;
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    const jpp_op_t* op = op_of(s, task, i);
    uint8_t part = s->part[task->ops[i]];
    if (part & PART_SHARED) ++num_shared;
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      if (!is_made_here(s, op->inputs[k])) continue;
      uint32_t producer = s->p->values.data[op->inputs[k]].producer;
      uint8_t made = s->part[producer];
      bool crosses = part & PART_SHARED && !(made & PART_SHARED);
      if (crosses && made == PART_AFTER) sound = false;
      if (crosses && is_clone(s, producer) && !may_hand_out(s, producer)) sound = false;
      if (part == PART_AFTER && made == PART_SHARED) s->leaves[op->inputs[k]] = true;
    }
  }
  for (uint32_t i = 0; i < m->pattern->num_ops; ++i) {
    const jpp_op_t *x = op_of(s, m->pattern, i), *y = op_of(s, task, m->ops[i]);
    for (uint32_t k = 0; k < x->num_outputs; ++k) {
      uint32_t a = x->first_output + k, b = y->first_output + k;
      if (s->taken[a] != (s->taken[b] || s->leaves[b])) sound = false;
      s->leaves[b] = false;
    }
  }
  return sound && num_shared == m->pattern->num_ops;
}

static jpp_status_t* collect_part(sharer_t* s, const jpp_task_t* whole, uint32_t bit,
                                  jpp_task_t* part) {
  s->ops.count = s->inputs.count = 0;
  ++s->num_parts;
  part->cost = 0;
  for (uint32_t i = 0; i < whole->num_ops; ++i) {
    if (!(s->part[whole->ops[i]] & bit)) continue;
    const jpp_op_t* op = op_of(s, whole, i);
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&s->ops, whole->ops[i]));
    part->cost += op->cost;
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t value = op->inputs[k];
      if (is_made_here(s, value) && *part_of_producer(s, value) & bit) continue;
      if (s->input_of[value] == s->num_parts) continue;
      s->input_of[value] = s->num_parts;
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&s->inputs, value));
      uint32_t producer = s->p->values.data[value].producer;
      bool handed = is_made_here(s, value) && is_clone(s, producer);
      if (handed) s->p->handed_by[producer] = whole->repeats;
    }
  }
  part->num_ops = (uint32_t)s->ops.count;
  part->num_inputs = (uint32_t)s->inputs.count;
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&s->ops, s->p->arena, &part->ops));
  return JPP_VEC_TO_ARENA(&s->inputs, s->p->arena, &part->inputs);
}

static jpp_status_t* name_part(const sharer_t* s, const char* whole, uint32_t number,
                               const char** out_name) {
  jpp_str_t str = {0};
  char* text = NULL;
  jpp_str_appendf(&str, "%s_part%u", whole, number);
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status = jpp__arena_strdup(s->p->arena, text, out_name);
  jpp_free(text);
  return status;
}

static void move_accumulators(const sharer_t* s, uint32_t from, uint32_t bit,
                              uint32_t to) {
  for (size_t i = 0; i < s->p->accumulators.count; ++i) {
    jpp_accumulator_t* acc = &s->p->accumulators.data[i];
    if (acc->task == from && *part_of_producer(s, acc->next) == bit) acc->task = to;
  }
}

// Replaces the entered task by its parts. The first one keeps its id and name.
static jpp_status_t* divide_task(sharer_t* s, uint32_t id, uint32_t pattern) {
  jpp_partitioner_t* p = s->p;
  const jpp_task_t whole = p->tasks.data[id];
  uint32_t last = JPP_NONE, number = 0;
  for (uint32_t bit = PART_BEFORE; bit <= PART_AFTER; bit <<= 1) {
    jpp_task_t part = whole;
    JPP_RETURN_IF_ERROR(collect_part(s, &whole, bit, &part));
    if (!part.num_ops) continue;
    if (bit == PART_SHARED) part.pattern = pattern;
    ++number;
    if (last == JPP_NONE) {
      p->tasks.data[id] = part;
      last = id;
      continue;
    }
    part.repeats = (uint32_t)p->tasks.count;
    JPP_RETURN_IF_ERROR(name_part(s, whole.name, number, &part.name));
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&p->tasks, part));
    move_accumulators(s, id, bit, part.repeats);
    p->tasks.data[last].next_part = part.repeats;
    last = part.repeats;
  }
  return NULL;
}

static jpp_status_t* divide_if_sound(sharer_t* s, const matching_t* m, uint32_t id,
                                     uint32_t pattern) {
  enter_task(s, m->task);
  assign_parts(s, m);
  jpp_status_t* status = parts_are_sound(s, m) ? divide_task(s, id, pattern) : NULL;
  leave_task(s, m->task);
  return status;
}

// --- All stages -----------------------------------------------------------------------

static jpp_status_t* share_with(sharer_t* s, uint32_t pattern_id, uint32_t id) {
  const jpp_task_t pattern = s->p->tasks.data[pattern_id], task = s->p->tasks.data[id];
  if (task.num_ops <= pattern.num_ops) return NULL;
  matching_t m = {.pattern = &pattern, .task = &task};
  jpp_status_t* status = JPP_ALLOC_ARRAY(pattern.num_ops, &m.of_pattern);
  if (!status) status = JPP_ALLOC_ARRAY(task.num_ops, &m.of_task);
  if (!status) status = JPP_ALLOC_ARRAY(pattern.num_ops, &m.ops);
  if (!status && (match_by(s, &m, hash_by_operands) || match_by(s, &m, hash_by_users))) {
    status = divide_if_sound(s, &m, id, pattern_id);
    forget_matches(s, &m, pattern.num_ops);
  }
  jpp_free(m.of_pattern);
  jpp_free(m.of_task);
  jpp_free(m.ops);
  return status;
}

static bool has_known_ops(const sharer_t* s, const jpp_task_t* task) {
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    if (!code_of(s, op_of(s, task, i))) return false;
  }
  return true;
}

static bool is_worth_sharing(const sharer_t* s, const jpp_task_t* pattern) {
  if (pattern->cost < kLeastCost || pattern->num_ops < kFewestOps) return false;
  return has_known_ops(s, pattern);
}

static jpp_status_t* share_tasks(sharer_t* s, const uint32_t* tasks, uint32_t stages) {
  if (!tasks || stages < 3 || !is_worth_sharing(s, &s->p->tasks.data[tasks[1]])) {
    return NULL;
  }
  for (uint32_t stage = 0; stage < stages; ++stage) {
    if (stage == 1) continue;
    JPP_RETURN_IF_ERROR(share_with(s, tasks[1], tasks[stage]));
  }
  return NULL;
}

static jpp_status_t* prepare_sharer(sharer_t* s) {
  const jpp_partitioner_t* p = s->p;
  jpp_arena_t* scratch = &s->p->scratch;
  size_t values = p->values.count, ops = p->ops.count;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, values, &s->taken));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, values, &s->leaves));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, values, &s->hashes));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, values, &s->input_of));
  JPP_RETURN_IF_ERROR(jpp__ids_create(scratch, values, &s->match));
  JPP_RETURN_IF_ERROR(jpp__ids_create(scratch, values, &s->match_of));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ops, &s->part));
  JPP_RETURN_IF_ERROR(jpp__ids_create(scratch, ops, &s->op_at));
  for (size_t t = 0; t < p->tasks.count; ++t) {
    const jpp_task_t* task = &p->tasks.data[t];
    for (uint32_t i = 0; i < task->num_inputs; ++i) s->taken[task->inputs[i]] = true;
  }
  return NULL;
}

static jpp_status_t* share_stages(sharer_t* s) {
  const jpp_partitioner_t* p = s->p;
  JPP_RETURN_IF_ERROR(prepare_sharer(s));
  for (uint32_t l = 0; l < p->graph->num_loops; ++l) {
    const jpp_staged_loop_t* loop = &p->loops[l];
    JPP_RETURN_IF_ERROR(share_tasks(s, loop->forward, loop->stages));
    JPP_RETURN_IF_ERROR(share_tasks(s, loop->backward, loop->stages));
    JPP_RETURN_IF_ERROR(share_tasks(s, loop->weight, loop->stages));
  }
  return NULL;
}

// --- Outside the loops ----------------------------------------------------------------

// Whether the ops only fill states, or compute integers and booleans: they have the same
// bits in every module.
static bool is_exact(const sharer_t* s, const jpp_task_t* task) {
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    const jpp_op_t* op = op_of(s, task, i);
    for (uint32_t k = 0; k < op->num_outputs && op->kind != JPP_OP_INIT; ++k) {
      uint8_t dtype = s->p->values.data[op->first_output + k].type.dtype;
      if (dtype < JPP_DTYPE_BOOL || dtype > JPP_DTYPE_U64) return false;
    }
  }
  return true;
}

// Marks the exact tasks outside the loops that one rank alone runs: what each op computes
// is known, and no other task computes it again.
static jpp_status_t* find_own_tasks(const sharer_t* s, bool** out_own) {
  const jpp_partitioner_t* p = s->p;
  uint32_t* task_of = NULL;  // [ops] the first task that runs it
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&s->p->scratch, p->tasks.count, out_own));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&s->p->scratch, p->ops.count, &task_of));
  for (uint32_t t = 0; t < p->tasks.count; ++t) {
    const jpp_task_t* task = &p->tasks.data[t];
    if (task->kind != JPP_TASK_OUTER) continue;
    (*out_own)[t] = has_known_ops(s, task) && is_exact(s, task);
    for (uint32_t i = 0; i < task->num_ops; ++i) {
      uint32_t* first = &task_of[task->ops[i]];
      if (*first == JPP_NONE) *first = t;
      if (*first != t) (*out_own)[t] = (*out_own)[*first] = false;
    }
  }
  return NULL;
}

static uint64_t bytes_made(const sharer_t* s, const jpp_task_t* task) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    const jpp_op_t* op = op_of(s, task, i);
    for (uint32_t k = 0; k < op->num_outputs; ++k) {
      uint32_t value = op->first_output + k;
      if (s->taken[value]) bytes += jpp_type_bytes(&s->p->values.data[value].type);
    }
  }
  return bytes;
}

static jpp_status_t* share_outer(sharer_t* s) {
  const jpp_partitioner_t* p = s->p;
  if (p->options->ranks < 3) return NULL;
  bool* own = NULL;
  JPP_RETURN_IF_ERROR(prepare_sharer(s));
  JPP_RETURN_IF_ERROR(find_own_tasks(s, &own));
  for (size_t i = 0; i < p->accumulators.count; ++i) {
    s->taken[p->accumulators.data[i].init] = true;
  }
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    s->taken[p->alias[p->graph->outputs[i].value]] = true;
  }
  uint32_t count = (uint32_t)p->tasks.count;
  for (uint32_t a = 0; a < count; ++a) {
    const jpp_task_t pattern = p->tasks.data[a];
    if (!own[a] || pattern.rank != 1 || bytes_made(s, &pattern) < kLeastBytes) continue;
    for (uint32_t t = 0; t < count; ++t) {
      const jpp_task_t* task = &p->tasks.data[t];
      bool whole = task->next_part == JPP_NONE && task->pattern == JPP_NONE;
      if (!own[t] || !whole || task->rank == 1 || task->phase != pattern.phase) continue;
      JPP_RETURN_IF_ERROR(share_with(s, a, t));
    }
  }
  return NULL;
}

static jpp_status_t* share(sharer_t* s, jpp_status_t* (*share_some)(sharer_t* s)) {
  jpp_status_t* status = share_some(s);
  jpp_vec_deinit(&s->ops);
  jpp_vec_deinit(&s->inputs);
  return status;
}

jpp_status_t* jpp__partition_share_stages(jpp_partitioner_t* p) {
  sharer_t sharer = {.p = p};
  return share(&sharer, share_stages);
}

jpp_status_t* jpp__partition_share_outer(jpp_partitioner_t* p) {
  sharer_t sharer = {.p = p, .outside = true};
  return share(&sharer, share_outer);
}
