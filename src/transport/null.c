// The driver that does nothing: copy it to start another one.
//
// A driver is a file with a static function for each row of jpp_transport_vtable_t, the
// table at the end. Beside it, touch its declaration in driver.h, its line in the list of
// transport.c, and meson.build. The conformance suite in tests/c/transport then runs on
// it, and jpp_runtime_options_t.transport chooses it by name.
#include "base/alloc.h"
#include "transport/driver.h"

static jpp_status_t* null_unsupported(const char* operation) {
  return jpp_status_make(JPP_UNSUPPORTED, "transport null has no %s", operation);
}

// Makes the transport: endpoints, worker threads, memory registrations. A real driver
// embeds jpp_transport_t first in its own struct; transport.c sets its vtable.
static jpp_status_t* null_create(jpp_transport_t** out_transport) {
  return jpp_alloc(sizeof(**out_transport), (void**)out_transport);
}

// Frees what create made. All channels are closed.
static void null_destroy(jpp_transport_t* transport) { jpp_free(transport); }

// Allocates all that sends and receives will need: a slot for each waiting message, with
// room for spec->capacity buffers. A real driver embeds jpp_channel_t first in its own
// struct; transport.c sets its vtable and spec after this returns.
static jpp_status_t* null_open_channel(jpp_transport_t* transport,
                                       const jpp_channel_spec_t* spec,
                                       jpp_channel_t** out_channel) {
  (void)transport, (void)spec, (void)out_channel;
  return null_unsupported("open_channel");
}

// The sender's end. Returns the abort's status if there was one. Otherwise takes a free
// slot, copies the message into it and sets *out_done; leaves it false when none is free.
static jpp_status_t* null_try_send(jpp_channel_t* channel, const jpp_message_t* message,
                                   bool* out_done) {
  (void)channel, (void)message, (void)out_done;
  return null_unsupported("try_send");
}

// The receiver's end. Returns the abort's status if there was one. Otherwise copies the
// oldest message out, frees its slot and sets *out_done; leaves it false when none waits.
static jpp_status_t* null_try_recv(jpp_channel_t* channel, jpp_message_t* message,
                                   bool* out_done) {
  (void)channel, (void)message, (void)out_done;
  return null_unsupported("try_recv");
}

// Any thread. Keeps a copy of the status, unless one is kept already, where both ends see
// it at their next call; a driver between processes tells the peer.
static void null_set_abort(jpp_channel_t* channel, const jpp_status_t* status) {
  (void)channel, (void)status;
}

// No other call runs. Hands every buffer still inside to spec.release, frees the abort's
// status, and leaves the channel as open_channel made it.
static void null_reset(jpp_channel_t* channel) { (void)channel; }

// No other call runs. As reset, and frees the channel.
static void null_close(jpp_channel_t* channel) { (void)channel; }

const jpp_transport_vtable_t jpp_transport_null = {
    .name = "null",
    .create = null_create,
    .destroy = null_destroy,
    .open_channel = null_open_channel,
    .try_send = null_try_send,
    .try_recv = null_try_recv,
    .set_abort = null_set_abort,
    .reset = null_reset,
    .close = null_close,
};
