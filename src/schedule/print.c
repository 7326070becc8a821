// Prints a schedule as text, a line for each rank, for golden tests and `jaxpp schedule
// show`.
#include "base/null.h"
#include "base/str.h"
#include "schedule/index.h"

// A task's name, or a dot for each idle step.
static void append_entry(const jpp_schedule_task_t* task, jpp_str_t* str) {
  char name[JPP_TASK_NAME_SIZE];
  if (task->kind != JPP_TASK_IDLE) {
    jpp_str_append(str, jpp_task_name(task, name));
    return;
  }
  for (uint64_t step = 0; step < jpp_task_steps(task); ++step) {
    jpp_str_append(str, step ? " ." : ".");
  }
}

static void append_row(const jpp_schedule_row_t* row, jpp_str_t* str) {
  for (uint32_t i = 0; i < row->count;) {
    uint32_t end = jpp__row_unit_end(row, i);
    bool fused = end - i > 1;
    if (i) jpp_str_append(str, " ");
    if (fused) jpp_str_append(str, "FusedTask(");
    for (uint32_t k = i; k < end; ++k) {
      if (k > i) jpp_str_append(str, ", ");
      append_entry(&row->tasks[k], str);
    }
    if (fused) jpp_str_append(str, ")");
    i = end;
  }
}

jpp_status_t* jpp_schedule_print(const jpp_schedule_t* schedule, char** out_text) {
  JPP_RETURN_IF_NULL(schedule, out_text);
  jpp_str_t str = {0};
  jpp_str_appendf(&str, "schedule %s: %u stages, %u ranks, %u microbatches\n",
                  schedule->name, schedule->stages, schedule->ranks,
                  schedule->microbatches);
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    jpp_str_appendf(&str, "rank %u: ", rank);
    append_row(&schedule->rows[rank], &str);
    jpp_str_append(&str, "\n");
  }
  return jpp_str_finish(&str, out_text);
}
