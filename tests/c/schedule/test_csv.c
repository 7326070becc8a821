// CSV in both directions: written schedules are read back, and the error for a wrong file
// names its line.
#include <stdio.h>
#include <stdlib.h>

#include "golden.h"
#include "jaxpp/schedule_csv.h"
#include "schedule_util.h"

static char* csv_of(const jpp_schedule_t* schedule, bool communication) {
  char* text = NULL;
  ASSERT_OK(jpp_schedule_print_csv(schedule, communication, &text));
  return text;
}

static void read_back(const jpp_schedule_t* schedule) {
  if (schedule->microbatches % 3 != 1) return;
  for (int communication = 0; communication < 2; ++communication) {
    char* text = csv_of(schedule, communication);
    jpp_schedule_t* again = NULL;
    uint32_t slots = 77, expected = 0;
    jpp_status_t* status =
        jpp_schedule_from_csv("x.csv", text, strlen(text), &slots, &again);
    if (status) fail_msg("%s: %s\n%s", schedule->name, jpp_status_message(status), text);
    ASSERT_OK(jpp_schedule_slots(schedule, &expected));
    assert_int_equal(slots, communication ? expected : 0);
    assert_memory_equal(again->stage_rank, schedule->stage_rank,
                        schedule->stages * sizeof(uint32_t));
    char* twice = csv_of(again, communication);
    assert_string_equal(twice, text);
    jpp_text_free(twice);
    jpp_text_free(text);
    jpp_schedule_destroy(again);
  }
}

static void test_what_is_written_is_read_back(void** state) {
  (void)state;
  for_each_schedule(read_back);
}

static void golden_csv(const char* name, uint32_t stages, uint32_t ranks,
                       uint32_t microbatches) {
  jpp_schedule_t* schedule = build(name, stages, ranks, microbatches);
  for (int communication = 0; communication < 2; ++communication) {
    char file[128];
    char* text = csv_of(schedule, communication);
    snprintf(file, sizeof(file), "schedule/csv/%s_s%u_p%u_m%u%s.csv", name, stages, ranks,
             microbatches, communication ? "_comms" : "");
    assert_golden(file, text);
    jpp_text_free(text);
  }
  jpp_schedule_destroy(schedule);
}

static void test_files_are_as_their_golden_files(void** state) {
  (void)state;
  golden_csv("1f1b", 4, 4, 5);
  golden_csv("interleaved-1f1b", 8, 4, 6);
  golden_csv("zb-v", 6, 3, 4);
  golden_csv("dualpipe-v", 4, 2, 5);
}

static jpp_status_t* read_text(const char* text) {
  jpp_schedule_t* schedule = NULL;
  uint32_t slots = 0;
  jpp_status_t* status =
      jpp_schedule_from_csv("dir/x.csv", text, strlen(text), &slots, &schedule);
  if (!status) assert_string_equal(schedule->name, "x.csv");
  jpp_schedule_destroy(schedule);
  return status;
}

static void test_forms_that_are_read(void** state) {
  (void)state;
  ASSERT_OK(read_text("0F0,0B0\r\n"));
  ASSERT_OK(read_text("0F0, ,0B0"));
  ASSERT_OK(
      read_text("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,"
                "0WAIT_REDUCE_GRAD,0RESHARD\r\n"
                "1RECV_F0,1F0,1B0,1SEND_B0\r\n"));
  // A whole backward of a stage whose other backwards are split.
  ASSERT_OK(read_text("0F0,0F1,0B0,0I1,0W1\n"));
  ASSERT_OK(read_text("0F0,1F0,0F1,(1F1;1B0)OVERLAP_F_B,1I1,1W1,0B0,0B1\n"));
}

static void assert_refused(const char* text, jpp_status_code_t code, const char* why) {
  ASSERT_FAILS(read_text(text), code, why);
}

