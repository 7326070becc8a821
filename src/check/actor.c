// Walks one actor's instructions and tracks what each register holds, in which memory,
// who owns it and how many bytes are live. The plan is rejected at the first instruction
// that reads, overwrites or frees what it may not.
#include <stdio.h>
#include <string.h>

#include "check/checker.h"

// --- Contents -------------------------------------------------------------------------

const jpp_accumulator_t* jpp__check_accumulator(const jpp_checker_t* c, uint32_t value) {
  if (value >= c->staged->num_values) return NULL;
  uint32_t index = c->accumulator_of[value];
  return index == JPP_NONE ? NULL : &c->staged->accumulators[index];
}

bool jpp__check_is_index(const jpp_checker_t* c, uint32_t value) {
  uint32_t loop = c->staged->values[value].loop;
  return loop != JPP_NONE && c->staged->graph->loops[loop].index == value;
}

const jpp_accumulator_t* jpp__check_complete(const jpp_checker_t* c,
                                             const jpp_content_t* content) {
  const jpp_accumulator_t* acc = jpp__check_accumulator(c, content->value);
  if (!acc || content->value != acc->next) return NULL;
  uint32_t microbatches = c->staged->graph->loops[acc->loop].microbatches;
  return content->summed == microbatches ? acc : NULL;
}

// Sums depend on the order in which microbatches are added; other reductions do not.
static bool serves_as_state(const jpp_checker_t* c, const jpp_content_t* content,
                            const jpp_accumulator_t* acc, uint32_t microbatch) {
  uint8_t reduce = c->staged->graph->loops[acc->loop].results[acc->result].reduce;
  bool begins = content->value == acc->init, goes_on = content->value == acc->next;
  bool in_order = reduce != JPP_REDUCE_ADD || content->summed == microbatch;
  return (begins || goes_on) && in_order;
}

bool jpp__check_serves(const jpp_checker_t* c, const jpp_content_t* content,
                       uint32_t value, uint32_t microbatch) {
  if (content->owner == JPP_OWNER_CONSTANT) {
    return jpp__check_is_index(c, value) && content->microbatch == microbatch;
  }
  if (content->value == JPP_NONE) return false;
  const jpp_accumulator_t* acc = jpp__check_accumulator(c, value);
  if (acc && value == acc->state) return serves_as_state(c, content, acc, microbatch);
  if (acc && value == acc->final && jpp__check_complete(c, content) == acc) return true;
  bool every = c->staged->scopes[value] == JPP_SCOPE_MICROBATCH;
  return content->value == value && (!every || content->microbatch == microbatch);
}

// --- Registers and bytes --------------------------------------------------------------

static uint64_t content_bytes(const jpp_walk_t* w, const jpp_content_t* content) {
  return w->c->plan->value_bytes[content->value];
}

// Records the live bytes as a point of the curve, and the peak.
static void note_live(jpp_walk_t* w, uint32_t point) {
  uint64_t device = w->live[JPP_MEMORY_DEVICE], host = w->live[JPP_MEMORY_PINNED_HOST];
  if (w->c->curve) {
    memcpy(w->c->curve[point].bytes, w->live_of, sizeof(w->live_of));
    w->c->curve[point].host_bytes = host;
  }
  if (host > w->actor->peak_host_bytes) w->actor->peak_host_bytes = host;
  if (device <= w->actor->peak_bytes) return;
  w->actor->peak_bytes = device;
  w->actor->peak_instr = w->at;
  memcpy(w->actor->bytes_at_peak, w->live_of, sizeof(w->live_of));
}

// If the total does not overflow, none of its parts does, so subtracting later is exact.
static jpp_status_t* add_live(jpp_walk_t* w, uint8_t memory, uint8_t kind,
                              uint64_t bytes) {
  w->live[memory] = jpp__bytes_add(w->live[memory], bytes);
  if (memory == JPP_MEMORY_DEVICE) {
    w->live_of[kind] = jpp__bytes_add(w->live_of[kind], bytes);
  }
  if (jpp__bytes_fit(w->live[memory])) return NULL;
  return jpp__walk_fail(w, "2^63 bytes or more are live; no device has that many");
}

