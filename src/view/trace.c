// A measured step, as spans for the pictures and as a Chrome trace.
#include <stdio.h>

#include "base/alloc.h"
#include "jaxpp/view.h"
#include "view/chrome.h"

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

jpp_status_t* jpp_trace_to_json(const jpp_trace_t* trace, char** out_text) {
  const jpp_staged_t* staged = trace->plan->staged;
  jpp_str_t str = {0};
  jpp_chrome_begin(&str);
  jpp_chrome_append_process(staged->graph->name, 0, trace->plan->ranks, &str);
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    const jpp_trace_run_t* run = &trace->runs[i];
    char name[kNameSize];
    jpp_chrome_event_t event = {.name = run_name(trace, run, name),
                                .kind = staged->tasks[run->task].kind,
                                .rank = run->rank,
                                .start = (double)run->start / 1e3,
                                .duration = (double)(run->end - run->start) / 1e3,
                                .stage = staged->tasks[run->task].stage,
                                .microbatch = run->microbatch};
    jpp_chrome_append_event(&event, &str);
  }
  jpp_chrome_end(&str);
  return jpp_str_finish(&str, out_text);
}

jpp_status_t* jpp_trace_draw(const jpp_trace_t* trace, uint32_t columns, bool color,
                             char** out_text) {
  const jpp_staged_t* staged = trace->plan->staged;
  jpp_span_t* spans = NULL;
  *out_text = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(trace->num_runs, &spans));
  for (uint64_t i = 0; i < trace->num_runs; ++i) {
    const jpp_trace_run_t* run = &trace->runs[i];
    spans[i] = (jpp_span_t){.name = staged->tasks[run->task].name,
                            .kind = staged->tasks[run->task].kind,
                            .rank = run->rank,
                            .microbatch = run->microbatch,
                            .start = (double)run->start / 1e6,
                            .end = (double)run->end / 1e6};
  }
  jpp_spans_t all = {.title = staged->graph->name,
                     .spans = spans,
                     .count = trace->num_runs,
                     .ranks = trace->plan->ranks,
                     .end = (double)trace->length / 1e6};
  jpp_status_t* status = jpp_spans_draw(&all, columns, color, out_text);
  jpp_free(spans);
  return status;
}
