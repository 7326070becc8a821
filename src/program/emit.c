// Emits instructions over virtual registers, a new one for each definition, by walking
// the tasks in the order of order.c. A value is sent when its task ends and received
// right before its first use.
#include "program/builder.h"
#include "task/ids.h"

static jpp_status_t* set_definition(jpp_program_builder_t* b, uint32_t rank,
                                    uint32_t value, uint32_t microbatch, uint32_t id) {
  jpp_instance_t* instance = jpp__program_instance(b, rank, value, microbatch);
  if (!instance) {
    return jpp_status_make(JPP_INTERNAL_ERROR, "rank %u has no site of value %%%u", rank,
                           value);
  }
  instance->definition = id;
  return NULL;
}

static jpp_status_t* define_value(jpp_program_builder_t* b, uint32_t rank, uint32_t value,
                                  uint32_t microbatch, uint32_t* out_virtual) {
  jpp_actor_draft_t* actor = &b->actors[rank];
  *out_virtual = (uint32_t)actor->virtuals.count;
  jpp_virtual_t made = {.value = value, .last_use = JPP_NONE};
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&actor->virtuals, made));
  return set_definition(b, rank, value, microbatch, *out_virtual);
}

// The virtual register of a value, or JPP_NONE.
static uint32_t find_register(const jpp_program_builder_t* b, uint32_t rank,
                              uint32_t value, uint32_t microbatch) {
  const jpp_instance_t* found = jpp__program_instance(b, rank, value, microbatch);
  return found ? found->definition : JPP_NONE;
}

// --- What is there before the first instruction ---------------------------------------

static jpp_status_t* define_args(jpp_program_builder_t* b) {
  const jpp_graph_t* graph = b->staged->graph;
  for (uint32_t a = 0; a < graph->num_args; ++a) {
    for (uint32_t r = 0; r < b->staged->ranks; ++r) {
      if (!jpp_rank_set_has(b->staged->args[a].ranks, r)) continue;
      uint32_t id = 0;
      JPP_RETURN_IF_ERROR(define_value(b, r, graph->args[a].value, JPP_NONE, &id));
      b->actors[r].virtuals.data[id].borrowed = !graph->args[a].donated;
      jpp_program_input_t input = {.reg = id, .arg = a, .owned = graph->args[a].donated};
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&b->actors[r].inputs, input));
    }
  }
  return NULL;
}

static bool is_loop_index(const jpp_program_builder_t* b, uint32_t value) {
  uint32_t loop = b->staged->values[value].loop;
  return loop != JPP_NONE && b->staged->graph->loops[loop].index == value;
}

// --- Instructions ---------------------------------------------------------------------

static jpp_status_t* push_instr(jpp_actor_draft_t* actor, jpp_instr_t instr,
                                const uint32_t* operand) {
  instr.first_operand = (uint32_t)actor->operands.count;
  if (operand) {
    if (instr.num_args) {
      actor->virtuals.data[*operand].last_use = (uint32_t)actor->instrs.count;
    }
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&actor->operands, *operand));
  }
  return JPP_VEC_PUSH(&actor->instrs, instr);
}

static jpp_status_t* channel_between(jpp_program_builder_t* b, uint32_t src, uint32_t dst,
                                     uint32_t* out_channel) {
  uint32_t* at = &b->channel_at[src * b->staged->ranks + dst];
  if (*at == JPP_NONE) {
    jpp_channel_draft_t draft = {.channel = {.src = src, .dst = dst}};
    draft.channel.slots = b->options->channel_slots ? b->options->channel_slots : 2;
    uint32_t id = (uint32_t)b->channels.count;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&b->channels, draft));
    *at = id;
  }
  *out_channel = *at;
  return NULL;
}

