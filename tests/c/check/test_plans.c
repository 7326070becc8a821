// Plans the graphs in tests/golden/graphs: golden files of every part, rules that all
// plans follow, and errors when memory runs out at any point.
#include <stdlib.h>

#include "base/alloc.h"
#include "golden.h"
#include "interpreter.h"
#include "plan_util.h"

// --- Golden files ---------------------------------------------------------------------

static void golden_part(const char* part, const char* name, char* text) {
  char file[128];
  snprintf(file, sizeof(file), "%s/%s.txt", part, name);
  assert_golden(file, text);
  jpp_text_free(text);
}

static void golden_plan(const char* graph, const plan_options_t* options,
                        const char* name) {
  planned_t planned;
  char* text = NULL;
  ASSERT_OK(plan_file(graph, options, &planned));
  ASSERT_OK(jpp_staged_print(planned.staged, &text));
  golden_part("partition", name, text);
  ASSERT_OK(jpp_plan_print(planned.plan, &text));
  golden_part("program", name, text);
  ASSERT_OK(jpp_check_report_print(planned.report, &text));
  golden_part("check", name, text);
  plan_free(&planned);
}

static void test_plans_are_as_their_golden_files(void** state) {
  (void)state;
  for (uint32_t i = 0; kGraphs[i]; ++i) golden_plan(kGraphs[i], NULL, kGraphs[i]);
  golden_plan("mlp4", &(plan_options_t){.schedule = "zb-h1"}, "mlp4_zb-h1");
  golden_plan("interleaved", &(plan_options_t){.schedule = "dualpipe-v"},
              "interleaved_dualpipe-v");
}

// --- Rules ----------------------------------------------------------------------------

typedef void (*rule_t)(const planned_t* planned);

static void for_each_plan(rule_t rule) {
  planned_t planned;
  for (uint32_t i = 0; kGraphs[i]; ++i) {
    ASSERT_OK(plan_file(kGraphs[i], NULL, &planned));
    rule(&planned);
    plan_free(&planned);
  }
  ASSERT_OK(plan_file("mlp4", &(plan_options_t){.schedule = "zb-h1"}, &planned));
  rule(&planned);
  plan_free(&planned);
}

static bool holds(const uint32_t* ids, uint32_t count, uint32_t id) {
  for (uint32_t i = 0; i < count; ++i) {
    if (ids[i] == id) return true;
  }
  return false;
}

// Counts the tasks of loops that contain an op.
static uint32_t stage_tasks_with(const jpp_staged_t* staged, uint32_t op) {
  uint32_t count = 0;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    count += task->loop != JPP_NONE && holds(task->ops, task->num_ops, op);
  }
  return count;
}

// Tasks that the user defined.
static void rule_a_rank_keeps_the_order_of_its_tasks(const planned_t* planned) {
  for (uint32_t r = 0; r < planned->plan->ranks; ++r) {
    const jpp_program_t* program = &planned->plan->programs[r];
    uint32_t last = 0;
    for (uint32_t i = 0; i < program->num_instrs; ++i) {
      if (program->instrs[i].kind != JPP_INSTR_RUN) continue;
      const jpp_task_t* task = &planned->staged->tasks[program->instrs[i].target];
      if (planned->staged->ops[task->ops[0]].kind != JPP_OP_TASK) continue;
      assert_true(task->num_ops == 1 && task->ops[0] >= last);
      last = task->ops[0];
    }
  }
}

static void rule_ops_have_one_task_unless_cheap(const planned_t* planned) {
  const jpp_graph_t* graph = planned->graph;
  for (uint32_t id = 0; id < graph->num_ops; ++id) {
    const jpp_op_t* op = &graph->ops[id];
    if (op->loop == JPP_NONE || op->flags & JPP_OP_CHEAP) continue;
    assert_true(stage_tasks_with(planned->staged, id) <= 1);
  }
}

// Counts how often the step runs an op, over all ranks.
static uint32_t runs_on_all_ranks(const planned_t* planned, uint32_t op) {
  const jpp_staged_t* staged = planned->staged;
  uint32_t runs = 0;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    if (holds(task->ops, task->num_ops, op)) runs += planned->plan->bindings[t].runs;
  }
  return runs;
}

