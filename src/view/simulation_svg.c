// A simulated schedule as SVG: the tasks of each rank and the activations that it keeps,
// over time.
#include <math.h>
#include <stdio.h>

#include "base/null.h"
#include "base/utf8.h"
#include "jaxpp/view.h"
#include "simulate/simulation.h"
#include "view/ink.h"
#include "view/page.h"

enum {
  kLeft = 64,  // start of the time axis
  kRight = 20,
  kTop = 74,
  kRow = 24,     // height of a rank with one stream
  kStream = 16,  // height of each stream if there are several
  kCurve = 16,
  kRowGap = 8,
  kBottom = 30,
  kMinWidth = 760,  // wide enough for the title
  kMaxWidth = 1800,
  kMostTasks = 1000000,
};

typedef struct plot {
  const jpp_simulation_t* simulation;
  double scale;  // pixels per unit of time
  double width, height;
  double row;   // height of a rank's tasks
  double peak;  // of all ranks
  jpp_str_t* str;
} plot_t;

// Colours are attributes, not classes, so that every renderer shows them.
#define TITLE "font-size=\"15\" font-weight=\"bold\""
#define NUMBER "font-size=\"10\" text-anchor=\"middle\""
#define GREY "fill=\"#666\""
#define KEPT "fill=\"#c9b8e0\" stroke=\"#8465b0\" stroke-width=\".8\""

static uint32_t stages_of(const jpp_schedule_t* schedule, uint32_t rank,
                          uint32_t below_stage) {
  uint32_t count = 0;
  for (uint32_t s = 0; s < below_stage; ++s) count += schedule->stage_rank[s] == rank;
  return count;
}

// A shade for the stage's position among the stages of its rank.
static uint32_t stage_shade(const jpp_schedule_t* schedule, uint32_t stage) {
  uint32_t rank = schedule->stage_rank[stage];
  uint32_t all = stages_of(schedule, rank, schedule->stages);
  uint32_t turn = stages_of(schedule, rank, stage);
  if (all == 1) return 1;
  return all <= 4 ? turn * 3 / (all - 1) : turn % 4;
}

static double x_at(const plot_t* plot, double time) { return kLeft + time * plot->scale; }

static double row_top(const plot_t* plot, uint32_t rank) {
  return kTop + rank * (plot->row + kCurve + kRowGap);
}

static void append_title(const plot_t* plot) {
  const jpp_simulation_t* simulation = plot->simulation;
  const jpp_schedule_t* schedule = simulation->schedule;
  jpp_str_appendf(plot->str, "<text " TITLE " x=\"12\" y=\"20\">");
  jpp__str_append_xml(plot->str, schedule->name);
  jpp_str_appendf(plot->str,
                  ": %u stages, %u ranks, %u microbatches</text>\n"
                  "<text x=\"12\" y=\"38\">makespan %.6g, bubble %.6g (%.6g inside a "
                  "rank), utilisation %.1f%%, peak %.4g microbatches</text>\n",
                  schedule->stages, schedule->ranks, schedule->microbatches,
                  simulation->makespan, simulation->bubble_global,
                  simulation->bubble_span, 100 * simulation->utilisation, plot->peak);
}

static void append_key(const plot_t* plot, double x, const char* style,
                       const char* text) {
  jpp_str_appendf(plot->str,
                  "<rect %s x=\"%.0f\" y=\"47\" width=\"14\" height=\"12\"/>"
                  "<text x=\"%.0f\" y=\"57\">%s</text>\n",
                  style, x, x + 19, text);
}

static void append_legend(const plot_t* plot) {
  double x = 12;
  for (int name = JPP_INK_FORWARD; name <= JPP_INK_WEIGHT; ++name) {
    const jpp_ink_t* ink = jpp__ink((jpp_ink_name_t)name);
    char fill[32];
    snprintf(fill, sizeof(fill), "fill=\"%s\"", ink->fills[1]);
    append_key(plot, x, fill, ink->legend);
    x += ink->legend_width;
  }
  append_key(plot, x, KEPT, "microbatches kept");
  x += 125;
  jpp_str_appendf(plot->str,
                  "<text " GREY
                  " x=\"%.0f\" y=\"57\">later stages of a rank are "
                  "darker</text>\n",
                  x + 20);
}

