// Creates and destroys a runtime. Everything that a step needs is looked up and allocated
// here, so that the step itself does neither.
#include "base/log.h"
#include "runtime/state.h"

// --- Create ---------------------------------------------------------------------------

static jpp_status_t* check_runtime_options(const jpp_runtime_options_t* options) {
  if (options->devices_per_rank < 1) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected at least 1 device per rank, found 0");
  }
  uint32_t available = jpp_client_info(options->client)->device_count;
  for (uint32_t r = 0; r < options->plan->ranks; ++r) {
    for (uint32_t d = 0; d < options->devices_per_rank; ++d) {
      uint32_t device = options->devices[(size_t)r * options->devices_per_rank + d];
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

static jpp_status_t* copy_devices(jpp_runtime_t* runtime,
                                  const jpp_runtime_options_t* options) {
  uint32_t per_rank = options->devices_per_rank;
  uint32_t* devices = NULL;
  JPP_RETURN_IF_ERROR(jpp_arena_copy(
      &runtime->arena, options->devices,
      (size_t)runtime->plan->ranks * per_rank * sizeof(*devices), (void**)&devices));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&runtime->arena, runtime->plan->ranks, &runtime->actors));
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    runtime->actors[r].devices = devices + (size_t)r * per_rank;
  }
  return NULL;
}

static jpp_status_t* resolve_call(jpp_runtime_t* runtime,
                                  const jpp_runtime_options_t* options, uint32_t id) {
  const jpp_task_t* task = &options->plan->staged->tasks[id];
  const uint32_t* donated_to = options->plan->bindings[id].donated_to;
  const jpp_task_executable_t* given = &options->executables[id];
  bool one_device = given->portable && options->devices_per_rank == 1;
  uint32_t device = options->devices[(size_t)task->rank * options->devices_per_rank];
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
  return NULL;
}

// Called on the thread that resets or closes the channel: a step's, or destroy's.
static void release_message(void* user, void* buffer) {
  jpp_client_buffer_destroy(user, buffer);
}

static jpp_status_t* open_links(jpp_runtime_t* runtime, const char* transport) {
  const jpp_plan_t* plan = runtime->plan;
  jpp_transport_options_t options = {.struct_size = sizeof(options), .driver = transport};
  JPP_RETURN_IF_ERROR(jpp_transport_create(&options, &runtime->transport));
  JPP_LOG(JPP_LOG_INFO, "transport %s: %u channels of %u devices", transport,
          plan->num_channels, runtime->devices_per_rank);
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&runtime->arena, plan->num_channels, &runtime->links));
  for (uint32_t i = 0; i < plan->num_channels; ++i) {
    jpp_link_t* link = &runtime->links[i];
    link->plan = &plan->channels[i];
    link->devices = runtime->actors[link->plan->dst].devices;
    jpp_channel_spec_t spec = {.struct_size = sizeof(spec),
                               .id = i,
                               .src_actor = link->plan->src,
                               .dst_actor = link->plan->dst,
                               .slots = link->plan->slots,
                               .capacity = runtime->devices_per_rank,
                               .release = release_message,
                               .user = runtime->client};
    JPP_RETURN_IF_ERROR(
        jpp_transport_open_channel(runtime->transport, &spec, &link->channel));
  }
  return NULL;
}

static jpp_status_t* await_ready(jpp_client_t* client, jpp_buffer_t* buffer) {
  jpp_event_t* event = NULL;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_ready_event(client, buffer, &event));
  jpp_status_t* status = jpp_client_event_await(client, event);
  jpp_client_event_destroy(client, event);
  return status;
}

