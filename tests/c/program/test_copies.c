// Which tasks only copy, and what they copy.
#include <string.h>

#include "base/str.h"
#include "jaxpp/plan.h"
#include "jaxpp/program.h"
#include "test_util.h"

enum { kMostOutputs = 8 };

// "name: input[first + row * min(i, last)] ..." for each task of the step that only
// copies, with a "+" behind copies that do not begin at a row; the caller frees it with
// jpp_text_free().
static char* copies_of(const jpp_plan_t* plan) {
  jpp_str_t text = {0};
  for (uint32_t t = 0; t < plan->staged->num_tasks; ++t) {
    const jpp_task_t* task = &plan->staged->tasks[t];
    jpp_copy_t copies[kMostOutputs];
    bool is_copy = jpp_plan_task_copies(plan, t, NULL);
    assert_true(task->num_outputs <= kMostOutputs);
    assert_int_equal(jpp_plan_task_copies(plan, t, copies), is_copy);
    if (!is_copy) continue;
    jpp_str_appendf(&text, "%s:", task->name);
    for (uint32_t i = 0; i < task->num_outputs; ++i) {
      const jpp_copy_t* copy = &copies[i];
      if (copy->input == JPP_NONE) {
        jpp_str_append(&text, " zeros");
        continue;
      }
      jpp_str_appendf(&text, " %%%u[%d", task->inputs[copy->input], (int)copy->first);
      if (copy->row) {
        jpp_str_appendf(&text, " + %d * min(i, %d)", (int)copy->row, (int)copy->last);
      }
      jpp_str_append(&text, copy->by_rows ? "]" : "]+");
    }
    jpp_str_append(&text, "\n");
  }
  char* found = NULL;
  ASSERT_OK(jpp_str_finish(&text, &found));
  return found;
}

static void expect_copies(const char* graph_text, const char* expected) {
  jpp_graph_t* graph = NULL;
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_graph_parse(graph_text, strlen(graph_text), "test", &graph));
  ASSERT_OK(jpp_plan_graph(graph, NULL, &planned));
  char* found = copies_of(planned->plan);
  assert_string_equal(found, expected);
  jpp_text_free(found);
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
}

static void test_rows_of_arguments(void** state) {
  (void)state;
  expect_copies(
      "graph \"g\" ranks 1\n"
      "arg %0 f32[6,4]\n"
      "%1:f32[2,4] = slice(%0) copies 3\n"
      "%2:f32[1,4] = slice(%1) copies 1\n"
      "%3:f32[4] = squeeze(%2) copies 0\n"
      "%4:bf16[4] = convert(%3) copies 0\n"
      "%5:bf16[2] = slice(%4) copies 1\n"
      "out %2\n"
      "out %5\n",
      "after_loop_0_0: %0[16] %0[17]+\n");
}

static void test_elements_across_rows(void** state) {
  (void)state;
  expect_copies(
      "graph \"g\" ranks 1\n"
      "arg %0 f32[4,4]\n"
      "arg %1 f32[]\n"
      "%2:f32[16] = reshape(%0) copies 0\n"
      "%3:f32[4] = slice(%2) copies 4\n"
      "%4:f32[4] = slice(%2) copies 6\n"
      "%5:f32[1] = reshape(%1) copies 0\n"
      "out %3\n"
      "out %4\n"
      "out %5\n",
      "after_loop_0_0: %0[4] %0[6]+ %1[0]\n");
}

// The first states of the sum are zeros, and stage 0 takes a row of the batch.
static void test_rows_of_microbatches(void** state) {
  (void)state;
  expect_copies(
      "graph \"g\" ranks 2\n"
      "arg %0 f32[5,4,2]\n"
      "loop microbatches 7 stages 2 schedule \"gpipe\" index %1 {\n"
      "  %2:u32[] = convert(%1) cheap copies 0\n"
      "  %4:f32[1,4,2] = dynamic_slice(%0, %2) copies 0\n"
      "  %5:f32[8] = reshape(%4) copies 0\n"
      "  %6:f32[8] = @mark 0 (%5)\n"
      "  %7:f32[8] = f(%6) cost 10\n"
      "  %8:f32[8] = @mark 1 (%7)\n"
      "} %9:f32[8] = add %8\n"
      "out %9\n",
      "fwd_0: %0[0 + 8 * min(i, 4)]\n"
      "before_loop_0_1: zeros\n");
}

static void test_other_tasks_need_a_module(void** state) {
  (void)state;
  static const char* const kOps[] = {
      // An op that computes.
      "%2:f32[4] = f(%0) copies 0\n%3:f32[4] = g(%2)\nout %3\nout %2\n",
      // Casts that the runtime does not make, or that round twice.
      "%2:s32[4] = convert(%0) copies 0\nout %2\n",
      "%2:f16[4] = convert(%0) copies 0\nout %2\n",
      "%2:bf16[4] = f(%0) copies 0\n%3:f32[4] = g(%2) copies 0\nout %3\n",
      "%2:s4[2] = slice(%1) copies 1\nout %2\n",
      // A row that is not the microbatch's.
      "%2:f32[1] = f(%0, %9) copies 0\nout %2\n",
      // More than 16 MiB of casts.
      "%2:bf16[8388609] = f(%8) copies 0\nout %2\n",
  };
  for (size_t i = 0; i < sizeof(kOps) / sizeof(*kOps); ++i) {
    jpp_str_t text = {0};
    char* graph = NULL;
    jpp_str_append(&text,
                   "graph \"g\" ranks 1\narg %0 f32[4]\narg %1 s4[4]\n"
                   "arg %9 s32[]\narg %8 f32[8388609]\n");
    jpp_str_append(&text, kOps[i]);
    ASSERT_OK(jpp_str_finish(&text, &graph));
    expect_copies(graph, "");
    jpp_text_free(graph);
  }
}

// An input that dies gives its memory to the result, which a copy by the runtime would
// need a second time.
static void test_donated_arguments_are_not_copied(void** state) {
  (void)state;
  expect_copies(
      "graph \"g\" ranks 1\n"
      "arg %0 f32[6,4] donated\n"
      "%1:f32[6,4] = copy(%0) copies 0\n"
      "out %1\n",
      "");
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_rows_of_arguments),
      cmocka_unit_test(test_elements_across_rows),
      cmocka_unit_test(test_rows_of_microbatches),
      cmocka_unit_test(test_other_tasks_need_a_module),
      cmocka_unit_test(test_donated_arguments_are_not_copied),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
