// The list of drivers, and the public transport API, which does the checks that all
// drivers need and then calls the driver's function table.
#include "jaxpp/transport.h"

#include <string.h>

#include "base/null.h"
#include "base/str.h"
#include "base/struct_size.h"
#include "transport/driver.h"

static const jpp_transport_vtable_t* const kDrivers[] = {
    &jpp_transport_inproc, &jpp_transport_ucx, &jpp_transport_nccl};
#define DRIVER_COUNT (sizeof(kDrivers) / sizeof(kDrivers[0]))

// --- Transport ------------------------------------------------------------------------

static jpp_status_t* unknown_driver(const char* name) {
  jpp_str_t names = {0};
  char* text = NULL;
  for (size_t i = 0; i < DRIVER_COUNT; ++i) {
    jpp_str_appendf(&names, "%s%s", i ? " or " : "", kDrivers[i]->name);
  }
  JPP_RETURN_IF_ERROR(jpp_str_finish(&names, &text));
  jpp_status_t* status = jpp_status_make(JPP_INVALID_ARGUMENT,
                                         "expected transport %s, found '%s'", text, name);
  jpp_free(text);
  return status;
}

jpp_status_t* jpp__transport_create_with(const jpp_transport_vtable_t* driver,
                                         const jpp_transport_options_t* options,
                                         jpp_transport_t** out_transport) {
  jpp_transport_options_t full;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_transport_options_t, peer_timeout_ms, options, &full));
  if (full.token_size) JPP_RETURN_IF_NULL(full.token);
  if (full.num_processes == 0) full.num_processes = 1;
  if (full.peer_timeout_ms == 0) full.peer_timeout_ms = 10000;
  if (full.process >= full.num_processes) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "transport %s: expected a process below %u, the processes of "
                           "the job; found %u",
                           driver->name, full.num_processes, full.process);
  }
  JPP_RETURN_IF_ERROR_IN(driver->create(&full, out_transport), "transport %s",
                         driver->name);
  (*out_transport)->vtable = driver;
  (*out_transport)->process = full.process;
  (*out_transport)->num_processes = full.num_processes;
  return NULL;
}

jpp_status_t* jpp_transport_create(const jpp_transport_options_t* options,
                                   jpp_transport_t** out_transport) {
  JPP_RETURN_IF_NULL(options, out_transport);
  *out_transport = NULL;
  jpp_transport_options_t full;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_transport_options_t, peer_timeout_ms, options, &full));
  JPP_RETURN_IF_NULL(full.driver);
  for (size_t i = 0; i < DRIVER_COUNT; ++i) {
    if (strcmp(kDrivers[i]->name, full.driver) != 0) continue;
    return jpp__transport_create_with(kDrivers[i], &full, out_transport);
  }
  return unknown_driver(full.driver);
}

void jpp_transport_destroy(jpp_transport_t* transport) {
  if (transport) transport->vtable->destroy(transport);
}

// NULL for a driver of handles, which has no other processes and no memory to register.
static const jpp_bytes_vtable_t* bytes_of(const jpp_transport_t* transport) {
  return transport->vtable->bytes;
}

jpp_transport_form_t jpp_transport_form(const jpp_transport_t* transport) {
  return bytes_of(transport) ? JPP_TRANSPORT_BYTES : JPP_TRANSPORT_HANDLES;
}

uint32_t jpp_transport_num_processes(const jpp_transport_t* transport) {
  return transport->num_processes;
}

bool jpp_transport_takes_device_memory(const jpp_transport_t* transport) {
  return bytes_of(transport) && bytes_of(transport)->takes_device_memory;
}

void jpp_transport_address(const jpp_transport_t* transport, const void** out_address,
                           size_t* out_size) {
  *out_address = NULL;
  *out_size = 0;
  if (bytes_of(transport)) bytes_of(transport)->address(transport, out_address, out_size);
}

jpp_status_t* jpp_transport_connect(jpp_transport_t* transport, uint32_t process,
                                    const void* address, size_t size) {
  JPP_RETURN_IF_NULL(transport, address);
  if (process >= transport->num_processes || process == transport->process) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "transport %s of process %u: expected another of %u processes "
                           "to connect to, found %u",
                           transport->vtable->name, transport->process,
                           transport->num_processes, process);
  }
  if (bytes_of(transport)) {
    return bytes_of(transport)->connect(transport, process, address, size);
  }
  return jpp_status_make(JPP_UNSUPPORTED,
                         "transport %s stays within a process and does not connect to "
                         "process %u",
                         transport->vtable->name, process);
}

