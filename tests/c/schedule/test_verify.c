// The proof of schedules: what it accepts, what it refuses, and with which message.
#include <stdio.h>
#include <stdlib.h>

#include "base/str.h"
#include "golden.h"
#include "schedule/order.h"
#include "schedule_util.h"

#define F(s, m) \
  { .kind = JPP_TASK_FWD, .stage = (s), .microbatch = (m) }
#define B(s, m) \
  { .kind = JPP_TASK_BWD, .stage = (s), .microbatch = (m) }
#define I(s, m) \
  { .kind = JPP_TASK_BWD_I, .stage = (s), .microbatch = (m) }
#define W(s, m) \
  { .kind = JPP_TASK_BWD_W, .stage = (s), .microbatch = (m) }
#define ROW(...)                                                                   \
  {                                                                                \
    (const jpp_schedule_task_t[]){__VA_ARGS__},                                    \
        sizeof((jpp_schedule_task_t[]){__VA_ARGS__}) / sizeof(jpp_schedule_task_t) \
  }

static jpp_schedule_t* from_rows(uint32_t stages, uint32_t ranks, uint32_t microbatches,
                                 const jpp_schedule_row_t* rows) {
  jpp_schedule_rows_t from = {
      .stages = stages, .ranks = ranks, .microbatches = microbatches, .rows = rows};
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_from_rows(&from, &schedule));
  return schedule;
}

static void assert_rejected(uint32_t stages, uint32_t ranks, uint32_t microbatches,
                            const jpp_schedule_row_t* rows, const char* text) {
  jpp_schedule_t* schedule = from_rows(stages, ranks, microbatches, rows);
  ASSERT_FAILS(jpp_schedule_verify(schedule), JPP_SCHEDULE_ERROR, text);
  jpp_schedule_destroy(schedule);
}

static void assert_accepted(uint32_t stages, uint32_t ranks, uint32_t microbatches,
                            const jpp_schedule_row_t* rows) {
  jpp_schedule_t* schedule = from_rows(stages, ranks, microbatches, rows);
  ASSERT_OK(jpp_schedule_verify(schedule));
  jpp_schedule_destroy(schedule);
}

static void test_user_rows_are_copied_and_placed(void** state) {
  (void)state;
  jpp_schedule_task_t first[] = {F(2, 0), B(2, 0)};
  jpp_schedule_task_t second[] = {F(0, 0), F(1, 0), B(1, 0), {.latency = 7}, B(0, 0)};
  jpp_schedule_row_t rows[] = {{first, 2}, {second, 5}};
  jpp_schedule_t* schedule = from_rows(3, 2, 1, rows);
  first[0].stage = 77;
  assert_int_equal(schedule->rows[0].tasks[0].stage, 2);
  assert_int_equal(schedule->rows[0].tasks[1].latency, 2);
  assert_int_equal(schedule->rows[1].tasks[3].latency, 0);
  assert_int_equal(schedule->stage_rank[0], 1);
  assert_int_equal(schedule->stage_rank[1], 1);
  assert_int_equal(schedule->stage_rank[2], 0);
  assert_string_equal(schedule->name, "user");
  ASSERT_OK(jpp_schedule_verify(schedule));
  jpp_schedule_destroy(schedule);
}

// Rank r of two: F of all its microbatches, then B; `at` counts its entries.
typedef struct callback {
  uint32_t at[2];
  bool endless;
} callback_t;

static bool next_task(void* context, uint32_t rank, jpp_schedule_task_t* out_task) {
  callback_t* callback = context;
  uint32_t entry = callback->at[rank]++;
  if (entry >= 6 && !callback->endless) return false;
  *out_task = (jpp_schedule_task_t){.kind = entry < 3 ? JPP_TASK_FWD : JPP_TASK_BWD,
                                    .stage = rank,
                                    .microbatch = entry % 3};
  return true;
}

