// Creates and destroys a runtime. Everything that a step needs is looked up and allocated
// here, so that the step itself does neither.
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/null.h"
#include "base/struct_size.h"
#include "device/wait.h"
#include "runtime/cluster/network.h"
#include "runtime/observe/recorder.h"
#include "runtime/step/state.h"

enum {
  kWarmUpMs = 60000,
  kStallMs = 600000,
  kStepMs = 60000
};  // used with other processes

// --- Create ---------------------------------------------------------------------------

static uint32_t device_of(const jpp_runtime_options_t* options, uint32_t rank,
                          uint32_t device) {
  uint32_t at = rank * options->devices_per_rank + device;
  return options->devices ? options->devices[at] : at;
}

static uint32_t count_devices(const jpp_runtime_options_t* options, uint32_t rank) {
  uint32_t count = options->devices_per_rank;
  while (count > 1 && device_of(options, rank, count - 1) == JPP_NO_DEVICE) --count;
  return count;
}

static jpp_status_t* check_runtime_options(const jpp_runtime_options_t* options) {
  JPP_RETURN_IF_NULL(options->client, options->plan, options->executables);
  if (options->devices_per_rank < 1) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected at least 1 device per rank, found 0");
  }
  uint32_t available = jpp_client_info(options->client)->device_count;
  for (uint32_t r = 0; r < options->plan->ranks; ++r) {
    if (options->rank_process && options->rank_process[r] != options->process) continue;
    uint32_t count = count_devices(options, r);
    for (uint32_t d = 0; d < count; ++d) {
      uint32_t device = device_of(options, r, d);
      if (device < available) continue;
      return jpp_status_make(
          JPP_DEVICES_ERROR,
          "rank %u: expected device %u of the rank below %u, the devices of platform %s; "
          "found %u",
          r, d, available, jpp_client_info(options->client)->platform_name, device);
    }
  }
  return NULL;
}

// Reports the first value in a memory that the devices lack.
static jpp_status_t* check_memories(const jpp_runtime_options_t* options) {
  const jpp_graph_t* graph = options->plan->staged->graph;
  for (uint32_t v = 0; v < graph->num_values; ++v) {
    const jpp_value_t* value = &graph->values[v];
    if (value->type.memory == JPP_MEMORY_DEVICE) continue;
    const char* where = value->name ? value->name : "?";
    if (value->producer != JPP_NONE) {
      const jpp_op_t* op = &graph->ops[value->producer];
      where = op->where ? op->where : op->name;
    }
    JPP_RETURN_IF_ERROR_IN(jpp_client_check_memory(options->client, value->type.memory),
                           "value %%%u (%s)", v, where);
  }
  return NULL;
}

static jpp_status_t* copy_devices(jpp_runtime_t* runtime,
                                  const jpp_runtime_options_t* options) {
  uint32_t per_rank = options->devices_per_rank, ranks = runtime->plan->ranks;
  uint32_t* devices = NULL;
  size_t count = (size_t)ranks * per_rank;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, count, &devices));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, ranks, &runtime->actors));
  for (uint32_t r = 0; r < ranks; ++r) {
    runtime->actors[r].devices = devices + (size_t)r * per_rank;
    runtime->actors[r].num_devices = count_devices(options, r);
    for (uint32_t d = 0; d < per_rank; ++d) {
      devices[(size_t)r * per_rank + d] = device_of(options, r, d);
    }
  }
  return NULL;
}

static jpp_status_t* copy_processes(jpp_runtime_t* runtime,
                                    const jpp_runtime_options_t* options) {
  uint32_t ranks = runtime->plan->ranks;
  runtime->stall_timeout_ms =
      options->stall_timeout_ms ? options->stall_timeout_ms : kStallMs;
  runtime->step_timeout_ms =
      options->step_timeout_ms ? options->step_timeout_ms : kStepMs;
  if (!options->rank_process) return NULL;
  if (!options->network || jpp_transport_form(options->network) != JPP_TRANSPORT_BYTES) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected a network of bytes between the processes of the "
                           "ranks, found none");
  }
  runtime->process = options->process;
  return jpp__arena_copy(&runtime->arena, options->rank_process,
                         ranks * sizeof(*options->rank_process),
                         (void**)&runtime->rank_process);
}

