// Proves a plan from its instructions alone: each actor's list on its own, then both ends
// of every channel, then all actors together for deadlock. It shares no code with the
// planner, so a mistake in the planner cannot hide.
#include "base/null.h"
#include "check/checker.h"
#include "task/ids.h"

static jpp_status_t* prepare_registers(jpp_checker_t* c) {
  uint32_t most = 0;
  for (uint32_t r = 0; r < c->plan->ranks; ++r) {
    uint32_t count = c->plan->programs[r].num_registers;
    if (count > most) most = count;
  }
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, most, &c->registers));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, most, &c->reads));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, most, &c->before));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, most, &c->next_of));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, most, &c->previous_of));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, JPP_CHECK_PAIRED, &c->paired));
  return JPP_ARENA_ARRAY(&c->scratch, most, &c->handed_out);
}

static jpp_status_t* prepare_checker(jpp_checker_t* c) {
  const jpp_staged_t* staged = c->staged;
  JPP_RETURN_IF_ERROR(
      jpp__ids_create(&c->scratch, staged->num_values, &c->accumulator_of));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, staged->num_values, &c->summed));
  for (uint32_t i = 0; i < staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &staged->accumulators[i];
    c->accumulator_of[acc->init] = c->accumulator_of[acc->state] = i;
    c->accumulator_of[acc->next] = c->accumulator_of[acc->final] = i;
  }
  uint64_t total = 0;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, staged->num_tasks, &c->first_run));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, staged->num_tasks, &c->runs));
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    uint32_t loop = staged->tasks[t].loop;
    c->first_run[t] = total;
    total += loop == JPP_NONE ? 1 : staged->graph->loops[loop].microbatches;
  }
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, total, &c->ran));
  JPP_RETURN_IF_ERROR(prepare_registers(c));
  return jpp__check_kinds(c);
}

static jpp_status_t* check_output_ranks(const jpp_checker_t* c) {
  for (uint32_t i = 0; i < c->staged->graph->num_outputs; ++i) {
    uint32_t r = 0;
    while (r < c->plan->ranks && !jpp_rank_set_has(c->staged->outputs[i].ranks, r)) ++r;
    if (r < c->plan->ranks) continue;
    return jpp_status_make(JPP_INTERNAL_ERROR, "output %u is left on no rank", i);
  }
  return NULL;
}

static jpp_status_t* check_all(jpp_checker_t* c) {
  JPP_RETURN_IF_ERROR(prepare_checker(c));
  JPP_RETURN_IF_ERROR(check_output_ranks(c));
  JPP_RETURN_IF_ERROR(jpp__check_bindings(c));
  JPP_RETURN_IF_ERROR(jpp__check_copies(c));
  for (uint32_t r = 0; r < c->plan->ranks; ++r) {
    JPP_RETURN_IF_ERROR(jpp__check_actor(c, r));
    jpp__check_next_step(c, r);
  }
  JPP_RETURN_IF_ERROR(jpp__check_run_counts(c));
  JPP_RETURN_IF_ERROR(jpp__check_channels(c));
  return jpp__check_waiting(c);
}

// Prepares a checker whose report is allocated in `arena`. Free it with checker_deinit(),
// even after an error.
static jpp_status_t* checker_init(const jpp_plan_t* plan, jpp_arena_t* arena,
                                  jpp_checker_t* out_c) {
  *out_c = (jpp_checker_t){.plan = plan, .staged = plan->staged};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->ranks, &out_c->actors));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->num_channels, &out_c->channels));
  return JPP_ALLOC_ARRAY(plan->num_channels, &out_c->ends);
}

static void checker_deinit(jpp_checker_t* c) {
  for (uint32_t i = 0; c->ends && i < c->plan->num_channels; ++i) {
    jpp_vec_deinit(&c->ends[i].sends);
    jpp_vec_deinit(&c->ends[i].recvs);
  }
  jpp_free(c->ends);
  jpp__arena_deinit(&c->scratch);
}

static jpp_status_t* fill_report(const jpp_plan_t* plan, bool walks_all,
                                 uint64_t* out_repeated, jpp_check_storage_t* storage) {
  jpp_checker_t c;
  jpp_status_t* status = checker_init(plan, &storage->arena, &c);
  c.walks_all = walks_all;
  if (!status) status = check_all(&c);
  checker_deinit(&c);
  storage->report =
      (jpp_check_report_t){.plan = plan, .actors = c.actors, .channels = c.channels};
  *out_repeated = c.repeated;
  return status;
}

jpp_status_t* jpp__check_plan(const jpp_plan_t* plan, bool walks_all,
                              uint64_t* out_repeated, jpp_check_report_t** out_report) {
  *out_report = NULL;
  jpp_check_storage_t* storage = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  jpp_status_t* status = fill_report(plan, walks_all, out_repeated, storage);
  if (status) {
    jpp_check_report_destroy(&storage->report);
    return status;
  }
  *out_report = &storage->report;
  return NULL;
}

jpp_status_t* jpp_check_plan(const jpp_plan_t* plan, jpp_check_report_t** out_report) {
  JPP_RETURN_IF_NULL(plan, out_report);
  uint64_t repeated = 0;
  return jpp__check_plan(plan, false, &repeated, out_report);
}

jpp_status_t* jpp__check_memory_curve(const jpp_plan_t* plan, uint32_t rank,
                                      bool walks_all, jpp_memory_point_t* out_points) {
  jpp_checker_t c;
  jpp_arena_t arena;
  jpp__arena_init(&arena);
  jpp_status_t* status = checker_init(plan, &arena, &c);
  c.curve = out_points;
  c.walks_all = walks_all;
  if (!status) status = prepare_checker(&c);
  if (!status) status = jpp__check_actor(&c, rank);
  checker_deinit(&c);
  jpp__arena_deinit(&arena);
  return status;
}

jpp_status_t* jpp_check_memory_curve(const jpp_plan_t* plan, uint32_t rank,
                                     uint32_t count, jpp_memory_point_t* out_points) {
  JPP_RETURN_IF_NULL(plan, out_points);
  if (rank >= plan->ranks) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "memory curve: the plan has ranks 0 to %u, found rank %u",
                           plan->ranks - 1, rank);
  }
  JPP_RETURN_IF_ERROR(jpp__check_count("the points of a memory curve",
                                       (uint64_t)plan->programs[rank].num_instrs + 1,
                                       count));
  return jpp__check_memory_curve(plan, rank, false, out_points);
}

void jpp_check_report_destroy(jpp_check_report_t* report) {
  if (!report) return;
  jpp_check_storage_t* storage = (jpp_check_storage_t*)report;
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage);
}
