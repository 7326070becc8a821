// Compares the simulator with the papers' figures and with a simulation that is simple
// enough to trust.
#include <math.h>
#include <stdlib.h>

#include "jaxpp/simulate.h"
#include "jaxpp/view.h"
#include "schedule_util.h"

// Sanitizers make everything several times slower, so they run only part of the grid.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { kGridStep = 7 };
#else
enum { kGridStep = 1 };
#endif

static jpp_simulation_t* simulate(const jpp_schedule_t* schedule, double f, double b,
                                  double w) {
  jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                    .rank_cost = {f, b, w}};
  jpp_simulation_t* simulation = NULL;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  return simulation;
}

static void assert_near(double found, double expected) {
  if (fabs(found - expected) > 1e-9 * (1 + fabs(expected))) {
    fail_msg("expected %.12g, found %.12g", expected, found);
  }
}

typedef struct figures {
  uint32_t ranks, microbatches;
  double cost[3];
  double bubble[4];  // 1f1b, zb-h1, interleaved with 2 and with 4 chunks
} figures_t;

static void test_bubbles_are_exact(void** state) {
  (void)state;
  static const figures_t kTable[] = {
      {4, 8, {1, 1, 1}, {9, 3, 4.5, 2.25}},
      {8, 16, {1, 1, 1}, {21, 7, 10.5, 5.25}},
      {4, 8, {2, 3, 1}, {18, 12, 9, 4.5}},
      {8, 16, {2, 3, 1}, {42, 28, 21, 10.5}},
  };
  static const char* const kNames[] = {"1f1b", "zb-h1", "interleaved-1f1b",
                                       "interleaved-1f1b"};
  static const uint32_t kChunks[] = {1, 1, 2, 4};
  for (uint32_t i = 0; i < 16; ++i) {
    const figures_t* row = &kTable[i / 4];
    jpp_schedule_t* schedule =
        build(kNames[i % 4], row->ranks * kChunks[i % 4], row->ranks, row->microbatches);
    jpp_simulation_t* simulation =
        simulate(schedule, row->cost[0], row->cost[1], row->cost[2]);
    assert_true(simulation->bubble_global == row->bubble[i % 4]);
    jpp_simulation_destroy(simulation);
    jpp_schedule_destroy(schedule);
  }
}

typedef struct bounds {
  double bubble_global, bubble_span, peak;
} bounds_t;

static bounds_t bounds_of(const char* name, uint32_t chunks, uint32_t ranks,
                          uint32_t microbatches, const double cost[3]) {
  jpp_schedule_t* schedule = build(name, ranks * chunks, ranks, microbatches);
  jpp_simulation_t* simulation = simulate(schedule, cost[0], cost[1], cost[2]);
  bounds_t bounds = {simulation->bubble_global, simulation->bubble_span, 0};
  for (uint32_t r = 0; r < ranks; ++r) {
    if (simulation->ranks[r].peak > bounds.peak) bounds.peak = simulation->ranks[r].peak;
  }
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
  return bounds;
}

static void test_bubbles_and_peaks_are_those_of_the_papers(void** state) {
  (void)state;
  static const double kEqual[] = {1, 1, 1}, kOther[] = {2, 3, 1};
  for (uint32_t ranks = 1; ranks <= 12; ++ranks) {
    uint32_t m = 4 * ranks;
    for (uint32_t k = 0; k < 2; ++k) {
      const double* c = k ? kOther : kEqual;
      double all = c[0] + c[1] + c[2];
      assert_near(bounds_of("gpipe", 1, ranks, m, c).bubble_global, (ranks - 1) * all);
      assert_near(bounds_of("1f1b", 1, ranks, m, c).bubble_global, (ranks - 1) * all);
      assert_near(bounds_of("eager-1f1b", 1, ranks, m, c).bubble_global,
                  (ranks - 1) * all);
      assert_near(bounds_of("zb-h2", 1, ranks, m, c).bubble_span,
                  (ranks - 1) * (c[0] + c[1] - 2 * c[2]));
    }
    assert_near(bounds_of("zb-h2", 1, ranks, m, kEqual).peak, 2 * ranks - 1);
    assert_near(bounds_of("zb-v", 2, ranks, m, kEqual).bubble_span, 0);
    assert_near(bounds_of("zb-v", 2, ranks, m, kEqual).peak, ranks);
    assert_true(bounds_of("v-half", 2, ranks, m, kEqual).peak <= ranks / 2.0 + 1);
    assert_true(bounds_of("v-min", 2, ranks, m, kEqual).peak <= (ranks + 1) / 3.0 + 1);
    assert_near(bounds_of("v-1f1b", 2, ranks, m, kEqual).peak, ranks);
  }
}

