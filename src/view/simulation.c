// A simulation as JSON, as text, and as a Chrome trace.
#include <math.h>

#include "base/json.h"
#include "base/null.h"
#include "jaxpp/view.h"
#include "view/chrome.h"

// Sums of fractions such as 1/3 differ from a round number by rounding errors.
static double rounded(double value) {
  double near = nearbyint(value * 1e9) / 1e9;
  return fabs(near - value) <= 1e-12 * (1 + fabs(value)) ? near : value;
}

// 12 digits: rounding errors change only later ones.
static jpp_status_t* print_json(json_t* value, char** out_text) {
  jpp_str_t str = {0};
  jpp__json_take(value, JSON_INDENT(1) | JSON_REAL_PRECISION(12), &str);
  jpp_str_append(&str, "\n");
  return jpp_str_finish(&str, out_text);
}

jpp_status_t* jpp_simulation_print_json(const jpp_simulation_t* simulation,
                                        char** out_text) {
  JPP_RETURN_IF_NULL(simulation, out_text);
  json_t *peaks = json_array(), *hosts = json_array(), *activations = json_array();
  for (uint32_t r = 0; r < simulation->schedule->ranks; ++r) {
    jpp__json_append(&peaks, json_real(rounded(simulation->ranks[r].peak)));
    jpp__json_append(&hosts, json_real(rounded(simulation->host_peaks[r])));
    jpp__json_append(&activations,
                     json_string(jpp_activations_name(simulation->activations[r])));
  }
  return print_json(json_pack("{s:f, s:f, s:f, s:f, s:f, s:I, s:o, s:o, s:o}",      //
                              "makespan", rounded(simulation->makespan),            //
                              "bubble_global", rounded(simulation->bubble_global),  //
                              "bubble_span", rounded(simulation->bubble_span),      //
                              "step", rounded(simulation->step),                    //
                              "utilisation", rounded(simulation->utilisation),      //
                              "tasks", (json_int_t)simulation->tasks,               //
                              "peak_microbatches", peaks,                           //
                              "host_peak_microbatches", hosts,                      //
                              "activations", activations),
                    out_text);
}

enum { kMostRanks = 64 };

static void append_rank(const jpp_simulation_t* simulation, uint32_t r, jpp_str_t* str) {
  const jpp_simulated_rank_t* rank = &simulation->ranks[r];
  double waits = rank->end - rank->begin - rank->work;
  jpp_str_appendf(str, "%4u %10.6g %10.6g %10.6g %10.6g %10.6g", r, rank->begin,
                  rank->end, rank->work, rounded(waits), rank->peak);
  if (simulation->schedule->rows[r].count) {
    char name[JPP_TASK_NAME_SIZE];
    jpp_str_appendf(
        str, " at %s",
        jpp_task_name(&simulation->schedule->rows[r].tasks[rank->peak_entry], name));
  }
  jpp_activations_t activations = simulation->activations[r];
  if (activations) jpp_str_appendf(str, ", %s", jpp_activations_name(activations));
  if (simulation->moves[r]) {
    jpp_str_appendf(str, ", at most %.6g on the host", simulation->host_peaks[r]);
  }
  jpp_str_append(str, "\n");
}

jpp_status_t* jpp_simulation_print(const jpp_simulation_t* simulation, char** out_text) {
  JPP_RETURN_IF_NULL(simulation, out_text);
  const jpp_schedule_t* schedule = simulation->schedule;
  jpp_str_t str = {0};
  jpp_str_appendf(&str,
                  "schedule %s: %u stages, %u ranks, %u microbatches, %llu tasks%s\n",
                  schedule->name, schedule->stages, schedule->ranks,
                  schedule->microbatches, (unsigned long long)simulation->tasks,
                  simulation->streams > 1 ? ", several streams a rank" : "");
  jpp_str_appendf(&str,
                  "makespan %.6g, bubble %.6g (of all), %.6g (inside a rank), step %.6g, "
                  "utilisation %.1f%%\n",
                  rounded(simulation->makespan), rounded(simulation->bubble_global),
                  rounded(simulation->bubble_span), rounded(simulation->step),
                  100 * simulation->utilisation);
  jpp_str_append(&str,
                 "rank      begin        end       work      waits  peak microbatches\n");
  for (uint32_t r = 0; r < schedule->ranks && r < kMostRanks; ++r) {
    append_rank(simulation, r, &str);
  }
  if (schedule->ranks > kMostRanks) {
    jpp_str_appendf(&str, "... and %u more ranks\n", schedule->ranks - kMostRanks);
  }
  return jpp_str_finish(&str, out_text);
}