static void rule_effects_happen_once(const planned_t* planned) {
  const jpp_graph_t* graph = planned->graph;
  for (uint32_t id = 0; id < graph->num_ops; ++id) {
    const jpp_op_t* op = &graph->ops[id];
    if (!(op->flags & JPP_OP_EFFECT)) continue;
    uint32_t times = op->loop == JPP_NONE ? 1 : graph->loops[op->loop].microbatches;
    assert_int_equal(runs_on_all_ranks(planned, id), times);
  }
}

// Computes from the graph alone which values depend on the loop's index.
static bool* find_varying(const jpp_graph_t* graph) {
  bool* varies = calloc(graph->num_values, sizeof(*varies));
  for (uint32_t l = 0; l < graph->num_loops; ++l) varies[graph->loops[l].index] = true;
  for (uint32_t id = 0; id < graph->num_ops; ++id) {
    const jpp_op_t* op = &graph->ops[id];
    bool any = false;
    for (uint32_t i = 0; i < op->num_inputs; ++i) any = any || varies[op->inputs[i]];
    for (uint32_t i = 0; i < op->num_outputs; ++i) varies[op->first_output + i] = any;
  }
  return varies;
}

static void rule_invariant_work_leaves_the_loop(const planned_t* planned) {
  const jpp_graph_t* graph = planned->graph;
  bool* varies = find_varying(graph);
  for (uint32_t id = 0; id < graph->num_ops; ++id) {
    const jpp_op_t* op = &graph->ops[id];
    if (op->loop == JPP_NONE || !op->num_outputs) continue;
    if (graph->loops[op->loop].microbatches == 1) continue;  // runs only once
    if (op->flags & (JPP_OP_CHEAP | JPP_OP_EFFECT)) continue;
    if (op->kind == JPP_OP_CALL && !varies[op->first_output]) {
      assert_int_equal(stage_tasks_with(planned->staged, id), 0);
    }
  }
  free(varies);
}

static void rule_values_travel_once_to_each_rank(const planned_t* planned) {
  const jpp_plan_t* plan = planned->plan;
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* p = &plan->programs[r];
    for (uint32_t i = 0; i < p->num_instrs; ++i) {
      if (p->instrs[i].kind != JPP_INSTR_SEND) continue;
      for (uint32_t k = 0; k < i; ++k) {
        if (p->instrs[k].kind != JPP_INSTR_SEND) continue;
        bool same = p->instrs[k].target == p->instrs[i].target &&
                    p->instrs[k].microbatch == p->instrs[i].microbatch &&
                    p->operand_values[p->instrs[k].first_value] ==
                        p->operand_values[p->instrs[i].first_value];
        assert_false(same);
      }
    }
  }
}

static void rule_gradients_accumulate_in_place(const planned_t* planned) {
  const jpp_staged_t* staged = planned->staged;
  for (uint32_t a = 0; a < staged->num_accumulators; ++a) {
    const jpp_accumulator_t* acc = &staged->accumulators[a];
    const jpp_task_t* task = &staged->tasks[acc->task];
    const uint32_t* donated_to = planned->plan->bindings[acc->task].donated_to;
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      if (task->inputs[i] != acc->state) continue;
      assert_true(donated_to[i] < task->num_outputs);
      assert_int_equal(task->outputs[donated_to[i]], acc->next);
    }
  }
}

// The replacement of a weight is left on exactly the ranks that need the weight.
static void rule_weights_stay_where_they_are(const planned_t* planned) {
  const jpp_graph_t* graph = planned->graph;
  for (uint32_t o = 0; o < graph->num_outputs; ++o) {
    const char* name = graph->outputs[o].name;
    for (uint32_t a = 0; name && a < graph->num_args; ++a) {
      const char* arg = graph->values[graph->args[a].value].name;
      if (!graph->args[a].donated || !arg || strcmp(arg, name) != 0) continue;
      for (uint32_t r = 0; r < planned->ranks; ++r) {
        assert_int_equal(jpp_rank_set_has(planned->staged->outputs[o].ranks, r),
                         jpp_rank_set_has(planned->staged->args[a].ranks, r));
      }
    }
  }
}

static void rule_programs_compute_what_the_graph_says(const planned_t* planned) {
  uint64_t* expected = interpret_graph(planned->graph);
  assert_int_equal(interpret_plan(planned->plan, expected), OUTCOME_SAME);
  free(expected);
}

