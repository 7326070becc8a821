// Makes schedules from rows or from a callback, and destroys them. A schedule owns a copy
// of all its data, in one arena.
#include "schedule/schedule.h"

#include <stdio.h>

#include "base/null.h"
#include "base/vec.h"

// Keeps 3 * stages * microbatches and every row's count far below the limits of uint32_t.
enum { kMaxPairs = 1 << 28, kMaxRanks = 1 << 20 };

const char* jpp_task_name(const jpp_schedule_task_t* task,
                          char buffer[JPP_TASK_NAME_SIZE]) {
  if (task->kind == JPP_TASK_IDLE || task->kind > JPP_TASK_BWD_W) {
    snprintf(buffer, JPP_TASK_NAME_SIZE, task->kind ? "kind_%u" : "idle", task->kind);
  } else {
    snprintf(buffer, JPP_TASK_NAME_SIZE, "%s_%u__%u",
             jpp_task_kind_name((jpp_task_kind_t)task->kind), task->stage,
             task->microbatch);
  }
  return buffer;
}

static jpp_status_t* check_sizes(const char* name, const jpp_schedule_params_t* params) {
  if (!params->stages || !params->ranks || !params->microbatches) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "schedule %s: needs at least 1 stage, 1 rank and 1 microbatch, "
        "found %u stages, %u ranks and %u microbatches",
        name, params->stages, params->ranks, params->microbatches);
  }
  uint64_t pairs = (uint64_t)params->stages * params->microbatches;
  if (pairs > kMaxPairs || params->ranks > kMaxRanks || params->stages > kMaxPairs / 16) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "schedule %s: %u stages on %u ranks with %u microbatches is too "
        "large; stages times microbatches may be at most %d, ranks %d",
        name, params->stages, params->ranks, params->microbatches, kMaxPairs, kMaxRanks);
  }
  return NULL;
}

static jpp_status_t* draft_fill(const char* name, const jpp_schedule_params_t* params,
                                jpp_schedule_draft_t* draft) {
  jpp_schedule_t* schedule = draft->schedule;
  schedule->stages = params->stages;
  schedule->ranks = params->ranks;
  schedule->microbatches = params->microbatches;
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(draft->arena, name, &schedule->name));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(draft->arena, params->ranks, &draft->rows));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(draft->arena, params->stages, &draft->stage_rank));
  schedule->rows = draft->rows;
  schedule->stage_rank = draft->stage_rank;
  return NULL;
}

jpp_status_t* jpp__schedule_draft_create(const char* name,
                                         const jpp_schedule_params_t* params,
                                         jpp_schedule_draft_t* out_draft) {
  *out_draft = (jpp_schedule_draft_t){0};
  JPP_RETURN_IF_ERROR(check_sizes(name, params));
  jpp_schedule_storage_t* storage = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  jpp_schedule_draft_t draft = {.schedule = &storage->schedule, .arena = &storage->arena};
  jpp_status_t* status = draft_fill(name, params, &draft);
  if (status) {
    jpp_schedule_destroy(draft.schedule);
    return status;
  }
  *out_draft = draft;
  return NULL;
}

bool jpp_schedule_splits_backward(const jpp_schedule_t* schedule) {
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    for (uint32_t i = 0; i < schedule->rows[r].count; ++i) {
      uint8_t kind = schedule->rows[r].tasks[i].kind;
      if (kind == JPP_TASK_BWD_I || kind == JPP_TASK_BWD_W) return true;
    }
  }
  return false;
}

static const jpp_schedule_task_t* next_task(const jpp_schedule_row_t* row,
                                            uint32_t entry) {
  while (++entry < row->count) {
    if (row->tasks[entry].kind != JPP_TASK_IDLE) return &row->tasks[entry];
  }
  return NULL;
}

// Of the last stage, as jpp_loop_placement_t describes it.
static bool backward_follows(const jpp_schedule_t* schedule) {
  uint32_t last = schedule->stages - 1;
  const jpp_schedule_row_t* row = &schedule->rows[schedule->stage_rank[last]];
  for (uint32_t i = 0; i < row->count; ++i) {
    const jpp_schedule_task_t* task = &row->tasks[i];
    if (task->kind != JPP_TASK_FWD || task->stage != last) continue;
    const jpp_schedule_task_t* next = next_task(row, i);
    bool follows = next && next->kind == JPP_TASK_BWD && next->stage == last &&
                   next->microbatch == task->microbatch;
    if (!follows) return false;
  }
  return true;
}

jpp_loop_placement_t jpp_schedule_placement(const jpp_schedule_t* schedule) {
  return (jpp_loop_placement_t){.stages = schedule->stages,
                                .stage_rank = schedule->stage_rank,
                                .split_backward = jpp_schedule_splits_backward(schedule),
                                .backward_follows = backward_follows(schedule)};
}

void jpp_schedule_destroy(jpp_schedule_t* schedule) {
  if (!schedule) return;
  jpp_schedule_storage_t* storage = (jpp_schedule_storage_t*)schedule;
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage);
}

