// The search: its schedules pass the proof, are never worse than the built-in ones,
// better on uneven stages, and within the memory limit. Also its pictures.
#include <math.h>
#include <stdlib.h>

#include "jaxpp/search.h"
#include "jaxpp/view.h"
#include "schedule_util.h"

static const jpp_cost_t kUneven[] = {{1.6, 1.6, 1.44}, {1, 1, .9},      {1, 1, .9},
                                     {1, 1, .9},       {1, 1, .9},      {1, 1, .9},
                                     {1, 1, .9},       {2.2, 2.2, 1.98}};

static void count_reports(void* context, const jpp_search_progress_t* progress) {
  assert_true(progress->makespan >= progress->bound);
  ++*(uint32_t*)context;
}

static jpp_search_result_t search(jpp_search_options_t options) {
  jpp_search_result_t result;
  ASSERT_OK(jpp_schedule_search(&options, &result));
  ASSERT_OK(jpp_schedule_verify(result.schedule));
  assert_true(result.makespan >= result.bound * (1 - 1e-9));
  if (result.built_in) assert_true(result.makespan <= result.built_in_makespan);
  return result;
}

static void test_uneven_stages_are_beaten(void** state) {
  (void)state;
  uint32_t reports = 0;
  jpp_search_result_t result =
      search((jpp_search_options_t){.struct_size = sizeof(jpp_search_options_t),
                                    .stages = 8,
                                    .ranks = 4,
                                    .microbatches = 8,
                                    .costs = kUneven,
                                    .seconds = 1.2,
                                    .progress = count_reports,
                                    .context = &reports});
  assert_non_null(result.built_in);
  assert_true(result.makespan < result.built_in_makespan);
  assert_true(reports >= 1);
  jpp_schedule_destroy(result.schedule);
}

static void test_limits_are_kept(void** state) {
  (void)state;
  for (uint64_t most = 3; most < 9; ++most) {
    jpp_search_result_t result =
        search((jpp_search_options_t){.struct_size = sizeof(jpp_search_options_t),
                                      .stages = 8,
                                      .ranks = 4,
                                      .microbatches = 6,
                                      .costs = kUneven,
                                      .latency = 0.1,
                                      .memory_limit = most * 10,
                                      .activation_bytes = 10,
                                      .seconds = 0.05});
    uint32_t peaks[4];
    ASSERT_OK(jpp_schedule_peak_microbatches(result.schedule, 4, peaks));
    for (uint32_t r = 0; r < 4; ++r) assert_true(peaks[r] <= most);
    jpp_schedule_destroy(result.schedule);
  }
  jpp_search_options_t options = {.struct_size = sizeof(options),
                                  .stages = 8,
                                  .ranks = 4,
                                  .microbatches = 6,
                                  .costs = kUneven,
                                  .memory_limit = 1,
                                  .seconds = 0.05};
  jpp_search_result_t result;
  ASSERT_FAILS(jpp_schedule_search(&options, &result), JPP_OUT_OF_MEMORY,
               "no schedule of 8 stages on 4 ranks fits");
  assert_null(result.schedule);
}

static jpp_status_t* accept_least(void* context, const jpp_schedule_t* schedule,
                                  bool* out_accept) {
  uint32_t peaks[4];
  (void)context;
  ASSERT_OK(jpp_schedule_peak_microbatches(schedule, 4, peaks));
  *out_accept = true;
  for (uint32_t r = 0; r < 4; ++r) *out_accept = *out_accept && peaks[r] <= 2;
  return NULL;
}

// One activation for each stage of a rank is the least with which a schedule can run.
static void test_the_least_memory_is_found(void** state) {
  (void)state;
  for (uint32_t i = 0; i < 8; ++i) {
    jpp_cost_t costs[8];
    for (uint32_t s = 0; s < 8; ++s) {
      costs[s] = (jpp_cost_t){1 + i * s % 7, 1 + i * s % 5, 1 + i * s % 3};
    }
    jpp_search_result_t result =
        search((jpp_search_options_t){.struct_size = sizeof(jpp_search_options_t),
                                      .stages = 8,
                                      .ranks = 4,
                                      .microbatches = 6,
                                      .costs = costs,
                                      .seconds = 0,
                                      .accept = accept_least,
                                      .smallest = true});
    jpp_schedule_destroy(result.schedule);
  }
}

