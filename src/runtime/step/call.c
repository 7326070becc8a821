// The caller's thread: a call takes arrays and returns promises. It claims all donated
// arguments before anything runs, or none of them. handover.c does the rest.
#include "array/claim.h"
#include "base/alloc.h"
#include "base/null.h"
#include "base/struct_size.h"
#include "graph/print.h"
#include "runtime/cluster/network.h"
#include "runtime/step/state.h"

// --- Refusals -------------------------------------------------------------------------

static const jpp_graph_t* graph_of(const jpp_runtime_t* runtime) {
  return runtime->plan->staged->graph;
}

static const char* arg_name(const jpp_runtime_t* runtime, uint32_t arg) {
  return runtime->params.names[arg];
}

static jpp_status_t* interrupted(void) {
  return jpp_status_make(JPP_CANCELLED,
                         "the call was interrupted while it waited for its turn");
}

// The failure of an earlier step, or between steps, that was not reported to any caller.
static jpp_status_t* take_failure(jpp_runtime_t* runtime) {
  jpp_status_t* status = NULL;
  jpp__arrays_lock();
  if (runtime->failed) {
    if (!runtime->failed->told) status = jpp__outcome_tell(runtime->failed);
  } else if (!runtime->breakage_told) {
    status = jpp_status_clone(runtime->breakage);
    runtime->breakage_told = status != NULL;
  }
  jpp__arrays_unlock();
  return status;
}

// The plan knows how many bytes of a sharded argument a device holds, but not how it is
// cut; it only checks that the piece divides the whole.
static bool is_of_type(const jpp_array_type_t* found, const jpp_type_t* type,
                       uint64_t device_bytes) {
  if (found->dtype == JPP_DTYPE_INVALID || type->dtype == JPP_DTYPE_INVALID) return true;
  if (found->dtype != type->dtype || found->ndim != type->ndim ||
      found->device_bytes != device_bytes) {
    return false;
  }
  bool equal = true, divides = true;
  for (uint32_t i = 0; i < type->ndim; ++i) {
    int64_t whole = type->dims[i], piece = found->dims[i];
    if (piece == whole) continue;
    equal = false;
    divides = divides && piece > 0 && whole % piece == 0;
  }
  uint64_t whole_bytes = jpp_type_bytes(type);
  bool is_cut = device_bytes < whole_bytes || whole_bytes == 0;
  return equal || (divides && !found->is_whole && is_cut);
}

static jpp_status_t* check_type(const jpp_runtime_t* runtime, uint32_t arg,
                                const jpp_array_type_t* found) {
  const jpp_staged_t* staged = runtime->plan->staged;
  uint32_t value = staged->args[arg].value;
  const jpp_type_t* type = &staged->values[value].type;
  uint64_t device_bytes = runtime->plan->value_bytes[value];
  if (is_of_type(found, type, device_bytes)) return NULL;
  const jpp_type_t found_type = {
      .dtype = found->dtype, .ndim = found->ndim, .dims = found->dims};
  bool cut = device_bytes < jpp_type_bytes(type);
  jpp_str_t str = {0};
  jpp_str_appendf(&str, "argument %s: expected ", arg_name(runtime, arg));
  jpp__type_append(&str, type);
  if (cut) {
    jpp_str_appendf(&str, ", cut into pieces of %llu bytes a device",
                    (unsigned long long)device_bytes);
  }
  jpp_str_append(&str, ", found ");
  jpp__type_append(&str, &found_type);
  if (cut) {
    jpp_str_appendf(&str, ", %llu bytes a device",
                    (unsigned long long)found->device_bytes);
  }
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status = jpp_status_make(JPP_INVALID_ARGUMENT, "%s", text);
  jpp_free(text);
  return status;
}

