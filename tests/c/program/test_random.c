// Random steps: the checker accepts every plan, and the plan computes what the graph
// says.
#include <stdio.h>
#include <stdlib.h>

#include "interpreter.h"
#include "random_step.h"
#include "test_util.h"

static void fail_with_graph(const planned_t* planned, uint64_t seed, const char* what) {
  char* text = NULL;
  jpp_status_free(jpp_graph_print(planned->graph, &text));
  fputs(text, stderr);
  fail_msg("seed %llu, schedule %s: %s", (unsigned long long)seed,
           planned->schedules[0]->name, what);
}

static bool offloads(const planned_t* planned) {
  for (uint32_t r = 0; r < planned->ranks; ++r) {
    if (planned->offload && planned->report->actors[r].moves) return true;
  }
  return false;
}

static bool has_parts(const jpp_staged_t* staged) {
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    if (staged->tasks[t].next_part != JPP_NONE) return true;
  }
  return false;
}

static bool has_packed(const jpp_staged_t* staged) {
  for (uint32_t v = 0; v < staged->num_values; ++v) {
    if (jpp_staged_is_packed(staged, v)) return true;
  }
  return false;
}

typedef struct counts {
  uint64_t divided, offloaded;  // steps with tasks in parts, and with activations moved
  uint64_t packed;              // steps with several sums in one array
} counts_t;

static void try_seed(uint64_t seed, counts_t* counts) {
  uint32_t slots = 0;
  // Enough microbatches for small stages are rare otherwise.
  planned_t planned = random_long_step(seed, seed % 4 ? 1 : 8, &slots);
  jpp_status_t* status = plan_scheduled(&planned, slots);
  if (status) fail_with_graph(&planned, seed, jpp_status_message(status));
  uint64_t* expected = interpret_graph(planned.graph);
  outcome_t outcome = interpret_plan(planned.plan, expected);
  if (outcome == OUTCOME_DRIFTED) {
    fail_with_graph(&planned, seed, "copies of an output may be rounded differently");
  }
  if (outcome != OUTCOME_SAME) {
    fail_with_graph(&planned, seed, "computes something else");
  }
  free(expected);
  counts->divided += has_parts(planned.staged);
  counts->offloaded += offloads(&planned);
  counts->packed += has_packed(planned.staged);
  plan_free(&planned);
}

static void test_random_steps_compute_what_their_graphs_say(void** state) {
  (void)state;
  const char* only = test_variable("JPP_TEST_SEED");
  const char* times = test_variable("JPP_TEST_TIMES");
  counts_t counts = {0};
  if (only) {
    try_seed(strtoull(only, NULL, 10), &counts);
    return;
  }
  uint64_t count = times ? strtoull(times, NULL, 10) : 2000;
  for (uint64_t seed = 1; seed <= count; ++seed) try_seed(seed, &counts);
  assert_true(counts.divided >= count / 50);
  assert_true(counts.offloaded >= count / 20);
  assert_true(counts.packed >= count / 100);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_steps_compute_what_their_graphs_say),
  };
  return cmocka_run_group_tests_name("program_random", tests, NULL, NULL);
}
