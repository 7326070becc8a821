// The built-in schedules are as documented, at every size.
#include <dirent.h>
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
  ASSERT_OK(jpp_schedule_peak_microbatches(schedule, schedule->ranks, peaks));
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

// True if the golden file's name says that it has this schedule: NAME_s4_p2_m8_fused.txt.
static bool parse_golden_name(const char* file, char name[64],
                              jpp_schedule_params_t* out_params) {
  int end = 0;
  *out_params = (jpp_schedule_params_t){.struct_size = sizeof(jpp_schedule_params_t)};
  if (sscanf(file, "%63[^_]_s%u_p%u_m%u%n", name, &out_params->stages, &out_params->ranks,
             &out_params->microbatches, &end) != 4) {
    return false;
  }
  out_params->fuse_steady_state = !strcmp(file + end, "_fused.txt");
  return out_params->fuse_steady_state || !strcmp(file + end, ".txt");
}

// Tries the schedule's example and all other sizes for which there are files.
static void test_schedules_are_as_their_golden_files(void** state) {
  (void)state;
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(i);
    check_golden(info->name, info->example);
  }
  DIR* folder = opendir(GOLDEN_DIR "/schedule");
  assert_non_null(folder);
  for (const struct dirent* entry = readdir(folder); entry; entry = readdir(folder)) {
    char name[64];
    jpp_schedule_params_t params;
    if (parse_golden_name(entry->d_name, name, &params)) check_golden(name, &params);
  }
  closedir(folder);
}

// The expected answer of a schedule to these sizes, from its row in the table.
static jpp_status_code_t expected_code(const jpp_schedule_info_t* info,
                                       const jpp_schedule_params_t* params) {
  uint32_t several = params->stages / params->ranks;
  if (params->fuse_steady_state && !info->can_fuse) return JPP_INVALID_ARGUMENT;
  return info->stages_a_rank && several != info->stages_a_rank ? JPP_MESH_ERROR : JPP_OK;
}

static void check_size(const jpp_schedule_info_t* info,
                       const jpp_schedule_params_t* params) {
  jpp_schedule_t* schedule = NULL;
  jpp_status_t* status = jpp_schedule_build(info->name, params, &schedule);
  jpp_status_code_t code = jpp_status_code(status),
                    expected = expected_code(info, params);
  bool few = code == JPP_MICROBATCH_ERROR && params->microbatches < params->stages;
  if (code != expected && !(expected == JPP_OK && few)) {
    fail_msg(
        "%s, %u stages, %u ranks, %u microbatches%s: its row in "
        "src/schedule/builtin/build.c (stages_a_rank %u, can_fuse %d) expects %s, but "
        "jpp_schedule_build() gives %s: %s",
        info->name, params->stages, params->ranks, params->microbatches,
        params->fuse_steady_state ? ", fused" : "", info->stages_a_rank, info->can_fuse,
        jpp_status_code_name(expected), jpp_status_code_name(code),
        jpp_status_message(status));
  }
  jpp_status_free(status);
  status = schedule ? jpp_schedule_verify(schedule) : NULL;
  if (status) {
    fail_msg("%s, %u stages, %u ranks, %u microbatches: %s", info->name, params->stages,
             params->ranks, params->microbatches, jpp_status_message(status));
  }
  jpp_schedule_destroy(schedule);
}

static void test_every_size_verifies_or_is_refused_as_the_table_says(void** state) {
  (void)state;
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    for (uint32_t n = 0; n < 6 * 3 * 14 * 2; ++n) {
      uint32_t ranks = n % 6 + 1;
      check_size(jpp_schedule_info_at(i),
                 &(jpp_schedule_params_t){.struct_size = sizeof(jpp_schedule_params_t),
                                          .stages = ranks * (n / 6 % 3 + 1),
                                          .ranks = ranks,
                                          .microbatches = n / 18 % 14 + 1,
                                          .fuse_steady_state = n / 252 == 1});
    }
  }
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
    ASSERT_OK(jpp_schedule_peak_microbatches(std, ranks, std_peaks));
    ASSERT_OK(jpp_schedule_peak_microbatches(eager, ranks, eager_peaks));
    ASSERT_OK(jpp_schedule_peak_microbatches(gpipe, ranks, gpipe_peaks));
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

// The bubble of an ideal interleaved pipeline: (P - 1) forwards and backwards of one
// stage.
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

static jpp_schedule_params_t params_of(uint32_t stages, uint32_t ranks,
                                       uint32_t microbatches, bool fuse_steady_state) {
  return (jpp_schedule_params_t){.struct_size = sizeof(jpp_schedule_params_t),
                                 .stages = stages,
                                 .ranks = ranks,
                                 .microbatches = microbatches,
                                 .fuse_steady_state = fuse_steady_state};
}

static void assert_refused(const char* name, jpp_schedule_params_t params,
                           jpp_status_code_t code, const char* text) {
  jpp_schedule_t* schedule = (jpp_schedule_t*)&params;
  ASSERT_FAILS(jpp_schedule_build(name, &params, &schedule), code, text);
  assert_null(schedule);
}

