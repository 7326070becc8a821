// Builds the index of a schedule, which finds each task's entry in constant time.
// Building it checks everything about the rows except their order: ranges, placement,
// duplicates, missing tasks.
#include "schedule/index.h"

// The place of a check: one entry of one rank's row.
typedef struct place {
  const jpp_schedule_t* schedule;
  const jpp_schedule_task_t* task;
  uint32_t rank;
  uint32_t entry;
} place_t;

uint64_t jpp__row_position(const jpp_schedule_row_t* row, uint32_t entry) {
  uint64_t position = 0;
  for (uint32_t i = 0; i < entry; ++i) position += jpp_task_steps(&row->tasks[i]);
  return position;
}

static unsigned long long position_of(const place_t* place, uint32_t entry) {
  return jpp__row_position(&place->schedule->rows[place->rank], entry);
}

static jpp_status_t* check_range(const place_t* place) {
  const jpp_schedule_task_t* task = place->task;
  const jpp_schedule_t* schedule = place->schedule;
  char name[JPP_TASK_NAME_SIZE];
  if (task->kind > JPP_TASK_BWD_W) {
    return jpp_status_make(JPP_SCHEDULE_ERROR,
                           "rank %u, entry %llu: %u is not a kind of task (expected FWD, "
                           "BWD, BWD_I, BWD_W or idle)",
                           place->rank, position_of(place, place->entry), task->kind);
  }
  if (task->stage >= schedule->stages) {
    return jpp_status_make(JPP_SCHEDULE_ERROR,
                           "rank %u, entry %llu: %s names stage %u, and the schedule has "
                           "stages 0 to %u",
                           place->rank, position_of(place, place->entry),
                           jpp_task_name(task, name), task->stage, schedule->stages - 1);
  }
  if (task->microbatch >= schedule->microbatches) {
    return jpp_status_make(
        JPP_SCHEDULE_ERROR,
        "rank %u, entry %llu: %s names microbatch %u, and the loop has "
        "microbatches 0 to %u",
        place->rank, position_of(place, place->entry), jpp_task_name(task, name),
        task->microbatch, schedule->microbatches - 1);
  }
  if (!task->latency) {
    return jpp_status_make(
        JPP_SCHEDULE_ERROR, "rank %u, entry %llu: %s has latency 0 (expected at least 1)",
        place->rank, position_of(place, place->entry), jpp_task_name(task, name));
  }
  return NULL;
}

// A FusedTask holds tasks only, and ends in the same row.
static jpp_status_t* check_join(const place_t* place) {
  if (!place->task->joins_next) return NULL;
  const jpp_schedule_row_t* row = &place->schedule->rows[place->rank];
  bool last = place->entry + 1 == row->count;
  if (!last && place->task->kind != JPP_TASK_IDLE &&
      row->tasks[place->entry + 1].kind != JPP_TASK_IDLE) {
    return NULL;
  }
  char name[JPP_TASK_NAME_SIZE];
  return jpp_status_make(
      JPP_SCHEDULE_ERROR,
      "rank %u, entry %llu: %s is fused with the next entry, and %s (a FusedTask holds "
      "tasks only)",
      place->rank, position_of(place, place->entry), jpp_task_name(place->task, name),
      last ? "the list ends there" : "one of the two is idle");
}

static jpp_status_t* check_rank(const place_t* place) {
  uint32_t expected = place->schedule->stage_rank[place->task->stage];
  if (expected == place->rank) return NULL;
  char name[JPP_TASK_NAME_SIZE];
  return jpp_status_make(JPP_SCHEDULE_ERROR,
                         "%s is in the list of rank %u (entry %llu), but stage %u is on "
                         "rank %u; all tasks of a "
                         "stage belong to one rank",
                         jpp_task_name(place->task, name), place->rank,
                         position_of(place, place->entry), place->task->stage, expected);
}

static jpp_status_t* note_form(const place_t* place, jpp_schedule_index_t* index) {
  const jpp_schedule_task_t* task = place->task;
  if (task->kind == JPP_TASK_FWD) return NULL;
  bool whole = task->kind == JPP_TASK_BWD;
  uint8_t form = whole ? JPP_BACKWARD_WHOLE : JPP_BACKWARD_SPLIT;
  index->has_backward = true;
  uint8_t* known = &index->form[task->stage];
  if (*known == JPP_BACKWARD_NONE) *known = form;
  if (*known == form) return NULL;
  char name[JPP_TASK_NAME_SIZE];
  return jpp_status_make(
      JPP_SCHEDULE_ERROR,
      "stage %u: %s (rank %u, entry %llu) is %s, but an earlier backward of the stage is "
      "%s; "
      "the backwards of a stage are all whole (BWD) or all split (BWD_I and BWD_W)",
      task->stage, jpp_task_name(task, name), place->rank,
      position_of(place, place->entry), whole ? "whole" : "split",
      whole ? "split" : "whole");
}

