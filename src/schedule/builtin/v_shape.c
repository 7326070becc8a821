// Schedules with stages in a V: rank r of P holds stage r ("down") and stage 2P-1-r
// ("up").
//
// ZB-V is from Qi et al. 2023 (arXiv 2401.10241, section 6). V-Half, V-Min and 1F1B in V
// placement are from Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"
// (arXiv 2405.15362). That paper repeats a building block every 6 units of time (two
// stages with F = B = W = 1), in which each pass moves from rank to rank by a fixed
// offset; the lifetime of activations in the block gives the peak. We take the order of
// forwards and input gradients from the block and let weights.c insert the weight
// gradients.
#include "base/str.h"
#include "schedule/builtin/builder.h"

jpp_status_t* jpp__schedule_check_v(const char* name,
                                    const jpp_schedule_params_t* params) {
  if (params->stages == 2 * (uint64_t)params->ranks) return NULL;
  return jpp_status_make(JPP_MESH_ERROR,
                         "schedule %s runs two stages per rank: for %u rank%s on the "
                         "mesh's pipeline axis expected %llu stages, found %u; change "
                         "the mesh or the number of stages",
                         name, params->ranks, jpp__plural(params->ranks),
                         2ull * params->ranks, params->stages);
}

uint32_t jpp__schedule_v_rank(const jpp_schedule_params_t* params, uint32_t stage) {
  return stage < params->ranks ? stage : params->stages - 1 - stage;
}

static uint64_t four_tasks_each(const jpp_schedule_params_t* params) {
  return 4 * (uint64_t)params->microbatches;
}

// --- ZB-V, 1F1B -----------------------------------------------------------------------

// The order for at least 2P microbatches; with fewer, jpp__row_put() skips the missing
// ones, and an order remains valid without some of its microbatches.
static void write_v(const jpp_schedule_params_t* params, uint32_t rank,
                    jpp_task_kind_t backward, jpp_row_writer_t* writer) {
  uint32_t ranks = params->ranks, down = rank, up = params->stages - 1 - rank;
  uint32_t microbatches = params->microbatches;
  if (microbatches < 2 * ranks) microbatches = 2 * ranks;
  for (uint32_t i = 0; i < 2 * (ranks - rank) - 1; ++i) {
    jpp__row_put(writer, down, JPP_TASK_FWD);
  }
  for (uint32_t i = 0; i < rank; ++i) {
    jpp__row_put(writer, up, JPP_TASK_FWD);
    jpp__row_put(writer, down, JPP_TASK_FWD);
  }
  for (uint32_t i = 0; i < ranks - rank; ++i) {
    jpp__row_put(writer, up, JPP_TASK_FWD);
    jpp__row_put(writer, up, backward);
  }
  for (uint32_t i = 0; i < microbatches; ++i) {
    if (i <= microbatches - (2 * ranks - rank)) jpp__row_put(writer, down, JPP_TASK_FWD);
    jpp__row_put(writer, down, backward);
    jpp__row_put(writer, up, JPP_TASK_FWD);
    jpp__row_put(writer, up, backward);
  }
}

static void zb_v_row(const jpp_schedule_params_t* params, uint32_t rank,
                     jpp_row_writer_t* writer) {
  write_v(params, rank, JPP_TASK_BWD_I, writer);
}

// 1F1B in V placement: the same order with whole backwards. The peak equals ZB-V's, P;
// the paper's building block for it keeps about 2P / 3, with a larger bubble.
static void v_1f1b_row(const jpp_schedule_params_t* params, uint32_t rank,
                       jpp_row_writer_t* writer) {
  write_v(params, rank, JPP_TASK_BWD, writer);
}

static uint32_t zb_v_limit(const jpp_schedule_params_t* params) {
  return 2 * params->ranks;
}

// --- V-Half and V-Min -----------------------------------------------------------------

enum { kInterval = 6 };

// The four passes of a microbatch: F down, F up, I up, I down. Each begins where the
// previous one ended; F down and I up go from rank 0 to P-1, the other two from P-1 to 0.
typedef struct block {
  // Time from one rank to the next.
  uint32_t step[4];
  // Time before each pass, chosen so that no rank has two tasks at once.
  uint32_t pause[4];
} block_t;

