// Finds a built-in schedule that fits a memory limit: plans the step under each schedule
// that supports its loops' sizes and returns, of those within the limits, the one with
// the shortest simulation.
#include "advise/candidates.h"
#include "base/log.h"
#include "base/null.h"
#include "base/str.h"
#include "check/checker.h"

typedef struct fitter {
  jpp_candidates_t candidates;
  const jpp_planned_t* planned;  // with its own schedules; exceeds the limits
  double own;                    // simulated time of `planned`
  const char* best_name;         // the best schedule that fits; NULL: none fits
  double best;                   // its simulated time
  uint64_t best_peak;            // its peak on the devices with the largest peak
} fitter_t;

// --- Simulated time -------------------------------------------------------------------

static jpp_status_t* simulate_loop(const jpp_planned_t* planned, uint32_t loop,
                                   double* out_makespan) {
  const jpp_schedule_t* schedule = planned->schedules[loop];
  jpp_cost_t* costs = NULL;
  jpp_simulation_t* simulation = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(schedule->stages, &costs));
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    costs[s] = jpp_staged_stage_cost(planned->staged, loop, s);
  }
  jpp_simulate_options_t options = {.struct_size = sizeof(options), .stage_costs = costs};
  jpp_status_t* status = jpp_schedule_simulate(schedule, &options, &simulation);
  jpp_free(costs);
  if (!status) *out_makespan = simulation->makespan;
  jpp_simulation_destroy(simulation);
  return status;
}

// The simulated time of all loops, one after the other, in the unit of the graph's costs.
static jpp_status_t* simulate_loops(const jpp_planned_t* planned, double* out_makespan) {
  *out_makespan = 0;
  for (uint32_t l = 0; l < planned->graph->num_loops; ++l) {
    double makespan = 0;
    JPP_RETURN_IF_ERROR(simulate_loop(planned, l, &makespan));
    *out_makespan += makespan;
  }
  return NULL;
}

// --- Built-in schedules ---------------------------------------------------------------

// Builds the named schedule for each loop. *out_serves is false if it does not support
// the sizes of a loop.
static jpp_status_t* build_schedules(const char* name, const jpp_planned_t* like,
                                     jpp_schedule_t** schedules, bool* out_serves) {
  *out_serves = false;
  for (uint32_t l = 0; l < like->graph->num_loops; ++l) {
    const jpp_schedule_t* own = like->schedules[l];
    jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                    .stages = own->stages,
                                    .ranks = own->ranks,
                                    .microbatches = own->microbatches};
    jpp_status_t* status = jpp_schedule_build(name, &params, &schedules[l]);
    if (jpp_schedule_is_misfit(status)) {
      jpp_status_free(status);
      return NULL;
    }
    JPP_RETURN_IF_ERROR(status);
  }
  *out_serves = true;
  return NULL;
}

static jpp_status_t* compare_with_best(fitter_t* f, const char* name,
                                       const jpp_schedule_t* const* schedules) {
  jpp_planned_t* planned = NULL;
  uint64_t peak = 0;
  double makespan = 0;
  JPP_RETURN_IF_ERROR(jpp__candidates_plan(&f->candidates, schedules, &planned));
  bool fits = jpp__candidates_fit(&f->candidates, planned->plan, name, &peak);
  jpp_status_t* status = fits ? simulate_loops(planned, &makespan) : NULL;
  jpp_planned_destroy(planned);
  if (status || !fits || (f->best_name && makespan >= f->best)) return status;
  f->best_name = name;
  f->best = makespan;
  f->best_peak = peak;
  return NULL;
}

static jpp_status_t* try_built_in(fitter_t* f, const char* name) {
  uint32_t loops = f->planned->graph->num_loops;
  jpp_schedule_t** schedules = NULL;
  bool serves = false;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(loops, &schedules));
  jpp_status_t* status = build_schedules(name, f->planned, schedules, &serves);
  if (serves)
    status = compare_with_best(f, name, (const jpp_schedule_t* const*)schedules);
  for (uint32_t l = 0; l < loops; ++l) jpp_schedule_destroy(schedules[l]);
  jpp_free(schedules);
  return status;
}

