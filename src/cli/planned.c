#include "cli/planned.h"

#include "cli/cli.h"

// --- Reading --------------------------------------------------------------------------

static jpp_status_t* parse_file(const char* file, jpp_graph_t** out_graph) {
  *out_graph = NULL;
  char* text = NULL;
  size_t length = 0;
  JPP_RETURN_IF_ERROR(jpp_cli_read_file(file, &text, &length));
  jpp_status_t* status = jpp_graph_parse(text, length, file, out_graph);
  jpp_free(text);
  return status;
}

// --- Schedules ------------------------------------------------------------------------

static const char* loop_where(const jpp_loop_t* loop) {
  return loop->where ? loop->where : "?";
}

static jpp_status_t* build_schedule(const jpp_plan_request_t* request,
                                    const jpp_planned_t* planned, uint32_t loop,
                                    jpp_schedule_t** out_schedule) {
  *out_schedule = NULL;
  const jpp_loop_t* at = &planned->graph->loops[loop];
  const char* name = request->schedule ? request->schedule : at->schedule;
  jpp_schedule_params_t params = {
      .stages = request->stages ? request->stages : at->stages,
      .ranks = planned->ranks,
      .microbatches = at->microbatches,
      .fuse_steady_state = request->fuse};
  if (!name) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "loop at %s names no schedule (the program that wrote the file "
        "kept its task lists): say --schedule NAME; jaxpp schedule list "
        "prints the names",
        loop_where(at));
  }
  if (!params.stages) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "loop at %s does not say how many stages it has: say "
                           "--stages N",
                           loop_where(at));
  }
  JPP_RETURN_IF_ERROR_IN(jpp_schedule_build(name, &params, out_schedule), "loop at %s",
                         loop_where(at));
  return NULL;
}

static jpp_status_t* build_schedules(const jpp_plan_request_t* request,
                                     jpp_planned_t* planned) {
  uint32_t loops = planned->graph->num_loops;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(loops, &planned->schedules));
  for (uint32_t i = 0; i < loops; ++i) {
    JPP_RETURN_IF_ERROR(build_schedule(request, planned, i, &planned->schedules[i]));
    JPP_RETURN_IF_ERROR(jpp_schedule_verify(planned->schedules[i]));
  }
  return NULL;
}

// --- The planner ----------------------------------------------------------------------

static jpp_status_t* partition(jpp_planned_t* planned) {
  uint32_t loops = planned->graph->num_loops;
  jpp_loop_placement_t* placements = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(loops, &placements));
  for (uint32_t i = 0; i < loops; ++i) {
    placements[i] = jpp_schedule_placement(planned->schedules[i]);
  }
  jpp_partition_options_t options = {.ranks = planned->ranks, .loops = placements};
  jpp_status_t* status = jpp_partition(planned->graph, &options, &planned->staged);
  jpp_free(placements);
  return status;
}

static jpp_status_t* build_program(const jpp_plan_request_t* request,
                                   jpp_planned_t* planned) {
  jpp_program_options_t options = {
      .schedules = (const jpp_schedule_t* const*)planned->schedules,
      .channel_slots = request->slots};
  return jpp_program_build(planned->staged, &options, &planned->plan);
}

static jpp_status_t* choose_ranks(const jpp_plan_request_t* request,
                                  jpp_planned_t* planned) {
  planned->ranks = request->ranks ? request->ranks : planned->graph->ranks;
  if (planned->ranks) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "%s: the graph does not say how many ranks it is for: say "
                         "--ranks N",
                         request->file);
}

static jpp_status_t* check_limit(const jpp_plan_request_t* request,
                                 const jpp_planned_t* planned) {
  uint64_t* limits = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(planned->ranks, &limits));
  for (uint32_t r = 0; r < planned->ranks; ++r) limits[r] = request->memory_limit;
  jpp_status_t* status = jpp_check_memory_limit(
      planned->report, (const jpp_schedule_t* const*)planned->schedules, limits);
  jpp_free(limits);
  return status;
}

jpp_status_t* jpp_planned_init(const jpp_plan_request_t* request,
                               jpp_planned_t* out_planned) {
  *out_planned = (jpp_planned_t){0};
  JPP_RETURN_IF_ERROR(parse_file(request->file, &out_planned->graph));
  if (request->last < JPP_PART_SCHEDULE) return NULL;
  JPP_RETURN_IF_ERROR(choose_ranks(request, out_planned));
  JPP_RETURN_IF_ERROR(build_schedules(request, out_planned));
  if (request->last < JPP_PART_PARTITION) return NULL;
  JPP_RETURN_IF_ERROR(partition(out_planned));
  if (request->last < JPP_PART_PROGRAM) return NULL;
  JPP_RETURN_IF_ERROR(build_program(request, out_planned));
  if (request->last < JPP_PART_CHECK) return NULL;
  JPP_RETURN_IF_ERROR(jpp_check_plan(out_planned->plan, &out_planned->report));
  return request->memory_limit ? check_limit(request, out_planned) : NULL;
}

void jpp_planned_deinit(jpp_planned_t* planned) {
  jpp_check_report_destroy(planned->report);
  jpp_plan_destroy(planned->plan);
  jpp_staged_destroy(planned->staged);
  for (uint32_t i = 0; planned->schedules && i < planned->graph->num_loops; ++i) {
    jpp_schedule_destroy(planned->schedules[i]);
  }
  jpp_free(planned->schedules);
  jpp_graph_destroy(planned->graph);
  *planned = (jpp_planned_t){0};
}

const char* jpp_part_name(jpp_part_t part) {
  static const char* const kNames[] = {
      [JPP_PART_GRAPH] = "graph",         [JPP_PART_SCHEDULE] = "schedule",
      [JPP_PART_PARTITION] = "partition", [JPP_PART_PROGRAM] = "program",
      [JPP_PART_CHECK] = "check",
  };
  return part < JPP_PART_COUNT ? kNames[part] : "?";
}

static jpp_status_t* print_schedule(const jpp_schedule_t* schedule, jpp_str_t* out) {
  char *text = NULL, *picture = NULL;
  jpp_status_t* status = jpp_schedule_print(schedule, &text);
  if (!status) status = jpp_schedule_draw(schedule, &picture);
  if (!status) jpp_str_appendf(out, "%s%s", text, picture);
  jpp_text_free(text);
  jpp_text_free(picture);
  return status;
}

jpp_status_t* jpp_part_print(const jpp_planned_t* planned, jpp_part_t part,
                             jpp_str_t* out) {
  char* text = NULL;
  for (uint32_t i = 0; part == JPP_PART_SCHEDULE && i < planned->graph->num_loops; ++i) {
    JPP_RETURN_IF_ERROR(print_schedule(planned->schedules[i], out));
  }
  if (part == JPP_PART_GRAPH) JPP_RETURN_IF_ERROR(jpp_graph_print(planned->graph, &text));
  if (part == JPP_PART_PARTITION) {
    JPP_RETURN_IF_ERROR(jpp_staged_print(planned->staged, &text));
  }
  if (part == JPP_PART_PROGRAM) JPP_RETURN_IF_ERROR(jpp_plan_print(planned->plan, &text));
  if (part == JPP_PART_CHECK) {
    JPP_RETURN_IF_ERROR(jpp_check_report_print(planned->report, &text));
  }
  if (text) jpp_str_append(out, text);
  jpp_text_free(text);
  return NULL;
}
