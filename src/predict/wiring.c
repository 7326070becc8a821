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
      counts.messages += instr->kind == JPP_INSTR_SEND || instr->kind == JPP_INSTR_MOVE;
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
  uint32_t next_run, next_move;
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

// The message `number` takes the first operand of the instruction.
static void wire_message(walk_t* walk, const jpp_instr_t* instr, uint32_t number,
                         jpp_wired_message_t message) {
  jpp_wiring_t* wiring = walk->wiring;
  uint32_t value = walk->program->operand_values[instr->first_value];
  message.source = walk->makers[walk->program->operands[instr->first_operand]];
  message.next_of_same = JPP_NONE;
  message.bytes = (double)wiring->plan->value_bytes[value];
  wiring->messages[number] = message;
  if (message.source == JPP_NONE) return;
  uint32_t* last = &wiring->first_made[message.source];
  while (*last != JPP_NONE) last = &wiring->messages[*last].next_of_same;
  *last = number;
}

static void wire_send(walk_t* walk, const jpp_instr_t* instr, jpp_wired_instr_t* wired) {
  uint32_t id = instr->target;
  const jpp_plan_channel_t* channel = &walk->wiring->plan->channels[id];
  size_t link = (size_t)channel->src * walk->wiring->plan->ranks + channel->dst;
  wired->number = walk->first_message[id] + walk->sent[id]++;
  wire_message(walk, instr, wired->number,
               (jpp_wired_message_t){.channel = id, .rank = channel->dst, .link = link});
}

static void wire_move(walk_t* walk, const jpp_instr_t* instr, jpp_wired_instr_t* wired) {
  uint32_t ranks = walk->wiring->plan->ranks, rank = walk->program->rank;
  bool to_device = instr->target == JPP_MEMORY_DEVICE;
  size_t link = (size_t)ranks * ranks + (size_t)2 * rank + to_device;
  wired->number = walk->next_move++;
  wire_message(walk, instr, wired->number,
               (jpp_wired_message_t){.channel = JPP_NONE, .rank = rank, .link = link});
  walk->makers[walk->program->operands[instr->first_operand + 1]] =
      walk->wiring->num_runs + wired->number;
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
      case JPP_INSTR_MOVE:
        wire_move(walk, instr, &instrs[i]);
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
  walk->next_move = messages;
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
                         .num_messages = (uint32_t)counts.messages,
                         .num_links = (size_t)plan->ranks * (plan->ranks + 2)};
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