static jpp_status_t* check_args(const jpp_runtime_t* runtime, const jpp_call_t* call) {
  for (uint32_t a = 0; a < runtime->params.count; ++a) {
    if (!call->args[a]) {
      return jpp_status_make(JPP_INVALID_ARGUMENT,
                             "argument %s: expected an array, found NULL",
                             arg_name(runtime, a));
    }
    const jpp_array_layout_t* layout = &call->args[a]->layout;
    if (layout->client == runtime->client &&
        layout->devices_per_rank == runtime->devices_per_rank) {
      JPP_RETURN_IF_ERROR(check_type(runtime, a, &call->args[a]->type));
      continue;
    }
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "argument %s: expected an array on %u devices a rank of the "
                           "runtime's client, found one of %s, on %u",
                           arg_name(runtime, a), runtime->devices_per_rank,
                           layout->client == runtime->client ? "that" : "another",
                           layout->devices_per_rank);
  }
  return NULL;
}

static bool lies_in_this_process(const jpp_runtime_t* runtime, const jpp_array_t* array) {
  for (uint32_t i = 0; i < array->layout.num_ranks; ++i) {
    if (jpp__runtime_has_rank(runtime, array->ranks[i])) return true;
  }
  return false;
}

// Each argument that a rank needs must be on a rank from which it can be copied.
static jpp_status_t* check_places(const jpp_runtime_t* runtime, const jpp_call_t* call) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    const jpp_program_t* program = runtime->actors[r].program;
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      uint32_t arg = program->inputs[i].arg;
      if (lies_in_this_process(runtime, call->args[arg])) continue;
      return jpp_status_make(
          JPP_INVALID_ARGUMENT,
          "argument %s: expected an array on rank %u, or on another rank of this process "
          "to copy it from, found it on neither; a step leaves the first result that has "
          "an argument's structure and types on the ranks where the next step needs it",
          arg_name(runtime, arg), r);
    }
  }
  return NULL;
}

// The error of an argument that failed.
static jpp_status_t* tell_of_failed_arg(const jpp_runtime_t* runtime,
                                        const jpp_call_t* call) {
  jpp_status_t* status = NULL;
  jpp__arrays_lock();
  for (uint32_t a = 0; a < runtime->params.count && !status; ++a) {
    status = jpp__outcome_tell(call->args[a]->outcome);
  }
  jpp__arrays_unlock();
  return status;
}

static void hold_args(const jpp_runtime_t* runtime, jpp_step_t* step,
                      const jpp_call_t* call) {
  jpp__arrays_lock();
  for (uint32_t a = 0; a < runtime->params.count; ++a) {
    ++call->args[a]->holders;
    step->args[a] = call->args[a];
  }
  jpp__arrays_unlock();
}

// --- Donation -------------------------------------------------------------------------

// The step reads its arguments until it is issued, and then deletes the donated ones
// itself; a copy's origin is donated as well.
static jpp_status_t* claim_args(const jpp_runtime_t* runtime, jpp_step_t* step,
                                const jpp_interrupt_t* interrupt) {
  uint32_t num_args = runtime->params.count;
  jpp__arrays_lock();
  jpp_status_t* status = jpp__claim_donated(&runtime->params, step->args, interrupt);
  for (uint32_t a = 0; a < num_args && !status; ++a) {
    if (runtime->params.donated[a]) step->args[a]->deleted = true;
    jpp__array_begin_read(step->args[a]);
  }
  jpp__arrays_unlock();
  // The origin of a copy is no longer needed.
  for (uint32_t a = 0; a < num_args && !status; ++a) {
    if (runtime->params.donated[a]) jpp__array_settle(jpp__array_root(step->args[a]));
  }
  return status;
}

// --- Results --------------------------------------------------------------------------

static jpp_status_t* promise_results(const jpp_runtime_t* runtime, jpp_step_t* step) {
  JPP_RETURN_IF_ERROR(jpp__outcome_create(runtime, &step->outcome));
  for (uint32_t o = 0; o < graph_of(runtime)->num_outputs; ++o) {
    jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                                 .client = runtime->client,
                                 .num_ranks = runtime->holders[o].count,
                                 .devices_per_rank = runtime->devices_per_rank,
                                 .ranks = runtime->holders[o].ranks};
    const jpp_staged_t* staged = runtime->plan->staged;
    uint32_t value = staged->outputs[o].value;
    layout.memory = staged->values[value].type.memory;
    jpp_array_type_t type = {.dtype = staged->values[value].type.dtype,
                             .ndim = staged->values[value].type.ndim,
                             .dims = staged->values[value].type.dims,
                             .is_whole = true,
                             .device_bytes = runtime->plan->value_bytes[value]};
    JPP_RETURN_IF_ERROR(
        jpp__array_promise(&layout, &type, step->outcome, &step->results[o]));
  }
  return NULL;
}