static void test_a_callback_makes_rows(void** state) {
  (void)state;
  callback_t callback = {0};
  jpp_schedule_rows_t rows = {.stages = 2, .ranks = 2, .microbatches = 3};
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_from_callback(&rows, next_task, &callback, &schedule));
  ASSERT_OK(jpp_schedule_verify(schedule));
  assert_int_equal(schedule->rows[1].count, 6);
  assert_int_equal(schedule->stage_rank[1], 1);
  ASSERT_OK(jpp_schedule_check_memory(schedule, 10, 30));
  ASSERT_FAILS(
      jpp_schedule_check_memory(schedule, 10, 29), JPP_OUT_OF_MEMORY,
      "rank 0 keeps 3 activations (30 bytes) at fwd_0__2 (entry 2), 1 bytes over "
      "the limit of 29; 1f1b fits with 20");
  ASSERT_FAILS(jpp_schedule_check_memory(schedule, 10, 1), JPP_OUT_OF_MEMORY,
               "no built-in schedule of these sizes fits");
  jpp_schedule_destroy(schedule);
  callback = (callback_t){.endless = true};
  ASSERT_FAILS(jpp_schedule_from_callback(&rows, next_task, &callback, &schedule),
               JPP_INVALID_ARGUMENT, "rank 0: the callback has made");
}

// 4,096 activations of 4,096 TiB are 2^64 bytes, which once overflowed to 0.
static void test_activations_beyond_all_memory_are_over_any_limit(void** state) {
  (void)state;
  for (uint32_t microbatches = 4095; microbatches <= 4097; ++microbatches) {
    jpp_schedule_t* schedule = build("gpipe", 1, 1, microbatches);
    ASSERT_FAILS(jpp_schedule_check_memory(schedule, 1ull << 52, 1 << 30),
                 JPP_OUT_OF_MEMORY, "rank 0 keeps 409");
    jpp_schedule_destroy(schedule);
  }
}

static void test_forward_only_and_split_backwards_are_accepted(void** state) {
  (void)state;
  assert_accepted(2, 2, 2,
                  (jpp_schedule_row_t[]){ROW(F(0, 0), F(0, 1)), ROW(F(1, 0), F(1, 1))});
  assert_accepted(
      2, 2, 1,
      (jpp_schedule_row_t[]){ROW(F(0, 0), B(0, 0)), ROW(F(1, 0), I(1, 0), W(1, 0))});
}

static void test_placement_must_exist(void** state) {
  (void)state;
  jpp_schedule_row_t rows[] = {ROW(F(0, 0)), ROW(F(2, 0))};
  uint32_t stage_rank[] = {0, 5, 1};
  jpp_schedule_rows_t from = {
      .name = "mine", .stages = 3, .ranks = 2, .microbatches = 1, .rows = rows};
  jpp_schedule_t* schedule = NULL;
  ASSERT_FAILS(jpp_schedule_from_rows(&from, &schedule), JPP_SCHEDULE_ERROR,
               "schedule mine: stage 1 is in no rank's list");
  from.stage_rank = stage_rank;
  ASSERT_FAILS(jpp_schedule_from_rows(&from, &schedule), JPP_SCHEDULE_ERROR,
               "stage 1 is placed on rank 5, and there are ranks 0 to 1");
  assert_null(schedule);
}

static void test_wrong_tasks_are_named(void** state) {
  (void)state;
  assert_rejected(
      1, 1, 1, (jpp_schedule_row_t[]){ROW(F(0, 0), B(3, 0))},
      "rank 0, entry 1: bwd_3__0 names stage 3, and the schedule has stages 0 "
      "to 0");
  assert_rejected(1, 1, 4, (jpp_schedule_row_t[]){ROW(F(0, 4))},
                  "fwd_0__4 names microbatch 4, and the loop has microbatches 0 to 3");
  assert_rejected(1, 1, 1, (jpp_schedule_row_t[]){ROW(F(0, 0), {.kind = 9})},
                  "9 is not a kind of task");
  assert_rejected(1, 1, 1, (jpp_schedule_row_t[]){ROW(F(0, 0), B(0, 0), F(0, 0))},
                  "rank 0: fwd_0__0 is listed twice, as entries 0 and 2");
  assert_rejected(
      2, 2, 1, (jpp_schedule_row_t[]){ROW(F(0, 0), F(1, 0)), ROW(B(1, 0), B(0, 0))},
      "bwd_1__0 is in the list of rank 1 (entry 0), but stage 1 is on rank 0");
  assert_rejected(
      1, 1, 2, (jpp_schedule_row_t[]){ROW(F(0, 0), B(0, 0), F(0, 1), I(0, 1), W(0, 1))},
      "bwd_i_0__1 (rank 0, entry 3) is split, but an earlier backward of the "
      "stage is whole");
  assert_rejected(1, 1, 1,
                  (jpp_schedule_row_t[]){ROW({.kind = JPP_TASK_FWD, .joins_next = true})},
                  "the list ends there");
}

