// Actors of one process: a channel is a ring of slots between one sender and one
// receiver.
//
// `sent` and `received` only ever grow; their difference is the number of waiting
// messages. Each is written by one side only, with release order, after a slot was filled
// or emptied, and read by the other side with acquire order, which also orders the slot's
// contents. Each side keeps its own copy of the other's counter and reads the shared one
// only when the copy says full or empty.
#include <stdatomic.h>

#include "base/alloc.h"
#include "transport/driver.h"

#define CACHE_LINE 64

typedef struct inproc_slot {
  uint64_t tag;
  uint32_t count;
  void** buffers;  // spec.capacity pointers of the channel's block
} inproc_slot_t;

typedef struct inproc_channel {
  jpp_channel_t base;
  inproc_slot_t* slots;
  void** buffers;  // of all slots
  uint32_t slot_count;
  _Atomic(jpp_status_t*) aborted;  // owned; set once until reset
  char apart_from_sender[CACHE_LINE];
  _Atomic uint64_t sent;  // written by the sender, with the next two
  uint64_t received_seen;
  uint32_t send_slot;
  char sender_apart_from_receiver[CACHE_LINE];
  _Atomic uint64_t received;  // written by the receiver, with the next two
  uint64_t sent_seen;
  uint32_t recv_slot;
} inproc_channel_t;

// --- Transport ------------------------------------------------------------------------

static jpp_status_t* inproc_create(const jpp_transport_options_t* options,
                                   jpp_transport_t** out_transport) {
  (void)options;
  return jpp_alloc(sizeof(**out_transport), (void**)out_transport);
}

static void inproc_destroy(jpp_transport_t* transport) { jpp_free(transport); }

// --- Channels -------------------------------------------------------------------------

static void inproc_free(inproc_channel_t* channel) {
  jpp_status_free(atomic_load(&channel->aborted));
  jpp_free(channel->slots);
  jpp_free(channel->buffers);
  jpp_free(channel);
}

static jpp_status_t* inproc_allocate(inproc_channel_t* channel,
                                     const jpp_channel_spec_t* spec) {
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(spec->slots, &channel->slots));
  JPP_RETURN_IF_ERROR(
      JPP_ALLOC_ARRAY((size_t)spec->slots * spec->capacity, &channel->buffers));
  for (uint32_t i = 0; i < spec->slots; ++i) {
    channel->slots[i].buffers = channel->buffers + (size_t)i * spec->capacity;
  }
  channel->slot_count = spec->slots;
  return NULL;
}

static jpp_status_t* inproc_open_channel(jpp_transport_t* transport,
                                         const jpp_channel_spec_t* spec,
                                         jpp_channel_t** out_channel) {
  (void)transport;
  inproc_channel_t* channel = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(*channel), (void**)&channel));
  jpp_status_t* status = inproc_allocate(channel, spec);
  if (status) {
    inproc_free(channel);
    return status;
  }
  *out_channel = &channel->base;
  return NULL;
}

static jpp_status_t* inproc_channel_status(const jpp_channel_t* base) {
  const inproc_channel_t* channel = (const inproc_channel_t*)base;
  return jpp_status_clone(atomic_load_explicit(&channel->aborted, memory_order_acquire));
}

static uint32_t slot_after(const inproc_channel_t* channel, uint32_t slot) {
  return slot + 1 == channel->slot_count ? 0 : slot + 1;
}

static uint32_t inproc_free_slots(inproc_channel_t* channel) {
  uint64_t sent = atomic_load_explicit(&channel->sent, memory_order_relaxed);
  if (sent - channel->received_seen == channel->slot_count) {
    channel->received_seen =
        atomic_load_explicit(&channel->received, memory_order_acquire);
  }
  return channel->slot_count - (uint32_t)(sent - channel->received_seen);
}

static uint32_t inproc_credits(jpp_channel_t* base) {
  const inproc_channel_t* channel = (const inproc_channel_t*)base;
  bool aborted = atomic_load_explicit(&channel->aborted, memory_order_relaxed);
  return aborted ? channel->slot_count : inproc_free_slots((inproc_channel_t*)base);
}

// --- Messages -------------------------------------------------------------------------