// --- A second simulator ----------------------------------------------------------------

enum { kMaxStages = 32, kMaxMicrobatches = 24 };

// Ends of FWD, BWD or BWD_I, BWD_W. Sweeps over all rows until nothing changes.
static double g_end[3][kMaxStages][kMaxMicrobatches];

static double* end_of(const jpp_schedule_task_t* t) {
  int kind = t->kind == JPP_TASK_FWD ? 0 : t->kind == JPP_TASK_BWD_W ? 2 : 1;
  return &g_end[kind][t->stage][t->microbatch];
}

static double naive_start(const jpp_schedule_t* schedule, const jpp_schedule_task_t* t) {
  uint32_t s = t->stage, m = t->microbatch;
  if (t->kind == JPP_TASK_FWD) return s ? g_end[0][s - 1][m] : 0;
  if (t->kind == JPP_TASK_BWD_W) return g_end[1][s][m];
  double after = s + 1 < schedule->stages ? g_end[1][s + 1][m] : 0;
  return fmax(g_end[0][s][m], after);
}

static double naive_cost(const double cost[3], const jpp_schedule_task_t* t) {
  if (t->kind == JPP_TASK_FWD) return cost[0];
  if (t->kind == JPP_TASK_BWD_I) return cost[1];
  return t->kind == JPP_TASK_BWD_W ? cost[2] : cost[1] + cost[2];
}

// Returns stream 0, except for weight gradients and tasks that join the previous one,
// which take the first free one of the other streams.
static uint32_t naive_stream(const jpp_schedule_row_t* row, uint32_t i,
                             const double* free_at, uint32_t streams) {
  bool joins = i && row->tasks[i - 1].joins_next;
  if (streams == 1 || (row->tasks[i].kind != JPP_TASK_BWD_W && !joins)) return 0;
  return streams == 3 && free_at[2] < free_at[1] ? 2 : 1;
}

static double naive_makespan(const jpp_schedule_t* schedule, const double cost[3],
                             uint32_t streams) {
  double makespan = 0;
  memset(g_end, 0, sizeof(g_end));
  for (bool changed = true; changed;) {
    changed = false;
    makespan = 0;
    for (uint32_t r = 0; r < schedule->ranks; ++r) {
      double free_at[3] = {0};
      for (uint32_t i = 0; i < schedule->rows[r].count; ++i) {
        const jpp_schedule_task_t* t = &schedule->rows[r].tasks[i];
        if (t->kind == JPP_TASK_IDLE) continue;
        double* now = &free_at[naive_stream(&schedule->rows[r], i, free_at, streams)];
        *now = fmax(*now, naive_start(schedule, t)) + naive_cost(cost, t);
        changed = changed || *now != *end_of(t);
        *end_of(t) = *now;
        makespan = fmax(makespan, *now);
      }
    }
  }
  return makespan;
}

// Tracks what a rank runs and keeps in each unit of time; costs are whole numbers.
static void naive_rank(const jpp_schedule_t* schedule, uint32_t r, const double cost[3],
                       double* out_busy, int* out_peak) {
  *out_busy = 0;
  *out_peak = 0;
  double end = 1;
  for (double now = 0; now < end; ++now) {
    bool busy = false;
    int kept = 0;
    for (uint32_t i = 0; i < schedule->rows[r].count; ++i) {
      const jpp_schedule_task_t* t = &schedule->rows[r].tasks[i];
      if (t->kind == JPP_TASK_IDLE) continue;
      double stop = *end_of(t), start = stop - naive_cost(cost, t);
      bool frees = t->kind == JPP_TASK_BWD || t->kind == JPP_TASK_BWD_W;
      end = fmax(end, stop);
      busy = busy || (start <= now && now < stop);
      kept += t->kind == JPP_TASK_FWD && start <= now;
      kept -= frees && stop <= now;
    }
    *out_busy += busy;
    if (kept > *out_peak) *out_peak = kept;
  }
}

static void compare_ranks(const jpp_simulation_t* simulation, const double cost[3]) {
  const jpp_schedule_t* schedule = simulation->schedule;
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    double busy = 0;
    int peak = 0;
    naive_rank(schedule, r, cost, &busy, &peak);
    assert_near(simulation->ranks[r].work, busy);
    assert_near(simulation->ranks[r].peak * schedule->stages / schedule->ranks, peak);
  }
}

static uint32_t g_simulated;

