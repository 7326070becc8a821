// GPipe (Huang et al. 2019, arXiv 1811.06965), 1F1B (PipeDream-Flush, Narayanan et al.
// 2021, arXiv 2006.09503), eager 1F1B (Zhuang et al. 2022, arXiv 2211.05322), ZB-H1 and
// ZB-H2 (Qi et al. 2023, arXiv 2401.10241): one stage per rank, written step by step.
#include "base/str.h"
#include "schedule/builtin/builder.h"

static jpp_status_t* check_one_stage_a_rank(const char* name,
                                            const jpp_schedule_params_t* params) {
  if (params->ranks == params->stages) return NULL;
  bool divides = params->stages % params->ranks == 0;
  return jpp_status_make(
      JPP_MESH_ERROR,
      "schedule %s runs one stage per rank: for %u stage%s expected a mesh with %u "
      "rank%s "
      "on its pipeline axis, found %u; change the mesh or the number of stages%s",
      name, params->stages, jpp__plural(params->stages), params->stages,
      jpp__plural(params->stages), params->ranks,
      divides ? ", or use an interleaved schedule" : "");
}

static uint32_t same_rank(const jpp_schedule_params_t* params, uint32_t stage) {
  (void)params;
  return stage;
}

// Steps of a forward wave over all stages and microbatches.
static uint64_t wave_steps(const jpp_schedule_params_t* params) {
  return (uint64_t)params->microbatches + params->stages - 1;
}

static uint64_t two_waves(const jpp_schedule_params_t* params) {
  return 2 * wave_steps(params);
}

static void put_or_idle(jpp_row_writer_t* writer, uint32_t stage, jpp_task_kind_t kind) {
  if (kind == JPP_TASK_IDLE || !jpp__row_put(writer, stage, kind))
    jpp__row_put_idle(writer);
}

static void gpipe_row(const jpp_schedule_params_t* params, uint32_t rank,
                      jpp_row_writer_t* writer) {
  uint64_t steps = wave_steps(params);
  uint64_t first_backward = steps + params->stages - 1 - rank;
  for (uint64_t step = 0; step < 2 * steps; ++step) {
    jpp_task_kind_t kind = JPP_TASK_IDLE;
    if (step >= rank && step < steps) kind = JPP_TASK_FWD;
    if (step >= first_backward) kind = JPP_TASK_BWD;
    put_or_idle(writer, rank, kind);
  }
}

// Warmup fills the pipeline for `stages` steps; then a stage waits for its first
// backward, which reaches it `inverse` steps later, and alternates.
static jpp_task_kind_t one_f_one_b_kind(uint32_t stages, uint32_t stage, uint64_t step,
                                        bool eager) {
  if (step < stages) return stage <= step ? JPP_TASK_FWD : JPP_TASK_IDLE;
  uint64_t steady = step - stages;
  uint64_t inverse = stages - 1 - stage;
  if (steady < inverse) return eager ? JPP_TASK_FWD : JPP_TASK_IDLE;
  return (steady + inverse) % 2 ? JPP_TASK_FWD : JPP_TASK_BWD;
}

static void write_1f1b(const jpp_schedule_params_t* params, uint32_t stage, bool eager,
                       jpp_row_writer_t* writer) {
  for (uint64_t step = 0; step < two_waves(params); ++step) {
    put_or_idle(writer, stage, one_f_one_b_kind(params->stages, stage, step, eager));
  }
}

static void std_1f1b_row(const jpp_schedule_params_t* params, uint32_t rank,
                         jpp_row_writer_t* writer) {
  write_1f1b(params, rank, false, writer);
}

static void eager_1f1b_row(const jpp_schedule_params_t* params, uint32_t rank,
                           jpp_row_writer_t* writer) {
  write_1f1b(params, rank, true, writer);
}

// Room for a start of 2 * stages steps, 2 * rank alternations and three tasks per
// microbatch.
static uint64_t zb_h1_capacity(const jpp_schedule_params_t* params) {
  return 3 * (uint64_t)params->microbatches + 4 * (uint64_t)params->stages;
}

// With at least as many microbatches as stages, a row is 3M + S - 1 steps long. With
// fewer, which the reference refuses, kinds whose microbatches are used up are skipped.
static void zb_h1_row(const jpp_schedule_params_t* params, uint32_t rank,
                      jpp_row_writer_t* writer) {
  static const jpp_task_kind_t kRotation[] = {JPP_TASK_BWD_I, JPP_TASK_BWD_W,
                                              JPP_TASK_FWD};
  uint32_t stages = params->stages;
  for (uint32_t step = 0; step < 2 * stages - 1 - rank; ++step) {
    bool forward = step >= rank && step < stages;
    put_or_idle(writer, rank, forward ? JPP_TASK_FWD : JPP_TASK_IDLE);
  }
  for (uint32_t i = 0; i < rank; ++i) {
    jpp__row_put(writer, rank, JPP_TASK_BWD_I);
    jpp__row_put(writer, rank, JPP_TASK_FWD);
  }
  while (jpp__row_next(writer, rank, JPP_TASK_BWD_W) < params->microbatches) {
    for (uint32_t i = 0; i < 3; ++i) jpp__row_put(writer, rank, kRotation[i]);
  }
}

// ZB-H2 warms up with 2 (P - r) - 1 forwards, so that the first backward reaches a rank
// when its last warmup forward ends, and alternates from there.
static void zb_h2_row(const jpp_schedule_params_t* params, uint32_t rank,
                      jpp_row_writer_t* writer) {
  uint64_t warmup = 2 * (uint64_t)(params->stages - rank) - 1;
  for (uint64_t i = 0; i < warmup; ++i) jpp__row_put(writer, rank, JPP_TASK_FWD);
  while (jpp__row_put(writer, rank, JPP_TASK_BWD_I)) {
    jpp__row_put(writer, rank, JPP_TASK_FWD);
  }
}

static uint64_t two_tasks_each(const jpp_schedule_params_t* params) {
  return 2 * (uint64_t)params->microbatches;
}

// Section 2.3 of the paper: every rank keeps up to 2 P - 1 microbatches.
static uint32_t zb_h2_limit(const jpp_schedule_params_t* params) {
  return 2 * params->stages - 1;
}

const jpp_schedule_builder_t jpp_schedule_gpipe = {
    .check = check_one_stage_a_rank,
    .stage_rank = same_rank,
    .row_capacity = two_waves,
    .write_row = gpipe_row,
};

const jpp_schedule_builder_t jpp_schedule_1f1b = {
    .check = check_one_stage_a_rank,
    .stage_rank = same_rank,
    .row_capacity = two_waves,
    .write_row = std_1f1b_row,
};

const jpp_schedule_builder_t jpp_schedule_eager_1f1b = {
    .check = check_one_stage_a_rank,
    .stage_rank = same_rank,
    .row_capacity = two_waves,
    .write_row = eager_1f1b_row,
};

const jpp_schedule_builder_t jpp_schedule_zb_h1 = {
    .check = check_one_stage_a_rank,
    .stage_rank = same_rank,
    .row_capacity = zb_h1_capacity,
    .write_row = zb_h1_row,
};

const jpp_schedule_builder_t jpp_schedule_zb_h2 = {
    .check = check_one_stage_a_rank,
    .stage_rank = same_rank,
    .row_capacity = two_tasks_each,
    .write_row = zb_h2_row,
    .weight_limit = zb_h2_limit,
};