static jpp_status_t* resolve_call(jpp_runtime_t* runtime,
                                  const jpp_runtime_options_t* options, uint32_t id) {
  const jpp_task_t* task = &options->plan->staged->tasks[id];
  const uint32_t* donated_to = options->plan->bindings[id].donated_to;
  const jpp_task_executable_t* given = &options->executables[id];
  bool one_device = given->portable && options->devices_per_rank == 1;
  uint32_t device = device_of(options, task->rank, 0);
  uint32_t* donated = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, task->num_inputs, &donated));
  jpp_task_call_t* call = &runtime->calls[id];
  *call = (jpp_task_call_t){.executable = given->executable,
                            .device = one_device ? (int32_t)device : JPP_DEVICE_COMPILED,
                            .donated = donated};
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    if (donated_to[i] != JPP_NONE) donated[call->num_donated++] = i;
  }
  return NULL;
}

static jpp_status_t* resolve_calls(jpp_runtime_t* runtime,
                                   const jpp_runtime_options_t* options) {
  uint32_t tasks = options->plan->staged->num_tasks;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, tasks, &runtime->calls));
  for (uint32_t t = 0; t < tasks; ++t) {
    JPP_RETURN_IF_ERROR(resolve_call(runtime, options, t));
  }
  return jpp__copies_resolve(runtime, options->shard_dims);
}

// Called on the thread that resets or closes the channel: the issuing thread, or the one
// that destroys the runtime.
static void release_message(void* user, void* buffer) {
  jpp_client_buffer_destroy(user, buffer);
}

static jpp_status_t* open_local_link(jpp_runtime_t* runtime, uint32_t index) {
  jpp_link_t* link = &runtime->links[index];
  jpp_channel_spec_t spec = {.struct_size = sizeof(spec),
                             .id = index,
                             .src_actor = link->plan->src,
                             .dst_actor = link->plan->dst,
                             .slots = link->plan->slots,
                             .capacity = runtime->devices_per_rank,
                             .release = release_message,
                             .user = runtime->client};
  return jpp_transport_open_channel(runtime->transport, &spec, &link->channel);
}

static bool take_same_buffers(const jpp_runtime_t* runtime,
                              const jpp_plan_channel_t* channel) {
  if (jpp_client_info(runtime->client)->shares_buffers) return true;
  // The rows of ranks with fewer devices end with JPP_NO_DEVICE.
  const uint32_t* from = runtime->actors[channel->src].devices;
  const uint32_t* to = runtime->actors[channel->dst].devices;
  return memcmp(from, to, runtime->devices_per_rank * sizeof(*from)) == 0;
}

// Channels between ranks of other processes stay closed.
static jpp_status_t* open_links(jpp_runtime_t* runtime, const char* transport) {
  const jpp_plan_t* plan = runtime->plan;
  jpp_transport_options_t options = {.struct_size = sizeof(options), .driver = transport};
  JPP_RETURN_IF_ERROR(jpp_transport_create(&options, &runtime->transport));
  JPP_LOG(JPP_LOG_INFO, "transport %s: %u channels of %u devices", transport,
          plan->num_channels, runtime->devices_per_rank);
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&runtime->arena, plan->num_channels, &runtime->links));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&runtime->arena, plan->num_channels, &runtime->remote_links));
  for (uint32_t i = 0; i < plan->num_channels; ++i) {
    jpp_link_t* link = &runtime->links[i];
    link->plan = &plan->channels[i];
    link->devices = runtime->actors[link->plan->dst].devices;
    link->num_devices = runtime->actors[link->plan->dst].num_devices;
    bool sends = jpp__runtime_has_rank(runtime, link->plan->src);
    bool receives = jpp__runtime_has_rank(runtime, link->plan->dst);
    link->remote = sends != receives;
    if (link->remote) runtime->remote_links[runtime->num_remote_links++] = link;
    link->same_buffers = take_same_buffers(runtime, link->plan);
    if (sends && receives) JPP_RETURN_IF_ERROR(open_local_link(runtime, i));
  }
  return NULL;
}

static jpp_status_t* upload_constants(jpp_actor_t* actor) {
  jpp_client_t* client = actor->runtime->client;
  uint32_t devices = actor->runtime->devices_per_rank;
  for (uint32_t i = 0; i < actor->program->num_constants; ++i) {
    int32_t number = (int32_t)actor->program->constants[i].microbatch;
    jpp_host_array_t array = {
        .struct_size = sizeof(array), .data = &number, .dtype = JPP_DTYPE_S32};
    for (uint32_t d = 0; d < actor->num_devices; ++d) {
      jpp_buffer_t** buffer = &actor->constants[(size_t)i * devices + d];
      JPP_RETURN_IF_ERROR(
          jpp_client_buffer_from_host(client, &array, actor->devices[d], buffer));
      JPP_RETURN_IF_ERROR(jpp__wait_buffer(client, *buffer, "an upload", NULL));
    }
  }
  return NULL;
}