void jpp_transport_progress(jpp_transport_t* transport, bool* out_some) {
  *out_some = false;
  if (bytes_of(transport)) bytes_of(transport)->progress(transport, out_some);
}

jpp_status_t* jpp_transport_arm(jpp_transport_t* transport, int* out_descriptor,
                                bool* out_armed) {
  JPP_RETURN_IF_NULL(transport, out_descriptor, out_armed);
  *out_descriptor = -1;
  *out_armed = !bytes_of(transport);
  return *out_armed ? NULL
                    : bytes_of(transport)->arm(transport, out_descriptor, out_armed);
}

jpp_status_t* jpp_transport_peer_status(const jpp_transport_t* transport,
                                        uint32_t process) {
  JPP_RETURN_IF_NULL(transport);
  return bytes_of(transport) ? bytes_of(transport)->peer_status(transport, process)
                             : NULL;
}

const char* jpp_transport_peer_name(const jpp_transport_t* transport, uint32_t process) {
  const char* name = NULL;
  if (bytes_of(transport)) name = bytes_of(transport)->peer_name(transport, process);
  return name ? name : "an unknown address";
}

jpp_status_t* jpp_transport_open_notes(jpp_transport_t* transport, uint32_t size,
                                       jpp_transport_write_note_t write, void* user) {
  JPP_RETURN_IF_NULL(transport);
  if (!write) return jpp__null_error(__func__, "write", 0);
  if (bytes_of(transport)) {
    return bytes_of(transport)->open_notes(transport, size, write, user);
  }
  return jpp_status_make(JPP_UNSUPPORTED,
                         "transport %s connects no processes, so there are no notes",
                         transport->vtable->name);
}

const void* jpp_transport_note(const jpp_transport_t* transport, uint32_t process) {
  return bytes_of(transport) ? bytes_of(transport)->note(transport, process) : NULL;
}

jpp_status_t* jpp_transport_register(jpp_transport_t* transport, void* data, size_t size,
                                     jpp_transport_memory_t** out_memory) {
  JPP_RETURN_IF_NULL(transport, data, out_memory);
  *out_memory = NULL;
  if (!bytes_of(transport)) return NULL;
  return bytes_of(transport)->register_memory(transport, data, size, out_memory);
}

void jpp_transport_unregister(jpp_transport_t* transport,
                              jpp_transport_memory_t* memory) {
  if (memory) bytes_of(transport)->unregister_memory(transport, memory);
}

// --- Channels -------------------------------------------------------------------------

static jpp_status_t* check_channel_spec(const jpp_transport_t* transport,
                                        const jpp_channel_spec_t* spec) {
  if (spec->slots < 1 || spec->capacity < 1) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected at least 1 slot and 1 buffer a message, found %u "
                           "and %u",
                           spec->slots, spec->capacity);
  }
  if (!bytes_of(transport)) return NULL;
  uint32_t here = transport->process, processes = transport->num_processes;
  if (spec->src_process >= processes || spec->dst_process >= processes ||
      (spec->src_process == here) == (spec->dst_process == here)) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected its ends to be process %u, which opens it, and "
                           "another one of %u processes, found %u and %u",
                           here, processes, spec->src_process, spec->dst_process);
  }
  if (!spec->bytes) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected the largest size of each shard, found NULL");
  }
  if (!spec->on_device || bytes_of(transport)->takes_device_memory) return NULL;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "transport %s takes shards in host memory, found some in device "
                         "memory",
                         transport->vtable->name);
}

jpp_status_t* jpp_transport_open_channel(jpp_transport_t* transport,
                                         const jpp_channel_spec_t* spec,
                                         jpp_channel_t** out_channel) {
  JPP_RETURN_IF_NULL(transport, spec, out_channel);
  *out_channel = NULL;
  jpp_channel_spec_t full;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_channel_spec_t, user, spec, &full));
  jpp_status_t* status = check_channel_spec(transport, &full);
  if (!status) status = transport->vtable->open_channel(transport, &full, out_channel);
  if (status) {
    return jpp_status_annotate(status, "channel from actor %u to %u", full.src_actor,
                               full.dst_actor);
  }
  (*out_channel)->vtable = transport->vtable;
  (*out_channel)->spec = full;
  (*out_channel)->spec.bytes = NULL;
  (*out_channel)->spec.on_device = NULL;
  return NULL;
}

