// The instruction loop. Nothing here allocates, looks up or formats unless it fails.
#include "base/clock.h"
#include "runtime/cluster/network.h"
#include "runtime/step/failure.h"
#include "runtime/step/nans.h"
#include "runtime/step/state.h"

// A call that takes this long may have failed.
enum { kSlowCallMs = 1000 };

// --- RUN ------------------------------------------------------------------------------

static void keep_results(const jpp_actor_t* actor, const jpp_actor_instr_t* instr) {
  uint32_t devices = actor->runtime->devices_per_rank;
  const uint32_t* registers = instr->operands + instr->num_args;
  for (uint32_t d = 0; d < actor->num_devices; ++d) {
    jpp_buffer_t* const* row = actor->results[d];
    for (uint32_t k = 0; k < instr->num_results; ++k) {
      actor->regs[(size_t)registers[k] * devices + d] = row[k];
    }
  }
}

static void destroy_register(const jpp_actor_t* actor, uint32_t reg) {
  uint32_t devices = actor->runtime->devices_per_rank;
  jpp_buffer_t** shards = actor->regs + (size_t)reg * devices;
  for (uint32_t d = 0; d < devices; ++d) {
    jpp_client_buffer_destroy(actor->runtime->client, shards[d]);
    shards[d] = NULL;
  }
}

static jpp_status_t* call_executable(const jpp_actor_t* actor,
                                     const jpp_actor_instr_t* instr) {
  const jpp_task_call_t* call = instr->call;
  uint32_t devices = actor->runtime->devices_per_rank;
  for (uint32_t d = 0; d < actor->num_devices; ++d) {
    jpp_buffer_t** row = actor->args[d];
    for (uint32_t i = 0; i < instr->num_args; ++i) {
      row[i] = actor->regs[(size_t)instr->operands[i] * devices + d];
    }
  }
  jpp_execute_t execute = {
      .struct_size = sizeof(execute),
      .executable = call->executable,
      .device_count = actor->num_devices,
      .arg_count = instr->num_args,
      .result_count = instr->num_results,
      .device = call->device,
      .args = (jpp_buffer_t* const* const*)actor->args,
      .results = actor->results,
      .events =
          instr->num_results ? NULL : actor->step->events + (size_t)instr->run * devices};
  return jpp_client_execute(actor->runtime->client, &execute);
}

static jpp_status_t* execute_task(jpp_actor_t* actor, const jpp_actor_instr_t* instr) {
  const jpp_task_call_t* call = instr->call;
  uint32_t devices = actor->runtime->devices_per_rank;
  JPP_RETURN_IF_ERROR((call->copies ? jpp__copies_make : call_executable)(actor, instr));
  keep_results(actor, instr);
  for (uint32_t i = 0; i < call->num_donated; ++i) {
    destroy_register(actor, instr->operands[call->donated[i]]);
  }
  // A failure after the call appears only in the run's results, which may be deleted
  // before the step ends; hence an event. The ready event of a result is cheaper than the
  // event that jpp_client_execute() can return.
  jpp_event_t** events = actor->step->events + (size_t)instr->run * devices;
  for (uint32_t d = 0; instr->num_results && d < actor->num_devices; ++d) {
    JPP_RETURN_IF_ERROR(jpp_client_buffer_ready_event(actor->runtime->client,
                                                      actor->results[d][0], &events[d]));
  }
  return NULL;
}

// An allocator may hold a call for ten seconds and then fail only the run's events. It
// would hold each further call as long, so the failure has to be noticed here.
static jpp_status_t* execute_and_watch(jpp_actor_t* actor,
                                       const jpp_actor_instr_t* instr) {
  int64_t start_ms = jpp__clock_coarse_ms();
  JPP_RETURN_IF_ERROR(execute_task(actor, instr));
  if (jpp__clock_coarse_ms() - start_ms < kSlowCallMs) return NULL;
  return jpp__actor_known_failure(actor, actor->step);
}

static jpp_status_t* issue_run(jpp_actor_t* actor, const jpp_actor_instr_t* instr) {
  bool tracing = actor->step->trace != NULL;
  actor->step->order[instr->run] = actor->runtime->order++;
  actor->step->runs = instr->run + 1;
  int64_t issued = tracing ? jpp__clock_now() : 0;
  JPP_RETURN_IF_ERROR(execute_and_watch(actor, instr));
  if (actor->runtime->step->checks) JPP_RETURN_IF_ERROR(jpp__nans_check(actor, instr));
  return tracing ? jpp__trace_watch(actor, instr->run, issued) : NULL;
}

// --- SEND and RECV --------------------------------------------------------------------

