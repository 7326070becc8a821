// The terminal drawing.
#include "base/str.h"
#include "jaxpp/view.h"

typedef struct canvas {
  const jpp_simulation_t* simulation;
  uint32_t columns;
  bool color;
  jpp_str_t* str;
} canvas_t;

static char task_mark(const jpp_schedule_task_t* task) {
  char first = task->kind == JPP_TASK_FWD     ? '0'
               : task->kind == JPP_TASK_BWD_W ? 'A'
                                              : 'a';
  return (char)(first + task->microbatch % 10);
}

static const char* task_color(const jpp_schedule_task_t* task) {
  if (!task) return "\x1b[0m";
  if (task->kind == JPP_TASK_FWD) return "\x1b[34m";
  return task->kind == JPP_TASK_BWD_W ? "\x1b[33m" : "\x1b[32m";
}

// A column shows the task that runs in its middle.
static void append_row(const canvas_t* canvas, uint32_t rank, uint32_t stream) {
  const jpp_simulation_t* simulation = canvas->simulation;
  const jpp_schedule_row_t* row = &simulation->schedule->rows[rank];
  const char* colored = task_color(NULL);
  uint32_t entry = 0;
  for (uint32_t c = 0; c < canvas->columns; ++c) {
    double time = simulation->makespan * (c + 0.5) / canvas->columns;
    const jpp_schedule_task_t* shown = NULL;
    for (; entry < row->count; ++entry) {
      const jpp_schedule_task_t* task = &row->tasks[entry];
      double start = simulation->starts[rank][entry];
      double end = start;
      uint32_t on = simulation->stream_of ? simulation->stream_of[rank][entry] : 0;
      if (on != stream) continue;
      if (task->kind != JPP_TASK_IDLE) {
        end += jpp_task_cost(&simulation->stage_costs[task->stage], task->kind);
      }
      if (end <= time) continue;
      if (start <= time) shown = task;
      break;
    }
    const char* color = task_color(shown);
    if (canvas->color && color != colored) jpp_str_append(canvas->str, color);
    colored = color;
    char mark = shown ? task_mark(shown) : '.';
    jpp_str_append_n(canvas->str, &mark, 1);
  }
  if (canvas->color) jpp_str_append(canvas->str, task_color(NULL));
}

jpp_status_t* jpp_plot_text(const jpp_simulation_t* simulation, uint32_t columns,
                            bool color, char** out_text) {
  const jpp_schedule_t* schedule = simulation->schedule;
  jpp_str_t str = {0};
  canvas_t canvas = {simulation, columns, color, &str};
  jpp_str_appendf(&str,
                  "%s: %u stages, %u ranks, %u microbatches; makespan %.6g, bubble %.6g, "
                  "utilisation %.1f%%\n"
                  "0-9 forward, a-j backward (of inputs), A-J of weights, . bubble; "
                  "microbatches kept\n",
                  schedule->name, schedule->stages, schedule->ranks,
                  schedule->microbatches, simulation->makespan, simulation->bubble_global,
                  100 * simulation->utilisation);
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    jpp_str_appendf(&str, "rank %3u  ", r);
    append_row(&canvas, r, 0);
    jpp_str_appendf(&str, "  %.4g\n", simulation->ranks[r].peak);
    for (uint32_t s = 1; s < simulation->streams; ++s) {
      jpp_str_append(&str, "          ");
      append_row(&canvas, r, s);
      jpp_str_append(&str, "\n");
    }
  }
  return jpp_str_finish(&str, out_text);
}