static void compare(const jpp_schedule_t* schedule) {
  // Whole numbers after division by the stages of a rank, so that sums are exact.
  static const double kCosts[][3] = {{1, 1, 1}, {2, 3, 1}, {1, 5, 2}};
  uint32_t v = schedule->stages / schedule->ranks;
  ASSERT_OK(jpp_schedule_verify(schedule));
  for (uint32_t k = 0; k < 3; ++k) {
    const double* c = kCosts[k];
    jpp_simulation_t* simulation = simulate(schedule, c[0] * v, c[1] * v, c[2] * v);
    double expected = naive_makespan(schedule, c, 1);
    if (simulation->makespan != expected) {
      fail_msg("%s, %u stages, %u ranks, %u microbatches: %g, expected %g",
               schedule->name, schedule->stages, schedule->ranks, schedule->microbatches,
               simulation->makespan, expected);
    }
    jpp_simulation_destroy(simulation);
    ++g_simulated;
  }
}

static void test_grid_is_simulated_as_by_the_naive_one(void** state) {
  (void)state;
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    for (uint32_t n = 0; n < 8 * 4 * 24; n += kGridStep) {
      uint32_t ranks = n % 8 + 1, v = n / 8 % 4 + 1;
      jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                      .stages = ranks * v,
                                      .ranks = ranks,
                                      .microbatches = n / 32 + 1};
      jpp_schedule_t* schedule = NULL;
      jpp_status_t* status =
          jpp_schedule_build(jpp_schedule_info_at(i)->name, &params, &schedule);
      if (!status) compare(schedule);
      jpp_status_free(status);
      jpp_schedule_destroy(schedule);
    }
  }
  assert_true(g_simulated > 17000 / kGridStep);
}

static uint32_t g_with_streams;

static void compare_streams(const jpp_schedule_t* schedule) {
  static const double kCosts[][3] = {{1, 1, 1}, {2, 3, 1}, {1, 2, 6}};
  const double* c = kCosts[g_with_streams % 3];
  double v = (double)schedule->stages / schedule->ranks;
  for (uint32_t streams = 1; streams <= 3; ++streams) {
    jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                      .rank_cost = {c[0] * v, c[1] * v, c[2] * v},
                                      .streams = streams};
    jpp_simulation_t* simulation = NULL;
    ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
    assert_true(simulation->makespan == naive_makespan(schedule, c, streams));
    if (schedule->microbatches <= 6) compare_ranks(simulation, c);
    jpp_simulation_destroy(simulation);
  }
  ++g_with_streams;
}

static void test_streams_are_simulated_as_by_the_naive_one(void** state) {
  (void)state;
  for_each_schedule(compare_streams);
  assert_true(g_with_streams > 2000);
}

// Weight gradients delay nothing else: what remains is the forwards and input gradients
// of a rank, and the time that a pipeline takes to fill and drain.
static void test_a_second_stream_takes_weight_gradients(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("zb-h1", 2, 2, 4);
  jpp_simulate_options_t options = {
      .struct_size = sizeof(options), .rank_cost = {1, 1, 1}, .streams = 2};
  jpp_simulation_t* simulation = NULL;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  assert_near(simulation->makespan, 4 * (1 + 1) + 2 + 1);
  for (uint32_t r = 0; r < 2; ++r) {
    for (uint32_t i = 0; i < schedule->rows[r].count; ++i) {
      bool weight = schedule->rows[r].tasks[i].kind == JPP_TASK_BWD_W;
      assert_int_equal(simulation->stream_of[r][i], weight);
    }
  }
  jpp_simulation_destroy(simulation);
  options.streams = 65;
  ASSERT_FAILS(jpp_schedule_simulate(schedule, &options, &simulation),
               JPP_INVALID_ARGUMENT, "expected at most 64 streams a rank, found 65");
  jpp_schedule_destroy(schedule);
}

// Both halves of a pair start at once, unless one needs the other.
static void test_a_second_stream_overlaps_pairs(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("dualpipe-v", 4, 2, 8);
  jpp_simulate_options_t options = {
      .struct_size = sizeof(options), .rank_cost = {2, 2, 2}, .streams = 2};
  jpp_simulation_t* simulation = NULL;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  uint32_t overlapping = 0;
  for (uint32_t i = 1; i < schedule->rows[0].count; ++i) {
    if (!schedule->rows[0].tasks[i - 1].joins_next) continue;
    assert_int_equal(simulation->stream_of[0][i], 1);
    overlapping += fabs(simulation->starts[0][i] - simulation->starts[0][i - 1]) < 1;
  }
  assert_true(overlapping > 0);
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
}

