// Pictures of a trace: a row a rank, what ran when.
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "cli/trace.h"

enum { kLeft = 70, kTop = 48, kRow = 24, kGap = 8, kBottom = 30, kWidth = 1600 };
enum { kMostEvents = 1000000 };

typedef enum ink { INK_FORWARD, INK_BACKWARD, INK_WEIGHT, INK_OTHER } ink_t;

static ink_t event_ink(const jpp_cli_event_t* event) {
  if (!strncmp(event->name, "fwd", 3)) return INK_FORWARD;
  if (!strncmp(event->name, "bwd_w", 5)) return INK_WEIGHT;
  return strncmp(event->name, "bwd", 3) ? INK_OTHER : INK_BACKWARD;
}

// The end of the events from `first` on that are of the same rank.
static size_t rank_end(const jpp_cli_trace_t* trace, size_t first) {
  size_t end = first;
  while (end < trace->events.count &&
         trace->events.data[end].rank == trace->events.data[first].rank) {
    ++end;
  }
  return end;
}

static double length_of(const jpp_cli_trace_t* trace) {
  return trace->end > trace->begin ? trace->end - trace->begin : 1;
}

static double busy_of(const jpp_cli_trace_t* trace, size_t first, size_t end) {
  double busy = 0, until = trace->begin;
  for (size_t i = first; i < end; ++i) {
    const jpp_cli_event_t* event = &trace->events.data[i];
    double from = event->start > until ? event->start : until;
    double to = event->start + event->duration;
    if (to <= from) continue;
    busy += to - from;
    until = to;
  }
  return busy / length_of(trace);
}

// --- The terminal ---------------------------------------------------------------------

static char event_mark(const jpp_cli_event_t* event) {
  static const char kFirst[] = {
      [INK_FORWARD] = '0', [INK_BACKWARD] = 'a', [INK_WEIGHT] = 'A'};
  ink_t ink = event_ink(event);
  if (ink == INK_OTHER || event->microbatch == JPP_NONE) return '#';
  return (char)(kFirst[ink] + event->microbatch % 10);
}

static const char* ink_color(ink_t ink) {
  static const char* const kColors[] = {[INK_FORWARD] = "\x1b[34m",
                                        [INK_BACKWARD] = "\x1b[32m",
                                        [INK_WEIGHT] = "\x1b[33m",
                                        [INK_OTHER] = "\x1b[36m"};
  return kColors[ink];
}

// A column shows the event that runs in its middle; of several the one that began last.
static void append_row(const jpp_cli_trace_t* trace, size_t first, size_t end,
                       uint32_t columns, bool color, jpp_str_t* out) {
  size_t next = first, shown = end;
  const char* colored = NULL;
  for (uint32_t c = 0; c < columns; ++c) {
    double time = trace->begin + length_of(trace) * (c + 0.5) / columns;
    for (; next < end && trace->events.data[next].start <= time; ++next) shown = next;
    const jpp_cli_event_t* event = shown < end ? &trace->events.data[shown] : NULL;
    if (event && event->start + event->duration <= time) event = NULL;
    const char* wanted = event ? ink_color(event_ink(event)) : NULL;
    if (color && wanted != colored) jpp_str_append(out, wanted ? wanted : "\x1b[0m");
    colored = wanted;
    char mark = event ? event_mark(event) : '.';
    jpp_str_append_n(out, &mark, 1);
  }
  if (color && colored) jpp_str_append(out, "\x1b[0m");
}

void jpp_cli_trace_draw(jpp_cli_trace_t* trace, const char* title, uint32_t columns,
                        bool color, jpp_str_t* out) {
  jpp_cli_trace_sort(trace);
  jpp_str_appendf(
      out,
      "%s: %.3f ms, %zu task runs\n"
      "0-9 forward, a-j backward (of inputs), A-J of weights, # other tasks, . "
      "idle; %%: busy\n",
      title, (trace->end - trace->begin) / 1000, trace->events.count);
  for (size_t first = 0, end; first < trace->events.count; first = end) {
    end = rank_end(trace, first);
    jpp_str_appendf(out, "rank %3u  ", trace->events.data[first].rank);
    append_row(trace, first, end, columns, color, out);
    jpp_str_appendf(out, "  %3.0f%%\n", 100 * busy_of(trace, first, end));
  }
}

