// One step: arguments into registers, issue the instructions, wait, results out of
// registers.
#include "runtime/failure.h"
#include "runtime/state.h"

// The failure that was issued first: what depends on it fails later, with its message.
typedef struct first_failure {
  uint64_t order;
  jpp_status_t* status;
} first_failure_t;

static bool is_first(const first_failure_t* first, uint64_t order) {
  return !first->status || order < first->order;
}

// Outputs without a run of their own come after all runs.
static const uint64_t kAfterAllRuns = UINT64_MAX;

// Owns `status`.
static void replace_failure(first_failure_t* first, uint64_t order,
                            jpp_status_t* status) {
  jpp_status_free(first->status);
  *first = (first_failure_t){.order = order, .status = status};
}

// --- Begin ----------------------------------------------------------------------------

static void clear_outputs(const jpp_runtime_t* runtime, const jpp_step_io_t* io) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    size_t count =
        (size_t)runtime->plan->programs[r].num_outputs * runtime->devices_per_rank;
    for (size_t i = 0; i < count; ++i) io->outputs[r][i] = NULL;
  }
}

static void begin_actor(jpp_actor_t* actor, const jpp_step_io_t* io) {
  const jpp_program_t* program = actor->program;
  size_t devices = actor->runtime->devices_per_rank;
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    for (size_t d = 0; d < devices; ++d) {
      actor->regs[program->inputs[i].reg * devices + d] =
          io->inputs[program->rank][i * devices + d];
    }
  }
  for (uint32_t i = 0; i < program->num_constants; ++i) {
    for (size_t d = 0; d < devices; ++d) {
      actor->regs[program->constants[i].reg * devices + d] =
          actor->constants[i * devices + d];
    }
  }
  actor->outputs = io->outputs[program->rank];
  actor->at = 0;
  actor->done = false;
  actor->runs = 0;
}

static void begin_step(jpp_runtime_t* runtime, const jpp_step_io_t* io) {
  atomic_store(&runtime->halt, JPP_HALT_NO);
  atomic_store(&runtime->order, 0);
  clear_outputs(runtime, io);
  for (uint32_t i = 0; i < runtime->plan->num_channels; ++i) {
    runtime->links[i].sent = 0;
    atomic_store(&runtime->links[i].received, 0);
  }
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    begin_actor(&runtime->actors[r], io);
  }
  runtime->checks = atomic_load(&runtime->checks_wanted);
  runtime->tracing = atomic_load(&runtime->tracing_wanted);
  if (runtime->tracing) jpp_trace_begin(runtime);
}

static jpp_status_t* check_inputs(const jpp_runtime_t* runtime) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    const jpp_actor_t* actor = &runtime->actors[r];
    for (uint32_t i = 0; i < actor->program->num_inputs; ++i) {
      const jpp_program_input_t* input = &actor->program->inputs[i];
      for (uint32_t d = 0; d < runtime->devices_per_rank; ++d) {
        if (actor->regs[(size_t)input->reg * runtime->devices_per_rank + d]) continue;
        return jpp_status_make(JPP_INVALID_ARGUMENT,
                               "rank %u, argument %u: expected a buffer on device %u of "
                               "the rank, found none",
                               r, input->arg, d);
      }
    }
  }
  return NULL;
}

// --- Wait -----------------------------------------------------------------------------

static jpp_status_t* await_event(const jpp_runtime_t* runtime, jpp_event_t** event) {
  if (!*event) return NULL;
  jpp_status_t* status = jpp_client_event_await(runtime->client, *event);
  jpp_client_event_destroy(runtime->client, *event);
  *event = NULL;
  return status;
}

static uint32_t instr_of_run(const jpp_actor_t* actor, uint32_t run) {
  for (uint32_t i = 0; i < actor->num_instrs; ++i) {
    const jpp_actor_instr_t* instr = &actor->instrs[i];
    if (instr->kind == JPP_INSTR_RUN && instr->run == run) return instr->source;
  }
  return 0;
}

static void run_failed(const jpp_actor_t* actor, uint32_t run, jpp_status_t* status,
                       first_failure_t* first) {
  if (!is_first(first, actor->order[run])) {
    jpp_status_free(status);
    return;
  }
  status = jpp_failure_locate(actor, instr_of_run(actor, run), status);
  replace_failure(first, actor->order[run], status);
}

static void await_runs(jpp_actor_t* actor, first_failure_t* first) {
  uint32_t devices = actor->runtime->devices_per_rank;
  jpp_event_t** event = actor->events;
  for (uint32_t run = 0; run < actor->runs; ++run) {
    for (uint32_t d = 0; d < devices; ++d, ++event) {
      jpp_status_t* status = await_event(actor->runtime, event);
      if (status) run_failed(actor, run, status, first);
    }
  }
}

static void output_failed(const jpp_actor_t* actor, uint32_t output, jpp_status_t* status,
                          first_failure_t* first) {
  if (is_first(first, kAfterAllRuns)) {
    status = jpp_failure_locate_output(actor, output, status);
    replace_failure(first, kAfterAllRuns, status);
  } else {
    jpp_status_free(status);
  }
}

static void await_outputs(jpp_actor_t* actor, first_failure_t* first) {
  uint32_t devices = actor->runtime->devices_per_rank;
  jpp_event_t** event = actor->output_events;
  for (uint32_t i = 0; i < actor->program->num_outputs; ++i) {
    for (uint32_t d = 0; d < devices; ++d, ++event) {
      jpp_status_t* status = await_event(actor->runtime, event);
      if (status) output_failed(actor, i, status, first);
    }
  }
}

static void take_issue_error(jpp_actor_t* actor, first_failure_t* first) {
  if (!actor->error) return;
  if (is_first(first, actor->error_order)) {
    replace_failure(first, actor->error_order, actor->error);
  } else {
    jpp_status_free(actor->error);
  }
  actor->error = NULL;
}

