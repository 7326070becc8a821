// Passes buffers between arrays and steps, on the runtime's threads: when a step is
// issued, it takes the buffers of its arguments, or a copy if another reader holds them;
// its own buffers pass to its results.
#include "array/claim.h"
#include "runtime/cluster/network.h"
#include "runtime/step/state.h"

// --- Arguments ------------------------------------------------------------------------

// Under the lock: the outcome of an argument that failed, or NULL.
static jpp_outcome_t* find_failed_arg(const jpp_runtime_t* runtime,
                                      const jpp_step_t* step) {
  for (uint32_t a = 0; a < runtime->params.count; ++a) {
    jpp_outcome_t* outcome = step->args[a]->outcome;
    if (outcome && outcome->failure) return outcome;
  }
  return NULL;
}

// Exchanges messages with other processes in the meantime.
static bool progress_network(void* user) {
  jpp__network_progress(user);
  return false;
}

// An argument that an earlier step of this runtime makes exists already, because steps
// are issued in order; only results of other runtimes are waited for.
static void await_args(jpp_runtime_t* runtime, const jpp_step_t* step) {
  const jpp_interrupt_t listening = {
      .requested = progress_network, .user = runtime, .period_us = kJppNetworkPeriodUs};
  for (uint32_t a = 0; a < runtime->params.count; ++a) {
    jpp__array_await_issue(step->args[a], runtime->network ? &listening : NULL);
  }
}

// Under the lock. The step owns the buffers that it may delete, so they leave their
// arrays.
static void take_input(const jpp_actor_t* actor, const jpp_program_input_t* input,
                       jpp_buffer_t** shards, jpp_buffer_t** out_shards) {
  for (uint32_t d = 0; d < actor->runtime->devices_per_rank; ++d) {
    out_shards[d] = shards[d];
    if (input->owned) shards[d] = NULL;
  }
}

static jpp_buffer_t** shards_of_input(jpp_runtime_t* runtime, const jpp_step_t* step,
                                      uint32_t rank, uint32_t input) {
  return step->actors[rank].inputs + (size_t)input * runtime->devices_per_rank;
}

// Under the lock: takes the buffers of all arguments that are where they are needed.
static void take_inputs(jpp_runtime_t* runtime, const jpp_step_t* step, uint32_t rank) {
  const jpp_program_t* program = runtime->actors[rank].program;
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    const jpp_program_input_t* input = &program->inputs[i];
    if (step->actors[rank].is_copy[i]) continue;
    take_input(&runtime->actors[rank], input, jpp__array_at(step->args[input->arg], rank),
               shards_of_input(runtime, step, rank, i));
  }
}

static jpp_memory_t memory_of_arg(const jpp_runtime_t* runtime, uint32_t arg) {
  const jpp_graph_t* graph = runtime->plan->staged->graph;
  return graph->values[graph->args[arg].value].type.memory;
}

// Copies an argument to the memory that the plan requires, from the same rank or, if it
// is not there, from its first rank.
static jpp_status_t* copy_input(jpp_runtime_t* runtime, const jpp_step_t* step,
                                uint32_t rank, uint32_t input) {
  const jpp_actor_t* actor = &runtime->actors[rank];
  uint32_t arg = actor->program->inputs[input].arg;
  const jpp_array_t* array = step->args[arg];
  jpp_memory_t memory = memory_of_arg(runtime, arg);
  jpp_buffer_t** shards = jpp__array_at(array, rank);
  if (!shards) shards = array->buffers;
  // From a rank of another size, each device has the whole array.
  uint32_t count = runtime->devices_per_rank;
  while (count > 1 && !shards[count - 1]) --count;
  jpp_buffer_t** copies = shards_of_input(runtime, step, rank, input);
  for (uint32_t d = 0; d < actor->num_devices; ++d) {
    JPP_RETURN_IF_ERROR(jpp_client_buffer_copy_to_memory(
        runtime->client, shards[d % count], actor->devices[d], memory, &copies[d]));
  }
  return NULL;
}

// Under the lock: whether the step needs a copy, because the argument is on another rank
// or in another memory, or because the step may write to it while another reader holds
// it. No reader can be added: a donated array is already marked as deleted.
static bool needs_copy(const jpp_runtime_t* runtime, const jpp_step_t* step,
                       const jpp_program_input_t* input, uint32_t rank) {
  const jpp_array_t* array = step->args[input->arg];
  return !jpp__array_at(array, rank) ||
         array->layout.memory != memory_of_arg(runtime, input->arg) ||
         (input->owned && jpp__array_is_shared(array, rank));
}

static void mark_copies(jpp_runtime_t* runtime, const jpp_step_t* step) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    const jpp_program_t* program = runtime->actors[r].program;
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      step->actors[r].is_copy[i] = needs_copy(runtime, step, &program->inputs[i], r);
    }
  }
}

static jpp_status_t* copy_inputs(jpp_runtime_t* runtime, const jpp_step_t* step) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    const jpp_program_t* program = runtime->actors[r].program;
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      if (!step->actors[r].is_copy[i]) continue;
      jpp_status_t* status = copy_input(runtime, step, r, i);
      if (!status) continue;
      status = jpp_plan_explain_memory(runtime->plan, r, status);
      return jpp_status_annotate(status, "rank %u, argument %s", r,
                                 runtime->params.names[program->inputs[i].arg]);
    }
  }
  return NULL;
}

