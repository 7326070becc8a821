// The SVG and the HTML page around it.
#include <math.h>
#include <stdio.h>

#include "base/utf8.h"
#include "jaxpp/view.h"
#include "simulate/simulation.h"

enum {
  kLeft = 64,  // of the time axis
  kRight = 20,
  kTop = 74,
  kRow = 24,     // of a rank with one stream
  kStream = 16,  // of each stream otherwise
  kCurve = 16,
  kRowGap = 8,
  kBottom = 30,
  kMinWidth = 760,  // so that the title fits
  kMaxWidth = 1800,
  kMostTasks = 1000000,
};

typedef struct plot {
  const jpp_simulation_t* simulation;
  double scale;  // pixels a unit of time
  double width, height;
  double row;   // height of a rank's tasks
  double peak;  // of all ranks
  jpp_str_t* str;
} plot_t;

typedef enum ink { INK_FORWARD, INK_BACKWARD, INK_WEIGHT } ink_t;

// From light (a rank's first stage) to dark.
static const char* const kInks[3][4] = {
    {"#a9cdf2", "#7fb2e6", "#5795d4", "#3579ba"},
    {"#b0dfb4", "#86c98d", "#5cb067", "#3b9148"},
    {"#fbd09a", "#f5b566", "#e99a3c", "#cf7f1e"},
};
// Colours are attributes, not classes, so that every renderer shows them.
#define TITLE "font-size=\"15\" font-weight=\"bold\""
#define NUMBER "font-size=\"10\" text-anchor=\"middle\""
#define GREY "fill=\"#666\""
#define KEPT "fill=\"#c9b8e0\" stroke=\"#8465b0\" stroke-width=\".8\""

static ink_t task_ink(const jpp_schedule_task_t* task) {
  if (task->kind == JPP_TASK_FWD) return INK_FORWARD;
  return task->kind == JPP_TASK_BWD_W ? INK_WEIGHT : INK_BACKWARD;
}

static uint32_t stages_of(const jpp_schedule_t* schedule, uint32_t rank,
                          uint32_t below_stage) {
  uint32_t count = 0;
  for (uint32_t s = 0; s < below_stage; ++s) count += schedule->stage_rank[s] == rank;
  return count;
}

// A shade for the stage's turn among those of its rank.
static uint32_t stage_shade(const jpp_schedule_t* schedule, uint32_t stage) {
  uint32_t rank = schedule->stage_rank[stage];
  uint32_t all = stages_of(schedule, rank, schedule->stages);
  uint32_t turn = stages_of(schedule, rank, stage);
  if (all == 1) return 1;
  return all <= 4 ? turn * 3 / (all - 1) : turn % 4;
}

static double at(const plot_t* plot, double time) { return kLeft + time * plot->scale; }

static double row_top(const plot_t* plot, uint32_t rank) {
  return kTop + rank * (plot->row + kCurve + kRowGap);
}

static void append_title(const plot_t* plot) {
  const jpp_simulation_t* simulation = plot->simulation;
  const jpp_schedule_t* schedule = simulation->schedule;
  jpp_str_appendf(plot->str, "<text " TITLE " x=\"12\" y=\"20\">");
  jpp_str_append_xml(plot->str, schedule->name);
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
  static const struct {
    double width;
    const char* text;
  } kTasks[] = {[INK_FORWARD] = {90, "forward"},
                [INK_BACKWARD] = {155, "backward (of inputs)"},
                [INK_WEIGHT] = {125, "weight gradient"}};
  double x = 12;
  for (uint32_t i = 0; i < sizeof(kTasks) / sizeof(*kTasks); ++i) {
    char fill[32];
    snprintf(fill, sizeof(fill), "fill=\"%s\"", kInks[i][1]);
    append_key(plot, x, fill, kTasks[i].text);
    x += kTasks[i].width;
  }
  append_key(plot, x, KEPT, "microbatches kept");
  x += 125;
  jpp_str_appendf(plot->str,
                  "<text " GREY
                  " x=\"%.0f\" y=\"57\">later stages of a rank are "
                  "darker</text>\n",
                  x + 20);
}

// One task; its number where it fits.
static void append_task(const plot_t* plot, uint32_t rank, uint32_t entry,
                        const uint32_t* shades) {
  const jpp_simulation_t* simulation = plot->simulation;
  const jpp_schedule_task_t* task = &simulation->schedule->rows[rank].tasks[entry];
  double start = simulation->starts[rank][entry];
  double took = jpp_task_cost(&simulation->stage_costs[task->stage], task->kind);
  double x = at(plot, start), width = took * plot->scale;
  double height = plot->row / simulation->streams;
  uint32_t stream = simulation->stream_of ? simulation->stream_of[rank][entry] : 0;
  double y = row_top(plot, rank) + stream * height;
  char name[JPP_TASK_NAME_SIZE];
  jpp_str_appendf(plot->str,
                  "<rect fill=\"%s\" stroke=\"#fff\" stroke-width=\".8\" x=\"%.2f\" "
                  "y=\"%.0f\" width=\"%.2f\" height=\"%.0f\">"
                  "<title>%s: rank %u, %.6g to %.6g</title></rect>\n",
                  kInks[task_ink(task)][shades[task->stage]], x, y, width, height,
                  jpp_task_name(task, name), rank, start, start + took);
  double digits = task->microbatch < 10 ? 1 : floor(log10(task->microbatch)) + 1;
  if (width < 6 * digits + 3) return;
  jpp_str_appendf(plot->str,
                  "<text " NUMBER
                  " x=\"%.2f\" y=\"%.0f\" "
                  "pointer-events=\"none\">%u</text>\n",
                  x + width / 2, y + height / 2 + 4, task->microbatch);
}

