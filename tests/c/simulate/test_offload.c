// Activations that wait on the host, or are computed again: small cases by hand, and all
// schedules against a simulation that goes from event to event.
#include <math.h>
#include <stdlib.h>

#include "jaxpp/simulate.h"
#include "jaxpp/view.h"
#include "schedule_util.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { kGridStep = 7 };
#else
enum { kGridStep = 1 };
#endif

static void assert_near(double found, double expected) {
  if (fabs(found - expected) > 1e-9 * (1 + fabs(expected))) {
    fail_msg("expected %.12g, found %.12g", expected, found);
  }
}

// --- By hand --------------------------------------------------------------------------

typedef struct expected {
  double makespan, starts[4], moves[4], peak, host_peak;  // of rank 0
} expected_t;

// Two stages and microbatches; forwards take 1, backwards 2, and a move 2.
static void expect(const char* name, jpp_simulate_options_t options,
                   const expected_t* expected) {
  jpp_schedule_t* schedule = build(name, 2, 2, 2);
  jpp_simulation_t* simulation = NULL;
  options.struct_size = sizeof(options);
  options.rank_cost = (jpp_cost_t){1, 1, 1};
  options.activation_bytes = 2;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  assert_near(simulation->makespan, expected->makespan);
  uint32_t tasks = 0;
  for (uint32_t i = 0; i < schedule->rows[0].count; ++i) {
    if (schedule->rows[0].tasks[i].kind == JPP_TASK_IDLE) continue;
    assert_near(simulation->starts[0][i], expected->starts[tasks]);
    if (simulation->moves[0]) {
      assert_near(simulation->moves[0][i], expected->moves[tasks]);
    }
    ++tasks;
  }
  assert_near(simulation->ranks[0].peak, expected->peak);
  assert_near(simulation->host_peaks[0], expected->host_peak);
  assert_int_equal(simulation->activations[0], options.activations);
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
}

static void test_moves_take_turns_on_the_links(void** state) {
  (void)state;
  jpp_simulate_options_t options = {.activations = JPP_ACTIVATIONS_OFFLOADED,
                                    .host_bandwidth = 1};
  // The activations arrive on the host at 3 and 5, and come back at once.
  expect("gpipe", options, &(expected_t){9, {0, 1, 5, 7}, {3, 5, 3, 5}, 2, 2});
  // With room for one microbatch, a forward waits until the previous activations have
  // left, and a backward until the previous backward has ended.
  options.memory_limit = 2;
  expect("1f1b", options, &(expected_t){14, {0, 3, 8, 12}, {3, 6, 6, 10}, 1, 2});
  // With room for both, they stay.
  options.memory_limit = 4;
  jpp_schedule_t* schedule = build("1f1b", 2, 2, 2);
  jpp_simulation_t* simulation = NULL;
  options.struct_size = sizeof(options);
  options.activation_bytes = 2;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  assert_null(simulation->moves[0]);
  assert_int_equal(simulation->activations[0], JPP_ACTIVATIONS_KEPT);
  jpp_simulation_destroy(simulation);
  // The last stage does not move its own.
  options.memory_limit = 2;
  jpp_schedule_destroy(schedule);
  schedule = build("gpipe", 2, 2, 2);
  ASSERT_FAILS(jpp_schedule_simulate(schedule, &options, &simulation), JPP_SCHEDULE_ERROR,
               "schedule gpipe: rank 1: fwd_1__1 has no room beside the activations of "
               "earlier tasks: the limit holds 1 stage activation");
  jpp_schedule_destroy(schedule);
}

static void test_forwards_are_run_again(void** state) {
  (void)state;
  jpp_simulate_options_t options = {.activations = JPP_ACTIVATIONS_RECOMPUTED,
                                    .input_bytes = 1};
  expect("1f1b", options, &(expected_t){12, {0, 1, 5, 9}, {0}, 1.5, 0});
  // Only rank 0 keeps more than one: the other one's backwards take 2.
  options.memory_limit = 2;
  expect("1f1b", options, &(expected_t){10, {0, 1, 4, 7}, {0}, 1.5, 0});
}

