// jaxpp schedule search.
#include "jaxpp/search.h"

#include <math.h>
#include <stdio.h>

#include "base/json.h"
#include "cli/cli.h"
#include "jaxpp/schedule_csv.h"

// The percentage by which a makespan exceeds the lower bound.
static double percent_over(double makespan, double bound) {
  double percent = bound > 0 ? 100 * (makespan / bound - 1) : 0;
  return fabs(percent) < 0.05 ? 0 : percent;  // rounding must not print as -0.0
}

static void print_progress(void* context, const jpp_search_progress_t* progress) {
  (void)context;
  fprintf(stderr, "%.0f s: %llu schedules tried, makespan %.6g, %.1f%% over the bound\n",
          progress->seconds, (unsigned long long)progress->tried, progress->makespan,
          percent_over(progress->makespan, progress->bound));
}

// The makespan for each way to fit activations, as far as there is one.
static json_t* makespans_json(const jpp_search_result_t* result) {
  json_t* makespans = json_object();
  for (uint32_t a = 0; a < JPP_ACTIVATIONS_COUNT; ++a) {
    if (result->makespans[a] == 0) continue;
    json_object_set_new(makespans, jpp_activations_name((jpp_activations_t)a),
                        json_real(result->makespans[a]));
  }
  return makespans;
}

// Names the ranks that do not keep their activations: those over the limit.
static jpp_status_t* append_ranks(const jpp_cli_options_t* options,
                                  const jpp_schedule_t* schedule, jpp_str_t* out) {
  uint64_t bytes = options->activation_bytes ? options->activation_bytes : 1;
  const char* separator = schedule->ranks > 1 ? " on ranks " : " on rank ";
  uint32_t* peaks = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(schedule->ranks, &peaks));
  jpp_status_t* status = jpp_schedule_peak_microbatches(schedule, schedule->ranks, peaks);
  for (uint32_t r = 0; !status && r < schedule->ranks; ++r) {
    if (peaks[r] <= options->memory_limit / bytes) continue;
    jpp_str_appendf(out, "%s%u", separator, r);
    separator = ", ";
  }
  jpp_free(peaks);
  return status;
}

static jpp_status_t* append_activations(const jpp_cli_options_t* options,
                                        const jpp_search_result_t* result,
                                        jpp_str_t* out) {
  jpp_str_appendf(out, "activations %s", jpp_activations_name(result->activations));
  if (result->activations) {
    JPP_RETURN_IF_ERROR(append_ranks(options, result->schedule, out));
  }
  jpp_str_append(out, "; makespan if they are");
  for (uint32_t a = 0; a < JPP_ACTIVATIONS_COUNT; ++a) {
    jpp_str_appendf(out, "%s %s", a ? "," : "",
                    jpp_activations_name((jpp_activations_t)a));
    if (result->makespans[a] > 0) {
      jpp_str_appendf(out, " %.6g", result->makespans[a]);
    } else {
      jpp_str_append(out, " -");
    }
  }
  jpp_str_append(out, "\n");
  return NULL;
}

static jpp_status_t* print_result(const jpp_cli_options_t* options,
                                  const jpp_search_result_t* result, jpp_str_t* out) {
  char* text = NULL;
  if (options->csv) {
    JPP_RETURN_IF_ERROR(
        jpp_schedule_print_csv(result->schedule, options->communication, &text));
    jpp_str_append(out, text);
    jpp_text_free(text);
    return NULL;
  }
  if (options->json) {
    json_t* found = json_pack(
        "{s:f, s:f, s:s, s:f, s:I, s:s, s:o}", "makespan", result->makespan, "bound",
        result->bound, "built_in", result->built_in ? result->built_in : "",
        "built_in_makespan", result->built_in_makespan, "tried",
        (json_int_t)result->tried, "activations",
        jpp_activations_name(result->activations), "makespans", makespans_json(result));
    jpp__json_take(found, JSON_INDENT(1) | JSON_REAL_PRECISION(12), out);
    jpp_str_append(out, "\n");
    return NULL;
  }
  jpp_str_appendf(out, "makespan %.6g, %.1f%% over the lower bound %.6g; %llu tried\n",
                  result->makespan, percent_over(result->makespan, result->bound),
                  result->bound, (unsigned long long)result->tried);
  if (result->built_in) {
    jpp_str_appendf(out,
                    "best built-in schedule that fits: %s, makespan %.6g (%+.1f%%)\n",
                    result->built_in, result->built_in_makespan,
                    percent_over(result->built_in_makespan, result->makespan));
  } else {
    jpp_str_append(out, "no built-in schedule fits\n");
  }
  if (options->input_bytes || options->host_bandwidth > 0) {
    JPP_RETURN_IF_ERROR(append_activations(options, result, out));
  }
  JPP_RETURN_IF_ERROR(jpp_schedule_print(result->schedule, &text));
  jpp_str_append(out, text);
  jpp_text_free(text);
  return NULL;
}

// Names the missing flags only.
static jpp_status_t* check_flags(const jpp_cli_options_t* options) {
  if (options->cost || options->fuse) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "schedule search: %s does not apply; it is for a schedule with "
        "a name",
        options->cost ? "--cost" : "--fuse");
  }
  const struct {
    bool given;
    const char* flag;
  } flags[] = {{options->stages, "--stages N"},
               {options->ranks, "--ranks N"},
               {options->microbatches, "--microbatches N"},
               {options->costs, "--costs FILE"}};
  jpp_str_t missing = {0};
  for (size_t i = 0; i < sizeof(flags) / sizeof(*flags); ++i) {
    if (flags[i].given) continue;
    jpp_str_appendf(&missing, "%s%s", missing.length ? ", " : "", flags[i].flag);
  }
  if (!missing.length) return NULL;
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&missing, &text));
  jpp_status_t* status =
      jpp_status_make(JPP_INVALID_ARGUMENT, "schedule search: expected %s", text);
  jpp_text_free(text);
  return status;
}

jpp_status_t* jpp_cli_schedule_search(const jpp_cli_options_t* options, jpp_str_t* out) {
  JPP_RETURN_IF_ERROR(check_flags(options));
  JPP_RETURN_IF_ERROR(jpp_cli_check_csv(options));
  jpp_cost_t* costs = NULL;
  bool halved = false;
  JPP_RETURN_IF_ERROR(
      jpp_cli_read_costs(options->costs, options->stages, &costs, &halved));
  if (halved) jpp_cli_note_halves(options->costs);
  jpp_search_options_t search = {.struct_size = sizeof(search),
                                 .stages = options->stages,
                                 .ranks = options->ranks,
                                 .microbatches = options->microbatches,
                                 .costs = costs,
                                 .latency = options->latency,
                                 .memory_limit = options->memory_limit,
                                 .activation_bytes = options->activation_bytes,
                                 .input_bytes = options->input_bytes,
                                 .host_bandwidth = options->host_bandwidth,
                                 .seconds = options->seconds < 0 ? 5 : options->seconds,
                                 .progress = print_progress};
  jpp_search_result_t result;
  jpp_status_t* status = jpp_schedule_search(&search, &result);
  if (!status) status = print_result(options, &result, out);
  jpp_schedule_destroy(result.schedule);
  jpp_free(costs);
  return status;
}