static jpp_status_t* find_fit(fitter_t* f) {
  uint64_t peak = 0;
  jpp__candidates_fit(&f->candidates, f->planned->plan, f->planned->schedules[0]->name,
                      &peak);
  JPP_RETURN_IF_ERROR(simulate_loops(f->planned, &f->own));
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    JPP_RETURN_IF_ERROR(try_built_in(f, jpp_schedule_info_at(i)->name));
  }
  JPP_LOG(JPP_LOG_INFO, "memory limit: of the built-in schedules %s fits best",
          f->best_name ? f->best_name : "none");
  return NULL;
}

// --- The text -------------------------------------------------------------------------

static void append_sizes(const jpp_schedule_t* schedule, jpp_str_t* str) {
  jpp_str_appendf(str, "of %u stage%s on %u rank%s with %u microbatch%s",
                  schedule->stages, jpp__plural(schedule->stages), schedule->ranks,
                  jpp__plural(schedule->ranks), schedule->microbatches,
                  schedule->microbatches == 1 ? "" : "es");
}

// Whether the ranks with the largest excess would fit the limit if they kept no
// activations.
static bool activations_exceed(const jpp_check_report_t* report,
                               const jpp_memory_limits_t* limits) {
  jpp_excess_t excess;
  if (!jpp__check_find_excess(report, limits, &excess)) return false;
  uint64_t activations = 0;
  for (uint32_t r = excess.first; r != JPP_NONE;
       r = jpp__limits_next_sharer(limits, report->plan->ranks, r)) {
    activations += report->actors[r].bytes_at_peak[JPP_BYTES_ACTIVATIONS];
  }
  return activations >= excess.peak - limits->bytes[excess.first];
}

static void append_fit(const fitter_t* f, jpp_str_t* str) {
  const jpp_schedule_t* own = f->planned->schedules[0];
  if (f->best_name) {
    jpp_str_appendf(str, "\nschedule %s ", f->best_name);
    append_sizes(own, str);
    jpp_str_appendf(str,
                    " fits: no %s more than %llu bytes; by the graph's costs it takes "
                    "%.2f times as long as %s",
                    f->candidates.limits->devices ? "devices hold" : "rank needs",
                    (unsigned long long)f->best_peak, f->own > 0 ? f->best / f->own : 1,
                    own->name);
    return;
  }
  jpp_str_append(str, "\nno built-in schedule ");
  append_sizes(own, str);
  jpp_str_appendf(str, " fits; the smallest limit that one fits is %llu bytes, with %s. ",
                  (unsigned long long)f->candidates.smallest,
                  f->candidates.smallest_name);
  jpp_str_append(str, activations_exceed(f->planned->report, f->candidates.limits)
                          ? "jax.checkpoint around the layers of a stage, more ranks, or "
                            "smaller microbatches need less"
                          : "More ranks, or smaller microbatches, need less");
}

static jpp_status_t* append_advice(const jpp_planned_t* planned,
                                   const jpp_memory_limits_t* limits, jpp_str_t* str) {
  fitter_t f = {.planned = planned};
  jpp_status_t* status =
      jpp__candidates_init(&f.candidates, planned->graph, planned->plan, limits);
  f.candidates.offload = planned->offload;
  f.candidates.channel_slots = planned->channel_slots;
  if (!status) status = find_fit(&f);
  if (!status) append_fit(&f, str);
  jpp__candidates_deinit(&f.candidates);
  return status;
}

jpp_status_t* jpp_advise_fit(const jpp_planned_t* planned,
                             const jpp_memory_limits_t* limits) {
  JPP_RETURN_IF_NULL(planned, limits);
  JPP_RETURN_IF_NULL(planned->graph, planned->plan, planned->report, limits->bytes);
  jpp_str_t str = {0};
  jpp_status_t* status = NULL;
  if (!jpp__check_append_excess(planned->report, limits, &str)) return NULL;
  if (planned->graph->num_loops) status = append_advice(planned, limits, &str);
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp__str_finish_unless(status, &str, &text));
  status = jpp_status_make(JPP_OUT_OF_MEMORY, "%s", text);
  jpp_free(text);
  return status;
}