static void test_wrong_texts_name_their_line_and_cell(void** state) {
  (void)state;
  const jpp_status_code_t code = JPP_PARSE_ERROR;
  assert_refused("", code, "dir/x.csv:1: no computation");
  assert_refused("0F0,0B0\n\n1F0\n", code, "dir/x.csv:2: an empty line");
  assert_refused("0F0,0X0\n", code, "dir/x.csv:1: cell 2, '0X0': expected F, B, I, W");
  assert_refused("F0\n", code, "cell 1, 'F0': expected a stage number first");
  assert_refused("0F\n", code, "'0F': expected a microbatch number");
  assert_refused("0F0;\n", code, "unexpected text after the action");
  assert_refused("99999999999F0\n", code, "expected a stage number");
  assert_refused("(0F0;1B0)\n", code, "expected a pair as");
  assert_refused("(0B0;1B0)OVERLAP_F_B\n", code, "expected a forward and a backward");
  assert_refused("(0F0;0B0)OVERLAP_F_B\n", code, "needs its forward");
}

static void test_wrong_schedules_are_refused(void** state) {
  (void)state;
  const jpp_status_code_t code = JPP_SCHEDULE_ERROR;
  assert_refused("0F0,0B0\n2F0,2B0\n", code, "dir/x.csv:2: stage 1 of 3 is in no line");
  assert_refused("0F0,0B0\n1F0,0B1\n", code,
                 "dir/x.csv:2: cell 2, 0B1: stage 0 is on rank 0 (line 1)");
  assert_refused("16777214F0\n", code, "the largest stage is 16777214");
  assert_refused("0F0,0B0\n1B0,1F0\n", code, "dir/x.csv:2: schedule deadlocks");
  assert_refused("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", code,
                 "dir/x.csv:2: stage 1: bwd_1__1");
  const char* good =
      "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
      "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n";
  ASSERT_OK(read_text(good));
  static const struct {
    const char *from, *to, *why;
  } kEdits[] = {
      {"1RECV_F1,", "", "dir/x.csv:2: cell 3, 1F1: expected its RECV_F before it"},
      {",0SEND_F1", "", "dir/x.csv:1: cell 3, 0F1: its SEND_F is missing"},
      {"0F0,0SEND_F0", "0SEND_F0,0F0", "cell 1, 0SEND_F0: is before its computation"},
      {"0RECV_B0,0B0,0RECV_B1,0B1", "0RECV_B1,0RECV_B0,0B0,0B1",
       "dir/x.csv:2: cell 6, 1SEND_B0: a channel delivers in order"},
      {"1RECV_F0,1F0", "1RECV_F0,1RECV_F0,1F0", "cell 2, 1RECV_F0: is received twice"},
      {"1B0,1SEND_B0", "1B0,1SEND_B0,1SEND_B0", "cell 7, 1SEND_B0: is sent twice"},
      {"1B1,", "1B1,1SEND_F1,", "no other rank that needs it"},
      {"0F0,", "0RECV_F0,0F0,", "no other rank sends it"},
      {"0F0,", "0WAIT_SEND_F0,0F0,", "is before its SEND"},
      {"0F0,", "0RESHARD,0F0,", "expected an UNSHARD before it"},
      {"0B1", "0REDUCE_GRAD,0B1", "gradients are reduced already"},
      {"0F1,", "0UNSHARD,0RESHARD,0F1,", "weights are not here after its RESHARD"},
  };
  for (size_t i = 0; i < sizeof(kEdits) / sizeof(*kEdits); ++i) {
    char text[512];
    const char* at = strstr(good, kEdits[i].from);
    snprintf(text, sizeof(text), "%.*s%s%s", (int)(at - good), good, kEdits[i].to,
             at + strlen(kEdits[i].from));
    assert_refused(text, code, kEdits[i].why);
  }
}