static void test_bad_sizes_are_refused(void** state) {
  (void)state;
  static const double kBad[] = {-1, NAN, INFINITY, 1e-101, 1e101};
  jpp_schedule_t* schedule = build("1f1b", 2, 2, 2);
  jpp_simulation_t* simulation = NULL;
  jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                    .rank_cost = {1, 1, 1}};
  for (size_t i = 0; i < sizeof(kBad) / sizeof(*kBad); ++i) {
    options.host_bandwidth = kBad[i];
    ASSERT_FAILS(jpp_schedule_simulate(schedule, &options, &simulation),
                 JPP_INVALID_ARGUMENT, "host bandwidth: expected a number of at least 0");
  }
  options.host_bandwidth = 1;
  options.activation_bytes = 4;
  options.input_bytes = 5;
  ASSERT_FAILS(jpp_schedule_simulate(schedule, &options, &simulation),
               JPP_INVALID_ARGUMENT, "expected at most 4 bytes, found 5");
  options.input_bytes = 4;
  options.activations = JPP_ACTIVATIONS_COUNT;
  ASSERT_FAILS(jpp_schedule_simulate(schedule, &options, &simulation),
               JPP_INVALID_ARGUMENT, "unknown kind of activations 3");
  assert_null(jpp_activations_name(JPP_ACTIVATIONS_COUNT));
  jpp_schedule_destroy(schedule);
}

// --- From event to event --------------------------------------------------------------

enum { kRanks = 6, kStages = 18, kMicrobatches = 14 };
enum { kEntries = 3 * kStages * kMicrobatches };

typedef struct ref_rank {
  uint32_t at;                       // the entry that runs or is next
  uint32_t granted, sent, asked;     // the entries before these have room, have left, and
                                     // have begun to come back
  double busy, out_busy, back_busy;  // until; 0: idle
  bool offloads;
  int used, device, host, peak, host_peak;  // `used`: places
  double starts[kEntries], moves[kEntries];
} ref_rank_t;

typedef struct reference {
  const jpp_schedule_t* schedule;
  const jpp_cost_t* costs;
  double now, latency, move;
  int limit;
  ref_rank_t ranks[kRanks];
  double end[3][kStages][kMicrobatches];  // of forwards, backwards, weight gradients; 0:
                                          // not yet
  double out_at[kStages][kMicrobatches];  // on the host; 0: not yet
  double back_at[kStages][kMicrobatches];
} reference_t;

static uint64_t g_random = 1;

static uint32_t pick(uint32_t bound) { return test_random_below(&g_random, bound); }

static const jpp_schedule_task_t* task_at(const reference_t* ref, uint32_t r,
                                          uint32_t entry) {
  const jpp_schedule_row_t* row = &ref->schedule->rows[r];
  return entry < row->count ? &row->tasks[entry] : NULL;
}

static bool moves_away(const reference_t* ref, const jpp_schedule_task_t* task) {
  return task->stage + 1 < ref->schedule->stages;
}

static bool comes_back(const reference_t* ref, const jpp_schedule_task_t* task) {
  return (task->kind == JPP_TASK_BWD || task->kind == JPP_TASK_BWD_I) &&
         moves_away(ref, task);
}

static bool is_past(const reference_t* ref, double time) {
  return time > 0 && time <= ref->now;
}

static bool needs_are_met(const reference_t* ref, uint32_t r,
                          const jpp_schedule_task_t* t) {
  uint32_t s = t->stage, m = t->microbatch;
  if (t->kind == JPP_TASK_BWD_W) return is_past(ref, ref->end[1][s][m]);
  bool forward = t->kind == JPP_TASK_FWD;
  if (!forward && !is_past(ref, ref->end[0][s][m])) return false;
  if (forward ? !s : s + 1 == ref->schedule->stages) return true;
  uint32_t other = forward ? s - 1 : s + 1;
  double delay = ref->schedule->stage_rank[other] == r ? 0 : ref->latency;
  double end = ref->end[!forward][other][m];
  return end > 0 && is_past(ref, end + delay);
}

static void note_peaks(ref_rank_t* rank) {
  if (rank->device > rank->peak) rank->peak = rank->device;
  if (rank->host > rank->host_peak) rank->host_peak = rank->host;
}

// What ends now.
static void end_actions(reference_t* ref, uint32_t r) {
  ref_rank_t* rank = &ref->ranks[r];
  if (is_past(ref, rank->busy)) {
    const jpp_schedule_task_t* t = task_at(ref, r, rank->at++);
    rank->busy = 0;
    bool frees = t->kind == JPP_TASK_BWD || t->kind == JPP_TASK_BWD_W;
    rank->used -= frees;
    rank->device -= frees;
  }
  if (is_past(ref, rank->out_busy)) {
    rank->out_busy = 0;
    --rank->used;
    --rank->device;
  }
  if (is_past(ref, rank->back_busy)) {
    rank->back_busy = 0;
    --rank->host;
  }
}

