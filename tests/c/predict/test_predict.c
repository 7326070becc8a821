// Compares predictions with the simulation of a schedule, and with a slow reference that
// is simple enough to trust.
#include <math.h>
#include <stdio.h>

#include "jaxpp/plan.h"
#include "jaxpp/predict.h"
#include "jaxpp/simulate.h"
#include "plan_util.h"
#include "random_step.h"
#include "reference.h"
#include "schedule_util.h"

// Sanitizers make everything several times slower, so fewer cases run with them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { kSeeds = 60, kGridStep = 17 };
#else
enum { kSeeds = 600, kGridStep = 3 };
#endif

static uint64_t g_random = 1;
// xorshift64*, https://en.wikipedia.org/wiki/Xorshift
static uint32_t pick(uint32_t count) {
  g_random ^= g_random >> 12;
  g_random ^= g_random << 25;
  g_random ^= g_random >> 27;
  return (uint32_t)((g_random * 2685821657736338717u) >> 33) % count;
}

// Times that are hardly ever equal, so that the order of events does not depend on
// rounding.
static double pick_time(void) { return (pick(1u << 20) + 1) / 130000.7; }

static bool is_near(double a, double b) { return fabs(a - b) <= 1e-9 * (1 + fabs(b)); }

static void assert_near(double found, double expected) {
  if (!is_near(found, expected)) fail_msg("expected %.12g, found %.12g", expected, found);
}

// --- Against the simulation of the schedule -------------------------------------------

// A chain of stages, each with one weight. `activation`: what a backward takes of its
// forward, 'f' for the input, 'h' for the result.
static char* chain_text(uint32_t stages, uint32_t ranks, uint32_t microbatches,
                        char activation) {
  jpp_str_t str = {0};
  char* text = NULL;
  jpp_str_appendf(&str, "graph \"chain\" ranks %u\n", ranks);
  for (uint32_t s = 0; s < stages; ++s) jpp_str_appendf(&str, "arg %%w%u f32[8]\n", s);
  jpp_str_appendf(&str, "arg %%x f32[%u,8]\nloop microbatches %u stages %u index %%i {\n",
                  microbatches, microbatches, stages);
  jpp_str_append(&str, "%f0:f32[8] = slice(%x, %i) cheap\n");
  for (uint32_t s = 0; s < stages; ++s) {
    jpp_str_appendf(&str, "%%h%u:f32[8] = dot(%%f%u, %%w%u) cost 9000000\n", s, s, s);
    jpp_str_appendf(&str, "%%f%u:f32[8] = @mark %u (%%h%u)\n", s + 1, s, s);
  }
  jpp_str_appendf(&str, "%%t%u:f32[8] = seed(%%f%u) backward\n", stages, stages);
  for (uint32_t s = stages; s-- > 0;) {
    jpp_str_appendf(&str, "%%b%u:f32[8] = @mark_backward %u (%%t%u) backward\n", s, s,
                    s + 1);
    jpp_str_appendf(&str, "%%g%u:f32[8] = dot_w(%%%c%u, %%b%u) backward cost 9000000\n",
                    s, activation, s, s);
    jpp_str_appendf(&str, "%%t%u:f32[8] = dot_i(%%b%u, %%w%u) backward cost 9000000\n", s,
                    s, s);
  }
  jpp_str_append(&str, "}");
  for (uint32_t s = 0; s < stages; ++s) {
    jpp_str_appendf(&str, "%s %%G%u:f32[8] = add %%g%u", s ? "," : "", s, s);
  }
  jpp_str_append(&str, "\n");
  for (uint32_t s = 0; s < stages; ++s) jpp_str_appendf(&str, "out %%G%u\n", s);
  ASSERT_OK(jpp_str_finish(&str, &text));
  return text;
}

static bool is_split(const jpp_schedule_t* schedule) {
  for (uint32_t i = 0; i < schedule->rows[0].count; ++i) {
    if (schedule->rows[0].tasks[i].kind == JPP_TASK_BWD_I) return true;
  }
  return false;
}

static uint32_t g_compared;

