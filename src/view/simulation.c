// A simulation as JSON, as text, and as a Chrome trace.
#include <math.h>

#include "base/str.h"
#include "jaxpp/view.h"
#include "view/chrome.h"

// Sums of fractions as 1/3 miss the round number by rounding errors.
static double rounded(double value) {
  double near = nearbyint(value * 1e9) / 1e9;
  return fabs(near - value) <= 1e-12 * (1 + fabs(value)) ? near : value;
}

static void append_number(jpp_str_t* str, const char* key, double value) {
  jpp_str_appendf(str, "  \"%s\": %.12g,\n", key, rounded(value));
}

jpp_status_t* jpp_simulation_print_json(const jpp_simulation_t* simulation,
                                        char** out_text) {
  jpp_str_t str = {0};
  jpp_str_append(&str, "{\n");
  append_number(&str, "makespan", simulation->makespan);
  append_number(&str, "bubble_global", simulation->bubble_global);
  append_number(&str, "bubble_span", simulation->bubble_span);
  append_number(&str, "step", simulation->step);
  append_number(&str, "utilisation", simulation->utilisation);
  jpp_str_appendf(&str, "  \"tasks\": %llu,\n  \"peak_microbatches\": [",
                  (unsigned long long)simulation->tasks);
  for (uint32_t r = 0; r < simulation->schedule->ranks; ++r) {
    jpp_str_appendf(&str, "%s%.12g", r ? ", " : "", rounded(simulation->ranks[r].peak));
  }
  jpp_str_append(&str, "]\n}\n");
  return jpp_str_finish(&str, out_text);
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
  jpp_str_append(str, "\n");
}

jpp_status_t* jpp_simulation_print(const jpp_simulation_t* simulation, char** out_text) {
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
  jpp_str_appendf(str,
                  "%s: makespan %.6g, %llu turns of %.6g and %.6g back, utilisation "
                  "%.1f%%\n  for nobody %.1f%%, computed again %.1f%%, keeps %.6g "
                  "microbatches%s\n",
                  form, rounded(spmd->makespan), (unsigned long long)spmd->turns,
                  rounded(spmd->forward_turn), rounded(spmd->backward_turn),
                  100 * spmd->utilisation, 100 * spmd->lost, 100 * spmd->rematerialised,
                  rounded(spmd->peak), spmd->rematerialised > 0 ? "' inputs" : "");
}

jpp_status_t* jpp_spmd_print(const jpp_spmd_simulation_t* kept,
                             const jpp_spmd_simulation_t* rematerialised,
                             char** out_text) {
  jpp_str_t str = {0};
  append_spmd("one SPMD program", kept, &str);
  append_spmd("the same with stages rematerialised", rematerialised, &str);
  return jpp_str_finish(&str, out_text);
}

static void append_spmd_json(const char* name, const jpp_spmd_simulation_t* spmd,
                             const char* end, jpp_str_t* str) {
  jpp_str_appendf(str, "  \"%s\": {\n", name);
  append_number(str, "makespan", spmd->makespan);
  append_number(str, "forward_turn", spmd->forward_turn);
  append_number(str, "backward_turn", spmd->backward_turn);
  append_number(str, "lost", spmd->lost);
  append_number(str, "rematerialised", spmd->rematerialised);
  append_number(str, "utilisation", spmd->utilisation);
  append_number(str, "peak_microbatches", spmd->peak);
  jpp_str_appendf(str, "  \"turns\": %llu}%s\n", (unsigned long long)spmd->turns, end);
}

jpp_status_t* jpp_spmd_print_json(const jpp_spmd_simulation_t* kept,
                                  const jpp_spmd_simulation_t* rematerialised,
                                  char** out_text) {
  jpp_str_t str = {0};
  jpp_str_append(&str, "{\n");
  append_spmd_json("spmd", kept, ",", &str);
  append_spmd_json("spmd_rematerialised", rematerialised, "", &str);
  jpp_str_append(&str, "}\n");
  return jpp_str_finish(&str, out_text);
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
    jpp_chrome_append_event(&event, str);
  }
}

// Streams are processes of the trace, ranks their threads.
jpp_status_t* jpp_simulation_to_trace(const jpp_simulation_t* simulation,
                                      char** out_text) {
  const jpp_schedule_t* schedule = simulation->schedule;
  jpp_str_t str = {0};
  jpp_chrome_begin(&str);
  for (uint32_t s = 0; s < simulation->streams; ++s) {
    jpp_chrome_append_process(schedule->name, s, schedule->ranks, &str);
  }
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    append_trace_rank(simulation, r, &str);
  }
  jpp_chrome_end(&str);
  return jpp_str_finish(&str, out_text);
}