static jpp_status_t* note_entry(const place_t* place, jpp_schedule_index_t* index) {
  const jpp_schedule_task_t* task = place->task;
  uint32_t first = jpp__schedule_index_entry_of(index, task);
  if (first == JPP_NONE) {
    jpp__schedule_index_set_entry(index, task, place->entry);
    return NULL;
  }
  char name[JPP_TASK_NAME_SIZE];
  return jpp_status_make(
      JPP_SCHEDULE_ERROR,
      "rank %u: %s is listed twice, as entries %llu and %llu; each task runs once",
      place->rank, jpp_task_name(task, name), position_of(place, first),
      position_of(place, place->entry));
}

static jpp_status_t* index_row(uint32_t rank, jpp_schedule_index_t* index) {
  const jpp_schedule_row_t* row = &index->schedule->rows[rank];
  for (uint32_t i = 0; i < row->count; ++i) {
    place_t place = {index->schedule, &row->tasks[i], rank, i};
    index->fault.rank = rank;
    JPP_RETURN_IF_ERROR(check_join(&place));
    if (place.task->kind == JPP_TASK_IDLE) continue;
    JPP_RETURN_IF_ERROR(check_range(&place));
    JPP_RETURN_IF_ERROR(check_rank(&place));
    JPP_RETURN_IF_ERROR(note_form(&place, index));
    JPP_RETURN_IF_ERROR(note_entry(&place, index));
  }
  return NULL;
}

static jpp_status_t* missing_task(jpp_schedule_index_t* index,
                                  const jpp_schedule_task_t* task) {
  const jpp_schedule_t* schedule = index->schedule;
  bool split = index->form[task->stage] == JPP_BACKWARD_SPLIT;
  const char* needs = !index->has_backward ? "forward"
                      : split              ? "forward, bwd_i and bwd_w"
                                           : "forward and backward";
  char name[JPP_TASK_NAME_SIZE];
  index->fault.rank = schedule->stage_rank[task->stage];
  return jpp_status_make(JPP_SCHEDULE_ERROR,
                         "stage %u: %s is missing from rank %u (every stage needs %s of "
                         "all %u microbatches)",
                         task->stage, jpp_task_name(task, name),
                         schedule->stage_rank[task->stage], needs,
                         schedule->microbatches);
}

static jpp_status_t* check_slot(jpp_schedule_index_t* index, jpp_task_kind_t kind,
                                uint32_t stage) {
  jpp_schedule_task_t task = {.kind = (uint8_t)kind, .stage = stage};
  for (; task.microbatch < index->schedule->microbatches; ++task.microbatch) {
    if (jpp__schedule_index_entry_of(index, &task) == JPP_NONE) {
      return missing_task(index, &task);
    }
  }
  return NULL;
}

static jpp_status_t* check_complete(jpp_schedule_index_t* index) {
  for (uint32_t stage = 0; stage < index->schedule->stages; ++stage) {
    JPP_RETURN_IF_ERROR(check_slot(index, JPP_TASK_FWD, stage));
    if (!index->has_backward) continue;
    bool split = index->form[stage] == JPP_BACKWARD_SPLIT;
    JPP_RETURN_IF_ERROR(check_slot(index, split ? JPP_TASK_BWD_I : JPP_TASK_BWD, stage));
    if (split) JPP_RETURN_IF_ERROR(check_slot(index, JPP_TASK_BWD_W, stage));
  }
  return NULL;
}

jpp_status_t* jpp__schedule_index_create(const jpp_schedule_t* schedule,
                                         jpp_arena_t* scratch,
                                         jpp_schedule_index_t* out_index) {
  *out_index = (jpp_schedule_index_t){0};
  jpp_schedule_index_t index = {.schedule = schedule};
  size_t pairs = (size_t)schedule->stages * schedule->microbatches;
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(scratch, kTaskSlots * pairs, &index.entry_plus_one));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->stages, &index.form));
  jpp_status_t* status = NULL;
  for (uint32_t rank = 0; rank < schedule->ranks && !status; ++rank) {
    status = index_row(rank, &index);
  }
  if (!status) status = check_complete(&index);
  if (status) {
    out_index->fault = index.fault;
    return status;
  }
  index.fault = (jpp_schedule_fault_t){0};
  *out_index = index;
  return NULL;
}
