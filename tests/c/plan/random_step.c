// Writes random graph texts and builds random schedules for their loops, from a seed.
#include "random_step.h"

#include <stdio.h>
#include <string.h>

#include "test_util.h"

static uint64_t g_random;
// xorshift64*, https://en.wikipedia.org/wiki/Xorshift
static uint32_t pick(uint32_t count) {
  g_random ^= g_random >> 12;
  g_random ^= g_random << 25;
  g_random ^= g_random >> 27;
  return (uint32_t)((g_random * 2685821657736338717u) >> 33) % (count ? count : 1);
}

enum { kMaxValues = 4096, kMaxStages = 8 };

typedef struct pool {
  uint32_t ids[kMaxValues];
  uint32_t count;
} pool_t;

static void put(pool_t* pool, uint32_t value) { pool->ids[pool->count++] = value; }
static uint32_t any(const pool_t* pool) { return pool->ids[pick(pool->count)]; }
// Chooses one of the last few values, which makes longer chains.
static uint32_t recent(const pool_t* pool) {
  uint32_t back = pick(3) + 1;
  return pool->ids[pool->count > back ? pool->count - back : 0];
}

static uint32_t last(const pool_t* pool) { return pool->ids[pool->count - 1]; }

typedef struct maker {
  jpp_graph_builder_t* builder;
  uint32_t ranks, stages, microbatches;
  uint32_t names;
  uint32_t index;
  bool backward, last_mark;
  bool layered;   // each stage has the same ops; the first and the last have more
  uint32_t code;  // of the ops that are added; 0: none
  uint32_t task_ranks[2], num_task_ranks;  // of the op that is added
  pool_t args;                             // small and large ones
  pool_t outside;                          // values of ops outside the loops
  pool_t forward[kMaxStages], transposed[kMaxStages], marked[kMaxStages];
  pool_t results;
  bool is_large[kMaxValues];
  bool is_host[kMaxValues];  // in pinned host memory
  bool is_next[kMaxValues];  // an output replaces this argument in the next step
} maker_t;

static const int64_t kSmall[] = {4}, kLarge[] = {2048};

static jpp_type_t type_of(bool large, bool host) {
  return (jpp_type_t){.dtype = JPP_DTYPE_F32,
                      .ndim = 1,
                      .dims = large ? kLarge : kSmall,
                      .memory = host ? JPP_MEMORY_PINNED_HOST : JPP_MEMORY_DEVICE};
}

typedef struct inputs {
  uint32_t count;
  const uint32_t* ids;
} inputs_t;

static uint32_t add_op(maker_t* m, jpp_op_kind_t kind, uint32_t attr, uint8_t flags,
                       inputs_t inputs, bool large) {
  char name[32];
  snprintf(name, sizeof(name), "op%u", m->names++);
  // Marks and sums keep the type of their inputs.
  bool host = kind == JPP_OP_CALL ? !m->code && pick(6) == 0 : m->is_host[inputs.ids[0]];
  jpp_type_t type = type_of(large, host);
  jpp_op_desc_t desc = {.struct_size = sizeof(desc),
                        .kind = kind,
                        .flags = flags,
                        .attr = attr,
                        .num_inputs = inputs.count,
                        .inputs = inputs.ids,
                        .num_outputs = 1,
                        .outputs = &type,
                        .name = name,
                        .cost = kind == JPP_OP_CALL ? (float)(m->names % 5) : 0,
                        .code = m->code,
                        .ranks = m->task_ranks,
                        .num_ranks = m->num_task_ranks};
  if (m->code) desc.cost = 1e7F;  // large enough for a separate task
  uint32_t value = 0;
  ASSERT_OK(jpp_graph_builder_add_op(m->builder, &desc, &value));
  m->is_large[value] = large;
  m->is_host[value] = host;
  return value;
}

static uint32_t add_call(maker_t* m, uint8_t flags, const pool_t* near,
                         const pool_t* far) {
  uint32_t inputs[4], count = pick(3) + 1;
  for (uint32_t i = 0; i < count; ++i) {
    const pool_t* from = far->count && pick(3) == 0 ? far : near;
    inputs[i] = from->count ? (pick(2) ? recent(from) : any(from)) : any(&m->args);
  }
  if (pick(5) == 0) inputs[0] = any(&m->args);
  if (m->index != JPP_NONE && pick(8) == 0) inputs[0] = m->index;
  if (pick(4) == 0) flags |= JPP_OP_CHEAP;
  if (m->names % 10 == 3) flags |= JPP_OP_ZEROS;
  if (m->names % 10 == 7) flags |= JPP_OP_BODY;
  return add_op(m, JPP_OP_CALL, 0, flags, (inputs_t){count, inputs}, pick(3) == 0);
}