static jpp_status_t* overwrite_error(const jpp_walk_t* w, uint32_t reg,
                                     jpp_content_t content) {
  char old[JPP_CHECK_TEXT_SIZE], text[JPP_CHECK_TEXT_SIZE];
  return jpp__walk_fail(
      w, "writes %s to register %u, which still holds %s; delete that first",
      jpp__check_content_text(w->c, &content, text), reg,
      jpp__check_content_text(w->c, &w->registers[reg], old));
}

jpp_status_t* jpp__walk_define(jpp_walk_t* w, uint32_t reg, jpp_content_t content) {
  jpp_content_t* at = &w->registers[reg];
  if (at->value != JPP_NONE) return overwrite_error(w, reg, content);
  *at = content;
  return add_live(w, content.memory, content.kind,
                  w->c->plan->value_bytes[content.value]);
}

void jpp__walk_drop(jpp_walk_t* w, uint32_t reg) {
  jpp_content_t* at = &w->registers[reg];
  w->live[at->memory] -= content_bytes(w, at);
  if (at->memory == JPP_MEMORY_DEVICE) w->live_of[at->kind] -= content_bytes(w, at);
  *at = (jpp_content_t){.value = JPP_NONE, .microbatch = JPP_NONE};
}

// --- Before the first instruction -----------------------------------------------------

static jpp_status_t* check_register(const jpp_walk_t* w, uint32_t reg) {
  if (reg < w->program->num_registers) return NULL;
  return jpp__walk_fail(w, "register %u: expected one below %u", reg,
                        w->program->num_registers);
}

static jpp_status_t* take_input(jpp_walk_t* w, const jpp_program_input_t* input,
                                uint8_t* seen) {
  const jpp_graph_t* graph = w->c->staged->graph;
  JPP_RETURN_IF_ERROR(check_register(w, input->reg));
  uint32_t arg = input->arg;
  bool needed = arg < graph->num_args &&
                jpp_rank_set_has(w->c->staged->args[arg].ranks, w->program->rank);
  if (!needed || seen[arg]) {
    return jpp__walk_fail(w, "argument %u is an input, but %s", arg,
                          needed ? "is one already" : "belongs to other ranks");
  }
  if (input->owned && !graph->args[arg].donated) {
    return jpp__walk_fail(w, "argument %u is owned, but the caller does not donate it",
                          arg);
  }
  seen[arg] = 1;
  jpp_content_t content = {
      .value = graph->args[arg].value,
      .microbatch = JPP_NONE,
      .owner = input->owned ? JPP_OWNER_PROGRAM : JPP_OWNER_CALLER,
      .kind = w->c->kinds[graph->args[arg].value],
      .memory = (uint8_t)graph->values[graph->args[arg].value].type.memory,
  };
  return jpp__walk_define(w, input->reg, content);
}

static jpp_status_t* take_inputs(jpp_walk_t* w) {
  uint8_t* seen = NULL;
  uint32_t args = w->c->staged->graph->num_args;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&w->c->scratch, args, &seen));
  for (uint32_t i = 0; i < w->program->num_inputs; ++i) {
    JPP_RETURN_IF_ERROR(take_input(w, &w->program->inputs[i], seen));
  }
  for (uint32_t i = 0; i < args; ++i) {
    if (seen[i]) continue;
    if (!jpp_rank_set_has(w->c->staged->args[i].ranks, w->program->rank)) continue;
    return jpp__walk_fail(w, "argument %u must be an input here, but is not one", i);
  }
  return NULL;
}

static jpp_status_t* take_constants(jpp_walk_t* w) {
  const jpp_graph_t* graph = w->c->staged->graph;
  for (uint32_t i = 0; i < w->program->num_constants; ++i) {
    const jpp_program_constant_t* constant = &w->program->constants[i];
    JPP_RETURN_IF_ERROR(check_register(w, constant->reg));
    if (!graph->num_loops) return jpp__walk_fail(w, "a constant without a loop");
    // All loop indices have the same type, so the first loop's index serves for all.
    jpp_content_t content = {
        .value = graph->loops[0].index,
        .microbatch = constant->microbatch,
        .owner = JPP_OWNER_CONSTANT,
        .kind = JPP_BYTES_CONSTANTS,
    };
    JPP_RETURN_IF_ERROR(jpp__walk_define(w, constant->reg, content));
  }
  return NULL;
}

