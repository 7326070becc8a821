// Emits each rank's runs, sends, receives and moves by walking the tasks in the order of
// order.c. A value is sent when its task ends and received right before its first use.
// Each instruction takes constant time: draft.c adds the operands later.
#include "partition/offload.h"
#include "program/builder.h"
#include "task/ids.h"

// The values that a task's rank receives, sends or moves because of the task.
typedef struct transfers {
  const uint32_t *received, *sent, *moved_in, *moved_out;
  uint32_t num_received, num_sent, num_moved_in, num_moved_out;
  // Of a forward: received values that wait in their own memory for a later task.
  const uint32_t* moved_back;
  uint32_t num_moved_back;
} transfers_t;

typedef struct emitter {
  jpp_program_builder_t* b;
  transfers_t* transfers;  // [tasks]
  // [ranks * ranks] by source, then destination.
  uint32_t* channel_at;
  // [num_arrivals] The channel of the message that contains the value; JPP_NONE: not sent
  // yet, or already received.
  uint32_t* arrivals;
  bool* copies;  // [num_copies] the copy of a value that moves is in device memory
} emitter_t;

static jpp_status_t* push_instr(const emitter_t* e, uint32_t rank,
                                jpp_instr_draft_t instr) {
  return JPP_VEC_PUSH(&e->b->instrs[rank], instr);
}

// --- Messages -------------------------------------------------------------------------

static uint32_t* arrival_at(const emitter_t* e, const jpp_site_t* site, uint32_t value,
                            uint32_t microbatch) {
  bool every = jpp__value_of_microbatch(e->b, value);
  return &e->arrivals[site->first_arrival + (every ? microbatch : 0)];
}

static jpp_status_t* channel_between(const emitter_t* e, uint32_t src, uint32_t dst,
                                     uint32_t* out_channel) {
  jpp_program_builder_t* b = e->b;
  uint32_t* at = &e->channel_at[src * b->staged->ranks + dst];
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

// A channel gets as many slots as it has messages in flight at any time in the order of
// these lists, so in this order no send waits. Whether a network of bounded queues blocks
// does not depend on the order of execution, so no other order can deadlock either.
static jpp_status_t* send_value(const emitter_t* e, uint32_t value, uint32_t microbatch,
                                uint32_t src, const jpp_site_t* to) {
  uint32_t id = 0;
  JPP_RETURN_IF_ERROR(channel_between(e, src, to->rank, &id));
  jpp_channel_draft_t* draft = &e->b->channels.data[id];
  jpp_message_draft_t message = {.value = value, .microbatch = microbatch};
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&draft->messages, message));
  jpp_plan_channel_t* channel = &draft->channel;
  ++channel->messages;
  uint32_t under_way = (uint32_t)(draft->messages.count - draft->received);
  if (under_way > channel->slots) channel->slots = under_way;
  if (e->b->value_bytes[value] > channel->max_bytes) {
    channel->max_bytes = e->b->value_bytes[value];
  }
  *arrival_at(e, to, value, microbatch) = id;
  jpp_instr_draft_t instr = {
      .kind = JPP_INSTR_SEND, .target = id, .microbatch = microbatch, .value = value};
  return push_instr(e, src, instr);
}

// --- Moves ----------------------------------------------------------------------------

static bool* copy_at(const emitter_t* e, uint32_t rank, uint32_t value,
                     uint32_t microbatch) {
  const jpp_site_t* site = jpp__program_site(e->b, rank, value);
  bool every = jpp__value_of_microbatch(e->b, value);
  return &e->copies[site->first_copy + (every ? microbatch : 0)];
}

static jpp_status_t* move_value(const emitter_t* e, uint32_t rank, uint32_t value,
                                uint32_t microbatch, jpp_memory_t to) {
  bool every = jpp__value_of_microbatch(e->b, value);
  jpp_instr_draft_t instr = {.kind = JPP_INSTR_MOVE,
                             .target = to,
                             .microbatch = every ? microbatch : JPP_NONE,
                             .value = value};
  return push_instr(e, rank, instr);
}

static jpp_status_t* move_in(const emitter_t* e, uint32_t rank, uint32_t value,
                             uint32_t microbatch) {
  bool* copy = copy_at(e, rank, value, microbatch);
  if (*copy) return NULL;
  *copy = true;
  return move_value(e, rank, value, microbatch, JPP_MEMORY_DEVICE);
}