// A task that the user defined, on one rank or on two.
static uint32_t add_task(maker_t* m, uint8_t flags, const pool_t* near,
                         const pool_t* far) {
  uint32_t inputs[] = {any(near), any(far), recent(near)}, count = pick(4);
  uint32_t rank = pick(m->ranks), more = pick(m->ranks - rank);
  m->task_ranks[0] = rank;
  m->task_ranks[1] = rank + more;
  m->num_task_ranks = !more || pick(3) ? 1 : 2;
  uint32_t value =
      add_op(m, JPP_OP_TASK, 0, flags, (inputs_t){count, inputs}, pick(3) == 0);
  m->num_task_ranks = 0;
  return value;
}

// Adds the ops that every stage has.
static void add_layer(maker_t* m, uint8_t flags, pool_t* here, const pool_t* kept) {
  enum { kOps = 9 };
  uint32_t values[kOps + 1] = {here->count ? last(here) : any(&m->args)};
  for (uint32_t i = 0; i < kOps; ++i) {
    m->code = i + 1;
    uint32_t inputs[] = {values[i], values[i / 2], kept->ids[i % kept->count]};
    values[i + 1] =
        add_op(m, JPP_OP_CALL, 0, flags, (inputs_t){2 + i % 2, inputs}, false);
    put(here, values[i + 1]);
  }
  m->code = 0;
}

static bool has_more(const maker_t* m, uint32_t stage) {
  return !m->layered || ((stage == 0 || stage + 1 == m->stages) && pick(4));
}

// Sets random ranks for what was added last.
static void set_ranks(const maker_t* m,
                      jpp_status_t* (*set)(jpp_graph_builder_t* builder,
                                           const uint32_t* ranks, uint32_t count)) {
  uint32_t chosen[64], count = 0;
  for (uint32_t r = 0; r < m->ranks && r < 64; ++r) {
    if (pick(2)) chosen[count++] = r;
  }
  if (count) ASSERT_OK(set(m->builder, chosen, count));
}

static void add_args(maker_t* m) {
  uint32_t count = pick(6) + 3;
  for (uint32_t i = 0; i < count; ++i) {
    bool large = pick(2), host = pick(5) == 0;
    jpp_type_t type = type_of(large, host);
    uint32_t value = 0;
    ASSERT_OK(jpp_graph_builder_add_arg(m->builder, &type, pick(2), NULL, &value));
    m->is_large[value] = large;
    m->is_host[value] = host;
    put(&m->args, value);
    if (pick(3) == 0) set_ranks(m, jpp_graph_builder_give_arg);
  }
}

static void add_outside(maker_t* m, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    const pool_t* near = m->outside.count ? &m->outside : &m->args;
    const pool_t* far = m->results.count ? &m->results : &m->args;
    put(&m->outside, pick(3) ? add_call(m, 0, near, far)
                             : add_task(m, pick(8) ? 0 : JPP_OP_EFFECT, near, far));
  }
}

// Sums values of the same type from any of the pools.
static uint32_t add_sum(maker_t* m, uint8_t flags, const pool_t* pools, uint32_t count) {
  uint32_t total = JPP_NONE;
  for (uint32_t i = 0; i < count * 3; ++i) {
    const pool_t* pool = &pools[pick(count)];
    if (!pool->count) continue;
    uint32_t term = any(pool);
    if (total == JPP_NONE) {
      total = term;
    } else if (m->is_large[term] == m->is_large[total] &&
               m->is_host[term] == m->is_host[total]) {
      uint32_t inputs[] = {total, term};
      if (pick(2)) inputs[0] = term, inputs[1] = total;
      total = add_op(m, JPP_OP_ADD, 0, flags, (inputs_t){2, inputs}, m->is_large[term]);
    }
  }
  return total;
}