static jpp_status_t* begin_walk(jpp_walk_t* w) {
  for (uint32_t i = 0; i < w->program->num_registers; ++i) {
    w->registers[i] = (jpp_content_t){.value = JPP_NONE, .microbatch = JPP_NONE};
    w->reads[i] = (jpp_last_read_t){.instr = JPP_NONE};
    w->c->handed_out[i] = false;
  }
  uint64_t reserved = 0;
  for (uint32_t i = 0; i < w->c->plan->num_channels; ++i) {
    const jpp_plan_channel_t* channel = &w->c->plan->channels[i];
    if (channel->dst != w->program->rank) continue;
    reserved =
        jpp__bytes_add(reserved, jpp__bytes_multiply(channel->slots, channel->max_bytes));
  }
  if (reserved != w->program->reserved_bytes) {
    return jpp__walk_fail(w, "receive slots take %llu bytes, the plan says %llu",
                          (unsigned long long)reserved,
                          (unsigned long long)w->program->reserved_bytes);
  }
  JPP_RETURN_IF_ERROR(add_live(w, JPP_MEMORY_DEVICE, JPP_BYTES_RECEIVE_SLOTS, reserved));
  JPP_RETURN_IF_ERROR(take_inputs(w));
  JPP_RETURN_IF_ERROR(take_constants(w));
  note_live(w, 0);
  return NULL;
}

// --- Instructions ---------------------------------------------------------------------

jpp_status_t* jpp__walk_check_memory(const jpp_walk_t* w, const jpp_content_t* content,
                                     jpp_memory_t memory, const char* what) {
  if (content->memory == memory) return NULL;
  char text[JPP_CHECK_TEXT_SIZE];
  return jpp__walk_fail(w, "%s: expected %s in %s, found it in %s", what,
                        jpp__check_content_text(w->c, content, text),
                        jpp_memory_name(memory),
                        jpp_memory_name((jpp_memory_t)content->memory));
}

static jpp_status_t* check_operands(const jpp_walk_t* w) {
  const jpp_instr_t* instr = w->instr;
  const jpp_program_t* program = w->program;
  uint64_t count = (uint64_t)instr->num_args + instr->num_results;
  uint64_t end = instr->first_operand + count, values_end = instr->first_value + count;
  if (end > program->num_operands) {
    return jpp__walk_fail(w, "operands end at %llu; the program has %u",
                          (unsigned long long)end, program->num_operands);
  }
  if (values_end > program->num_operand_values) {
    return jpp__walk_fail(w, "values of operands end at %llu; the program has %u",
                          (unsigned long long)values_end, program->num_operand_values);
  }
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t reg = program->operands[instr->first_operand + i];
    if (reg >= program->num_registers) return check_register(w, reg);
  }
  return NULL;
}

// Checks the value in an operand's list, which may be any number.
static jpp_status_t* check_value(const jpp_walk_t* w, uint32_t value) {
  if (value < w->c->staged->num_values) return NULL;
  return jpp__walk_fail(w, "an operand is value %%%u; there are %u values", value,
                        w->c->staged->num_values);
}

// Checks that the register holds the value that the list names.
static jpp_status_t* check_arg(const jpp_walk_t* w, uint32_t index) {
  uint32_t reg = w->program->operands[w->instr->first_operand + index];
  uint32_t value = w->program->operand_values[w->instr->first_value + index];
  const jpp_content_t* content = &w->registers[reg];
  if (content->value == value && value != JPP_NONE) return NULL;
  JPP_RETURN_IF_ERROR(check_value(w, value));
  if (content->owner == JPP_OWNER_CONSTANT && jpp__check_is_index(w->c, value)) {
    return NULL;
  }
  char text[JPP_CHECK_TEXT_SIZE];
  return jpp__walk_fail(w, "operand %u: register %u should hold %%%u, and holds %s",
                        index, reg, value, jpp__check_content_text(w->c, content, text));
}

static jpp_status_t* check_args(const jpp_walk_t* w) {
  const uint32_t* registers = w->program->operands + w->instr->first_operand;
  const uint32_t* values = w->program->operand_values + w->instr->first_value;
  for (uint32_t i = 0; i < w->instr->num_args; ++i) {
    if (w->registers[registers[i]].value == values[i]) continue;
    JPP_RETURN_IF_ERROR(check_arg(w, i));
  }
  return NULL;
}

