// Creates and destroys the fake device's client. It keeps all handles that the client
// ever made until then, so that using a dead handle is an error instead of a crash.
#include "base/null.h"
#include "base/struct_size.h"
#include "fake/device/fake.h"

static void fake_destroy(jpp_client_t* base) {
  fake_client_t* client = fake_client(base);
  fake_nodes_leave(client);
  fake_workers_stop(client);
  pthread_mutex_lock(&client->mutex);
  while (client->handles) {
    fake_handle_t* handle = client->handles;
    client->handles = handle->next;
    if (handle->state != FAKE_DESTROYED) fake_handle_destroy_locked(client, handle);
    fake_program_destroy(handle->program);
    jpp_free(handle);
  }
  pthread_mutex_unlock(&client->mutex);
  pthread_cond_destroy(&client->changed);
  pthread_mutex_destroy(&client->mutex);
  fake_nodes_release(client);
  jpp_free(client->threads);
  jpp_free(client);
}

static const jpp_client_vtable_t kFakeVtable = {
    .destroy = fake_destroy,
    .compile = fake_compile,
    .executable_serialize = jpp__client_executable_serialize_unsupported,
    .executable_load = jpp__client_executable_load_unsupported,
    .executable_result_count = fake_executable_result_count,
    .executable_hlo = jpp__client_executable_hlo_unsupported,
    .executable_memory = jpp__client_executable_memory_unsupported,
    .executable_destroy = fake_executable_destroy,
    .execute = fake_execute,
    .buffer_from_host = fake_buffer_from_host,
    .buffer_to_host = fake_buffer_to_host,
    .buffer_copy = fake_buffer_copy,
    .buffer_destroy = fake_buffer_destroy,
    .buffer_ready_event = fake_buffer_ready_event,
    .buffer_shape = fake_buffer_shape,
    .buffer_lend = fake_buffer_lend,
    .buffer_reclaim = fake_buffer_reclaim,
    .buffer_borrow = fake_buffer_borrow,
    .event_await = fake_event_await,
    .event_is_ready = fake_event_is_ready,
    .event_on_ready = fake_event_on_ready,
    .event_destroy = fake_event_destroy,
    .register_custom_call = jpp__client_register_custom_call_unsupported,
};

static jpp_status_t* check_options(const jpp_fake_options_t* options) {
  if (options->device_count < 1 || options->device_count > JPP_FAKE_MAX_DEVICES) {
    return jpp_status_make(JPP_DEVICES_ERROR, "fake: expected 1 to %d devices, found %u",
                           JPP_FAKE_MAX_DEVICES, options->device_count);
  }
  if (options->num_nodes > JPP_FAKE_MAX_NODES || options->node_id >= options->num_nodes) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "fake: expected at most %d nodes and a node_id below their "
                           "number, found node %u of %u",
                           JPP_FAKE_MAX_NODES, options->node_id, options->num_nodes);
  }
  if (options->num_nodes == 1 || options->store) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "fake: expected a store for %u nodes, found NULL",
                         options->num_nodes);
}

jpp_status_t* jpp_client_create_fake(const jpp_fake_options_t* options,
                                     jpp_client_t** out_client) {
  JPP_RETURN_IF_NULL(options, out_client);
  *out_client = NULL;
  jpp_fake_options_t full;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_fake_options_t, failure, options, &full));
  JPP_RETURN_IF_ERROR(jpp__process_begin_client());
  if (!full.num_nodes) full.num_nodes = 1;
  JPP_RETURN_IF_ERROR(check_options(&full));
  fake_client_t* client = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(*client), (void**)&client));
  client->options = full;
  client->failure = full.failure;
  client->base = (jpp_client_t){.vtable = &kFakeVtable,
                                .info = {.driver = "fake",
                                         .platform_name = "cpu",
                                         .platform_version = "1",
                                         .device_count = full.device_count,
                                         .devices = client->devices,
                                         .node_id = full.node_id,
                                         .memories = 1u << JPP_MEMORY_DEVICE,
                                         .memory_kinds = "device",
                                         .runs_in_call = !full.threads}};
  if (!full.device_memory_only) {
    client->base.info.memories |= 1u << JPP_MEMORY_PINNED_HOST;
    client->base.info.memory_kinds = "device, pinned_host";
  }
  pthread_mutex_init(&client->mutex, NULL);
  pthread_cond_init(&client->changed, NULL);
  jpp_status_t* status = NULL;
  if (full.num_nodes > 1) {  // the caller's struct exists only during the call
    client->store = *full.store;
    client->options.store = &client->store;
  }
  status = fake_nodes_join(client);
  if (!status) status = fake_workers_start(client);
  if (status) {
    fake_destroy(&client->base);
    return status;
  }
  *out_client = &client->base;
  return NULL;
}

static jpp_status_t* check_is_fake(const jpp_client_t* client) {
  if (client->vtable == &kFakeVtable) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "expected a client of driver fake, found %s",
                         client->info.driver);
}

jpp_status_t* jpp_fake_set_failure(jpp_client_t* client, jpp_fake_failure_t failure) {
  JPP_RETURN_IF_NULL(client);
  JPP_RETURN_IF_ERROR(check_is_fake(client));
  fake_client_t* fake = fake_client(client);
  pthread_mutex_lock(&fake->mutex);
  fake->failure = failure;
  pthread_mutex_unlock(&fake->mutex);
  return NULL;
}

jpp_status_t* jpp_fake_set_held(jpp_client_t* client, bool held) {
  JPP_RETURN_IF_NULL(client);
  JPP_RETURN_IF_ERROR(check_is_fake(client));
  fake_client_t* fake = fake_client(client);
  pthread_mutex_lock(&fake->mutex);
  fake->held = held;
  pthread_cond_broadcast(&fake->changed);
  pthread_mutex_unlock(&fake->mutex);
  return NULL;
}

jpp_status_t* jpp_fake_stats(jpp_client_t* client, jpp_fake_stats_t* out_stats) {
  JPP_RETURN_IF_NULL(client, out_stats);
  JPP_RETURN_IF_ERROR(check_is_fake(client));
  fake_client_t* fake = fake_client(client);
  pthread_mutex_lock(&fake->mutex);
  *out_stats = fake->stats;
  pthread_mutex_unlock(&fake->mutex);
  return NULL;
}
