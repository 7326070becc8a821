// Pictures of measured runs, as SVG and for the terminal: a row for each rank, a bar for
// each task.
#include <string.h>

#include "base/null.h"
#include "base/utf8.h"
#include "jaxpp/view.h"
#include "view/page.h"
#include "view/terminal.h"

enum { kLeft = 70, kTop = 48, kRow = 24, kGap = 8, kBottom = 30, kWidth = 1600 };
enum { kMostSpans = 1000000 };

static double length_of(const jpp_spans_t* spans) { return spans->end - spans->begin; }

// The end of the consecutive spans from `first` on that belong to this rank.
static size_t rank_end(const jpp_spans_t* spans, size_t first, uint32_t rank) {
  size_t end = first;
  while (end < spans->count && spans->spans[end].rank == rank) ++end;
  return end;
}

static jpp_status_t* check_spans(const jpp_spans_t* spans, uint32_t columns) {
  if (columns && length_of(spans) > 0) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "expected at least 1 column and some time to draw, found %u and "
                         "%g ms",
                         columns, length_of(spans));
}

// --- The terminal ---------------------------------------------------------------------

typedef struct canvas {
  const jpp_spans_t* spans;
  uint32_t columns;
  jpp_cell_t* cells;  // [columns] of the current rank
  double* busy;       // [columns] time of all its runs
  double* most;       // [columns] time of the run that the column shows
} canvas_t;

static double column_begin(const canvas_t* canvas, uint32_t column) {
  return canvas->spans->begin + length_of(canvas->spans) * column / canvas->columns;
}

static uint32_t column_at(const canvas_t* canvas, double time) {
  double at = (time - canvas->spans->begin) / length_of(canvas->spans);
  if (at <= 0) return 0;
  return at < 1 ? (uint32_t)(at * canvas->columns) : canvas->columns - 1;
}

// Adds a span to the columns that it touches; each column shows the run that covers most
// of it.
static void add_span(canvas_t* canvas, const jpp_span_t* span) {
  uint32_t last = column_at(canvas, span->end);
  for (uint32_t c = column_at(canvas, span->start); c <= last; ++c) {
    double begin = column_begin(canvas, c), end = column_begin(canvas, c + 1);
    if (begin < span->start) begin = span->start;
    if (end > span->end) end = span->end;
    if (end <= begin) continue;
    canvas->busy[c] += end - begin;
    if (end - begin <= canvas->most[c]) continue;
    canvas->most[c] = end - begin;
    canvas->cells[c].ink = jpp__ink_of((jpp_task_kind_t)span->kind);
    canvas->cells[c].microbatch = span->microbatch;
  }
}

// The share of the time during which at least one of them runs.
static double busy_share(const jpp_spans_t* spans, size_t first, size_t end) {
  double busy = 0, until = spans->begin;
  for (size_t i = first; i < end; ++i) {
    const jpp_span_t* span = &spans->spans[i];
    double from = span->start > until ? span->start : until;
    if (span->end <= from) continue;
    busy += span->end - from;
    until = span->end;
  }
  return busy / length_of(spans);
}

// One line. If runs fill at least half of a column, it shows the run that covers most of
// it; otherwise it is idle.
static void append_rank(canvas_t* canvas, uint32_t rank, size_t first, size_t end,
                        bool color, jpp_str_t* str) {
  double width = length_of(canvas->spans) / canvas->columns;
  for (uint32_t c = 0; c < canvas->columns; ++c) canvas->busy[c] = canvas->most[c] = 0;
  for (size_t i = first; i < end; ++i) add_span(canvas, &canvas->spans->spans[i]);
  for (uint32_t c = 0; c < canvas->columns; ++c) {
    canvas->cells[c].busy = canvas->busy[c] > 0 && canvas->busy[c] * 2 >= width;
  }
  jpp_str_appendf(str, "rank %3u  ", rank);
  jpp__terminal_append(canvas->cells, canvas->columns, color, str);
  jpp_str_appendf(str, "  %3.0f%%\n", 100 * busy_share(canvas->spans, first, end));
}

// The first rank from `rank` on that has a row: ranks below spans->ranks, and ranks with
// spans, which begin at `next`. JPP_NONE if there is none.
static uint32_t rank_from(const jpp_spans_t* spans, uint32_t rank, size_t next) {
  if (rank < spans->ranks) return rank;
  return next < spans->count ? spans->spans[next].rank : JPP_NONE;
}

static void append_drawing(canvas_t* canvas, bool color, jpp_str_t* str) {
  const jpp_spans_t* spans = canvas->spans;
  size_t first = 0, end = 0;
  jpp_str_append_utf8(str, spans->title, strlen(spans->title));
  jpp_str_appendf(str,
                  ": %.3f ms, %zu task runs\n" JPP_TERMINAL_LEGEND
                  "# outside the loops, . idle; %%: busy\n",
                  length_of(spans), spans->count);
  for (uint32_t r = rank_from(spans, 0, 0); r != JPP_NONE;
       r = rank_from(spans, r + 1, first)) {
    end = rank_end(spans, first, r);
    append_rank(canvas, r, first, end, color, str);
    first = end;
  }
}

