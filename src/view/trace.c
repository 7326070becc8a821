// A measured step, as spans for the pictures and as a Chrome trace.
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/null.h"
#include "jaxpp/view.h"
#include "view/chrome.h"

enum { kNameSize = 96 };

// Writes "fwd_2__0" or "after_loop_0_1"; returns `buffer`.
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

// `offset`: nanoseconds from the start of the first trace to the start of this one.
static void append_events(const jpp_trace_t* trace, int64_t offset, jpp_str_t* str) {
  const jpp_staged_t* staged = trace->plan->staged;
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    const jpp_trace_run_t* run = &trace->runs[i];
    char name[kNameSize];
    jpp_chrome_event_t event = {.name = run_name(trace, run, name),
                                .kind = staged->tasks[run->task].kind,
                                .rank = run->rank,
                                .start = (double)(offset + run->start) / 1e3,
                                .duration = (double)(run->end - run->start) / 1e3,
                                .stage = staged->tasks[run->task].stage,
                                .microbatch = run->microbatch};
    jpp__chrome_append_event(&event, str);
  }
}

jpp_status_t* jpp_trace_to_json(const jpp_trace_t* const* traces, uint32_t count,
                                char** out_text) {
  JPP_RETURN_IF_NULL(traces, out_text);
  const jpp_plan_t* plan = traces[0]->plan;
  jpp_str_t str = {0};
  jpp__chrome_begin(traces[0]->step, traces[0]->clock, &str);
  jpp__chrome_append_process(plan->staged->graph->name, 0, &str);
  for (uint32_t r = 0; r < plan->ranks; ++r) jpp__chrome_append_rank(0, r, &str);
  for (uint32_t t = 0; t < count; ++t) {
    append_events(traces[t], traces[t]->start - traces[0]->start, &str);
  }
  jpp__chrome_end(&str);
  return jpp_str_finish(&str, out_text);
}