static void compare_with_simulation(const jpp_schedule_t* schedule) {
  jpp_cost_t costs[18];
  uint32_t stages = schedule->stages;
  if (++g_compared % kGridStep) return;
  for (uint32_t s = 0; s < stages; ++s) {
    costs[s] = (jpp_cost_t){pick_time(), pick_time(), pick_time()};
  }
  // The first stage has no input gradient: its task is empty and need not wait, while in
  // the schedule it waits for the next stage.
  bool split = is_split(schedule);
  if (split) costs[0].backward = 0;
  char* text = chain_text(stages, schedule->ranks, schedule->microbatches, 'f');
  planned_t planned = {.ranks = schedule->ranks};
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "chain", &planned.graph));
  jpp_text_free(text);
  planned.given[0] = (jpp_schedule_t*)schedule;  // borrowed
  ASSERT_OK(plan_scheduled(&planned, 0));

  double* times = calloc(planned.staged->num_tasks, sizeof(*times));
  for (uint32_t t = 0; t < planned.staged->num_tasks; ++t) {
    const jpp_task_t* task = &planned.staged->tasks[t];
    if (task->loop == 0) times[t] = jpp_task_cost(&costs[task->stage], task->kind);
  }
  double latency = pick(2) ? pick_time() : 0;
  jpp_link_speed_t links[36] = {0};
  for (uint32_t i = 0; i < 36; ++i) links[i].latency = latency;
  jpp_machine_t machine = {.struct_size = sizeof(machine), .links = links};
  jpp_predict_options_t options = {
      .struct_size = sizeof(options), .task_times = times, .machine = &machine};
  jpp_prediction_t* prediction = NULL;
  ASSERT_OK(jpp_predict(planned.plan, &options, &prediction));
  jpp_simulate_options_t simulate = {
      .struct_size = sizeof(simulate), .stage_costs = costs, .latency = latency};
  jpp_simulation_t* simulation = NULL;
  ASSERT_OK(jpp_schedule_simulate(schedule, &simulate, &simulation));
  double before = simulation->makespan - prediction->makespan;
  if (!is_near(prediction->makespan, simulation->makespan) && !(split && before > 0)) {
    fail_msg("%s, %u stages, %u ranks, %u microbatches: %g, expected %g", schedule->name,
             stages, schedule->ranks, schedule->microbatches, prediction->makespan,
             simulation->makespan);
  }
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    assert_near(prediction->busy[r], simulation->ranks[r].work);
  }
  jpp_simulation_destroy(simulation);
  jpp_prediction_destroy(prediction);
  free(times);
  planned.given[0] = NULL;
  plan_free(&planned);
}

static void test_an_ideal_machine_runs_what_the_schedule_says(void** state) {
  (void)state;
  for_each_schedule(compare_with_simulation);
  assert_true(g_compared > 2000);
}

// --- Random plans on random machines --------------------------------------------------

typedef struct random_machine {
  jpp_machine_t machine;
  uint32_t host[kMaxRanks], process[kMaxRanks], device[kMaxRanks];
  jpp_link_speed_t links[kMaxRanks * kMaxRanks];
} random_machine_t;

static void pick_machine(uint32_t ranks, bool calls, random_machine_t* out) {
  uint32_t processes = pick(ranks) + 1;
  for (uint32_t r = 0; r < ranks; ++r) {
    out->process[r] = pick(processes);
    out->host[r] = out->process[r] / 2;
    out->device[r] = r;
    for (uint32_t other = 0; other < r && pick(2); ++other) {
      if (out->process[other] == out->process[r]) out->device[r] = out->device[other];
    }
  }
  for (uint32_t i = 0; i < ranks * ranks; ++i) {
    out->links[i] = (jpp_link_speed_t){pick_time() * pick(2), pick(2) * 37.7};
  }
  out->machine = (jpp_machine_t){.struct_size = sizeof(out->machine),
                                 .cores = pick(4),
                                 .threads = (pick(3) + 1) * 0.75,
                                 .call = calls && pick(2) ? pick_time() / 10 : 0,
                                 .link = {pick_time(), 41.3},
                                 .host = {pick_time() * pick(2), pick(2) * 1000.3},
                                 .rank_host = out->host,
                                 .rank_process = out->process,
                                 .rank_device = out->device,
                                 .links = pick(3) ? out->links : NULL};
}

static planned_t plan_random(uint64_t seed) {
  uint32_t slots = 0;
  planned_t planned = random_step(seed, &slots);
  ASSERT_OK(plan_scheduled(&planned, slots));
  g_random = seed * 0x9E3779B97F4A7C15u + 1;
  return planned;
}

