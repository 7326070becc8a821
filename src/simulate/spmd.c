// Computes the time of a pipeline in one SPMD program with a formula, because all its
// turns have the same length.
#include "base/null.h"
#include "jaxpp/simulate.h"

static double larger(double a, double b) { return a > b ? a : b; }

static jpp_status_t* check_shape(const jpp_simulation_t* simulation) {
  const jpp_schedule_t* schedule = simulation->schedule;
  uint32_t ranks = schedule->ranks, stages = schedule->stages;
  if (stages % ranks) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "one SPMD program: expected as many stages on each rank, found "
        "%u stages on %u ranks",
        stages, ranks);
  }
  if (stages > ranks && schedule->microbatches % ranks) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "one SPMD program of %u stages a rank: expected microbatches in "
        "groups of %u, one a rank, found %u",
        stages / ranks, ranks, schedule->microbatches);
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    if (simulation->activations[r] == JPP_ACTIVATIONS_KEPT) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "one SPMD program: expected a simulation whose ranks keep "
                           "their activations, found that those of rank %u are %s",
                           r, jpp_activations_name(simulation->activations[r]));
  }
  return NULL;
}

static bool has_backward(const jpp_schedule_t* schedule) {
  const jpp_schedule_row_t* row = &schedule->rows[0];
  for (uint32_t i = 0; i < row->count; ++i) {
    uint8_t kind = row->tasks[i].kind;
    if (kind == JPP_TASK_BWD || kind == JPP_TASK_BWD_I) return true;
  }
  return false;
}

jpp_status_t* jpp_simulate_spmd(const jpp_simulation_t* simulation, double transfer,
                                bool rematerialise, jpp_spmd_simulation_t* out_spmd) {
  JPP_RETURN_IF_NULL(simulation, out_spmd);
  const jpp_schedule_t* schedule = simulation->schedule;
  *out_spmd = (jpp_spmd_simulation_t){0};
  JPP_RETURN_IF_ERROR(check_shape(simulation));
  double forward = 0, backward = 0, work = 0;
  bool returns = has_backward(schedule);
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    const jpp_cost_t* cost = &simulation->stage_costs[s];
    forward = larger(forward, cost->forward);
    double back = returns ? cost->backward + cost->weight : 0;
    backward = larger(backward, back);
    work += cost->forward + back;
  }
  double again = rematerialise && returns ? forward : 0;
  uint64_t per_rank = schedule->stages / schedule->ranks;
  uint64_t useful = schedule->microbatches * per_rank;
  jpp_spmd_simulation_t spmd = {
      .turns = useful + schedule->ranks - 1,
      .forward_turn = forward + transfer,
      .backward_turn = returns ? again + backward + transfer : 0};
  spmd.makespan = (double)spmd.turns * (spmd.forward_turn + spmd.backward_turn);
  if (spmd.makespan > 0) {
    spmd.lost = (double)(spmd.turns - useful) / (double)spmd.turns;
    spmd.rematerialised = (double)spmd.turns * again / spmd.makespan;
    spmd.utilisation = work * schedule->microbatches / (schedule->ranks * spmd.makespan);
  }
  spmd.peak = (double)spmd.turns / (double)per_rank;
  *out_spmd = spmd;
  return NULL;
}