// A channel gets as many slots as it ever has messages under way in the order of these
// lists, so in this order no send waits. Whether a network of queues blocks does not
// depend on the order of execution, so no other order can deadlock either.
static jpp_status_t* send_value(jpp_program_builder_t* b, uint32_t value,
                                uint32_t microbatch, uint32_t src, uint32_t dst) {
  uint32_t id = 0;
  JPP_RETURN_IF_ERROR(channel_between(b, src, dst, &id));
  jpp_channel_draft_t* draft = &b->channels.data[id];
  jpp_message_draft_t message = {.value = value, .microbatch = microbatch};
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&draft->messages, message));
  jpp_plan_channel_t* channel = &draft->channel;
  ++channel->messages;
  uint32_t under_way = (uint32_t)(draft->messages.count - draft->received);
  if (under_way > channel->slots) channel->slots = under_way;
  if (b->value_bytes[value] > channel->max_bytes) {
    channel->max_bytes = b->value_bytes[value];
  }
  jpp__program_instance(b, dst, value, microbatch)->coming = id;
  jpp_instr_t instr = {
      .kind = JPP_INSTR_SEND, .target = id, .microbatch = microbatch, .num_args = 1};
  uint32_t sent = find_register(b, src, value, microbatch);
  return push_instr(&b->actors[src], instr, &sent);
}

static jpp_status_t* receive_next(jpp_program_builder_t* b, uint32_t id) {
  jpp_channel_draft_t* draft = &b->channels.data[id];
  jpp_message_draft_t message = draft->messages.data[draft->received++];
  uint32_t dst = draft->channel.dst, received = 0;
  JPP_RETURN_IF_ERROR(define_value(b, dst, message.value, message.microbatch, &received));
  jpp_instr_t instr = {.kind = JPP_INSTR_RECV,
                       .target = id,
                       .microbatch = message.microbatch,
                       .num_results = 1};
  return push_instr(&b->actors[dst], instr, &received);
}

// A value is received right before its first use, together with the earlier messages of
// its channel: until then it waits in the channel's slots.
static jpp_status_t* receive_value(jpp_program_builder_t* b, uint32_t rank,
                                   uint32_t value, uint32_t microbatch) {
  const jpp_instance_t* instance = jpp__program_instance(b, rank, value, microbatch);
  if (!instance || instance->coming == JPP_NONE) return NULL;
  uint32_t id = instance->coming;
  while (instance->definition == JPP_NONE) {
    if (b->channels.data[id].received == b->channels.data[id].messages.count) break;
    JPP_RETURN_IF_ERROR(receive_next(b, id));
  }
  return NULL;
}

static jpp_status_t* receive_rest(jpp_program_builder_t* b) {
  for (uint32_t id = 0; id < b->channels.count; ++id) {
    while (b->channels.data[id].received < b->channels.data[id].messages.count) {
      JPP_RETURN_IF_ERROR(receive_next(b, id));
    }
  }
  return NULL;
}

// Sends a value that has just been made to every rank that takes it and does not make it.
static jpp_status_t* send_to_takers(jpp_program_builder_t* b, uint32_t value,
                                    uint32_t microbatch, uint32_t rank) {
  if (jpp__program_source(b, value) != rank) return NULL;
  for (uint32_t i = b->first_site[value]; i < b->first_site[value + 1]; ++i) {
    const jpp_site_t* site = &b->sites[i];
    if (!site->takes || site->makes) continue;
    JPP_RETURN_IF_ERROR(send_value(b, value, microbatch, rank, site->rank));
  }
  return NULL;
}

static jpp_status_t* missing_input(const jpp_program_builder_t* b, const jpp_task_t* task,
                                   uint32_t microbatch, uint32_t value) {
  uint32_t op = b->staged->values[value].producer;
  const char* where = op == JPP_NONE ? NULL : b->staged->ops[op].where;
  const char* name = op == JPP_NONE ? "argument" : b->staged->ops[op].name;
  return jpp_status_make(JPP_SCHEDULE_ERROR,
                         "%s of microbatch %d uses value %%%u (%s at %s) before any task "
                         "has made it: the schedule runs a task before one that it needs",
                         task->name, (int)microbatch, value, name, where ? where : "?");
}

