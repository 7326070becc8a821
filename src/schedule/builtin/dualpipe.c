// DualPipeV (DeepSeek-AI 2025; "cut-in-half" DualPipe): S = 2P stages in a V, rank g
// holds the stages g ("down") and 2P-1-g ("up"). A forward of one is overlapped with a
// backward of the other; late weight gradients fill the bubbles at the end.
#include "schedule/builtin/builder.h"

typedef struct v_row {
  jpp_row_writer_t* writer;
  uint32_t down;
  uint32_t up;
} v_row_t;

static void put_forward(const v_row_t* row, uint32_t stage) {
  jpp__row_put(row->writer, stage, JPP_TASK_FWD);
}

static void put_backward(const v_row_t* row, uint32_t stage) {
  jpp__row_put(row->writer, stage, JPP_TASK_BWD_I);
  jpp__row_put(row->writer, stage, JPP_TASK_BWD_W);
}

static void put_fused(const v_row_t* row, uint32_t forward, uint32_t backward) {
  put_forward(row, forward);
  jpp__row_join(row->writer);
  jpp__row_put(row->writer, backward, JPP_TASK_BWD_I);
  jpp__row_join(row->writer);
  jpp__row_put(row->writer, backward, JPP_TASK_BWD_W);
}

static void write_steady(const jpp_schedule_params_t* params, const v_row_t* row) {
  uint32_t rank = row->down;
  uint32_t pairs = params->microbatches - 2 * params->ranks + rank + 1;
  for (uint32_t i = 0; i < pairs; ++i) {
    if (i == 0 && rank == params->ranks - 1) {
      put_forward(row, row->down);
      put_backward(row, row->up);
    } else {
      put_fused(row, row->down, row->up);
    }
    put_fused(row, row->up, row->down);
  }
}

// In the second half, the weight gradients of one of the two stages are postponed.
static void write_cooldown(const v_row_t* row) {
  uint32_t rank = row->down;
  for (uint32_t i = 0; i <= rank; ++i) {
    bool put_off = i >= (rank + 1) / 2;
    jpp__row_put(row->writer, row->up, JPP_TASK_BWD_I);
    if (!(put_off && rank % 2 == 1)) jpp__row_put(row->writer, row->up, JPP_TASK_BWD_W);
    jpp__row_put(row->writer, row->down, JPP_TASK_BWD_I);
    if (!(put_off && rank % 2 == 0 && rank > 0)) {
      jpp__row_put(row->writer, row->down, JPP_TASK_BWD_W);
    }
  }
}

static void dualpipe_row(const jpp_schedule_params_t* params, uint32_t rank,
                         jpp_row_writer_t* writer) {
  v_row_t row = {.writer = writer, .down = rank, .up = params->stages - 1 - rank};
  uint32_t below = params->ranks - rank - 1;
  for (uint32_t i = 0; i < 2 * below; ++i) put_forward(&row, row.down);
  for (uint32_t i = 0; i <= rank; ++i) {
    put_forward(&row, row.down);
    put_forward(&row, row.up);
  }
  for (uint32_t i = 0; i < below; ++i) {
    put_backward(&row, row.up);
    put_forward(&row, row.up);
  }
  write_steady(params, &row);
  for (uint32_t i = 0; i < below; ++i) {
    put_backward(&row, row.up);
    put_fused(&row, row.up, row.down);
  }
  write_cooldown(&row);
  for (uint32_t i = 0; i < below; ++i) {
    jpp__row_put(writer, row.down, JPP_TASK_BWD_I);
    if (rank == 0) jpp__row_put(writer, row.down, JPP_TASK_BWD_W);
  }
  // The postponed weight gradients, by microbatch, then stage.
  bool more = true;
  while (more) {
    uint32_t down = jpp__row_next(row.writer, row.down, JPP_TASK_BWD_W);
    uint32_t up = jpp__row_next(row.writer, row.up, JPP_TASK_BWD_W);
    more = jpp__row_put(row.writer, down <= up ? row.down : row.up, JPP_TASK_BWD_W);
  }
}

static jpp_status_t* check_dualpipe(const char* name,
                                    const jpp_schedule_params_t* params) {
  JPP_RETURN_IF_ERROR(jpp__schedule_check_v(name, params));
  if (params->microbatches < params->stages) {
    return jpp_status_make(
        JPP_MICROBATCH_ERROR,
        "schedule %s needs at least as many microbatches as stages (%u), "
        "found %u; use more microbatches, or interleaved-1f1b",
        name, params->stages, params->microbatches);
  }
  return NULL;
}

static uint64_t six_tasks_each(const jpp_schedule_params_t* params) {
  return 6 * (uint64_t)params->microbatches;
}

const jpp_schedule_builder_t jpp_schedule_dualpipe_v = {
    .check = check_dualpipe,
    .stage_rank = jpp__schedule_v_rank,
    .row_capacity = six_tasks_each,
    .write_row = dualpipe_row,
};
