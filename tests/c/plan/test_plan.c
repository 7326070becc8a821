// The planner's public function: its options, and what it refuses.
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "plan_util.h"
#include "test_util.h"

static jpp_graph_t* parse(const char* text) {
  jpp_graph_t* graph = NULL;
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &graph));
  return graph;
}

static jpp_graph_t* parse_file(const char* name) {
  char* text = graph_text(name);
  jpp_graph_t* graph = parse(text);
  free(text);
  return graph;
}

static void test_parts_are_made_up_to_the_last(void** state) {
  (void)state;
  jpp_graph_t* graph = parse_file("mlp4");
  for (int last = JPP_PART_SCHEDULE; last < JPP_PART_COUNT; ++last) {
    jpp_plan_options_t options = {.struct_size = sizeof(options),
                                  .last = (jpp_plan_part_t)last};
    jpp_planned_t* planned = NULL;
    ASSERT_OK(jpp_plan_graph(graph, &options, &planned));
    assert_ptr_equal(planned->graph, graph);
    assert_int_equal(planned->ranks, graph->ranks);
    assert_non_null(planned->schedules[0]);
    assert_int_equal(planned->staged != NULL, last >= JPP_PART_PARTITION);
    assert_int_equal(planned->plan != NULL, last >= JPP_PART_PROGRAM);
    assert_int_equal(planned->report != NULL, last >= JPP_PART_CHECK);
    jpp_planned_destroy(planned);
  }
  jpp_graph_destroy(graph);
}

static void refuse(const char* text, const jpp_plan_options_t* options,
                   jpp_status_code_t code, const char* message) {
  jpp_graph_t* graph = parse(text);
  jpp_planned_t* planned = (jpp_planned_t*)graph;  // the call sets it to NULL
  ASSERT_FAILS(jpp_plan_graph(graph, options, &planned), code, message);
  assert_null(planned);
  jpp_graph_destroy(graph);
}

#define LOOP(ranks, sizes)                              \
  "graph \"g\" " ranks                                  \
  "\narg %0 f32[]\n"                                    \
  "loop microbatches 2 " sizes                          \
  " index %1 at \"f.py:3\" {\n"                         \
  "  %2:f32[] = f(%0, %1)\n  %3:f32[] = @mark 0 (%2)\n" \
  "  %4:f32[] = g(%3)\n  %5:f32[] = @mark 1 (%4)\n} %6:f32[] = add %5\nout %6\n"

static void test_what_nobody_says_is_asked_for(void** state) {
  (void)state;
  refuse(LOOP("", "stages 2 schedule \"1f1b\""), NULL, JPP_INVALID_ARGUMENT,
         "the number of ranks");
  refuse(LOOP("ranks 2", "stages 2"), NULL, JPP_INVALID_ARGUMENT,
         "loop at f.py:3: expected the name of a schedule, found none");
  refuse(LOOP("ranks 2", "schedule \"1f1b\""), NULL, JPP_INVALID_ARGUMENT,
         "loop at f.py:3: schedule 1f1b: needs at least 1 stage");
  refuse(LOOP("ranks 2", "stages 2 schedule \"2f2b\""), NULL, JPP_INVALID_ARGUMENT,
         "no schedule is named \"2f2b\"");
}

static void test_a_loop_takes_what_it_is_given(void** state) {
  (void)state;
  static const jpp_cost_t kCosts[] = {{1, 1, 1}, {2, 2, 2}};
  jpp_search_options_t search = {
      .struct_size = sizeof(search), .costs = kCosts, .seconds = 0};
  jpp_loop_schedule_t loop = {
      .struct_size = sizeof(loop), .built_in = "gpipe", .search = &search};
  jpp_plan_options_t options = {.struct_size = sizeof(options), .loops = &loop};
  jpp_graph_t* graph = parse(LOOP("ranks 2", "stages 2 schedule \"1f1b\""));
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_plan_graph(graph, &options, &planned));
  assert_string_equal(planned->schedules[0]->name, "gpipe");
  jpp_planned_destroy(planned);
  loop.built_in = NULL;
  ASSERT_OK(jpp_plan_graph(graph, &options, &planned));
  assert_int_equal(planned->schedules[0]->microbatches, 2);
  jpp_planned_destroy(planned);
  jpp_schedule_params_t params = {
      .struct_size = sizeof(params), .stages = 2, .ranks = 2, .microbatches = 2};
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_build("eager-1f1b", &params, &schedule));
  loop.given = schedule;
  ASSERT_OK(jpp_plan_graph(graph, &options, &planned));
  assert_ptr_equal(planned->schedules[0], schedule);
  jpp_planned_destroy(planned);
  jpp_schedule_destroy(schedule);
  jpp_graph_destroy(graph);
}