static jpp_status_t* allocate_step(jpp_runtime_t* runtime, jpp_step_t* step) {
  const jpp_graph_t* graph = runtime->plan->staged->graph;
  jpp_arena_t* arena = &runtime->arena;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, graph->num_args, &step->args));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, graph->num_outputs, &step->results));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, runtime->plan->ranks, &step->actors));
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    JPP_RETURN_IF_ERROR(jpp__actor_allocate_step(&runtime->actors[r], &step->actors[r]));
  }
  return NULL;
}

static jpp_status_t* allocate_steps(jpp_runtime_t* runtime) {
  jpp_queue_t* queue = &runtime->queue;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, queue->count, &queue->slots));
  for (uint32_t i = 0; i < queue->count; ++i) {
    JPP_RETURN_IF_ERROR(allocate_step(runtime, &queue->slots[i]));
  }
  return NULL;
}

static jpp_status_t* list_params(jpp_runtime_t* runtime) {
  const jpp_graph_t* graph = runtime->plan->staged->graph;
  const char** names = NULL;
  bool* donated = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, graph->num_args, &names));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, graph->num_args, &donated));
  for (uint32_t a = 0; a < graph->num_args; ++a) {
    const char* name = graph->values[graph->args[a].value].name;
    names[a] = name ? name : "?";
    donated[a] = graph->args[a].donated;
  }
  runtime->params =
      (jpp_params_t){.names = names, .donated = donated, .count = graph->num_args};
  return NULL;
}

static jpp_status_t* find_holders(jpp_runtime_t* runtime) {
  uint32_t outputs = runtime->plan->staged->graph->num_outputs;
  uint32_t ranks = runtime->plan->ranks;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, outputs, &runtime->holders));
  for (uint32_t o = 0; o < outputs; ++o) {
    JPP_RETURN_IF_ERROR(
        JPP_ARENA_ARRAY(&runtime->arena, ranks, &runtime->holders[o].ranks));
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    const jpp_program_t* program = runtime->actors[r].program;
    for (uint32_t i = 0; i < program->num_outputs; ++i) {
      jpp_holders_t* holders = &runtime->holders[program->outputs[i].output];
      holders->ranks[holders->count++] = r;
    }
  }
  return NULL;
}

static jpp_status_t* create_runtime(jpp_runtime_t* runtime,
                                    const jpp_runtime_options_t* options) {
  uint32_t ranks = options->plan->ranks;
  JPP_RETURN_IF_ERROR(check_memories(options));
  JPP_RETURN_IF_ERROR(copy_devices(runtime, options));
  JPP_RETURN_IF_ERROR(copy_processes(runtime, options));
  JPP_RETURN_IF_ERROR(resolve_calls(runtime, options));
  JPP_RETURN_IF_ERROR(
      open_links(runtime, options->transport ? options->transport : "inproc"));
  for (uint32_t r = 0; r < ranks; ++r) {
    JPP_RETURN_IF_ERROR(jpp__actor_resolve(runtime, r));
  }
  JPP_RETURN_IF_ERROR(allocate_steps(runtime));
  JPP_RETURN_IF_ERROR(list_params(runtime));
  JPP_RETURN_IF_ERROR(find_holders(runtime));
  JPP_RETURN_IF_ERROR(jpp__trace_allocate(runtime));
  jpp__recorder_open(runtime);
  for (uint32_t r = 0; r < ranks; ++r) {
    JPP_RETURN_IF_ERROR_IN(upload_constants(&runtime->actors[r]),
                           "rank %u, microbatch numbers", r);
  }
  if (runtime->network) {
    JPP_RETURN_IF_ERROR(jpp__network_open(runtime));
    JPP_RETURN_IF_ERROR(jpp__network_warm_up(runtime, kWarmUpMs));
    JPP_RETURN_IF_ERROR(jpp__heartbeat_start(runtime));
  }
  JPP_RETURN_IF_ERROR(jpp__crew_start(runtime));
  return jpp__queue_start(runtime);
}