static double* pick_times(const planned_t* planned) {
  double* times = calloc(planned->staged->num_tasks, sizeof(*times));
  for (uint32_t t = 0; t < planned->staged->num_tasks; ++t) {
    times[t] = fmax(pick_time() - 1, 0);  // some tasks take no time
  }
  return times;
}

// Up to three times for each task.
static double* pick_several_times(const planned_t* planned, uint64_t** out_firsts) {
  uint32_t tasks = planned->staged->num_tasks;
  double* times = calloc((size_t)tasks * 3, sizeof(*times));
  *out_firsts = calloc((size_t)tasks + 1, sizeof(**out_firsts));
  for (uint32_t t = 0; t < tasks; ++t) {
    (*out_firsts)[t + 1] = (*out_firsts)[t] + pick(4);
    for (uint64_t i = (*out_firsts)[t]; i < (*out_firsts)[t + 1]; ++i) {
      times[i] = pick_time();
    }
  }
  return times;
}

static void compare_with_reference(uint64_t seed) {
  planned_t planned = plan_random(seed);
  uint64_t* firsts = NULL;
  double* times = seed % 2 ? pick_times(&planned) : pick_several_times(&planned, &firsts);
  random_machine_t machine;
  pick_machine(planned.ranks, true, &machine);
  jpp_predict_options_t options = {.struct_size = sizeof(options),
                                   .task_times = times,
                                   .machine = &machine.machine,
                                   .steps = pick(3) + 1,
                                   .steps_in_flight = pick(3),
                                   .first_times = firsts};
  jpp_prediction_t* prediction = NULL;
  ASSERT_OK(jpp_predict(planned.plan, &options, &prediction));
  reference_t* ref = run_reference(planned.plan, &options);
  assert_int_equal(prediction->num_runs, ref->num_items);
  uint32_t of_rank[kMaxRanks] = {0};
  uint64_t per_step = prediction->num_runs / options.steps;
  for (uint32_t i = 0; i < ref->num_items; ++i) {
    // The reference lists them in the order of issue, which is the order of a rank.
    const item_t* item = &ref->items[i];
    uint64_t first = 0;
    while (prediction->runs[first].rank != item->rank) ++first;
    uint64_t runs = 0;
    while (first + runs < per_step && prediction->runs[first + runs].rank == item->rank) {
      ++runs;
    }
    uint64_t number = of_rank[item->rank]++;
    const jpp_task_run_t* run =
        &prediction->runs[number / runs * per_step + first + number % runs];
    assert_int_equal(run->step, item->step);
    if (is_near(run->start, item->start) && is_near(run->end, item->end)) continue;
    fail_msg(
        "seed %llu, step %u, rank %u, instruction %u: %.9g to %.9g, expected %.9g "
        "to %.9g",
        (unsigned long long)seed, run->step, run->rank, item->instr, run->start, run->end,
        item->start, item->end);
  }
  free_reference(ref);
  jpp_prediction_destroy(prediction);
  free(firsts);
  free(times);
  plan_free(&planned);
}

static void test_random_plans_run_as_in_the_reference(void** state) {
  (void)state;
  const char* only = test_variable("JPP_TEST_SEED");
  if (only) {
    compare_with_reference(strtoull(only, NULL, 10));
    return;
  }
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) compare_with_reference(seed);
}

// Fitting finds the times that were put in, whatever shares the cores.
static void test_task_times_are_found_in_predicted_runs(void** state) {
  (void)state;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    planned_t planned = plan_random(seed);
    uint32_t tasks = planned.staged->num_tasks;
    double* times = pick_times(&planned);
    uint64_t* firsts = calloc((size_t)tasks + 1, sizeof(*firsts));
    random_machine_t machine;
    pick_machine(planned.ranks, false, &machine);
    jpp_predict_options_t options = {.struct_size = sizeof(options),
                                     .task_times = times,
                                     .machine = &machine.machine,
                                     .steps = 2};
    jpp_prediction_t* prediction = NULL;
    ASSERT_OK(jpp_predict(planned.plan, &options, &prediction));
    double* found = calloc(prediction->num_runs, sizeof(*found));
    ASSERT_OK(jpp_predict_task_times(&machine.machine, planned.ranks, prediction->runs,
                                     prediction->num_runs, tasks, found, firsts));
    assert_int_equal(firsts[tasks], prediction->num_runs);
    for (uint32_t t = 0; t < tasks; ++t) {
      for (uint64_t i = firsts[t]; i < firsts[t + 1]; ++i)
        assert_near(found[i], times[t]);
    }
    ASSERT_OK(jpp_predict_task_times(&machine.machine, planned.ranks, prediction->runs, 0,
                                     tasks, found, firsts));
    for (uint32_t t = 0; t <= tasks; ++t) assert_int_equal(firsts[t], 0);
    jpp_prediction_destroy(prediction);
    free(found);
    free(firsts);
    free(times);
    plan_free(&planned);
  }
}

