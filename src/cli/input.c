// The input of commands on schedules: the schedule, by name or from a file, and costs.
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "jaxpp/file.h"
#include "jaxpp/schedule_csv.h"

static bool is_built_in(const char* name) {
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(i);
    if (!strcmp(name, info->name) || !strcmp(name, info->class_name)) return true;
  }
  return false;
}

static bool is_file(const char* name) {
  if (strchr(name, '/') || strchr(name, '.')) return true;
  FILE* stream = fopen(name, "r");
  if (stream) fclose(stream);
  return stream != NULL;
}

bool jpp_cli_names_file(const char* name) { return !is_built_in(name) && is_file(name); }

static jpp_status_t* check_size(const char* file, const char* flag, uint32_t given,
                                uint32_t found) {
  if (!given || given == found) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT, "%s %u: the schedule in %s has %u", flag,
                         given, file, found);
}

jpp_status_t* jpp_cli_read_csv(const jpp_cli_options_t* options, const char* file,
                               uint32_t* out_slots, jpp_schedule_t** out_schedule) {
  *out_schedule = NULL;
  char* text = NULL;
  size_t length = 0;
  JPP_RETURN_IF_ERROR(jpp_file_read(file, &text, &length));
  jpp_schedule_t* schedule = NULL;
  jpp_status_t* status =
      jpp_spans_is_trace(text)
          ? jpp_status_make(JPP_PARSE_ERROR,
                            "%s:1: expected a schedule as CSV, found JSON: a trace is "
                            "for jaxpp plot, jaxpp drift and --costs",
                            file)
          : jpp_schedule_from_csv(file, text, length, out_slots, &schedule);
  jpp_text_free(text);
  if (status) return status;
  status = check_size(file, "--stages", options->stages, schedule->stages);
  if (!status) status = check_size(file, "--ranks", options->ranks, schedule->ranks);
  if (!status) {
    status =
        check_size(file, "--microbatches", options->microbatches, schedule->microbatches);
  }
  if (status) {
    jpp_schedule_destroy(schedule);
    return status;
  }
  *out_schedule = schedule;
  return NULL;
}

jpp_status_t* jpp_cli_schedule(const jpp_cli_options_t* options, uint32_t* out_slots,
                               jpp_schedule_t** out_schedule) {
  *out_schedule = NULL;
  *out_slots = 0;
  const char* name = options->words[0];
  if (jpp_cli_names_file(name)) {
    return jpp_cli_read_csv(options, name, out_slots, out_schedule);
  }
  if (!is_built_in(name)) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "\"%s\" is neither a built-in schedule nor a file; jaxpp "
                           "schedule list prints the built-in ones",
                           name);
  }
  if (!options->stages || !options->microbatches) {
    bool both = !options->stages && !options->microbatches;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "schedule %s: expected %s%s%s (and --ranks N where ranks hold "
                           "several stages)",
                           name, options->stages ? "" : "--stages N", both ? " and " : "",
                           options->microbatches ? "" : "--microbatches N");
  }
  jpp_schedule_params_t params = {
      .struct_size = sizeof(params),
      .stages = options->stages,
      .ranks = options->ranks ? options->ranks : options->stages,
      .microbatches = options->microbatches,
      .fuse_steady_state = options->fuse};
  return jpp_schedule_build(name, &params, out_schedule);
}

jpp_status_t* jpp_cli_check_csv(const jpp_cli_options_t* options) {
  if (options->csv) return jpp_cli_refuse_flags(options, JPP_FLAG_JSON, "--csv");
  if (!options->communication) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT, "--comms is for --csv");
}

// --- Costs -----------------------------------------------------------------------------

static jpp_status_t* parse_cost(const char* text, jpp_cost_t* out_cost) {
  int end = 0;
  jpp_cost_t cost = {0};
  int fields =
      sscanf(text, "%lf,%lf,%lf%n", &cost.forward, &cost.backward, &cost.weight, &end);
  if (fields != 3 || text[end]) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "--cost: expected three numbers F,B,W, found '%s'", text);
  }
  *out_cost = cost;
  return NULL;
}

