// The built-in schedules are the ones that are documented, at every size.
#include <stdio.h>

#include "base/str.h"
#include "golden.h"
#include "jaxpp/view.h"
#include "schedule_util.h"

static void assert_row(const char* name, uint32_t stages, uint32_t ranks, uint32_t rank,
                       const char* expected) {
  jpp_schedule_t* schedule = build(name, stages, ranks, 4);
  char* text = text_of(schedule);
  char line[1024];
  snprintf(line, sizeof(line), "\nrank %u: %s\n", rank, expected);
  if (!strstr(text, line)) fail_msg("expected %s in %s", line, text);
  jpp_text_free(text);
  jpp_schedule_destroy(schedule);
}

// The listings of NVIDIA's tutorial notebook.
static void test_rows_are_those_of_the_tutorial(void** state) {
  (void)state;
  assert_row("Interleaved1F1B", 4, 4, 2,
             "fwd_2__0 fwd_2__1 fwd_2__2 bwd_2__0 fwd_2__3 bwd_2__1 bwd_2__2 bwd_2__3");
  assert_row("Interleaved1F1B", 4, 4, 3,
             "FusedTask(fwd_3__0, bwd_3__0) FusedTask(fwd_3__1, bwd_3__1) "
             "FusedTask(fwd_3__2, bwd_3__2) FusedTask(fwd_3__3, bwd_3__3)");
  assert_row("Interleaved1F1B", 8, 4, 0,
             "fwd_0__0 fwd_0__1 fwd_0__2 fwd_0__3 fwd_4__0 fwd_4__1 fwd_4__2 fwd_4__3 "
             "bwd_4__0 bwd_4__1 bwd_4__2 bwd_4__3 bwd_0__0 bwd_0__1 bwd_0__2 bwd_0__3");
  assert_row("Interleaved1F1B", 8, 4, 3,
             "fwd_3__0 fwd_3__1 fwd_3__2 fwd_3__3 FusedTask(fwd_7__0, bwd_7__0) "
             "FusedTask(fwd_7__1, bwd_7__1) FusedTask(fwd_7__2, bwd_7__2) "
             "FusedTask(fwd_7__3, bwd_7__3) bwd_3__0 bwd_3__1 bwd_3__2 bwd_3__3");
}

static void print_peaks(const jpp_schedule_t* schedule, jpp_str_t* str) {
  uint32_t peaks[64];
  assert_true(schedule->ranks <= 64);
  jpp_schedule_peak_microbatches(schedule, peaks);
  jpp_str_append(str, "peak microbatches:");
  for (uint32_t i = 0; i < schedule->ranks; ++i) jpp_str_appendf(str, " %u", peaks[i]);
  jpp_str_append(str, "\n");
}

static void check_golden(const char* name, const jpp_schedule_params_t* params) {
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_build(name, params, &schedule));
  jpp_str_t str = {0};
  char *text = NULL, *picture = NULL;
  ASSERT_OK(jpp_schedule_print(schedule, &text));
  ASSERT_OK(jpp_schedule_draw(schedule, &picture));
  jpp_str_append(&str, text);
  jpp_str_append(&str, picture);
  jpp_text_free(text);
  jpp_text_free(picture);
  print_peaks(schedule, &str);
  ASSERT_OK(jpp_str_finish(&str, &text));
  char file[256];
  snprintf(file, sizeof(file), "schedule/%s_s%u_p%u_m%u%s.txt", name, params->stages,
           params->ranks, params->microbatches,
           params->fuse_steady_state ? "_fused" : "");
  assert_golden(file, text);
  jpp_text_free(text);
  jpp_schedule_destroy(schedule);
}

static void test_schedules_are_as_their_golden_files(void** state) {
  (void)state;
  static const char* const kOneStage[] = {"gpipe", "1f1b", "eager-1f1b", "zb-h1",
                                          "zb-h2"};
  for (size_t i = 0; i < 5; ++i) {
    check_golden(kOneStage[i], &(jpp_schedule_params_t){1, 1, 1, false});
    check_golden(kOneStage[i], &(jpp_schedule_params_t){4, 4, 2, false});
    check_golden(kOneStage[i], &(jpp_schedule_params_t){4, 4, 8, false});
  }
  static const char* const kInterleaved[] = {"interleaved-gpipe", "interleaved-1f1b",
                                             "kimi-k2", "breadth-first",
                                             "interleaved-zb"};
  for (size_t i = 0; i < 5; ++i) {
    check_golden(kInterleaved[i], &(jpp_schedule_params_t){4, 4, 3, false});
    check_golden(kInterleaved[i], &(jpp_schedule_params_t){4, 2, 4, false});
    check_golden(kInterleaved[i], &(jpp_schedule_params_t){8, 4, 9, false});
    if (i == 1 || i == 2)
      check_golden(kInterleaved[i], &(jpp_schedule_params_t){4, 2, 4, true});
  }
  static const char* const kV[] = {"zb-v", "v-half", "v-min", "v-1f1b"};
  for (size_t i = 0; i < 4; ++i) {
    check_golden(kV[i], &(jpp_schedule_params_t){2, 1, 1, false});
    check_golden(kV[i], &(jpp_schedule_params_t){8, 4, 2, false});
    check_golden(kV[i], &(jpp_schedule_params_t){8, 4, 8, false});
  }
  check_golden("dualpipe-v", &(jpp_schedule_params_t){2, 1, 2, false});
  check_golden("dualpipe-v", &(jpp_schedule_params_t){8, 4, 10, false});
}