// --- SVG ------------------------------------------------------------------------------

static void append_event(const jpp_cli_trace_t* trace, const jpp_cli_event_t* event,
                         double top, jpp_str_t* out) {
  static const char* const kFills[] = {[INK_FORWARD] = "#4e79a7",
                                       [INK_BACKWARD] = "#59a14f",
                                       [INK_WEIGHT] = "#edc948",
                                       [INK_OTHER] = "#bab0ac"};
  double scale = kWidth / length_of(trace);
  double x = kLeft + (event->start - trace->begin) * scale;
  double width = event->duration * scale;
  jpp_str_appendf(out,
                  "<rect fill=\"%s\" stroke=\"#fff\" stroke-width=\".5\" x=\"%.2f\" "
                  "y=\"%.0f\" width=\"%.2f\" height=\"%d\"><title>",
                  kFills[event_ink(event)], x, top, width, kRow);
  jpp_str_append_xml(out, event->name);
  jpp_str_appendf(out, ": rank %u, %.6g to %.6g ms</title></rect>\n", event->rank,
                  (event->start - trace->begin) / 1000,
                  (event->start - trace->begin + event->duration) / 1000);
  if (event->microbatch == JPP_NONE || width < 16) return;
  jpp_str_appendf(out,
                  "<text text-anchor=\"middle\" font-size=\"10\" fill=\"#fff\" "
                  "x=\"%.2f\" y=\"%.0f\" pointer-events=\"none\">%u</text>\n",
                  x + width / 2, top + kRow / 2.0 + 4, event->microbatch);
}

static uint32_t count_ranks(const jpp_cli_trace_t* trace) {
  uint32_t ranks = 0;
  for (size_t first = 0; first < trace->events.count; ++ranks) {
    first = rank_end(trace, first);
  }
  return ranks;
}

jpp_status_t* jpp_cli_trace_draw_svg(jpp_cli_trace_t* trace, const char* title,
                                     jpp_str_t* out) {
  if (trace->events.count > kMostEvents) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "a picture shows up to %d task runs, the trace has %zu; draw "
                           "it in the terminal, or trace fewer microbatches",
                           kMostEvents, trace->events.count);
  }
  jpp_cli_trace_sort(trace);
  int width = kLeft + kWidth + 20;
  double height = kTop + (double)count_ranks(trace) * (kRow + kGap) + kBottom;
  jpp_str_appendf(out,
                  "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" "
                  "height=\"%.0f\" viewBox=\"0 0 %d %.0f\" font-family=\"sans-serif\" "
                  "font-size=\"11\" fill=\"#222\">\n"
                  "<rect width=\"100%%\" height=\"100%%\" fill=\"#fff\"/>\n"
                  "<text x=\"12\" y=\"20\" font-size=\"14\">",
                  width, height, width, height);
  jpp_str_append_xml(out, title);
  jpp_str_appendf(out, ": %.3f ms, %zu task runs</text>\n",
                  (trace->end - trace->begin) / 1000, trace->events.count);
  double top = kTop;
  for (size_t first = 0, end; first < trace->events.count; first = end) {
    end = rank_end(trace, first);
    jpp_str_appendf(out,
                    "<rect x=\"%d\" y=\"%.0f\" width=\"%d\" height=\"%d\" "
                    "fill=\"#dde1e7\"/>\n<text x=\"12\" y=\"%.0f\">rank %u</text>\n",
                    kLeft, top, kWidth, kRow, top + 16, trace->events.data[first].rank);
    for (size_t i = first; i < end; ++i) {
      append_event(trace, &trace->events.data[i], top, out);
    }
    top += kRow + kGap;
  }
  jpp_str_append(out, "</svg>\n");
  return NULL;
}
