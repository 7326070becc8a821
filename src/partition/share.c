// Divides the tasks of stages that do more than others (an embedding in the first stage,
// a head and the loss in the last one). The ops that they share with the other stages
// become a separate task: the same ops on operands of the same types, and therefore one
// module, which is compiled once.
//
// A pattern is the whole task of a stage between the first and the last: usually of stage
// 1, which has only the ops that every stage has. Where stages are of several kinds, as
// in encoders with decoders, the first of each kind is one. In another stage's task, the
// ops that do not match the pattern's (match.h) run before the shared part or after it.
//
// The price is one or two more calls per microbatch, so small tasks are not divided.
//
// Tasks outside the loops that fill accumulators and make masks are divided in the same
// way, by those of rank 1. There the price is one or two calls per step. Updates of
// weights stay whole, because XLA rounds them differently in another module.
#include "base/str.h"
#include "partition/match.h"
#include "partition/partitioner.h"
#include "task/ids.h"

// The smallest pattern that is worth a call: of this cost, in floating-point operations,
// which takes a CPU core as long as about twenty calls, and with this many ops to
// compile, or one with a body; or with many ops, which take longer than a call whatever
// their cost.
static const float kLeastCost = 1e7F;
enum { kFewestOps = 8, kManyOps = 48 };

// Models have few kinds of stages, and each is compared with all stages.
enum { kMostPatterns = 4 };

// The smallest pattern outside the loops: filling this many bytes takes about as long as
// a call.
static const uint64_t kLeastBytes = 1 << 16;

enum { PART_BEFORE = 1, PART_SHARED = 2, PART_AFTER = 4 };  // bits

typedef struct sharer {
  jpp_partitioner_t* p;
  jpp_matcher_t matcher;
  bool* taken;         // [values] another stage task takes it
  uint8_t* part;       // [ops] PART_ bits of an op of the task that is being divided
  bool* leaves;        // [values] another part takes it from the shared part
  uint32_t* input_of;  // [values] the last part that got it as an input
  uint32_t num_parts;  // number of parts so far
  bool outside;        // the tasks are outside the loops
  jpp_u32_vec_t ops, inputs;
} sharer_t;

// A task that contains the pattern.
typedef struct matching {
  const jpp_task_t *pattern, *task;
  uint32_t* ops;  // [pattern ops] position of the matching op in the task
} matching_t;

// Whether each task that uses a cheap op runs it.
static bool is_clone(const sharer_t* s, uint32_t op) {
  return !s->outside && op < s->p->graph->num_ops &&
         s->p->segment[op] == JPP_SEGMENT_CLONE;
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
    const jpp_op_t* op = jpp__task_op(s->p, task, i);
    if (is_clone(s, task->ops[i])) *part &= PART_SHARED;
    for (uint32_t k = 0; *part == PART_BEFORE && k < op->num_inputs; ++k) {
      if (!jpp__match_is_made_here(&s->matcher, op->inputs[k])) continue;
      if (*part_of_producer(s, op->inputs[k]) & ~PART_BEFORE) *part = PART_AFTER;
    }
  }
  // A cheap op runs in each part that uses it, except that the shared part runs only
  // cheap ops that the pattern has: it takes the results of others from the part before.
  for (uint32_t i = task->num_ops; i-- > 0;) {
    const jpp_op_t* op = jpp__task_op(s->p, task, i);
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t producer = s->p->values.data[op->inputs[k]].producer;
      if (!jpp__match_is_made_here(&s->matcher, op->inputs[k]) || !is_clone(s, producer))
        continue;
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
    const jpp_op_t* op = jpp__task_op(s->p, task, i);
    uint8_t part = s->part[task->ops[i]];
    if (part & PART_SHARED) ++num_shared;
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      if (!jpp__match_is_made_here(&s->matcher, op->inputs[k])) continue;
      uint32_t producer = s->p->values.data[op->inputs[k]].producer;
      uint8_t made = s->part[producer];
      bool crosses = part & PART_SHARED && !(made & PART_SHARED);
      if (crosses && made == PART_AFTER) sound = false;
      if (crosses && is_clone(s, producer) && !may_hand_out(s, producer)) sound = false;
      if (part == PART_AFTER && made == PART_SHARED) s->leaves[op->inputs[k]] = true;
    }
  }
  for (uint32_t i = 0; i < m->pattern->num_ops; ++i) {
    const jpp_op_t *x = jpp__task_op(s->p, m->pattern, i),
                   *y = jpp__task_op(s->p, task, m->ops[i]);
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
    const jpp_op_t* op = jpp__task_op(s->p, whole, i);
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&s->ops, whole->ops[i]));
    part->cost += op->cost;
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t value = op->inputs[k];
      bool here = jpp__match_is_made_here(&s->matcher, value);
      if (here && *part_of_producer(s, value) & bit) continue;
      if (s->input_of[value] == s->num_parts) continue;
      s->input_of[value] = s->num_parts;
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&s->inputs, value));
      uint32_t producer = s->p->values.data[value].producer;
      if (here && is_clone(s, producer)) s->p->handed_by[producer] = whole->repeats;
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
  jpp__match_enter(&s->matcher, m->task);
  assign_parts(s, m);
  jpp_status_t* status = parts_are_sound(s, m) ? divide_task(s, id, pattern) : NULL;
  jpp__match_leave(&s->matcher, m->task);
  return status;
}