static void test_rules_hold_for_every_plan(void** state) {
  (void)state;
  for_each_plan(rule_a_rank_keeps_the_order_of_its_tasks);
  for_each_plan(rule_ops_have_one_task_unless_cheap);
  for_each_plan(rule_effects_happen_once);
  for_each_plan(rule_invariant_work_leaves_the_loop);
  for_each_plan(rule_values_travel_once_to_each_rank);
  for_each_plan(rule_gradients_accumulate_in_place);
  for_each_plan(rule_weights_stay_where_they_are);
  for_each_plan(rule_programs_compute_what_the_graph_says);
}

static uint32_t runs_of_op(const planned_t* planned, const char* name, uint32_t rank) {
  uint32_t runs = 0;
  const jpp_staged_t* staged = planned->staged;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    for (uint32_t i = 0; task->rank == rank && i < task->num_ops; ++i) {
      const char* found = staged->ops[task->ops[i]].name;
      if (!strcmp(found, name)) runs += planned->plan->bindings[t].runs;
    }
  }
  return runs;
}

static void test_casts_run_once_a_step_on_the_ranks_that_use_them(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("casts", NULL, &planned));
  assert_int_equal(runs_of_op(&planned, "convert", 0), 2);
  assert_int_equal(runs_of_op(&planned, "convert", 1), 2);
  assert_int_equal(runs_of_op(&planned, "transpose", 0), 0);
  assert_int_equal(runs_of_op(&planned, "transpose", 1), 1);
  plan_free(&planned);
}

static void test_parts_of_a_shared_gradient_are_summed_on_all_its_ranks(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("shared3", NULL, &planned));
  assert_int_equal(planned.staged->num_accumulators, 3);
  for (uint32_t r = 0; r < 3; ++r) {
    assert_int_equal(runs_of_op(&planned, "sum", r), 1);
    assert_int_equal(runs_of_op(&planned, "update", r), 1);
  }
  // Each part is sent to each other rank once, in addition to 3 activations and 3
  // gradients across each of two boundaries.
  uint32_t messages = 0;
  for (uint32_t i = 0; i < planned.plan->num_channels; ++i) {
    messages += planned.report->channels[i].messages;
  }
  assert_int_equal(messages, 3 * 2 + 2 * (3 + 3));
  plan_free(&planned);
}

// The argument with this name is passed on `rank` alone.
static void assert_only_on(const planned_t* planned, const char* name, uint32_t rank) {
  const jpp_graph_t* graph = planned->graph;
  for (uint32_t a = 0; a < graph->num_args; ++a) {
    if (strcmp(graph->values[graph->args[a].value].name, name) != 0) continue;
    for (uint32_t r = 0; r < planned->ranks; ++r) {
      assert_int_equal(jpp_rank_set_has(planned->staged->args[a].ranks, r), r == rank);
    }
    return;
  }
  fail_msg("no argument %s", name);
}

static void test_frozen_weights_stay_on_their_ranks(void** state) {
  (void)state;
  static const char* const kSchedules[] = {"1f1b", "zb-h1"};
  for (size_t i = 0; i < 2; ++i) {
    planned_t planned;
    ASSERT_OK(plan_file("lora", &(plan_options_t){.schedule = kSchedules[i]}, &planned));
    // Those of a0 and a1, and the maximum, which zeros determine as any other values do.
    assert_int_equal(planned.staged->num_accumulators, 3);
    assert_only_on(&planned, "w0", 0);
    assert_only_on(&planned, "w1", 1);
    assert_only_on(&planned, "momentum of w1", 1);
    assert_only_on(&planned, "average of w1", 1);
    assert_only_on(&planned, "s1", 1);
    for (uint32_t k = 0; k < planned.plan->num_channels; ++k) {
      assert_int_equal(planned.report->channels[k].messages, 3);
    }
    plan_free(&planned);
  }
}

static void test_masks_are_made_again_and_never_sent(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("dropout", NULL, &planned));
  for (uint32_t r = 0; r < 2; ++r) {
    assert_int_equal(runs_of_op(&planned, "bernoulli", r), 2 * 4);
  }
  assert_int_equal(planned.report->channels[0].messages, 4);
  assert_int_equal(planned.report->channels[1].messages, 4);
  plan_free(&planned);
}