static jpp_status_t* use_input(jpp_program_builder_t* b, const jpp_task_t* task,
                               uint32_t microbatch, uint32_t value) {
  jpp_actor_draft_t* actor = &b->actors[task->rank];
  uint32_t id = find_register(b, task->rank, value, microbatch);
  if (id == JPP_NONE) {
    if (!is_loop_index(b, value)) return missing_input(b, task, microbatch, value);
    JPP_RETURN_IF_ERROR(define_value(b, task->rank, value, microbatch, &id));
    actor->virtuals.data[id].constant = true;
    jpp_program_constant_t constant = {.reg = id, .microbatch = microbatch};
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&actor->constants, constant));
  }
  actor->virtuals.data[id].last_use = (uint32_t)actor->instrs.count - 1;
  return JPP_VEC_PUSH(&actor->operands, id);
}

static jpp_status_t* define_result(jpp_program_builder_t* b, const jpp_task_t* task,
                                   uint32_t microbatch, uint32_t value) {
  uint32_t id = 0;
  JPP_RETURN_IF_ERROR(define_value(b, task->rank, value, microbatch, &id));
  uint32_t accumulator = b->accumulator_of[value];
  if (accumulator != JPP_NONE) {
    uint32_t state = b->staged->accumulators[accumulator].state;
    JPP_RETURN_IF_ERROR(set_definition(b, task->rank, state, microbatch, id));
  }
  return JPP_VEC_PUSH(&b->actors[task->rank].operands, id);
}

static jpp_status_t* emit_begin(jpp_program_builder_t* b, const jpp_event_item_t* item) {
  const jpp_task_t* task = &b->staged->tasks[item->task];
  ++b->bindings[item->task].runs;
  jpp_instr_t run = {.kind = JPP_INSTR_RUN,
                     .target = item->task,
                     .microbatch = item->microbatch,
                     .num_args = task->num_inputs,
                     .num_results = task->num_outputs};
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    JPP_RETURN_IF_ERROR(receive_value(b, task->rank, task->inputs[i], item->microbatch));
  }
  JPP_RETURN_IF_ERROR(push_instr(&b->actors[task->rank], run, NULL));
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    JPP_RETURN_IF_ERROR(use_input(b, task, item->microbatch, task->inputs[i]));
  }
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    JPP_RETURN_IF_ERROR(define_result(b, task, item->microbatch, task->outputs[i]));
  }
  return NULL;
}

static jpp_status_t* emit_end(jpp_program_builder_t* b, const jpp_event_item_t* item) {
  const jpp_task_t* task = &b->staged->tasks[item->task];
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    JPP_RETURN_IF_ERROR(
        send_to_takers(b, task->outputs[i], item->microbatch, task->rank));
  }
  return NULL;
}

// --- Loops begin and end --------------------------------------------------------------

static jpp_status_t* rename_value(jpp_program_builder_t* b, uint32_t rank, uint32_t from,
                                  uint32_t to) {
  uint32_t found = find_register(b, rank, from, JPP_NONE);
  if (found == JPP_NONE) {
    return jpp_status_make(JPP_INTERNAL_ERROR,
                           "accumulator %%%u has no register on rank %u", from, rank);
  }
  return set_definition(b, rank, to, JPP_NONE, found);
}

static jpp_status_t* begin_loop(jpp_program_builder_t* b, uint32_t loop) {
  for (uint32_t i = 0; i < b->staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &b->staged->accumulators[i];
    if (acc->loop != loop) continue;
    uint32_t rank = b->staged->tasks[acc->task].rank;
    JPP_RETURN_IF_ERROR(rename_value(b, rank, acc->init, acc->state));
  }
  return NULL;
}

static jpp_status_t* end_loop(jpp_program_builder_t* b, uint32_t loop) {
  for (uint32_t i = 0; i < b->staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &b->staged->accumulators[i];
    if (acc->loop != loop) continue;
    uint32_t rank = b->staged->tasks[acc->task].rank;
    JPP_RETURN_IF_ERROR(rename_value(b, rank, acc->state, acc->final));
    JPP_RETURN_IF_ERROR(send_to_takers(b, acc->final, JPP_NONE, rank));
  }
  return NULL;
}