static uint32_t g_verified;

static void verify_one(const jpp_schedule_t* schedule) {
  jpp_status_t* status = jpp_schedule_verify(schedule);
  if (status) {
    fail_msg("%s, %u stages, %u ranks, %u microbatches: %s", schedule->name,
             schedule->stages, schedule->ranks, schedule->microbatches,
             jpp_status_message(status));
  }
  ++g_verified;
}

static void test_every_size_verifies(void** state) {
  (void)state;
  g_verified = 0;
  for_each_schedule(verify_one);
  // One stage a rank: 5 schedules; interleaved: 5, of which 2 also fused; in a V: 4;
  // dualpipe-v: 48.
  assert_int_equal(g_verified,
                   5 * 6 * 14 + 7 * 6 * 3 * 14 + 4 * 6 * 14 + (13 + 11 + 9 + 7 + 5 + 3));
}

static uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

static void test_peaks_are_those_of_the_papers(void** state) {
  (void)state;
  for (uint32_t n = 0; n < 8 * 20; ++n) {
    uint32_t ranks = n % 8 + 1, microbatches = n / 8 + 1;
    jpp_schedule_t* std = build("1f1b", ranks, ranks, microbatches);
    jpp_schedule_t* eager = build("eager-1f1b", ranks, ranks, microbatches);
    jpp_schedule_t* gpipe = build("gpipe", ranks, ranks, microbatches);
    uint32_t std_peaks[8], eager_peaks[8], gpipe_peaks[8];
    jpp_schedule_peak_microbatches(std, std_peaks);
    jpp_schedule_peak_microbatches(eager, eager_peaks);
    jpp_schedule_peak_microbatches(gpipe, gpipe_peaks);
    for (uint32_t r = 0; r < ranks; ++r) {
      assert_int_equal(std_peaks[r], smaller(microbatches, ranks - r));
      assert_int_equal(eager_peaks[r], smaller(microbatches, 2 * (ranks - r) - 1));
      assert_int_equal(gpipe_peaks[r], microbatches);
    }
    jpp_schedule_destroy(std);
    jpp_schedule_destroy(eager);
    jpp_schedule_destroy(gpipe);
  }
}

// Bubbles of an ideal interleaved pipeline: (P - 1) forwards and backwards of one stage.
static void test_interleaved_has_the_ideal_length_at_uneven_sizes(void** state) {
  (void)state;
  for (uint32_t microbatches = 4; microbatches < 24; ++microbatches) {
    jpp_schedule_t* schedule = build("interleaved-1f1b", 8, 4, microbatches);
    jpp_schedule_timeline_t* timeline = NULL;
    ASSERT_OK(jpp_schedule_timeline(schedule, NULL, &timeline));
    assert_int_equal(timeline->length, 3 * (2 * microbatches + 3));
    jpp_schedule_timeline_destroy(timeline);
    jpp_schedule_destroy(schedule);
  }
}

static void assert_refused(const char* name, jpp_schedule_params_t params,
                           jpp_status_code_t code, const char* text) {
  jpp_schedule_t* schedule = (jpp_schedule_t*)&params;
  ASSERT_FAILS(jpp_schedule_build(name, &params, &schedule), code, text);
  assert_null(schedule);
}

static void test_sizes_that_do_not_fit_are_refused(void** state) {
  (void)state;
  assert_refused("2f2b", (jpp_schedule_params_t){4, 4, 4, false}, JPP_INVALID_ARGUMENT,
                 "no schedule is named \"2f2b\"; the built-in ones are gpipe, 1f1b");
  assert_refused("1f1b", (jpp_schedule_params_t){4, 4, 0, false}, JPP_INVALID_ARGUMENT,
                 "found 4 stages, 4 ranks and 0 microbatches");
  assert_refused("1f1b", (jpp_schedule_params_t){1 << 20, 1 << 20, 1 << 20, false},
                 JPP_INVALID_ARGUMENT, "too large");
  assert_refused("Std1F1B", (jpp_schedule_params_t){4, 2, 4, false}, JPP_MESH_ERROR,
                 "4 stages need a mesh with 4 ranks on its pipeline axis, found 2");
  assert_refused("kimi-k2", (jpp_schedule_params_t){6, 4, 4, false}, JPP_MESH_ERROR,
                 "6 stages cannot be divided over the 4 ranks");
  assert_refused("v-half", (jpp_schedule_params_t){4, 4, 8, false}, JPP_MESH_ERROR,
                 "need 8 stages, found 4");
  assert_refused("dualpipe-v", (jpp_schedule_params_t){6, 4, 8, false}, JPP_MESH_ERROR,
                 "need 8 stages, found 6");
  assert_refused("dualpipe-v", (jpp_schedule_params_t){8, 4, 7, false},
                 JPP_MICROBATCH_ERROR, "as stages (8), found 7");
  assert_refused("gpipe", (jpp_schedule_params_t){4, 4, 4, true}, JPP_INVALID_ARGUMENT,
                 "fuse_steady_state is for");
}