static jpp_status_t* check_channel(const jpp_walk_t* w, uint32_t num_args,
                                   uint32_t num_results) {
  if (w->instr->target >= w->c->plan->num_channels) {
    return jpp__walk_fail(w, "channel %u: expected one below %u", w->instr->target,
                          w->c->plan->num_channels);
  }
  const jpp_plan_channel_t* channel = &w->c->plan->channels[w->instr->target];
  uint32_t end = num_args ? channel->src : channel->dst;
  if (end != w->program->rank) {
    return jpp__walk_fail(w, "channel %u goes from rank %u to rank %u", w->instr->target,
                          channel->src, channel->dst);
  }
  if (w->instr->num_args == num_args && w->instr->num_results == num_results) return NULL;
  return jpp__walk_fail(w, "expected one operand, found %u args and %u results",
                        w->instr->num_args, w->instr->num_results);
}

jpp_status_t* jpp__walk_count_transfer(jpp_walk_t* w, uint32_t value) {
  jpp_channel_ends_t* ends = &w->c->ends[w->instr->target];
  jpp_end_t end = {.instr = w->at, .value = value, .microbatch = w->instr->microbatch};
  if (w->instr->kind == JPP_INSTR_RECV) {
    ++w->actor->recvs;
    return JPP_VEC_PUSH(&ends->recvs, end);
  }
  jpp_check_channel_t* channel = &w->c->channels[w->instr->target];
  ++w->actor->sends;
  ++channel->messages;
  channel->bytes = jpp__bytes_add(channel->bytes, w->c->plan->value_bytes[value]);
  return JPP_VEC_PUSH(&ends->sends, end);
}

static jpp_status_t* check_send(jpp_walk_t* w) {
  char text[JPP_CHECK_TEXT_SIZE];
  JPP_RETURN_IF_ERROR(check_channel(w, 1, 0));
  JPP_RETURN_IF_ERROR(check_arg(w, 0));
  const jpp_content_t* content =
      &w->registers[w->program->operands[w->instr->first_operand]];
  JPP_RETURN_IF_ERROR(jpp__walk_check_memory(w, content, JPP_MEMORY_DEVICE, "operand 0"));
  const jpp_accumulator_t* complete = jpp__check_complete(w->c, content);
  uint32_t value = complete ? complete->final : content->value;
  bool partial = w->c->staged->scopes[value] == JPP_SCOPE_STATE;
  if (partial || content->owner == JPP_OWNER_CONSTANT ||
      w->instr->microbatch != content->microbatch) {
    return jpp__walk_fail(w,
                          "sends %s; expected a value that is complete, under its "
                          "own microbatch",
                          jpp__check_content_text(w->c, content, text));
  }
  return jpp__walk_count_transfer(w, value);
}

static jpp_status_t* check_recv(jpp_walk_t* w) {
  JPP_RETURN_IF_ERROR(check_channel(w, 0, 1));
  uint32_t value = w->program->operand_values[w->instr->first_value];
  JPP_RETURN_IF_ERROR(check_value(w, value));
  bool every = w->c->staged->scopes[value] == JPP_SCOPE_MICROBATCH;
  if (every != (w->instr->microbatch != JPP_NONE)) {
    return jpp__walk_fail(w, every ? "expected the microbatch of the value"
                                   : "the value has one instance a step, no microbatch");
  }
  jpp_content_t content = {.value = value, .microbatch = w->instr->microbatch};
  content.kind = w->c->kinds[value];
  JPP_RETURN_IF_ERROR(jpp__walk_count_transfer(w, value));
  return jpp__walk_define(w, w->program->operands[w->instr->first_operand], content);
}

static jpp_status_t* check_delete(jpp_walk_t* w) {
  char text[JPP_CHECK_TEXT_SIZE];
  if (w->instr->num_results) {
    return jpp__walk_fail(w, "has %u results; expected none", w->instr->num_results);
  }
  for (uint32_t i = 0; i < w->instr->num_args; ++i) {
    JPP_RETURN_IF_ERROR(check_arg(w, i));
    uint32_t reg = w->program->operands[w->instr->first_operand + i];
    const jpp_content_t* content = &w->registers[reg];
    if (content->owner != JPP_OWNER_PROGRAM) {
      return jpp__walk_fail(w, "register %u holds %s, which the program does not own",
                            reg, jpp__check_content_text(w->c, content, text));
    }
    jpp__walk_drop(w, reg);
  }
  return NULL;
}