// Steps up when a forward starts, down when a backward or weight gradient has ended.
static jpp_status_t* append_curve(const plot_t* plot, uint32_t rank, uint32_t stages,
                                  jpp_arena_t* scratch) {
  const jpp_simulation_t* simulation = plot->simulation;
  double floor_y = row_top(plot, rank) + plot->row + kCurve;
  double step = plot->peak > 0 ? (kCurve - 2) / plot->peak / stages : 0;
  jpp_kept_event_t* events = NULL;
  uint32_t count = 0;
  int kept = 0;
  JPP_RETURN_IF_ERROR(jpp_simulation_kept(simulation, rank, scratch, &events, &count));
  jpp_str_appendf(plot->str, "<path " KEPT " d=\"M%.2f %.2f", at(plot, 0), floor_y);
  for (uint32_t i = 0; i < count; ++i) {
    kept += events[i].change;
    if (i + 1 < count && events[i + 1].time <= events[i].time) continue;
    jpp_str_appendf(plot->str, "H%.2fV%.2f", at(plot, events[i].time),
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
                    at(plot, time), y, at(plot, time), y + 16, time);
  }
}

// The narrowest task is to hold its number, as far as the width allows.
static void measure(plot_t* plot) {
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
  measure(&plot);
  jpp_str_appendf(str,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" "
                  "height=\"%.0f\" viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" "
                  "font-size=\"11\" fill=\"#222\">\n",
                  plot.width, plot.height, plot.width, plot.height);
  jpp_str_append(str, "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n");
  append_title(&plot);
  append_legend(&plot);
  jpp_arena_t scratch;
  jpp_arena_init(&scratch);
  jpp_status_t* status = append_ranks(&plot, &scratch);
  jpp_arena_deinit(&scratch);
  append_axis(&plot);
  jpp_str_append(str, "</svg>\n");
  return status;
}

static jpp_status_t* finish(jpp_status_t* status, jpp_str_t* str, char** out_text) {
  *out_text = NULL;
  if (!status) return jpp_str_finish(str, out_text);
  jpp_str_deinit(str);
  return status;
}

jpp_status_t* jpp_plot_svg(const jpp_simulation_t* simulation, char** out_text) {
  jpp_str_t str = {0};
  jpp_status_t* status = append_svg(simulation, &str);
  return finish(status, &str, out_text);
}

static const char kPageHead[] =
    "<!doctype html>\n<html><head><meta charset=\"utf-8\"><title>schedule</title>\n"
    "<style>html,body{margin:0;height:100%;overflow:hidden}svg{width:100%;height:100%;"
    "cursor:grab}#tip{position:fixed;display:none;background:#222;color:#fff;"
    "font:12px sans-serif;padding:4px 8px;border-radius:4px;pointer-events:none}"
    "</style></head><body>\n<div id=\"tip\"></div>\n";

// Zoom and pan move the view box; the description is a task's <title>.
static const char kPageTail[] =
    "<script>\n"
    "const svg=document.querySelector('svg'),tip=document.getElementById('tip');\n"
    "const full=svg.viewBox.baseVal;let x=0,y=0,w=full.width,h=full.height,drag=null;\n"
    "const W=w,H=h;svg.removeAttribute('width');svg.removeAttribute('height');\n"
    "svg.setAttribute('preserveAspectRatio','xMinYMin meet');\n"
    "const titles=new Map();for(const t of svg.querySelectorAll('title')){"
    "titles.set(t.parentNode,t.textContent);}\n"
    "for(const t of [...svg.querySelectorAll('title')])t.remove();\n"
    "const show=()=>svg.setAttribute('viewBox',`${x} ${y} ${w} ${h}`);\n"
    "const unit=()=>1/svg.getScreenCTM().a;\n"
    "svg.addEventListener('wheel',e=>{e.preventDefault();"
    "const k=Math.exp(e.deltaY/500),u=unit(),b=svg.getBoundingClientRect();"
    "const px=x+(e.clientX-b.left)*u,py=y+(e.clientY-b.top)*u;"
    "if(w*k>4*W||w*k<W/500)return;x=px-(px-x)*k;y=py-(py-y)*k;w*=k;h*=k;show();},"
    "{passive:false});\n"
    "svg.addEventListener('pointerdown',e=>drag=[e.clientX,e.clientY]);\n"
    "addEventListener('pointerup',()=>drag=null);\n"
    "svg.addEventListener('dblclick',()=>{x=y=0;w=W;h=H;show();});\n"
    "svg.addEventListener('pointermove',e=>{if(drag){const u=unit();"
    "x-=(e.clientX-drag[0])*u;y-=(e.clientY-drag[1])*u;drag=[e.clientX,e.clientY];show();"
    "}"
    "const t=titles.get(e.target);tip.style.display=t?'block':'none';if(t){"
    "tip.textContent=t;tip.style.left=Math.min(e.clientX+12,innerWidth-tip.offsetWidth-4)"
    "+'px';tip.style.top=e.clientY+14+'px';}});\n"
    "</script></body></html>\n";

jpp_status_t* jpp_plot_html(const jpp_simulation_t* simulation, char** out_text) {
  jpp_str_t str = {0};
  jpp_str_append(&str, kPageHead);
  jpp_status_t* status = append_svg(simulation, &str);
  jpp_str_append(&str, kPageTail);
  return finish(status, &str, out_text);
}