static void test_given_schedules_are_proved(void** state) {
  (void)state;
  static const jpp_schedule_task_t kTasks[2][2] = {
      {{.kind = JPP_TASK_FWD}, {.kind = JPP_TASK_FWD}},
      {{.kind = JPP_TASK_FWD, .stage = 1},
       {.kind = JPP_TASK_FWD, .stage = 1, .microbatch = 1}},
  };
  static const jpp_schedule_row_t kRows[] = {{kTasks[0], 2}, {kTasks[1], 2}};
  jpp_schedule_rows_t rows = {.stages = 2, .ranks = 2, .microbatches = 2, .rows = kRows};
  jpp_loop_schedule_t loop = {.struct_size = sizeof(loop)};
  jpp_schedule_t* schedule = NULL;
  ASSERT_OK(jpp_schedule_from_rows(&rows, &schedule));
  loop.given = schedule;
  refuse(LOOP("ranks 2", "stages 2"),
         &(jpp_plan_options_t){.struct_size = sizeof(jpp_plan_options_t), .loops = &loop},
         JPP_SCHEDULE_ERROR, "fwd_0__0");
  jpp_schedule_destroy(schedule);
}

// --- Bytes ----------------------------------------------------------------------------

static jpp_status_t* one_byte_each(void* context, const jpp_staged_t* staged,
                                   uint64_t* out_bytes) {
  *(const jpp_graph_t**)context = staged->graph;
  for (uint32_t v = 0; v < staged->num_values; ++v) out_bytes[v] = 1;
  return NULL;
}

static jpp_status_t* cannot_measure(void* context, const jpp_staged_t* staged,
                                    uint64_t* out_bytes) {
  (void)context, (void)staged, (void)out_bytes;
  return jpp_status_make(JPP_CANCELLED, "not now");
}

static void test_bytes_are_those_that_were_measured(void** state) {
  (void)state;
  jpp_graph_t* graph = parse_file("mlp4");
  const jpp_graph_t* seen = NULL;
  jpp_plan_options_t options = {
      .struct_size = sizeof(options), .measure = one_byte_each, .context = &seen};
  jpp_planned_t *whole = NULL, *measured = NULL;
  ASSERT_OK(jpp_plan_graph(graph, NULL, &whole));
  ASSERT_OK(jpp_plan_graph(graph, &options, &measured));
  assert_ptr_equal(seen, graph);
  for (uint32_t v = 0; v < measured->staged->num_values; ++v) {
    assert_int_equal(measured->plan->value_bytes[v], 1);
  }
  assert_true(measured->report->actors[0].peak_bytes <
              whole->report->actors[0].peak_bytes);
  jpp_planned_destroy(whole);
  jpp_planned_destroy(measured);
  options.measure = cannot_measure;
  ASSERT_FAILS(jpp_plan_graph(graph, &options, &measured), JPP_CANCELLED, "not now");
  jpp_graph_destroy(graph);
}

// True if all runs of a task, except those of the first microbatch, share their lists of
// values.
static bool values_are_shared(const jpp_program_t* program) {
  uint32_t operands = 0;
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* a = &program->instrs[i];
    operands += a->num_args + a->num_results;
    if (a->kind != JPP_INSTR_RUN || !a->microbatch) continue;
    for (uint32_t k = i + 1; k < program->num_instrs; ++k) {
      const jpp_instr_t* b = &program->instrs[k];
      bool alike = b->kind == a->kind && b->target == a->target && b->microbatch;
      if (alike && b->first_value != a->first_value) return false;
    }
  }
  return program->num_operand_values < operands;
}

// The number of ops of the last stage's forward. `end`: how the body ends.
static uint32_t ops_of_last_forward(const char* schedule, uint32_t microbatches,
                                    const char* cost, const char* end) {
  char text[1024];
  snprintf(text, sizeof(text),
           "graph \"g\" ranks 2\narg %%w f32[4]\narg %%x f32[%u,4]\n"
           "loop microbatches %u stages 2 schedule \"%s\" index %%i {\n"
           "  %%s:f32[4] = slice(%%x, %%i) cheap\n"
           "  %%a:f32[4] = dot(%%s, %%w) cost 8\n  %%m0:f32[4] = @mark 0 (%%a)\n"
           "  %%b:f32[4] = dot(%%m0, %%w) cost %s\n  %%m1:f32[4] = @mark 1 (%%b)\n"
           "  %%c:f32[4] = loss_t(%%m1) backward\n"
           "  %%b1:f32[4] = @mark_backward 1 (%%c) backward\n"
           "  %%d:f32[4] = dot_t(%%b1, %%w) backward cost 8\n"
           "  %%b0:f32[4] = @mark_backward 0 (%%d) backward\n"
           "  %%g:f32[4] = dot_t(%%b0, %%s) backward cost 8\n"
           "%s%%G:f32[4] = add %%g\nout %%G\n",
           microbatches, microbatches, schedule, cost, end);
  jpp_graph_t* graph = parse(text);
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_plan_graph(graph, NULL, &planned));
  const jpp_staged_t* staged = planned->staged;
  uint32_t ops = staged->tasks[staged->loops[0].forward[1]].num_ops;
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
  return ops;
}

