#include "check/fit.h"

#include "base/arena.h"
#include "jaxpp/schedule_simulate.h"

// The step planned anew.
typedef struct candidate {
  jpp_staged_t* staged;
  jpp_plan_t* plan;
} candidate_t;

typedef struct fitter {
  const jpp_graph_t* graph;
  const jpp_plan_t* plan;  // of the step, for the bytes of its values
  const uint64_t* limits;
  double makespan;  // of the plan's own schedules
  double best;      // of what fits
  jpp_fit_t* fit;
} fitter_t;

static void candidate_deinit(candidate_t* c) {
  jpp_plan_destroy(c->plan);
  jpp_staged_destroy(c->staged);
}

// --- Planning -------------------------------------------------------------------------

static jpp_status_t* partition(const fitter_t* f, const jpp_schedule_t* const* schedules,
                               candidate_t* c) {
  const jpp_graph_t* graph = f->graph;
  jpp_loop_placement_t* placements = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(graph->num_loops, &placements));
  for (uint32_t l = 0; l < graph->num_loops; ++l) {
    placements[l] = jpp_schedule_placement(schedules[l]);
  }
  jpp_partition_options_t options = {.ranks = f->plan->ranks, .loops = placements};
  jpp_status_t* status = jpp_partition(graph, &options, &c->staged);
  jpp_free(placements);
  return status;
}

static void fill_accumulator_bytes(const fitter_t* f, const candidate_t* c,
                                   uint64_t* bytes) {
  const jpp_staged_t* own = f->plan->staged;
  for (uint32_t a = 0; a < c->staged->num_accumulators; ++a) {
    const jpp_accumulator_t* acc = &c->staged->accumulators[a];
    for (uint32_t i = 0; i < own->num_accumulators; ++i) {
      const jpp_accumulator_t* same = &own->accumulators[i];
      if (same->loop != acc->loop || same->result != acc->result) continue;
      uint64_t found = f->plan->value_bytes[same->next];
      bytes[acc->init] = bytes[acc->state] = found;
      bytes[acc->next] = bytes[acc->final] = found;
      break;
    }
  }
}

// [values of the candidate]: as the plan has them; sums have the bytes of their terms.
static jpp_status_t* fill_bytes(const fitter_t* f, const candidate_t* c,
                                uint64_t** out_bytes) {
  uint32_t known = f->plan->staged->graph->num_values;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(c->staged->num_values, out_bytes));
  uint64_t* bytes = *out_bytes;
  for (uint32_t v = 0; v < known; ++v) bytes[v] = f->plan->value_bytes[v];
  fill_accumulator_bytes(f, c, bytes);
  for (uint32_t id = 0; id < c->staged->num_ops; ++id) {
    const jpp_op_t* op = &c->staged->ops[id];
    uint32_t sum = op->first_output;
    if (op->kind == JPP_OP_SUM && !bytes[sum]) bytes[sum] = bytes[op->inputs[0]];
  }
  for (uint32_t v = 0; v < c->staged->num_values; ++v) {
    if (!bytes[v]) bytes[v] = c->staged->values[v].bytes;
  }
  return NULL;
}

static jpp_status_t* build_plan(const fitter_t* f, const jpp_schedule_t* const* schedules,
                                candidate_t* c) {
  uint64_t* bytes = NULL;
  JPP_RETURN_IF_ERROR(partition(f, schedules, c));
  jpp_status_t* status = fill_bytes(f, c, &bytes);
  jpp_program_options_t options = {.schedules = schedules, .value_bytes = bytes};
  if (!status) status = jpp_program_build(c->staged, &options, &c->plan);
  jpp_free(bytes);
  return status;
}

// --- Comparing ------------------------------------------------------------------------

