// Runs the planner's passes in order. Each pass reads only the results of earlier ones,
// and the result owns all of it.
#include "jaxpp/plan.h"

#include "base/alloc.h"
#include "base/null.h"
#include "base/struct_size.h"
#include "check/checker.h"
#include "partition/offload.h"

typedef struct planned_storage {
  jpp_planned_t planned;  // first member: the caller's struct
  jpp_schedule_t** made;  // [loops] NULL: the caller owns that schedule
  const jpp_schedule_t** schedules;
  jpp_staged_t* staged;
  bool* offload;  // [ranks]
  jpp_plan_t* plan;
  jpp_check_report_t* report;
} planned_storage_t;

const char* jpp_plan_part_name(jpp_plan_part_t part) {
  static const char* const kNames[] = {
      [JPP_PART_GRAPH] = "graph",         [JPP_PART_SCHEDULE] = "schedule",
      [JPP_PART_PARTITION] = "partition", [JPP_PART_PROGRAM] = "program",
      [JPP_PART_CHECK] = "check",
  };
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_PART_COUNT, "a name a part");
  return (unsigned)part < JPP_PART_COUNT ? kNames[part] : NULL;
}

// --- Schedules ------------------------------------------------------------------------

static jpp_status_t* search_schedule(const jpp_search_options_t* options,
                                     const jpp_schedule_params_t* params,
                                     jpp_schedule_t** out_schedule) {
  jpp_search_options_t search;
  jpp_search_result_t result = {0};
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_search_options_t, host_bandwidth, options, &search));
  search.stages = params->stages;
  search.ranks = params->ranks;
  search.microbatches = params->microbatches;
  jpp_status_t* status = jpp_schedule_search(&search, &result);
  *out_schedule = result.schedule;
  return status;
}

static jpp_status_t* choose_schedule(const jpp_plan_options_t* options, uint32_t loop,
                                     planned_storage_t* storage) {
  const jpp_loop_t* at = &storage->planned.graph->loops[loop];
  jpp_loop_schedule_t source = {.struct_size = sizeof(source)};
  if (options->loops) {
    JPP_RETURN_IF_ERROR(
        JPP_OPTIONS_COPY_AT(jpp_loop_schedule_t, search, options->loops, loop, &source));
  }
  if (!source.given) {
    jpp_schedule_params_t params = {
        .struct_size = sizeof(params),
        .stages = options->stages ? options->stages : at->stages,
        .ranks = storage->planned.ranks,
        .microbatches = at->microbatches,
        .fuse_steady_state = options->fuse_steady_state};
    bool searches = source.search && !source.built_in;
    const char* name = source.built_in ? source.built_in : at->schedule;
    jpp_schedule_t** made = &storage->made[loop];
    jpp_status_t* status = searches ? search_schedule(source.search, &params, made)
                                    : jpp_schedule_build(name, &params, made);
    JPP_RETURN_IF_ERROR_IN(status, "loop at %s", at->where ? at->where : "?");
  }
  storage->schedules[loop] = source.given ? source.given : storage->made[loop];
  return jpp_schedule_verify(storage->schedules[loop]);
}

static jpp_status_t* choose_schedules(const jpp_plan_options_t* options,
                                      planned_storage_t* storage) {
  uint32_t loops = storage->planned.graph->num_loops;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(loops, &storage->made));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(loops, &storage->schedules));
  storage->planned.schedules = storage->schedules;
  for (uint32_t l = 0; l < loops; ++l) {
    JPP_RETURN_IF_ERROR(choose_schedule(options, l, storage));
  }
  return NULL;
}

// --- Partition and program ------------------------------------------------------------

static jpp_status_t* partition_graph(planned_storage_t* storage) {
  const jpp_planned_t* planned = &storage->planned;
  uint32_t loops = planned->graph->num_loops;
  jpp_loop_placement_t* placements = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(loops, &placements));
  for (uint32_t l = 0; l < loops; ++l) {
    placements[l] = jpp_schedule_placement(planned->schedules[l]);
  }
  jpp_partition_options_t options = {
      .struct_size = sizeof(options), .ranks = planned->ranks, .loops = placements};
  jpp_status_t* status = jpp_partition(planned->graph, &options, &storage->staged);
  jpp_free(placements);
  return status;
}

static jpp_status_t* measure_values(const jpp_plan_options_t* options,
                                    const jpp_staged_t* staged, uint64_t* out_bytes) {
  for (uint32_t v = 0; v < staged->num_values; ++v) {
    out_bytes[v] = jpp_value_device_bytes(&staged->values[v]);
  }
  return options->measure ? options->measure(options->context, staged, out_bytes) : NULL;
}

