// Plans a step under other built-in schedules, reusing the known bytes of its values. A
// value that the planner makes has the type and sharding of its origin in the graph, so
// sizes measured for one plan of a step hold for all its plans. Only values without
// sharding are packed.
#include "advise/candidates.h"

#include "base/alloc.h"
#include "check/checker.h"

jpp_status_t* jpp__candidates_init(jpp_candidates_t* candidates, const jpp_graph_t* graph,
                                   const jpp_plan_t* like,
                                   const jpp_memory_limits_t* limits) {
  *candidates =
      (jpp_candidates_t){.graph = graph, .ranks = like->ranks, .limits = limits};
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(graph->num_values, &candidates->origin_bytes));
  for (uint32_t v = 0; v < like->staged->num_values; ++v) {
    uint32_t origin = like->staged->origins[v];
    if (!like->value_bytes[v] || jpp_staged_is_packed(like->staged, v)) continue;
    candidates->origin_bytes[origin] = like->value_bytes[v];
  }
  return NULL;
}

void jpp__candidates_deinit(jpp_candidates_t* candidates) {
  jpp_free(candidates->origin_bytes);
  candidates->origin_bytes = NULL;
}

static jpp_status_t* measure_values(void* context, const jpp_staged_t* staged,
                                    uint64_t* out_bytes) {
  const jpp_candidates_t* candidates = context;
  for (uint32_t v = 0; v < staged->num_values; ++v) {
    uint64_t known = candidates->origin_bytes[staged->origins[v]];
    bool packed = jpp_staged_is_packed(staged, v);
    out_bytes[v] = known && !packed ? known : staged->values[v].bytes;
  }
  return NULL;
}

jpp_status_t* jpp__candidates_plan(const jpp_candidates_t* candidates,
                                   const jpp_schedule_t* const* schedules,
                                   jpp_planned_t** out_planned) {
  uint32_t loops = candidates->graph->num_loops;
  jpp_loop_schedule_t* sources = NULL;
  *out_planned = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(loops, &sources));
  for (uint32_t l = 0; l < loops; ++l) {
    sources[l] =
        (jpp_loop_schedule_t){.struct_size = sizeof(*sources), .given = schedules[l]};
  }
  jpp_plan_options_t options = {.struct_size = sizeof(options),
                                .ranks = candidates->ranks,
                                .channel_slots = candidates->channel_slots,
                                .loops = sources,
                                .offload = candidates->offload,
                                .offload_over = candidates->offload_over,
                                .measure = measure_values,
                                .context = (void*)candidates,
                                .last = JPP_PART_PROGRAM};
  jpp_status_t* status = jpp_plan_graph(candidates->graph, &options, out_planned);
  jpp_free(sources);
  return status;
}

bool jpp__candidates_fit(jpp_candidates_t* candidates, const jpp_plan_t* plan,
                         const char* name, uint64_t* out_peak) {
  const jpp_memory_limits_t* limits = candidates->limits;
  bool fits = true;
  *out_peak = 0;
  for (uint32_t first = jpp__limits_next_first(limits, plan->ranks, JPP_NONE);
       first != JPP_NONE; first = jpp__limits_next_first(limits, plan->ranks, first)) {
    uint64_t peak = jpp__limits_peak(limits, plan, first);
    if (peak > limits->bytes[first]) fits = false;
    if (peak > *out_peak) *out_peak = peak;
  }
  if (!candidates->smallest_name || *out_peak < candidates->smallest) {
    candidates->smallest_name = name;
    candidates->smallest = *out_peak;
  }
  return fits;
}