static jpp_status_t* refuse_and_note(void* context, const jpp_schedule_t* schedule,
                                     bool* out_accept) {
  uint64_t* noted = context;
  uint32_t peaks[4];
  ASSERT_OK(jpp_schedule_peak_microbatches(schedule, 4, peaks));
  for (uint32_t r = 0; r < 4; ++r) *noted = *noted * 31 + peaks[r];
  for (uint32_t s = 0; s < 8; ++s) *noted = *noted * 31 + schedule->stage_rank[s];
  *out_accept = false;
  return NULL;
}

// Costs are measured. A limit under which a schedule fits must suffice in a later search,
// which has other costs.
static void test_the_smallest_schedules_do_not_depend_on_costs(void** state) {
  (void)state;
  uint64_t first = 0;
  for (uint32_t i = 0; i < 16; ++i) {
    jpp_cost_t costs[8];
    for (uint32_t s = 0; s < 8; ++s) {
      costs[s] = (jpp_cost_t){1 + i * s % 7, 1 + i * s % 5, 1 + i * (7 - s) % 3};
    }
    uint64_t noted = 0;
    jpp_search_result_t result;
    jpp_search_options_t options = {.struct_size = sizeof(options),
                                    .stages = 8,
                                    .ranks = 4,
                                    .microbatches = 6,
                                    .costs = costs,
                                    .accept = refuse_and_note,
                                    .context = &noted,
                                    .smallest = true};
    ASSERT_FAILS(jpp_schedule_search(&options, &result), JPP_OUT_OF_MEMORY,
                 "schedules was accepted");
    if (!i) first = noted;
    assert_true(noted == first);
  }
}

static void test_every_size_is_served(void** state) {
  (void)state;
  for (uint32_t n = 0; n < 4 * 4 * 3; ++n) {
    jpp_search_result_t result =
        search((jpp_search_options_t){.struct_size = sizeof(jpp_search_options_t),
                                      .stages = n % 4 + 1,
                                      .ranks = n / 4 % 4 + 1,
                                      .microbatches = n / 16 + 1,
                                      .costs = kUneven,
                                      .seconds = 0.005,
                                      .whole_backwards = n % 2});
    jpp_schedule_destroy(result.schedule);
  }
}

static const jpp_cost_t kEven[] = {{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1},
                                   {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}};

// Eight ranks that hold four microbatches of 10 bytes each, half of what 1F1B keeps.
static jpp_search_result_t search_half(double host_bandwidth, uint64_t input_bytes,
                                       double seconds) {
  return search((jpp_search_options_t){.struct_size = sizeof(jpp_search_options_t),
                                       .stages = 8,
                                       .ranks = 8,
                                       .microbatches = 32,
                                       .costs = kEven,
                                       .memory_limit = 40,
                                       .activation_bytes = 10,
                                       .seconds = seconds,
                                       .input_bytes = input_bytes,
                                       .host_bandwidth = host_bandwidth});
}

static void assert_offloads(double host_bandwidth, double seconds, double longest) {
  jpp_search_result_t result = search_half(host_bandwidth, 1, seconds);
  assert_int_equal(result.activations, JPP_ACTIVATIONS_OFFLOADED);
  assert_true(result.makespan <= longest);
  assert_true(result.makespan == result.makespans[JPP_ACTIVATIONS_OFFLOADED]);
  assert_true(result.makespans[JPP_ACTIVATIONS_RECOMPUTED] > result.makespan);
  assert_true(result.makespans[JPP_ACTIVATIONS_KEPT] > result.makespan);
  jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                    .stage_costs = kEven,
                                    .activations = result.activations,
                                    .memory_limit = 40,
                                    .activation_bytes = 10,
                                    .host_bandwidth = host_bandwidth};
  jpp_simulation_t* simulation = NULL;
  ASSERT_OK(jpp_schedule_simulate(result.schedule, &options, &simulation));
  assert_true(simulation->makespan == result.makespan);
  for (uint32_t r = 0; r < 8; ++r) assert_true(simulation->ranks[r].peak <= 4);
  assert_null(simulation->moves[7]);
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(result.schedule);
}

