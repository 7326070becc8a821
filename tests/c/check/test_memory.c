// Which values make up the live bytes after each instruction, and how memory limits are
// checked.
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "golden.h"
#include "plan_util.h"

static uint64_t sum_of(const jpp_memory_point_t* point) {
  uint64_t sum = 0;
  for (int k = 0; k < JPP_BYTES_KIND_COUNT; ++k) sum += point->bytes[k];
  return sum;
}

// The curve's highest point is the peak, at the instruction and with the kinds of bytes
// that the report gives.
static void check_curve(const planned_t* planned, uint32_t rank) {
  const jpp_program_t* program = &planned->plan->programs[rank];
  const jpp_check_actor_t* actor = &planned->report->actors[rank];
  uint32_t count = program->num_instrs + 1;
  jpp_memory_point_t* points = calloc(count, sizeof(*points));
  ASSERT_OK(jpp_check_memory_curve(planned->plan, rank, count, points));
  uint64_t most = 0;
  for (uint32_t i = 0; i <= program->num_instrs; ++i) {
    if (sum_of(&points[i]) > most) most = sum_of(&points[i]);
  }
  assert_int_equal(most, actor->peak_bytes);
  bool at_start = sum_of(&points[0]) == most;
  bool at_end = actor->peak_instr == program->num_instrs;
  const jpp_memory_point_t* peak = &points[at_start ? 0 : actor->peak_instr + !at_end];
  assert_memory_equal(peak->bytes, actor->bytes_at_peak, sizeof(peak->bytes));
  free(points);
}

static void test_curves_reach_the_peak(void** state) {
  (void)state;
  for (uint32_t i = 0; kGraphs[i]; ++i) {
    planned_t planned;
    ASSERT_OK(plan_file(kGraphs[i], NULL, &planned));
    for (uint32_t r = 0; r < planned.ranks; ++r) check_curve(&planned, r);
    plan_free(&planned);
  }
}

static const jpp_memory_point_t* points_of(const planned_t* planned, uint32_t rank,
                                           jpp_memory_point_t** out_points) {
  uint32_t count = planned->plan->programs[rank].num_instrs + 1;
  *out_points = calloc(count, sizeof(**out_points));
  ASSERT_OK(jpp_check_memory_curve(planned->plan, rank, count, *out_points));
  return &(*out_points)[count - 1];
}

// Updated weights and momentum replace the donated ones in place, and keep their kinds.
static void test_updated_weights_are_weights(void** state) {
  (void)state;
  planned_t planned;
  jpp_memory_point_t* points = NULL;
  ASSERT_OK(plan_file("mlp4", NULL, &planned));
  const jpp_memory_point_t* end = points_of(&planned, 0, &points);
  assert_int_equal(points[0].bytes[JPP_BYTES_WEIGHTS], 64);
  assert_int_equal(points[0].bytes[JPP_BYTES_OPTIMIZER_STATE], 64 + 4);
  assert_int_equal(points[0].bytes[JPP_BYTES_BATCH], 6 * 2 * 4 * 4);
  assert_int_equal(points[0].bytes[JPP_BYTES_GRADIENTS], 0);
  assert_int_equal(end->bytes[JPP_BYTES_WEIGHTS], 64);
  assert_int_equal(end->bytes[JPP_BYTES_OPTIMIZER_STATE], 64 + 4);
  assert_int_equal(end->bytes[JPP_BYTES_ACTIVATIONS], 0);
  assert_int_equal(end->bytes[JPP_BYTES_GRADIENTS], 0);
  free(points);
  plan_free(&planned);
}

// A weight that is read only through a cast is still a weight, and so is the cast.
static void test_casts_of_weights_are_weights(void** state) {
  (void)state;
  planned_t planned;
  jpp_memory_point_t* points = NULL;
  ASSERT_OK(plan_file("casts", NULL, &planned));
  points_of(&planned, 0, &points);
  assert_int_equal(points[0].bytes[JPP_BYTES_WEIGHTS], 2 * 256);
  uint64_t bytes = planned.report->actors[0].bytes_at_peak[JPP_BYTES_WEIGHTS];
  assert_int_equal(bytes, 2 * (256 + 128));
  free(points);
  plan_free(&planned);
}

// --- Limits ---------------------------------------------------------------------------

static void test_the_peak_itself_is_within_the_limit(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("mlp4", NULL, &planned));
  uint64_t peaks[4];
  for (uint32_t r = 0; r < 4; ++r) peaks[r] = planned.report->actors[r].peak_bytes;
  jpp_memory_limits_t limits = {.bytes = peaks};
  ASSERT_OK(jpp_check_memory_limit(planned.report, &limits));
  --peaks[2];
  ASSERT_FAILS(jpp_check_memory_limit(planned.report, &limits), JPP_OUT_OF_MEMORY,
               "memory limit: rank 2: expected at most 419 bytes");
  plan_free(&planned);
}