static void test_a_small_last_forward_joins_its_backward(void** state) {
  (void)state;
  assert_int_equal(ops_of_last_forward("1f1b", 16, "8", "} "), 0);
  assert_int_equal(ops_of_last_forward("1f1b", 40, "500000", "} "), 0);
  // Few calls; a long forward; a forward of unknown cost.
  assert_int_equal(ops_of_last_forward("1f1b", 15, "8", "} "), 1);
  assert_int_equal(ops_of_last_forward("1f1b", 16, "500001", "} "), 1);
  assert_int_equal(ops_of_last_forward("1f1b", 16, "0", "} "), 1);
  // Schedules that run something else in between, or a backward in two parts.
  assert_int_equal(ops_of_last_forward("gpipe", 16, "8", "} "), 1);
  assert_int_equal(ops_of_last_forward("zb-h1", 16, "8", "} "), 1);
}

static void test_a_last_forward_that_is_sent_stays(void** state) {
  (void)state;
  // Stage 0 takes a value of it.
  const char* end =
      "  %h:f32[4] = both(%b0, %b) backward cost 8\n"
      "  %k:f32[4] = both(%h, %g) backward cost 8\n"
      "} %K:f32[4] = add %k,";
  assert_int_equal(ops_of_last_forward("1f1b", 16, "8", end), 1);
}

// What the backward of the first stage takes that a forward makes. The stage computes %t
// and %e of its input and, in the line `more`, something of %t.
static uint32_t values_kept(uint32_t microbatches, const char* weight, const char* cost,
                            const char* more, const char* results) {
  char text[1024];
  snprintf(text, sizeof(text),
           "graph \"g\" ranks 2\narg %%w %s\narg %%x f32[%u,4]\n"
           "loop microbatches %u stages 2 schedule \"gpipe\" index %%i {\n"
           "  %%s:f32[4] = slice(%%x, %%i) cheap\n"
           "  %%t:f32[4] = tanh(%%s, %%w) cost %s\n  %%e:f32[4] = exp(%%t) cost 8\n%s"
           "  %%a:f32[4] = mul(%%t, %%e) cost 8\n  %%m0:f32[4] = @mark 0 (%%a)\n"
           "  %%b:f32[4] = dot(%%m0, %%w) cost 8\n  %%m1:f32[4] = @mark 1 (%%b)\n"
           "  %%c:f32[4] = loss_t(%%m1) backward\n"
           "  %%b1:f32[4] = @mark_backward 1 (%%c) backward\n"
           "  %%d:f32[4] = dot_t(%%b1, %%w) backward cost 8\n"
           "  %%b0:f32[4] = @mark_backward 0 (%%d) backward\n"
           "  %%g:f32[4] = both(%%b0, %%t, %%e) backward cost 8\n"
           "} %%G:f32[4] = add %%g%s\nout %%G\n",
           weight, microbatches, microbatches, cost, more, results);
  jpp_graph_t* graph = parse(text);
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_plan_graph(graph, NULL, &planned));
  const jpp_staged_t* staged = planned->staged;
  const jpp_task_t* backward = &staged->tasks[staged->loops[0].backward[0]];
  const jpp_task_t* forward = &staged->tasks[staged->loops[0].forward[0]];
  uint32_t kept = 0;
  for (uint32_t i = 0; i < backward->num_inputs; ++i) {
    for (uint32_t k = 0; k < forward->num_outputs; ++k) {
      kept += backward->inputs[i] == forward->outputs[k];
    }
  }
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
  return kept;
}

