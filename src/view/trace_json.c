// A trace in the Chrome trace format:
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#include <stdio.h>

#include "base/str.h"
#include "base/utf8.h"
#include "jaxpp/view.h"

enum { kNameSize = 96 };

// "fwd_2__0", "after_loop_0_1"; returns `buffer`.
static const char* run_name(const jpp_trace_t* trace, const jpp_trace_run_t* run,
                            char buffer[kNameSize]) {
  const char* task = trace->plan->staged->tasks[run->task].name;
  if (run->microbatch == JPP_NONE) {
    snprintf(buffer, kNameSize, "%s", task);
  } else {
    snprintf(buffer, kNameSize, "%s__%u", task, run->microbatch);
  }
  return buffer;
}

static const char* category(const jpp_task_t* task) {
  if (task->kind == JPP_TASK_OUTER) return "outer";
  return task->kind == JPP_TASK_FWD ? "forward" : "backward";
}

// Nanoseconds as microseconds.
static void append_time(jpp_str_t* str, const char* key, int64_t nanoseconds) {
  jpp_str_appendf(str, ",\"%s\":%lld.%03d", key, (long long)(nanoseconds / 1000),
                  (int)(nanoseconds % 1000));
}

static void append_run(jpp_str_t* str, const jpp_trace_t* trace,
                       const jpp_trace_run_t* run) {
  const jpp_task_t* task = &trace->plan->staged->tasks[run->task];
  char name[kNameSize];
  jpp_str_append(str, ",\n{\"ph\":\"X\",\"name\":");
  jpp_str_append_json(str, run_name(trace, run, name));
  jpp_str_appendf(str, ",\"cat\":\"%s\",\"pid\":0,\"tid\":%u", category(task), run->rank);
  append_time(str, "ts", run->start);
  append_time(str, "dur", run->end - run->start);
  jpp_str_append(str, ",\"args\":{");
  if (run->microbatch != JPP_NONE) {
    jpp_str_appendf(str, "\"microbatch\":%u,\"stage\":%u", run->microbatch, task->stage);
  }
  jpp_str_append(str, "}}");
}

static void append_metadata(jpp_str_t* str, const jpp_trace_t* trace) {
  jpp_str_append(str, "{\"ph\":\"M\",\"pid\":0,\"name\":\"process_name\",\"args\":");
  jpp_str_append(str, "{\"name\":");
  jpp_str_append_json(str, trace->plan->staged->graph->name);
  jpp_str_append(str, "}}");
  for (uint32_t r = 0; r < trace->plan->ranks; ++r) {
    jpp_str_appendf(str,
                    ",\n{\"ph\":\"M\",\"pid\":0,\"tid\":%u,\"name\":\"thread_name\","
                    "\"args\":{\"name\":\"rank %u\"}}",
                    r, r);
    jpp_str_appendf(str,
                    ",\n{\"ph\":\"M\",\"pid\":0,\"tid\":%u,"
                    "\"name\":\"thread_sort_index\",\"args\":{\"sort_index\":%u}}",
                    r, r);
  }
}

jpp_status_t* jpp_trace_to_json(const jpp_trace_t* trace, char** out_text) {
  jpp_str_t str = {0};
  jpp_str_append(&str, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n");
  append_metadata(&str, trace);
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    append_run(&str, trace, &trace->runs[i]);
  }
  jpp_str_append(&str, "\n]}\n");
  return jpp_str_finish(&str, out_text);
}