static void test_optimizer_waits_for_all_or_not(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("zb-h2", 4, 4, 12);
  jpp_simulate_options_t options = {
      .struct_size = sizeof(options), .rank_cost = {1, 1, 1}, .optimizer = 5};
  jpp_simulation_t* simulation = NULL;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  assert_near(simulation->step, 36 + 3 + 5);
  jpp_simulation_destroy(simulation);
  options.optimizer_free = true;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  assert_near(simulation->step, 36 + 5);  // the rank never waits between its tasks
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
}

static void test_one_spmd_program(void** state) {
  (void)state;
  static const struct {
    uint32_t stages, ranks, microbatches;
    double transfer;
    bool again;
    double turns, makespan, lost, part_again, peak;
  } kTable[] = {
      // A rank's three costs are 1, shared by its stages.
      {4, 4, 8, 0, false, 11, 33, 3. / 11, 0, 11},
      {4, 4, 8, 0, true, 11, 44, 3. / 11, 0.25, 11},
      {4, 4, 8, 0.5, true, 11, 55, 3. / 11, 0.2, 11},
      {8, 4, 8, 0, false, 19, 28.5, 3. / 19, 0, 9.5},
      {1, 1, 5, 0, false, 5, 15, 0, 0, 5},
  };
  for (size_t i = 0; i < sizeof(kTable) / sizeof(*kTable); ++i) {
    jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                    .stages = kTable[i].stages,
                                    .ranks = kTable[i].ranks,
                                    .microbatches = kTable[i].microbatches};
    jpp_schedule_t* schedule = NULL;
    ASSERT_OK(jpp_schedule_one_pass(&params, false, &schedule));
    jpp_simulation_t* simulation = simulate(schedule, 1, 1, 1);
    jpp_spmd_simulation_t spmd;
    ASSERT_OK(jpp_simulate_spmd(simulation, kTable[i].transfer, kTable[i].again, &spmd));
    assert_near((double)spmd.turns, kTable[i].turns);
    assert_near(spmd.makespan, kTable[i].makespan);
    assert_near(spmd.lost, kTable[i].lost);
    assert_near(spmd.rematerialised, kTable[i].part_again);
    assert_near(spmd.peak, kTable[i].peak);
    assert_near(spmd.utilisation, 3. * params.microbatches / spmd.makespan);
    jpp_simulation_destroy(simulation);
    jpp_schedule_destroy(schedule);
  }
}

// All stages keep the pace of the slowest one; a schedule without such a program is
// refused.
static void test_one_spmd_program_of_stages_that_differ(void** state) {
  (void)state;
  jpp_schedule_params_t params = {
      .struct_size = sizeof(params), .stages = 4, .ranks = 2, .microbatches = 2};
  jpp_cost_t costs[] = {{1, 1, 1}, {2, 1, 1}, {1, 3, 1}, {1, 1, 1}};
  jpp_simulate_options_t options = {.struct_size = sizeof(options), .stage_costs = costs};
  for (params.microbatches = 2; params.microbatches <= 3; ++params.microbatches) {
    jpp_schedule_t* schedule = NULL;
    jpp_simulation_t* simulation = NULL;
    jpp_spmd_simulation_t spmd;
    ASSERT_OK(jpp_schedule_one_pass(&params, false, &schedule));
    ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
    jpp_status_t* status = jpp_simulate_spmd(simulation, 0, false, &spmd);
    if (params.microbatches == 2) {
      ASSERT_OK(status);
      assert_near(spmd.makespan, 5 * (2 + 4));
      assert_near(spmd.utilisation, 2 * 15 / (2 * 30.));
    } else {
      ASSERT_FAILS(status, JPP_INVALID_ARGUMENT, "in groups of 2, one a rank, found 3");
    }
    jpp_simulation_destroy(simulation);
    jpp_schedule_destroy(schedule);
  }
  params = (jpp_schedule_params_t){.struct_size = sizeof(jpp_schedule_params_t),
                                   .stages = 3,
                                   .ranks = 2,
                                   .microbatches = 2};
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_one_pass(&params, false, &schedule));
  jpp_simulation_t* simulation = simulate(schedule, 1, 1, 1);
  jpp_spmd_simulation_t spmd;
  ASSERT_FAILS(jpp_simulate_spmd(simulation, 0, false, &spmd), JPP_INVALID_ARGUMENT,
               "found 3 stages on 2 ranks");
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
}