// --- One SPMD program -----------------------------------------------------------------

static void append_spmd(const char* form, const jpp_spmd_simulation_t* spmd,
                        jpp_str_t* str) {
  jpp_str_appendf(
      str,
      "%s: makespan %.6g, %llu turns of %.6g and %.6g back, utilisation %.1f%%\n  wasted "
      "%.1f%%, recomputed %.1f%%, keeps %.6g microbatches%s\n",
      form, rounded(spmd->makespan), (unsigned long long)spmd->turns,
      rounded(spmd->forward_turn), rounded(spmd->backward_turn), 100 * spmd->utilisation,
      100 * spmd->lost, 100 * spmd->rematerialised, rounded(spmd->peak),
      spmd->rematerialised > 0 ? "' inputs" : "");
}

jpp_status_t* jpp_spmd_print(const jpp_spmd_simulation_t* kept,
                             const jpp_spmd_simulation_t* rematerialised,
                             char** out_text) {
  JPP_RETURN_IF_NULL(kept, rematerialised, out_text);
  jpp_str_t str = {0};
  append_spmd("one SPMD program", kept, &str);
  append_spmd("the same with stages rematerialised", rematerialised, &str);
  return jpp_str_finish(&str, out_text);
}

static json_t* spmd_json(const jpp_spmd_simulation_t* spmd) {
  return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:I}",       //
                   "makespan", rounded(spmd->makespan),              //
                   "forward_turn", rounded(spmd->forward_turn),      //
                   "backward_turn", rounded(spmd->backward_turn),    //
                   "lost", rounded(spmd->lost),                      //
                   "rematerialised", rounded(spmd->rematerialised),  //
                   "utilisation", rounded(spmd->utilisation),        //
                   "peak_microbatches", rounded(spmd->peak),         //
                   "turns", (json_int_t)spmd->turns);
}

jpp_status_t* jpp_spmd_print_json(const jpp_spmd_simulation_t* kept,
                                  const jpp_spmd_simulation_t* rematerialised,
                                  char** out_text) {
  JPP_RETURN_IF_NULL(kept, rematerialised, out_text);
  return print_json(json_pack("{s:o, s:o}", "spmd", spmd_json(kept),
                              "spmd_rematerialised", spmd_json(rematerialised)),
                    out_text);
}

// --- Chrome trace ---------------------------------------------------------------------

static void append_trace_rank(const jpp_simulation_t* simulation, uint32_t r,
                              jpp_str_t* str) {
  const jpp_schedule_row_t* row = &simulation->schedule->rows[r];
  for (uint32_t i = 0; i < row->count; ++i) {
    const jpp_schedule_task_t* task = &row->tasks[i];
    if (task->kind == JPP_TASK_IDLE) continue;
    char name[JPP_TASK_NAME_SIZE];
    double took = jpp_task_cost(&simulation->stage_costs[task->stage], task->kind);
    jpp_chrome_event_t event = {
        .name = jpp_task_name(task, name),
        .kind = task->kind,
        .process = simulation->stream_of ? simulation->stream_of[r][i] : 0,
        .rank = r,
        .start = simulation->starts[r][i] * 1000,
        .duration = took * 1000,
        .stage = task->stage,
        .microbatch = task->microbatch};
    jpp__chrome_append_event(&event, str);
  }
}

// Streams are processes of the trace, ranks their threads.
jpp_status_t* jpp_simulation_to_trace(const jpp_simulation_t* simulation,
                                      char** out_text) {
  JPP_RETURN_IF_NULL(simulation, out_text);
  const jpp_schedule_t* schedule = simulation->schedule;
  jpp_str_t str = {0};
  jpp__chrome_begin(0, 0, &str);
  for (uint32_t s = 0; s < simulation->streams; ++s) {
    jpp__chrome_append_process(schedule->name, s, &str);
    for (uint32_t r = 0; r < schedule->ranks; ++r) jpp__chrome_append_rank(s, r, &str);
  }
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    append_trace_rank(simulation, r, &str);
  }
  jpp__chrome_end(&str);
  return jpp_str_finish(&str, out_text);
}
