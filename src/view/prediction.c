// Predicts from traces, and prints predictions as text, JSON and traces.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/arena.h"
#include "base/json.h"
#include "base/null.h"
#include "base/str.h"
#include "base/struct_size.h"
#include "jaxpp/view.h"

// --- Task times from a trace ----------------------------------------------------------

enum { kMostRanks = 1 << 20 };  // as in a schedule

typedef struct named_task {
  const char* name;
  size_t length;
  uint32_t task;
} named_task_t;

static int by_name(const void* left, const void* right) {
  const named_task_t *a = left, *b = right;
  int order = memcmp(a->name, b->name, a->length < b->length ? a->length : b->length);
  return order ? order : (a->length > b->length) - (a->length < b->length);
}

// A span is named after its task, followed by "__3" for microbatch 3.
static const named_task_t* find_task(const named_task_t* tasks, uint32_t count,
                                     const jpp_span_t* span) {
  const char* end = strstr(span->name, "__");
  if (span->microbatch == JPP_NONE || !end) end = span->name + strlen(span->name);
  named_task_t key = {.name = span->name, .length = (size_t)(end - span->name)};
  return bsearch(&key, tasks, count, sizeof(*tasks), by_name);
}

static int by_start(const void* left, const void* right) {
  const jpp_task_run_t *a = left, *b = right;
  if (a->task != b->task) return a->task < b->task ? -1 : 1;
  if (a->microbatch != b->microbatch) return a->microbatch < b->microbatch ? -1 : 1;
  return (a->start > b->start) - (a->start < b->start);
}

// Numbers the steps of the runs by how often each task has run: a trace does not say
// where a step ends.
static void number_steps(jpp_task_run_t* runs, uint64_t count) {
  qsort(runs, count, sizeof(*runs), by_start);
  for (uint64_t i = 1; i < count; ++i) {
    const jpp_task_run_t* before = &runs[i - 1];
    bool again = runs[i].task == before->task && runs[i].microbatch == before->microbatch;
    if (again) runs[i].step = before->step + 1;
  }
}

// Finds the spans that are runs of the plan's tasks; *out_ranks is their largest rank +
// 1.
static jpp_status_t* find_runs(const jpp_spans_t* trace, const jpp_staged_t* staged,
                               jpp_arena_t* arena, jpp_task_run_t** out_runs,
                               uint64_t* out_count, uint32_t* out_ranks) {
  named_task_t* tasks = NULL;
  *out_count = 0;
  *out_ranks = 0;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, trace->count, out_runs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, staged->num_tasks, &tasks));
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const char* name = staged->tasks[t].name;
    tasks[t] = (named_task_t){name, strlen(name), t};
  }
  qsort(tasks, staged->num_tasks, sizeof(*tasks), by_name);
  for (size_t i = 0; i < trace->count; ++i) {
    const jpp_span_t* span = &trace->spans[i];
    const named_task_t* found = find_task(tasks, staged->num_tasks, span);
    if (!found) continue;
    if (span->rank >= kMostRanks) {
      return jpp_status_make(
          JPP_PARSE_ERROR,
          "%s: '%.60s' at %g ms: expected a rank below %d as tid, found "
          "%u",
          trace->title, span->name, span->start, kMostRanks, span->rank);
    }
    if (span->rank >= *out_ranks) *out_ranks = span->rank + 1;
    (*out_runs)[(*out_count)++] = (jpp_task_run_t){.rank = span->rank,
                                                   .task = found->task,
                                                   .microbatch = span->microbatch,
                                                   .start = span->start,
                                                   .end = span->end};
  }
  number_steps(*out_runs, *out_count);
  return NULL;
}

// Tasks without ops do not run, and take no time.
static jpp_status_t* check_times(const jpp_spans_t* trace, const jpp_staged_t* staged,
                                 const uint64_t* first_times) {
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    if (first_times[t] < first_times[t + 1] || !staged->tasks[t].num_ops) continue;
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "%s: expected a run of each of the plan's tasks, found none "
        "of %s; trace a step with the same stages and the same kinds "
        "of backward tasks, and give the traces of all processes of its job",
        trace->title, staged->tasks[t].name);
  }
  return NULL;
}

