// Text and JSON forms of a schedule, and its peak.
#include "base/str.h"
#include "schedule/index.h"

typedef void (*print_task_t)(const jpp_schedule_task_t* task, jpp_str_t* str);

// How a row is written: with what around a FusedTask, between tasks, and for idle.
typedef struct row_style {
  print_task_t task;
  const char* between;
  const char* idle;
  const char* fused_begin;
  const char* fused_end;
} row_style_t;

static void print_idle(const jpp_schedule_task_t* task, const row_style_t* style,
                       jpp_str_t* str) {
  for (uint64_t step = 0; step < jpp_task_steps(task); ++step) {
    if (step) jpp_str_append(str, style->between);
    jpp_str_append(str, style->idle);
  }
}

static void print_row(const jpp_schedule_row_t* row, const row_style_t* style,
                      jpp_str_t* str) {
  for (uint32_t i = 0; i < row->count;) {
    uint32_t end = jpp_row_unit_end(row, i);
    bool fused = end - i > 1;
    if (i) jpp_str_append(str, style->between);
    if (fused) jpp_str_append(str, style->fused_begin);
    for (uint32_t k = i; k < end; ++k) {
      if (k > i) jpp_str_append(str, ", ");
      if (row->tasks[k].kind == JPP_TASK_IDLE) {
        print_idle(&row->tasks[k], style, str);
      } else {
        style->task(&row->tasks[k], str);
      }
    }
    if (fused) jpp_str_append(str, style->fused_end);
    i = end;
  }
}

static void print_name(const jpp_schedule_task_t* task, jpp_str_t* str) {
  char name[JPP_TASK_NAME_SIZE];
  jpp_str_append(str, jpp_task_name(task, name));
}

jpp_status_t* jpp_schedule_print(const jpp_schedule_t* schedule, char** out_text) {
  jpp_str_t str = {0};
  static const row_style_t kText = {print_name, " ", ".", "FusedTask(", ")"};
  jpp_str_appendf(&str, "schedule %s: %u stages, %u ranks, %u microbatches\n",
                  schedule->name, schedule->stages, schedule->ranks,
                  schedule->microbatches);
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    jpp_str_appendf(&str, "rank %u: ", rank);
    print_row(&schedule->rows[rank], &kText, &str);
    jpp_str_append(&str, "\n");
  }
  return jpp_str_finish(&str, out_text);
}

static void print_json_task(const jpp_schedule_task_t* task, jpp_str_t* str) {
  static const char* const kKinds[] = {"", "F", "B", "I", "W"};
  const char* kind = task->kind <= JPP_TASK_BWD_W ? kKinds[task->kind] : "?";
  jpp_str_appendf(str, "{\"kind\": \"%s\", \"stage\": %u, \"microbatch\": %u}", kind,
                  task->stage, task->microbatch);
}

jpp_status_t* jpp_schedule_print_json(const jpp_schedule_t* schedule, char** out_text) {
  jpp_str_t str = {0};
  static const row_style_t kJson = {print_json_task, ", ", "null", "[", "]"};
  jpp_str_append(&str, "[");
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    jpp_str_append(&str, rank ? ",\n [" : "[");
    print_row(&schedule->rows[rank], &kJson, &str);
    jpp_str_append(&str, "]");
  }
  jpp_str_append(&str, "]\n");
  return jpp_str_finish(&str, out_text);
}

static bool is_forward_only(const jpp_schedule_t* schedule) {
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    const jpp_schedule_row_t* row = &schedule->rows[rank];
    for (uint32_t i = 0; i < row->count; ++i) {
      if (row->tasks[i].kind > JPP_TASK_FWD) return false;
    }
  }
  return true;
}

static uint32_t row_peak(const jpp_schedule_row_t* row, bool forward_only) {
  uint32_t live = 0, peak = 0;
  for (uint32_t i = 0; i < row->count; ++i) {
    switch (row->tasks[i].kind) {
      case JPP_TASK_FWD:
        if (++live > peak) peak = live;
        if (forward_only) --live;
        break;
      case JPP_TASK_BWD:
      case JPP_TASK_BWD_W:
        if (live) --live;
        break;
      default:
        break;
    }
  }
  return peak;
}

void jpp_schedule_peak_microbatches(const jpp_schedule_t* schedule, uint32_t* out_peaks) {
  bool forward_only = is_forward_only(schedule);
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    out_peaks[rank] = row_peak(&schedule->rows[rank], forward_only);
  }
}