// A move copies a value, but no sum to which a loop still adds.
static jpp_status_t* check_move(jpp_walk_t* w) {
  char text[JPP_CHECK_TEXT_SIZE];
  const jpp_instr_t* instr = w->instr;
  if (instr->num_args != 1 || instr->num_results != 1) {
    return jpp__walk_fail(w, "expected one arg and one result, found %u and %u",
                          instr->num_args, instr->num_results);
  }
  JPP_RETURN_IF_ERROR(check_arg(w, 0));
  const uint32_t* registers = w->program->operands + instr->first_operand;
  const uint32_t* values = w->program->operand_values + instr->first_value;
  jpp_content_t content = w->registers[registers[0]];
  uint32_t own = JPP_MEMORY_COUNT;
  if (content.value != JPP_NONE) own = w->c->staged->values[content.value].type.memory;
  bool known = instr->target < JPP_MEMORY_COUNT && instr->target != content.memory &&
               (instr->target == JPP_MEMORY_DEVICE || instr->target == own);
  if (!known) {
    return jpp__walk_fail(
        w,
        "memory %u is not a target: expected device memory or the value's, "
        "other than the one that holds %s",
        instr->target, jpp__check_content_text(w->c, &content, text));
  }
  if (content.owner == JPP_OWNER_CONSTANT || content.microbatch != instr->microbatch ||
      w->c->staged->scopes[content.value] == JPP_SCOPE_STATE || values[1] != values[0]) {
    return jpp__walk_fail(w,
                          "moves %s to a register of %%%u; expected a value that is "
                          "complete, under its own microbatch",
                          jpp__check_content_text(w->c, &content, text), values[1]);
  }
  content.owner = JPP_OWNER_PROGRAM;
  content.memory = (uint8_t)instr->target;
  return jpp__walk_define(w, registers[1], content);
}

static jpp_status_t* check_instr(jpp_walk_t* w) {
  JPP_RETURN_IF_ERROR(check_operands(w));
  switch ((jpp_instr_kind_t)w->instr->kind) {
    case JPP_INSTR_RUN:
      ++w->actor->runs;
      JPP_RETURN_IF_ERROR(check_args(w));
      return jpp__check_run(w);
    case JPP_INSTR_SEND:
      return check_send(w);
    case JPP_INSTR_RECV:
      return check_recv(w);
    case JPP_INSTR_DELETE:
      ++w->actor->deletes;
      return check_delete(w);
    case JPP_INSTR_MOVE:
      ++w->actor->moves;
      return check_move(w);
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return jpp__walk_fail(w, "kind %u is not RUN, SEND, RECV, DELETE or MOVE",
                        w->instr->kind);
}

// --- After the last instruction ------------------------------------------------------

static jpp_status_t* check_output(const jpp_walk_t* w, const jpp_program_output_t* output,
                                  uint8_t* seen, bool* handed_out) {
  char text[JPP_CHECK_TEXT_SIZE];
  const jpp_staged_t* staged = w->c->staged;
  JPP_RETURN_IF_ERROR(check_register(w, output->reg));
  bool here = output->output < staged->graph->num_outputs &&
              jpp_rank_set_has(staged->outputs[output->output].ranks, w->program->rank);
  if (!here || seen[output->output]++) {
    return jpp__walk_fail(w, "output %u is left here, but %s", output->output,
                          here ? "was already" : "belongs to other ranks");
  }
  const jpp_content_t* content = &w->registers[output->reg];
  uint32_t value = staged->outputs[output->output].value;
  if (!jpp__check_serves(w->c, content, value, JPP_NONE)) {
    return jpp__walk_fail(w, "output %u: expected %%%u in register %u, found %s",
                          output->output, value, output->reg,
                          jpp__check_content_text(w->c, content, text));
  }
  snprintf(text, sizeof(text), "output %u", output->output);
  JPP_RETURN_IF_ERROR(
      jpp__walk_check_memory(w, content, staged->values[value].type.memory, text));
  bool taken = content->owner != JPP_OWNER_PROGRAM || handed_out[output->reg];
  if (!output->copy && taken) {
    return jpp__walk_fail(w,
                          "output %u returns register %u, which the program does not own",
                          output->output, output->reg);
  }
  if (!output->copy) handed_out[output->reg] = true;
  return NULL;
}

static jpp_status_t* check_outputs(const jpp_walk_t* w, bool* handed_out) {
  uint8_t* seen = NULL;
  const jpp_staged_t* staged = w->c->staged;
  uint32_t outputs = staged->graph->num_outputs;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&w->c->scratch, outputs, &seen));
  for (uint32_t i = 0; i < w->program->num_outputs; ++i) {
    JPP_RETURN_IF_ERROR(check_output(w, &w->program->outputs[i], seen, handed_out));
  }
  for (uint32_t i = 0; i < outputs; ++i) {
    if (seen[i]) continue;
    if (!jpp_rank_set_has(staged->outputs[i].ranks, w->program->rank)) continue;
    return jpp__walk_fail(w, "output %u must be left on this rank, but is not", i);
  }
  return NULL;
}

