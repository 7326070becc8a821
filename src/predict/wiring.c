// Follows each rank's registers once to find what its instructions wait for.
#include "predict/wiring.h"

typedef struct counts {
  uint64_t runs, messages, needs;
} counts_t;

static counts_t count_instrs(const jpp_plan_t* plan) {
  counts_t counts = {0};
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    for (uint32_t i = 0; i < program->num_instrs; ++i) {
      const jpp_instr_t* instr = &program->instrs[i];
      counts.messages += instr->kind == JPP_INSTR_SEND;
      if (instr->kind != JPP_INSTR_RUN) continue;
      ++counts.runs;
      counts.needs += instr->num_args;
    }
  }
  return counts;
}

typedef struct walk {
  jpp_wiring_t* wiring;
  const jpp_program_t* program;
  uint32_t* makers;         // [registers] source of the value there; JPP_NONE: none
  uint32_t* first_message;  // [channels] the channel's messages follow one another
  uint32_t* sent;           // [channels]
  uint32_t* received;       // [channels]
  uint32_t num_needs;       // so far, of all ranks
  uint32_t next_run;
} walk_t;

static void wire_run(walk_t* walk, const jpp_instr_t* instr, jpp_wired_instr_t* wired) {
  jpp_wiring_t* wiring = walk->wiring;
  const uint32_t* operands = walk->program->operands + instr->first_operand;
  wired->number = walk->next_run++;
  wired->first_need = walk->num_needs;
  wiring->runs[wired->number] = (jpp_wired_run_t){.rank = walk->program->rank,
                                                  .task = instr->target,
                                                  .microbatch = instr->microbatch};
  for (uint32_t k = 0; k < instr->num_args; ++k) {
    uint32_t maker = walk->makers[operands[k]];
    if (maker == JPP_NONE || maker < wiring->num_runs) continue;
    wiring->needs[walk->num_needs++] = maker - wiring->num_runs;
  }
  wired->num_needs = walk->num_needs - wired->first_need;
  for (uint32_t k = 0; k < instr->num_results; ++k) {
    walk->makers[operands[instr->num_args + k]] = wired->number;
  }
}

static void wire_send(walk_t* walk, const jpp_instr_t* instr, jpp_wired_instr_t* wired) {
  jpp_wiring_t* wiring = walk->wiring;
  uint32_t operand = instr->first_operand, channel = instr->target;
  uint32_t source = walk->makers[walk->program->operands[operand]];
  wired->number = walk->first_message[channel] + walk->sent[channel]++;
  jpp_wired_message_t* message = &wiring->messages[wired->number];
  uint32_t value = walk->program->operand_values[instr->first_value];
  *message = (jpp_wired_message_t){.channel = channel,
                                   .source = source,
                                   .next_of_same = JPP_NONE,
                                   .bytes = (double)wiring->plan->value_bytes[value]};
  if (source == JPP_NONE) return;
  uint32_t* last = &wiring->first_made[source];
  while (*last != JPP_NONE) last = &wiring->messages[*last].next_of_same;
  *last = wired->number;
}

static void wire_program(walk_t* walk, jpp_wired_instr_t* instrs) {
  const jpp_program_t* program = walk->program;
  for (uint32_t i = 0; i < program->num_registers; ++i) walk->makers[i] = JPP_NONE;
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* instr = &program->instrs[i];
    instrs[i].kind = instr->kind;
    switch ((jpp_instr_kind_t)instr->kind) {
      case JPP_INSTR_RUN:
        wire_run(walk, instr, &instrs[i]);
        break;
      case JPP_INSTR_SEND:
        wire_send(walk, instr, &instrs[i]);
        break;
      case JPP_INSTR_RECV:
        instrs[i].number =
            walk->first_message[instr->target] + walk->received[instr->target]++;
        walk->makers[program->operands[instr->first_operand]] =
            walk->wiring->num_runs + instrs[i].number;
        break;
      case JPP_INSTR_MOVE:  // the time of the move itself is not predicted
        walk->makers[program->operands[instr->first_operand + 1]] =
            walk->makers[program->operands[instr->first_operand]];
        break;
      case JPP_INSTR_DELETE:
      case JPP_INSTR_KIND_COUNT:
        break;
    }
  }
}

static jpp_status_t* allocate_walk(const jpp_plan_t* plan, jpp_arena_t* arena,
                                   walk_t* walk) {
  uint32_t registers = 0, messages = 0;
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    uint32_t count = plan->programs[r].num_registers;
    if (count > registers) registers = count;
  }
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, registers, &walk->makers));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->num_channels, &walk->first_message));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->num_channels, &walk->sent));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->num_channels, &walk->received));
  for (uint32_t c = 0; c < plan->num_channels; ++c) {
    walk->first_message[c] = messages;
    messages += plan->channels[c].messages;
  }
  return NULL;
}

jpp_status_t* jpp__wiring_create(const jpp_plan_t* plan, jpp_arena_t* arena,
                                 jpp_wiring_t* out_wiring) {
  counts_t counts = count_instrs(plan);
  unsigned long long size =
      (unsigned long long)counts.runs + counts.messages + counts.needs;
  if (size >= JPP_NONE) {
    return jpp_status_make(JPP_UNSUPPORTED,
                           "prediction: expected runs, messages and arguments of a step "
                           "of less than %u together, found %llu",
                           JPP_NONE, size);
  }
  jpp_wiring_t wiring = {.plan = plan,
                         .num_runs = (uint32_t)counts.runs,
                         .num_messages = (uint32_t)counts.messages};
  size_t sources = counts.runs + counts.messages;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->ranks, &wiring.instrs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, counts.needs, &wiring.needs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, counts.runs, &wiring.runs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, counts.messages, &wiring.messages));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, sources, &wiring.first_made));
  for (size_t i = 0; i < sources; ++i) wiring.first_made[i] = JPP_NONE;
  walk_t walk = {.wiring = &wiring};
  JPP_RETURN_IF_ERROR(allocate_walk(plan, arena, &walk));
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    walk.program = &plan->programs[r];
    JPP_RETURN_IF_ERROR(
        JPP_ARENA_ARRAY(arena, walk.program->num_instrs, &wiring.instrs[r]));
    wire_program(&walk, wiring.instrs[r]);
  }
  *out_wiring = wiring;
  return NULL;
}
