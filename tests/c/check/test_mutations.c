// Damages programs at random: the checker must refuse each, unless it still computes the
// right results. Whether it visits repetitions makes no difference.
#include <stdio.h>
#include <stdlib.h>

#include "check/checker.h"
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

// Gives one instruction, which may be in a repetition, lists of its own.
static jpp_instr_t* separate_instr(jpp_program_t* p) {
  jpp_instr_t* instr = instr_of(p, pick(p->num_instrs));
  uint32_t count = instr->num_args + instr->num_results;
  assert_true(count <= DRAFT_ROOM);
  uint32_t* operands = (uint32_t*)p->operands;
  uint32_t* values = (uint32_t*)p->operand_values;
  memcpy(operands + p->num_operands, operands + instr->first_operand,
         count * sizeof(*operands));
  memcpy(values + p->num_operand_values, values + instr->first_value,
         count * sizeof(*values));
  instr->first_operand = p->num_operands;
  instr->first_value = p->num_operand_values;
  p->num_operands += count;
  p->num_operand_values += count;
  return instr;
}

static void change_one_register(draft_t* d, jpp_program_t* p) {
  (void)d;
  const jpp_instr_t* instr = separate_instr(p);
  uint32_t count = instr->num_args + instr->num_results;
  uint32_t* registers = (uint32_t*)p->operands + instr->first_operand;
  if (!count) return;
  uint32_t at = pick(count);
  // Another operand's register, or any.
  registers[at] =
      pick(2) ? registers[(at + 1) % count] : (registers[at] + 1) % p->num_registers;
}

static void change_one_value(draft_t* d, jpp_program_t* p) {
  const jpp_instr_t* instr = separate_instr(p);
  uint32_t count = instr->num_args + instr->num_results;
  if (!count) return;
  ((uint32_t*)p->operand_values)[instr->first_value + pick(count)] =
      pick(d->plan.staged->num_values + 1);
}

// Exchanges two operands of one instruction.
static void swap_registers(draft_t* d, jpp_program_t* p) {
  (void)d;
  const jpp_instr_t* instr = separate_instr(p);
  uint32_t count = instr->num_args + instr->num_results;
  uint32_t* registers = (uint32_t*)p->operands + instr->first_operand;
  if (!count) return;
  uint32_t a = pick(count), b = (a + 1 + pick(count - 1)) % count, kept = registers[a];
  registers[a] = registers[b];
  registers[b] = kept;
}

// Exchanges two registers from some instruction on, as another order of allocation would:
// right if neither holds a value there.
static void rename_registers(draft_t* d, jpp_program_t* p) {
  (void)d;
  if (!p->num_registers) return;
  uint32_t a = pick(p->num_registers), b = (a + 1) % p->num_registers;
  uint32_t room = p->num_operands + DRAFT_ROOM;
  for (uint32_t i = pick(p->num_instrs); i < p->num_instrs; ++i) {
    jpp_instr_t* instr = instr_of(p, i);
    uint32_t count = instr->num_args + instr->num_results;
    if (p->num_operands + count > room) return;
    uint32_t* registers = (uint32_t*)p->operands + p->num_operands;
    memcpy(registers, p->operands + instr->first_operand, count * sizeof(*registers));
    instr->first_operand = p->num_operands;
    p->num_operands += count;
    for (uint32_t k = 0; k < count; ++k) {
      uint32_t old = registers[k];
      registers[k] = old == a ? b : old == b ? a : old;
    }
  }
}

// Moves an instruction's microbatch to a neighbour, or its RUN to another microbatch.
static void shift_microbatch(draft_t* d, jpp_program_t* p) {
  (void)d;
  jpp_instr_t* instr = instr_of(p, pick(p->num_instrs));
  if (instr->microbatch != JPP_NONE) instr->microbatch += pick(5) - 2;
}

