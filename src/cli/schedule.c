// jaxpp schedule list, jaxpp schedule show, jaxpp verify and jaxpp simulate.
#include "jaxpp/schedule.h"

#include "base/json.h"
#include "cli/cli.h"
#include "jaxpp/schedule_csv.h"
#include "jaxpp/view.h"

static jpp_status_t* append_text(char* text, jpp_str_t* out) {
  jpp_str_append(out, text);
  jpp_text_free(text);
  return NULL;
}

static jpp_status_t* list_json(jpp_str_t* out) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(i);
    jpp__json_append(&list, json_pack("{s:s, s:s, s:s}", "name", info->name, "class",
                                      info->class_name, "help", info->help));
  }
  jpp__json_take(list, JSON_INDENT(1), out);
  jpp_str_append(out, "\n");
  return NULL;
}

jpp_status_t* jpp_cli_schedule_list(const jpp_cli_options_t* options, jpp_str_t* out) {
  if (options->json) return list_json(out);
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(i);
    jpp_str_appendf(out, "%-18s %-17s %s\n", info->name, info->class_name, info->help);
  }
  return NULL;
}

static jpp_status_t* show_schedule(const jpp_schedule_t* schedule,
                                   const jpp_cli_options_t* options, jpp_str_t* out) {
  char* text = NULL;
  if (options->csv) {
    JPP_RETURN_IF_ERROR(jpp_schedule_print_csv(schedule, options->communication, &text));
    return append_text(text, out);
  }
  if (options->json) {
    JPP_RETURN_IF_ERROR(jpp_schedule_print_json(schedule, &text));
    return append_text(text, out);
  }
  JPP_RETURN_IF_ERROR(jpp_schedule_print(schedule, &text));
  JPP_RETURN_IF_ERROR(append_text(text, out));
  JPP_RETURN_IF_ERROR(jpp_schedule_draw(schedule, &text));
  return append_text(text, out);
}

jpp_status_t* jpp_cli_schedule_show(const jpp_cli_options_t* options, jpp_str_t* out) {
  uint32_t slots = 0;
  jpp_schedule_t* schedule = NULL;
  JPP_RETURN_IF_ERROR(jpp_cli_check_csv(options));
  JPP_RETURN_IF_ERROR(jpp_cli_schedule(options, &slots, &schedule));
  jpp_status_t* status = show_schedule(schedule, options, out);
  jpp_schedule_destroy(schedule);
  return status;
}

// Listing every message of a larger schedule takes too long, and no plan is that large.
enum { kMostPairs = 1 << 21 };

static bool has_backward(const jpp_schedule_t* schedule) {
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    for (uint32_t i = 0; i < schedule->rows[r].count; ++i) {
      if (schedule->rows[r].tasks[i].kind > JPP_TASK_FWD) return true;
    }
  }
  return false;
}

// Backwards sum gradients; for a schedule without backwards, only the loop knows whether
// it has a sum.
static jpp_status_t* prove_sums(const jpp_schedule_t* schedule, jpp_str_t* note) {
  jpp_status_t* status = jpp_schedule_verify_sums(schedule);
  if (!status || jpp_status_code(status) != JPP_SCHEDULE_ERROR) return status;
  if (has_backward(schedule)) {
    return jpp_status_annotate(status, "schedule %s", schedule->name);
  }
  jpp_str_appendf(note, "only for a loop without a sum: %s\n",
                  jpp_status_message(status));
  jpp_status_free(status);
  return NULL;
}

static jpp_status_t* prove_and_print(const jpp_cli_options_t* options,
                                     const jpp_schedule_t* schedule, uint32_t slots,
                                     jpp_str_t* note, jpp_str_t* out) {
  bool small = (uint64_t)schedule->stages * schedule->microbatches <= kMostPairs;
  JPP_RETURN_IF_ERROR(prove_sums(schedule, note));
  if (options->memory_limit) {
    uint64_t bytes = options->activation_bytes ? options->activation_bytes : 1;
    JPP_RETURN_IF_ERROR(
        jpp_schedule_check_memory(schedule, bytes, options->memory_limit));
  }
  if (!slots && small) JPP_RETURN_IF_ERROR(jpp_schedule_slots(schedule, &slots));
  if (options->slots && slots > options->slots) {
    return jpp_status_make(JPP_SCHEDULE_ERROR,
                           "schedule %s: with --slots %u ranks wait for each other for "
                           "ever; %u slots a channel are enough",
                           schedule->name, options->slots, slots);
  }
  jpp_str_appendf(out, "%s: every task runs once, none waits for ever", schedule->name);
  if (slots) {
    jpp_str_appendf(out, "; %u slot%s a channel %s enough", slots, slots == 1 ? "" : "s",
                    slots == 1 ? "is" : "are");
  }
  jpp_str_append(out, "\n");
  if (note->length) jpp_str_append(out, note->data);
  return NULL;
}

jpp_status_t* jpp_cli_verify(const jpp_cli_options_t* options, jpp_str_t* out) {
  uint32_t slots = 0;
  jpp_schedule_t* schedule = NULL;
  JPP_RETURN_IF_ERROR(jpp_cli_schedule(options, &slots, &schedule));
  jpp_str_t note = {0};
  jpp_status_t* status = prove_and_print(options, schedule, slots, &note, out);
  jpp_str_deinit(&note);
  jpp_schedule_destroy(schedule);
  return status;
}

static jpp_status_t* print_spmd(const jpp_cli_options_t* options,
                                const jpp_simulation_t* simulation, jpp_str_t* out) {
  jpp_spmd_simulation_t kept, again;
  char* text = NULL;
  double transfer = 0;
  JPP_RETURN_IF_ERROR(jpp_cli_transfer(options, &transfer));
  transfer += options->latency;
  JPP_RETURN_IF_ERROR(jpp_simulate_spmd(simulation, transfer, false, &kept));
  JPP_RETURN_IF_ERROR(jpp_simulate_spmd(simulation, transfer, true, &again));
  JPP_RETURN_IF_ERROR(options->json ? jpp_spmd_print_json(&kept, &again, &text)
                                    : jpp_spmd_print(&kept, &again, &text));
  return append_text(text, out);
}

static jpp_status_t* print_simulation(const jpp_cli_options_t* options,
                                      const jpp_simulation_t* simulation,
                                      jpp_str_t* out) {
  char* text = NULL;
  if (options->trace) {
    JPP_RETURN_IF_ERROR(jpp_simulation_to_trace(simulation, &text));
  } else if (options->json) {
    JPP_RETURN_IF_ERROR(jpp_simulation_print_json(simulation, &text));
  } else {
    JPP_RETURN_IF_ERROR(jpp_simulation_print(simulation, &text));
  }
  return append_text(text, out);
}

jpp_status_t* jpp_cli_simulate(const jpp_cli_options_t* options, jpp_str_t* out) {
  uint32_t slots = 0;
  jpp_schedule_t* schedule = NULL;
  jpp_simulation_t* simulation = NULL;
  if (options->spmd) {
    JPP_RETURN_IF_ERROR(jpp_cli_refuse_flags(options, JPP_FLAG_TRACE, "--spmd"));
  }
  if (options->trace) {
    JPP_RETURN_IF_ERROR(jpp_cli_refuse_flags(options, JPP_FLAG_JSON, "--trace"));
  }
  JPP_RETURN_IF_ERROR(jpp_cli_schedule(options, &slots, &schedule));
  jpp_status_t* status = jpp_cli_simulation(options, schedule, &simulation);
  if (!status) {
    status = (options->spmd ? print_spmd : print_simulation)(options, simulation, out);
  }
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
  return status;
}
