// Traces as the runtime and the simulator write them, read back.
#include "cli/trace.h"

#include <stdlib.h>
#include <string.h>

#include "cli/cli.h"
#include "jaxpp/file.h"

static const double kMostTime = 1e15;  // 31 years of microseconds

bool jpp_cli_is_trace(const char* text) {
  char first = text[strspn(text, " \n\r\t")];
  return first == '{' || first == '[';
}

static bool is_time(double time, double least) {
  return time >= least && time <= kMostTime;
}

static uint32_t number_or_none(const json_t* number) {
  json_int_t value = json_is_integer(number) ? json_integer_value(number) : -1;
  return value >= 0 && value < JPP_NONE ? (uint32_t)value : JPP_NONE;
}

// False for what is no run of a task.
static bool read_event(const json_t* item, jpp_cli_event_t* out_event) {
  const char* phase = json_string_value(json_object_get(item, "ph"));
  const json_t* args = json_object_get(item, "args");
  *out_event = (jpp_cli_event_t){
      .name = json_string_value(json_object_get(item, "name")),
      .rank = number_or_none(json_object_get(item, "tid")),
      .stage = number_or_none(json_object_get(args, "stage")),
      .microbatch = number_or_none(json_object_get(args, "microbatch")),
      .start = json_number_value(json_object_get(item, "ts")),
      .duration = json_number_value(json_object_get(item, "dur")),
  };
  return phase && !strcmp(phase, "X") && out_event->name;
}

static jpp_status_t* add_event(const char* file, size_t index, jpp_cli_event_t event,
                               jpp_cli_trace_t* trace) {
  if (event.rank == JPP_NONE || !is_time(event.start, -kMostTime) ||
      !is_time(event.duration, 0)) {
    return jpp_status_make(JPP_PARSE_ERROR,
                           "%s:1: traceEvents[%zu], '%.60s': expected a rank as tid, and "
                           "ts and dur (at least 0) of at most %g microseconds",
                           file, index, event.name, kMostTime);
  }
  bool first = !trace->num_events;
  double end = event.start + event.duration;
  if (first || event.start < trace->begin) trace->begin = event.start;
  if (first || end > trace->end) trace->end = end;
  trace->events[trace->num_events++] = event;
  return NULL;
}

jpp_status_t* jpp_cli_trace_parse(const char* file, const char* text, size_t length,
                                  jpp_cli_trace_t* out_trace) {
  *out_trace = (jpp_cli_trace_t){0};
  JPP_RETURN_IF_ERROR(jpp_cli_json_parse(file, text, length, &out_trace->root));
  const json_t* events = json_is_array(out_trace->root)
                             ? out_trace->root
                             : json_object_get(out_trace->root, "traceEvents");
  size_t count = json_array_size(events);
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(count, &out_trace->events));
  for (size_t i = 0; i < count; ++i) {
    jpp_cli_event_t event;
    if (!read_event(json_array_get(events, i), &event)) continue;
    JPP_RETURN_IF_ERROR(add_event(file, i, event, out_trace));
  }
  if (out_trace->num_events) return NULL;
  return jpp_status_make(JPP_PARSE_ERROR, "%s:1: expected traceEvents with ph \"X\"",
                         file);
}

jpp_status_t* jpp_cli_trace_read(const char* file, jpp_cli_trace_t* out_trace) {
  *out_trace = (jpp_cli_trace_t){0};
  char* text = NULL;
  size_t length = 0;
  JPP_RETURN_IF_ERROR(jpp_file_read(file, &text, &length));
  jpp_status_t* status = jpp_cli_trace_parse(file, text, length, out_trace);
  jpp_text_free(text);
  return status;
}

void jpp_cli_trace_deinit(jpp_cli_trace_t* trace) {
  jpp_free(trace->events);
  json_decref(trace->root);
  *trace = (jpp_cli_trace_t){0};
}

static int compare_events(const void* left, const void* right) {
  const jpp_cli_event_t *a = left, *b = right;
  if (a->rank != b->rank) return a->rank < b->rank ? -1 : 1;
  return (a->start > b->start) - (a->start < b->start);
}

void jpp_cli_trace_sort(jpp_cli_trace_t* trace) {
  qsort(trace->events, trace->num_events, sizeof(*trace->events), compare_events);
}

jpp_task_kind_t jpp_cli_event_kind(const jpp_cli_event_t* event) {
  // "bwd_i_2" begins as "bwd" does: the longer names first.
  static const jpp_task_kind_t kLongestFirst[] = {JPP_TASK_FWD, JPP_TASK_BWD_I,
                                                  JPP_TASK_BWD_W, JPP_TASK_BWD};
  for (size_t i = 0; i < sizeof(kLongestFirst) / sizeof(*kLongestFirst); ++i) {
    const char* name = jpp_task_kind_name(kLongestFirst[i]);
    if (!strncmp(event->name, name, strlen(name))) return kLongestFirst[i];
  }
  return JPP_TASK_OUTER;
}

jpp_status_t* jpp_cli_trace_spans(jpp_cli_trace_t* trace, const char* title,
                                  jpp_spans_t* out_spans) {
  jpp_span_t* spans = NULL;
  *out_spans = (jpp_spans_t){.title = title, .count = trace->num_events};
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(trace->num_events, &spans));
  jpp_cli_trace_sort(trace);
  for (size_t i = 0; i < trace->num_events; ++i) {
    const jpp_cli_event_t* event = &trace->events[i];
    spans[i] = (jpp_span_t){.name = event->name,
                            .kind = jpp_cli_event_kind(event),
                            .rank = event->rank,
                            .microbatch = event->microbatch,
                            .start = event->start / 1000,
                            .end = (event->start + event->duration) / 1000};
  }
  out_spans->spans = spans;
  out_spans->begin = trace->begin / 1000;
  // Runs that take no time are still drawn, on an axis of a microsecond.
  bool some = trace->end > trace->begin;
  out_spans->end = (some ? trace->end : trace->begin + 1) / 1000;
  return NULL;
}