static const char* fill_of(const jpp_schedule_task_t* task, const uint32_t* shades) {
  return jpp__ink(jpp__ink_of((jpp_task_kind_t)task->kind))->fills[shades[task->stage]];
}

// Draws one task, with its number if it fits.
static void append_task(const plot_t* plot, uint32_t rank, uint32_t entry,
                        const uint32_t* shades) {
  const jpp_simulation_t* simulation = plot->simulation;
  const jpp_schedule_task_t* task = &simulation->schedule->rows[rank].tasks[entry];
  double start = simulation->starts[rank][entry];
  double took = jpp_task_cost(&simulation->stage_costs[task->stage], task->kind);
  double x = x_at(plot, start), width = took * plot->scale;
  double height = plot->row / simulation->streams;
  uint32_t stream = simulation->stream_of ? simulation->stream_of[rank][entry] : 0;
  double y = row_top(plot, rank) + stream * height;
  char name[JPP_TASK_NAME_SIZE];
  jpp_str_appendf(plot->str,
                  "<rect fill=\"%s\" stroke=\"#fff\" stroke-width=\".8\" x=\"%.2f\" "
                  "y=\"%.0f\" width=\"%.2f\" height=\"%.0f\">"
                  "<title>%s: rank %u, %.6g to %.6g</title></rect>\n",
                  fill_of(task, shades), x, y, width, height, jpp_task_name(task, name),
                  rank, start, start + took);
  double digits = task->microbatch < 10 ? 1 : floor(log10(task->microbatch)) + 1;
  if (width < 6 * digits + 3) return;
  jpp_str_appendf(plot->str,
                  "<text " NUMBER
                  " x=\"%.2f\" y=\"%.0f\" "
                  "pointer-events=\"none\">%u</text>\n",
                  x + width / 2, y + height / 2 + 4, task->microbatch);
}

// Steps with the activations that the rank keeps on its device.
static jpp_status_t* append_curve(const plot_t* plot, uint32_t rank, uint32_t stages,
                                  jpp_arena_t* scratch) {
  const jpp_simulation_t* simulation = plot->simulation;
  double floor_y = row_top(plot, rank) + plot->row + kCurve;
  double step = plot->peak > 0 ? (kCurve - 2) / plot->peak / stages : 0;
  jpp_kept_event_t* events = NULL;
  uint32_t count = 0;
  double kept = 0;
  JPP_RETURN_IF_ERROR(jpp__simulation_kept(simulation, rank, scratch, &events, &count));
  jpp_str_appendf(plot->str, "<path " KEPT " d=\"M%.2f %.2f", x_at(plot, 0), floor_y);
  for (uint32_t i = 0; i < count; ++i) {
    kept += events[i].change;
    if (i + 1 < count && events[i + 1].time <= events[i].time) continue;
    jpp_str_appendf(plot->str, "H%.2fV%.2f", x_at(plot, events[i].time),
                    floor_y - kept * step);
  }
  jpp_str_appendf(plot->str,
                  "V%.2fZ\"><title>rank %u keeps at most %.4g microbatches"
                  "</title></path>\n",
                  floor_y, rank, simulation->ranks[rank].peak);
  return NULL;
}

static jpp_status_t* append_rank(const plot_t* plot, uint32_t rank,
                                 const uint32_t* shades, jpp_arena_t* scratch) {
  const jpp_simulation_t* simulation = plot->simulation;
  double y = row_top(plot, rank);
  jpp_str_appendf(plot->str,
                  "<rect x=\"%d\" y=\"%.0f\" width=\"%.2f\" height=\"%.0f\" "
                  "fill=\"#dde1e7\"/>\n<text x=\"12\" y=\"%.0f\">rank %u</text>\n"
                  "<text " GREY " x=\"12\" y=\"%.0f\">max %.4g</text>\n",
                  kLeft, y, simulation->makespan * plot->scale, plot->row, y + 16, rank,
                  y + plot->row + 12, simulation->ranks[rank].peak);
  for (uint32_t i = 0; i < simulation->schedule->rows[rank].count; ++i) {
    if (simulation->schedule->rows[rank].tasks[i].kind == JPP_TASK_IDLE) continue;
    append_task(plot, rank, i, shades);
  }
  uint32_t stages = stages_of(simulation->schedule, rank, simulation->schedule->stages);
  return stages ? append_curve(plot, rank, stages, scratch) : NULL;
}