static jpp_status_t* copy_rows(const jpp_schedule_rows_t* rows,
                               jpp_schedule_draft_t* draft) {
  for (uint32_t rank = 0; rank < rows->ranks; ++rank) {
    const jpp_schedule_row_t* row = &rows->rows[rank];
    if (row->count > INT32_MAX) {
      return jpp_status_make(JPP_INVALID_ARGUMENT,
                             "schedule %s, rank %u: %u entries is too long a row",
                             draft->schedule->name, rank, row->count);
    }
    jpp_schedule_task_t* tasks = NULL;
    JPP_RETURN_IF_ERROR(jpp__arena_copy(draft->arena, row->tasks,
                                        row->count * sizeof(*tasks), (void**)&tasks));
    for (uint32_t i = 0; i < row->count; ++i) {
      if (!tasks[i].latency || tasks[i].kind == JPP_TASK_IDLE) {
        tasks[i].latency = jpp_task_default_latency((jpp_task_kind_t)tasks[i].kind);
      }
    }
    draft->rows[rank] = (jpp_schedule_row_t){tasks, row->count};
  }
  return NULL;
}

// Ranks are visited in descending order, so that the lowest one wins.
static void infer_placement(const jpp_schedule_t* schedule, uint32_t* stage_rank) {
  for (uint32_t rank = schedule->ranks; rank-- > 0;) {
    const jpp_schedule_row_t* row = &schedule->rows[rank];
    for (uint32_t i = 0; i < row->count; ++i) {
      const jpp_schedule_task_t* task = &row->tasks[i];
      if (task->kind != JPP_TASK_IDLE && task->stage < schedule->stages) {
        stage_rank[task->stage] = rank;
      }
    }
  }
}

static jpp_status_t* place_stages(const jpp_schedule_rows_t* rows,
                                  jpp_schedule_draft_t* draft) {
  for (uint32_t stage = 0; stage < rows->stages; ++stage) {
    draft->stage_rank[stage] = rows->stage_rank ? rows->stage_rank[stage] : JPP_NONE;
  }
  if (!rows->stage_rank) infer_placement(draft->schedule, draft->stage_rank);
  for (uint32_t stage = 0; stage < rows->stages; ++stage) {
    if (draft->stage_rank[stage] < rows->ranks) continue;
    if (rows->stage_rank) {
      return jpp_status_make(JPP_SCHEDULE_ERROR,
                             "schedule %s: stage %u is placed on rank %u, and there are "
                             "ranks 0 to %u",
                             draft->schedule->name, stage, rows->stage_rank[stage],
                             rows->ranks - 1);
    }
    return jpp_status_make(
        JPP_SCHEDULE_ERROR,
        "schedule %s: stage %u is in no rank's list; every one of the "
        "%u stages needs its forward and backward of all %u microbatches",
        draft->schedule->name, stage, rows->stages, rows->microbatches);
  }
  return NULL;
}

jpp_status_t* jpp_schedule_from_rows(const jpp_schedule_rows_t* rows,
                                     jpp_schedule_t** out_schedule) {
  JPP_RETURN_IF_NULL(rows, out_schedule);
  JPP_RETURN_IF_NULL(rows->rows);
  *out_schedule = NULL;
  jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                  .stages = rows->stages,
                                  .ranks = rows->ranks,
                                  .microbatches = rows->microbatches};
  jpp_schedule_draft_t draft;
  JPP_RETURN_IF_ERROR(
      jpp__schedule_draft_create(rows->name ? rows->name : "user", &params, &draft));
  jpp_status_t* status = copy_rows(rows, &draft);
  if (!status) status = place_stages(rows, &draft);
  if (status) {
    jpp_schedule_destroy(draft.schedule);
    return status;
  }
  *out_schedule = draft.schedule;
  return NULL;
}

// --- From a callback -------------------------------------------------------------------

typedef JPP_VEC(jpp_schedule_task_t) task_vec_t;

static jpp_status_t* call_back(const jpp_schedule_rows_t* rows, jpp_schedule_next_t next,
                               void* context, task_vec_t* tasks,
                               jpp_schedule_row_t* out) {
  // More entries than a row with all tasks of all stages, and an idle entry for each, can
  // have.
  const uint64_t most = 16 + 64 * (uint64_t)rows->stages * rows->microbatches;
  for (uint32_t rank = 0; rank < rows->ranks; ++rank) {
    jpp_schedule_task_t task = {0};
    size_t before = tasks->count;
    for (; next(context, rank, &task); task = (jpp_schedule_task_t){0}) {
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(tasks, task));
      if (tasks->count - before <= most) continue;
      return jpp_status_make(
          JPP_INVALID_ARGUMENT,
          "rank %u: the callback has made %llu entries and goes on; it "
          "gives false at the end of a row",
          rank, (unsigned long long)(tasks->count - before));
    }
    out[rank].count = (uint32_t)(tasks->count - before);
  }
  size_t at = 0;
  for (uint32_t rank = 0; rank < rows->ranks; at += out[rank++].count) {
    out[rank].tasks = out[rank].count ? &tasks->data[at] : NULL;
  }
  return NULL;
}

jpp_status_t* jpp_schedule_from_callback(const jpp_schedule_rows_t* rows,
                                         jpp_schedule_next_t next, void* context,
                                         jpp_schedule_t** out_schedule) {
  JPP_RETURN_IF_NULL(rows, out_schedule);
  if (!next) return jpp__null_error(__func__, "next", 0);
  *out_schedule = NULL;
  jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                  .stages = rows->stages,
                                  .ranks = rows->ranks,
                                  .microbatches = rows->microbatches};
  JPP_RETURN_IF_ERROR(check_sizes(rows->name ? rows->name : "user", &params));
  task_vec_t tasks = {0};
  jpp_schedule_row_t* table = NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(rows->ranks, &table);
  if (!status) status = call_back(rows, next, context, &tasks, table);
  jpp_schedule_rows_t made = *rows;
  made.rows = table;
  if (!status) status = jpp_schedule_from_rows(&made, out_schedule);
  jpp_vec_deinit(&tasks);
  jpp_free(table);
  return status;
}