// The latency of a link is found from the runs that wait for it.
static void test_latency_is_found_in_predicted_runs(void** state) {
  (void)state;
  uint32_t found_in = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    planned_t planned = plan_random(seed);
    double* times = pick_times(&planned);
    jpp_machine_t machine = {.struct_size = sizeof(machine),
                             .cores = pick(3),
                             .processes = planned.ranks,
                             .link.latency = pick_time() / 100};
    jpp_predict_options_t options = {.struct_size = sizeof(options),
                                     .task_times = times,
                                     .machine = &machine,
                                     .steps = 1 + (uint32_t)(seed % 3)};
    jpp_prediction_t* prediction = NULL;
    double found = -1;
    ASSERT_OK(jpp_predict(planned.plan, &options, &prediction));
    ASSERT_OK(jpp_predict_latency(planned.plan, &machine, prediction->runs,
                                  prediction->num_runs, &found));
    // In some steps no run waits for a message.
    if (found > 0) assert_near(found, machine.link.latency);
    found_in += found > 0;
    ASSERT_OK(jpp_predict_latency(planned.plan, &machine, prediction->runs, 0, &found));
    assert_near(found, 0);
    jpp_prediction_destroy(prediction);
    free(times);
    plan_free(&planned);
  }
  assert_true(found_in > kSeeds / 3);
}

// --- Small cases ----------------------------------------------------------------------

// mlp2 has two stages and four microbatches; every task of the loop takes 1 ms, and the
// update on rank 1 takes `update`.
static double predict_mlp2(const jpp_machine_t* machine, double update, uint32_t steps,
                           uint32_t in_flight) {
  planned_t planned;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  double* times = calloc(planned.staged->num_tasks, sizeof(*times));
  for (uint32_t t = 0; t < planned.staged->num_tasks; ++t) {
    const jpp_task_t* task = &planned.staged->tasks[t];
    times[t] = task->loop == 0 ? 1 : task->rank * task->phase * update;
  }
  jpp_predict_options_t options = {.struct_size = sizeof(options),
                                   .task_times = times,
                                   .machine = machine,
                                   .steps = steps,
                                   .steps_in_flight = in_flight};
  jpp_prediction_t* prediction = NULL;
  ASSERT_OK(jpp_predict(planned.plan, &options, &prediction));
  double period = prediction->period;
  jpp_prediction_destroy(prediction);
  free(times);
  plan_free(&planned);
  return period;
}

static void test_cores_and_steps_in_flight_count(void** state) {
  (void)state;
  jpp_machine_t machine = {.struct_size = sizeof(machine)};
  // 4 forwards and 4 backwards, plus a bubble of one of each.
  assert_near(predict_mlp2(&machine, 0, 1, 0), 10);
  // All 16 tasks one after the other.
  machine.cores = 1;
  assert_near(predict_mlp2(&machine, 0, 1, 0), 16);
  machine.cores = 2;
  // Each task keeps 1.5 cores busy, so that two at a time take 1.5 times as long as one.
  assert_near(predict_mlp2(&machine, 0, 1, 0), 4 + 6 * 1.5);
  machine.cores = 1;
  // A task that uses two cores needs twice as long on one.
  machine.threads = 2;
  assert_near(predict_mlp2(&machine, 0, 1, 0), 32);
  // Two messages in each direction are on the critical path.
  machine = (jpp_machine_t){
      .struct_size = sizeof(machine), .processes = 2, .link.latency = 0.25};
  assert_near(predict_mlp2(&machine, 0, 1, 0), 11);
  // Rank 0 begins the next step while rank 1 updates, if two steps may be in flight.
  machine = (jpp_machine_t){.struct_size = sizeof(machine)};
  assert_near(predict_mlp2(&machine, 3, 3, 1), 12);
  assert_near(predict_mlp2(&machine, 3, 3, 2), 11);
}

// --- Offloaded activations ------------------------------------------------------------

enum { kActivation = 1 << 20 };