static void test_peaks_on_the_same_devices_add_up(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("mlp4", NULL, &planned));
  const jpp_check_actor_t* actors = planned.report->actors;
  uint64_t even = actors[0].peak_bytes + actors[2].peak_bytes;
  uint64_t odd = actors[1].peak_bytes + actors[3].peak_bytes;
  uint64_t bytes[4] = {even, odd, 0, 0};  // only the first ranks' limits count
  jpp_memory_limits_t limits = {.bytes = bytes, .devices = (uint32_t[]){7, 9, 7, 9}};
  ASSERT_OK(jpp_check_memory_limit(planned.report, &limits));
  assert_int_equal(jpp_check_steps_in_flight(planned.report, &limits, 3), 1);
  bytes[0] += actors[0].next_step_bytes + actors[2].next_step_bytes;
  bytes[1] += actors[1].next_step_bytes + actors[3].next_step_bytes;
  assert_int_equal(jpp_check_steps_in_flight(planned.report, &limits, 3), 2);
  bytes[0] = even - 1;
  ASSERT_FAILS(jpp_check_memory_limit(planned.report, &limits), JPP_OUT_OF_MEMORY,
               "memory limit: ranks 0, 2, on the same devices: expected at most ");
  bytes[1] = 1;
  ASSERT_FAILS(jpp_check_memory_limit(planned.report, &limits), JPP_OUT_OF_MEMORY,
               "1 other group is over as well");
  plan_free(&planned);
}

static void assert_too_large(const char* text, const char* why) {
  planned_t planned;
  ASSERT_FAILS(plan_text(text, NULL, &planned), JPP_OUT_OF_MEMORY, why);
  plan_free(&planned);
}

// Sums that overflowed 64 bits once wrapped around to small peaks, which passed the
// check.
static void test_peaks_beyond_all_memory_are_refused(void** state) {
  (void)state;
  assert_too_large(
      "graph \"g\" ranks 1\n"
      "arg %0 u8[2147483647,2147483647]\narg %1 u8[2147483647,2147483647]\n"
      "arg %2 u8[2147483647,2147483647]\narg %3 u8[2147483647,2147483647]\n"
      "arg %4 u8[2147483647,2147483647]\n"
      "%5:u8[16] = f(%0, %1, %2, %3, %4)\nout %5\n",
      "rank 0: 2^63 bytes or more are live at instruction 0");
  assert_too_large(
      "graph \"g\" ranks 1\narg %0 f32[]\n"
      "%1:u8[2147483647,2147483647] = f(%0)\n%2:u8[2147483647,2147483647] = f(%0)\n"
      "%3:u8[2147483647,2147483647] = f(%0)\n%4:u8[2147483647,2147483647] = f(%0)\n"
      "%5:u8[16] = g(%1, %2, %3, %4)\nout %1\nout %2\nout %3\nout %4\nout %5\n",
      "rank 0: 2^63 bytes or more are live at instruction 0");
  // Receive slots count as the number of messages times their size.
  assert_too_large(
      "graph \"g\" ranks 2\narg %0 f32[2,2]\n"
      "loop microbatches 4 stages 2 schedule \"gpipe\" index %1 {\n"
      "  %2:u8[2147483647,2147483647] = f(%0, %1)\n"
      "  %3:u8[2147483647,2147483647] = @mark 0 (%2)\n"
      "  %4:f32[] = g(%3)\n  %5:f32[] = @mark 1 (%4)\n"
      "} %6:f32[] = add %5\nout %6\n",
      "2^63 bytes or more are live");
}

static void test_a_rank_that_is_none_has_no_curve(void** state) {
  (void)state;
  planned_t planned;
  jpp_memory_point_t point;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  ASSERT_FAILS(jpp_check_memory_curve(planned.plan, 2, 1, &point), JPP_INVALID_ARGUMENT,
               "the plan has ranks 0 to 1, found rank 2");
  ASSERT_FAILS(jpp_check_memory_curve(planned.plan, 1, 1, &point), JPP_INVALID_ARGUMENT,
               "the points of a memory curve: expected a count of");
  plan_free(&planned);
}

// A batch is a new array in each step, donated or not.
static void test_a_further_step_brings_its_batch(void** state) {
  (void)state;
  static const char kStep[] =
      "graph \"g\" ranks 1\n"
      "arg %%w f32[64,64] \"w\" donated\n"
      "arg %%x f32[4,256,64] \"x\"%s\n"
      "loop microbatches 4 stages 1 schedule \"gpipe\" index %%i {\n"
      "  %%xi:f32[256,64] = slice(%%x, %%i) cheap\n"
      "  %%h:f32[64,64] = gram(%%xi, %%w) cost 256\n"
      "  %%m:f32[64,64] = @mark 0 (%%h)\n"
      "} %%G:f32[64,64] = add %%m\n"
      "%%u:f32[64,64] = update(%%w, %%G)\n"
      "out %%u next %%w\n";
  for (int donated = 0; donated < 2; ++donated) {
    char text[sizeof(kStep) + 16];
    planned_t planned;
    snprintf(text, sizeof(text), kStep, donated ? " donated" : "");
    ASSERT_OK(plan_text(text, NULL, &planned));
    assert_int_equal(planned.report->actors[0].next_step_bytes, 4 * 256 * 64 * 4);
    plan_free(&planned);
  }
}

