// One step. The issuing thread puts the arguments into registers, issues the instructions
// and takes the results out; the finishing thread waits for the issued work, and reports
// the first failure.
#include "base/clock.h"
#include "base/null.h"
#include "device/wait.h"
#include "runtime/step/failure.h"
#include "runtime/step/state.h"

// How long devices may take to finish their work once a run or the job has failed. An
// allocator may wait in every run for memory that no run frees.
enum { kMostGraceMs = 5000 };

// The failure that was issued first: work that depends on it fails later, with its
// message.
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

// --- Issue ----------------------------------------------------------------------------

static bool is_cancelled(const jpp_runtime_t* runtime, const jpp_step_t* step) {
  return atomic_load_explicit(&runtime->cancelled, memory_order_relaxed) >= step->number;
}

bool jpp__step_is_halted(const jpp_runtime_t* runtime, const jpp_step_t* step) {
  return atomic_load_explicit(&runtime->broken, memory_order_relaxed) ||
         step->halt != JPP_HALT_NO || is_cancelled(runtime, step);
}

static void begin_actor(jpp_actor_t* actor, jpp_actor_step_t* step, uint64_t number) {
  // Keeps the record of the rank's position when the job failed.
  bool broken = atomic_load(&actor->runtime->broken);
  if (actor->flight && !broken) jpp__flight_begin(actor->flight, number);
  actor->step = step;
  actor->at = 0;
  actor->done = false;
  actor->waits_since = 0;
  step->runs = 0;
  step->settled = 0;
  const jpp_program_t* program = actor->program;
  size_t devices = actor->runtime->devices_per_rank;
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    for (size_t d = 0; d < devices; ++d) {
      actor->regs[program->inputs[i].reg * devices + d] =
          actor->step->inputs[i * devices + d];
    }
  }
  for (uint32_t i = 0; i < program->num_constants; ++i) {
    for (size_t d = 0; d < devices; ++d) {
      actor->regs[program->constants[i].reg * devices + d] =
          actor->constants[i * devices + d];
    }
  }
}

static void begin_step(jpp_runtime_t* runtime, jpp_step_t* step) {
  runtime->step = step;
  atomic_store(&runtime->begun, step->number);
  jpp__deadline_begin(&runtime->deadline, runtime->network ? jpp__clock_now() : 0);
  step->halt = JPP_HALT_NO;
  runtime->order = 0;
  for (uint32_t i = 0; i < runtime->plan->num_channels; ++i) {
    runtime->links[i].sent = 0;
    runtime->links[i].received = 0;
  }
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    begin_actor(&runtime->actors[r], &step->actors[r], step->number);
  }
  step->checks = atomic_load(&runtime->checks_wanted);
  jpp__trace_begin(runtime, step);
}

static jpp_status_t* cancelled_error(void) {
  return jpp_status_make(JPP_CANCELLED, "the step was cancelled while it ran");
}

// Issues the step. Returns the reason why it was not issued completely, unless an actor
// has the error.
static jpp_status_t* issue_all(jpp_runtime_t* runtime, jpp_step_t* step) {
  const jpp_actor_t* late = jpp__issuer_run(runtime);
  if (step->halt == JPP_HALT_STUCK) return jpp__failure_stuck(runtime);
  if (late || step->halt == JPP_HALT_STALLED) {
    jpp_status_t* status = late ? jpp__failure_late(late) : jpp__failure_stalled(runtime);
    // Comes before the wait for issued work, which may hang.
    jpp__runtime_break(runtime, status);
    return status;
  }
  if (atomic_load(&runtime->broken)) return jpp__runtime_breakage(runtime);
  if (runtime->network) jpp__deadline_end(&runtime->deadline, jpp__clock_now());
  return is_cancelled(runtime, step) ? cancelled_error() : NULL;
}

static bool is_all_issued(const jpp_runtime_t* runtime) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    if (!runtime->actors[r].done) return false;
  }
  return true;
}

static void take_outputs(jpp_actor_t* actor) {
  size_t devices = actor->runtime->devices_per_rank;
  for (uint32_t i = 0; i < actor->program->num_outputs; ++i) {
    const jpp_program_output_t* output = &actor->program->outputs[i];
    for (size_t d = 0; d < devices && !output->copy; ++d) {
      actor->step->outputs[i * devices + d] = actor->regs[output->reg * devices + d];
      actor->regs[output->reg * devices + d] = NULL;
    }
  }
}

static void forget_register(jpp_actor_t* actor, uint32_t reg) {
  size_t devices = actor->runtime->devices_per_rank;
  for (size_t d = 0; d < devices; ++d) actor->regs[reg * devices + d] = NULL;
}

// Destroys the buffers that are left in registers, except those that the step does not
// own. Work that was issued still finishes.
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

