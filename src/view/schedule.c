// A schedule as JSON, and its timeline drawn with characters.
#include "base/json.h"
#include "base/null.h"
#include "jaxpp/view.h"
#include "schedule/index.h"
#include "view/planned.h"
#include "view/terminal.h"

// --- JSON -----------------------------------------------------------------------------

static json_t* task_json(const jpp_schedule_task_t* task) {
  // Schedules have no tasks outside the loops.
  static const char* const kLetters[] = {
      [JPP_TASK_IDLE] = "",   [JPP_TASK_FWD] = "F",   [JPP_TASK_BWD] = "B",
      [JPP_TASK_BWD_I] = "I", [JPP_TASK_BWD_W] = "W", [JPP_TASK_OUTER] = "",
  };
  _Static_assert(sizeof(kLetters) / sizeof(*kLetters) == JPP_TASK_KIND_COUNT,
                 "a letter a kind");
  return json_pack("{s:s, s:I, s:I}", "kind", kLetters[task->kind], "stage",
                   (json_int_t)task->stage, "microbatch", (json_int_t)task->microbatch);
}

// Idle steps become separate entries.
static void append_entry(const jpp_schedule_task_t* task, json_t** list) {
  if (task->kind != JPP_TASK_IDLE) {
    jpp__json_append(list, task_json(task));
    return;
  }
  for (uint64_t step = 0; *list && step < jpp_task_steps(task); ++step) {
    jpp__json_append(list, json_null());
  }
}

json_t* jpp__schedule_row_json(const jpp_schedule_row_t* row) {
  json_t* list = json_array();
  for (uint32_t i = 0, end; list && i < row->count; i = end) {
    end = jpp__row_unit_end(row, i);
    json_t* fused = end - i > 1 ? json_array() : NULL;
    for (uint32_t k = i; k < end; ++k) {
      append_entry(&row->tasks[k], end - i > 1 ? &fused : &list);
    }
    if (end - i > 1) jpp__json_append(&list, fused);
  }
  return list;
}

jpp_status_t* jpp_schedule_print_json(const jpp_schedule_t* schedule, char** out_text) {
  JPP_RETURN_IF_NULL(schedule, out_text);
  jpp_str_t str = {0};
  jpp_str_append(&str, "[");
  for (uint32_t rank = 0; rank < schedule->ranks && !str.error; ++rank) {
    if (rank) jpp_str_append(&str, ",\n ");
    jpp__json_take(jpp__schedule_row_json(&schedule->rows[rank]), 0, &str);
  }
  jpp_str_append(&str, "]\n");
  return jpp_str_finish(&str, out_text);
}

// --- Drawing ----------------------------------------------------------------------

static void fill_cells(const jpp_schedule_t* schedule,
                       const jpp_schedule_timeline_t* timeline, uint32_t columns,
                       jpp_cell_t* cells) {
  for (uint64_t i = 0; i < timeline->count; ++i) {
    const jpp_schedule_slot_t* slot = &timeline->slots[i];
    const jpp_schedule_task_t* task = &schedule->rows[slot->rank].tasks[slot->index];
    jpp_cell_t cell = {.busy = true,
                       .ink = jpp__ink_of((jpp_task_kind_t)task->kind),
                       .microbatch = task->microbatch};
    uint64_t end = slot->end < columns ? slot->end : columns;
    for (uint64_t t = slot->start; t < end; ++t) {
      cells[(size_t)slot->rank * columns + t] = cell;
    }
  }
}

static void append_picture(const jpp_schedule_t* schedule, uint64_t length,
                           uint32_t columns, const jpp_cell_t* cells, jpp_str_t* str) {
  jpp_str_appendf(str, "%s: %u stages, %u ranks, %u microbatches, %llu units of time",
                  schedule->name, schedule->stages, schedule->ranks,
                  schedule->microbatches, (unsigned long long)length);
  if (columns < length) jpp_str_appendf(str, " (the first %u drawn)", columns);
  jpp_str_append(str, "\n" JPP_TERMINAL_LEGEND ". bubble\n");
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    jpp_str_appendf(str, "rank %3u  ", rank);
    jpp__terminal_append(cells + (size_t)rank * columns, columns, false, str);
    jpp_str_append(str, "\n");
  }
}

jpp_status_t* jpp_schedule_draw(const jpp_schedule_t* schedule, char** out_text) {
  JPP_RETURN_IF_NULL(schedule, out_text);
  *out_text = NULL;
  jpp_schedule_timeline_t* timeline = NULL;
  JPP_RETURN_IF_ERROR(jpp_schedule_timeline(schedule, NULL, &timeline));
  uint32_t columns = timeline->length < JPP_SCHEDULE_DRAW_COLUMNS
                         ? (uint32_t)timeline->length
                         : JPP_SCHEDULE_DRAW_COLUMNS;
  jpp_cell_t* cells = NULL;  // all idle
  jpp_str_t str = {0};
  jpp_status_t* status = JPP_ALLOC_ARRAY((size_t)schedule->ranks * columns, &cells);
  if (!status) {
    fill_cells(schedule, timeline, columns, cells);
    append_picture(schedule, timeline->length, columns, cells, &str);
    status = jpp_str_finish(&str, out_text);
  }
  jpp_free(cells);
  jpp_schedule_timeline_destroy(timeline);
  return status;
}
