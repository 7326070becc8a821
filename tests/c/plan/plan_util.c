#include "plan_util.h"

#include <stdio.h>

#include "golden.h"

const char* const kGraphs[] = {
    "aux",         "casts",     "clip",        "place",       "dropout", "effects",
    "empty_stage", "forward",   "frozen",      "interleaved", "mlp2",    "mlp4",
    "no_stage",    "one_stage", "passthrough", "shared3",     "skip",    "tied",
    "two_loops",   "unmarked",  NULL,
};

char* graph_text(const char* name) {
  char path[1024];
  snprintf(path, sizeof(path), "%s/graphs/%s.jpp", GOLDEN_DIR, name);
  char* text = golden_read(path);
  if (!text) fail_msg("cannot read %s", path);
  return text;
}

jpp_status_t* plan_scheduled(planned_t* planned, uint32_t slots) {
  jpp_loop_placement_t placements[PLAN_MAX_LOOPS];
  for (uint32_t i = 0; i < planned->graph->num_loops; ++i) {
    placements[i] = jpp_schedule_placement(planned->schedules[i]);
  }
  jpp_partition_options_t partition = {.ranks = planned->ranks, .loops = placements};
  JPP_RETURN_IF_ERROR(jpp_partition(planned->graph, &partition, &planned->staged));
  jpp_program_options_t program = {
      .schedules = (const jpp_schedule_t* const*)planned->schedules,
      .channel_slots = slots};
  JPP_RETURN_IF_ERROR(jpp_program_build(planned->staged, &program, &planned->plan));
  return jpp_check_plan(planned->plan, &planned->report);
}

jpp_status_t* plan_text(const char* text, const plan_options_t* options,
                        planned_t* out_planned) {
  static const plan_options_t kDefaults = {0};
  if (!options) options = &kDefaults;
  *out_planned = (planned_t){0};
  JPP_RETURN_IF_ERROR(jpp_graph_parse(text, strlen(text), "test", &out_planned->graph));
  const jpp_graph_t* graph = out_planned->graph;
  out_planned->ranks = options->ranks ? options->ranks : graph->ranks;
  for (uint32_t i = 0; i < graph->num_loops; ++i) {
    const jpp_loop_t* loop = &graph->loops[i];
    jpp_schedule_params_t params = {
        .stages = options->stages ? options->stages : loop->stages,
        .ranks = out_planned->ranks,
        .microbatches = loop->microbatches};
    JPP_RETURN_IF_ERROR(
        jpp_schedule_build(options->schedule ? options->schedule : loop->schedule,
                           &params, &out_planned->schedules[i]));
  }
  return plan_scheduled(out_planned, options->slots);
}

jpp_status_t* plan_file(const char* name, const plan_options_t* options,
                        planned_t* out_planned) {
  char* text = graph_text(name);
  jpp_status_t* status = plan_text(text, options, out_planned);
  free(text);
  return status;
}

void plan_free(planned_t* planned) {
  jpp_check_report_destroy(planned->report);
  jpp_plan_destroy(planned->plan);
  jpp_staged_destroy(planned->staged);
  for (uint32_t i = 0; i < PLAN_MAX_LOOPS; ++i) {
    jpp_schedule_destroy(planned->schedules[i]);
  }
  jpp_graph_destroy(planned->graph);
  *planned = (planned_t){0};
}