static void test_a_small_stage_keeps_its_input_only(void** state) {
  (void)state;
  assert_int_equal(values_kept(16, "f32[4]", "8", "", ""), 0);
  // Few calls; a long forward.
  assert_int_equal(values_kept(15, "f32[4]", "8", "", ""), 2);
  assert_int_equal(values_kept(16, "f32[4]", "500000", "", ""), 2);
  // An op may communicate.
  assert_int_equal(values_kept(16, "f32[4]/2", "8", "", ""), 2);
  // %e is a result of the loop as well: the step keeps it, and computes only %t again.
  assert_int_equal(values_kept(16, "f32[4]", "8", "", ", %E:f32[4] = add %e"), 1);
  // %t has an effect and runs once: its value is kept, and only %e is computed again.
  assert_int_equal(values_kept(16, "f32[4]", "8 effect",
                               "  %p:f32[4] = print(%e) cost 1 effect\n", ""),
                   1);
}

static void test_runs_of_a_task_share_their_values(void** state) {
  (void)state;
  jpp_graph_t* graph = parse_file("mlp2");
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_plan_graph(graph, NULL, &planned));
  for (uint32_t r = 0; r < planned->plan->ranks; ++r) {
    assert_true(values_are_shared(&planned->plan->programs[r]));
  }
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
}

enum { kStages = 8, kWeights = 3 };  // of each stage

// `format` gets a stage and the number of one of its weights.
static void print_weights(FILE* file, const char* format) {
  for (unsigned s = 0; s < kStages; ++s) {
    for (unsigned w = 0; w < kWeights; ++w) fprintf(file, format, s, w);
  }
}

// Writes a graph of stages whose backwards take what their forwards keep.
static void print_stages(FILE* file, uint32_t microbatches, const char* schedule) {
  fprintf(file, "graph \"g\" ranks %u\narg %%x f32[%u,64]\n", kStages, microbatches);
  print_weights(file, "arg %%w%u_%u f32[64]\n");
  fprintf(file, "loop microbatches %u stages %u schedule \"%s\" index %%i {\n",
          microbatches, kStages, schedule);
  fprintf(file, "%%h0_0:f32[64] = slice(%%x, %%i) cheap\n");
  for (unsigned s = 0; s < kStages; ++s) {
    for (unsigned w = 0; w < kWeights; ++w) {
      fprintf(file, "%%h%u_%u:f32[64] = layer(%%h%u_%u, %%w%u_%u) cost 500000\n", s,
              w + 1, s, w, s, w);
    }
    fprintf(file, "%%h%u_0:f32[64] = @mark %u (%%h%u_%u)\n", s + 1, s, s, kWeights);
  }
  fprintf(file, "%%c%u:f32[64] = loss_t(%%h%u_0) backward\n", kStages, kStages);
  for (unsigned s = kStages; s-- > 0;) {
    fprintf(file, "%%d%u_%u:f32[64] = @mark_backward %u (%%c%u) backward\n", s, kWeights,
            s, s + 1);
    for (unsigned w = kWeights; w-- > 0;) {
      fprintf(file,
              "%%g%u_%u:f32[64] = layer_w(%%h%u_%u, %%d%u_%u) backward cost 9\n"
              "%%d%u_%u:f32[64] = layer_t(%%d%u_%u, %%w%u_%u) backward cost 9\n",
              s, w, s, w, s, w + 1, s, w, s, w + 1, s, w);
    }
    fprintf(file, "%%c%u:f32[64] = pass(%%d%u_0) backward\n", s, s);
  }
  fprintf(file, "} %%L:f32[64] = add %%c0");
  print_weights(file, ", %%G%1$u_%2$u:f32[64] = add %%g%1$u_%2$u");
  fprintf(file, "\n");
  print_weights(file, "out %%G%u_%u\n");
}

// The number of operands in the program of rank 1.
static uint32_t operands_of_rank_1(uint32_t microbatches, const char* schedule) {
  char* text = NULL;
  size_t size = 0;
  FILE* file = open_memstream(&text, &size);
  assert_non_null(file);
  print_stages(file, microbatches, schedule);
  fclose(file);
  jpp_graph_t* graph = parse(text);
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_plan_graph(graph, NULL, &planned));
  uint32_t operands = planned->plan->programs[1].num_operands;
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
  free(text);
  return operands;
}

static void expect_planned(const char* text) {
  planned_t planned;
  ASSERT_OK(plan_text(text, NULL, &planned));
  for (uint32_t i = 0; i < planned.graph->num_outputs; ++i) {
    bool some = false;
    for (uint32_t r = 0; r < planned.ranks; ++r) {
      some = some || jpp_rank_set_has(planned.staged->outputs[i].ranks, r);
    }
    assert_true(some);
  }
  plan_free(&planned);
}