static void test_pinned_host_has_limits_of_its_own(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("host", NULL, &planned));
  const jpp_check_actor_t* actors = planned.report->actors;
  uint64_t bytes[] = {actors[0].peak_host_bytes, actors[1].peak_host_bytes};
  jpp_memory_limits_t limits = {.bytes = bytes};
  assert_true(bytes[0] && bytes[1]);
  ASSERT_OK(jpp_check_host_limit(planned.report, &limits));
  bytes[1] -= 4;
  ASSERT_FAILS(jpp_check_host_limit(planned.report, &limits), JPP_OUT_OF_MEMORY,
               "memory limit: rank 1: expected at most 764 bytes in pinned_host for each "
               "device, found a peak of 768, 4 over");
  static const uint32_t kShared[] = {0, 0};
  limits.devices = kShared;
  bytes[0] = actors[0].peak_host_bytes + actors[1].peak_host_bytes;
  ASSERT_OK(jpp_check_host_limit(planned.report, &limits));
  --bytes[0];
  ASSERT_FAILS(jpp_check_host_limit(planned.report, &limits), JPP_OUT_OF_MEMORY,
               "rank 0 and others on its devices");
  plan_free(&planned);
}

// The curve's peak is the peak of pinned host memory, and moves happen below it.
static void test_the_curve_has_pinned_host(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("host", NULL, &planned));
  for (uint32_t r = 0; r < 2; ++r) {
    uint32_t count = planned.plan->programs[r].num_instrs + 1;
    jpp_memory_point_t* points = calloc(count, sizeof(*points));
    uint64_t most = 0;
    ASSERT_OK(jpp_check_memory_curve(planned.plan, r, count, points));
    for (uint32_t i = 0; i < count; ++i) {
      if (points[i].host_bytes > most) most = points[i].host_bytes;
    }
    assert_int_equal(most, planned.report->actors[r].peak_host_bytes);
    free(points);
  }
  plan_free(&planned);
}

static jpp_status_t* count_1_mib(void* context, const jpp_staged_t* staged,
                                 uint64_t* out_bytes) {
  (void)context;
  for (uint32_t v = 0; v < staged->num_values; ++v) out_bytes[v] = 1 << 20;
  return NULL;
}

static void assert_offload(const jpp_planned_t* planned, const bool* ranks) {
  for (uint32_t r = 0; r < planned->ranks; ++r) {
    assert_int_equal(planned->offload[r], ranks[r]);
    assert_int_equal(planned->report->actors[r].peak_host_bytes > 0, ranks[r]);
  }
}

// Ranks over their limits move activations to the host; the others keep theirs, and so
// their peaks.
static void test_ranks_over_their_limits_offload(void** state) {
  (void)state;
  char* text = graph_text("mlp4");
  jpp_graph_t* graph = NULL;
  jpp_planned_t *kept = NULL, *planned = NULL;
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "mlp4", &graph));
  jpp_plan_options_t options = {.struct_size = sizeof(options), .measure = count_1_mib};
  ASSERT_OK(jpp_plan_graph(graph, &options, &kept));
  uint64_t bytes[4];
  for (uint32_t r = 0; r < 4; ++r) bytes[r] = kept->report->actors[r].peak_bytes;
  jpp_memory_limits_t limits = {.bytes = bytes};
  options.offload_over = &limits;
  ASSERT_OK(jpp_plan_graph(graph, &options, &planned));
  assert_offload(planned, (bool[]){false, false, false, false});
  jpp_planned_destroy(planned);

  --bytes[1];
  ASSERT_OK(jpp_plan_graph(graph, &options, &planned));
  assert_offload(planned, (bool[]){false, true, false, false});
  ASSERT_OK(jpp_check_memory_limit(planned->report, &limits));
  jpp_planned_destroy(planned);

  static const uint32_t kShared[] = {0, 1, 1, 0};
  limits.devices = kShared;
  bytes[0] += bytes[3];
  bytes[1] += bytes[2];
  ASSERT_OK(jpp_plan_graph(graph, &options, &planned));
  assert_offload(planned, (bool[]){false, true, true, false});
  ASSERT_OK(jpp_check_memory_limit(planned->report, &limits));
  jpp_planned_destroy(planned);
  jpp_planned_destroy(kept);
  jpp_graph_destroy(graph);
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_further_step_brings_its_batch),
      cmocka_unit_test(test_pinned_host_has_limits_of_its_own),
      cmocka_unit_test(test_the_curve_has_pinned_host),
      cmocka_unit_test(test_ranks_over_their_limits_offload),
      cmocka_unit_test(test_curves_reach_the_peak),
      cmocka_unit_test(test_updated_weights_are_weights),
      cmocka_unit_test(test_casts_of_weights_are_weights),
      cmocka_unit_test(test_the_peak_itself_is_within_the_limit),
      cmocka_unit_test(test_peaks_on_the_same_devices_add_up),
      cmocka_unit_test(test_peaks_beyond_all_memory_are_refused),
      cmocka_unit_test(test_a_rank_that_is_none_has_no_curve),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
