// The outputs of a schedule (names, text, JSON, picture, timeline), also when memory runs
// out.
#include <jansson.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "jaxpp/view.h"
#include "schedule_util.h"

static void test_tasks_have_the_names_users_know(void** state) {
  (void)state;
  char name[JPP_TASK_NAME_SIZE];
  jpp_schedule_task_t task = {.kind = JPP_TASK_FWD, .stage = 2};
  assert_string_equal(jpp_task_name(&task, name), "fwd_2__0");
  task.kind = JPP_TASK_BWD;
  assert_string_equal(jpp_task_name(&task, name), "bwd_2__0");
  task.kind = JPP_TASK_BWD_I;
  task.stage = task.microbatch = UINT32_MAX;
  assert_string_equal(jpp_task_name(&task, name), "bwd_i_4294967295__4294967295");
  task = (jpp_schedule_task_t){.kind = JPP_TASK_BWD_W, .stage = 2, .microbatch = 13};
  assert_string_equal(jpp_task_name(&task, name), "bwd_w_2__13");
  task.kind = JPP_TASK_IDLE;
  assert_string_equal(jpp_task_name(&task, name), "idle");
}

// When each entry of the schedule ends by the timeline, one rank's row after another.
typedef struct ends {
  uint64_t* end;   // UINT64_MAX: not seen yet
  size_t* offset;  // [ranks] where a rank's row begins in `end`
} ends_t;

static uint64_t end_of(const jpp_schedule_t* schedule, const ends_t* ends, int kind,
                       uint32_t stage, uint32_t microbatch) {
  uint32_t rank = schedule->stage_rank[stage];
  const jpp_schedule_row_t* row = &schedule->rows[rank];
  for (uint32_t i = 0; i < row->count; ++i) {
    const jpp_schedule_task_t* task = &row->tasks[i];
    bool same_kind =
        task->kind == kind || (kind == JPP_TASK_BWD && task->kind == JPP_TASK_BWD_I);
    if (same_kind && task->stage == stage && task->microbatch == microbatch) {
      return ends->end[ends->offset[rank] + i];
    }
  }
  fail_msg("no such task");
  return 0;
}

// Returns the time at which the last of the task's inputs is ready, UINT64_MAX if the
// timeline has not listed all of their producers yet.
static uint64_t needs_end(const jpp_schedule_t* schedule, const ends_t* ends,
                          const jpp_schedule_task_t* task) {
  uint64_t end = 0, other = 0;
  uint32_t s = task->stage, m = task->microbatch;
  if (task->kind == JPP_TASK_FWD) {
    return s ? end_of(schedule, ends, JPP_TASK_FWD, s - 1, m) : 0;
  }
  if (task->kind == JPP_TASK_BWD_W) return end_of(schedule, ends, JPP_TASK_BWD_I, s, m);
  end = end_of(schedule, ends, JPP_TASK_FWD, s, m);
  if (s + 1 < schedule->stages) other = end_of(schedule, ends, JPP_TASK_BWD, s + 1, m);
  return end > other ? end : other;
}

static ends_t ends_create(const jpp_schedule_t* schedule) {
  ends_t ends = {NULL, calloc(schedule->ranks, sizeof(size_t))};
  size_t total = 0;
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    ends.offset[rank] = total;
    total += schedule->rows[rank].count;
  }
  ends.end = malloc(total * sizeof(uint64_t));
  memset(ends.end, 0xff, total * sizeof(uint64_t));
  return ends;
}

