// What commands on schedules read: the schedule, by name or as a file, and costs.
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "cli/cli.h"
#include "cli/json.h"
#include "jaxpp/schedule_csv.h"

jpp_status_t* jpp_cli_read_file(const char* file, char** out_text, size_t* out_length) {
  *out_text = NULL;
  errno = 0;
  FILE* stream = fopen(file, "r");
  jpp_str_t text = {0};
  char buffer[1 << 16];
  size_t got = 0;
  while (stream && (got = fread(buffer, 1, sizeof(buffer), stream)) > 0) {
    jpp_str_append_n(&text, buffer, got);
  }
  bool failed = !stream || ferror(stream);
  int error = errno;
  if (stream) fclose(stream);
  if (failed) {
    jpp_str_deinit(&text);
    return jpp_status_make(JPP_INVALID_ARGUMENT, "%s: %s", file, strerror(error));
  }
  *out_length = text.length;
  return jpp_str_finish(&text, out_text);
}

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

static jpp_status_t* check_size(const char* file, const char* flag, uint32_t given,
                                uint32_t found) {
  if (!given || given == found) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT, "%s %u: the schedule in %s has %u", flag,
                         given, file, found);
}

static jpp_status_t* read_csv(const jpp_cli_options_t* options, uint32_t* out_slots,
                              jpp_schedule_t** out_schedule) {
  const char* file = options->words[0];
  char* text = NULL;
  size_t length = 0;
  JPP_RETURN_IF_ERROR(jpp_cli_read_file(file, &text, &length));
  jpp_schedule_t* schedule = NULL;
  jpp_status_t* status = jpp_schedule_from_csv(file, text, length, out_slots, &schedule);
  jpp_free(text);
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
  if (!is_built_in(name) && is_file(name)) {
    return read_csv(options, out_slots, out_schedule);
  }
  if (!options->stages || !options->microbatches) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "schedule %s: expected --stages N and --microbatches N "
                           "(--ranks N where ranks hold several stages)",
                           name);
  }
  jpp_schedule_params_t params = {
      .stages = options->stages,
      .ranks = options->ranks ? options->ranks : options->stages,
      .microbatches = options->microbatches,
      .fuse_steady_state = options->fuse};
  return jpp_schedule_build(name, &params, out_schedule);
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

// Lines "STAGE F B W"; '#' begins a comment.
static jpp_status_t* costs_from_lines(const char* file, char* text, uint32_t stages,
                                      jpp_cost_t* costs) {
  uint32_t line = 0, seen = 0;
  for (char* at = text; at; ++line) {
    char* next = strchr(at, '\n');
    if (next) *next++ = '\0';
    unsigned stage = 0;
    jpp_cost_t cost = {0};
    int end = 0;
    char* comment = strchr(at, '#');
    if (comment) *comment = '\0';
    bool blank = at[strspn(at, " \t\r")] == '\0';
    int fields = blank ? 0
                       : sscanf(at, "%u %lf %lf %lf %n", &stage, &cost.forward,
                                &cost.backward, &cost.weight, &end);
    if (!blank && (fields != 4 || at[end] || stage >= stages)) {
      return jpp_status_make(JPP_PARSE_ERROR,
                             "%s:%u: expected 'STAGE F B W' with a stage below %u", file,
                             line + 1, stages);
    }
    if (!blank) costs[stage] = cost;
    seen += !blank;
    at = next;
  }
  if (seen == stages) return NULL;
  return jpp_status_make(JPP_PARSE_ERROR, "%s:%u: expected a line for each of %u stages",
                         file, line, stages);
}

typedef struct trace_sum {
  double forward, backward, input, weight;
  uint32_t num[4];
} trace_sum_t;

static void add_event(json_t* event, uint32_t stages, trace_sum_t* sums) {
  const char* name = json_string_value(json_object_get(event, "name"));
  json_t* dur = json_object_get(event, "dur");
  json_t* stage = json_object_get(json_object_get(event, "args"), "stage");
  if (!name || !json_is_number(dur) || !json_is_integer(stage)) return;
  json_int_t s = json_integer_value(stage);
  if (s < 0 || s >= (json_int_t)stages) return;
  double took = json_number_value(dur);
  if (!strncmp(name, "fwd", 3)) {
    sums[s].forward += took;
    ++sums[s].num[0];
  } else if (!strncmp(name, "bwd_i", 5)) {
    sums[s].input += took;
    ++sums[s].num[2];
  } else if (!strncmp(name, "bwd_w", 5)) {
    sums[s].weight += took;
    ++sums[s].num[3];
  } else if (!strncmp(name, "bwd", 3)) {
    sums[s].backward += took;
    ++sums[s].num[1];
  }
}