static void test_sizes_that_do_not_fit_are_refused(void** state) {
  (void)state;
  assert_refused("2f2b", params_of(4, 4, 4, false), JPP_INVALID_ARGUMENT,
                 "no schedule is named \"2f2b\"; the built-in ones are gpipe, 1f1b");
  assert_refused("1f1b", params_of(4, 4, 0, false), JPP_INVALID_ARGUMENT,
                 "found 4 stages, 4 ranks and 0 microbatches");
  assert_refused("1f1b", params_of(1 << 20, 1 << 20, 1 << 20, false),
                 JPP_INVALID_ARGUMENT, "too large");
  assert_refused(
      "Std1F1B", params_of(4, 2, 4, false), JPP_MESH_ERROR,
      "for 4 stages expected a mesh with 4 ranks on its pipeline axis, found 2");
  assert_refused("kimi-k2", params_of(6, 4, 4, false), JPP_MESH_ERROR,
                 "6 stages cannot be divided over the 4 ranks");
  assert_refused("v-half", params_of(4, 4, 8, false), JPP_MESH_ERROR,
                 "expected 8 stages, found 4");
  assert_refused("dualpipe-v", params_of(6, 4, 8, false), JPP_MESH_ERROR,
                 "expected 8 stages, found 6");
  assert_refused("dualpipe-v", params_of(8, 4, 7, false), JPP_MICROBATCH_ERROR,
                 "as stages (8), found 7");
  assert_refused("gpipe", params_of(4, 4, 4, true), JPP_INVALID_ARGUMENT,
                 "fuse_steady_state is for");
  jpp_schedule_t* schedule = build("1f1b", 4, 4, 4);
  uint32_t peaks[4];
  ASSERT_FAILS(jpp_schedule_peak_microbatches(schedule, 3, peaks), JPP_INVALID_ARGUMENT,
               "the peaks of the ranks: expected a count of 4, found 3");
  jpp_schedule_destroy(schedule);
}

static void test_sizes_are_checked_without_microbatches(void** state) {
  (void)state;
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(i);
    ASSERT_OK(
        jpp_schedule_check(info->name, info->example->stages, info->example->ranks));
  }
  jpp_status_t* status = jpp_schedule_check("dualpipe-v", 6, 4);
  assert_int_equal(jpp_status_code(status), JPP_MESH_ERROR);
  jpp_status_free(status);
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

#define DOCS_DIR GOLDEN_DIR "/../../docs"

// The docs contain these lines: | [1f1b](schedules/1f1b.svg) | ..., and | 1f1b | paper |
// ...
static void test_docs_describe_every_schedule(void** state) {
  (void)state;
  char* page = golden_read(DOCS_DIR "/schedules.md");
  assert_non_null(page);
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(i);
    char row[256], path[1024];
    snprintf(row, sizeof(row), "\n| %s | %s | ", info->name, info->paper);
    if (!strstr(page, row)) {
      fail_msg("docs/schedules.md: expected a row '%s...' in the table of papers",
               row + 1);
    }
    snprintf(row, sizeof(row), "\n| [%s](schedules/%s.svg) | ", info->name, info->name);
    if (!strstr(page, row)) {
      fail_msg(
          "docs/schedules.md: expected a row '%s...' in the table of figures; "
          "tools/schedule_docs.py writes it",
          row + 1);
    }
    snprintf(path, sizeof(path), DOCS_DIR "/schedules/%s.svg", info->name);
    char* picture = golden_read(path);
    if (!picture) {
      fail_msg(
          "expected a picture docs/schedules/%s.svg; tools/schedule_docs.py draws it",
          info->name);
    }
    free(picture);
  }
  free(page);
}

// Idle steps take no memory: there are as many entries as tasks, however many idle steps
// are printed.
static void test_idle_steps_share_an_entry(void** state) {
  (void)state;
  for (uint32_t i = 0; i < jpp_schedule_info_count(); ++i) {
    const jpp_schedule_info_t* info = jpp_schedule_info_at(i);
    if (info->stages_a_rank > 1) continue;
    jpp_schedule_t* schedule = build(info->name, 40, 40, 2);
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
  // Positions include every idle step.
  ASSERT_FAILS(jpp_schedule_check_memory(schedule, 2, 1), JPP_OUT_OF_MEMORY, "(entry 0)");
  jpp_text_free(text);
  jpp_schedule_destroy(schedule);
}

static void assert_one_pass(uint32_t stages, uint32_t ranks, bool split,
                            const char* expected) {
  jpp_schedule_params_t params = {
      .struct_size = sizeof(params), .stages = stages, .ranks = ranks, .microbatches = 2};
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
  jpp_schedule_params_t none = {.struct_size = sizeof(none), .stages = 1, .ranks = 1};
  jpp_status_t* status = jpp_schedule_one_pass(&none, false, &schedule);
  assert_int_equal(jpp_status_code(status), JPP_INVALID_ARGUMENT);
  jpp_status_free(status);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_idle_steps_share_an_entry),
      cmocka_unit_test(test_rows_are_those_of_the_tutorial),
      cmocka_unit_test(test_schedules_are_as_their_golden_files),
      cmocka_unit_test(test_every_size_verifies_or_is_refused_as_the_table_says),
      cmocka_unit_test(test_one_pass_runs_one_microbatch_after_the_other),
      cmocka_unit_test(test_peaks_are_those_of_the_papers),
      cmocka_unit_test(test_interleaved_has_the_ideal_length_at_uneven_sizes),
      cmocka_unit_test(test_sizes_that_do_not_fit_are_refused),
      cmocka_unit_test(test_sizes_are_checked_without_microbatches),
      cmocka_unit_test(test_table_lists_every_schedule_once),
      cmocka_unit_test(test_docs_describe_every_schedule),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