// As in PipeOffload (arXiv 2503.01328): with half the memory, a step
// takes hardly longer if the links carry the activations of a microbatch in its 3 units.
static void test_half_the_memory_costs_little_time(void** state) {
  (void)state;
  const double whole_backwards = (32 + 7) * 3;
  assert_offloads(10. / 3, 0, 1.05 * whole_backwards);
  // With half as much again, weight gradients fill bubbles as without a limit.
  assert_offloads(5, 3, 1.05 * (32 * 3 + 7));
}

// A link that takes 10 units for what a forward makes in 1.
static void test_a_slow_link_is_not_used(void** state) {
  (void)state;
  jpp_search_result_t result = search_half(1, 1, 0.05);
  assert_int_equal(result.activations, JPP_ACTIVATIONS_RECOMPUTED);
  assert_true(result.makespans[JPP_ACTIVATIONS_OFFLOADED] > result.makespan);
  assert_true(result.makespans[JPP_ACTIVATIONS_KEPT] > result.makespan);
  jpp_schedule_destroy(result.schedule);
  // Where inputs are as large as activations, recomputation saves nothing.
  result = search_half(1, 10, 0.05);
  assert_int_equal(result.activations, JPP_ACTIVATIONS_KEPT);
  assert_true(result.makespans[JPP_ACTIVATIONS_RECOMPUTED] == 0);
  jpp_schedule_destroy(result.schedule);
  // Neither was asked for.
  result = search_half(0, 0, 0.05);
  assert_int_equal(result.activations, JPP_ACTIVATIONS_KEPT);
  assert_true(result.makespan == result.makespans[JPP_ACTIVATIONS_KEPT]);
  assert_true(result.makespans[JPP_ACTIVATIONS_OFFLOADED] == 0);
  jpp_schedule_destroy(result.schedule);
}

// The picture draws each task once and a curve for each rank, and loads nothing.
static void test_pictures_hold_every_task(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("v-half", 8, 4, 6);
  jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                    .rank_cost = {1, 1, 1}};
  jpp_simulation_t* simulation = NULL;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  char *svg = NULL, *html = NULL, *text = NULL;
  ASSERT_OK(jpp_plot_svg(simulation, &svg));
  ASSERT_OK(jpp_plot_html(simulation, &html));
  ASSERT_OK(jpp_plot_text(simulation, 100, true, &text));
  uint64_t tasks = 0, curves = 0;
  for (const char* c = svg; (c = strstr(c, " stroke=\"#fff\"")); ++c) ++tasks;
  for (const char* c = svg; (c = strstr(c, "<path fill=\"#c9b8e0\"")); ++c) ++curves;
  assert_int_equal(tasks, simulation->tasks);
  assert_int_equal(curves, 4);
  assert_null(strstr(svg, "class="));  // some renderers ignore style sheets
  assert_non_null(strstr(svg, "v-half: 8 stages, 4 ranks, 6 microbatches"));
  assert_non_null(strstr(html, "<script>"));
  assert_null(strstr(html, "src="));
  assert_non_null(strstr(text, "rank   3  "));
  jpp_text_free(svg);
  jpp_text_free(html);
  jpp_text_free(text);
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
}