// A value that nothing on its rank takes stays in the memory in which its run made it, to
// be sent.
static jpp_status_t* move_out(const emitter_t* e, uint32_t rank, uint32_t value,
                              uint32_t microbatch) {
  if (!jpp__program_site(e->b, rank, value)->takes) return NULL;
  return move_value(e, rank, value, microbatch, e->b->staged->values[value].type.memory);
}

// Received values stay in device memory until their last use, which is near, unless they
// wait for a backward; an output leaves it at once.
static jpp_status_t* keep_received(const emitter_t* e, uint32_t rank, uint32_t value,
                                   uint32_t microbatch) {
  if (!jpp__program_moves(e->b, value)) return NULL;
  *copy_at(e, rank, value, microbatch) = true;
  if (!jpp__program_site(e->b, rank, value)->leaves) return NULL;
  return move_out(e, rank, value, microbatch);
}

// --- Receives -------------------------------------------------------------------------

static jpp_status_t* receive_next(const emitter_t* e, uint32_t id) {
  jpp_channel_draft_t* draft = &e->b->channels.data[id];
  jpp_message_draft_t message = draft->messages.data[draft->received++];
  uint32_t dst = draft->channel.dst;
  const jpp_site_t* site = jpp__program_site(e->b, dst, message.value);
  *arrival_at(e, site, message.value, message.microbatch) = JPP_NONE;
  jpp_instr_draft_t instr = {.kind = JPP_INSTR_RECV,
                             .target = id,
                             .microbatch = message.microbatch,
                             .value = message.value};
  JPP_RETURN_IF_ERROR(push_instr(e, dst, instr));
  return keep_received(e, dst, message.value, message.microbatch);
}

// A value is received right before its first use, together with the earlier messages of
// its channel; until then it waits in the channel's slots.
static jpp_status_t* receive_value(const emitter_t* e, uint32_t rank, uint32_t value,
                                   uint32_t microbatch) {
  const jpp_site_t* site = jpp__program_site(e->b, rank, value);
  const uint32_t* arrival = arrival_at(e, site, value, microbatch);
  while (*arrival != JPP_NONE) JPP_RETURN_IF_ERROR(receive_next(e, *arrival));
  return NULL;
}

static jpp_status_t* receive_rest(const emitter_t* e) {
  for (uint32_t id = 0; id < e->b->channels.count; ++id) {
    while (e->b->channels.data[id].received < e->b->channels.data[id].messages.count) {
      JPP_RETURN_IF_ERROR(receive_next(e, id));
    }
  }
  return NULL;
}

// Sends a value that was just made to every rank that takes it and does not make it.
static jpp_status_t* send_to_takers(const emitter_t* e, uint32_t value,
                                    uint32_t microbatch, uint32_t rank) {
  const jpp_program_builder_t* b = e->b;
  if (jpp__program_source(b, value) != rank) return NULL;
  for (uint32_t i = b->first_site[value]; i < b->first_site[value + 1]; ++i) {
    const jpp_site_t* site = &b->sites[i];
    if (!site->takes || site->makes) continue;
    JPP_RETURN_IF_ERROR(send_value(e, value, microbatch, rank, site));
  }
  return NULL;
}

// --- The messages of a task ----------------------------------------------

// Nothing sends a state or the number of a microbatch.
static jpp_status_t* find_received(const emitter_t* e, const jpp_task_t* task,
                                   jpp_u32_vec_t* found, transfers_t* transfers) {
  found->count = 0;
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    uint32_t value = task->inputs[i], source = jpp__program_source(e->b, value);
    if (source == JPP_NONE || jpp__program_site(e->b, task->rank, value)->makes) continue;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(found, value));
  }
  transfers->num_received = (uint32_t)found->count;
  return JPP_VEC_TO_ARENA(found, &e->b->scratch, &transfers->received);
}

static jpp_status_t* find_sent(const emitter_t* e, const jpp_task_t* task,
                               jpp_u32_vec_t* found, transfers_t* transfers) {
  const jpp_program_builder_t* b = e->b;
  found->count = 0;
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    uint32_t value = task->outputs[i];
    bool sent = false;
    for (uint32_t s = b->first_site[value]; s < b->first_site[value + 1]; ++s) {
      sent = sent || (b->sites[s].takes && !b->sites[s].makes);
    }
    if (sent) JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(found, value));
  }
  transfers->num_sent = (uint32_t)found->count;
  return JPP_VEC_TO_ARENA(found, &e->b->scratch, &transfers->sent);
}