// Operands of different ranks, all without elements, give an op no rank by their sizes.
static void test_ops_on_empty_arrays_have_a_rank(void** state) {
  (void)state;
  static const char kLoop[] =
      "graph \"g\" ranks 2\narg %x f32[4,8]\narg %w0 f32[8,8]\narg %w1 f32[8,8]\n"
      "arg %big f32[64,64]\n"
      "loop microbatches 4 stages 2 schedule \"gpipe\" index %i {\n"
      "  %xs:f32[1,8] = slice(%x, %i) cheap\n"
      "  %a:f32[1,8] = dot(%xs, %w0) cost 128\n"
      "  %e0:f32[0,8] = empty(%a) cost 1\n"
      "  %am:f32[1,8] = @mark 0 (%a)\n"
      "  %b:f32[1,8] = dot(%am, %w1) cost 128\n"
      "  %e1:f32[0,8] = empty(%b) cost 1\n"
      "  %bm:f32[1,8] = @mark 1 (%b)\n"
      "} %r0:f32[0,8] = add %e0, %r1:f32[0,8] = add %e1\n";
  static const char* const kEnds[] = {
      "%c:f32[64,64] = concat(%r0, %r1, %big) cost 1\nout %c\n",
      "= print(%r0, %r1) effect\nout %r0\nout %r1\n"};
  for (int i = 0; i < 2; ++i) {
    char text[1024];
    snprintf(text, sizeof(text), "%s%s", kLoop, kEnds[i]);
    expect_planned(text);
  }
}

// What uses the result of an effect runs after it, also if only a later stage reads the
// effect's operand.
static void test_ops_follow_the_effect_that_they_use(void** state) {
  (void)state;
  expect_planned(
      "graph \"g\" ranks 2\narg %x f32[4,2,8]\narg %w0 f32[8,8]\narg %w1 f32[8,8]\n"
      "loop microbatches 4 stages 2 schedule \"gpipe\" index %i {\n"
      "  %xi:f32[2,8] = slice(%x, %i) cheap\n"
      "  %h0:f32[2,8] = dot(%xi, %w0) cost 256\n"
      "  %m0:f32[2,8] = @mark 0 (%h0)\n"
      "  %t:f32[] = io_callback(%w1) effect\n"
      "  %a:f32[] = mul(%t)\n"
      "  %h1:f32[2,8] = dot(%m0, %w1) cost 256\n"
      "  %m1:f32[2,8] = @mark 1 (%h1)\n"
      "  %l:f32[] = mean(%m1)\n"
      "} %L:f32[] = add %l, %A:f32[] = add %a\n"
      "out %L\nout %A\n");
}

static void test_more_microbatches_need_no_more_operands(void** state) {
  (void)state;
  const char* schedules[] = {"1f1b", "zb-h1"};
  for (size_t i = 0; i < 2; ++i) {
    uint32_t operands = operands_of_rank_1(32, schedules[i]);
    assert_true(operands > 0);
    assert_int_equal(operands_of_rank_1(128, schedules[i]), operands);
    assert_int_equal(operands_of_rank_1(1024, schedules[i]), operands);
  }
}

static void test_every_allocation_may_fail(void** state) {
  (void)state;
  jpp_graph_t* graph = parse_file("two_loops");
  int64_t n = 0;
  for (bool done = false; !done; n += 3) {
    jpp_planned_t* planned = NULL;
    jpp__alloc_fail_after(n);
    jpp_status_t* status = jpp_plan_graph(graph, NULL, &planned);
    done = !status;
    if (status) assert_int_equal(jpp_status_code(status), JPP_OUT_OF_MEMORY);
    jpp_status_free(status);
    jpp_planned_destroy(planned);
  }
  jpp__alloc_fail_after(-1);
  assert_true(n > 100);
  jpp_graph_destroy(graph);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_parts_are_made_up_to_the_last),
      cmocka_unit_test(test_what_nobody_says_is_asked_for),
      cmocka_unit_test(test_a_loop_takes_what_it_is_given),
      cmocka_unit_test(test_given_schedules_are_proved),
      cmocka_unit_test(test_bytes_are_those_that_were_measured),
      cmocka_unit_test(test_a_small_last_forward_joins_its_backward),
      cmocka_unit_test(test_a_last_forward_that_is_sent_stays),
      cmocka_unit_test(test_a_small_stage_keeps_its_input_only),
      cmocka_unit_test(test_runs_of_a_task_share_their_values),
      cmocka_unit_test(test_ops_on_empty_arrays_have_a_rank),
      cmocka_unit_test(test_ops_follow_the_effect_that_they_use),
      cmocka_unit_test(test_more_microbatches_need_no_more_operands),
      cmocka_unit_test(test_every_allocation_may_fail),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