// Only values of microbatches have bytes.
static jpp_status_t* count_activations(void* context, const jpp_staged_t* staged,
                                       uint64_t* out_bytes) {
  (void)context;
  for (uint32_t v = 0; v < staged->num_values; ++v) {
    bool made = staged->values[v].producer != JPP_NONE;
    out_bytes[v] = made && staged->scopes[v] == JPP_SCOPE_MICROBATCH ? kActivation : 0;
  }
  return NULL;
}

// A schedule of 8 stages, forwards of 1 ms and backwards of 2. Gives the time of a step
// and the highest peak of a rank.
static double predict_chain(const char* name, uint32_t microbatches, char activation,
                            bool offload, double host_bandwidth, uint64_t* out_peak) {
  char* text = chain_text(8, 8, microbatches, activation);
  jpp_graph_t* graph = NULL;
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "chain", &graph));
  jpp_text_free(text);
  jpp_loop_schedule_t loop = {.struct_size = sizeof(loop), .built_in = name};
  jpp_plan_options_t options = {.struct_size = sizeof(options),
                                .loops = &loop,
                                .offload = offload ? kAllRanks : NULL,
                                .measure = count_activations};
  ASSERT_OK(jpp_plan_graph(graph, &options, &planned));
  double* times = calloc(planned->staged->num_tasks, sizeof(*times));
  for (uint32_t t = 0; t < planned->staged->num_tasks; ++t) {
    if (planned->staged->tasks[t].loop != 0) continue;
    times[t] = planned->staged->tasks[t].kind == JPP_TASK_FWD ? 1 : 2;
  }
  jpp_machine_t machine = {.struct_size = sizeof(machine),
                           .host = {.bandwidth = host_bandwidth}};
  jpp_predict_options_t predict = {
      .struct_size = sizeof(predict), .task_times = times, .machine = &machine};
  jpp_prediction_t* prediction = NULL;
  ASSERT_OK(jpp_predict(planned->plan, &predict, &prediction));
  double makespan = prediction->makespan;
  *out_peak = 0;
  for (uint32_t r = 0; r < 8; ++r) {
    uint64_t peak = planned->report->actors[r].peak_bytes;
    if (peak > *out_peak) *out_peak = peak;
  }
  jpp_prediction_destroy(prediction);
  free(times);
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
  return makespan;
}

static double predict_1f1b(bool offload, double host_bandwidth, uint64_t* out_peak) {
  return predict_chain("1f1b", 32, 'f', offload, host_bandwidth, out_peak);
}

// If no limit delays them, the moves of a simulation are those of the plan.
static void test_moves_are_those_of_a_simulation(void** state) {
  (void)state;
  static const char* const kNames[] = {"1f1b", "eager-1f1b", "gpipe"};
  for (uint32_t i = 0; i < 60; ++i) {
    uint32_t microbatches = pick(20) + 1;
    uint64_t peak = 0;
    jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                      .rank_cost = {1, 1, 1},
                                      .activations = JPP_ACTIVATIONS_OFFLOADED,
                                      .activation_bytes = kActivation,
                                      .host_bandwidth = kActivation / pick_time()};
    jpp_schedule_t* schedule = build(kNames[i % 3], 8, 8, microbatches);
    jpp_simulation_t* simulation = NULL;
    ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
    assert_near(predict_chain(kNames[i % 3], microbatches, 'h', true,
                              options.host_bandwidth, &peak),
                simulation->makespan);
    jpp_simulation_destroy(simulation);
    jpp_schedule_destroy(schedule);
  }
}

// A rank moves one activation each way in the 3 ms of a microbatch.
static void test_moves_hide_behind_compute(void** state) {
  (void)state;
  const double needed = kActivation / 3.0;
  uint64_t kept = 0, offloaded = 0;
  double alone = predict_1f1b(false, 0, &kept);
  assert_near(alone, (32 + 7) * 3);
  double hidden = predict_1f1b(true, 1.5 * needed, &offloaded);
  assert_true(offloaded <= kept / 2);
  assert_true(hidden <= 1.05 * alone);
  // A link of half the bandwidth that is needed bounds the step.
  assert_true(predict_1f1b(true, 0.5 * needed, &offloaded) > 1.5 * alone);
}