// Room, in the order of the list.
static void grant_room(reference_t* ref, ref_rank_t* rank, uint32_t r) {
  for (const jpp_schedule_task_t* t; (t = task_at(ref, r, rank->granted));
       ++rank->granted) {
    if (t->kind != JPP_TASK_FWD && !comes_back(ref, t)) continue;
    if (rank->used == ref->limit) return;
    ++rank->used;
  }
}

static void start_moves(reference_t* ref, ref_rank_t* rank, uint32_t r) {
  for (const jpp_schedule_task_t* t;
       rank->out_busy == 0 && rank->sent < rank->at && (t = task_at(ref, r, rank->sent));
       ++rank->sent) {
    if (t->kind != JPP_TASK_FWD || !moves_away(ref, t)) continue;
    rank->out_busy = rank->moves[rank->sent] = ref->now + ref->move;
    ref->out_at[t->stage][t->microbatch] = rank->out_busy;
    ++rank->host;
  }
  for (const jpp_schedule_task_t* t;
       rank->back_busy == 0 && rank->asked < rank->granted &&
       (t = task_at(ref, r, rank->asked));
       ++rank->asked) {
    if (!comes_back(ref, t)) continue;
    if (!is_past(ref, ref->out_at[t->stage][t->microbatch])) break;
    rank->moves[rank->asked] = ref->now;
    rank->back_busy = ref->back_at[t->stage][t->microbatch] = ref->now + ref->move;
    ++rank->device;
  }
}

static void start_next(reference_t* ref, ref_rank_t* rank, uint32_t r) {
  const jpp_schedule_task_t* t;
  if (rank->busy > 0) return;
  while ((t = task_at(ref, r, rank->at)) && t->kind == JPP_TASK_IDLE) ++rank->at;
  if (!t || !needs_are_met(ref, r, t)) return;
  if (rank->offloads && rank->granted <= rank->at) return;
  if (rank->offloads && comes_back(ref, t) &&
      !is_past(ref, ref->back_at[t->stage][t->microbatch])) {
    return;
  }
  int slot = t->kind == JPP_TASK_FWD ? 0 : t->kind == JPP_TASK_BWD_W ? 2 : 1;
  rank->starts[rank->at] = ref->now;
  rank->busy = ref->now + jpp_task_cost(&ref->costs[t->stage], (jpp_task_kind_t)t->kind);
  ref->end[slot][t->stage][t->microbatch] = rank->busy;
  rank->device += slot == 0;
}

// The next time at which something ends or arrives; INFINITY if nothing does.
static double next_time(const reference_t* ref) {
  double next = INFINITY;
  for (uint32_t r = 0; r < ref->schedule->ranks; ++r) {
    const double times[] = {ref->ranks[r].busy, ref->ranks[r].out_busy,
                            ref->ranks[r].back_busy};
    for (uint32_t i = 0; i < 3; ++i) {
      if (times[i] > ref->now) next = fmin(next, times[i]);
    }
  }
  for (uint32_t i = 0; i < 2 * ref->schedule->stages * ref->schedule->microbatches; ++i) {
    uint32_t m = i / 2 % ref->schedule->microbatches;
    double end = ref->end[i % 2][i / 2 / ref->schedule->microbatches][m];
    if (end > 0 && end + ref->latency > ref->now) next = fmin(next, end + ref->latency);
  }
  return next;
}

// Returns false if a rank is stuck.
static bool run_reference(reference_t* ref) {
  while (!isinf(ref->now)) {
    for (uint32_t r = 0; r < ref->schedule->ranks; ++r) end_actions(ref, r);
    for (uint32_t r = 0; r < ref->schedule->ranks; ++r) {
      ref_rank_t* rank = &ref->ranks[r];
      if (rank->offloads) grant_room(ref, rank, r);
      if (rank->offloads) start_moves(ref, rank, r);
      start_next(ref, rank, r);
      note_peaks(rank);
    }
    ref->now = next_time(ref);
  }
  for (uint32_t r = 0; r < ref->schedule->ranks; ++r) {
    while (task_at(ref, r, ref->ranks[r].at) &&
           task_at(ref, r, ref->ranks[r].at)->kind == JPP_TASK_IDLE) {
      ++ref->ranks[r].at;
    }
    if (ref->ranks[r].at < ref->schedule->rows[r].count) return false;
  }
  return true;
}