static void test_slots_are_the_least_that_are_enough(void** state) {
  (void)state;
  // Rank 1 posts its RECVs only after a message that rank 0 sends after both SENDs.
  const char* text =
      "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1\n"
      "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1\n";
  jpp_schedule_t* schedule = NULL;
  uint32_t slots = 0;
  ASSERT_OK(jpp_schedule_from_csv("x", text, strlen(text), &slots, &schedule));
  assert_int_equal(slots, 1);
  jpp_schedule_destroy(schedule);
  // Rank 0 sends four messages before it posts a RECV, and rank 1 answers each.
  const char* late =
      "0F0,0SEND_F0,0F1,0SEND_F1,0F2,0SEND_F2,0F3,0SEND_F3,"
      "0RECV_B0,0B0,0RECV_B1,0B1,0RECV_B2,0B2,0RECV_B3,0B3\n"
      "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,"
      "1RECV_F2,1F2,1B2,1SEND_B2,1RECV_F3,1F3,1B3,1SEND_B3\n";
  ASSERT_OK(jpp_schedule_from_csv("x", late, strlen(late), &slots, &schedule));
  assert_int_equal(slots, 2);
  jpp_schedule_destroy(schedule);
}

// fuzz_csv found that such a rank was written as an empty line.
static void test_a_rank_that_does_nothing_is_read_back(void** state) {
  (void)state;
  static const char* const kTexts[] = {" \n ,0F0", ",\n0F0,0B0"};
  for (size_t i = 0; i < sizeof(kTexts) / sizeof(*kTexts); ++i) {
    jpp_schedule_t *schedule = NULL, *read = NULL;
    for (int communication = 0; communication < 2; ++communication) {
      char* text = NULL;
      ASSERT_OK(
          jpp_schedule_from_csv("x", kTexts[i], strlen(kTexts[i]), NULL, &schedule));
      ASSERT_OK(jpp_schedule_print_csv(schedule, communication, &text));
      ASSERT_OK(jpp_schedule_from_csv("y", text, strlen(text), NULL, &read));
      assert_int_equal(read->ranks, 2);
      jpp_schedule_destroy(read);
      jpp_schedule_destroy(schedule);
      jpp_text_free(text);
    }
  }
}

// Lists without any task, and lists of only communication.
static void test_lists_without_tasks_are_refused(void** state) {
  (void)state;
  const jpp_status_code_t code = JPP_SCHEDULE_ERROR;
  assert_refused("0SEND_F0", code, "dir/x.csv:1: stage 0: fwd_0__0 is missing");
  assert_refused("0SEND_F0\n1RECV_F0,1F0\n", code, "fwd_0__0 is missing");
  assert_refused(",\n0RECV_B0\n,,\n", code, "dir/x.csv:2: stage 0: fwd_0__0");
  assert_refused("0UNSHARD\n", JPP_PARSE_ERROR, "no computation");
  static const jpp_schedule_row_t kRows[2] = {{0}};
  const uint32_t stage_rank[] = {0, 1};
  jpp_schedule_rows_t rows = {.stages = 2,
                              .ranks = 2,
                              .microbatches = 1,
                              .rows = kRows,
                              .stage_rank = stage_rank};
  jpp_schedule_t* schedule = NULL;
  char* text = NULL;
  ASSERT_OK(jpp_schedule_from_rows(&rows, &schedule));
  ASSERT_FAILS(jpp_schedule_verify(schedule), code, "is missing");
  ASSERT_OK(jpp_schedule_print_csv(schedule, false, &text));
  assert_string_equal(text, ",\r\n,\r\n");
  jpp_text_free(text);
  jpp_schedule_destroy(schedule);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_what_is_written_is_read_back),
      cmocka_unit_test(test_files_are_as_their_golden_files),
      cmocka_unit_test(test_forms_that_are_read),
      cmocka_unit_test(test_wrong_texts_name_their_line_and_cell),
      cmocka_unit_test(test_wrong_schedules_are_refused),
      cmocka_unit_test(test_a_rank_that_does_nothing_is_read_back),
      cmocka_unit_test(test_slots_are_the_least_that_are_enough),
      cmocka_unit_test(test_lists_without_tasks_are_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