static void add_mark(maker_t* m, jpp_op_kind_t kind, uint32_t stage, const pool_t* from,
                     pool_t* to) {
  uint32_t value = from->count ? recent(from) : any(&m->args);
  if (m->layered && from->count) value = last(from);
  uint8_t flags = kind == JPP_OP_MARK ? 0 : JPP_OP_BACKWARD;
  put(to, add_op(m, kind, stage, flags, (inputs_t){1, &value}, m->is_large[value]));
}

static void add_forward(maker_t* m) {
  for (uint32_t s = 0; s < m->stages; ++s) {
    pool_t* here = &m->forward[s];
    if (s) put(here, m->marked[s - 1].ids[0]);
    const pool_t* far = s && pick(4) == 0 ? &m->forward[pick(s)] : &m->outside;
    if (has_more(m, s)) {
      for (uint32_t i = pick(5); i-- > 0;) put(here, add_call(m, 0, here, far));
    }
    if (m->layered && s == 0) {  // else everything might be moved out of the loop
      uint32_t inputs[] = {m->index, here->count ? last(here) : any(&m->args)};
      put(here, add_op(m, JPP_OP_CALL, 0, 0, (inputs_t){2, inputs}, false));
    }
    if (m->layered) add_layer(m, 0, here, &m->args);
    if (s + 1 < m->stages || m->last_mark) {
      add_mark(m, JPP_OP_MARK, s, here, &m->marked[s]);
    }
  }
}

static void add_backward(maker_t* m) {
  for (uint32_t s = m->stages; s-- > 0;) {
    pool_t* here = &m->transposed[s];
    for (uint32_t i = has_more(m, s) ? pick(3) + 1 : 0; i-- > 0;) {
      const pool_t* near = here->count ? here : &m->forward[s];
      put(here, add_call(m, JPP_OP_BACKWARD, near, &m->forward[s]));
    }
    if (m->layered) add_layer(m, JPP_OP_BACKWARD, here, &m->forward[s]);
    if (s && pick(6)) {
      // A value that goes to the previous stage begins behind its mark.
      add_mark(m, JPP_OP_MARK_BACKWARD, s - 1, here, &m->transposed[s - 1]);
    }
  }
}

static void end_loop(maker_t* m) {
  jpp_loop_result_t results[16];
  jpp_type_t types[16];
  uint32_t count = pick(6) + 1, first = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const pool_t* pools = m->backward && pick(4) ? m->transposed : m->forward;
    uint8_t flags = m->backward ? JPP_OP_BACKWARD : 0;
    uint32_t value = pick(2) ? add_sum(m, flags, pools, m->stages)
                             : any(pools[0].count ? &pools[0] : &m->args);
    const pool_t* end = &pools[pick(m->stages)];
    if (m->layered && end->count && pick(8)) value = last(end);
    if (value == JPP_NONE) value = any(&m->args);
    while (pick(3) == 0) {
      uint32_t inputs[] = {value, any(&m->args)};
      uint8_t linear = flags | JPP_OP_LINEAR;
      value = add_op(m, JPP_OP_CALL, 0, linear, (inputs_t){1 + pick(2), inputs}, pick(2));
    }
    while (m->is_host[value]) {  // loops reduce in device memory
      value = add_op(m, JPP_OP_CALL, 0, flags, (inputs_t){1, &value}, pick(2));
    }
    results[i] =
        (jpp_loop_result_t){.reduce = (uint8_t)(pick(2) ? 0 : pick(4)), .value = value};
    types[i] = type_of(m->is_large[value], false);
  }
  ASSERT_OK(jpp_graph_builder_end_loop(m->builder, results, types, count, &first));
  for (uint32_t i = 0; i < count; ++i) {
    m->is_large[first + i] = types[i].dims == kLarge;
    put(&m->results, first + i);
  }
}

static void add_loop(maker_t* m) {
  jpp_loop_desc_t desc = {.microbatches = m->microbatches, .where = "random"};
  memset(m->forward, 0, sizeof(m->forward));
  memset(m->transposed, 0, sizeof(m->transposed));
  memset(m->marked, 0, sizeof(m->marked));
  ASSERT_OK(jpp_graph_builder_begin_loop(m->builder, &desc, &m->index));
  add_forward(m);
  if (m->backward) add_backward(m);
  end_loop(m);
  m->index = JPP_NONE;
}