static void compare_rank(const reference_t* ref, const jpp_simulation_t* simulation,
                         uint32_t r) {
  const ref_rank_t* rank = &ref->ranks[r];
  double v = (double)ref->schedule->stages / ref->schedule->ranks;
  assert_int_equal(simulation->moves[r] != NULL, rank->offloads);
  for (uint32_t i = 0; i < ref->schedule->rows[r].count; ++i) {
    const jpp_schedule_task_t* t = task_at(ref, r, i);
    if (t->kind == JPP_TASK_IDLE) continue;
    assert_near(simulation->starts[r][i], rank->starts[i]);
    bool moves = t->kind == JPP_TASK_FWD ? moves_away(ref, t) : comes_back(ref, t);
    if (!rank->offloads || !moves) continue;
    assert_near(simulation->moves[r][i], rank->moves[i]);
  }
  assert_near(simulation->ranks[r].peak * v, rank->peak);
  assert_near(simulation->host_peaks[r] * v, rank->host_peak);
  if (rank->offloads) assert_true(rank->peak <= ref->limit);
}

static uint32_t g_schedules, g_compared, g_stuck;

// Whole numbers, so that many things happen at the same time.
static void compare(const jpp_schedule_t* schedule) {
  static reference_t ref;
  jpp_cost_t costs[kStages];
  uint32_t peaks[kRanks];
  if (g_schedules++ % kGridStep) return;
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    costs[s] = (jpp_cost_t){pick(3) + 1, pick(3) + 1, pick(3) + 1};
  }
  uint32_t limit = pick(6);  // 0: none
  jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                    .stage_costs = costs,
                                    .latency = pick(3),
                                    .activations = JPP_ACTIVATIONS_OFFLOADED,
                                    .activation_bytes = 10 * (pick(5) + 1),
                                    .host_bandwidth = 10};
  options.memory_limit = limit * options.activation_bytes + (limit ? pick(10) : 0);
  ref = (reference_t){.schedule = schedule,
                      .costs = costs,
                      .latency = options.latency,
                      .move = (double)options.activation_bytes / 10,
                      .limit = limit ? (int)limit : INT32_MAX};
  ASSERT_OK(jpp_schedule_peak_microbatches(schedule, schedule->ranks, peaks));
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    ref.ranks[r].offloads = !limit || peaks[r] > limit;
  }
  jpp_simulation_t* simulation = NULL;
  if (!run_reference(&ref)) {
    ASSERT_FAILS(jpp_schedule_simulate(schedule, &options, &simulation),
                 JPP_SCHEDULE_ERROR, "has no room beside the activations");
    ++g_stuck;
    return;
  }
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  for (uint32_t r = 0; r < schedule->ranks; ++r) compare_rank(&ref, simulation, r);
  jpp_simulation_destroy(simulation);
  ++g_compared;
}

static void test_schedules_are_simulated_as_from_event_to_event(void** state) {
  (void)state;
  for_each_schedule(compare);
  assert_true(g_compared > 1500 / kGridStep);
  assert_true(g_stuck > 100 / kGridStep);
}

// Recomputation alone is a schedule with other costs, and only what it keeps differs.
static void test_recomputation_costs_a_forward(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("zb-v", 8, 4, 8);
  jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                    .rank_cost = {2, 4, 2},
                                    .activations = JPP_ACTIVATIONS_RECOMPUTED,
                                    .activation_bytes = 8,
                                    .input_bytes = 2};
  jpp_simulation_t *again = NULL, *kept = NULL;
  char *text = NULL, *json = NULL, *svg = NULL;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &again));
  options.activations = JPP_ACTIVATIONS_KEPT;
  options.rank_cost.backward = 6;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &kept));
  assert_near(again->makespan, kept->makespan);
  for (uint32_t r = 0; r < 4; ++r) {
    assert_near(again->ranks[r].work, kept->ranks[r].work);
    assert_true(again->ranks[r].peak <= kept->ranks[r].peak);
  }
  ASSERT_OK(jpp_simulation_print(again, &text));
  assert_non_null(strstr(text, ", recomputed\n"));
  ASSERT_OK(jpp_simulation_print_json(again, &json));
  assert_non_null(strstr(json, "\"recomputed\""));
  ASSERT_OK(jpp_plot_svg(again, &svg));
  jpp_text_free(text);
  jpp_text_free(json);
  jpp_text_free(svg);
  jpp_simulation_destroy(again);
  jpp_simulation_destroy(kept);
  jpp_schedule_destroy(schedule);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_moves_take_turns_on_the_links),
      cmocka_unit_test(test_forwards_are_run_again),
      cmocka_unit_test(test_bad_sizes_are_refused),
      cmocka_unit_test(test_schedules_are_simulated_as_from_event_to_event),
      cmocka_unit_test(test_recomputation_costs_a_forward),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