// The message owns its buffers: copies on the receiver's devices, or the register's own.
// Between ranks of unequal sizes, each device has the whole value.
static jpp_status_t* fill_message(const jpp_actor_t* actor,
                                  const jpp_actor_instr_t* instr) {
  uint32_t devices = actor->runtime->devices_per_rank;
  jpp_buffer_t** shards = actor->regs + (size_t)instr->operands[0] * devices;
  for (uint32_t d = 0; d < instr->link->num_devices; ++d) {
    if (instr->moves) {
      actor->message[d] = shards[d];
      shards[d] = NULL;
      continue;
    }
    JPP_RETURN_IF_ERROR(jpp_client_buffer_copy_to_device(
        actor->runtime->client, shards[d % actor->num_devices], instr->link->devices[d],
        (jpp_buffer_t**)&actor->message[d]));
  }
  return NULL;
}

static jpp_status_t* hand_over(const jpp_actor_t* actor, const jpp_actor_instr_t* instr) {
  bool done = false;
  jpp_message_t message = {
      .buffers = actor->message, .count = instr->link->num_devices, .tag = instr->tag};
  JPP_RETURN_IF_ERROR(jpp_channel_try_send(instr->link->channel, &message, &done));
  if (done) return NULL;
  return jpp_status_make(JPP_INTERNAL_ERROR,
                         "the channel refused message %llu though %u slots are not full",
                         (unsigned long long)instr->link->sent, instr->link->plan->slots);
}

// No copy is made before it has a slot: receive slots bound the memory.
static jpp_status_t* try_send(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                              bool* out_done) {
  if (instr->link->remote) return jpp__network_send(actor, instr, out_done);
  if (jpp_channel_credits(instr->link->channel) == 0) return NULL;
  jpp_status_t* status = fill_message(actor, instr);
  if (!status) status = hand_over(actor, instr);
  if (status) {
    for (uint32_t d = 0; d < actor->runtime->devices_per_rank; ++d) {
      jpp_client_buffer_destroy(actor->runtime->client, actor->message[d]);
      actor->message[d] = NULL;
    }
    return status;
  }
  for (uint32_t d = 0; d < actor->runtime->devices_per_rank; ++d) {
    actor->message[d] = NULL;
  }
  ++instr->link->sent;
  *out_done = true;
  return NULL;
}

static jpp_status_t* try_recv(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                              bool* out_done) {
  if (instr->link->remote) return jpp__network_recv(actor, instr, out_done);
  uint32_t devices = actor->runtime->devices_per_rank;
  jpp_link_t* link = instr->link;
  jpp_buffer_t** shards = actor->regs + (size_t)instr->operands[0] * devices;
  jpp_message_t message = {.buffers = (void**)shards};
  JPP_RETURN_IF_ERROR(jpp_channel_try_recv(link->channel, &message, out_done));
  if (!*out_done) return NULL;
  ++link->received;
  if (message.tag == instr->tag) return NULL;
  return jpp__failure_mismatch(actor, instr, message.tag);
}

// --- MOVE -----------------------------------------------------------------------------

static jpp_status_t* issue_move(const jpp_actor_t* actor,
                                const jpp_actor_instr_t* instr) {
  uint32_t devices = actor->runtime->devices_per_rank;
  jpp_buffer_t** from = actor->regs + (size_t)instr->operands[0] * devices;
  jpp_buffer_t** to = actor->regs + (size_t)instr->operands[1] * devices;
  for (uint32_t d = 0; d < actor->num_devices; ++d) {
    JPP_RETURN_IF_ERROR(jpp_client_buffer_copy_to_memory(
        actor->runtime->client, from[d], actor->devices[d], instr->memory, &to[d]));
  }
  return NULL;
}

// --- The end of the program -----------------------------------------------------------

// Creates ready events for the outputs that no run's event covers.
static jpp_status_t* watch_output(const jpp_actor_t* actor, uint32_t output) {
  uint32_t devices = actor->runtime->devices_per_rank;
  const jpp_program_output_t* out = &actor->program->outputs[output];
  jpp_buffer_t** copies = actor->step->outputs + (size_t)output * devices;
  jpp_buffer_t** shards = out->copy ? copies : actor->regs + (size_t)out->reg * devices;
  for (uint32_t d = 0; d < actor->num_devices; ++d) {
    JPP_RETURN_IF_ERROR(jpp_client_buffer_ready_event(
        actor->runtime->client, shards[d],
        &actor->step->output_events[(size_t)output * devices + d]));
  }
  return NULL;
}

