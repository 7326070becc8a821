// Stages whose forward takes no longer than a call of the plugin: each call that is saved
// counts, and so does each value that a call makes and another one takes.
//
//  - Where the last stage's backward always follows its forward, both become one task.
//  - The backward of another stage computes again what it needs of its forward, if it
//    then takes fewer values: only what the forward itself takes is kept. In a graph with
//    shards it does not, because ops might communicate twice.
//  - Small sums of a task become one array (reduce.c).
//
// The price of the first two is a larger module for the backward. A forward of its own
// would share the module of other stages, and the values it keeps would not be computed
// twice.
#include "partition/partitioner.h"

// A CPU core takes as long for this many floating-point operations as for a call; so many
// calls a step are worth compiling more.
static const float kCallCost = 5e5F;
enum { kFewestCalls = 16 };

typedef struct shrinker {
  jpp_partitioner_t* p;
  const jpp_loop_t* loop;
  uint32_t stages;
  float* cost;      // [2 * stages] of each segment
  uint32_t* first;  // [2 * stages + 1] where each segment begins in `ops`
  uint32_t* ops;    // op ids, by segment
  bool* sent;       // [body ops] another stage uses its values
  bool* kept;       // [body ops] must run in its own segment only
  bool* again;      // [body ops] the backward of the stage runs it again
  uint32_t* taken;  // [values] the last count that has it
  uint32_t counts;  // made so far
  jpp_u32_vec_t stack;
} shrinker_t;

static bool is_small(const shrinker_t* s, uint32_t segment) {
  bool is_known = s->cost[segment] > 0;
  return is_known && s->cost[segment] <= kCallCost;
}

// A counting sort of the body's ops.
static jpp_status_t* list_segments(shrinker_t* s) {
  jpp_arena_t* scratch = &s->p->scratch;
  size_t count = 2 * (size_t)s->stages;
  uint32_t* next = NULL;  // [segments] the index in `ops` of the segment's next op
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, count, &s->cost));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, count + 1, &s->first));
  for (uint32_t id = s->loop->first_op; id < s->loop->op; ++id) {
    uint32_t segment = s->p->segment[id];
    if (!jpp__segment_is_stage(segment)) continue;
    s->cost[segment] += s->p->ops.data[id].cost;
    ++s->first[segment + 1];
  }
  for (size_t i = 0; i < count; ++i) s->first[i + 1] += s->first[i];
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, s->first[count], &s->ops));
  JPP_RETURN_IF_ERROR(
      jpp__arena_copy(scratch, s->first, count * sizeof(*next), (void**)&next));
  for (uint32_t id = s->loop->first_op; id < s->loop->op; ++id) {
    uint32_t segment = s->p->segment[id];
    if (jpp__segment_is_stage(segment)) s->ops[next[segment]++] = id;
  }
  return NULL;
}

// Marks the ops of forwards whose values another stage uses.
static void find_sent(const shrinker_t* s) {
  for (uint32_t id = s->loop->first_op; id < s->loop->op; ++id) {
    const jpp_op_t* op = &s->p->ops.data[id];
    uint32_t segment = s->p->segment[id];
    if (!jpp__segment_is_stage(segment)) continue;
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      uint32_t producer = jpp__producer_in_stage(s->p, s->loop, op->inputs[i]);
      if (producer == JPP_NONE) continue;
      uint32_t made = s->p->segment[producer];
      bool stays = segment == made || segment == jpp__segment_backward(s->stages, made);
      if (!stays) s->sent[producer - s->loop->first_op] = true;
    }
  }
}

// --- The last stage -------------------------------------------------------------------

static void join_last_stage(const shrinker_t* s) {
  uint32_t last = s->stages - 1;
  for (uint32_t i = s->first[last]; i < s->first[last + 1]; ++i) {
    if (s->sent[s->ops[i] - s->loop->first_op]) return;
  }
  for (uint32_t i = s->first[last]; i < s->first[last + 1]; ++i) {
    s->p->segment[s->ops[i]] = s->stages;
  }
}

// --- Other stages ---------------------------------------------------------------------

static bool is_pure(const shrinker_t* s, const jpp_op_t* op) {
  if (op->kind != JPP_OP_CALL && op->kind != JPP_OP_ADD) return false;
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    const jpp_value_t* value = &s->p->values.data[op->first_output + i];
    if (value->type.memory != JPP_MEMORY_DEVICE) return false;
  }
  return !(op->flags & JPP_OP_EFFECT);
}