static void test_refusals(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  double* times = calloc(planned.staged->num_tasks, sizeof(*times));
  uint32_t host[] = {0, 1}, far[] = {0, 2}, same[] = {0, 0}, zeros[] = {0, 0};
  jpp_link_speed_t links[4] = {{0, 0}, {0, -1}};
  jpp_machine_t machine = {.struct_size = sizeof(machine), .rank_host = host};
  jpp_predict_options_t options = {
      .struct_size = sizeof(options), .task_times = times, .machine = &machine};
  jpp_prediction_t* prediction = NULL;
  ASSERT_FAILS(jpp_predict(planned.plan, &options, &prediction), JPP_INVALID_ARGUMENT,
               "machine: expected ranks 0 and 1 of process 0 on one host, found hosts 0 "
               "and 1");
  machine = (jpp_machine_t){.struct_size = sizeof(machine), .rank_process = far};
  ASSERT_FAILS(jpp_predict(planned.plan, &options, &prediction), JPP_INVALID_ARGUMENT,
               "machine: rank 1: expected a number below 2 as process, found 2");
  machine = (jpp_machine_t){
      .struct_size = sizeof(machine), .rank_process = host, .rank_device = same};
  ASSERT_FAILS(jpp_predict(planned.plan, &options, &prediction), JPP_INVALID_ARGUMENT,
               "machine: expected ranks 0 and 1, which share device 0, in one process, "
               "found processes 0 and 1");
  machine = (jpp_machine_t){.struct_size = sizeof(machine), .links = links};
  ASSERT_FAILS(jpp_predict(planned.plan, &options, &prediction), JPP_INVALID_ARGUMENT,
               "machine: link from rank 0 to 1: expected latency and bandwidth from 0");
  for (int i = 0; i < 2; ++i) {
    machine = (jpp_machine_t){.struct_size = sizeof(machine),
                              .link = {i ? -1 : 0, i ? 0 : NAN}};
    ASSERT_FAILS(jpp_predict(planned.plan, &options, &prediction), JPP_INVALID_ARGUMENT,
                 i ? "machine: link between processes: expected latency and bandwidth "
                     "from 0 to 1e+100, found -1 and 0"
                   : "bandwidth from 0 to 1e+100, found 0 and nan");
  }
  machine = (jpp_machine_t){.struct_size = sizeof(machine), .call = NAN};
  ASSERT_FAILS(jpp_predict(planned.plan, &options, &prediction), JPP_INVALID_ARGUMENT,
               "machine: expected a time from 0 to 1e+100 as call, found nan");
  machine = (jpp_machine_t){.struct_size = sizeof(machine), .threads = -1};
  ASSERT_FAILS(jpp_predict(planned.plan, &options, &prediction), JPP_INVALID_ARGUMENT,
               "machine: expected threads of a run from 0 to 65536, found -1");
  machine = (jpp_machine_t){.struct_size = sizeof(machine), .processes = 3};
  ASSERT_FAILS(jpp_predict(planned.plan, &options, &prediction), JPP_INVALID_ARGUMENT,
               "machine: expected at most 2 processes, one a rank, found 3");
  machine.processes = 0;
  times[0] = -1;
  ASSERT_FAILS(jpp_predict(planned.plan, &options, &prediction), JPP_INVALID_ARGUMENT,
               "expected a time from 0 to 1e+100, found -1");
  times[0] = 0;
  uint64_t* firsts = calloc(planned.staged->num_tasks + 1, sizeof(*firsts));
  firsts[1] = 1;
  options.first_times = firsts;
  ASSERT_FAILS(jpp_predict(planned.plan, &options, &prediction), JPP_INVALID_ARGUMENT,
               "expected ascending first_times, found 1 and 0");
  jpp_task_run_t run = {.rank = 1, .task = 0, .start = 2, .end = 1};
  machine.rank_host = zeros;
  ASSERT_FAILS(jpp_predict_task_times(&machine, 2, &run, 1, 1, times, firsts),
               JPP_INVALID_ARGUMENT, "run 0: expected a rank below 2, a task below 1");
  free(firsts);
  free(times);
  plan_free(&planned);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_an_ideal_machine_runs_what_the_schedule_says),
      cmocka_unit_test(test_random_plans_run_as_in_the_reference),
      cmocka_unit_test(test_task_times_are_found_in_predicted_runs),
      cmocka_unit_test(test_latency_is_found_in_predicted_runs),
      cmocka_unit_test(test_cores_and_steps_in_flight_count),
      cmocka_unit_test(test_moves_hide_behind_compute),
      cmocka_unit_test(test_moves_are_those_of_a_simulation),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests_name("predict", tests, NULL, NULL);
}