static void drop_outputs(jpp_runtime_t* runtime, const jpp_step_t* step) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    jpp_buffer_t** outputs = step->actors[r].outputs;
    size_t count =
        (size_t)runtime->actors[r].program->num_outputs * runtime->devices_per_rank;
    for (size_t i = 0; i < count; ++i) {
      jpp_client_buffer_destroy(runtime->client, outputs[i]);
      outputs[i] = NULL;
    }
  }
}

// Restores registers and channels to their state before the step.
static void end_issue(jpp_runtime_t* runtime, jpp_step_t* step) {
  bool success = !step->failure && is_all_issued(runtime);
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    if (success) take_outputs(&runtime->actors[r]);
    clear_registers(&runtime->actors[r]);
  }
  for (uint32_t i = 0; i < runtime->plan->num_channels; ++i) {
    jpp_link_t* link = &runtime->links[i];
    if (link->remote || !link->channel) continue;
    if (link->sent != link->received) jpp_channel_reset(link->channel);
  }
  if (!success) drop_outputs(runtime, step);
  if (!success && runtime->network) jpp__runtime_note_failure(runtime);
  jpp__call_issued(runtime, step, success);
}

void jpp__step_issue(jpp_runtime_t* runtime, jpp_step_t* step) {
  step->failure = jpp__call_open_args(runtime, step);
  begin_step(runtime, step);
  if (!step->failure) step->failure = issue_all(runtime, step);
  end_issue(runtime, step);
}

// --- Wait -----------------------------------------------------------------------------

static uint32_t instr_of_run(const jpp_actor_t* actor, uint32_t run) {
  for (uint32_t i = 0; i < actor->num_instrs; ++i) {
    const jpp_actor_instr_t* instr = &actor->instrs[i];
    if (instr->kind == JPP_INSTR_RUN && instr->run == run) return instr->source;
  }
  return 0;
}

static void run_failed(const jpp_actor_t* actor, const jpp_actor_step_t* step,
                       uint32_t run, jpp_status_t* status, first_failure_t* first) {
  if (!is_first(first, step->order[run])) {
    jpp_status_free(status);
    return;
  }
  status = jpp__failure_locate(actor, instr_of_run(actor, run), status);
  replace_failure(first, step->order[run], status);
}

static void await_runs(const jpp_actor_t* actor, const jpp_actor_step_t* step,
                       first_failure_t* first) {
  uint32_t devices = actor->runtime->devices_per_rank;
  jpp_event_t** event = step->events;
  for (uint32_t run = 0; run < step->runs; ++run) {
    for (uint32_t d = 0; d < devices; ++d, ++event) {
      jpp_status_t* status = jpp__wait_end_of(actor->runtime->client, event);
      if (status) run_failed(actor, step, run, status, first);
    }
  }
}

static void output_failed(const jpp_actor_t* actor, uint32_t output, jpp_status_t* status,
                          first_failure_t* first) {
  if (is_first(first, kAfterAllRuns)) {
    status = jpp__failure_locate_output(actor, output, status);
    replace_failure(first, kAfterAllRuns, status);
  } else {
    jpp_status_free(status);
  }
}

static void await_outputs(const jpp_actor_t* actor, const jpp_actor_step_t* step,
                          first_failure_t* first) {
  uint32_t devices = actor->runtime->devices_per_rank;
  jpp_event_t** event = step->output_events;
  for (uint32_t i = 0; i < actor->program->num_outputs; ++i) {
    for (uint32_t d = 0; d < devices; ++d, ++event) {
      jpp_status_t* status = jpp__wait_end_of(actor->runtime->client, event);
      if (status) output_failed(actor, i, status, first);
    }
  }
}

static void take_issue_error(jpp_actor_step_t* step, first_failure_t* first) {
  if (!step->error) return;
  if (is_first(first, step->error_order)) {
    replace_failure(first, step->error_order, step->error);
  } else {
    jpp_status_free(step->error);
  }
  step->error = NULL;
}

// Waits until all issued work is done; returns the first failure.
static jpp_status_t* await_all(const jpp_runtime_t* runtime, jpp_step_t* step) {
  first_failure_t first = {0};
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    take_issue_error(&step->actors[r], &first);
    await_runs(&runtime->actors[r], &step->actors[r], &first);
  }
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    await_outputs(&runtime->actors[r], &step->actors[r], &first);
  }
  if (step->trace) jpp__trace_drain(step);
  return first.status;
}

// --- Cancel ---------------------------------------------------------------------------

// May run in a signal handler: two atomic operations.
void jpp_runtime_cancel(jpp_runtime_t* runtime) {
  atomic_store(&runtime->cancelled, atomic_load(&runtime->queue.submitted));
  jpp__wakeup_call(&runtime->wakeup);
}

// A wait for a step.
typedef struct step_wait {
  const jpp_runtime_t* runtime;
  jpp_step_t* step;
  int64_t failed_at;  // when the wait found a run that failed; 0: it found none
} step_wait_t;