// Returns an argument of the value's type that no output replaces yet, or JPP_NONE.
static uint32_t take_arg(maker_t* m, uint32_t value) {
  for (uint32_t i = 0; i < m->args.count; ++i) {
    uint32_t arg = m->args.ids[i];
    if (m->is_next[arg] || m->is_large[arg] != m->is_large[value] ||
        m->is_host[arg] != m->is_host[value]) {
      continue;
    }
    m->is_next[arg] = true;
    return arg;
  }
  return JPP_NONE;
}

static void add_outputs(maker_t* m) {
  pool_t* pools[] = {&m->results, &m->outside, &m->args};
  for (uint32_t i = pick(6) + 1; i-- > 0;) {
    const pool_t* pool = pools[pick(2) ? 0 : pick(3)];
    if (!pool->count) continue;
    uint32_t value = any(pool), next = pick(2) ? take_arg(m, value) : JPP_NONE;
    ASSERT_OK(jpp_graph_builder_add_output(m->builder, value, NULL, next));
    if (pick(3) == 0) set_ranks(m, jpp_graph_builder_leave_output);
  }
}

// One step in six is written by hand, without a loop.
static void add_loops(maker_t* m) {
  uint32_t loops = pick(6) ? (pick(5) ? 1 : 2) : 0;
  if (!loops) {
    for (uint32_t i = pick(30) + 3; i > 0; --i) {
      const pool_t* near = m->outside.count ? &m->outside : &m->args;
      // At least one of them runs.
      uint8_t flags = i == 1 ? JPP_OP_EFFECT : 0;
      put(&m->outside, add_task(m, flags, near, &m->args));
    }
  }
  while (loops-- > 0) {
    add_loop(m);
    add_outside(m, pick(6));
    for (uint32_t i = pick(2) * m->results.count; i > 0; --i) {
      uint32_t value = add_sum(m, 0, (pool_t[]){m->results, m->outside}, 2);
      if (value != JPP_NONE) put(&m->outside, value);
    }
  }
}

static jpp_graph_t* make_graph(maker_t* m) {
  jpp_graph_t* graph = NULL;
  m->index = JPP_NONE;
  ASSERT_OK(jpp_graph_builder_create("random", m->ranks, &m->builder));
  add_args(m);
  add_outside(m, pick(4));
  add_loops(m);
  add_outputs(m);
  ASSERT_OK(jpp_graph_builder_finish(m->builder, &graph));
  jpp_graph_builder_destroy(m->builder);
  return graph;
}

static const struct {
  const char* schedule;
  uint32_t stages, ranks, microbatches;
} kShapes[] = {
    {"1f1b", 1, 1, 2},
    {"1f1b", 2, 2, 3},
    {"gpipe", 3, 3, 2},
    {"eager-1f1b", 4, 4, 5},
    {"zb-h1", 3, 3, 4},
    {"interleaved-1f1b", 4, 2, 4},
    {"interleaved-gpipe", 6, 3, 3},
    {"dualpipe-v", 4, 2, 4},
    {"kimi-k2", 6, 3, 6},
    {"dualpipe-v", 8, 4, 8},
    {"1f1b", 1, 1, 1},
    {"gpipe", 4, 4, 1},
    {"interleaved-gpipe", 6, 2, 1},
};
enum { kShapeCount = sizeof(kShapes) / sizeof(*kShapes) };

planned_t random_step(uint64_t seed, uint32_t* out_slots) {
  return random_long_step(seed, 1, out_slots);
}

planned_t random_long_step(uint64_t seed, uint32_t times, uint32_t* out_slots) {
  g_random = seed * 0x9E3779B97F4A7C15u + 1;
  uint32_t shape = pick(kShapeCount);
  maker_t maker = {.ranks = kShapes[shape].ranks,
                   .stages = kShapes[shape].stages,
                   .microbatches = kShapes[shape].microbatches * times,
                   .backward = pick(6) != 0,
                   .layered = pick(3) == 0,
                   .last_mark = pick(2)};
  planned_t planned = {.ranks = kShapes[shape].ranks};
  planned.graph = make_graph(&maker);
  for (uint32_t i = 0; i < planned.graph->num_loops; ++i) {
    jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                    .stages = maker.stages,
                                    .ranks = planned.ranks,
                                    .microbatches = maker.microbatches};
    ASSERT_OK(jpp_schedule_build(kShapes[shape].schedule, &params, &planned.given[i]));
  }
  *out_slots = pick(3);
  planned.offload = pick(3) == 0;
  return planned;
}