static void clear_inputs(jpp_runtime_t* runtime, const jpp_step_t* step) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    uint32_t inputs = runtime->actors[r].program->num_inputs;
    for (uint32_t i = 0; i < inputs; ++i) step->actors[r].is_copy[i] = false;
    size_t count = (size_t)inputs * runtime->devices_per_rank;
    for (size_t k = 0; k < count; ++k) step->actors[r].inputs[k] = NULL;
  }
}

// Copies are made first: later, the buffers of the first rank may have been taken.
jpp_status_t* jpp__call_open_args(jpp_runtime_t* runtime, jpp_step_t* step) {
  clear_inputs(runtime, step);
  jpp__arrays_lock();
  await_args(runtime, step);
  const jpp_outcome_t* failed = find_failed_arg(runtime, step);
  jpp_status_t* status = failed ? jpp_status_clone(failed->failure) : NULL;
  if (!status) mark_copies(runtime, step);
  jpp__arrays_unlock();
  if (status) return status;
  JPP_RETURN_IF_ERROR(copy_inputs(runtime, step));
  jpp__arrays_lock();
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) take_inputs(runtime, step, r);
  jpp__arrays_unlock();
  return NULL;
}

// Drops the runtime's own copies of arguments that the step only borrowed.
static void drop_copies(jpp_runtime_t* runtime, const jpp_step_t* step, uint32_t rank) {
  const jpp_program_t* program = runtime->actors[rank].program;
  for (uint32_t i = 0; i < program->num_inputs; ++i) {
    if (!step->actors[rank].is_copy[i] || program->inputs[i].owned) continue;
    jpp_buffer_t** copies = shards_of_input(runtime, step, rank, i);
    for (uint32_t d = 0; d < runtime->devices_per_rank; ++d) {
      jpp_client_buffer_destroy(runtime->client, copies[d]);
      copies[d] = NULL;
    }
  }
}

// --- Results --------------------------------------------------------------------------

static void give_outputs(jpp_runtime_t* runtime, const jpp_step_t* step, uint32_t rank) {
  const jpp_program_t* program = runtime->actors[rank].program;
  uint32_t devices = runtime->devices_per_rank;
  for (uint32_t i = 0; i < program->num_outputs; ++i) {
    jpp_array_t* result = step->results[program->outputs[i].output];
    jpp_buffer_t** shards = jpp__array_at(result, rank);
    for (uint32_t d = 0; d < devices; ++d) {
      jpp_buffer_t** output = &step->actors[rank].outputs[(size_t)i * devices + d];
      shards[d] = *output;
      *output = NULL;
    }
  }
}

void jpp__call_issued(jpp_runtime_t* runtime, jpp_step_t* step, bool success) {
  const jpp_graph_t* graph = runtime->plan->staged->graph;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    if (success) give_outputs(runtime, step, r);
    drop_copies(runtime, step, r);
  }
  if (success) {
    jpp__arrays_lock();
    jpp__outcome_set_issued(step->outcome);
    jpp__arrays_unlock();
  }
  for (uint32_t o = 0; o < graph->num_outputs && success; ++o) {
    jpp__array_settle(step->results[o]);  // it may have been deleted before it existed
  }
  for (uint32_t a = 0; a < graph->num_args; ++a) jpp__array_end_read(step->args[a]);
}

// A step that depends on a failed argument fails with the same text. Owns `status`.
static jpp_status_t* inherit_failure(jpp_step_t* step, jpp_outcome_t* from,
                                     jpp_status_t* status) {
  jpp_status_free(status);
  step->outcome->cause = from->cause ? from->cause : from;
  ++step->outcome->cause->holders;
  return jpp_status_clone(from->failure);
}

static void fail_call(jpp_runtime_t* runtime, jpp_step_t* step, jpp_status_t* status) {
  jpp_outcome_t* before = NULL;
  jpp__arrays_lock();
  jpp__claim_lose(&runtime->params, step->args);
  jpp_outcome_t* from = find_failed_arg(runtime, step);
  // Steps that were in flight when a process failed get the same cause.
  if (!from && atomic_load(&runtime->broken)) from = runtime->failed;
  if (from) {
    status = inherit_failure(step, from, status);
  } else {
    status = jpp_status_annotate(status, "step %llu", (unsigned long long)step->number);
    // Kept for the next call, unless it is reported to a caller before.
    before = runtime->failed;
    runtime->failed = step->outcome;
    ++step->outcome->holders;
  }
  jpp__outcome_finish(step->outcome, status);
  jpp__arrays_unlock();
  jpp__outcome_release(before);
  for (uint32_t o = 0; o < runtime->plan->staged->graph->num_outputs; ++o) {
    jpp__array_settle(step->results[o]);
  }
}

void jpp__call_finished(jpp_runtime_t* runtime, jpp_step_t* step, jpp_status_t* status) {
  if (status) {
    fail_call(runtime, step, status);
  } else {
    jpp__arrays_lock();
    jpp__outcome_finish(step->outcome, NULL);
    jpp__arrays_unlock();
  }
  jpp__call_release(runtime, step);
}