static void check_one_by_one(const jpp_schedule_t* schedule) {
  if (schedule->microbatches % 4 != 1) return;
  jpp_schedule_timeline_t* timeline = NULL;
  ASSERT_OK(jpp_schedule_timeline(schedule, NULL, &timeline));
  ends_t ends = ends_create(schedule);
  uint64_t* rank_end = calloc(schedule->ranks, sizeof(uint64_t));
  for (uint64_t i = 0; i < timeline->count; ++i) {
    const jpp_schedule_slot_t* slot = &timeline->slots[i];
    const jpp_schedule_task_t* task = &schedule->rows[slot->rank].tasks[slot->index];
    uint64_t earliest = needs_end(schedule, &ends, task);
    if (rank_end[slot->rank] > earliest) earliest = rank_end[slot->rank];
    assert_int_equal(slot->start, earliest);
    assert_int_equal(slot->end, slot->start + task->latency);
    if (i) {
      const jpp_schedule_slot_t* before = slot - 1;
      assert_true(before->start < slot->start ||
                  (before->start == slot->start && before->rank < slot->rank));
    }
    rank_end[slot->rank] = ends.end[ends.offset[slot->rank] + slot->index] = slot->end;
  }
  free(rank_end);
  free(ends.end);
  free(ends.offset);
  jpp_schedule_timeline_destroy(timeline);
}

static void test_timeline_starts_each_task_as_early_as_it_can(void** state) {
  (void)state;
  for_each_schedule(check_one_by_one);
}

// The tasks of a FusedTask are adjacent and start and end at the same times.
static void check_fused(const jpp_schedule_t* schedule) {
  jpp_schedule_timeline_options_t options = {.struct_size = sizeof(options),
                                             .fused_as_one = true};
  jpp_schedule_timeline_t* timeline = NULL;
  ASSERT_OK(jpp_schedule_timeline(schedule, &options, &timeline));
  for (uint64_t i = 0; i + 1 < timeline->count; ++i) {
    const jpp_schedule_slot_t* slot = &timeline->slots[i];
    if (!schedule->rows[slot->rank].tasks[slot->index].joins_next) continue;
    assert_int_equal(slot[1].rank, slot->rank);
    assert_int_equal(slot[1].index, slot->index + 1);
    assert_int_equal(slot[1].start, slot->start);
    assert_int_equal(slot[1].end, slot->end);
  }
  jpp_schedule_timeline_destroy(timeline);
}

static void test_timeline_takes_fused_tasks_as_one(void** state) {
  (void)state;
  for_each_schedule(check_fused);
}

static char* json_of(const jpp_schedule_t* schedule) {
  char* text = NULL;
  ASSERT_OK(jpp_schedule_print_json(schedule, &text));
  return text;
}

static void test_json_has_idle_fused_and_all_kinds(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("dualpipe-v", 4, 2, 4);
  char* text = json_of(schedule);
  json_t* ranks = json_loads(text, 0, NULL);
  assert_int_equal(json_array_size(ranks), 2);
  json_t* entry = json_array_get(json_array_get(ranks, 1), 0);
  assert_string_equal(json_string_value(json_object_get(entry, "kind")), "F");
  assert_int_equal(json_integer_value(json_object_get(entry, "stage")), 1);
  assert_non_null(strstr(text,
                         "[{\"kind\": \"F\", \"stage\": 2, \"microbatch\": 3}, "
                         "{\"kind\": \"I\", \"stage\": 1, \"microbatch\": 1}, "
                         "{\"kind\": \"W\", \"stage\": 1, \"microbatch\": 1}]"));
  json_decref(ranks);
  jpp_text_free(text);
  jpp_schedule_destroy(schedule);

  schedule = build("1f1b", 3, 3, 2);
  text = json_of(schedule);
  ranks = json_loads(text, 0, NULL);
  assert_true(json_is_null(json_array_get(json_array_get(ranks, 2), 0)));
  json_decref(ranks);
  jpp_text_free(text);
  jpp_schedule_destroy(schedule);
}

static void test_picture_of_a_long_schedule_is_cut(void** state) {
  (void)state;
  jpp_schedule_t* schedule = build("1f1b", 2, 2, 1000);
  char* text = NULL;
  ASSERT_OK(jpp_schedule_draw(schedule, &text));
  assert_non_null(strstr(text, "3003 units of time (the first 160 drawn)\n"));
  assert_non_null(strstr(text, "\nrank   0  01..aa2bb3cc4"));
  jpp_text_free(text);
  jpp_schedule_destroy(schedule);
}

