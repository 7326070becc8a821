// Interleaved schedules: stage s on rank s mod P, so a rank holds v = S / P stages
// (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", arXiv
// 2104.04473).
//
// Microbatches form groups; a rank takes one group through its stages in turn before the
// next group starts. With M microbatches there are max(1, M / P) groups. If they divide
// M, rows equal those of the reference. If they do not (the reference fails there), sizes
// differ by one, larger groups first: no group is smaller than P, so no group drains the
// pipeline, and the warmup, computed for the largest group, covers every group.
#include "base/str.h"
#include "schedule/builtin/builder.h"

typedef struct grouping {
  uint32_t small;         // microbatches in a group of the smaller size
  uint64_t large_groups;  // the number of groups that have one more
} grouping_t;

static grouping_t group_microbatches(const jpp_schedule_params_t* params) {
  uint32_t groups = params->microbatches / params->ranks;
  if (!groups) groups = 1;
  return (grouping_t){.small = params->microbatches / groups,
                      .large_groups = params->microbatches % groups};
}

// Which of a rank's v stages the k-th forward belongs to; for backwards, counted from the
// last stage.
static uint32_t stage_turn(const grouping_t* grouping, uint32_t v, uint64_t k) {
  uint64_t large = (uint64_t)grouping->small + 1;
  uint64_t in_large_groups = grouping->large_groups * large * v;
  if (k < in_large_groups) return (uint32_t)(k / large % v);
  return (uint32_t)((k - in_large_groups) / grouping->small % v);
}

typedef struct interleaved_row {
  grouping_t grouping;
  jpp_task_kind_t backward;  // BWD or BWD_I
  uint32_t v;                // stages of this rank
  uint64_t total;            // forwards of this rank
  uint64_t warmup;
} interleaved_row_t;

static interleaved_row_t plan_row(const jpp_schedule_params_t* params, uint32_t rank,
                                  uint32_t extra_warmup) {
  interleaved_row_t row = {.grouping = group_microbatches(params),
                           .backward = JPP_TASK_BWD,
                           .v = params->stages / params->ranks};
  row.total = (uint64_t)row.v * params->microbatches;
  uint64_t largest = row.grouping.small + (row.grouping.large_groups ? 1 : 0);
  row.warmup =
      (row.v - 1) * largest + 2 * (uint64_t)(params->ranks - 1 - rank) + extra_warmup;
  if (row.warmup > row.total) row.warmup = row.total;
  return row;
}

static void write_row(const jpp_schedule_params_t* params, uint32_t rank,
                      const interleaved_row_t* row, jpp_row_writer_t* writer) {
  for (uint64_t k = 0; k < row->total + row->warmup; ++k) {
    bool steady = k >= row->warmup && k < row->total;
    if (k < row->total) {
      uint32_t turn = stage_turn(&row->grouping, row->v, k);
      uint32_t stage = turn * params->ranks + rank;
      jpp__row_put(writer, stage, JPP_TASK_FWD);
      bool last_stage = stage == params->stages - 1;
      bool fuse = params->fuse_steady_state || last_stage;
      if (steady && fuse && row->backward == JPP_TASK_BWD) jpp__row_join(writer);
    }
    if (k >= row->warmup) {
      uint32_t turn = stage_turn(&row->grouping, row->v, k - row->warmup);
      uint32_t stage = (row->v - 1 - turn) * params->ranks + rank;
      jpp__row_put(writer, stage, row->backward);
    }
  }
}

static void gpipe_row(const jpp_schedule_params_t* params, uint32_t rank,
                      jpp_row_writer_t* writer) {
  interleaved_row_t row = plan_row(params, rank, 0);
  row.warmup = row.total;
  write_row(params, rank, &row, writer);
}

static void one_f_one_b_row(const jpp_schedule_params_t* params, uint32_t rank,
                            jpp_row_writer_t* writer) {
  interleaved_row_t row = plan_row(params, rank, 0);
  write_row(params, rank, &row, writer);
}

// Issues one more forward ahead, which hides a transfer.
static void kimi_k2_row(const jpp_schedule_params_t* params, uint32_t rank,
                        jpp_row_writer_t* writer) {
  interleaved_row_t row = plan_row(params, rank, 1);
  write_row(params, rank, &row, writer);
}

// LoopedBFS (Lamy-Poirier 2022, arXiv 2211.05953): a stage takes all microbatches before
// the rank's next stage starts.
static void breadth_first_row(const jpp_schedule_params_t* params, uint32_t rank,
                              jpp_row_writer_t* writer) {
  for (uint32_t stage = rank; stage < params->stages; stage += params->ranks) {
    while (jpp__row_put(writer, stage, JPP_TASK_FWD)) continue;
  }
  for (uint32_t turn = params->stages / params->ranks; turn-- > 0;) {
    while (jpp__row_put(writer, turn * params->ranks + rank, JPP_TASK_BWD)) continue;
  }
}

// The order of interleaved 1F1B with the backward in two parts, as ZB-H1 does for 1F1B
// (Qi et al. 2023, arXiv 2401.10241).
static void zero_bubble_row(const jpp_schedule_params_t* params, uint32_t rank,
                            jpp_row_writer_t* writer) {
  interleaved_row_t row = plan_row(params, rank, 0);
  row.backward = JPP_TASK_BWD_I;
  write_row(params, rank, &row, writer);
}

// The number of activations that rank 0, which keeps the most, keeps under interleaved
// 1F1B.
static uint32_t zero_bubble_limit(const jpp_schedule_params_t* params) {
  return (uint32_t)plan_row(params, 0, 1).warmup;
}

static jpp_status_t* check_stages_divide(const char* name,
                                         const jpp_schedule_params_t* params) {
  if (params->stages % params->ranks == 0) return NULL;
  return jpp_status_make(
      JPP_MESH_ERROR,
      "schedule %s runs equally many stages on every rank: %u stage%s cannot be "
      "divided over the %u ranks of the mesh's pipeline axis; use %u stages, or another "
      "mesh",
      name, params->stages, jpp__plural(params->stages), params->ranks,
      params->ranks * (params->stages / params->ranks + 1));
}

static uint32_t rank_modulo(const jpp_schedule_params_t* params, uint32_t stage) {
  return stage % params->ranks;
}

static uint64_t two_tasks_each(const jpp_schedule_params_t* params) {
  return 2 * (uint64_t)(params->stages / params->ranks) * params->microbatches;
}

const jpp_schedule_builder_t jpp_schedule_interleaved_gpipe = {
    .check = check_stages_divide,
    .stage_rank = rank_modulo,
    .row_capacity = two_tasks_each,
    .write_row = gpipe_row,
};

const jpp_schedule_builder_t jpp_schedule_interleaved_1f1b = {
    .check = check_stages_divide,
    .stage_rank = rank_modulo,
    .row_capacity = two_tasks_each,
    .write_row = one_f_one_b_row,
};

const jpp_schedule_builder_t jpp_schedule_kimi_k2 = {
    .check = check_stages_divide,
    .stage_rank = rank_modulo,
    .row_capacity = two_tasks_each,
    .write_row = kimi_k2_row,
};

const jpp_schedule_builder_t jpp_schedule_breadth_first = {
    .check = check_stages_divide,
    .stage_rank = rank_modulo,
    .row_capacity = two_tasks_each,
    .write_row = breadth_first_row,
};

const jpp_schedule_builder_t jpp_schedule_interleaved_zb = {
    .check = check_stages_divide,
    .stage_rank = rank_modulo,
    .row_capacity = two_tasks_each,
    .write_row = zero_bubble_row,
    .weight_limit = zero_bubble_limit,
};
