// How long ranks wait for each other: as the simulator computes for a schedule, and in
// random steps that last until the last rank is done.
#include <math.h>
#include <stdlib.h>

#include "jaxpp/simulate.h"
#include "random_step.h"
#include "runtime/cluster/forecast.h"
#include "test_util.h"

static double work_of(const jpp_plan_t* plan, uint32_t rank) {
  jpp_plan_costs_t* costs = NULL;
  ASSERT_OK(jpp_plan_costs(plan, &costs));
  double flops = costs->ranks[rank].flops;
  jpp_plan_costs_destroy(costs);
  return flops;
}

static double waits_of(const jpp_plan_t* plan, const jpp_forecast_t* forecast,
                       uint32_t rank) {
  const jpp_program_t* program = &plan->programs[rank];
  double sum = 0;
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    double wait = forecast->waits[rank][i];
    bool crosses = program->instrs[i].kind == JPP_INSTR_SEND ||
                   program->instrs[i].kind == JPP_INSTR_RECV;
    assert_true(crosses ? wait >= 0 : wait == 0);
    sum += wait;
  }
  return sum;
}

// A rank works or waits until it is done.
static void check_forecast(const jpp_plan_t* plan, const jpp_forecast_t* forecast) {
  double last = 0, most = 0;
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    double end = work_of(plan, r) + waits_of(plan, forecast, r);
    if (end > last) last = end;
    if (work_of(plan, r) > most) most = work_of(plan, r);
  }
  assert_true(forecast->step >= most * (1 - 1e-9));
  assert_true(fabs(forecast->step - last) <= 1e-9 * last);
}

static void test_of_random_steps_ranks_work_or_wait(void** state) {
  (void)state;
  const char* times = test_variable("JPP_TEST_TIMES");
  uint64_t count = times ? strtoull(times, NULL, 10) : 500;
  double waited = 0;
  for (uint64_t seed = 1; seed <= count; ++seed) {
    uint32_t slots = 0;
    jpp_arena_t arena;
    jpp_forecast_t forecast;
    planned_t planned = random_step(seed, &slots);
    ASSERT_OK(plan_scheduled(&planned, slots));
    jpp__arena_init(&arena);
    ASSERT_OK(jpp__forecast_make(planned.plan, &arena, &forecast));
    check_forecast(planned.plan, &forecast);
    waited += waits_of(planned.plan, &forecast, 0);
    jpp__arena_deinit(&arena);
    plan_free(&planned);
  }
  assert_true(waited > 0);
}

// --- The simulator --------------------------------------------------------------------

enum { kStages = 4 };

// Outer tasks cost nothing in this graph.
static void costs_of(const jpp_staged_t* staged, jpp_cost_t costs[kStages]) {
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    if (task->loop == JPP_NONE) continue;
    jpp_cost_t* cost = &costs[task->stage];
    if (task->kind == JPP_TASK_FWD) cost->forward += (double)task->cost;
    if (task->kind == JPP_TASK_BWD) cost->backward += (double)task->cost;
    if (task->kind == JPP_TASK_BWD_I) cost->backward += (double)task->cost;
    if (task->kind == JPP_TASK_BWD_W) cost->weight += (double)task->cost;
  }
}

static void compare(const char* schedule, uint32_t ranks) {
  planned_t planned;
  jpp_arena_t arena;
  jpp_forecast_t forecast;
  jpp_cost_t costs[kStages] = {0};
  jpp_simulation_t* simulation = NULL;
  plan_options_t options = {.schedule = schedule, .ranks = ranks, .slots = 16};
  ASSERT_OK(plan_file("mlp4", &options, &planned));
  jpp__arena_init(&arena);
  ASSERT_OK(jpp__forecast_make(planned.plan, &arena, &forecast));
  check_forecast(planned.plan, &forecast);
  costs_of(planned.staged, costs);
  jpp_simulate_options_t simulate = {.struct_size = sizeof(simulate),
                                     .stage_costs = costs};
  ASSERT_OK(jpp_schedule_simulate(planned.schedules[0], &simulate, &simulation));
  assert_true(forecast.step > 0);
  if (forecast.step != simulation->makespan) {
    fail_msg("%s: expected %g, found %g", schedule, simulation->makespan, forecast.step);
  }
  jpp_simulation_destroy(simulation);
  jpp__arena_deinit(&arena);
  plan_free(&planned);
}

static void test_a_step_takes_what_the_simulator_says(void** state) {
  (void)state;
  compare("gpipe", 4);
  compare("1f1b", 4);
  compare("zb-h1", 4);
  compare("interleaved-1f1b", 2);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_of_random_steps_ranks_work_or_wait),
      cmocka_unit_test(test_a_step_takes_what_the_simulator_says),
  };
  return cmocka_run_group_tests_name("program_forecast", tests, NULL, NULL);
}