static void test_skip_goes_straight_to_its_user(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("skip", NULL, &planned));
  uint32_t straight = 0;
  for (uint32_t i = 0; i < planned.plan->num_channels; ++i) {
    const jpp_plan_channel_t* channel = &planned.plan->channels[i];
    if (channel->src == 0 && channel->dst == 2) straight = channel->messages;
  }
  assert_int_equal(straight, 3);
  plan_free(&planned);
}

static uint64_t activations_at_peak(const char* schedule, uint32_t rank) {
  planned_t planned;
  ASSERT_OK(plan_file("mlp4", &(plan_options_t){.schedule = schedule}, &planned));
  uint64_t bytes = planned.report->actors[rank].bytes_at_peak[JPP_BYTES_ACTIVATIONS];
  plan_free(&planned);
  return bytes;
}

// For each microbatch, mlp4 keeps one f32[2,4] from forward to backward on a middle rank.
// A schedule that keeps k microbatches alive holds k of these, and two more while a
// backward runs: the incoming and the outgoing gradient.
static void test_peak_is_what_the_schedule_promises(void** state) {
  (void)state;
  static const char* const kSchedules[] = {"1f1b", "gpipe", "eager-1f1b"};
  for (size_t i = 0; i < 3; ++i) {
    jpp_schedule_params_t params = {
        .struct_size = sizeof(params), .stages = 4, .ranks = 4, .microbatches = 6};
    jpp_schedule_t* schedule = NULL;
    uint32_t kept[4];
    ASSERT_OK(jpp_schedule_build(kSchedules[i], &params, &schedule));
    ASSERT_OK(jpp_schedule_peak_microbatches(schedule, 4, kept));
    jpp_schedule_destroy(schedule);
    for (uint32_t r = 1; r < 3; ++r) {
      uint64_t bytes = activations_at_peak(kSchedules[i], r);
      assert_in_range(bytes, kept[r] * 32, (kept[r] + 2) * 32);
    }
  }
}

// --- What is refused ------------------------------------------------------------------

static void refuse(const char* graph, const plan_options_t* options,
                   jpp_status_code_t code, const char* message) {
  planned_t planned;
  ASSERT_FAILS(plan_file(graph, options, &planned), code, message);
  plan_free(&planned);
}

static void test_graphs_that_can_not_be_planned_say_why(void** state) {
  (void)state;
  refuse("zero_microbatches", NULL, JPP_PARSE_ERROR, "a loop needs microbatches");
  refuse("wrong_marks", NULL, JPP_MARKS_ERROR,
         "loop at train.py:10: the schedule has 4 stages, so expected 4 stage marks");
  refuse("wrong_marks", NULL, JPP_MARKS_ERROR, "mark 0 at model.py:6");
  refuse("mlp2", &(plan_options_t){.ranks = 3}, JPP_MESH_ERROR,
         "for 2 stages expected a mesh");
  refuse("mlp2", &(plan_options_t){.stages = 4, .ranks = 4}, JPP_MARKS_ERROR, "found 2:");
  refuse("one_stage", &(plan_options_t){.schedule = "none"}, JPP_INVALID_ARGUMENT,
         "no schedule is named \"none\"");
}

// Without a backward, every gradient would keep its initial value.
static void test_a_backward_that_no_schedule_runs_is_an_error(void** state) {
  (void)state;
  static const jpp_schedule_task_t kTasks[2][4] = {
      {{.kind = JPP_TASK_FWD, .microbatch = 0},
       {.kind = JPP_TASK_FWD, .microbatch = 1},
       {.kind = JPP_TASK_FWD, .microbatch = 2},
       {.kind = JPP_TASK_FWD, .microbatch = 3}},
      {{.kind = JPP_TASK_FWD, .stage = 1, .microbatch = 0},
       {.kind = JPP_TASK_FWD, .stage = 1, .microbatch = 1},
       {.kind = JPP_TASK_FWD, .stage = 1, .microbatch = 2},
       {.kind = JPP_TASK_FWD, .stage = 1, .microbatch = 3}},
  };
  static const jpp_schedule_row_t kRows[] = {{kTasks[0], 4}, {kTasks[1], 4}};
  jpp_schedule_rows_t rows = {.stages = 2, .ranks = 2, .microbatches = 4, .rows = kRows};
  planned_t planned = {.ranks = 2};
  char* text = graph_text("mlp2");
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &planned.graph));
  ASSERT_OK(jpp_schedule_from_rows(&rows, &planned.given[0]));
  ASSERT_OK(jpp_schedule_verify(planned.given[0]));
  ASSERT_FAILS(
      plan_scheduled(&planned, 0), JPP_SCHEDULE_ERROR,
      "loop at train.py:10 has a backward pass, but its schedule 'user' runs none");
  plan_free(&planned);
  free(text);
}