static void append_axis(const plot_t* plot) {
  double makespan = plot->simulation->makespan;
  double unit = pow(10, floor(log10(makespan > 0 ? makespan : 1)));
  while (unit * plot->scale > 160) unit /= 2;
  while (unit * plot->scale < 50) unit *= 2;
  double y = plot->height - kBottom + 8;
  for (double time = 0; time <= makespan * 1.0001; time += unit) {
    jpp_str_appendf(plot->str,
                    "<path d=\"M%.2f %.0fv5\" stroke=\"#888\"/><text " NUMBER " " GREY
                    " "
                    "x=\"%.2f\" y=\"%.0f\">%.6g</text>\n",
                    x_at(plot, time), y, x_at(plot, time), y + 16, time);
  }
}

// Makes the picture wide enough for the number of the narrowest task, within limits.
static void measure_plot(plot_t* plot) {
  const jpp_simulation_t* simulation = plot->simulation;
  double makespan = simulation->makespan > 0 ? simulation->makespan : 1;
  double shortest = makespan;
  for (uint32_t s = 0; s < simulation->schedule->stages; ++s) {
    const jpp_cost_t* cost = &simulation->stage_costs[s];
    if (cost->forward > 0 && cost->forward < shortest) shortest = cost->forward;
  }
  double width = makespan * 16 / shortest;
  if (width < kMinWidth) width = kMinWidth;
  if (width > kMaxWidth) width = kMaxWidth;
  plot->scale = width / makespan;
  plot->width = kLeft + width + kRight;
  plot->row = simulation->streams == 1 ? kRow : (double)kStream * simulation->streams;
  plot->height = row_top(plot, simulation->schedule->ranks) + kBottom;
  for (uint32_t r = 0; r < simulation->schedule->ranks; ++r) {
    if (simulation->ranks[r].peak > plot->peak) plot->peak = simulation->ranks[r].peak;
  }
}

static jpp_status_t* append_ranks(const plot_t* plot, jpp_arena_t* scratch) {
  const jpp_schedule_t* schedule = plot->simulation->schedule;
  uint32_t* shades = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->stages, &shades));
  for (uint32_t s = 0; s < schedule->stages; ++s) shades[s] = stage_shade(schedule, s);
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    JPP_RETURN_IF_ERROR(append_rank(plot, r, shades, scratch));
  }
  return NULL;
}

static jpp_status_t* append_svg(const jpp_simulation_t* simulation, jpp_str_t* str) {
  if (simulation->tasks > kMostTasks) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "a picture shows up to %d tasks, the schedule has %llu; draw "
                           "it with fewer microbatches",
                           kMostTasks, (unsigned long long)simulation->tasks);
  }
  plot_t plot = {.simulation = simulation, .str = str};
  measure_plot(&plot);
  jpp__svg_begin(plot.width, plot.height, str);
  append_title(&plot);
  append_legend(&plot);
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = append_ranks(&plot, &scratch);
  jpp__arena_deinit(&scratch);
  append_axis(&plot);
  jpp_str_append(str, "</svg>\n");
  return status;
}

jpp_status_t* jpp_plot_svg(const jpp_simulation_t* simulation, char** out_text) {
  JPP_RETURN_IF_NULL(simulation, out_text);
  jpp_str_t str = {0};
  jpp_status_t* status = append_svg(simulation, &str);
  return jpp__str_finish_unless(status, &str, out_text);
}

jpp_status_t* jpp_plot_html(const jpp_simulation_t* simulation, char** out_text) {
  JPP_RETURN_IF_NULL(simulation, out_text);
  jpp_str_t str = {0};
  jpp__page_begin(&str);
  jpp_status_t* status = append_svg(simulation, &str);
  jpp__page_end(&str);
  return jpp__str_finish_unless(status, &str, out_text);
}