static void test_missing_tasks_are_named(void** state) {
  (void)state;
  assert_rejected(
      2, 2, 2,
      (jpp_schedule_row_t[]){ROW(F(0, 0), F(0, 1), B(0, 0), B(0, 1)),
                             ROW(F(1, 0), B(1, 0), F(1, 1))},
      "stage 1: bwd_1__1 is missing from rank 1 (every stage needs forward and "
      "backward of all 2 microbatches)");
  assert_rejected(
      1, 1, 1, (jpp_schedule_row_t[]){ROW(F(0, 0), I(0, 0))},
      "bwd_w_0__0 is missing from rank 0 (every stage needs forward, bwd_i and "
      "bwd_w of all 1 microbatches)");
  assert_rejected(1, 1, 2, (jpp_schedule_row_t[]){ROW(F(0, 1))},
                  "fwd_0__0 is missing from rank 0 (every stage needs forward of all 2");
}

static void add_message(const jpp_schedule_t* schedule, bool fused_as_one,
                        jpp_str_t* str) {
  jpp_schedule_timeline_options_t options = {.struct_size = sizeof(options),
                                             .fused_as_one = fused_as_one};
  jpp_schedule_timeline_t* timeline = NULL;
  jpp_status_t* status = jpp_schedule_timeline(schedule, &options, &timeline);
  assert_int_equal(jpp_status_code(status), JPP_SCHEDULE_ERROR);
  assert_null(timeline);
  jpp_str_appendf(str, "%s\n\n", jpp_status_message(status));
  jpp_status_free(status);
}

// Rank 11 lists the second lap before the first, so every rank waits for the previous
// one.
static void add_long_cycle(jpp_str_t* str) {
  jpp_schedule_task_t tasks[12][2];
  jpp_schedule_row_t rows[12];
  for (uint32_t rank = 0; rank < 12; ++rank) {
    for (uint32_t lap = 0; lap < 2; ++lap) {
      uint32_t entry = rank == 11 ? 1 - lap : lap;
      tasks[rank][entry] = (jpp_schedule_task_t)F(rank + 12 * lap, 0);
    }
    rows[rank] = (jpp_schedule_row_t){tasks[rank], 2};
  }
  jpp_schedule_t* schedule = from_rows(24, 12, 1, rows);
  add_message(schedule, false, str);
  jpp_schedule_destroy(schedule);
}

// Ranks 1 and 2 block each other; a later entry of rank 1 cannot run either and would be
// the simpler explanation.
static void add_short_cycle_behind_a_long_one(jpp_str_t* str) {
  jpp_schedule_t* schedule =
      from_rows(3, 3, 2,
                (jpp_schedule_row_t[]){ROW(F(0, 0), B(0, 0), F(0, 1), B(0, 1)),
                                       ROW(F(1, 0), B(1, 0), B(1, 1), F(1, 1)),
                                       ROW(F(2, 0), F(2, 1), B(2, 0), B(2, 1))});
  add_message(schedule, false, str);
  jpp_schedule_destroy(schedule);
}