// Adds the memory of outputs that are copies.
static jpp_status_t* add_copies(jpp_walk_t* w) {
  const jpp_staged_t* staged = w->c->staged;
  for (uint32_t i = 0; i < w->program->num_outputs; ++i) {
    const jpp_program_output_t* output = &w->program->outputs[i];
    if (!output->copy) continue;
    uint32_t value = staged->outputs[output->output].value;
    JPP_RETURN_IF_ERROR(add_live(w, staged->values[value].type.memory, w->c->kinds[value],
                                 w->c->plan->value_bytes[value]));
  }
  note_live(w, w->program->num_instrs);
  return NULL;
}

static jpp_status_t* check_nothing_left(const jpp_walk_t* w, const bool* handed_out) {
  char text[JPP_CHECK_TEXT_SIZE];
  for (uint32_t i = 0; i < w->program->num_registers; ++i) {
    const jpp_content_t* content = &w->registers[i];
    if (content->value == JPP_NONE || content->owner != JPP_OWNER_PROGRAM) continue;
    if (handed_out[i]) continue;
    return jpp__walk_fail(w, "register %u still holds %s at the end; it is not an output",
                          i, jpp__check_content_text(w->c, content, text));
  }
  return NULL;
}

jpp_status_t* jpp__check_actor(jpp_checker_t* c, uint32_t rank) {
  const jpp_program_t* program = &c->plan->programs[rank];
  jpp_walk_t walk = {.c = c,
                     .program = program,
                     .actor = &c->actors[rank],
                     .registers = c->registers,
                     .reads = c->reads,
                     .began = JPP_NONE};
  if (program->rank != rank) {
    return jpp__walk_fail(&walk, "is number %u in the plan", rank);
  }
  JPP_RETURN_IF_ERROR(begin_walk(&walk));
  jpp__walk_find_period(&walk);
  for (; walk.at < program->num_instrs; ++walk.at) {
    if (walk.at == walk.period.next) JPP_RETURN_IF_ERROR(jpp__walk_repeat(&walk));
    if (walk.at == program->num_instrs) break;
    walk.instr = &program->instrs[walk.at];
    JPP_RETURN_IF_ERROR(check_instr(&walk));
    note_live(&walk, walk.at + 1);
  }
  walk.instr = NULL;
  JPP_RETURN_IF_ERROR(check_outputs(&walk, c->handed_out));
  JPP_RETURN_IF_ERROR(add_copies(&walk));
  JPP_RETURN_IF_ERROR(check_nothing_left(&walk, c->handed_out));
  if (walk.actor->peak_host_bytes != program->peak_host_bytes) {
    return jpp__walk_fail(&walk, "peak of %llu bytes in pinned_host; the plan says %llu",
                          (unsigned long long)walk.actor->peak_host_bytes,
                          (unsigned long long)program->peak_host_bytes);
  }
  if (walk.actor->peak_bytes == program->peak_bytes) return NULL;
  return jpp__walk_fail(
      &walk, "peak of %llu bytes at instruction %u; the plan says %llu at %u",
      (unsigned long long)walk.actor->peak_bytes, walk.actor->peak_instr,
      (unsigned long long)program->peak_bytes, program->peak_instr);
}
