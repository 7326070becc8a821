// The driver that does nothing: copy it to start another one.
//
// A driver is a file with a static function for each row of jpp_transport_vtable_t, the
// table at the end. Beside it, touch its declaration in driver.h, its line in the list of
// transport.c, and meson.build. The conformance suite in tests/c/transport then runs on
// it, and jpp_transport_options_t.driver chooses it by name.
//
// A driver for a network need not begin here: net.h has the channels of bytes with their
// slots, credits, handshake and checks, and wants of a driver only that it carries
// packets between two processes. ucx.c and fake.c are made so.
#include "base/alloc.h"
#include "transport/driver.h"

static jpp_status_t* null_unsupported(const char* operation) {
  return jpp_status_make(JPP_UNSUPPORTED, "transport null has no %s", operation);
}

// Makes the transport: workers, listeners at options->address and nowhere else. A real
// driver embeds jpp_transport_t first in its own struct; transport.c fills it in.
static jpp_status_t* null_create(const jpp_transport_options_t* options,
                                 jpp_transport_t** out_transport) {
  (void)options;
  return jpp_alloc(sizeof(**out_transport), (void**)out_transport);
}

// All channels are closed. Tells the peers, waits for what is under way for
// options->peer_timeout_ms at most, and frees what create made.
static void null_destroy(jpp_transport_t* transport) { jpp_free(transport); }

// What a peer needs to connect, with a proof of the job's token. Nothing, where there are
// no peers.
static void null_address(const jpp_transport_t* transport, const void** out_address,
                         size_t* out_size) {
  (void)transport, (void)out_address, (void)out_size;
}

// Checks the proof before anything else in the address, and begins to connect.
static jpp_status_t* null_connect(jpp_transport_t* transport, uint32_t process,
                                  const void* address, size_t size) {
  (void)transport, (void)process, (void)address, (void)size;
  return null_unsupported("connect");
}

// Sends and receives what it can without waiting, and says whether that was anything.
static void null_progress(jpp_transport_t* transport, bool* out_some) {
  (void)transport, (void)out_some;
}

// Makes a descriptor readable at the next event, unless there was one since progress.
// True, and descriptor -1, for a driver whose progress does nothing.
static jpp_status_t* null_arm(jpp_transport_t* transport, int* out_descriptor,
                              bool* out_armed) {
  (void)transport, (void)out_descriptor;
  *out_armed = true;
  return NULL;
}

// Why a process cannot be reached any more: JPP_PEER_ERROR with its number and address.
static jpp_status_t* null_peer_status(const jpp_transport_t* transport,
                                      uint32_t process) {
  (void)transport, (void)process;
  return NULL;
}

// What jpp_net_publish() put into the peer's address; NULL: it is not connected.
static const char* null_peer_name(const jpp_transport_t* transport, uint32_t process) {
  (void)transport, (void)process;
  return NULL;
}

// Notes go with heartbeats: net_notes.c has them for drivers that carry packets.
static jpp_status_t* null_open_notes(jpp_transport_t* transport, uint32_t size,
                                     jpp_transport_write_note_t write, void* user) {
  (void)transport, (void)size, (void)write, (void)user;
  return null_unsupported("open_notes");
}

static const void* null_note(const jpp_transport_t* transport, uint32_t process) {
  (void)transport, (void)process;
  return NULL;
}

// Makes memory known to the devices that will send from it. Nothing, where the processor
// sends.
static jpp_status_t* null_register(jpp_transport_t* transport, void* data, size_t size,
                                   jpp_transport_memory_t** out_memory) {
  (void)transport, (void)data, (void)size, (void)out_memory;
  return NULL;
}

static void null_unregister(jpp_transport_t* transport, jpp_transport_memory_t* memory) {
  (void)transport, (void)memory;
}

// Allocates all that sends and receives will need: a slot for each waiting message, with
// room for spec->capacity buffers, or shards of spec->bytes. A real driver embeds
// jpp_channel_t first in its own struct; transport.c sets its vtable and spec after this
// returns.
static jpp_status_t* null_open_channel(jpp_transport_t* transport,
                                       const jpp_channel_spec_t* spec,
                                       jpp_channel_t** out_channel) {
  (void)transport, (void)spec, (void)out_channel;
  return null_unsupported("open_channel");
}

// Sends a message from end to end. True at once where there is nothing to prove.
static jpp_status_t* null_warm_up(jpp_channel_t* channel, bool* out_done) {
  (void)channel, (void)out_done;
  return null_unsupported("warm_up");
}

// The sender's end: how many of the receiver's slots are free, as far as it knows.
static uint32_t null_credits(jpp_channel_t* channel) {
  (void)channel;
  return 0;
}

// Why the channel is of no more use.
static jpp_status_t* null_channel_status(const jpp_channel_t* channel) {
  (void)channel;
  return NULL;
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

// Handles, the sender's end. Returns the abort's status if there was one. Otherwise takes
// a free slot, copies the message into it and sets *out_done; leaves it false when none
// is free. A driver of bytes has jpp_transport_no_send here, and so on.
static jpp_status_t* null_try_send(jpp_channel_t* channel, const jpp_message_t* message,
                                   bool* out_done) {
  (void)channel, (void)message, (void)out_done;
  return null_unsupported("try_send");
}

// Handles, the receiver's end. Returns the abort's status if there was one. Otherwise
// copies the oldest message out, frees its slot and sets *out_done; leaves it false when
// none waits.
static jpp_status_t* null_try_recv(jpp_channel_t* channel, jpp_message_t* message,
                                   bool* out_done) {
  (void)channel, (void)message, (void)out_done;
  return null_unsupported("try_recv");
}

// Bytes, the sender's end. Returns the abort's or the peer's status if there is one.
// Otherwise uses up a credit, begins to send from the shards' memory and sets *out_done;
// calls spec.sent when it does not need the memory any more.
static jpp_status_t* null_try_send_bytes(jpp_channel_t* channel, uint64_t tag,
                                         const jpp_shard_t* shards, uint32_t count,
                                         void* cookie, bool* out_done) {
  (void)channel, (void)tag, (void)shards, (void)count, (void)cookie, (void)out_done;
  return null_unsupported("try_send_bytes");
}

// Bytes, the receiver's end. Lends the slot of the next message once it is complete.
static jpp_status_t* null_try_recv_bytes(jpp_channel_t* channel,
                                         jpp_received_t* out_received, bool* out_done) {
  (void)channel, (void)out_received, (void)out_done;
  return null_unsupported("try_recv_bytes");
}

// Bytes, any thread. The slot is free: the sender gets a credit at the next progress.
static void null_release(jpp_channel_t* channel, uint32_t slot) {
  (void)channel, (void)slot;
}

const jpp_transport_vtable_t jpp_transport_null = {
    .name = "null",
    .form = JPP_TRANSPORT_HANDLES,
    .create = null_create,
    .destroy = null_destroy,
    .address = null_address,
    .connect = null_connect,
    .progress = null_progress,
    .arm = null_arm,
    .peer_status = null_peer_status,
    .peer_name = null_peer_name,
    .open_notes = null_open_notes,
    .note = null_note,
    .register_memory = null_register,
    .unregister_memory = null_unregister,
    .open_channel = null_open_channel,
    .warm_up = null_warm_up,
    .credits = null_credits,
    .channel_status = null_channel_status,
    .set_abort = null_set_abort,
    .reset = null_reset,
    .close = null_close,
    .try_send = null_try_send,
    .try_recv = null_try_recv,
    .try_send_bytes = null_try_send_bytes,
    .try_recv_bytes = null_try_recv_bytes,
    .release = null_release,
};