static void test_deadlocks_are_explained(void** state) {
  (void)state;
  jpp_str_t str = {0};
  jpp_schedule_t* schedule =
      from_rows(2, 2, 2,
                (jpp_schedule_row_t[]){ROW(F(0, 0), B(0, 0), F(0, 1), B(0, 1)),
                                       ROW(F(1, 0), F(1, 1), B(1, 0), B(1, 1))});
  add_message(schedule, false, &str);
  jpp_schedule_destroy(schedule);
  schedule = from_rows(
      1, 1, 1, (jpp_schedule_row_t[]){ROW({.kind = JPP_TASK_IDLE}, B(0, 0), F(0, 0))});
  add_message(schedule, false, &str);
  jpp_schedule_destroy(schedule);
  jpp_schedule_task_t joined = F(0, 0);
  joined.joins_next = true;
  schedule = from_rows(
      2, 2, 1, (jpp_schedule_row_t[]){ROW(joined, B(0, 0)), ROW(F(1, 0), B(1, 0))});
  ASSERT_OK(jpp_schedule_verify(schedule));
  add_message(schedule, true, &str);
  jpp_schedule_destroy(schedule);
  add_long_cycle(&str);
  add_short_cycle_behind_a_long_one(&str);
  char* text = NULL;
  ASSERT_OK(jpp_str_finish(&str, &text));
  assert_golden("schedule/deadlocks.txt", text);
  jpp_text_free(text);
}

// --- Mutations, against a checker that is simple enough to be believed ---

enum { kMaxStages = 6, kMaxMicrobatches = 8, kMaxRow = 120 };

typedef struct rows_copy {
  jpp_schedule_task_t tasks[kMaxStages][kMaxRow];
  jpp_schedule_row_t rows[kMaxStages];
} rows_copy_t;

typedef struct naive {
  uint32_t listed[5][kMaxStages][kMaxMicrobatches];
  bool done[5][kMaxStages][kMaxMicrobatches];
} naive_t;

static bool naive_ready(const naive_t* naive, const jpp_schedule_t* schedule,
                        const jpp_schedule_task_t* t) {
  uint32_t s = t->stage, m = t->microbatch;
  if (t->kind == JPP_TASK_FWD) return s == 0 || naive->done[JPP_TASK_FWD][s - 1][m];
  if (t->kind == JPP_TASK_BWD_W) return naive->done[JPP_TASK_BWD_I][s][m];
  if (!naive->done[JPP_TASK_FWD][s][m]) return false;
  return s + 1 == schedule->stages || naive->done[JPP_TASK_BWD][s + 1][m] ||
         naive->done[JPP_TASK_BWD_I][s + 1][m];
}

static bool naive_stage_complete(const naive_t* naive, const jpp_schedule_t* schedule,
                                 uint32_t s) {
  bool whole = true, split = true;
  for (uint32_t m = 0; m < schedule->microbatches; ++m) {
    if (naive->listed[JPP_TASK_FWD][s][m] != 1) return false;
    uint32_t b = naive->listed[JPP_TASK_BWD][s][m];
    uint32_t i = naive->listed[JPP_TASK_BWD_I][s][m];
    uint32_t w = naive->listed[JPP_TASK_BWD_W][s][m];
    whole = whole && b == 1 && !i && !w;
    split = split && !b && i == 1 && w == 1;
  }
  return whole || split;
}

static bool naive_accepts(const jpp_schedule_t* schedule) {
  naive_t* naive = calloc(1, sizeof(*naive));
  bool good = true;
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    for (uint32_t i = 0; i < schedule->rows[rank].count; ++i) {
      const jpp_schedule_task_t* t = &schedule->rows[rank].tasks[i];
      if (t->kind == JPP_TASK_IDLE) continue;
      if (schedule->stage_rank[t->stage] != rank) good = false;
      ++naive->listed[t->kind][t->stage][t->microbatch];
    }
  }
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    good = good && naive_stage_complete(naive, schedule, s);
  }
  uint32_t next[kMaxStages] = {0};
  for (bool moved = true; moved;) {
    moved = false;
    for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
      if (next[rank] == schedule->rows[rank].count) continue;
      const jpp_schedule_task_t* t = &schedule->rows[rank].tasks[next[rank]];
      if (t->kind != JPP_TASK_IDLE && !naive_ready(naive, schedule, t)) continue;
      naive->done[t->kind][t->stage][t->microbatch] = t->kind != JPP_TASK_IDLE;
      ++next[rank];
      moved = true;
    }
  }
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    good = good && next[rank] == schedule->rows[rank].count;
  }
  free(naive);
  return good;
}

static uint32_t g_random = 12345;

static uint32_t random_below(uint32_t bound) {
  g_random = g_random * 1664525u + 1013904223u;
  return (g_random >> 8) % bound;
}

