// Damages programs at random: the checker must refuse each, unless it still computes the
// right results.
#include <stdio.h>
#include <stdlib.h>

#include "draft.h"
#include "interpreter.h"
#include "plan_util.h"
#include "test_util.h"

// xorshift64*, https://en.wikipedia.org/wiki/Xorshift
static uint64_t g_random = 88172645463325252u;
static uint32_t pick(uint32_t count) {
  g_random ^= g_random >> 12;
  g_random ^= g_random << 25;
  g_random ^= g_random >> 27;
  return (uint32_t)((g_random * 2685821657736338717u) >> 33) % (count ? count : 1);
}

// --- Mutations: each changes the program of one actor, p ------------------------------

static jpp_instr_t* instr_of(jpp_program_t* p, uint32_t at) {
  return (jpp_instr_t*)&p->instrs[at];
}

static void drop_instr(draft_t* d, jpp_program_t* p) {
  (void)d;
  uint32_t at = pick(p->num_instrs);
  memmove(instr_of(p, at), instr_of(p, at) + 1,
          (p->num_instrs - at - 1) * sizeof(jpp_instr_t));
  --p->num_instrs;
}

static void repeat_instr(draft_t* d, jpp_program_t* p) {
  (void)d;
  uint32_t at = pick(p->num_instrs);
  memmove(instr_of(p, at) + 1, instr_of(p, at),
          (p->num_instrs - at) * sizeof(jpp_instr_t));
  ++p->num_instrs;
}

static void swap_instrs(draft_t* d, jpp_program_t* p) {
  (void)d;
  uint32_t a = pick(p->num_instrs);
  uint32_t b = pick(2) ? pick(p->num_instrs) : (a + 1) % p->num_instrs;
  jpp_instr_t kept = *instr_of(p, a);
  *instr_of(p, a) = *instr_of(p, b);
  *instr_of(p, b) = kept;
}

// Two receives or two sends in a row.
static void swap_alike(draft_t* d, jpp_program_t* p) {
  (void)d;
  uint32_t a = pick(p->num_instrs), b = a;
  for (uint32_t i = a + 1; i < p->num_instrs && b == a; ++i) {
    if (p->instrs[i].kind == p->instrs[a].kind) b = i;
  }
  jpp_instr_t kept = *instr_of(p, a);
  *instr_of(p, a) = *instr_of(p, b);
  *instr_of(p, b) = kept;
}

static void change_register(draft_t* d, jpp_program_t* p) {
  (void)d;
  if (!p->num_operands) return;
  ((uint32_t*)p->operands)[pick(p->num_operands)] = pick(p->num_registers + 1);
}

static void change_value(draft_t* d, jpp_program_t* p) {
  if (!p->num_operand_values) return;
  ((uint32_t*)p->operand_values)[pick(p->num_operand_values)] =
      pick(d->plan.staged->num_values + 1);
}

static void change_target(draft_t* d, jpp_program_t* p) {
  (void)d;
  jpp_instr_t* instr = instr_of(p, pick(p->num_instrs));
  instr->target = pick(d->plan.staged->num_tasks + 1);
}

static void change_microbatch(draft_t* d, jpp_program_t* p) {
  (void)d;
  instr_of(p, pick(p->num_instrs))->microbatch = pick(4) ? pick(6) : JPP_NONE;
}

static void change_counts(draft_t* d, jpp_program_t* p) {
  (void)d;
  jpp_instr_t* instr = instr_of(p, pick(p->num_instrs));
  if (pick(2)) {
    instr->num_args += pick(3) - 1;
  } else {
    instr->num_results += pick(3) - 1;
  }
}

static void change_given(draft_t* d, jpp_program_t* p) {
  if (p->num_inputs && pick(2)) {
    jpp_program_input_t* input = (jpp_program_input_t*)&p->inputs[pick(p->num_inputs)];
    uint32_t what = pick(3);
    if (what == 0) input->owned = !input->owned;
    if (what == 1) input->reg = pick(p->num_registers);
    if (what == 2) input->arg = pick(d->plan.staged->graph->num_args);
  } else if (p->num_constants) {
    ((jpp_program_constant_t*)p->constants)[pick(p->num_constants)].microbatch = pick(5);
  }
}

static void change_output(draft_t* d, jpp_program_t* p) {
  if (!p->num_outputs) return;
  jpp_program_output_t* output = (jpp_program_output_t*)&p->outputs[pick(p->num_outputs)];
  uint32_t what = pick(4);
  if (what == 0) output->copy = !output->copy;
  if (what == 1) output->reg = pick(p->num_registers);
  if (what == 2) output->output = pick(d->plan.staged->graph->num_outputs);
  if (what == 3) --p->num_outputs;
}