jpp_status_t* jpp_spans_draw(const jpp_spans_t* spans, uint32_t columns, bool color,
                             char** out_text) {
  JPP_RETURN_IF_NULL(spans, out_text);
  *out_text = NULL;
  JPP_RETURN_IF_ERROR(check_spans(spans, columns));
  canvas_t canvas = {.spans = spans, .columns = columns};
  jpp_status_t* status = JPP_ALLOC_ARRAY(columns, &canvas.cells);
  if (!status) status = JPP_ALLOC_ARRAY(columns, &canvas.busy);
  if (!status) status = JPP_ALLOC_ARRAY(columns, &canvas.most);
  jpp_str_t str = {0};
  if (!status) append_drawing(&canvas, color, &str);
  jpp_free(canvas.cells);
  jpp_free(canvas.busy);
  jpp_free(canvas.most);
  return status ? status : jpp_str_finish(&str, out_text);
}

// --- SVG ------------------------------------------------------------------------------

static void append_span(const jpp_spans_t* spans, const jpp_span_t* span, double top,
                        jpp_str_t* str) {
  double scale = kWidth / length_of(spans);
  double x = kLeft + (span->start - spans->begin) * scale;
  double width = (span->end - span->start) * scale;
  jpp_str_appendf(str,
                  "<rect fill=\"%s\" stroke=\"#fff\" stroke-width=\".5\" x=\"%.2f\" "
                  "y=\"%.0f\" width=\"%.2f\" height=\"%d\"><title>",
                  jpp__ink(jpp__ink_of((jpp_task_kind_t)span->kind))->fills[1], x, top,
                  width, kRow);
  jpp__str_append_xml(str, span->name);
  jpp_str_appendf(str, ": rank %u, %.6g to %.6g ms</title></rect>\n", span->rank,
                  span->start - spans->begin, span->end - spans->begin);
  if (span->microbatch == JPP_NONE || width < 16) return;
  jpp_str_appendf(str,
                  "<text text-anchor=\"middle\" font-size=\"10\" x=\"%.2f\" y=\"%.0f\" "
                  "pointer-events=\"none\">%u</text>\n",
                  x + width / 2, top + kRow / 2.0 + 4, span->microbatch);
}

static uint32_t count_rows(const jpp_spans_t* spans) {
  uint32_t rows = 0;
  size_t first = 0;
  for (uint32_t r = rank_from(spans, 0, 0); r != JPP_NONE;
       r = rank_from(spans, r + 1, first)) {
    first = rank_end(spans, first, r);
    ++rows;
  }
  return rows;
}

static jpp_status_t* append_svg(const jpp_spans_t* spans, jpp_str_t* str) {
  JPP_RETURN_IF_ERROR(check_spans(spans, kWidth));
  if (spans->count > kMostSpans) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "a picture shows up to %d task runs, the trace has %zu; draw "
                           "it in the terminal, or trace fewer microbatches",
                           kMostSpans, spans->count);
  }
  jpp__svg_begin(kLeft + kWidth + 20,
                 kTop + (double)count_rows(spans) * (kRow + kGap) + kBottom, str);
  jpp_str_append(str, "<text x=\"12\" y=\"20\" font-size=\"14\">");
  jpp__str_append_xml(str, spans->title);
  jpp_str_appendf(str, ": %.3f ms, %zu task runs</text>\n", length_of(spans),
                  spans->count);
  double top = kTop;
  size_t first = 0;
  for (uint32_t r = rank_from(spans, 0, 0); r != JPP_NONE;
       r = rank_from(spans, r + 1, first)) {
    size_t end = rank_end(spans, first, r);
    jpp_str_appendf(str,
                    "<rect x=\"%d\" y=\"%.0f\" width=\"%d\" height=\"%d\" "
                    "fill=\"#dde1e7\"/>\n<text x=\"12\" y=\"%.0f\">rank %u</text>\n",
                    kLeft, top, kWidth, kRow, top + 16, r);
    for (size_t i = first; i < end; ++i) append_span(spans, &spans->spans[i], top, str);
    top += kRow + kGap;
    first = end;
  }
  jpp_str_append(str, "</svg>\n");
  return NULL;
}

jpp_status_t* jpp_spans_svg(const jpp_spans_t* spans, char** out_text) {
  JPP_RETURN_IF_NULL(spans, out_text);
  jpp_str_t str = {0};
  jpp_status_t* status = append_svg(spans, &str);
  return jpp__str_finish_unless(status, &str, out_text);
}

jpp_status_t* jpp_spans_html(const jpp_spans_t* spans, char** out_text) {
  JPP_RETURN_IF_NULL(spans, out_text);
  jpp_str_t str = {0};
  jpp__page_begin(&str);
  jpp_status_t* status = append_svg(spans, &str);
  jpp__page_end(&str);
  return jpp__str_finish_unless(status, &str, out_text);
}