static jpp_status_t* inproc_try_send(jpp_channel_t* base, const jpp_message_t* message,
                                     bool* out_done) {
  inproc_channel_t* channel = (inproc_channel_t*)base;
  JPP_RETURN_IF_ERROR(inproc_channel_status(&channel->base));
  if (inproc_free_slots(channel) == 0) return NULL;
  inproc_slot_t* slot = &channel->slots[channel->send_slot];
  slot->tag = message->tag;
  slot->count = message->count;
  for (uint32_t i = 0; i < message->count; ++i) slot->buffers[i] = message->buffers[i];
  channel->send_slot = slot_after(channel, channel->send_slot);
  uint64_t sent = atomic_load_explicit(&channel->sent, memory_order_relaxed);
  atomic_store_explicit(&channel->sent, sent + 1, memory_order_release);
  *out_done = true;
  return NULL;
}

// Takes a message even if the channel is aborted.
static bool inproc_take(inproc_channel_t* channel, jpp_message_t* message) {
  uint64_t received = atomic_load_explicit(&channel->received, memory_order_relaxed);
  if (received == channel->sent_seen) {
    channel->sent_seen = atomic_load_explicit(&channel->sent, memory_order_acquire);
    if (received == channel->sent_seen) return false;
  }
  const inproc_slot_t* slot = &channel->slots[channel->recv_slot];
  message->tag = slot->tag;
  message->count = slot->count;
  for (uint32_t i = 0; i < slot->count; ++i) message->buffers[i] = slot->buffers[i];
  channel->recv_slot = slot_after(channel, channel->recv_slot);
  atomic_store_explicit(&channel->received, received + 1, memory_order_release);
  return true;
}

static jpp_status_t* inproc_try_recv(jpp_channel_t* base, jpp_message_t* message,
                                     bool* out_done) {
  inproc_channel_t* channel = (inproc_channel_t*)base;
  JPP_RETURN_IF_ERROR(inproc_channel_status(&channel->base));
  *out_done = inproc_take(channel, message);
  return NULL;
}

// --- Abort, reset and close -----------------------------------------------------------

static void inproc_set_abort(jpp_channel_t* base, const jpp_status_t* status) {
  inproc_channel_t* channel = (inproc_channel_t*)base;
  jpp_status_t* copy = jpp_status_clone(status);
  jpp_status_t* none = NULL;
  if (!atomic_compare_exchange_strong(&channel->aborted, &none, copy)) {
    jpp_status_free(copy);
  }
}

static void inproc_release(inproc_channel_t* channel) {
  const jpp_channel_spec_t* spec = &channel->base.spec;
  while (atomic_load(&channel->received) != atomic_load(&channel->sent)) {
    const inproc_slot_t* slot = &channel->slots[channel->recv_slot];
    for (uint32_t i = 0; i < slot->count && spec->release; ++i) {
      spec->release(spec->user, slot->buffers[i]);
    }
    channel->recv_slot = slot_after(channel, channel->recv_slot);
    atomic_fetch_add(&channel->received, 1);
  }
  // Neither side's copy may be older than the messages that were released here.
  channel->sent_seen = channel->received_seen = atomic_load(&channel->received);
}

static void inproc_reset(jpp_channel_t* base) {
  inproc_channel_t* channel = (inproc_channel_t*)base;
  inproc_release(channel);
  jpp_status_free(atomic_exchange(&channel->aborted, NULL));
}

static void inproc_close(jpp_channel_t* base) {
  inproc_channel_t* channel = (inproc_channel_t*)base;
  inproc_release(channel);
  inproc_free(channel);
}

static const jpp_handles_vtable_t kHandles = {
    .try_send = inproc_try_send,
    .try_recv = inproc_try_recv,
};

const jpp_transport_vtable_t jpp_transport_inproc = {
    .name = "inproc",
    .handles = &kHandles,
    .create = inproc_create,
    .destroy = inproc_destroy,
    .open_channel = inproc_open_channel,
    .credits = inproc_credits,
    .channel_status = inproc_channel_status,
    .set_abort = inproc_set_abort,
    .reset = inproc_reset,
    .close = inproc_close,
};