static void release_all(jpp_array_t** arrays, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    jpp_array_release(arrays[i]);
    arrays[i] = NULL;
  }
}

void jpp__call_release(const jpp_runtime_t* runtime, jpp_step_t* step) {
  release_all(step->args, runtime->params.count);
  release_all(step->results, graph_of(runtime)->num_outputs);
  jpp__outcome_release(step->outcome);
  step->outcome = NULL;
}

// --- The call -------------------------------------------------------------------------

static jpp_status_t* prepare_call(jpp_runtime_t* runtime, jpp_step_t* step,
                                  const jpp_call_t* call) {
  JPP_RETURN_IF_ERROR(take_failure(runtime));
  // After a breakage there is no other step in flight.
  if (atomic_load(&runtime->broken)) return jpp__runtime_breakage(runtime);
  JPP_RETURN_IF_ERROR(check_args(runtime, call));
  JPP_RETURN_IF_ERROR(check_places(runtime, call));
  JPP_RETURN_IF_ERROR(tell_of_failed_arg(runtime, call));
  hold_args(runtime, step, call);
  JPP_RETURN_IF_ERROR(promise_results(runtime, step));
  return claim_args(runtime, step, call->interrupt);
}

jpp_status_t* jpp_runtime_call(jpp_runtime_t* runtime, const jpp_call_t* call) {
  JPP_RETURN_IF_NULL(runtime, call);
  jpp_call_t full;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_call_t, interrupt, call, &full));
  call = &full;
  uint32_t num_args = runtime->params.count;
  uint32_t num_outputs = graph_of(runtime)->num_outputs;
  if (num_args) JPP_RETURN_IF_NULL(call->args);
  if (num_outputs) JPP_RETURN_IF_NULL(call->results);
  JPP_RETURN_IF_ERROR(
      jpp__check_count("the arguments of a call", num_args, call->num_args));
  JPP_RETURN_IF_ERROR(
      jpp__check_count("the results of a call", num_outputs, call->num_results));
  for (uint32_t o = 0; o < num_outputs; ++o) call->results[o] = NULL;
  JPP_RETURN_IF_ERROR(jpp_process_check());
  jpp_step_t* step = jpp__queue_reserve(runtime, call->interrupt);
  if (!step) return interrupted();
  jpp_status_t* status = prepare_call(runtime, step, call);
  if (status) {
    jpp__call_release(runtime, step);
    jpp__queue_give_up(runtime);
    return status;
  }
  jpp__arrays_lock();
  for (uint32_t o = 0; o < num_outputs; ++o) {
    ++step->results[o]->holders;
    call->results[o] = step->results[o];
  }
  jpp__arrays_unlock();
  jpp__queue_submit(runtime);
  return NULL;
}

uint64_t jpp_runtime_num_steps(const jpp_runtime_t* runtime) {
  return atomic_load(&runtime->queue.submitted);
}

jpp_status_t* jpp_runtime_await_steps(jpp_runtime_t* runtime, uint64_t steps,
                                      const jpp_interrupt_t* interrupt) {
  JPP_RETURN_IF_NULL(runtime);
  JPP_RETURN_IF_ERROR(jpp_process_check());
  uint64_t called = jpp_runtime_num_steps(runtime);
  if (!jpp__queue_await(runtime, steps < called ? steps : called, interrupt)) {
    return jpp_status_make(JPP_CANCELLED, "the wait for steps was interrupted");
  }
  return take_failure(runtime);
}

jpp_status_t* jpp_runtime_await(jpp_runtime_t* runtime,
                                const jpp_interrupt_t* interrupt) {
  JPP_RETURN_IF_NULL(runtime);
  return jpp_runtime_await_steps(runtime, UINT64_MAX, interrupt);
}