jpp_status_t* jpp_channel_warm_up(jpp_channel_t* channel, bool* out_done) {
  JPP_RETURN_IF_NULL(channel, out_done);
  const jpp_bytes_vtable_t* bytes = channel->vtable->bytes;
  *out_done = !bytes;  // within a process there is nothing to test
  return bytes ? bytes->warm_up(channel, out_done) : NULL;
}

uint32_t jpp_channel_credits(jpp_channel_t* channel) {
  return channel->vtable->credits(channel);
}

jpp_status_t* jpp_channel_status(const jpp_channel_t* channel) {
  JPP_RETURN_IF_NULL(channel);
  return channel->vtable->channel_status(channel);
}

void jpp_channel_abort(jpp_channel_t* channel, const jpp_status_t* status) {
  channel->vtable->set_abort(channel, status);
}

void jpp_channel_reset(jpp_channel_t* channel) { channel->vtable->reset(channel); }

void jpp_channel_close(jpp_channel_t* channel) {
  if (channel) channel->vtable->close(channel);
}

// --- Messages -------------------------------------------------------------------------

static jpp_status_t* check_count(const jpp_channel_t* channel, uint64_t tag,
                                 uint32_t count) {
  if (count <= channel->spec.capacity) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "channel from actor %u to %u: expected %u buffers at most, "
                         "found %u in message %llu",
                         channel->spec.src_actor, channel->spec.dst_actor,
                         channel->spec.capacity, count, (unsigned long long)tag);
}

static jpp_status_t* wrong_form(const jpp_channel_t* channel, const char* expected) {
  return jpp_status_make(JPP_UNSUPPORTED, "transport %s carries %s, not %s",
                         channel->vtable->name,
                         channel->vtable->bytes ? "bytes" : "handles", expected);
}

jpp_status_t* jpp_channel_try_send(jpp_channel_t* channel, const jpp_message_t* message,
                                   bool* out_done) {
  JPP_RETURN_IF_NULL(channel, message, out_done);
  if (message->count) JPP_RETURN_IF_NULL(message->buffers);
  *out_done = false;
  JPP_RETURN_IF_ERROR(check_count(channel, message->tag, message->count));
  const jpp_handles_vtable_t* handles = channel->vtable->handles;
  return handles ? handles->try_send(channel, message, out_done)
                 : wrong_form(channel, "handles");
}

jpp_status_t* jpp_channel_try_recv(jpp_channel_t* channel, jpp_message_t* message,
                                   bool* out_done) {
  JPP_RETURN_IF_NULL(channel, message, out_done);
  JPP_RETURN_IF_NULL(message->buffers);
  *out_done = false;
  const jpp_handles_vtable_t* handles = channel->vtable->handles;
  return handles ? handles->try_recv(channel, message, out_done)
                 : wrong_form(channel, "handles");
}

jpp_status_t* jpp_channel_try_send_bytes(jpp_channel_t* channel, uint64_t tag,
                                         const jpp_shard_t* shards, uint32_t count,
                                         void* cookie, bool* out_done) {
  JPP_RETURN_IF_NULL(channel, out_done);
  if (count) JPP_RETURN_IF_NULL(shards);
  *out_done = false;
  JPP_RETURN_IF_ERROR(check_count(channel, tag, count));
  const jpp_bytes_vtable_t* bytes = channel->vtable->bytes;
  return bytes ? bytes->try_send(channel, tag, shards, count, cookie, out_done)
               : wrong_form(channel, "bytes");
}

jpp_status_t* jpp_channel_try_recv_bytes(jpp_channel_t* channel,
                                         jpp_received_t* out_received, bool* out_done) {
  JPP_RETURN_IF_NULL(channel, out_received, out_done);
  *out_done = false;
  const jpp_bytes_vtable_t* bytes = channel->vtable->bytes;
  return bytes ? bytes->try_recv(channel, out_received, out_done)
               : wrong_form(channel, "bytes");
}

void jpp_channel_release(jpp_channel_t* channel, uint32_t slot) {
  if (channel->vtable->bytes) channel->vtable->bytes->release(channel, slot);
}