// Measures task times, and the machine's latency if it is not given.
static jpp_status_t* measure_trace(const jpp_spans_t* trace, const jpp_plan_t* plan,
                                   jpp_machine_t* machine, jpp_arena_t* arena,
                                   jpp_predict_options_t* options) {
  double* times = NULL;
  uint64_t* first_times = NULL;
  jpp_task_run_t* runs = NULL;
  uint64_t count = 0;
  uint32_t ranks = 0, tasks = plan->staged->num_tasks;
  JPP_RETURN_IF_ERROR(find_runs(trace, plan->staged, arena, &runs, &count, &ranks));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, trace->count, &times));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, (size_t)tasks + 1, &first_times));
  if (ranks > plan->ranks) {
    // The lists are for the plan's ranks. All ranks of the trace ran on one host, so it
    // does not matter which of them a run was on.
    jpp_machine_t measured = *machine;
    measured.rank_host = measured.rank_process = measured.rank_device = NULL;
    measured.links = NULL;
    for (uint64_t i = 0; i < count; ++i) runs[i].rank = 0;
    JPP_RETURN_IF_ERROR(jpp_predict_task_times(&measured, plan->ranks, runs, count, tasks,
                                               times, first_times));
  } else {
    JPP_RETURN_IF_ERROR(jpp_predict_task_times(machine, plan->ranks, runs, count, tasks,
                                               times, first_times));
    if (machine->link.latency == 0) {
      JPP_RETURN_IF_ERROR(
          jpp_predict_latency(plan, machine, runs, count, &machine->link.latency));
    }
  }
  options->task_times = times;
  options->first_times = first_times;
  return check_times(trace, plan->staged, first_times);
}

jpp_status_t* jpp_spans_predict(const jpp_spans_t* trace, const jpp_plan_t* plan,
                                const jpp_predict_options_t* options,
                                jpp_prediction_t** out_prediction) {
  JPP_RETURN_IF_NULL(trace, plan, options, out_prediction);
  *out_prediction = NULL;
  jpp_predict_options_t full;
  jpp_machine_t machine = {.struct_size = sizeof(machine)};
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_predict_options_t, steps_in_flight, options, &full));
  if (full.machine) {
    JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_machine_t, links, full.machine, &machine));
  }
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = measure_trace(trace, plan, &machine, &scratch, &full);
  if (!status) {
    full.machine = &machine;
    status = jpp_predict(plan, &full, out_prediction);
  }
  jpp__arena_deinit(&scratch);
  return status;
}

// --- As text --------------------------------------------------------------------------

static double end_of_rank(const jpp_prediction_t* prediction, uint32_t rank) {
  double end = 0;
  for (uint64_t i = 0; i < prediction->num_runs; ++i) {
    const jpp_task_run_t* run = &prediction->runs[i];
    if (run->rank == rank && !run->step) end = fmax(end, run->end);
  }
  return end;
}

static void append_prediction(const jpp_prediction_t* prediction,
                              const jpp_plan_costs_t* costs, jpp_str_t* out) {
  jpp_str_appendf(out, "step: %.3f ms, bubble %.1f%%\n", prediction->makespan,
                  100 * prediction->bubble);
  if (prediction->steps > 1) {
    jpp_str_appendf(out, "%u steps: %.3f ms from step to step\n", prediction->steps,
                    prediction->period);
  }
  jpp_str_append(out, "rank   tasks   busy (ms)    end (ms)   peak bytes\n");
  for (uint32_t r = 0; r < costs->num_ranks; ++r) {
    jpp_str_appendf(out, "%4u %7u %11.3f %11.3f %12llu\n", r, costs->ranks[r].tasks,
                    prediction->busy[r], end_of_rank(prediction, r),
                    (unsigned long long)costs->ranks[r].peak_bytes);
  }
  if (costs->num_links) jpp_str_append(out, "    link  messages        bytes\n");
  for (uint32_t l = 0; l < costs->num_links; ++l) {
    const jpp_link_costs_t* link = &costs->links[l];
    char ends[32];
    snprintf(ends, sizeof(ends), "%u -> %u", link->src, link->dst);
    jpp_str_appendf(out, "%8s %9llu %12llu\n", ends, (unsigned long long)link->messages,
                    (unsigned long long)link->bytes);
  }
}