// Counts the copies of outputs.
static void count_copies(jpp_actor_t* actor) {
  const jpp_plan_t* plan = actor->runtime->plan;
  for (uint32_t i = 0; i < actor->program->num_outputs; ++i) {
    const jpp_program_output_t* out = &actor->program->outputs[i];
    if (!out->copy || actor->output_memories[i] != JPP_MEMORY_DEVICE) continue;
    uint32_t value = plan->staged->outputs[out->output].value;
    jpp__trace_count(actor, (int64_t)plan->value_bytes[value]);
  }
}

static jpp_status_t* finish_output(const jpp_actor_t* actor, uint32_t output) {
  if (actor->program->outputs[output].copy) {
    uint32_t devices = actor->runtime->devices_per_rank;
    size_t from = (size_t)actor->program->outputs[output].reg * devices;
    for (uint32_t d = 0; d < actor->num_devices; ++d) {
      JPP_RETURN_IF_ERROR(jpp_client_buffer_copy_to_memory(
          actor->runtime->client, actor->regs[from + d], actor->devices[d],
          actor->output_memories[output],
          &actor->step->outputs[(size_t)output * devices + d]));
    }
  }
  return actor->output_needs_event[output] ? watch_output(actor, output) : NULL;
}

// --- The loop -------------------------------------------------------------------------

static jpp_status_t* issue_instr(jpp_actor_t* actor, const jpp_actor_instr_t* instr,
                                 bool* out_done) {
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      *out_done = true;
      return issue_run(actor, instr);
    case JPP_INSTR_SEND:
      return try_send(actor, instr, out_done);
    case JPP_INSTR_RECV:
      return try_recv(actor, instr, out_done);
    case JPP_INSTR_DELETE:
      for (uint32_t i = 0; i < instr->num_args; ++i) {
        destroy_register(actor, instr->operands[i]);
      }
      break;
    case JPP_INSTR_MOVE:
      *out_done = true;
      return issue_move(actor, instr);
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  *out_done = true;
  return NULL;
}

static jpp_advance_t stop_actor(jpp_actor_t* actor, uint64_t order,
                                jpp_status_t* status) {
  actor->step->error = status;
  actor->step->error_order = order;
  return JPP_ADVANCE_FAILED;
}

// Publishes the actor's position to the processes that wait for this one.
static void publish_position(jpp_actor_t* actor, uint32_t at) {
  if (!actor->runtime->network) return;
  atomic_store_explicit(&actor->shown, at, memory_order_relaxed);
}

static jpp_advance_t issue_end(jpp_actor_t* actor) {
  uint64_t order = actor->runtime->order++;
  for (uint32_t i = 0; i < actor->program->num_outputs; ++i) {
    jpp_status_t* status = finish_output(actor, i);
    if (!status) continue;
    return stop_actor(actor, order, jpp__failure_locate_output(actor, i, status));
  }
  if (actor->step->trace) count_copies(actor);
  actor->done = true;
  publish_position(actor, actor->program->num_instrs);
  return JPP_ADVANCE_SOME;
}

static void note_wait(jpp_actor_t* actor, const jpp_actor_instr_t* instr, bool done) {
  if (!done) {
    if (!actor->waits_since) actor->waits_since = jpp__clock_now();
    return;
  }
  int64_t now = actor->waits_since ? jpp__clock_now() : 0;
  jpp__deadline_note(&actor->runtime->deadline, instr->wait, actor->waits_since, now);
  actor->waits_since = 0;
}

jpp_advance_t jpp__actor_advance(jpp_actor_t* actor) {
  bool has_run = false;
  uint32_t first = actor->at;
  while (actor->at < actor->num_instrs) {
    const jpp_actor_instr_t* instr = &actor->instrs[actor->at];
    bool done = false;
    if (instr->kind == JPP_INSTR_RUN) {
      if (has_run) return JPP_ADVANCE_SOME;
      has_run = true;
    }
    publish_position(actor, instr->source);
    jpp_status_t* status = issue_instr(actor, instr, &done);
    if (status) {
      bool run = instr->kind == JPP_INSTR_RUN;
      uint64_t order = run ? actor->step->order[instr->run] : actor->runtime->order++;
      return stop_actor(actor, order, jpp__failure_locate(actor, instr->source, status));
    }
    if (instr->wait) note_wait(actor, instr, done);
    if (!done) return actor->at > first ? JPP_ADVANCE_SOME : JPP_ADVANCE_BLOCKED;
    if (actor->step->trace) jpp__trace_count(actor, instr->live_bytes);
    if (actor->flight) jpp__flight_note(actor->flight, actor->at);
    ++actor->at;
  }
  return issue_end(actor);
}