static jpp_status_t* find_moved(const emitter_t* e, const uint32_t* values,
                                uint32_t count, jpp_u32_vec_t* found,
                                const uint32_t** out_moved, uint32_t* out_count) {
  found->count = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (!jpp__program_moves(e->b, values[i])) continue;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(found, values[i]));
  }
  *out_count = (uint32_t)found->count;
  return JPP_VEC_TO_ARENA(found, &e->b->scratch, out_moved);
}

static jpp_status_t* find_moved_back(const emitter_t* e, const jpp_task_t* task,
                                     jpp_u32_vec_t* found, transfers_t* transfers) {
  const jpp_staged_t* staged = e->b->staged;
  found->count = 0;
  bool is_last_part = task->kind == JPP_TASK_FWD && task->next_part == JPP_NONE &&
                      staged->loops[task->loop].has_backward;
  for (uint32_t i = 0; is_last_part && i < transfers->num_received; ++i) {
    uint32_t value = transfers->received[i];
    bool moves = jpp__program_moves(e->b, value) && jpp__value_of_microbatch(e->b, value);
    if (!moves || jpp__program_site(e->b, task->rank, value)->leaves) continue;
    if (!jpp__staged_backward_takes(staged, task->loop, task->stage, value)) continue;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(found, value));
  }
  transfers->num_moved_back = (uint32_t)found->count;
  return JPP_VEC_TO_ARENA(found, &e->b->scratch, &transfers->moved_back);
}

static jpp_status_t* find_task_transfers(const emitter_t* e, const jpp_task_t* task,
                                         jpp_u32_vec_t* found, transfers_t* transfers) {
  JPP_RETURN_IF_ERROR(find_received(e, task, found, transfers));
  JPP_RETURN_IF_ERROR(find_sent(e, task, found, transfers));
  JPP_RETURN_IF_ERROR(find_moved_back(e, task, found, transfers));
  JPP_RETURN_IF_ERROR(find_moved(e, task->inputs, task->num_inputs, found,
                                 &transfers->moved_in, &transfers->num_moved_in));
  return find_moved(e, task->outputs, task->num_outputs, found, &transfers->moved_out,
                    &transfers->num_moved_out);
}

static jpp_status_t* find_transfers(emitter_t* e) {
  const jpp_staged_t* staged = e->b->staged;
  jpp_arena_t* scratch = &e->b->scratch;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, staged->num_tasks, &e->transfers));
  jpp_u32_vec_t found = {0};
  jpp_status_t* status = NULL;
  for (uint32_t t = 0; t < staged->num_tasks && !status; ++t) {
    status = find_task_transfers(e, &staged->tasks[t], &found, &e->transfers[t]);
  }
  jpp_vec_deinit(&found);
  return status;
}

// --- Events ---------------------------------------------------------------------------

static jpp_status_t* emit_begin(const emitter_t* e, const jpp_event_item_t* item) {
  const jpp_task_t* task = &e->b->staged->tasks[item->task];
  const transfers_t* transfers = &e->transfers[item->task];
  ++e->b->bindings[item->task].runs;
  for (uint32_t i = 0; i < transfers->num_received; ++i) {
    JPP_RETURN_IF_ERROR(
        receive_value(e, task->rank, transfers->received[i], item->microbatch));
  }
  for (uint32_t i = 0; i < transfers->num_moved_in; ++i) {
    JPP_RETURN_IF_ERROR(move_in(e, task->rank, transfers->moved_in[i], item->microbatch));
  }
  jpp_instr_draft_t run = {.kind = JPP_INSTR_RUN,
                           .target = item->task,
                           .microbatch = item->microbatch,
                           .value = JPP_NONE};
  return push_instr(e, task->rank, run);
}

// Results of a loop are sent when the loop ends; if they were sent earlier, they would
// only occupy slots.
static bool is_result(const emitter_t* e, const jpp_task_t* task, uint32_t value) {
  return task->loop != JPP_NONE && !jpp__value_of_microbatch(e->b, value);
}