static void test_transfers_take_turns_on_a_channel(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("gpipe", 2, 2, 2);
  jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                    .rank_cost = {1, 1, 1}};
  double expected[] = {9, 9 + 2 * 3, 9 + 2 * 3 + 2 * 1};
  jpp_simulation_t* simulation = NULL;
  for (uint32_t i = 0; i < 3; ++i) {
    if (i == 1) options.latency = 3;
    if (i == 2) options.transfer = 1;
    ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
    assert_near(simulation->makespan, expected[i]);
    jpp_simulation_destroy(simulation);
  }
  // Messages of 4 units are sent every 4 units, though forwards end every unit.
  options = (jpp_simulate_options_t){.struct_size = sizeof(jpp_simulate_options_t),
                                     .rank_cost = {1, 1, 1},
                                     .transfer = 4};
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  assert_near(simulation->starts[1][1 + 1], 1 + 4 + 4);
  jpp_simulation_destroy(simulation);
  // A rank that waits for its message to leave starts its second forward later.
  options.no_overlap = true;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  assert_near(simulation->starts[0][1], 5);
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
}

static void test_costs_may_differ_by_stage(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("1f1b", 2, 2, 3);
  jpp_cost_t costs[] = {{1, 1, 1}, {2, 3, 4}};
  jpp_simulate_options_t options = {
      .struct_size = sizeof(options), .stage_costs = costs, .optimizer = 2};
  jpp_simulation_t* simulation = NULL;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  assert_near(simulation->makespan, 1 + 3 * 9 + 2);
  assert_near(simulation->bubble_global, 3);
  assert_near(simulation->step, simulation->makespan + 2);
  assert_near(simulation->ranks[1].begin, 1);
  jpp_simulation_destroy(simulation);
  costs[1].weight = -1;
  ASSERT_FAILS(jpp_schedule_simulate(schedule, &options, &simulation),
               JPP_INVALID_ARGUMENT, "stage 1: costs are numbers of at least 0");
  jpp_schedule_destroy(schedule);
}

// Times whose sums or quotients overflow a double: the picture's axis once never ended,
// and the makespan was printed as inf.
static void test_times_are_of_a_size_that_can_be_summed(void** state) {
  (void)state;
  static const double kBad[] = {INFINITY, NAN, -1e-9, 1e308, 1e101, 1e-101, 5e-324};
  static const double kGood[] = {0, 1e-100, 1, 1e100};
  jpp_schedule_t* schedule = build("zb-h1", 4, 4, 64);
  for (size_t i = 0; i < sizeof(kBad) / sizeof(*kBad); ++i) {
    for (uint32_t field = 0; field < 6; ++field) {
      jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                        .rank_cost = {1, 1, 1}};
      double* fields[] = {&options.rank_cost.forward, &options.rank_cost.backward,
                          &options.rank_cost.weight,  &options.latency,
                          &options.transfer,          &options.optimizer};
      *fields[field] = kBad[i];
      jpp_simulation_t* simulation = NULL;
      ASSERT_FAILS(jpp_schedule_simulate(schedule, &options, &simulation),
                   JPP_INVALID_ARGUMENT,
                   "numbers of at least 0, and of 1e-100 to 1e+100");
    }
  }
  for (uint32_t n = 0; n < 256; ++n) {
    jpp_simulate_options_t options = {
        .struct_size = sizeof(options),
        .rank_cost = {kGood[n % 4], kGood[n / 4 % 4], kGood[n / 16 % 4]},
        .latency = kGood[n / 64 % 4]};
    jpp_simulation_t* simulation = NULL;
    char *text = NULL, *json = NULL;
    ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
    assert_true(isfinite(simulation->makespan) && isfinite(simulation->utilisation));
    ASSERT_OK(jpp_plot_svg(simulation, &text));
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf"));
    ASSERT_OK(jpp_simulation_print_json(simulation, &json));
    assert_null(strstr(json, "nan"));
    assert_null(strstr(json, "inf"));
    jpp_text_free(text);
    jpp_text_free(json);
    jpp_simulation_destroy(simulation);
  }
  jpp_schedule_destroy(schedule);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_bubbles_are_exact),
      cmocka_unit_test(test_bubbles_and_peaks_are_those_of_the_papers),
      cmocka_unit_test(test_grid_is_simulated_as_by_the_naive_one),
      cmocka_unit_test(test_streams_are_simulated_as_by_the_naive_one),
      cmocka_unit_test(test_a_second_stream_takes_weight_gradients),
      cmocka_unit_test(test_a_second_stream_overlaps_pairs),
      cmocka_unit_test(test_optimizer_waits_for_all_or_not),
      cmocka_unit_test(test_one_spmd_program),
      cmocka_unit_test(test_one_spmd_program_of_stages_that_differ),
      cmocka_unit_test(test_transfers_take_turns_on_a_channel),
      cmocka_unit_test(test_costs_may_differ_by_stage),
      cmocka_unit_test(test_times_are_of_a_size_that_can_be_summed),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