static void test_a_backward_that_was_not_split_can_not_run_split(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  jpp_schedule_params_t params = {
      .struct_size = sizeof(params), .stages = 2, .ranks = 2, .microbatches = 4};
  jpp_schedule_t* split = NULL;
  ASSERT_OK(jpp_schedule_build("zb-h1", &params, &split));
  const jpp_schedule_t* schedules[] = {split};
  jpp_program_options_t options = {.struct_size = sizeof(options),
                                   .schedules = schedules};
  jpp_plan_t* plan = NULL;
  ASSERT_FAILS(
      jpp_program_build(planned.staged, &options, &plan), JPP_SCHEDULE_ERROR,
      "was partitioned with whole backwards, but its schedule 'zb-h1' runs input");
  assert_null(plan);
  jpp_schedule_destroy(split);
  plan_free(&planned);
}

// --- Memory ---------------------------------------------------------------------------

static jpp_status_t* plan_and_print(const char* text) {
  planned_t planned;
  char* printed[4] = {NULL};
  jpp_status_t* status = plan_text(text, NULL, &planned);
  if (!status) status = jpp_graph_print(planned.graph, &printed[0]);
  if (!status) status = jpp_staged_print(planned.staged, &printed[1]);
  if (!status) status = jpp_plan_print(planned.plan, &printed[2]);
  if (!status) status = jpp_check_report_print(planned.report, &printed[3]);
  for (int i = 0; i < 4; ++i) jpp_text_free(printed[i]);
  plan_free(&planned);
  return status;
}

static void survive(const char* graph) {
  char* text = graph_text(graph);
  int64_t n = 0;
  for (bool done = false; !done; ++n) {
    assert_true(n < 20000);
    jpp__alloc_fail_after(n);
    jpp_status_t* status = plan_and_print(text);
    done = !status;
    if (status) assert_int_equal(jpp_status_code(status), JPP_OUT_OF_MEMORY);
    jpp_status_free(status);
  }
  jpp__alloc_fail_after(-1);
  assert_true(n > 100);
  free(text);
}

static void test_every_allocation_may_fail(void** state) {
  (void)state;
  survive("tied");
  survive("two_loops");
}

static void test_destroy_takes_null(void** state) {
  (void)state;
  jpp_check_report_destroy(NULL);
  jpp_plan_destroy(NULL);
  jpp_staged_destroy(NULL);
  jpp_graph_destroy(NULL);
  jpp_text_free(NULL);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_plans_are_as_their_golden_files),
      cmocka_unit_test(test_rules_hold_for_every_plan),
      cmocka_unit_test(test_casts_run_once_a_step_on_the_ranks_that_use_them),
      cmocka_unit_test(test_parts_of_a_shared_gradient_are_summed_on_all_its_ranks),
      cmocka_unit_test(test_frozen_weights_stay_on_their_ranks),
      cmocka_unit_test(test_masks_are_made_again_and_never_sent),
      cmocka_unit_test(test_skip_goes_straight_to_its_user),
      cmocka_unit_test(test_peak_is_what_the_schedule_promises),
      cmocka_unit_test(test_graphs_that_can_not_be_planned_say_why),
      cmocka_unit_test(test_a_backward_that_no_schedule_runs_is_an_error),
      cmocka_unit_test(test_a_backward_that_was_not_split_can_not_run_split),
      cmocka_unit_test(test_every_allocation_may_fail),
      cmocka_unit_test(test_destroy_takes_null),
  };
  return cmocka_run_group_tests_name("check_plans", tests, NULL, NULL);
}