static void change_channel(draft_t* d, jpp_program_t* p) {
  (void)p;
  if (!d->plan.num_channels) return;
  jpp_plan_channel_t* channel = &d->channels[pick(d->plan.num_channels)];
  uint32_t what = pick(4);
  if (what == 0) channel->slots = pick(3);
  if (what == 1) channel->src = pick(d->plan.ranks);
  if (what == 2) channel->messages = pick(9);
  if (what == 3) channel->max_bytes += 4;
}

static void change_binding(draft_t* d, jpp_program_t* p) {
  (void)p;
  uint32_t task = pick(d->plan.staged->num_tasks);
  uint32_t inputs = d->plan.staged->tasks[task].num_inputs;
  if (inputs && pick(4)) {
    ((uint32_t*)d->bindings[task].donated_to)[pick(inputs)] =
        pick(2) ? JPP_NONE : pick(d->plan.staged->tasks[task].num_outputs + 1);
  } else {
    d->bindings[task].runs += pick(3) - 1;
  }
}

static void change_peak(draft_t* d, jpp_program_t* p) {
  (void)d;
  p->peak_bytes += pick(2) ? 4 : -4;
}

static void change_host_peak(draft_t* d, jpp_program_t* p) {
  (void)d;
  p->peak_host_bytes += pick(2) || !p->peak_host_bytes ? 4 : -4;
}

// Changes the target of a move: then a run or a send reads a value in the wrong memory,
// or an output is left in it.
static void change_memory(draft_t* d, jpp_program_t* p) {
  (void)d;
  uint32_t first = pick(p->num_instrs);
  for (uint32_t i = 0; i < p->num_instrs; ++i) {
    jpp_instr_t* instr = instr_of(p, (first + i) % p->num_instrs);
    if (instr->kind != JPP_INSTR_MOVE) continue;
    instr->target = pick(JPP_MEMORY_COUNT + 1);
    return;
  }
}

typedef void (*mutation_t)(draft_t* draft, jpp_program_t* program);
static const mutation_t kMutations[] = {
    drop_instr,      repeat_instr,  swap_instrs,      swap_alike,
    change_register, change_value,  change_target,    change_counts,
    change_given,    change_output, change_channel,   change_microbatch,
    change_binding,  change_peak,   change_host_peak, change_memory,
};
enum { kMutationCount = sizeof(kMutations) / sizeof(*kMutations) };

static uint32_t g_refused, g_accepted;

static void try_mutation(const planned_t* planned, const uint64_t* expected,
                         const char* name) {
  draft_t draft = draft_create(planned->plan);
  uint32_t mutation = pick(kMutationCount), rank = pick(planned->ranks);
  if (draft.programs[rank].num_instrs) {
    kMutations[mutation](&draft, &draft.programs[rank]);
  }
  jpp_check_report_t* report = NULL;
  jpp_status_t* status = jpp_check_plan(&draft.plan, &report);
  if (status) {
    ++g_refused;
    assert_int_equal(jpp_status_code(status), JPP_PROGRAM_ERROR);
    assert_null(report);
  } else {
    ++g_accepted;
    outcome_t outcome = interpret_plan(&draft.plan, expected);
    if (outcome != OUTCOME_SAME) {
      fail_msg("%s, mutation %u on rank %u: accepted, outcome %d", name, mutation, rank,
               (int)outcome);
    }
  }
  jpp_status_free(status);
  jpp_check_report_destroy(report);
  draft_free(&draft);
}

static void mutate(const char* name, const plan_options_t* options, uint32_t times) {
  planned_t planned;
  ASSERT_OK(plan_file(name, options, &planned));
  uint64_t* expected = interpret_graph(planned.graph);
  assert_int_equal(interpret_plan(planned.plan, expected), OUTCOME_SAME);
  for (uint32_t i = 0; i < times; ++i) try_mutation(&planned, expected, name);
  free(expected);
  plan_free(&planned);
}

static void test_damaged_programs_are_refused_or_right(void** state) {
  (void)state;
  for (uint32_t i = 0; kGraphs[i]; ++i) mutate(kGraphs[i], NULL, 600);
  mutate("host", NULL, 3000);
  mutate("mlp4", &(plan_options_t){.schedule = "zb-h1"}, 600);
  mutate("interleaved", &(plan_options_t){.schedule = "dualpipe-v", .slots = 1}, 600);
  mutate("mlp4", &(plan_options_t){.schedule = "eager-1f1b", .slots = 1}, 600);
  print_message("# %u refused, %u accepted and right\n", g_refused, g_accepted);
  assert_true(g_refused > g_accepted * 3);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_damaged_programs_are_refused_or_right),
  };
  return cmocka_run_group_tests_name("check_mutations", tests, NULL, NULL);
}