static jpp_status_t* upload_constants(jpp_actor_t* actor) {
  jpp_client_t* client = actor->runtime->client;
  uint32_t devices = actor->runtime->devices_per_rank;
  for (uint32_t i = 0; i < actor->program->num_constants; ++i) {
    int32_t number = (int32_t)actor->program->constants[i].microbatch;
    jpp_host_array_t array = {.data = &number, .dtype = JPP_DTYPE_S32};
    for (uint32_t d = 0; d < devices; ++d) {
      jpp_buffer_t** buffer = &actor->constants[(size_t)i * devices + d];
      JPP_RETURN_IF_ERROR(
          jpp_client_buffer_from_host(client, &array, actor->devices[d], buffer));
      JPP_RETURN_IF_ERROR(await_ready(client, *buffer));
    }
  }
  return NULL;
}

static jpp_status_t* create_runtime(jpp_runtime_t* runtime,
                                    const jpp_runtime_options_t* options) {
  uint32_t ranks = options->plan->ranks;
  uint32_t threads = options->issue_threads < ranks ? options->issue_threads : ranks;
  JPP_RETURN_IF_ERROR(copy_devices(runtime, options));
  JPP_RETURN_IF_ERROR(resolve_calls(runtime, options));
  JPP_RETURN_IF_ERROR(
      open_links(runtime, options->transport ? options->transport : "inproc"));
  for (uint32_t r = 0; r < ranks; ++r) {
    JPP_RETURN_IF_ERROR(jpp_actor_resolve(runtime, r));
  }
  JPP_RETURN_IF_ERROR(jpp_trace_allocate(runtime));
  for (uint32_t r = 0; r < ranks; ++r) {
    JPP_RETURN_IF_ERROR_IN(upload_constants(&runtime->actors[r]),
                           "rank %u, microbatch numbers", r);
  }
  return jpp_crew_start(runtime, threads ? threads : 1);
}

jpp_status_t* jpp_runtime_create(const jpp_runtime_options_t* options,
                                 jpp_runtime_t** out_runtime) {
  *out_runtime = NULL;
  JPP_RETURN_IF_ERROR(check_runtime_options(options));
  jpp_runtime_t* runtime = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &runtime));
  runtime->client = options->client;
  runtime->plan = options->plan;
  runtime->devices_per_rank = options->devices_per_rank;
  jpp_arena_init(&runtime->arena);
  pthread_mutex_init(&runtime->step_mutex, NULL);
  pthread_mutex_init(&runtime->crew.mutex, NULL);
  jpp_cancel_init_condition(&runtime->crew.changed);
  jpp_status_t* status = create_runtime(runtime, options);
  if (status) {
    jpp_runtime_destroy(runtime);
    return status;
  }
  *out_runtime = runtime;
  return NULL;
}

// --- Destroy --------------------------------------------------------------------------

static void destroy_constants(jpp_actor_t* actor) {
  if (!actor->constants) return;
  size_t count = (size_t)actor->program->num_constants * actor->runtime->devices_per_rank;
  for (size_t i = 0; i < count; ++i) {
    jpp_client_buffer_destroy(actor->runtime->client, actor->constants[i]);
  }
}

void jpp_runtime_destroy(jpp_runtime_t* runtime) {
  if (!runtime) return;
  jpp_status_t* forked = jpp_process_check();
  if (forked) {  // its threads and locks are the parent's
    jpp_status_free(forked);
    return;
  }
  jpp_crew_stop(runtime);
  for (uint32_t r = 0; runtime->actors && r < runtime->plan->ranks; ++r) {
    destroy_constants(&runtime->actors[r]);
  }
  for (uint32_t i = 0; runtime->links && i < runtime->plan->num_channels; ++i) {
    jpp_channel_close(runtime->links[i].channel);
  }
  jpp_transport_destroy(runtime->transport);
  jpp_cancel_deinit(runtime);
  pthread_cond_destroy(&runtime->crew.changed);
  pthread_mutex_destroy(&runtime->crew.mutex);
  pthread_mutex_destroy(&runtime->step_mutex);
  jpp_arena_deinit(&runtime->arena);
  jpp_free(runtime);
}