// --message-bytes and --bandwidth together replace --transfer.
jpp_status_t* jpp_cli_transfer(const jpp_cli_options_t* options, double* out_transfer) {
  *out_transfer = options->transfer;
  bool size = options->message_bytes, speed = options->bandwidth > 0;
  if (!size && !speed) return NULL;
  if (!size || !speed || options->transfer > 0) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected --message-bytes with --bandwidth, above 0, or "
                           "--transfer alone");
  }
  *out_transfer = (double)options->message_bytes / options->bandwidth;
  return NULL;
}

void jpp_cli_note_halves(const char* file) {
  fprintf(
      stderr,
      "jaxpp: note: %s has whole backwards only; assumed that half of each is for the "
      "input gradients and half for the weight gradients\n",
      file);
}

static jpp_status_t* read_activations(const jpp_cli_options_t* options,
                                      jpp_simulate_options_t* simulate) {
  if (options->offload && options->recompute) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "--offload and --recompute exclude each other");
  }
  bool sizes = options->memory_limit || options->activation_bytes ||
               options->input_bytes || options->host_bandwidth > 0;
  if (sizes && !options->offload && !options->recompute) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "--memory-limit, --activation-bytes, --input-bytes and "
                           "--host-bandwidth are for --offload or --recompute");
  }
  if (options->offload) simulate->activations = JPP_ACTIVATIONS_OFFLOADED;
  if (options->recompute) simulate->activations = JPP_ACTIVATIONS_RECOMPUTED;
  simulate->memory_limit = options->memory_limit;
  simulate->activation_bytes = options->activation_bytes;
  simulate->input_bytes = options->input_bytes;
  simulate->host_bandwidth = options->host_bandwidth;
  return NULL;
}

jpp_status_t* jpp_cli_simulation(const jpp_cli_options_t* options,
                                 const jpp_schedule_t* schedule,
                                 jpp_simulation_t** out_simulation) {
  jpp_simulate_options_t simulate = {.struct_size = sizeof(simulate),
                                     .rank_cost = {1, 1, 1},
                                     .latency = options->latency,
                                     .no_overlap = options->no_overlap,
                                     .streams = options->streams,
                                     .optimizer = options->optimizer,
                                     .optimizer_free = options->optimizer_free};
  if (options->cost && options->costs) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "--cost and --costs exclude each other");
  }
  JPP_RETURN_IF_ERROR(jpp_cli_transfer(options, &simulate.transfer));
  JPP_RETURN_IF_ERROR(read_activations(options, &simulate));
  if (options->cost) JPP_RETURN_IF_ERROR(parse_cost(options->cost, &simulate.rank_cost));
  jpp_cost_t* costs = NULL;
  if (options->costs) {
    bool halved = false;
    JPP_RETURN_IF_ERROR(
        jpp_cli_read_costs(options->costs, schedule->stages, &costs, &halved));
    if (halved) jpp_cli_note_halves(options->costs);
  }
  simulate.stage_costs = costs;
  jpp_status_t* status = jpp_schedule_simulate(schedule, &simulate, out_simulation);
  jpp_free(costs);
  return status;
}

// --- Traces ---------------------------------------------------------------------------

static jpp_status_t* read_files(const char* const* files, uint32_t count,
                                jpp_trace_text_t* texts) {
  for (uint32_t i = 0; i < count; ++i) {
    char* text = NULL;
    JPP_RETURN_IF_ERROR(jpp_file_read(files[i], &text, &texts[i].length));
    texts[i].name = files[i];
    texts[i].text = text;
  }
  return NULL;
}

jpp_status_t* jpp_cli_read_traces(const char* const* files, uint32_t count,
                                  jpp_spans_t** out_spans) {
  jpp_trace_text_t* texts = NULL;
  *out_spans = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(count, &texts));
  jpp_status_t* status = read_files(files, count, texts);
  if (!status) status = jpp_spans_read(texts, count, out_spans);
  for (uint32_t i = 0; i < count; ++i) jpp_text_free((char*)texts[i].text);
  jpp_free(texts);
  return status;
}
