// jaxpp schedule list, jaxpp schedule show and jaxpp verify.
#include "jaxpp/schedule.h"

#include <jansson.h>

#include "cli/cli.h"
#include "cli/json.h"

static jpp_status_t* append_text(char* text, jpp_str_t* out) {
  jpp_str_append(out, text);
  jpp_text_free(text);
  return NULL;
}

static jpp_status_t* list_json(jpp_str_t* out) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(i);
    jpp_json_append(&list, json_pack("{s:s, s:s, s:s}", "name", info->name, "class",
                                     info->class_name, "help", info->help));
  }
  return jpp_json_take(list, out);
}

jpp_status_t* jpp_cli_schedule_list(const jpp_cli_options_t* options, jpp_str_t* out) {
  if (options->json) return list_json(out);
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(i);
    jpp_str_appendf(out, "%-18s %-17s %s\n", info->name, info->class_name, info->help);
  }
  return NULL;
}

static jpp_status_t* build(const jpp_cli_options_t* options,
                           jpp_schedule_t** out_schedule) {
  *out_schedule = NULL;
  if (!options->stages || !options->microbatches) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "schedule %s: expected --stages N and --microbatches N "
                           "(--ranks N where ranks hold several stages)",
                           options->words[0]);
  }
  jpp_schedule_params_t params = {
      .stages = options->stages,
      .ranks = options->ranks ? options->ranks : options->stages,
      .microbatches = options->microbatches,
      .fuse_steady_state = options->fuse};
  return jpp_schedule_build(options->words[0], &params, out_schedule);
}

static jpp_status_t* show(const jpp_schedule_t* schedule, bool json, jpp_str_t* out) {
  char* text = NULL;
  if (json) {
    JPP_RETURN_IF_ERROR(jpp_schedule_print_json(schedule, &text));
    return append_text(text, out);
  }
  JPP_RETURN_IF_ERROR(jpp_schedule_print(schedule, &text));
  JPP_RETURN_IF_ERROR(append_text(text, out));
  JPP_RETURN_IF_ERROR(jpp_schedule_draw(schedule, &text));
  return append_text(text, out);
}

jpp_status_t* jpp_cli_schedule_show(const jpp_cli_options_t* options, jpp_str_t* out) {
  jpp_schedule_t* schedule = NULL;
  JPP_RETURN_IF_ERROR(build(options, &schedule));
  jpp_status_t* status = show(schedule, options->json, out);
  jpp_schedule_destroy(schedule);
  return status;
}

jpp_status_t* jpp_cli_verify(const jpp_cli_options_t* options, jpp_str_t* out) {
  jpp_schedule_t* schedule = NULL;
  JPP_RETURN_IF_ERROR(build(options, &schedule));
  jpp_status_t* status = jpp_schedule_verify(schedule);
  if (!status) {
    jpp_str_appendf(out, "%s: every task runs once, none waits for ever\n",
                    schedule->name);
  }
  jpp_schedule_destroy(schedule);
  return status;
}
