// A trace in the Chrome trace format, as the runtime and the simulator write it:
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#ifndef JPP_CLI_TRACE_H_
#define JPP_CLI_TRACE_H_

#include "cli/json.h"
#include "jaxpp/view.h"

// A complete event: one run of a task.
typedef struct jpp_cli_event {
  const char* name;            // "bwd_i_2__0"; lives as long as the trace
  uint32_t rank;               // its thread
  uint32_t stage, microbatch;  // JPP_NONE: it does not say
  double start, duration;      // microseconds
} jpp_cli_event_t;

typedef struct jpp_cli_trace {
  json_t* root;
  jpp_cli_event_t* events;  // [num_events], at least one
  size_t num_events;
  double begin, end;  // of all events
} jpp_cli_trace_t;

// Whether a text is JSON rather than anything else that commands read.
bool jpp_cli_is_trace(const char* text);
// JPP_PARSE_ERROR for what is no trace, or has no run of a task. What was made stays in
// *out_trace: deinit it in any case.
jpp_status_t* jpp_cli_trace_parse(const char* file, const char* text, size_t length,
                                  jpp_cli_trace_t* out_trace) JPP_MUST_USE;
// The same of a file.
jpp_status_t* jpp_cli_trace_read(const char* file,
                                 jpp_cli_trace_t* out_trace) JPP_MUST_USE;
void jpp_cli_trace_deinit(jpp_cli_trace_t* trace);
// Sorts the events by rank, then by start.
void jpp_cli_trace_sort(jpp_cli_trace_t* trace);

// The kind that the event's name says; JPP_TASK_OUTER for names of no stage's task.
jpp_task_kind_t jpp_cli_event_kind(const jpp_cli_event_t* event);

// The events as spans, for pictures; sorts them. Free the spans with jpp_free().
jpp_status_t* jpp_cli_trace_spans(jpp_cli_trace_t* trace, const char* title,
                                  jpp_spans_t* out_spans) JPP_MUST_USE;

#endif  // JPP_CLI_TRACE_H_
