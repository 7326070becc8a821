// The report on a folder of flight recorder files; damaged files are refused.
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "flight/record.h"
#include "jaxpp/flight.h"
#include "test_util.h"

static char g_folder[64];

static int make_folder(void** state) {
  (void)state;
  snprintf(g_folder, sizeof(g_folder), "/tmp/jaxpp-flight-XXXXXX");
  return mkdtemp(g_folder) ? 0 : -1;
}

// Finds the n-th file of the folder, counted from 0.
static bool find_file(int n, char path[512]) {
  DIR* entries = opendir(g_folder);
  bool found = false;
  for (const struct dirent* entry; !found && (entry = readdir(entries));) {
    if (*entry->d_name == '.' || n--) continue;
    snprintf(path, 512, "%s/%s", g_folder, entry->d_name);
    found = true;
  }
  closedir(entries);
  return found;
}

static int drop_folder(void** state) {
  (void)state;
  char path[512];
  while (find_file(0, path)) unlink(path);
  return rmdir(g_folder);
}

// --- Records --------------------------------------------------------------------------

enum { kInstrs = 4 };

// Records a rank that runs, sends to the next rank, receives from it, and runs; the last
// rank receives from the previous one before it sends.
static jpp_flight_t record_rank(uint32_t rank, uint32_t ranks) {
  static const char kTexts[] = "fwd\0send\0recv\0bwd";  // at 0, 4, 9 and 14
  bool last = rank + 1 == ranks;
  uint32_t peer = last ? rank - 1 : rank + 1;
  jpp_flight_instr_t instrs[kInstrs] = {
      {.text = 0}, {.text = 4}, {.text = 9}, {.text = 14}};
  jpp_flight_instr_t *send = &instrs[last ? 2 : 1], *recv = &instrs[last ? 1 : 2];
  send->kind = JPP_FLIGHT_SEND;
  send->text = 4;
  send->channel = last ? 1 : 0;
  recv->kind = JPP_FLIGHT_RECV;
  recv->text = 9;
  recv->channel = last ? 0 : 1;
  instrs[1].tag = 7;
  instrs[2].tag = 8;
  for (int i = 1; i <= 2; ++i) instrs[i].peer = peer;
  for (int i = 1; i <= 2; ++i) instrs[i].slots = 1;
  jpp_flight_rank_t of = {.rank = rank, .num_instrs = kInstrs, .instrs = instrs};
  jpp_flight_t flight;
  ASSERT_OK(jpp__flight_open(g_folder, rank, &of, 1, kTexts, sizeof(kTexts), &flight));
  flight.head->runtime = 0;  // all files come from this one process
  return flight;
}

static void run_to(jpp_flight_t* flight, uint64_t step, uint32_t at) {
  jpp__flight_submitted(flight);
  jpp__flight_begin(flight->rows, step);
  for (uint32_t i = 0; i < at; ++i) jpp__flight_note(flight->rows, i);
  jpp__flight_alive(flight);
}

static char* report(void) {
  char* text = NULL;
  ASSERT_OK(jpp_flight_report(g_folder, &text));
  return text;
}

static void expect(const char* text, const char* part) {
  if (!strstr(text, part)) fail_msg("'%s' is not in:\n%s", part, text);
}

// --- Reports --------------------------------------------------------------------------

static void test_a_rank_that_has_not_sent(void** state) {
  (void)state;
  jpp_flight_t first = record_rank(0, 2), second = record_rank(1, 2);
  run_to(&first, 3, 2);
  run_to(&second, 3, 0);
  char* text = report();
  expect(text, "runtime 0: 2 processes, until 20");
  expect(text, "  rank 0: step 3, recv; rank 1 has not sent it\n    last issued, ");
  expect(text, "s before the end: send (step 3)\n");
  expect(text, "  rank 1: step 3, fwd\n");
  expect(text,
         "rank 0 waits for rank 1, which waits for no other rank: step 3, fwd "
         "(process 1)\n");
  jpp_text_free(text);
  jpp__flight_close(&first);
  jpp__flight_close(&second);
}

static void test_a_silent_process(void** state) {
  (void)state;
  jpp_flight_t first = record_rank(0, 2), second = record_rank(1, 2);
  run_to(&first, 1, 2);
  run_to(&second, 1, 2);
  jpp_status_t* status = jpp_status_make(JPP_PEER_ERROR, "rank 0: nothing was heard");
  jpp__flight_failed(&first, status);
  jpp_status_free(status);
  first.head->alive += INT64_C(12500000000);
  char* text = report();
  expect(text, "process 1 (host ");
  expect(text, "1 steps called, 0 done; silent for the last 12.5");
  expect(text, "  failed 12.");
  expect(text, "s before the end: rank 0: nothing was heard\n");
  expect(text,
         "rank 0 waits for rank 1, which waits for no other rank: step 1, send "
         "(process 1, silent: it was killed or stopped, or its machine hangs)\n");
  jpp_text_free(text);
  jpp__flight_close(&first);
  jpp__flight_close(&second);
}

// The process was stopped after it handed the value over and before the value was sent.
static void test_a_silent_process_that_has_sent(void** state) {
  (void)state;
  jpp_flight_t first = record_rank(0, 2), second = record_rank(1, 2);
  run_to(&first, 1, 2);
  run_to(&second, 1, 3);
  first.head->alive += INT64_C(3000000000);
  char* text = report();
  expect(text, "  rank 0: step 1, recv; rank 1 has sent it\n");
  expect(text,
         "rank 0 waits for rank 1, which waits for no other rank: step 1, bwd "
         "(process 1, silent: ");
  jpp_text_free(text);
  jpp__flight_close(&first);
  jpp__flight_close(&second);
}