// --- All stages -----------------------------------------------------------------------

static jpp_status_t* share_with(sharer_t* s, uint32_t pattern_id, uint32_t id) {
  const jpp_task_t pattern = s->p->tasks.data[pattern_id], task = s->p->tasks.data[id];
  if (task.num_ops <= pattern.num_ops) return NULL;
  matching_t m = {.pattern = &pattern, .task = &task};
  bool found = false;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(pattern.num_ops, &m.ops));
  jpp_status_t* status = jpp__match_find(&s->matcher, m.pattern, m.task, m.ops, &found);
  if (!status && found) status = divide_if_sound(s, &m, id, pattern_id);
  jpp_free(m.ops);
  return status;
}

static bool has_body(const sharer_t* s, const jpp_task_t* task) {
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    if (jpp__task_op(s->p, task, i)->flags & JPP_OP_BODY) return true;
  }
  return false;
}

static bool is_worth_sharing(const sharer_t* s, const jpp_task_t* pattern) {
  bool takes_time = pattern->num_ops >= kFewestOps || has_body(s, pattern);
  bool costs = pattern->cost >= kLeastCost && takes_time;
  return (costs || pattern->num_ops >= kManyOps) &&
         jpp__match_knows(&s->matcher, pattern);
}

static bool is_whole(const jpp_task_t* task) {
  return task->next_part == JPP_NONE && task->pattern == JPP_NONE;
}

static bool is_pattern(const sharer_t* s, uint32_t task) {
  for (size_t t = 0; t < s->p->tasks.count; ++t) {
    if (s->p->tasks.data[t].pattern == task) return true;
  }
  return false;
}

static bool contains(const uint64_t* hashes, uint32_t count, uint64_t hash) {
  for (uint32_t i = 0; i < count; ++i) {
    if (hashes[i] == hash) return true;
  }
  return false;
}

// `tasks`: [stages] forwards, backwards or weight gradients of a loop; or NULL. A task
// that others share is not divided itself.
static jpp_status_t* share_tasks(sharer_t* s, const uint32_t* tasks, uint32_t stages) {
  uint64_t hashes[kMostPatterns] = {0}, hash = 0;
  uint32_t num_patterns = 0;
  for (uint32_t k = 1; tasks && k + 1 < stages && num_patterns < kMostPatterns; ++k) {
    const jpp_task_t* pattern = &s->p->tasks.data[tasks[k]];
    if (!is_whole(pattern) || !is_worth_sharing(s, pattern)) continue;
    JPP_RETURN_IF_ERROR(jpp__match_hash(&s->matcher, pattern, &hash));
    if (contains(hashes, num_patterns, hash)) continue;
    hashes[num_patterns++] = hash;
    for (uint32_t stage = 0; stage < stages; ++stage) {
      bool whole = is_whole(&s->p->tasks.data[tasks[stage]]);
      if (!whole || is_pattern(s, tasks[stage])) continue;
      JPP_RETURN_IF_ERROR(share_with(s, tasks[k], tasks[stage]));
    }
  }
  return NULL;
}

static jpp_status_t* prepare_sharer(sharer_t* s) {
  const jpp_partitioner_t* p = s->p;
  jpp_arena_t* scratch = &s->p->scratch;
  JPP_RETURN_IF_ERROR(jpp__matcher_init(&s->matcher, s->p));
  size_t values = p->values.count, ops = p->ops.count;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, values, &s->taken));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, values, &s->leaves));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, values, &s->input_of));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ops, &s->part));
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
    const jpp_op_t* op = jpp__task_op(s->p, task, i);
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
    (*out_own)[t] = jpp__match_knows(&s->matcher, task) && is_exact(s, task);
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
    const jpp_op_t* op = jpp__task_op(s->p, task, i);
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
      if (!own[t] || !is_whole(task) || task->rank == 1 || task->phase != pattern.phase)
        continue;
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
