// jaxpp schedule search.
#include <stdio.h>

#include "cli/cli.h"
#include "jaxpp/schedule_csv.h"
#include "jaxpp/schedule_search.h"

static void print_progress(void* context, const jpp_search_progress_t* progress) {
  (void)context;
  fprintf(stderr, "%.0f s: %llu schedules tried, makespan %.6g, %.1f%% over the bound\n",
          progress->seconds, (unsigned long long)progress->tried, progress->makespan,
          100 * (progress->makespan / progress->bound - 1));
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
    jpp_str_appendf(out,
                    "{\"makespan\": %.12g, \"bound\": %.12g, \"built_in\": \"%s\", "
                    "\"built_in_makespan\": %.12g, \"tried\": %llu}\n",
                    result->makespan, result->bound,
                    result->built_in ? result->built_in : "", result->built_in_makespan,
                    (unsigned long long)result->tried);
    return NULL;
  }
  jpp_str_appendf(out, "makespan %.6g, %.1f%% over the lower bound %.6g; %llu tried\n",
                  result->makespan, 100 * (result->makespan / result->bound - 1),
                  result->bound, (unsigned long long)result->tried);
  if (result->built_in) {
    jpp_str_appendf(out,
                    "best built-in schedule that fits: %s, makespan %.6g (%+.1f%%)\n",
                    result->built_in, result->built_in_makespan,
                    100 * (result->built_in_makespan / result->makespan - 1));
  } else {
    jpp_str_append(out, "no built-in schedule fits\n");
  }
  JPP_RETURN_IF_ERROR(jpp_schedule_print(result->schedule, &text));
  jpp_str_append(out, text);
  jpp_text_free(text);
  return NULL;
}

jpp_status_t* jpp_cli_schedule_search(const jpp_cli_options_t* options, jpp_str_t* out) {
  if (!options->stages || !options->ranks || !options->microbatches || !options->costs) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "schedule search: expected --stages N, --ranks N, "
                           "--microbatches N and --costs FILE");
  }
  jpp_cost_t* costs = NULL;
  bool halved = false;
  JPP_RETURN_IF_ERROR(
      jpp_cli_read_costs(options->costs, options->stages, &costs, &halved));
  if (halved) jpp_cli_note_halves(options->costs);
  jpp_search_options_t search = {.stages = options->stages,
                                 .ranks = options->ranks,
                                 .microbatches = options->microbatches,
                                 .costs = costs,
                                 .latency = options->latency,
                                 .memory_limit = options->memory_limit,
                                 .activation_bytes = options->activation_bytes,
                                 .seconds = options->seconds > 0 ? options->seconds : 5,
                                 .progress = print_progress};
  jpp_search_result_t result;
  jpp_status_t* status = jpp_schedule_search(&search, &result);
  if (!status) status = print_result(options, &result, out);
  jpp_schedule_destroy(result.schedule);
  jpp_free(costs);
  return status;
}
