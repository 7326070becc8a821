// Reading traces: the traces of one job are joined into one even if the clocks of its
// processes differ, and traces that cannot be joined are refused.
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/str.h"
#include "jaxpp/view.h"
#include "test_util.h"

enum { kProcesses = 5, kRanks = 4, kRuns = 20 };

static uint32_t g_random = 1;

static uint32_t draw(uint32_t below) {
  g_random = g_random * 1664525 + 1013904223;
  return (g_random >> 8) % below;
}

// The runs of a process, with times since the start of that process.
typedef struct process {
  int64_t clock;
  jpp_span_t runs[kRuns];
  jpp_spans_t spans;
  char* text;
} process_t;

static void fill(process_t* process, uint32_t number) {
  static const char* const kNames[] = {"fwd_1__0", "bwd_i_2__3", "after_loop_0_1"};
  static const jpp_task_kind_t kKinds[] = {JPP_TASK_FWD, JPP_TASK_BWD_I, JPP_TASK_OUTER};
  process->clock = 1700000000000000000 + draw(1000000) * INT64_C(1000);
  for (uint32_t i = 0; i < kRuns; ++i) {
    uint32_t which = draw(3), start = draw(100000);
    process->runs[i] = (jpp_span_t){.name = kNames[which],
                                    .kind = kKinds[which],
                                    .rank = number * kRanks + draw(kRanks),
                                    .stage = which < 2 ? which + 1 : JPP_NONE,
                                    .microbatch = which < 2 ? which * 3 : JPP_NONE,
                                    .start = start / 1e3,
                                    .end = (start + draw(5000)) / 1e3};
  }
  process->spans = (jpp_spans_t){.title = "step",
                                 .spans = process->runs,
                                 .count = kRuns,
                                 .step = 7,
                                 .clock = process->clock};
  ASSERT_OK(jpp_spans_to_json(&process->spans, &process->text));
}

static bool is_like(const jpp_span_t* read, const jpp_span_t* run, double offset) {
  double start = read->start - offset - run->start, end = read->end - offset - run->end;
  return read->kind == run->kind && read->rank == run->rank &&
         read->stage == run->stage && read->microbatch == run->microbatch &&
         !strcmp(read->name, run->name) && start > -1e-5 && start < 1e-5 && end > -1e-5 &&
         end < 1e-5;
}

static bool has(const jpp_spans_t* spans, const jpp_span_t* run, double offset) {
  for (size_t i = 0; i < spans->count; ++i) {
    if (is_like(&spans->spans[i], run, offset)) return true;
  }
  return false;
}

static void check_joined(const jpp_spans_t* joined, const process_t* processes,
                         uint32_t count) {
  assert_string_equal(joined->title, "step");
  assert_int_equal(joined->count, count * kRuns);
  assert_int_equal(joined->step, 7);
  for (uint32_t p = 0; p < count; ++p) {
    assert_true(joined->clock <= processes[p].clock);
    double offset = (double)(processes[p].clock - joined->clock) / JPP_NANOSECONDS_OF_MS;
    for (uint32_t i = 0; i < kRuns; ++i) {
      assert_true(has(joined, &processes[p].runs[i], offset));
    }
  }
  for (size_t i = 0; i < joined->count; ++i) {
    const jpp_span_t* span = &joined->spans[i];
    assert_true(joined->begin <= span->start && span->end <= joined->end);
    bool in_order = !i || span[-1].rank < span->rank ||
                    (span[-1].rank == span->rank && span[-1].start <= span->start);
    assert_true(in_order);
  }
}

static void join(process_t* processes, uint32_t count) {
  jpp_trace_text_t texts[kProcesses];
  jpp_spans_t *joined = NULL, *again = NULL;
  char* text = NULL;
  for (uint32_t p = 0; p < count; ++p) {
    fill(&processes[p], p);
    texts[p] = (jpp_trace_text_t){
        .name = "x", .text = processes[p].text, .length = strlen(processes[p].text)};
  }
  ASSERT_OK(jpp_spans_read(texts, count, &joined));
  check_joined(joined, processes, count);
  // The joined trace can be written and read like any other.
  ASSERT_OK(jpp_spans_to_json(joined, &text));
  texts[0] = (jpp_trace_text_t){.name = "y", .text = text, .length = strlen(text)};
  ASSERT_OK(jpp_spans_read(texts, 1, &again));
  check_joined(again, processes, count);
  jpp_text_free(text);
  jpp_spans_destroy(again);
  jpp_spans_destroy(joined);
  for (uint32_t p = 0; p < count; ++p) jpp_text_free(processes[p].text);
}

