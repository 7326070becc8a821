// A simulated schedule in the terminal.
#include "base/alloc.h"
#include "base/null.h"
#include "jaxpp/view.h"
#include "view/terminal.h"

static double end_of(const jpp_simulation_t* simulation, uint32_t rank, uint32_t entry) {
  const jpp_schedule_task_t* task = &simulation->schedule->rows[rank].tasks[entry];
  double start = simulation->starts[rank][entry];
  if (task->kind == JPP_TASK_IDLE) return start;
  return start + jpp_task_cost(&simulation->stage_costs[task->stage], task->kind);
}

// A column shows the task of the stream that runs in its middle.
static void fill_cells(const jpp_simulation_t* simulation, uint32_t rank, uint32_t stream,
                       uint32_t columns, jpp_cell_t* cells) {
  const jpp_schedule_row_t* row = &simulation->schedule->rows[rank];
  uint32_t entry = 0;
  for (uint32_t c = 0; c < columns; ++c) {
    double time = simulation->makespan * (c + 0.5) / columns;
    cells[c] = (jpp_cell_t){0};
    for (; entry < row->count; ++entry) {
      uint32_t on = simulation->stream_of ? simulation->stream_of[rank][entry] : 0;
      if (on != stream || end_of(simulation, rank, entry) <= time) continue;
      if (simulation->starts[rank][entry] > time) break;
      const jpp_schedule_task_t* task = &row->tasks[entry];
      cells[c] = (jpp_cell_t){.busy = true,
                              .ink = jpp__ink_of((jpp_task_kind_t)task->kind),
                              .microbatch = task->microbatch};
      break;
    }
  }
}

jpp_status_t* jpp_plot_text(const jpp_simulation_t* simulation, uint32_t columns,
                            bool color, char** out_text) {
  JPP_RETURN_IF_NULL(simulation, out_text);
  const jpp_schedule_t* schedule = simulation->schedule;
  jpp_str_t str = {0};
  jpp_cell_t* cells = NULL;
  *out_text = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(columns, &cells));
  jpp_str_appendf(
      &str,
      "%s: %u stages, %u ranks, %u microbatches; makespan %.6g, bubble %.6g, "
      "utilisation %.1f%%\n" JPP_TERMINAL_LEGEND ". bubble; microbatches kept\n",
      schedule->name, schedule->stages, schedule->ranks, schedule->microbatches,
      simulation->makespan, simulation->bubble_global, 100 * simulation->utilisation);
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    for (uint32_t s = 0; s < simulation->streams; ++s) {
      fill_cells(simulation, r, s, columns, cells);
      if (!s) jpp_str_appendf(&str, "rank %3u  ", r);
      if (s) jpp_str_append(&str, "          ");
      jpp__terminal_append(cells, columns, color, &str);
      if (!s) jpp_str_appendf(&str, "  %.4g", simulation->ranks[r].peak);
      jpp_str_append(&str, "\n");
    }
  }
  jpp_free(cells);
  return jpp_str_finish(&str, out_text);
}