static void drop_events(jpp_runtime_t* runtime, jpp_event_t** events, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    jpp_client_event_destroy(runtime->client, events[i]);
    events[i] = NULL;
  }
}

// Drops the events of a cancelled step without waiting for them; its outcome stays
// unknown.
static void abandon_step(jpp_runtime_t* runtime) {
  size_t devices = runtime->devices_per_rank;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    jpp_actor_t* actor = &runtime->actors[r];
    drop_events(runtime, actor->events, actor->runs * devices);
    drop_events(runtime, actor->output_events, actor->program->num_outputs * devices);
    jpp_status_free(actor->error);
    actor->error = NULL;
  }
}

static jpp_status_t* cancelled_error(void) {
  return jpp_status_make(JPP_CANCELLED, "the step was cancelled while it ran");
}

// Waits until all that was issued is done; returns the step's outcome.
static jpp_status_t* await_all(jpp_runtime_t* runtime) {
  first_failure_t first = {0};
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    take_issue_error(&runtime->actors[r], &first);
    await_runs(&runtime->actors[r], &first);
  }
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    await_outputs(&runtime->actors[r], &first);
  }
  if (runtime->tracing) jpp_trace_drain(runtime);
  if (first.status) return first.status;
  int halt = atomic_load(&runtime->halt);
  if (halt == JPP_HALT_STUCK) return jpp_failure_stuck(runtime);
  return halt == JPP_HALT_CANCELLED ? cancelled_error() : NULL;
}

// --- End ------------------------------------------------------------------------------

static void hand_out_outputs(jpp_actor_t* actor) {
  size_t devices = actor->runtime->devices_per_rank;
  for (uint32_t i = 0; i < actor->program->num_outputs; ++i) {
    const jpp_program_output_t* output = &actor->program->outputs[i];
    for (size_t d = 0; d < devices && !output->copy; ++d) {
      actor->outputs[i * devices + d] = actor->regs[output->reg * devices + d];
      actor->regs[output->reg * devices + d] = NULL;
    }
  }
}

static void drop_outputs(jpp_actor_t* actor) {
  size_t count = (size_t)actor->program->num_outputs * actor->runtime->devices_per_rank;
  for (size_t i = 0; i < count; ++i) {
    jpp_client_buffer_destroy(actor->runtime->client, actor->outputs[i]);
    actor->outputs[i] = NULL;
  }
}

static void forget_register(jpp_actor_t* actor, uint32_t reg) {
  size_t devices = actor->runtime->devices_per_rank;
  for (size_t d = 0; d < devices; ++d) actor->regs[reg * devices + d] = NULL;
}

// Destroys what the registers still hold, except what the step does not own.
static void clear_registers(jpp_actor_t* actor) {
  const jpp_program_t* program = actor->program;
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    if (!program->inputs[i].owned) forget_register(actor, program->inputs[i].reg);
  }
  for (uint32_t i = 0; i < program->num_constants; ++i) {
    forget_register(actor, program->constants[i].reg);
  }
  size_t count = (size_t)program->num_registers * actor->runtime->devices_per_rank;
  for (size_t i = 0; i < count; ++i) {
    if (!actor->regs[i]) continue;
    jpp_client_buffer_destroy(actor->runtime->client, actor->regs[i]);
    actor->regs[i] = NULL;
  }
}

static void end_step(jpp_runtime_t* runtime, bool success) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    jpp_actor_t* actor = &runtime->actors[r];
    if (success) {
      hand_out_outputs(actor);
    } else {
      drop_outputs(actor);
    }
    clear_registers(actor);
  }
  for (uint32_t i = 0; i < runtime->plan->num_channels; ++i) {
    jpp_link_t* link = &runtime->links[i];
    if (link->sent != atomic_load(&link->received)) jpp_channel_reset(link->channel);
  }
  if (runtime->tracing && success) jpp_trace_finish(runtime);
}

static jpp_status_t* issue_and_await(jpp_runtime_t* runtime) {
  jpp_crew_issue(runtime);
  if (jpp_cancel_await(runtime) || runtime->tracing) return await_all(runtime);
  abandon_step(runtime);
  return cancelled_error();
}

static jpp_status_t* step_locked(jpp_runtime_t* runtime, const jpp_step_io_t* io) {
  begin_step(runtime, io);
  jpp_status_t* status = check_inputs(runtime);
  if (!status) status = issue_and_await(runtime);
  end_step(runtime, !status);
  return status;
}

// Fails a step that never began; the inputs that it owns are destroyed, as after any
// failure.
static jpp_status_t* refuse_step(jpp_runtime_t* runtime, const jpp_step_io_t* io) {
  uint32_t devices = runtime->devices_per_rank;
  clear_outputs(runtime, io);
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    const jpp_program_t* program = &runtime->plan->programs[r];
    for (uint32_t i = 0; i < program->num_inputs * devices; ++i) {
      if (!program->inputs[i / devices].owned) continue;
      jpp_client_buffer_destroy(runtime->client, io->inputs[r][i]);
    }
  }
  return jpp_status_make(JPP_CANCELLED, "the step was cancelled before it began");
}

jpp_status_t* jpp_runtime_step(jpp_runtime_t* runtime, const jpp_step_io_t* io) {
  // In a forked child the lock may be held for ever.
  jpp_status_t* forked = jpp_process_check();
  if (forked) {
    clear_outputs(runtime, io);
    return forked;
  }
  if (!jpp_cancel_lock(runtime, io)) return refuse_step(runtime, io);
  jpp_status_t* status = step_locked(runtime, io);
  pthread_mutex_unlock(&runtime->step_mutex);
  return status;
}
