// Compares the costs of random steps with the checker's findings, with which they share
// no code.
#include <stdlib.h>

#include "jaxpp/check.h"
#include "random_step.h"
#include "test_util.h"

static const jpp_link_costs_t* find_link(const jpp_plan_costs_t* costs, uint32_t src,
                                         uint32_t dst) {
  for (uint32_t l = 0; l < costs->num_links; ++l) {
    const jpp_link_costs_t* link = &costs->links[l];
    if (link->src == src && link->dst == dst) return link;
  }
  return NULL;
}

// The runs of tasks that have ops.
static uint32_t runs_of(const jpp_plan_t* plan, uint32_t rank) {
  const jpp_program_t* program = &plan->programs[rank];
  uint32_t runs = 0;
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* instr = &program->instrs[i];
    if (instr->kind != JPP_INSTR_RUN) continue;
    runs += plan->staged->tasks[instr->target].num_ops != 0;
  }
  return runs;
}

static void compare_ranks(const jpp_plan_costs_t* costs,
                          const jpp_check_report_t* report) {
  const jpp_staged_t* staged = report->plan->staged;
  double all = 0, expected = 0;
  assert_int_equal(costs->num_ranks, report->plan->ranks);
  for (uint32_t r = 0; r < costs->num_ranks; ++r) {
    assert_int_equal(costs->ranks[r].tasks, runs_of(report->plan, r));
    assert_int_equal(costs->ranks[r].peak_bytes, report->actors[r].peak_bytes);
    all += costs->ranks[r].flops;
  }
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    expected += staged->tasks[t].cost * report->plan->bindings[t].runs;
  }
  assert_float_equal(all, expected, 1e-9 * expected);
}

// Each pair of ranks with channels has one link; the links are sorted.
static void compare_links(const jpp_plan_costs_t* costs,
                          const jpp_check_report_t* report) {
  const jpp_plan_t* plan = report->plan;
  uint64_t messages = 0, bytes = 0;
  for (uint32_t c = 0; c < plan->num_channels; ++c) {
    uint32_t src = plan->channels[c].src, dst = plan->channels[c].dst;
    assert_non_null(find_link(costs, src, dst));
    messages += report->channels[c].messages;
    bytes += report->channels[c].bytes;
  }
  for (uint32_t l = 0; l < costs->num_links; ++l) {
    const jpp_link_costs_t* link = &costs->links[l];
    messages -= link->messages;
    bytes -= link->bytes;
    if (!l) continue;
    const jpp_link_costs_t* before = &costs->links[l - 1];
    assert_true(before->src < link->src ||
                (before->src == link->src && before->dst < link->dst));
  }
  assert_int_equal(messages, 0);
  assert_int_equal(bytes, 0);
}

static void test_costs_are_those_of_the_proof(void** state) {
  (void)state;
  const char* times = test_variable("JPP_TEST_TIMES");
  uint64_t count = times ? strtoull(times, NULL, 10) : 300;
  for (uint64_t seed = 1; seed <= count; ++seed) {
    uint32_t slots = 0;
    jpp_check_report_t* report = NULL;
    jpp_plan_costs_t* costs = NULL;
    planned_t planned = random_step(seed, &slots);
    ASSERT_OK(plan_scheduled(&planned, slots));
    ASSERT_OK(jpp_check_plan(planned.plan, &report));
    ASSERT_OK(jpp_plan_costs(planned.plan, &costs));
    compare_ranks(costs, report);
    compare_links(costs, report);
    jpp_plan_costs_destroy(costs);
    jpp_check_report_destroy(report);
    plan_free(&planned);
  }
}

static void test_table(void** state) {
  (void)state;
  const jpp_rank_costs_t ranks[] = {{3, 1234567, 100}, {12, 0.5, 1u << 30}};
  const jpp_link_costs_t links[] = {{0, 1, 4, 256}, {1, 0, 2, 128}};
  jpp_plan_costs_t costs = {
      .num_ranks = 2, .num_links = 2, .ranks = ranks, .links = links};
  char* text = NULL;
  ASSERT_OK(jpp_plan_costs_print(&costs, &text));
  assert_string_equal(text,
                      "rank   tasks      FLOPs   peak bytes\n"
                      "   0       3   1.23e+06          100\n"
                      "   1      12        0.5   1073741824\n"
                      "\n"
                      "    link  messages        bytes\n"
                      "  0 -> 1         4          256\n"
                      "  1 -> 0         2          128\n");
  jpp_text_free(text);
  costs.num_ranks = 1;
  costs.num_links = 0;
  ASSERT_OK(jpp_plan_costs_print(&costs, &text));
  assert_string_equal(text,
                      "rank   tasks      FLOPs   peak bytes\n"
                      "   0       3   1.23e+06          100\n");
  jpp_text_free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_costs_are_those_of_the_proof),
      cmocka_unit_test(test_table),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