static jpp_status_t* build_program(const jpp_plan_options_t* options,
                                   const uint64_t* value_bytes,
                                   planned_storage_t* storage) {
  jpp_program_options_t program = {.struct_size = sizeof(program),
                                   .schedules = storage->planned.schedules,
                                   .channel_slots = options->channel_slots,
                                   .value_bytes = value_bytes};
  jpp__staged_offload(storage->staged, storage->offload, value_bytes);
  jpp_plan_destroy(storage->plan);
  storage->plan = NULL;
  return jpp_program_build(storage->staged, &program, &storage->plan);
}

// Adds the ranks over their limits to those that offload. Returns false if that adds
// none.
static bool offload_more(const jpp_memory_limits_t* limits, planned_storage_t* storage) {
  uint32_t ranks = storage->plan->ranks;
  bool more = false;
  for (uint32_t first = jpp__limits_next_first(limits, ranks, JPP_NONE);
       first != JPP_NONE; first = jpp__limits_next_first(limits, ranks, first)) {
    if (jpp__limits_peak(limits, storage->plan, first) <= limits->bytes[first]) continue;
    for (uint32_t r = first; r != JPP_NONE;
         r = jpp__limits_next_sharer(limits, ranks, r)) {
      more = more || !storage->offload[r];
      storage->offload[r] = true;
    }
  }
  return more;
}

static jpp_status_t* build_programs(const jpp_plan_options_t* options,
                                    planned_storage_t* storage) {
  const jpp_memory_limits_t* limits = options->offload_over;
  uint64_t* bytes = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(storage->staged->num_values, &bytes));
  jpp_status_t* status = measure_values(options, storage->staged, bytes);
  if (!status) status = build_program(options, bytes, storage);
  while (!status && limits && offload_more(limits, storage)) {
    status = build_program(options, bytes, storage);
  }
  jpp_free(bytes);
  storage->planned.plan = storage->plan;
  return status;
}

// --- All parts ------------------------------------------------------------------------

static jpp_status_t* make_parts(const jpp_plan_options_t* options,
                                planned_storage_t* storage) {
  jpp_planned_t* planned = &storage->planned;
  jpp_plan_part_t last = options->last ? options->last : JPP_PART_CHECK;
  planned->ranks = options->ranks ? options->ranks : planned->graph->ranks;
  planned->channel_slots = options->channel_slots;
  if (!planned->ranks) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "neither the graph nor the options give the number of ranks");
  }
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(planned->ranks, &storage->offload));
  planned->offload = storage->offload;
  for (uint32_t r = 0; r < planned->ranks && options->offload; ++r) {
    storage->offload[r] = options->offload[r];
  }
  JPP_RETURN_IF_ERROR(choose_schedules(options, storage));
  if (last < JPP_PART_PARTITION) return NULL;
  JPP_RETURN_IF_ERROR(partition_graph(storage));
  planned->staged = storage->staged;
  if (last < JPP_PART_PROGRAM) return NULL;
  JPP_RETURN_IF_ERROR(build_programs(options, storage));
  if (last < JPP_PART_CHECK) return NULL;
  JPP_RETURN_IF_ERROR(jpp_check_plan(storage->plan, &storage->report));
  planned->report = storage->report;
  return NULL;
}

jpp_status_t* jpp_plan_graph(const jpp_graph_t* graph, const jpp_plan_options_t* options,
                             jpp_planned_t** out_planned) {
  JPP_RETURN_IF_NULL(graph, out_planned);
  jpp_plan_options_t full = {.struct_size = sizeof(full)};
  *out_planned = NULL;
  if (options) {
    JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_plan_options_t, last, options, &full));
  }
  planned_storage_t* storage = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  storage->planned.graph = graph;
  jpp_status_t* status = make_parts(&full, storage);
  if (status) {
    jpp_planned_destroy(&storage->planned);
    return status;
  }
  *out_planned = &storage->planned;
  return NULL;
}

void jpp_planned_destroy(jpp_planned_t* planned) {
  if (!planned) return;
  planned_storage_t* storage = (planned_storage_t*)planned;
  jpp_check_report_destroy(storage->report);
  jpp_plan_destroy(storage->plan);
  jpp_staged_destroy(storage->staged);
  jpp_free(storage->offload);
  for (uint32_t l = 0; storage->made && l < planned->graph->num_loops; ++l) {
    jpp_schedule_destroy(storage->made[l]);
  }
  jpp_free(storage->made);
  jpp_free(storage->schedules);
  jpp_free(storage);
}