// --- The order of accumulation --------------------------------------------------------

static jpp_status_t* check_accumulation_order(const jpp_program_builder_t* b) {
  const jpp_staged_t* staged = b->staged;
  uint32_t* next = NULL;
  bool* accumulates = NULL;
  jpp_arena_t* scratch = (jpp_arena_t*)&b->scratch;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, staged->num_tasks, &next));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, staged->num_tasks, &accumulates));
  for (uint32_t i = 0; i < staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &staged->accumulators[i];
    uint8_t reduce = staged->graph->loops[acc->loop].results[acc->result].reduce;
    if (reduce == JPP_REDUCE_ADD) accumulates[acc->task] = true;
  }
  for (size_t i = 0; i < b->events.count; ++i) {
    const jpp_event_item_t* item = &b->events.data[i];
    if (item->is_end || !accumulates[item->task]) continue;
    if (item->microbatch == next[item->task]++) continue;
    return jpp_status_make(
        JPP_SCHEDULE_ERROR,
        "rank %u runs %s__%u where %s__%u is due: gradients are summed "
        "in the order of the microbatches, so that the result does not "
        "depend on the schedule; list them in order",
        staged->tasks[item->task].rank, staged->tasks[item->task].name, item->microbatch,
        staged->tasks[item->task].name, next[item->task] - 1);
  }
  return NULL;
}

// --- All of it ------------------------------------------------------------------------

static jpp_status_t* emit_events(jpp_program_builder_t* b) {
  uint32_t open = JPP_NONE;  // the loop that is running
  for (size_t i = 0; i < b->events.count; ++i) {
    const jpp_event_item_t* item = &b->events.data[i];
    uint32_t loop = b->staged->tasks[item->task].loop;
    if (loop != open) {
      if (open != JPP_NONE) JPP_RETURN_IF_ERROR(end_loop(b, open));
      if (loop != JPP_NONE) JPP_RETURN_IF_ERROR(begin_loop(b, loop));
      open = loop;
    }
    JPP_RETURN_IF_ERROR(item->is_end ? emit_end(b, item) : emit_begin(b, item));
  }
  if (open != JPP_NONE) JPP_RETURN_IF_ERROR(end_loop(b, open));
  return receive_rest(b);
}

static jpp_status_t* take_outputs(jpp_program_builder_t* b) {
  for (uint32_t i = 0; i < b->staged->graph->num_outputs; ++i) {
    const jpp_staged_value_t* output = &b->staged->outputs[i];
    for (uint32_t r = 0; r < b->staged->ranks; ++r) {
      if (!jpp_rank_set_has(output->ranks, r)) continue;
      uint32_t found = find_register(b, r, output->value, JPP_NONE);
      if (found == JPP_NONE) {
        return jpp_status_make(JPP_INTERNAL_ERROR, "output %u is not on rank %u", i, r);
      }
      jpp_virtual_t* left = &b->actors[r].virtuals.data[found];
      jpp_program_output_t taken = {
          .reg = found, .output = i, .copy = left->borrowed || left->output};
      left->output = true;
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&b->actors[r].outputs, taken));
    }
  }
  return NULL;
}

jpp_status_t* jpp__program_emit(jpp_program_builder_t* b) {
  uint32_t ranks = b->staged->ranks;
  JPP_RETURN_IF_ERROR(
      jpp__ids_create(&b->scratch, (size_t)ranks * ranks, &b->channel_at));
  JPP_RETURN_IF_ERROR(
      jpp__ids_create(&b->scratch, b->staged->num_values, &b->accumulator_of));
  for (uint32_t i = 0; i < b->staged->num_accumulators; ++i) {
    b->accumulator_of[b->staged->accumulators[i].next] = i;
  }
  JPP_RETURN_IF_ERROR(check_accumulation_order(b));
  JPP_RETURN_IF_ERROR(define_args(b));
  JPP_RETURN_IF_ERROR(emit_events(b));
  return take_outputs(b);
}