static void copy_rows(const jpp_schedule_t* schedule, rows_copy_t* copy) {
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    const jpp_schedule_row_t* row = &schedule->rows[rank];
    assert_true(row->count + 4 < kMaxRow);
    for (uint32_t i = 0; i < row->count; ++i) {
      copy->tasks[rank][i] = row->tasks[i];
      copy->tasks[rank][i].joins_next = false;
    }
    copy->rows[rank] = (jpp_schedule_row_t){copy->tasks[rank], row->count};
  }
}

static void insert(rows_copy_t* copy, uint32_t rank, uint32_t at,
                   jpp_schedule_task_t task) {
  jpp_schedule_task_t* tasks = copy->tasks[rank];
  uint32_t count = copy->rows[rank].count++;
  memmove(&tasks[at + 1], &tasks[at], (count - at) * sizeof(*tasks));
  tasks[at] = task;
}

static void drop(rows_copy_t* copy, uint32_t rank, uint32_t at) {
  jpp_schedule_task_t* tasks = copy->tasks[rank];
  uint32_t count = --copy->rows[rank].count;
  memmove(&tasks[at], &tasks[at + 1], (count - at) * sizeof(*tasks));
}

// Drops, repeats, swaps, moves along the row or moves to another rank a random entry.
static void mutate(rows_copy_t* copy, uint32_t ranks) {
  uint32_t rank = random_below(ranks), count = copy->rows[rank].count;
  if (!count) return;
  uint32_t at = random_below(count), other = random_below(count);
  jpp_schedule_task_t task = copy->tasks[rank][at];
  switch (random_below(8)) {
    case 0:
      drop(copy, rank, at);
      break;
    case 1:
      insert(copy, rank, other, task);
      break;
    case 2:
      drop(copy, rank, at);
      insert(copy, random_below(ranks), 0, task);
      break;
    case 3:
    case 4:
      drop(copy, rank, at);
      insert(copy, rank, other < count - 1 ? other : 0, task);
      break;
    default:
      copy->tasks[rank][at] = copy->tasks[rank][other];
      copy->tasks[rank][other] = task;
  }
}

// The message is short, and for a deadlock it says which entry to move.
static void check_message(const jpp_status_t* status) {
  if (!status) return;
  assert_int_equal(jpp_status_code(status), JPP_SCHEDULE_ERROR);
  const char* message = jpp_status_message(status);
  uint32_t lines = 1;
  for (const char* c = message; *c; ++c) lines += *c == '\n';
  assert_true(lines < 15);
  if (!strstr(message, "deadlocks")) return;
  assert_true(strstr(message, "to break this cycle") || strstr(message, "; put "));
}

// --- Shortest cycles, by all pairs of tasks ---

enum { kMaxTasks = 160, kFar = 1000 };

static bool naive_needs(const jpp_schedule_task_t* t, const jpp_schedule_task_t* other) {
  if (t->kind == JPP_TASK_IDLE || t->microbatch != other->microbatch) return false;
  bool forward = other->kind == JPP_TASK_FWD;
  bool backward = other->kind == JPP_TASK_BWD || other->kind == JPP_TASK_BWD_I;
  if (t->kind == JPP_TASK_FWD) return forward && other->stage + 1 == t->stage;
  if (t->kind == JPP_TASK_BWD_W) return backward && other->stage == t->stage;
  return (forward && other->stage == t->stage) ||
         (backward && other->stage == t->stage + 1);
}

// Weights of the steps from each task to each other: 1 to a task that it depends on, none
// to the task before it on its rank. Returns 0 if there are too many tasks.
static uint32_t naive_steps(const jpp_schedule_t* schedule,
                            uint16_t steps[kMaxTasks][kMaxTasks]) {
  const jpp_schedule_task_t* tasks[kMaxTasks];
  uint32_t count = 0, begin[kMaxStages + 1] = {0};
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    if (count + schedule->rows[r].count > kMaxTasks) return 0;
    for (uint32_t i = 0; i < schedule->rows[r].count; ++i) {
      tasks[count++] = &schedule->rows[r].tasks[i];
    }
    begin[r + 1] = count;
  }
  for (uint32_t a = 0; a < count; ++a) {
    for (uint32_t b = 0; b < count; ++b) {
      steps[a][b] = naive_needs(tasks[a], tasks[b]) ? 1 : kFar;
    }
  }
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    for (uint32_t i = begin[r] + 1; i < begin[r + 1]; ++i) steps[i][i - 1] = 0;
  }
  return count;
}

