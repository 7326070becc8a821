// The list of drivers and the public transport API, which checks what every driver would
// have to check, then calls the driver's function table.
#include "jaxpp/transport.h"

#include <string.h>

#include "base/str.h"
#include "transport/driver.h"

static const jpp_transport_vtable_t* const kDrivers[] = {
    &jpp_transport_inproc,
    &jpp_transport_null,
};
#define DRIVER_COUNT (sizeof(kDrivers) / sizeof(kDrivers[0]))

const char* jpp_transport_driver_name(uint32_t index) {
  return index < DRIVER_COUNT ? kDrivers[index]->name : NULL;
}

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

jpp_status_t* jpp_transport_create(const char* name, jpp_transport_t** out_transport) {
  *out_transport = NULL;
  for (size_t i = 0; i < DRIVER_COUNT; ++i) {
    if (strcmp(kDrivers[i]->name, name) != 0) continue;
    JPP_RETURN_IF_ERROR(kDrivers[i]->create(out_transport));
    (*out_transport)->vtable = kDrivers[i];
    return NULL;
  }
  return unknown_driver(name);
}

void jpp_transport_destroy(jpp_transport_t* transport) {
  if (transport) transport->vtable->destroy(transport);
}

jpp_status_t* jpp_transport_open_channel(jpp_transport_t* transport,
                                         const jpp_channel_spec_t* spec,
                                         jpp_channel_t** out_channel) {
  *out_channel = NULL;
  if (spec->slots < 1 || spec->capacity < 1) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "channel from actor %u to %u: expected at least 1 slot and 1 "
                           "buffer a message, found %u and %u",
                           spec->src_actor, spec->dst_actor, spec->slots, spec->capacity);
  }
  JPP_RETURN_IF_ERROR_IN(transport->vtable->open_channel(transport, spec, out_channel),
                         "channel from actor %u to %u", spec->src_actor, spec->dst_actor);
  (*out_channel)->vtable = transport->vtable;
  (*out_channel)->spec = *spec;
  return NULL;
}

jpp_status_t* jpp_channel_try_send(jpp_channel_t* channel, const jpp_message_t* message,
                                   bool* out_done) {
  *out_done = false;
  if (message->count > channel->spec.capacity) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "channel from actor %u to %u: expected %u buffers at most, "
                           "found %u in message %llu",
                           channel->spec.src_actor, channel->spec.dst_actor,
                           channel->spec.capacity, message->count,
                           (unsigned long long)message->tag);
  }
  return channel->vtable->try_send(channel, message, out_done);
}

jpp_status_t* jpp_channel_try_recv(jpp_channel_t* channel, jpp_message_t* message,
                                   bool* out_done) {
  *out_done = false;
  return channel->vtable->try_recv(channel, message, out_done);
}

void jpp_channel_abort(jpp_channel_t* channel, const jpp_status_t* status) {
  channel->vtable->set_abort(channel, status);
}

void jpp_channel_reset(jpp_channel_t* channel) { channel->vtable->reset(channel); }

void jpp_channel_close(jpp_channel_t* channel) {
  if (channel) channel->vtable->close(channel);
}