static bool is_grace_over(const jpp_runtime_t* runtime, int64_t failed_at) {
  uint32_t grace_ms = runtime->step_timeout_ms;
  if (!failed_at) return false;
  if (grace_ms > kMostGraceMs) grace_ms = kMostGraceMs;
  return (jpp__clock_now() - failed_at) / JPP_NANOSECONDS_OF_MS > grace_ms;
}

// Devices finish their work soon unless they hang, which may be the reason why the job
// failed.
static bool is_hopeless(const jpp_runtime_t* runtime) {
  return is_grace_over(runtime,
                       atomic_load_explicit(&runtime->failed_at, memory_order_relaxed));
}

static bool is_given_up(const jpp_runtime_t* runtime, const jpp_step_t* step) {
  return is_cancelled(runtime, step) || is_hopeless(runtime);
}

static bool has_failed_run(const jpp_runtime_t* runtime, jpp_step_t* step) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    jpp_status_t* status =
        jpp__actor_known_failure(&runtime->actors[r], &step->actors[r]);
    jpp_status_free(status);
    if (status) return true;
  }
  return false;
}

static bool wait_should_end(void* user) {
  step_wait_t* wait = user;
  if (!wait->failed_at && has_failed_run(wait->runtime, wait->step)) {
    wait->failed_at = jpp__clock_now();
  }
  return is_given_up(wait->runtime, wait->step) ||
         is_grace_over(wait->runtime, wait->failed_at);
}

static bool are_ready(const jpp_runtime_t* runtime, jpp_event_t** events, size_t count,
                      const jpp_interrupt_t* interrupt) {
  // Waits for the last event first: when it is ready, the others usually are.
  while (count-- > 0) {
    if (!jpp__wait_event(runtime->client, events[count], interrupt)) return false;
  }
  return true;
}

// Waits until all events of the step are ready; false if it was cancelled, if its devices
// seem to hang, or if they go on for long after a run has failed.
static bool await_readiness(const jpp_runtime_t* runtime, jpp_step_t* step) {
  step_wait_t wait = {.runtime = runtime, .step = step};
  jpp_interrupt_t interrupt = {.requested = wait_should_end, .user = &wait};
  size_t devices = runtime->devices_per_rank;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    const jpp_actor_step_t* actor = &step->actors[r];
    size_t outputs = runtime->actors[r].program->num_outputs * devices;
    if (is_given_up(runtime, step) ||
        !are_ready(runtime, actor->events, actor->runs * devices, &interrupt) ||
        !are_ready(runtime, actor->output_events, outputs, &interrupt)) {
      return false;
    }
  }
  return true;
}

static void drop_unready(const jpp_runtime_t* runtime, jpp_event_t** events,
                         size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (jpp__wait_is_event_ready(runtime->client, events[i])) continue;
    jpp_client_event_destroy(runtime->client, events[i]);
    events[i] = NULL;
  }
}

// Drops the events that are not ready instead of waiting for them. Returns the first
// failure that is known.
static jpp_status_t* abandon(const jpp_runtime_t* runtime, jpp_step_t* step) {
  size_t devices = runtime->devices_per_rank;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    jpp_actor_step_t* actor = &step->actors[r];
    drop_unready(runtime, actor->events, actor->runs * devices);
    drop_unready(runtime, actor->output_events,
                 runtime->actors[r].program->num_outputs * devices);
  }
  return await_all(runtime, step);
}

// --- Finish ---------------------------------------------------------------------------

// Owns both and returns the first, which has more information.
static jpp_status_t* either(jpp_status_t* first, jpp_status_t* second) {
  if (!first) return second;
  jpp_status_free(second);
  return first;
}

// A traced step is awaited even if it is cancelled, because its callbacks write to the
// trace.
static jpp_status_t* await_step(jpp_runtime_t* runtime, jpp_step_t* step) {
  jpp_status_t* known = step->failure;
  step->failure = NULL;
  if (await_readiness(runtime, step) || step->trace) {
    return either(await_all(runtime, step), known);
  }
  jpp_status_t* failure = abandon(runtime, step);
  if (is_cancelled(runtime, step)) {
    jpp_status_free(failure);
    return either(known, cancelled_error());
  }
  atomic_store(&runtime->given_up, true);
  if (!is_hopeless(runtime)) return either(failure, known);
  known = either(known, failure);
  if (!known) known = jpp__runtime_breakage(runtime);
  return known ? known : cancelled_error();
}

void jpp__step_finish(jpp_runtime_t* runtime, jpp_step_t* step) {
  jpp_status_t* status = await_step(runtime, step);
  if (status && runtime->network) jpp__runtime_break(runtime, status);
  if (step->trace) jpp__trace_finish(runtime, step, !status);
  jpp__call_finished(runtime, step, status);
}