static jpp_status_t* use_everything(const char* name) {
  jpp_schedule_params_t params = {
      .struct_size = sizeof(params), .stages = 4, .ranks = 2, .microbatches = 5};
  jpp_schedule_t* schedule = NULL;
  JPP_RETURN_IF_ERROR(jpp_schedule_build(name, &params, &schedule));
  jpp_schedule_rows_t rows = {
      .stages = 4, .ranks = 2, .microbatches = 5, .rows = schedule->rows};
  jpp_schedule_t* copy = NULL;
  char *picture = NULL, *text = NULL, *json = NULL;
  jpp_status_t* status = jpp_schedule_verify(schedule);
  if (!status) status = jpp_schedule_from_rows(&rows, &copy);
  if (!status) status = jpp_schedule_draw(copy, &picture);
  if (!status) status = jpp_schedule_print(schedule, &text);
  if (!status) status = jpp_schedule_print_json(schedule, &json);
  jpp_text_free(picture);
  jpp_text_free(text);
  jpp_text_free(json);
  jpp_schedule_destroy(copy);
  jpp_schedule_destroy(schedule);
  return status;
}

static void assert_survives_every_failed_allocation(jpp_status_t* (*use)(const char*),
                                                    const char* name,
                                                    jpp_status_code_t code) {
  for (int64_t n = 0;; ++n) {
    assert_true(n < 1000);
    jpp__alloc_fail_after(n);
    jpp_status_t* status = use(name);
    bool out_of_memory = jpp_status_code(status) == JPP_OUT_OF_MEMORY;
    if (!out_of_memory) assert_int_equal(jpp_status_code(status), code);
    jpp_status_free(status);
    if (!out_of_memory) break;
  }
  jpp__alloc_fail_after(-1);
}

static jpp_status_t* verify_deadlock(const char* name) {
  static const jpp_schedule_task_t kTasks[] = {{.kind = JPP_TASK_BWD},
                                               {.kind = JPP_TASK_FWD}};
  static const jpp_schedule_row_t kRows[] = {{kTasks, 2}};
  jpp_schedule_rows_t rows = {
      .name = name, .stages = 1, .ranks = 1, .microbatches = 1, .rows = kRows};
  jpp_schedule_t* schedule = NULL;
  JPP_RETURN_IF_ERROR(jpp_schedule_from_rows(&rows, &schedule));
  jpp_status_t* status = jpp_schedule_verify(schedule);
  jpp_schedule_destroy(schedule);
  return status;
}

static void test_every_allocation_may_fail(void** state) {
  (void)state;
  assert_survives_every_failed_allocation(use_everything, "interleaved-1f1b", JPP_OK);
  assert_survives_every_failed_allocation(use_everything, "dualpipe-v", JPP_OK);
  assert_survives_every_failed_allocation(use_everything, "nothing",
                                          JPP_INVALID_ARGUMENT);
  assert_survives_every_failed_allocation(verify_deadlock, "mine", JPP_SCHEDULE_ERROR);
}

static void test_destroy_takes_null(void** state) {
  (void)state;
  jpp_schedule_destroy(NULL);
  jpp_schedule_timeline_destroy(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_tasks_have_the_names_users_know),
      cmocka_unit_test(test_timeline_starts_each_task_as_early_as_it_can),
      cmocka_unit_test(test_timeline_takes_fused_tasks_as_one),
      cmocka_unit_test(test_json_has_idle_fused_and_all_kinds),
      cmocka_unit_test(test_picture_of_a_long_schedule_is_cut),
      cmocka_unit_test(test_every_allocation_may_fail),
      cmocka_unit_test(test_destroy_takes_null),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