// An op may run twice if it has no effect and only its own stage uses its values.
static void find_kept(const shrinker_t* s) {
  for (uint32_t id = s->loop->first_op; id < s->loop->op; ++id) {
    uint32_t at = id - s->loop->first_op;
    s->kept[at] = s->sent[at] || !is_pure(s, &s->p->ops.data[id]);
  }
  for (uint32_t i = 0; i < s->loop->num_results; ++i) {
    uint32_t producer =
        jpp__producer_in_stage(s->p, s->loop, s->p->alias[s->loop->results[i].value]);
    if (producer != JPP_NONE) s->kept[producer - s->loop->first_op] = true;
  }
}

// Counts a value that the backward takes, or has the op that makes it run again.
static jpp_status_t* take(shrinker_t* s, uint32_t stage, uint32_t value, bool runs_again,
                          uint32_t* count) {
  uint32_t producer = jpp__producer_in_stage(s->p, s->loop, value);
  if (producer == JPP_NONE ||
      s->p->segment[producer] == jpp__segment_backward(s->stages, stage)) {
    return NULL;
  }
  uint32_t at = producer - s->loop->first_op;
  if (runs_again && s->p->segment[producer] == stage && !s->kept[at]) {
    if (s->again[at]) return NULL;
    s->again[at] = true;
    return JPP_VEC_PUSH(&s->stack, producer);
  }
  if (s->taken[value] != s->counts) ++*count;
  s->taken[value] = s->counts;
  return NULL;
}

// Counts the values that the backward of the stage takes from other tasks of the loop.
static jpp_status_t* count_taken(shrinker_t* s, uint32_t stage, bool runs_again,
                                 uint32_t* count) {
  uint32_t segment = jpp__segment_backward(s->stages, stage);
  *count = 0;
  ++s->counts;
  for (uint32_t i = s->first[segment]; i < s->first[segment + 1]; ++i) {
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&s->stack, s->ops[i]));
    while (s->stack.count) {
      const jpp_op_t* op = &s->p->ops.data[s->stack.data[--s->stack.count]];
      for (uint32_t k = 0; k < op->num_inputs; ++k) {
        JPP_RETURN_IF_ERROR(take(s, stage, op->inputs[k], runs_again, count));
      }
    }
  }
  return NULL;
}

static jpp_status_t* run_forward_again(shrinker_t* s, uint32_t stage) {
  uint32_t before = 0, after = 0;
  JPP_RETURN_IF_ERROR(count_taken(s, stage, false, &before));
  JPP_RETURN_IF_ERROR(count_taken(s, stage, true, &after));
  if (after >= before) return NULL;
  for (uint32_t i = s->first[stage]; i < s->first[stage + 1]; ++i) {
    uint32_t id = s->ops[i];
    if (s->again[id - s->loop->first_op]) s->p->segment[id] = JPP_SEGMENT_CLONE;
  }
  return NULL;
}

// --- A loop ---------------------------------------------------------------------------

static jpp_status_t* mark_small_stages(shrinker_t* s) {
  JPP_RETURN_IF_ERROR(list_segments(s));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&s->p->scratch, s->stages, &s->p->small_stages));
  for (uint32_t i = 0; i < s->stages; ++i) s->p->small_stages[i] = is_small(s, i);
  return NULL;
}

static jpp_status_t* shrink_loop(shrinker_t* s, bool backward_follows) {
  size_t ops = s->loop->op - s->loop->first_op;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&s->p->scratch, ops, &s->sent));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&s->p->scratch, ops, &s->kept));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&s->p->scratch, ops, &s->again));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&s->p->scratch, s->p->values.count, &s->taken));
  find_sent(s);
  if (backward_follows && s->p->small_stages[s->stages - 1]) join_last_stage(s);
  find_kept(s);
  for (uint32_t stage = 0; !s->p->graph->sharded && stage < s->stages; ++stage) {
    if (!s->p->small_stages[stage]) continue;
    JPP_RETURN_IF_ERROR(run_forward_again(s, stage));
  }
  return NULL;
}

jpp_status_t* jpp__partition_shrink_calls(jpp_partitioner_t* p, uint32_t loop) {
  const jpp_loop_placement_t* placement = &p->options->loops[loop];
  shrinker_t shrinker = {
      .p = p, .loop = &p->graph->loops[loop], .stages = placement->stages};
  p->small_stages = NULL;
  bool few = shrinker.loop->microbatches < kFewestCalls;
  if (few || !p->loops[loop].has_backward) return NULL;
  JPP_RETURN_IF_ERROR(mark_small_stages(&shrinker));
  if (placement->split_backward) return NULL;
  jpp_status_t* status = shrink_loop(&shrinker, placement->backward_follows);
  jpp_vec_deinit(&shrinker.stack);
  return status;
}
