// Handles of the fake device and the reference-counted values and completions behind
// them. A handle keeps an exact account of its bytes and remembers whether it was donated
// or destroyed.
#include "fake/device/fake.h"

jpp_status_t* fake_completion_create(fake_completion_t** out_completion) {
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(**out_completion), (void**)out_completion));
  (*out_completion)->refs = 1;
  return NULL;
}

void fake_completion_release_locked(fake_completion_t* completion) {
  if (!completion || --completion->refs) return;
  jpp_status_free(completion->error);
  jpp_free(completion);
}

jpp_status_t* fake_value_create_locked(const fake_shape_t* shape, uint32_t device,
                                       fake_completion_t* completion,
                                       fake_value_t** out_value) {
  *out_value = NULL;
  fake_value_t* value = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(*value), (void**)&value));
  value->bytes = fake_shape_bytes(shape);
  jpp_status_t* status = jpp_alloc(value->bytes, &value->data);
  if (status) {
    jpp_free(value);
    return status;
  }
  value->refs = 1;
  value->device = device;
  value->shape = *shape;
  value->completion = completion;
  ++completion->refs;
  *out_value = value;
  return NULL;
}

void fake_value_release_locked(fake_value_t* value) {
  if (!value || --value->refs) return;
  fake_completion_release_locked(value->completion);
  if (value->release) {
    value->release(value->data, value->user);
  } else {
    jpp_free(value->data);
  }
  jpp_free(value);
}

static uint64_t* live_count(fake_client_t* client, fake_kind_t kind) {
  switch (kind) {
    case FAKE_BUFFER:
      return &client->stats.live_buffers;
    case FAKE_EVENT:
      return &client->stats.live_events;
    default:
      return &client->stats.live_executables;
  }
}

static jpp_status_t* handle_create_locked(fake_client_t* client, fake_kind_t kind,
                                          fake_handle_t** out_handle) {
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(**out_handle), (void**)out_handle));
  (*out_handle)->kind = kind;
  (*out_handle)->next = client->handles;
  client->handles = *out_handle;
  ++*live_count(client, kind);
  return NULL;
}

jpp_status_t* fake_buffer_create_locked(fake_client_t* client, fake_value_t* value,
                                        jpp_buffer_t** out_buffer) {
  fake_handle_t* handle = NULL;
  JPP_RETURN_IF_ERROR(handle_create_locked(client, FAKE_BUFFER, &handle));
  handle->value = value;
  ++value->refs;
  *out_buffer = (jpp_buffer_t*)handle;
  return NULL;
}

jpp_status_t* fake_event_create_locked(fake_client_t* client,
                                       fake_completion_t* completion,
                                       jpp_event_t** out_event) {
  fake_handle_t* handle = NULL;
  JPP_RETURN_IF_ERROR(handle_create_locked(client, FAKE_EVENT, &handle));
  handle->completion = completion;
  ++completion->refs;
  *out_event = (jpp_event_t*)handle;
  return NULL;
}

jpp_status_t* fake_executable_create_locked(fake_client_t* client,
                                            fake_program_t* program,
                                            jpp_executable_t** out_executable) {
  fake_handle_t* handle = NULL;
  jpp_status_t* status = handle_create_locked(client, FAKE_EXECUTABLE, &handle);
  if (status) {
    fake_program_destroy(program);
    return status;
  }
  handle->program = program;
  *out_executable = (jpp_executable_t*)handle;
  return NULL;
}

static void unaccount_locked(fake_client_t* client, fake_handle_t* handle) {
  if (!handle->accounted) return;
  jpp_fake_stats_t* stats = &client->stats;
  bool host = handle->value->memory == JPP_MEMORY_PINNED_HOST;
  uint64_t* live = host ? stats->host_live_bytes : stats->device_live_bytes;
  handle->accounted = false;
  stats->live_bytes -= handle->value->bytes;
  live[handle->value->device] -= handle->value->bytes;
}

void fake_handle_account_locked(fake_client_t* client, fake_handle_t* handle) {
  uint32_t device = handle->value->device;
  jpp_fake_stats_t* stats = &client->stats;
  bool host = handle->value->memory == JPP_MEMORY_PINNED_HOST;
  uint64_t* live = host ? stats->host_live_bytes : stats->device_live_bytes;
  uint64_t* peak = host ? stats->host_peak_bytes : stats->device_peak_bytes;
  handle->accounted = true;
  stats->live_bytes += handle->value->bytes;
  live[device] += handle->value->bytes;
  if (live[device] > peak[device]) peak[device] = live[device];
}

static void drop_contents_locked(fake_client_t* client, fake_handle_t* handle) {
  unaccount_locked(client, handle);
  fake_value_release_locked(handle->value);
  fake_completion_release_locked(handle->completion);
  handle->value = NULL;
  handle->completion = NULL;
}

void fake_handle_donate_locked(fake_client_t* client, fake_handle_t* handle) {
  drop_contents_locked(client, handle);
  handle->state = FAKE_DONATED;
}

void fake_handle_destroy_locked(fake_client_t* client, void* opaque) {
  fake_handle_t* handle = opaque;
  if (!handle) return;
  if (handle->state == FAKE_DESTROYED) {
    ++client->stats.misuses;
    return;
  }
  if (handle->loans) ++client->stats.misuses;
  drop_contents_locked(client, handle);
  handle->state = FAKE_DESTROYED;
  --*live_count(client, handle->kind);
}

jpp_status_t* fake_handle_check_locked(const void* opaque, fake_kind_t kind,
                                       const char* what) {
  static const char* const kKinds[] = {"buffer", "event", "executable"};
  const fake_handle_t* handle = opaque;
  if (!handle || handle->kind != kind) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "%s: expected a live %s, found %s", what,
                           kKinds[kind], handle ? kKinds[handle->kind] : "NULL");
  }
  if (handle->state == FAKE_LIVE) return NULL;
  return jpp_status_make(JPP_DONATED_ERROR, "%s: expected a live %s, found one %s before",
                         what, kKinds[kind],
                         handle->state == FAKE_DONATED ? "donated" : "destroyed");
}

jpp_status_t* fake_count_call_locked(fake_client_t* client, const char* name,
                                     jpp_status_t** out_async_failure) {
  ++client->stats.calls;
  if (!client->failure.at || --client->failure.at) return NULL;
  jpp_status_code_t code = client->failure.code;
  jpp_status_t* failure = jpp_status_make(code ? code : JPP_EXECUTION_ERROR,
                                          "%s: injected failure of call %llu", name,
                                          (unsigned long long)client->stats.calls);
  if (!client->failure.async || !out_async_failure) return failure;
  *out_async_failure = failure;
  return NULL;
}