jpp_status_t* jpp_prediction_print(const jpp_prediction_t* prediction, char** out_text) {
  JPP_RETURN_IF_NULL(prediction, out_text);
  jpp_plan_costs_t* costs = NULL;
  jpp_str_t str = {0};
  JPP_RETURN_IF_ERROR(jpp_plan_costs(prediction->plan, &costs));
  append_prediction(prediction, costs, &str);
  jpp_plan_costs_destroy(costs);
  return jpp_str_finish(&str, out_text);
}

static json_t* ranks_json(const jpp_prediction_t* prediction,
                          const jpp_plan_costs_t* costs) {
  json_t* ranks = json_array();
  for (uint32_t r = 0; r < costs->num_ranks; ++r) {
    jpp__json_append(
        &ranks,
        json_pack("{s:I, s:f, s:f, s:I}", "tasks", (json_int_t)costs->ranks[r].tasks,
                  "busy", prediction->busy[r], "end", end_of_rank(prediction, r),
                  "peak_bytes", (json_int_t)costs->ranks[r].peak_bytes));
  }
  return ranks;
}

static json_t* links_json(const jpp_plan_costs_t* costs) {
  json_t* links = json_array();
  for (uint32_t l = 0; l < costs->num_links; ++l) {
    const jpp_link_costs_t* link = &costs->links[l];
    jpp__json_append(
        &links, json_pack("{s:I, s:I, s:I, s:I}", "src", (json_int_t)link->src, "dst",
                          (json_int_t)link->dst, "messages", (json_int_t)link->messages,
                          "bytes", (json_int_t)link->bytes));
  }
  return links;
}

jpp_status_t* jpp_prediction_print_json(const jpp_prediction_t* prediction,
                                        char** out_text) {
  JPP_RETURN_IF_NULL(prediction, out_text);
  jpp_plan_costs_t* costs = NULL;
  jpp_str_t str = {0};
  JPP_RETURN_IF_ERROR(jpp_plan_costs(prediction->plan, &costs));
  jpp__json_take(
      json_pack("{s:f, s:f, s:f, s:o, s:o}", "makespan", prediction->makespan, "period",
                prediction->period, "bubble", prediction->bubble, "ranks",
                ranks_json(prediction, costs), "links", links_json(costs)),
      JSON_INDENT(2), &str);
  jpp_str_append(&str, "\n");
  jpp_plan_costs_destroy(costs);
  return jpp_str_finish(&str, out_text);
}

// --- As a trace -----------------------------------------------------------------------

enum { kNameSize = 96 };

static jpp_status_t* make_spans(const jpp_prediction_t* prediction, jpp_arena_t* arena,
                                jpp_spans_t* spans) {
  const jpp_staged_t* staged = prediction->plan->staged;
  jpp_span_t* list = NULL;
  char(*names)[kNameSize] = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, prediction->num_runs, &list));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, prediction->num_runs, &names));
  for (uint64_t i = 0; i < prediction->num_runs; ++i) {
    const jpp_task_run_t* run = &prediction->runs[i];
    const jpp_task_t* task = &staged->tasks[run->task];
    if (!task->num_ops) continue;
    snprintf(names[i], kNameSize, run->microbatch == JPP_NONE ? "%s" : "%s__%u",
             task->name, run->microbatch);
    list[spans->count++] = (jpp_span_t){.name = names[i],
                                        .kind = task->kind,
                                        .rank = run->rank,
                                        .stage = task->stage,
                                        .microbatch = run->microbatch,
                                        .start = run->start,
                                        .end = run->end};
  }
  spans->title = staged->graph->name;
  spans->spans = list;
  return NULL;
}

jpp_status_t* jpp_prediction_to_trace(const jpp_prediction_t* prediction,
                                      char** out_text) {
  JPP_RETURN_IF_NULL(prediction, out_text);
  jpp_spans_t spans = {0};
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = make_spans(prediction, &scratch, &spans);
  if (!status) status = jpp_spans_to_json(&spans, out_text);
  jpp__arena_deinit(&scratch);
  return status;
}