jpp_status_t* jpp_runtime_create(const jpp_runtime_options_t* options,
                                 jpp_runtime_t** out_runtime) {
  JPP_RETURN_IF_NULL(options, out_runtime);
  jpp_runtime_options_t full;
  *out_runtime = NULL;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_runtime_options_t, steps_in_flight, options, &full));
  jpp_runtime_t* runtime = NULL;
  jpp_status_t* status = check_runtime_options(&full);
  if (!status) status = JPP_ALLOC_ARRAY(1, &runtime);
  if (status) {
    jpp_transport_destroy(full.network);
    return status;
  }
  runtime->network = full.network;
  runtime->on_host = strcmp(jpp_client_info(full.client)->platform_name, "cpu") == 0;
  runtime->wakeup.descriptor = -1;
  runtime->client = full.client;
  runtime->plan = full.plan;
  runtime->devices_per_rank = full.devices_per_rank;
  jpp__arena_init(&runtime->arena);
  runtime->queue.count = full.steps_in_flight ? full.steps_in_flight : 2;
  pthread_mutex_init(&runtime->network_mutex, NULL);
  jpp__queue_init(&runtime->queue);
  jpp__crew_init(&runtime->crew);
  status = create_runtime(runtime, &full);
  if (status) {
    jpp__runtime_break(runtime,
                       status);  // tells others that wait for this process the reason
    jpp_runtime_destroy(runtime);
    return status;
  }
  *out_runtime = runtime;
  return NULL;
}

// --- Breaking -------------------------------------------------------------------------

void jpp__runtime_note_failure(jpp_runtime_t* runtime) {
  int64_t never = 0;
  atomic_compare_exchange_strong(&runtime->failed_at, &never, jpp__clock_now());
}

void jpp__runtime_break(jpp_runtime_t* runtime, const jpp_status_t* status) {
  jpp_status_t* copy = jpp_status_clone(status);
  jpp__arrays_lock();
  bool first = !runtime->breakage;
  if (first) {
    runtime->breakage = copy;
    jpp__runtime_note_failure(runtime);
    atomic_store(&runtime->broken, true);
  }
  jpp__arrays_unlock();
  if (first) {
    jpp__flight_failed(&runtime->flight, status);
    jpp__network_abort(runtime, status);
    jpp__wakeup_call(&runtime->wakeup);
  } else {
    jpp_status_free(copy);
  }
}

bool jpp_runtime_is_broken(const jpp_runtime_t* runtime) {
  return atomic_load(&runtime->broken);
}

bool jpp_runtime_has_given_up(const jpp_runtime_t* runtime) {
  return atomic_load(&runtime->given_up);
}

jpp_status_t* jpp__runtime_breakage(const jpp_runtime_t* runtime) {
  jpp__arrays_lock();
  jpp_status_t* status = jpp_status_clone(runtime->breakage);
  jpp__arrays_unlock();
  return status;
}

// --- Destroy --------------------------------------------------------------------------

static void destroy_constants(jpp_actor_t* actor) {
  if (!actor->constants) return;
  size_t count = (size_t)actor->program->num_constants * actor->runtime->devices_per_rank;
  for (size_t i = 0; i < count; ++i) {
    jpp_client_buffer_destroy(actor->runtime->client, actor->constants[i]);
  }
}

// Logs a failure that was not reported to any caller.
static void log_failure(jpp_runtime_t* runtime) {
  const jpp_outcome_t* failed = runtime->failed;
  if (failed && !failed->told) {
    JPP_LOG(JPP_LOG_ERROR, "a step failed and no caller waited for it: %s",
            jpp_status_message(failed->failure));
  }
  jpp__outcome_release(runtime->failed);
}

void jpp_runtime_destroy(jpp_runtime_t* runtime) {
  if (!runtime) return;
  jpp_status_t* forked = jpp_process_check();
  if (forked) {  // its threads and locks exist only in the parent
    jpp_status_free(forked);
    return;
  }
  jpp__queue_stop(runtime);
  jpp__crew_stop(&runtime->crew);
  log_failure(runtime);
  for (uint32_t r = 0; runtime->actors && r < runtime->plan->ranks; ++r) {
    destroy_constants(&runtime->actors[r]);
  }
  jpp__heartbeat_stop(runtime);
  jpp__network_close(runtime);
  jpp__flight_close(&runtime->flight);
  for (uint32_t i = 0; runtime->links && i < runtime->plan->num_channels; ++i) {
    jpp_channel_close(runtime->links[i].channel);
  }
  jpp_transport_destroy(runtime->transport);
  jpp_status_free(runtime->breakage);
  jpp__queue_deinit(&runtime->queue);
  jpp__crew_deinit(&runtime->crew);
  pthread_mutex_destroy(&runtime->network_mutex);
  jpp__arena_deinit(&runtime->arena);
  jpp_free(runtime->zeros);
  jpp_free(runtime);
}