// The two streams of a rank are drawn one above the other, and traced separately.
static void test_pictures_show_streams(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("zb-v", 4, 2, 2);
  jpp_simulate_options_t options = {
      .struct_size = sizeof(options), .rank_cost = {1, 1, 1}, .streams = 2};
  jpp_simulation_t* simulation = NULL;
  ASSERT_OK(jpp_schedule_simulate(schedule, &options, &simulation));
  char *svg = NULL, *text = NULL, *trace = NULL;
  ASSERT_OK(jpp_plot_svg(simulation, &svg));
  ASSERT_OK(jpp_plot_text(simulation, 40, false, &text));
  ASSERT_OK(jpp_simulation_to_trace(simulation, &trace));
  uint64_t lower = 0, beside = 0, lines = 0;
  for (const char* c = svg; (c = strstr(c, "\" height=\"16\"><title>bwd_w_")); ++c)
    ++lower;
  for (const char* c = trace; (c = strstr(c, "\"pid\":1,\"tid\":")); ++c) ++beside;
  for (const char* c = text; (c = strchr(c, '\n')); ++c) ++lines;
  assert_int_equal(lower, 4 * 2);
  assert_int_equal(beside,
                   4 * 2 + 2 * 2);  // weight gradients, and the names of two ranks
  assert_int_equal(lines, 2 + 2 * 2);
  jpp_text_free(svg);
  jpp_text_free(text);
  jpp_text_free(trace);
  jpp_simulation_destroy(simulation);
  jpp_schedule_destroy(schedule);
}

static jpp_status_t* interrupt(void* context) {
  uint32_t* polls = context;
  if (++*polls < 3) return NULL;
  return jpp_status_make(JPP_CANCELLED, "enough");
}

static void test_a_poll_ends_the_search(void** state) {
  (void)state;
  uint32_t polls = 0;
  jpp_search_options_t options = {.struct_size = sizeof(options),
                                  .stages = 8,
                                  .ranks = 4,
                                  .microbatches = 8,
                                  .costs = kUneven,
                                  .seconds = 1e6,
                                  .poll = interrupt,
                                  .context = &polls};
  jpp_search_result_t result;
  ASSERT_FAILS(jpp_schedule_search(&options, &result), JPP_CANCELLED, "enough");
  assert_int_equal(polls, 3);
  assert_null(result.schedule);
}

static void test_a_search_has_an_end(void** state) {
  (void)state;
  static const double kBad[] = {NAN, INFINITY, -INFINITY, -1};
  jpp_search_options_t options = {.struct_size = sizeof(options),
                                  .stages = 8,
                                  .ranks = 4,
                                  .microbatches = 8,
                                  .costs = kUneven};
  jpp_search_result_t result;
  for (size_t i = 0; i < sizeof(kBad) / sizeof(*kBad); ++i) {
    options.seconds = kBad[i];
    ASSERT_FAILS(jpp_schedule_search(&options, &result), JPP_INVALID_ARGUMENT,
                 "expected a number of seconds of at least 0");
    options.seconds = 0;
    options.latency = kBad[i];
    ASSERT_FAILS(jpp_schedule_search(&options, &result), JPP_INVALID_ARGUMENT,
                 "expected a latency");
    options.latency = 0;
    options.host_bandwidth = kBad[i];
    ASSERT_FAILS(jpp_schedule_search(&options, &result), JPP_INVALID_ARGUMENT,
                 "host bandwidth: expected a number of at least 0");
    options.host_bandwidth = 0;
  }
  options.input_bytes = 2;
  ASSERT_FAILS(jpp_schedule_search(&options, &result), JPP_INVALID_ARGUMENT,
               "expected at most 1 bytes, found 2");
  options.input_bytes = 0;
  // A latency much larger than the costs.
  options.latency = 1e100;
  ASSERT_OK(jpp_schedule_search(&options, &result));
  jpp_schedule_destroy(result.schedule);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_poll_ends_the_search),
      cmocka_unit_test(test_a_search_has_an_end),
      cmocka_unit_test(test_uneven_stages_are_beaten),
      cmocka_unit_test(test_limits_are_kept),
      cmocka_unit_test(test_the_least_memory_is_found),
      cmocka_unit_test(test_half_the_memory_costs_little_time),
      cmocka_unit_test(test_a_slow_link_is_not_used),
      cmocka_unit_test(test_the_smallest_schedules_do_not_depend_on_costs),
      cmocka_unit_test(test_every_size_is_served),
      cmocka_unit_test(test_pictures_hold_every_task),
      cmocka_unit_test(test_pictures_show_streams),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