static void test_table_lists_every_schedule_once(void** state) {
  (void)state;
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(i);
    assert_true(strlen(info->help) > 10 && !strchr(info->help, '\n'));
    for (uint32_t k = 0; k < i; ++k) {
      assert_string_not_equal(info->name, jpp_schedule_info_at(k)->name);
      assert_string_not_equal(info->class_name, jpp_schedule_info_at(k)->class_name);
    }
  }
  assert_null(jpp_schedule_info_at(jpp_schedule_info_count()));
}

// What waits takes no memory: entries are as many as tasks, whatever the idle steps,
// which are printed one by one.
static void test_idle_steps_share_an_entry(void** state) {
  (void)state;
  static const char* const kNames[] = {"gpipe", "1f1b", "eager-1f1b", "zb-h1"};
  for (size_t i = 0; i < 4; ++i) {
    jpp_schedule_t* schedule = build(kNames[i], 40, 40, 2);
    for (uint32_t r = 0; r < 40; ++r) {
      const jpp_schedule_row_t* row = &schedule->rows[r];
      assert_true(row->count <= 2 * 3 * 2 + 1);
      for (uint32_t k = 1; k < row->count; ++k) {
        assert_true(row->tasks[k].kind || row->tasks[k - 1].kind);
      }
    }
    jpp_schedule_destroy(schedule);
  }
  jpp_schedule_t* schedule = build("1f1b", 4, 4, 1);
  char* text = text_of(schedule);
  assert_non_null(strstr(text, "rank 1: . fwd_1__0 . . . . bwd_1__0 .\n"));
  // Positions count every idle step.
  ASSERT_FAILS(jpp_schedule_check_memory(schedule, 2, 1), JPP_OUT_OF_MEMORY, "(entry 0)");
  jpp_text_free(text);
  jpp_schedule_destroy(schedule);
}

static void assert_one_pass(uint32_t stages, uint32_t ranks, bool split,
                            const char* expected) {
  jpp_schedule_params_t params = {.stages = stages, .ranks = ranks, .microbatches = 2};
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_one_pass(&params, split, &schedule));
  ASSERT_OK(jpp_schedule_verify(schedule));
  char* text = text_of(schedule);
  if (!strstr(text, expected)) fail_msg("expected %s in %s", expected, text);
  jpp_text_free(text);
  jpp_schedule_destroy(schedule);
}

static void test_one_pass_runs_one_microbatch_after_the_other(void** state) {
  (void)state;
  assert_one_pass(3, 2, false,
                  "\nrank 0: fwd_0__0 fwd_2__0 bwd_2__0 bwd_0__0 "
                  "fwd_0__1 fwd_2__1 bwd_2__1 bwd_0__1\n"
                  "rank 1: fwd_1__0 bwd_1__0 fwd_1__1 bwd_1__1\n");
  assert_one_pass(
      4, 2, true,
      "\nrank 1: fwd_1__0 fwd_3__0 bwd_i_3__0 bwd_i_1__0 bwd_w_3__0 bwd_w_1__0 "
      "fwd_1__1 fwd_3__1 bwd_i_3__1 bwd_i_1__1 bwd_w_3__1 bwd_w_1__1\n");
  assert_one_pass(1, 2, false, "\nrank 0: fwd_0__0 bwd_0__0 fwd_0__1 bwd_0__1\nrank 1:");
  for (uint32_t stages = 1; stages < 8; ++stages) {
    for (uint32_t ranks = 1; ranks < 5; ++ranks) {
      assert_one_pass(stages, ranks, stages % 2, "rank 0: fwd_0__0");
    }
  }
  jpp_schedule_t* schedule = NULL;
  jpp_schedule_params_t none = {.stages = 1, .ranks = 1};
  jpp_status_t* status = jpp_schedule_one_pass(&none, false, &schedule);
  assert_int_equal(jpp_status_code(status), JPP_INVALID_ARGUMENT);
  jpp_status_free(status);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_idle_steps_share_an_entry),
      cmocka_unit_test(test_rows_are_those_of_the_tutorial),
      cmocka_unit_test(test_schedules_are_as_their_golden_files),
      cmocka_unit_test(test_every_size_verifies),
      cmocka_unit_test(test_one_pass_runs_one_microbatch_after_the_other),
      cmocka_unit_test(test_peaks_are_those_of_the_papers),
      cmocka_unit_test(test_interleaved_has_the_ideal_length_at_uneven_sizes),
      cmocka_unit_test(test_sizes_that_do_not_fit_are_refused),
      cmocka_unit_test(test_table_lists_every_schedule_once),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