static uint32_t naive_shortest_cycle(const jpp_schedule_t* schedule) {
  static uint16_t steps[kMaxTasks][kMaxTasks];
  uint32_t count = naive_steps(schedule, steps), shortest = kFar;
  for (uint32_t k = 0; k < count; ++k) {
    for (uint32_t a = 0; a < count; ++a) {
      for (uint32_t b = 0; b < count; ++b) {
        uint32_t through = (uint32_t)steps[a][k] + steps[k][b];
        if (through < steps[a][b]) steps[a][b] = (uint16_t)through;
      }
    }
  }
  for (uint32_t a = 0; a < count; ++a) {
    if (steps[a][a] < shortest) shortest = steps[a][a];
  }
  return count ? shortest : 0;
}

static uint32_t g_cycles[8];

static void check_cycle(const jpp_schedule_t* schedule, const jpp_status_t* status) {
  jpp_schedule_fault_t fault;
  jpp_status_t* again = jpp__schedule_verify_units(schedule, false, &fault);
  assert_string_equal(jpp_status_message(again), jpp_status_message(status));
  jpp_status_free(again);
  uint32_t expected = fault.cycle ? naive_shortest_cycle(schedule) : 0;
  if (!expected) return;
  assert_int_equal(fault.cycle, expected);
  ++g_cycles[fault.cycle];
}

static void test_mutants_are_judged_as_by_the_naive_checker(void** state) {
  (void)state;
  uint32_t names = jpp_schedule_info_count();
  static rows_copy_t copy;
  uint32_t accepted = 0, rejected = 0;
  for (uint32_t n = 0; n < 45000; ++n) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(n % names);
    uint32_t ranks = random_below(2) + 2;
    uint32_t stages = ranks * (info->stages_a_rank ? info->stages_a_rank : 2);
    jpp_schedule_t* original = build(info->name, stages, ranks, stages + random_below(3));
    copy_rows(original, &copy);
    for (uint32_t i = random_below(3) + 1; i-- > 0;) mutate(&copy, ranks);
    jpp_schedule_rows_t rows = {.stages = stages,
                                .ranks = ranks,
                                .microbatches = original->microbatches,
                                .rows = copy.rows,
                                .stage_rank = original->stage_rank};
    jpp_schedule_t* mutant = NULL;
    ASSERT_OK(jpp_schedule_from_rows(&rows, &mutant));
    jpp_status_t* status = jpp_schedule_verify(mutant);
    assert_int_equal(status == NULL, naive_accepts(mutant));
    *(status ? &rejected : &accepted) += 1;
    check_message(status);
    if (status && n % 8 == 0) check_cycle(mutant, status);
    jpp_status_free(status);
    jpp_schedule_destroy(mutant);
    jpp_schedule_destroy(original);
  }
  assert_true(accepted > 1000 && rejected > 1000);
  assert_true(g_cycles[1] > 100 && g_cycles[2] > 100);
}

static void test_millions_of_tasks_are_verified(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("interleaved-1f1b", 128, 32, 10001);
  ASSERT_OK(jpp_schedule_verify(schedule));
  jpp_schedule_destroy(schedule);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_user_rows_are_copied_and_placed),
      cmocka_unit_test(test_a_callback_makes_rows),
      cmocka_unit_test(test_activations_beyond_all_memory_are_over_any_limit),
      cmocka_unit_test(test_forward_only_and_split_backwards_are_accepted),
      cmocka_unit_test(test_placement_must_exist),
      cmocka_unit_test(test_wrong_tasks_are_named),
      cmocka_unit_test(test_missing_tasks_are_named),
      cmocka_unit_test(test_deadlocks_are_explained),
      cmocka_unit_test(test_mutants_are_judged_as_by_the_naive_checker),
      cmocka_unit_test(test_millions_of_tasks_are_verified),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
