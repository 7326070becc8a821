// Sums add their microbatches in order: the planner refuses a loop with sums if and only
// if the schedule's proof refuses its schedule.
#include <stdlib.h>

#include "plan_util.h"
#include "schedule_util.h"

enum { kStages = 2, kMicrobatches = 4, kMostTasks = 3 * kMicrobatches };

static uint64_t g_random = 1;

static uint32_t random_below(uint32_t bound) {
  return test_random_below(&g_random, bound);
}

// The rows in a random order that can run; stage s is on rank s.
typedef struct random_rows {
  jpp_schedule_task_t tasks[kStages][kMostTasks];
  jpp_schedule_row_t rows[kStages];
  bool ran[4][kStages][kMicrobatches];  // by kind - 1
} random_rows_t;

static bool can_run(const random_rows_t* rows, uint32_t kind, uint32_t s, uint32_t mb,
                    bool split) {
  uint32_t back = split ? JPP_TASK_BWD_I : JPP_TASK_BWD;
  if (rows->ran[kind - 1][s][mb]) return false;
  if (kind == JPP_TASK_FWD) return !s || rows->ran[0][s - 1][mb];
  if (kind == JPP_TASK_BWD_W) return rows->ran[back - 1][s][mb];
  return rows->ran[0][s][mb] && (s + 1 == kStages || rows->ran[back - 1][s + 1][mb]);
}

// `order` times in five it tries the first microbatch that the stage has not run,
// otherwise a random one.
static void fill(random_rows_t* rows, bool split, uint32_t order) {
  static const uint32_t kWhole[] = {JPP_TASK_FWD, JPP_TASK_BWD};
  static const uint32_t kSplit[] = {JPP_TASK_FWD, JPP_TASK_BWD_I, JPP_TASK_BWD_W};
  uint32_t kinds = split ? 3 : 2;
  *rows = (random_rows_t){0};
  for (uint32_t left = kinds * kStages * kMicrobatches; left;) {
    uint32_t kind = (split ? kSplit : kWhole)[random_below(kinds)];
    uint32_t s = random_below(kStages), mb = random_below(kMicrobatches);
    if (random_below(5) < order) {
      for (mb = 0; mb + 1 < kMicrobatches && rows->ran[kind - 1][s][mb];) ++mb;
    }
    if (!can_run(rows, kind, s, mb, split)) continue;
    rows->ran[kind - 1][s][mb] = true;
    rows->tasks[s][rows->rows[s].count++] =
        (jpp_schedule_task_t){.kind = (uint8_t)kind, .stage = s, .microbatch = mb};
    --left;
  }
  for (uint32_t s = 0; s < kStages; ++s) rows->rows[s].tasks = rows->tasks[s];
}

static bool is_planned(const char* graph, jpp_schedule_t* schedule) {
  planned_t planned = {.ranks = kStages};
  ASSERT_OK(jpp_graph_parse(graph, strlen(graph), "test", &planned.graph));
  planned.given[0] = schedule;
  jpp_status_t* status = plan_scheduled(&planned, 0);
  if (status && !strstr(jpp_status_message(status), "is due: gradients are summed")) {
    fail_msg("%s", jpp_status_message(status));
  }
  planned.given[0] = NULL;
  plan_free(&planned);
  bool ok = !status;
  jpp_status_free(status);
  return ok;
}

static void test_the_planner_and_the_proof_agree(void** state) {
  (void)state;
  char* graph = graph_text("mlp2");
  uint32_t planned = 0, refused = 0;
  for (uint32_t n = 0; n < 1200; ++n) {
    random_rows_t rows;
    fill(&rows, n % 2, n % 6);
    jpp_schedule_rows_t from = {.stages = kStages,
                                .ranks = kStages,
                                .microbatches = kMicrobatches,
                                .rows = rows.rows};
    jpp_schedule_t* schedule = NULL;
    ASSERT_OK(jpp_schedule_from_rows(&from, &schedule));
    ASSERT_OK(jpp_schedule_verify(schedule));
    jpp_status_t* status = jpp_schedule_verify_sums(schedule);
    bool expected = is_planned(graph, schedule);
    if (expected == (status != NULL)) {
      fail_msg("planned: %d, but the proof says: %s\n%s", expected,
               jpp_status_message(status), text_of(schedule));
    }
    ++*(expected ? &planned : &refused);
    jpp_status_free(status);
    jpp_schedule_destroy(schedule);
  }
  assert_true(planned > 100 && refused > 100);
  free(graph);
}

static void check_built_in(const jpp_schedule_t* schedule) {
  ASSERT_OK(jpp_schedule_verify_sums(schedule));
}

static void test_built_in_schedules_sum_in_order(void** state) {
  (void)state;
  for_each_schedule(check_built_in);
}

#define TASK(k, mb) \
  { .kind = JPP_TASK_##k, .microbatch = mb }

static void test_what_is_said(void** state) {
  (void)state;
  static const jpp_schedule_task_t kTasks[] = {
      TASK(FWD, 0), TASK(FWD, 1), {0}, TASK(BWD, 1), TASK(BWD, 0)};
  static const jpp_schedule_task_t kForwards[] = {TASK(FWD, 1), TASK(FWD, 0)};
  jpp_schedule_row_t row = {kTasks, 5};
  jpp_schedule_rows_t rows = {.stages = 1, .ranks = 1, .microbatches = 2, .rows = &row};
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_from_rows(&rows, &schedule));
  ASSERT_FAILS(jpp_schedule_verify_sums(schedule), JPP_SCHEDULE_ERROR,
               "rank 0 runs bwd_0__1 (entry 3) where bwd_0__0 is due: a loop that has a "
               "sum adds up its microbatches in order");
  jpp_schedule_destroy(schedule);
  row = (jpp_schedule_row_t){kForwards, 2};
  ASSERT_OK(jpp_schedule_from_rows(&rows, &schedule));
  ASSERT_FAILS(jpp_schedule_verify_sums(schedule), JPP_SCHEDULE_ERROR,
               "rank 0 runs fwd_0__1 (entry 0) where fwd_0__0 is due");
  jpp_schedule_destroy(schedule);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_the_planner_and_the_proof_agree),
      cmocka_unit_test(test_built_in_schedules_sum_in_order),
      cmocka_unit_test(test_what_is_said),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
