// A trace as a picture made of characters.
#include "base/str.h"
#include "jaxpp/view.h"

enum { kNoRun = -1 };

typedef struct canvas {
  const jpp_trace_t* trace;
  uint32_t columns;
  bool color;
  int64_t* best;  // [columns] of the rank at hand: time of the run that is drawn
  int64_t* busy;  // [columns] time of all runs
  int64_t* run;   // [columns] the run that is drawn, or kNoRun
} canvas_t;

// The first nanosecond of a column.
static int64_t column_begin(const canvas_t* canvas, uint32_t column) {
  return (int64_t)((__int128)canvas->trace->length * column / canvas->columns);
}

static uint32_t column_at(const canvas_t* canvas, int64_t time) {
  uint32_t column = (uint32_t)((__int128)time * canvas->columns / canvas->trace->length);
  return column < canvas->columns ? column : canvas->columns - 1;
}

// Adds a run to the columns it touches; each shows the run that has most of it.
static void fill_run(canvas_t* canvas, uint64_t index) {
  const jpp_trace_run_t* run = &canvas->trace->runs[index];
  uint32_t last = column_at(canvas, run->end);
  for (uint32_t c = column_at(canvas, run->start); c <= last; ++c) {
    int64_t begin = column_begin(canvas, c), end = column_begin(canvas, c + 1);
    if (begin < run->start) begin = run->start;
    if (end > run->end) end = run->end;
    if (end <= begin) continue;
    canvas->busy[c] += end - begin;
    if (end - begin <= canvas->best[c]) continue;
    canvas->best[c] = end - begin;
    canvas->run[c] = (int64_t)index;
  }
}

static char run_mark(const jpp_task_t* task, uint32_t microbatch) {
  switch ((jpp_task_kind_t)task->kind) {
    case JPP_TASK_FWD:
      return (char)('0' + microbatch % 10);
    case JPP_TASK_BWD:
    case JPP_TASK_BWD_I:
      return (char)('a' + microbatch % 10);
    case JPP_TASK_BWD_W:
      return (char)('A' + microbatch % 10);
    default:
      return '#';
  }
}

static const char* kind_color(jpp_task_kind_t kind) {
  static const char* const kColors[] = {
      [JPP_TASK_IDLE] = "\x1b[0m",   [JPP_TASK_FWD] = "\x1b[34m",
      [JPP_TASK_BWD] = "\x1b[32m",   [JPP_TASK_BWD_I] = "\x1b[32m",
      [JPP_TASK_BWD_W] = "\x1b[36m", [JPP_TASK_OUTER] = "\x1b[33m",
  };
  return kColors[kind];
}

// A column that is idle for most of its time is drawn idle.
static const jpp_trace_run_t* drawn_run(const canvas_t* canvas, uint32_t column) {
  int64_t width = column_begin(canvas, column + 1) - column_begin(canvas, column);
  if (canvas->run[column] == kNoRun || canvas->busy[column] * 2 < width) return NULL;
  return &canvas->trace->runs[canvas->run[column]];
}

static void append_cells(const canvas_t* canvas, jpp_str_t* str) {
  jpp_task_kind_t colored = JPP_TASK_IDLE;
  for (uint32_t c = 0; c < canvas->columns; ++c) {
    const jpp_trace_run_t* run = drawn_run(canvas, c);
    const jpp_task_t* task = run ? &canvas->trace->plan->staged->tasks[run->task] : NULL;
    jpp_task_kind_t kind = task ? (jpp_task_kind_t)task->kind : JPP_TASK_IDLE;
    if (canvas->color && kind != colored) jpp_str_append(str, kind_color(kind));
    colored = kind;
    char mark = task ? run_mark(task, run->microbatch) : '.';
    jpp_str_append_n(str, &mark, 1);
  }
  if (canvas->color && colored != JPP_TASK_IDLE) {
    jpp_str_append(str, kind_color(JPP_TASK_IDLE));
  }
}

// Draws the rank's runs, which begin at `index`; gives where the next rank's begin.
static uint64_t append_rank(canvas_t* canvas, uint32_t rank, uint64_t index,
                            jpp_str_t* str) {
  const jpp_trace_t* trace = canvas->trace;
  int64_t busy = 0;
  for (uint32_t c = 0; c < canvas->columns; ++c) {
    canvas->best[c] = canvas->busy[c] = 0;
    canvas->run[c] = kNoRun;
  }
  for (; index < trace->num_runs && trace->runs[index].rank == rank; ++index) {
    fill_run(canvas, index);
    busy += trace->runs[index].end - trace->runs[index].start;
  }
  jpp_str_appendf(str, "rank %3u  ", rank);
  append_cells(canvas, str);
  jpp_str_appendf(str, "  %3d%%\n",
                  (int)((busy * 100 + trace->length / 2) / trace->length));
  return index;
}

static void append_picture(canvas_t* canvas, jpp_str_t* str) {
  const jpp_trace_t* trace = canvas->trace;
  jpp_str_appendf(str, "%lld.%03d ms, %llu runs on %u ranks\n",
                  (long long)(trace->length / 1000000),
                  (int)(trace->length / 1000 % 1000), (unsigned long long)trace->num_runs,
                  trace->plan->ranks);
  jpp_str_append(str,
                 "0-9 forward, a-j backward (of inputs), A-J of weights, # outside the "
                 "loops, . idle; %: busy\n");
  uint64_t index = 0;
  for (uint32_t r = 0; r < trace->plan->ranks; ++r) {
    index = append_rank(canvas, r, index, str);
  }
}

jpp_status_t* jpp_trace_draw(const jpp_trace_t* trace, uint32_t columns, bool color,
                             char** out_text) {
  *out_text = NULL;
  if (columns < 1 || trace->length < 1) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "expected at least 1 column and 1 ns to draw, found %u and %lld", columns,
        (long long)trace->length);
  }
  canvas_t canvas = {.trace = trace, .columns = columns, .color = color};
  int64_t* cells = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY((size_t)columns * 3, &cells));
  canvas.best = cells;
  canvas.busy = cells + columns;
  canvas.run = cells + (size_t)columns * 2;
  jpp_str_t str = {0};
  append_picture(&canvas, &str);
  jpp_free(cells);
  return jpp_str_finish(&str, out_text);
}