// When the rank runs each pass of microbatch 0.
static void block_times(const block_t* block, uint32_t ranks, uint32_t rank,
                        uint64_t times[4]) {
  uint64_t begin = 0;
  for (uint32_t i = 0; i < 4; ++i) {
    begin += block->pause[i];
    uint32_t hops = i % 2 ? ranks - 1 - rank : rank;
    times[i] = begin + (uint64_t)block->step[i] * hops;
    begin += (uint64_t)block->step[i] * (ranks - 1) + 1;
  }
}

static bool block_fits(const block_t* block, uint32_t ranks) {
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    uint64_t times[4];
    uint32_t used = 0;
    block_times(block, ranks, rank, times);
    for (uint32_t i = 0; i < 4; ++i) used |= 1u << times[i] % kInterval;
    if (__builtin_popcount(used) != 4) return false;
  }
  return true;
}

// The shortest pauses with which passes do not collide: there are 6^3 candidates, and the
// pattern of ranks repeats after 6.
static block_t block_place(const uint32_t step[4], uint32_t ranks) {
  block_t best = {{step[0], step[1], step[2], step[3]}, {0}};
  uint32_t best_sum = UINT32_MAX;
  for (uint32_t n = 0; n < kInterval * kInterval * kInterval; ++n) {
    block_t block = best;
    block.pause[1] = n % kInterval;
    block.pause[2] = n / kInterval % kInterval;
    block.pause[3] = n / kInterval / kInterval;
    uint32_t sum = block.pause[1] + block.pause[2] + block.pause[3];
    if (sum >= best_sum || !block_fits(&block, ranks)) continue;
    best = block;
    best_sum = sum;
  }
  return best;
}

static void block_row(const jpp_schedule_params_t* params, uint32_t rank,
                      const uint32_t step[4], jpp_row_writer_t* writer) {
  block_t block = block_place(step, params->ranks);
  uint32_t down = rank, up = params->stages - 1 - rank;
  const uint32_t stages[] = {down, up, up, down};
  uint64_t times[4];
  block_times(&block, params->ranks, rank, times);
  for (uint64_t left = four_tasks_each(params); left; --left) {
    uint32_t first = 0;
    for (uint32_t i = 1; i < 4; ++i) {
      if (times[i] < times[first]) first = i;
    }
    jpp_task_kind_t kind = first < 2 ? JPP_TASK_FWD : JPP_TASK_BWD_I;
    bool last = jpp__row_next(writer, stages[first], kind) + 1 >= params->microbatches;
    jpp__row_put(writer, stages[first], kind);
    times[first] = last ? UINT64_MAX : times[first] + kInterval;
  }
}

// Activations of both stages live for 6P units on the first and on the last rank: P / 2
// microbatches, plus one for the ends.
static void v_half_row(const jpp_schedule_params_t* params, uint32_t rank,
                       jpp_row_writer_t* writer) {
  static const uint32_t kSteps[] = {2, 1, 2, 1};
  block_row(params, rank, kSteps, writer);
}

static uint32_t v_half_limit(const jpp_schedule_params_t* params) {
  return params->ranks + 2;
}

// Activations live for 4P units: P / 3 microbatches, plus one for the ends.
static void v_min_row(const jpp_schedule_params_t* params, uint32_t rank,
                      jpp_row_writer_t* writer) {
  static const uint32_t kSteps[] = {1, 1, 1, 1};
  block_row(params, rank, kSteps, writer);
}

static uint32_t v_min_limit(const jpp_schedule_params_t* params) {
  return (2 * params->ranks + 2) / 3 + 2;
}

const jpp_schedule_builder_t jpp_schedule_zb_v = {
    .check = jpp__schedule_check_v,
    .stage_rank = jpp__schedule_v_rank,
    .row_capacity = four_tasks_each,
    .write_row = zb_v_row,
    .weight_limit = zb_v_limit,
};

const jpp_schedule_builder_t jpp_schedule_v_half = {
    .check = jpp__schedule_check_v,
    .stage_rank = jpp__schedule_v_rank,
    .row_capacity = four_tasks_each,
    .write_row = v_half_row,
    .weight_limit = v_half_limit,
};

const jpp_schedule_builder_t jpp_schedule_v_min = {
    .check = jpp__schedule_check_v,
    .stage_rank = jpp__schedule_v_rank,
    .row_capacity = four_tasks_each,
    .write_row = v_min_row,
    .weight_limit = v_min_limit,
};

const jpp_schedule_builder_t jpp_schedule_v_1f1b = {
    .check = jpp__schedule_check_v,
    .stage_rank = jpp__schedule_v_rank,
    .row_capacity = four_tasks_each,
    .write_row = v_1f1b_row,
};