static void stage_cost(const jpp_staged_t* staged, uint32_t loop, uint32_t stage,
                       jpp_cost_t* out_cost) {
  const jpp_staged_loop_t* at = &staged->loops[loop];
  out_cost->forward = (double)staged->tasks[at->forward[stage]].cost;
  if (at->has_backward) {
    out_cost->backward = (double)staged->tasks[at->backward[stage]].cost;
  }
  if (at->split_backward) {
    out_cost->weight = (double)staged->tasks[at->weight[stage]].cost;
  }
}

// The loops' simulated time, one after the other, in the unit of the graph's costs.
static jpp_status_t* simulate(const jpp_staged_t* staged,
                              const jpp_schedule_t* const* schedules,
                              double* out_makespan) {
  *out_makespan = 0;
  for (uint32_t l = 0; l < staged->graph->num_loops; ++l) {
    jpp_cost_t* costs = NULL;
    jpp_simulation_t* simulation = NULL;
    JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(schedules[l]->stages, &costs));
    for (uint32_t s = 0; s < schedules[l]->stages; ++s) {
      stage_cost(staged, l, s, &costs[s]);
    }
    jpp_simulate_options_t options = {.stage_costs = costs};
    jpp_status_t* status = jpp_schedule_simulate(schedules[l], &options, &simulation);
    jpp_free(costs);
    if (status) return status;
    *out_makespan += simulation->makespan;
    jpp_simulation_destroy(simulation);
  }
  return NULL;
}

static void note_peaks(const fitter_t* f, const jpp_plan_t* plan, const char* name,
                       bool* out_fits, uint64_t* out_peak) {
  *out_fits = true;
  *out_peak = 0;
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    uint64_t peak = plan->programs[r].peak_bytes;
    if (peak > f->limits[r]) *out_fits = false;
    if (peak > *out_peak) *out_peak = peak;
  }
  if (f->fit->smallest_name && *out_peak >= f->fit->smallest) return;
  f->fit->smallest_name = name;
  f->fit->smallest = *out_peak;
}

// --- Built-in schedules ---------------------------------------------------------------

static jpp_status_t* compare(fitter_t* f, const char* name,
                             const jpp_schedule_t* const* schedules) {
  candidate_t c = {0};
  bool fits = false;
  uint64_t peak = 0;
  double makespan = 0;
  jpp_status_t* status = build_plan(f, schedules, &c);
  if (!status) note_peaks(f, c.plan, name, &fits, &peak);
  if (!status && fits) status = simulate(c.staged, schedules, &makespan);
  candidate_deinit(&c);
  if (status || !fits || (f->fit->name && makespan >= f->best)) return status;
  f->best = makespan;
  f->fit->name = name;
  f->fit->peak = peak;
  f->fit->slowdown = f->makespan > 0 ? makespan / f->makespan : 1;
  return NULL;
}

// One of the name for each loop, of the sizes of `like`; what was made stays on failure.
static jpp_status_t* build_schedules(const char* name, const jpp_schedule_t* const* like,
                                     uint32_t loops, jpp_schedule_t** schedules) {
  for (uint32_t l = 0; l < loops; ++l) {
    jpp_schedule_params_t params = {.stages = like[l]->stages,
                                    .ranks = like[l]->ranks,
                                    .microbatches = like[l]->microbatches};
    JPP_RETURN_IF_ERROR(jpp_schedule_build(name, &params, &schedules[l]));
  }
  return NULL;
}

static jpp_status_t* try_schedule(fitter_t* f, const char* name,
                                  const jpp_schedule_t* const* like) {
  uint32_t loops = f->graph->num_loops;
  jpp_schedule_t** schedules = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(loops, &schedules));
  jpp_status_t* status = build_schedules(name, like, loops, schedules);
  if (!status) status = compare(f, name, (const jpp_schedule_t* const*)schedules);
  for (uint32_t l = 0; l < loops; ++l) jpp_schedule_destroy(schedules[l]);
  jpp_free(schedules);
  if (!status || jpp_status_code(status) == JPP_OUT_OF_MEMORY) return status;
  jpp_status_free(status);  // not of these sizes
  return NULL;
}

