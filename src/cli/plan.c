// jaxpp plan.
#include <string.h>

#include "cli/cli.h"

static jpp_status_t* find_part(const char* name, jpp_part_t* out_part) {
  for (*out_part = 0; *out_part < JPP_PART_COUNT; ++*out_part) {
    if (!strcmp(name, jpp_part_name(*out_part))) return NULL;
  }
  return jpp_status_make(
      JPP_INVALID_ARGUMENT,
      "--after: expected graph, schedule, partition, program or check, found '%s'", name);
}

static jpp_status_t* make_request(const jpp_cli_options_t* options,
                                  jpp_plan_request_t* out_request) {
  *out_request = (jpp_plan_request_t){.file = options->words[0],
                                      .schedule = options->schedule,
                                      .stages = options->stages,
                                      .ranks = options->ranks,
                                      .slots = options->slots,
                                      .fuse = options->fuse,
                                      .memory_limit = options->memory_limit,
                                      .last = JPP_PART_COUNT - 1};
  return options->after && !options->memory_limit
             ? find_part(options->after, &out_request->last)
             : NULL;
}

static jpp_status_t* print_plan(const jpp_cli_options_t* options,
                                const jpp_planned_t* planned, jpp_str_t* out) {
  jpp_part_t part = JPP_PART_COUNT;
  if (options->after) JPP_RETURN_IF_ERROR(find_part(options->after, &part));
  if (options->json) return jpp_part_print_json(planned, part, out);
  if (options->after) return jpp_part_print(planned, part, out);
  jpp_planned_summarize(planned, out);
  return NULL;
}

jpp_status_t* jpp_cli_plan(const jpp_cli_options_t* options, jpp_str_t* out) {
  jpp_plan_request_t request;
  JPP_RETURN_IF_ERROR(make_request(options, &request));
  jpp_planned_t planned;
  jpp_status_t* status = jpp_planned_init(&request, &planned);
  if (!status) status = print_plan(options, &planned, out);
  jpp_planned_deinit(&planned);
  return status;
}