static jpp_status_t* emit_end(const emitter_t* e, const jpp_event_item_t* item) {
  const transfers_t* transfers = &e->transfers[item->task];
  const jpp_task_t* task = &e->b->staged->tasks[item->task];
  for (uint32_t i = 0; i < transfers->num_sent; ++i) {
    uint32_t value = transfers->sent[i];
    if (is_result(e, task, value)) continue;
    JPP_RETURN_IF_ERROR(send_to_takers(e, value, item->microbatch, task->rank));
  }
  for (uint32_t i = 0; i < transfers->num_moved_out; ++i) {
    JPP_RETURN_IF_ERROR(
        move_out(e, task->rank, transfers->moved_out[i], item->microbatch));
  }
  for (uint32_t i = 0; i < transfers->num_moved_back; ++i) {
    uint32_t value = transfers->moved_back[i];
    JPP_RETURN_IF_ERROR(move_out(e, task->rank, value, item->microbatch));
    *copy_at(e, task->rank, value, item->microbatch) = false;
  }
  return NULL;
}

static jpp_status_t* end_loop(const emitter_t* e, uint32_t loop) {
  const jpp_staged_t* staged = e->b->staged;
  for (uint32_t i = 0; i < staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &staged->accumulators[i];
    if (acc->loop != loop) continue;
    JPP_RETURN_IF_ERROR(
        send_to_takers(e, acc->final, JPP_NONE, staged->tasks[acc->task].rank));
  }
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    for (uint32_t i = 0; task->loop == loop && i < e->transfers[t].num_sent; ++i) {
      uint32_t value = e->transfers[t].sent[i];
      if (!is_result(e, task, value)) continue;
      JPP_RETURN_IF_ERROR(send_to_takers(e, value, JPP_NONE, task->rank));
    }
  }
  return NULL;
}

// The step begins by sending the arguments that ranks need from other ranks, each
// followed by its receive: a slot would hold it as long as a register does.
static jpp_status_t* emit_args(const emitter_t* e) {
  const jpp_program_builder_t* b = e->b;
  for (uint32_t a = 0; a < b->staged->graph->num_args; ++a) {
    uint32_t value = b->staged->graph->args[a].value;
    uint32_t src = jpp__program_source(b, value);
    for (uint32_t i = b->first_site[value]; i < b->first_site[value + 1]; ++i) {
      const jpp_site_t* site = &b->sites[i];
      if (!site->takes || site->makes) continue;
      if (jpp__program_moves(b, value)) {
        JPP_RETURN_IF_ERROR(move_in(e, src, value, JPP_NONE));
      }
      JPP_RETURN_IF_ERROR(send_value(e, value, JPP_NONE, src, site));
      JPP_RETURN_IF_ERROR(receive_value(e, site->rank, value, JPP_NONE));
    }
  }
  return NULL;
}

static jpp_status_t* emit_events(const emitter_t* e) {
  const jpp_program_builder_t* b = e->b;
  uint32_t open = JPP_NONE;  // the loop that is running
  JPP_RETURN_IF_ERROR(emit_args(e));
  for (size_t i = 0; i < b->events.count; ++i) {
    const jpp_event_item_t* item = &b->events.data[i];
    uint32_t loop = b->staged->tasks[item->task].loop;
    if (loop != open && open != JPP_NONE) JPP_RETURN_IF_ERROR(end_loop(e, open));
    open = loop;
    JPP_RETURN_IF_ERROR(item->is_end ? emit_end(e, item) : emit_begin(e, item));
  }
  if (open != JPP_NONE) JPP_RETURN_IF_ERROR(end_loop(e, open));
  return receive_rest(e);
}

// Frees the tables that only this pass reads.
static void free_events(jpp_program_builder_t* b) {
  jpp_vec_deinit(&b->events);
  for (size_t i = 0; i < b->channels.count; ++i) {
    jpp_vec_deinit(&b->channels.data[i].messages);
  }
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

// --- The whole pass ------------------------------------------------------------------

jpp_status_t* jpp__program_emit(jpp_program_builder_t* b) {
  emitter_t emitter = {.b = b};
  size_t ranks = b->staged->ranks;
  JPP_RETURN_IF_ERROR(jpp__ids_create(&b->scratch, ranks * ranks, &emitter.channel_at));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&b->scratch, b->num_arrivals, &emitter.arrivals));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, b->num_copies, &emitter.copies));
  JPP_RETURN_IF_ERROR(check_accumulation_order(b));
  JPP_RETURN_IF_ERROR(find_transfers(&emitter));
  JPP_RETURN_IF_ERROR(emit_events(&emitter));
  free_events(b);
  return NULL;
}