typedef void (*mutation_t)(draft_t* draft, jpp_program_t* program);
static const mutation_t kMutations[] = {
    drop_instr,          repeat_instr,     swap_instrs,      swap_alike,
    change_register,     change_value,     change_target,    change_counts,
    change_given,        change_output,    change_channel,   change_microbatch,
    change_binding,      change_peak,      change_host_peak, change_memory,
    change_one_register, change_one_value, swap_registers,   rename_registers,
    shift_microbatch,
};
enum { kMutationCount = sizeof(kMutations) / sizeof(*kMutations) };

static uint32_t g_refused, g_accepted, g_repeated;

// A walk that visits repetitions too finds the same.
static void check_whole_walk(const jpp_plan_t* plan, const jpp_status_t* found,
                             const jpp_check_report_t* report) {
  jpp_check_report_t* whole = NULL;
  uint64_t repeated = 0;
  jpp_status_t* status = jpp__check_plan(plan, true, &repeated, &whole);
  assert_int_equal(repeated, 0);
  assert_int_equal(jpp_status_code(status), jpp_status_code(found));
  if (status) {
    assert_string_equal(jpp_status_message(status), jpp_status_message(found));
  } else {
    char *text = NULL, *expected = NULL;
    ASSERT_OK(jpp_check_report_print(report, &text));
    ASSERT_OK(jpp_check_report_print(whole, &expected));
    assert_string_equal(text, expected);
    jpp_text_free(text);
    jpp_text_free(expected);
  }
  jpp_status_free(status);
  jpp_check_report_destroy(whole);
}

static void try_mutation(const planned_t* planned, const uint64_t* expected,
                         const char* name) {
  draft_t draft = draft_create(planned->plan);
  uint32_t mutation = pick(kMutationCount), rank = pick(planned->ranks);
  if (draft.programs[rank].num_instrs) {
    kMutations[mutation](&draft, &draft.programs[rank]);
  }
  jpp_check_report_t* report = NULL;
  uint64_t repeated = 0;
  jpp_status_t* status = jpp__check_plan(&draft.plan, false, &repeated, &report);
  check_whole_walk(&draft.plan, status, report);
  g_repeated += repeated > 0;
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
  assert_true(g_refused > g_accepted * 2);
}

// With so many microbatches, mutations are in repetitions, or between others.
static void test_damage_in_repetitions_is_found(void** state) {
  (void)state;
  static const struct {
    const char *graph, *schedule;
    uint32_t microbatches;
  } kLong[] = {
      {"mlp2", "1f1b", 40},      {"mlp4", "1f1b", 24},
      {"mlp4", "zb-h1", 24},     {"mlp4", "eager-1f1b", 24},
      {"tied", "1f1b", 30},      {"host", "1f1b", 20},
      {"skip", "1f1b", 24},      {"dropout", "1f1b", 17},
      {"interleaved", NULL, 32}, {"clip", "gpipe", 12},
      {"two_loops", "1f1b", 16}, {"aux", "1f1b", 24},
      {"frozen", "1f1b", 24},    {"interleaved", "zb-v", 24},
      {"forward", NULL, 24},     {"interleaved", "dualpipe-v", 24},
  };
  g_refused = g_accepted = g_repeated = 0;
  for (size_t i = 0; i < sizeof(kLong) / sizeof(*kLong); ++i) {
    planned_t planned;
    plan_options_t options = {.schedule = kLong[i].schedule,
                              .microbatches = kLong[i].microbatches};
    ASSERT_OK(plan_file(kLong[i].graph, &options, &planned));
    uint64_t* expected = interpret_graph(planned.graph);
    for (uint32_t k = 0; k < 700; ++k) try_mutation(&planned, expected, kLong[i].graph);
    free(expected);
    plan_free(&planned);
  }
  print_message("# %u refused, %u accepted and right, %u with repetitions\n", g_refused,
                g_accepted, g_repeated);
  assert_true(g_refused > g_accepted * 2);
  assert_true(g_repeated * 3 > g_refused + g_accepted);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_damaged_programs_are_refused_or_right),
      cmocka_unit_test(test_damage_in_repetitions_is_found),
  };
  return cmocka_run_group_tests_name("check_mutations", tests, NULL, NULL);
}