static void test_a_circle_and_what_is_not_there(void** state) {
  (void)state;
  jpp_flight_t first = record_rank(0, 3);
  run_to(&first, 1, 2);
  char* text = report();
  expect(text, "; there is no file of rank 1\n");
  expect(text, "no rank waits for another one\n");
  jpp_text_free(text);
  // Ranks 1 and 2 of three: each waits for the other's send.
  jpp_flight_t second = record_rank(1, 3), third = record_rank(2, 3);
  run_to(&second, 1, 2);
  run_to(&third, 1, 1);
  jpp_flight_instr_t* instrs = (jpp_flight_instr_t*)(second.rows + 1);
  instrs[1].tag = 99;
  jpp__flight_close(&second);
  text = report();
  expect(text,
         "rank 0 waits for rank 1, that for rank 2, that for rank 1, and so on in a "
         "circle\n");
  expect(text, "; left ");
  jpp_text_free(text);
  jpp__flight_close(&first);
  jpp__flight_close(&third);
}

static void test_a_channel_without_room(void** state) {
  (void)state;
  jpp_flight_t first = record_rank(0, 2), second = record_rank(1, 2);
  run_to(&first, 3, 1);
  run_to(&second, 2, 1);  // has not yet received the value of step 2
  char* text = report();
  expect(text, "rank 0: step 3, send; rank 1 has no free slot\n");
  expect(text, "rank 1: step 2, recv; rank 0 has sent it\n");
  jpp_text_free(text);
  run_to(&second, 2, 2);
  text = report();
  expect(text, "rank 0: step 3, send; rank 1 has a free slot\n");
  jpp_text_free(text);
  jpp__flight_close(&first);
  jpp__flight_close(&second);
}

static void test_between_steps(void** state) {
  (void)state;
  jpp_flight_t first = record_rank(0, 2);
  run_to(&first, 2, kInstrs);
  char* text = report();
  expect(text,
         "rank 0: step 2: all instructions issued, the devices have not finished\n");
  jpp_text_free(text);
  jpp__flight_finished(&first, 2);
  text = report();
  expect(text, "1 steps called, 2 done\n");
  expect(text, "rank 0: between steps, 2 done\n");
  jpp_text_free(text);
  jpp__flight_close(&first);
}

// A file left by an earlier run of the same job is not shown.
static void test_the_newest_file_counts(void** state) {
  (void)state;
  jpp_flight_t old = record_rank(0, 2);
  run_to(&old, 9, 1);
  old.head->begun -= 1000000000;
  jpp__flight_close(&old);
  jpp_flight_t new = record_rank(0, 2);
  run_to(&new, 5, 1);
  char* text = report();
  expect(text, "runtime 0: 1 processes");
  expect(text, "; 1 older files are not shown\n");
  expect(text, "rank 0: step 5, send");
  jpp_text_free(text);
  jpp__flight_close(&new);
}

// --- What is refused ------------------------------------------------------------------

static void test_folders_without_records(void** state) {
  (void)state;
  char* text = NULL;
  ASSERT_FAILS(jpp_flight_report("/no/such/folder", &text), JPP_INVALID_ARGUMENT,
               "/no/such/folder: No such file");
  ASSERT_FAILS(jpp_flight_report(g_folder, &text), JPP_INVALID_ARGUMENT,
               "expected files *.flight");
  jpp_flight_t flight;
  ASSERT_FAILS(jpp__flight_open("/proc/nothing", 0, NULL, 0, "", 0, &flight),
               JPP_INVALID_ARGUMENT, "JPP_FLIGHT: /proc/nothing/process0-");
}

static void expect_refused_or_sound(void) {
  char* text = NULL;
  jpp_status_t* status = jpp_flight_report(g_folder, &text);
  if (status) assert_int_equal(jpp_status_code(status), JPP_PARSE_ERROR);
  jpp_status_free(status);
  jpp_text_free(text);
}

static void test_damaged_files(void** state) {
  (void)state;
  jpp_flight_t flight = record_rank(0, 2);
  run_to(&flight, 1, 2);
  long size = (long)flight.head->size;
  jpp__flight_close(&flight);
  char path[512];
  assert_true(find_file(0, path));
  FILE* file = fopen(path, "r+b");
  for (long at = 0; at < size; ++at) {
    fseek(file, at, SEEK_SET);
    int before = fgetc(file);
    fseek(file, at, SEEK_SET);
    fputc(before ^ 0xff, file);
    fflush(file);
    expect_refused_or_sound();
    fseek(file, at, SEEK_SET);
    fputc(before, file);
    fflush(file);
  }
  fclose(file);
  for (long cut = size - 1; cut >= 0; cut -= cut > 100 ? 37 : 1) {
    assert_int_equal(truncate(path, cut), 0);
    char* text = NULL;
    ASSERT_FAILS(jpp_flight_report(g_folder, &text), JPP_PARSE_ERROR, path);
  }
  unlink(path);
  assert_int_equal(mkfifo(path, 0666), 0);
}

int main(void) {
#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, drop_folder)
  const struct CMUnitTest tests[] = {
      IN_FOLDER(test_a_rank_that_has_not_sent),
      IN_FOLDER(test_a_silent_process),
      IN_FOLDER(test_a_silent_process_that_has_sent),
      IN_FOLDER(test_a_circle_and_what_is_not_there),
      IN_FOLDER(test_a_channel_without_room),
      IN_FOLDER(test_between_steps),
      IN_FOLDER(test_the_newest_file_counts),
      IN_FOLDER(test_folders_without_records),
      IN_FOLDER(test_damaged_files),
  };
  return cmocka_run_group_tests_name("flight", tests, NULL, NULL);
}