static void test_traces_of_processes_are_joined_by_their_clocks(void** state) {
  (void)state;
  static process_t processes[kProcesses];
  for (int round = 0; round < 200; ++round) join(processes, 1 + draw(kProcesses));
}

// The steps of a job, one after the other, as a run of several steps has them.
static void test_traces_of_several_steps_are_joined(void** state) {
  (void)state;
  static process_t processes[kProcesses];
  jpp_trace_text_t texts[kProcesses];
  jpp_spans_t* joined = NULL;
  for (uint32_t p = 0; p < kProcesses; ++p) {
    fill(&processes[p], 0);
    for (uint32_t i = 0; i < kRuns; ++i) processes[p].runs[i].rank = i % kRanks;
    // The texts are in another order than the steps.
    processes[p].spans.step = 7 + (p + 2) % kProcesses;
    jpp_text_free(processes[p].text);
    ASSERT_OK(jpp_spans_to_json(&processes[p].spans, &processes[p].text));
    texts[p] = (jpp_trace_text_t){
        .name = "x", .text = processes[p].text, .length = strlen(processes[p].text)};
  }
  ASSERT_OK(jpp_spans_read(texts, kProcesses, &joined));
  check_joined(joined, processes, kProcesses);
  jpp_spans_destroy(joined);
  for (uint32_t p = 0; p < kProcesses; ++p) jpp_text_free(processes[p].text);
}

#define RUN_OF(rank) \
  "{\"ph\": \"X\", \"name\": \"fwd_0\", \"tid\": " rank ", \"ts\": 1, \"dur\": 2}"
#define RUN RUN_OF("0")
#define NAME(step) \
  "{\"ph\": \"M\", \"name\": \"process_name\", \"args\": {\"name\": \"" step "\"}}"
#define TRACE(number, clock, events)                            \
  "{\"otherData\": {\"step\": " number ", \"clock_ns\": " clock \
  "}, \"traceEvents\": [" events "]}"
#define STEP(number, clock) TRACE(number, clock, RUN)

static void refuse(const char* first, const char* second, const char* why) {
  jpp_trace_text_t texts[] = {{.name = "a", .text = first, .length = strlen(first)},
                              {.name = "b", .text = second, .length = strlen(second)}};
  jpp_spans_t* spans = NULL;
  ASSERT_FAILS(jpp_spans_read(texts, 2, &spans), JPP_PARSE_ERROR, why);
  assert_null(spans);
}

static void test_what_can_not_be_joined(void** state) {
  (void)state;
  refuse(STEP("3", "10"), "[" RUN "]", "b:1: expected step and clock_ns in otherData");
  refuse("[" RUN "]", STEP("3", "10"), "a:1: expected step and clock_ns in otherData");
  refuse(STEP("3", "10"), TRACE("4", "10", RUN_OF("1")),
         "a begins with step 3, b with step 4");
  refuse(STEP("3", "10"), TRACE("4", "10", RUN "," RUN_OF("1")),
         "a begins with step 3, b with step 4");
  refuse(TRACE("3", "10", RUN "," RUN_OF("1")), STEP("4", "10"),
         "b has step 4 of rank 0; expected a trace of that step of rank 1, too");
  refuse(STEP("3", "10"), STEP("0", "10"), "b:1: expected step and clock_ns");
  refuse(STEP("3", "10"), STEP("3", "-10"), "b:1: expected step and clock_ns");
  refuse(STEP("3", "10"), STEP("3", "\"10\""), "b:1: expected step and clock_ns");
  // These clocks are 292 years apart; the limit for times is 31 years.
  refuse(STEP("3", "1"), STEP("3", "9223372036854775807"),
         "b:1: traceEvents[0], 'fwd_0'");
  refuse(STEP("3", "10"), "{\"otherData\": {\"step\": 3, \"clock_ns\": 1}}",
         "b:1: expected traceEvents");
  refuse(STEP("3", "10"), "{", "b:1: ");
  refuse(
      STEP("3", "10"), STEP("3", "20"),
      "a and b both have runs of rank 0 in step 3; expected traces of different ranks");
  refuse(TRACE("3", "10", RUN_OF("1") "," RUN_OF("4")),
         TRACE("3", "20", RUN_OF("2") "," RUN_OF("4")),
         "a and b both have runs of rank 4 in step 3");
  refuse(TRACE("3", "10", RUN_OF("0") "," NAME("one")),
         TRACE("3", "10", NAME("two") "," RUN_OF("1")),
         "a is a trace of 'one', b of 'two'; expected the same step of each process");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_traces_of_processes_are_joined_by_their_clocks),
      cmocka_unit_test(test_traces_of_several_steps_are_joined),
      cmocka_unit_test(test_what_can_not_be_joined),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