// Means of a measured step. A whole backward counts half as input gradient.
static jpp_status_t* costs_from_trace(const char* file, const char* text, size_t length,
                                      uint32_t stages, jpp_cost_t* costs) {
  json_error_t error;
  json_t* root = json_loadb(text, length, 0, &error);
  if (!root) {
    return jpp_status_make(JPP_PARSE_ERROR, "%s:%d: %s", file, error.line, error.text);
  }
  trace_sum_t* sums = NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(stages, &sums);
  json_t* events = json_object_get(root, "traceEvents");
  size_t i;
  json_t* event;
  if (!status) {
    json_array_foreach(events, i, event) add_event(event, stages, sums);
  }
  for (uint32_t s = 0; !status && s < stages; ++s) {
    const trace_sum_t* sum = &sums[s];
    if (!sum->num[0]) {
      status = jpp_status_make(JPP_PARSE_ERROR,
                               "%s:1: the trace has no forward of stage "
                               "%u",
                               file, s);
      break;
    }
    costs[s].forward = sum->forward / sum->num[0] / 1000;
    double whole = sum->num[1] ? sum->backward / sum->num[1] / 1000 : 0;
    costs[s].backward = sum->num[2] ? sum->input / sum->num[2] / 1000 : whole / 2;
    costs[s].weight = sum->num[3] ? sum->weight / sum->num[3] / 1000 : whole / 2;
  }
  jpp_free(sums);
  json_decref(root);
  return status;
}

jpp_status_t* jpp_cli_read_costs(const char* file, uint32_t stages,
                                 jpp_cost_t** out_costs) {
  *out_costs = NULL;
  char* text = NULL;
  size_t length = 0;
  jpp_cost_t* costs = NULL;
  JPP_RETURN_IF_ERROR(jpp_cli_read_file(file, &text, &length));
  jpp_status_t* status = JPP_ALLOC_ARRAY(stages, &costs);
  if (!status) {
    status = text && text[strspn(text, " \n\r\t")] == '{'
                 ? costs_from_trace(file, text, length, stages, costs)
                 : costs_from_lines(file, text, stages, costs);
  }
  jpp_free(text);
  if (status) {
    jpp_free(costs);
    return status;
  }
  *out_costs = costs;
  return NULL;
}

// --message-bytes and --bandwidth are another way to say --transfer.
static jpp_status_t* set_transfer(const jpp_cli_options_t* options,
                                  jpp_simulate_options_t* simulate) {
  bool size = options->message_bytes, speed = options->bandwidth > 0;
  if (!size && !speed) return NULL;
  if (!size || !speed || options->transfer > 0) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected --message-bytes with --bandwidth, above 0, or "
                           "--transfer alone");
  }
  simulate->transfer = (double)options->message_bytes / options->bandwidth;
  return NULL;
}

jpp_status_t* jpp_cli_simulation(const jpp_cli_options_t* options,
                                 const jpp_schedule_t* schedule,
                                 jpp_simulation_t** out_simulation) {
  jpp_simulate_options_t simulate = {.rank_cost = {1, 1, 1},
                                     .latency = options->latency,
                                     .transfer = options->transfer,
                                     .no_overlap = options->no_overlap,
                                     .streams = options->streams,
                                     .optimizer = options->optimizer,
                                     .optimizer_free = options->optimizer_free};
  if (options->cost && options->costs) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "--cost and --costs exclude each other");
  }
  JPP_RETURN_IF_ERROR(set_transfer(options, &simulate));
  if (options->cost) JPP_RETURN_IF_ERROR(parse_cost(options->cost, &simulate.rank_cost));
  jpp_cost_t* costs = NULL;
  if (options->costs) {
    JPP_RETURN_IF_ERROR(jpp_cli_read_costs(options->costs, schedule->stages, &costs));
  }
  simulate.stage_costs = costs;
  jpp_status_t* status = jpp_schedule_simulate(schedule, &simulate, out_simulation);
  jpp_free(costs);
  return status;
}