jpp_status_t* jpp_check_find_fit(const jpp_plan_t* plan,
                                 const jpp_schedule_t* const* schedules,
                                 const uint64_t* limits, jpp_fit_t* out_fit) {
  *out_fit = (jpp_fit_t){0};
  fitter_t f = {
      .graph = plan->staged->graph, .plan = plan, .limits = limits, .fit = out_fit};
  if (!f.graph->num_loops) return NULL;
  bool fits = false;
  uint64_t peak = 0;
  note_peaks(&f, plan, schedules[0]->name, &fits, &peak);
  JPP_RETURN_IF_ERROR(simulate(plan->staged, schedules, &f.makespan));
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    JPP_RETURN_IF_ERROR(try_schedule(&f, jpp_schedule_info_at(i)->name, schedules));
  }
  return NULL;
}

// --- Searched schedules ---------------------------------------------------------------

typedef struct acceptor {
  fitter_t f;
  const jpp_schedule_t** schedules;  // [loops]
  uint32_t loop;
  const jpp_search_options_t* options;  // the caller's
} acceptor_t;

static jpp_status_t* accept(void* context, const jpp_schedule_t* schedule,
                            bool* out_accept) {
  acceptor_t* a = context;
  candidate_t c = {0};
  uint64_t peak = 0;
  a->schedules[a->loop] = schedule;
  *out_accept = false;
  jpp_status_t* status = build_plan(&a->f, a->schedules, &c);
  if (!status) note_peaks(&a->f, c.plan, schedule->name, out_accept, &peak);
  candidate_deinit(&c);
  return status;
}

static void report(void* context, const jpp_search_progress_t* progress) {
  const acceptor_t* a = context;
  if (a->options->progress) a->options->progress(a->options->context, progress);
}

static jpp_status_t* poll(void* context) {
  const acceptor_t* a = context;
  return a->options->poll ? a->options->poll(a->options->context) : NULL;
}

// What the search could not know: how much would have been enough.
static jpp_status_t* refuse(const acceptor_t* a, jpp_status_t* status) {
  bool memory = jpp_status_code(status) == JPP_OUT_OF_MEMORY;
  if (!memory || !a->f.fit->smallest_name) return status;
  const uint64_t* limits = a->f.limits;
  uint64_t least = limits[0];
  for (uint32_t r = 1; r < a->options->ranks; ++r) {
    if (limits[r] < least) least = limits[r];
  }
  jpp_status_free(status);
  return jpp_status_make(
      JPP_OUT_OF_MEMORY,
      "memory limit: expected a schedule of %u stages on %u ranks with %u microbatches "
      "that takes at most %llu bytes on each device, found none; of what was tried, the "
      "smallest takes %llu bytes. More ranks, or smaller microbatches, need less",
      a->options->stages, a->options->ranks, a->options->microbatches,
      (unsigned long long)least, (unsigned long long)a->f.fit->smallest);
}

jpp_status_t* jpp_check_search(const jpp_check_search_t* step,
                               const jpp_search_options_t* options,
                               jpp_search_result_t* out_result) {
  jpp_fit_t fit = {0};
  acceptor_t a = {.f = {.graph = step->graph,
                        .plan = step->like,
                        .limits = step->limits,
                        .fit = &fit},
                  .loop = step->loop,
                  .options = options};
  jpp_search_options_t under_limits = *options;
  under_limits.accept = step->limits ? accept : NULL;
  under_limits.progress = report;
  under_limits.poll = poll;
  under_limits.context = &a;
  *out_result = (jpp_search_result_t){0};
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(step->graph->num_loops, &a.schedules));
  for (uint32_t l = 0; l < step->graph->num_loops; ++l) {
    a.schedules[l] = step->schedules[l];
  }
  jpp_status_t* status = jpp_schedule_search(&under_limits, out_result);
  jpp_free(a.schedules);
  return status ? refuse(&a, status) : NULL;
}
