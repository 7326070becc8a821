// The receiving end of a channel of bytes: assigns a slot to each message, checks the
// packets, and frees the slot.
#include <string.h>

#include "transport/net_channel.h"

// Slots are passed to PJRT as host memory, which it uses without a copy if it has this
// alignment.
enum { kAlignment = 64, kIdleCalls = 32 };

static uint64_t aligned(uint64_t bytes) {
  return jpp__bytes_add(bytes, kAlignment - 1) & ~(uint64_t)(kAlignment - 1);
}

// --- Open and close -------------------------------------------------------------------

// Sets out_sizes[true] to the bytes of a message in device memory, and out_sizes[false]
// to its bytes in host memory.
static void measure_message(const jpp_net_channel_t* channel, uint64_t out_sizes[2]) {
  out_sizes[false] = out_sizes[true] = 0;
  for (uint32_t i = 0; i < channel->base.spec.capacity; ++i) {
    uint64_t* size = &out_sizes[jpp__net_is_on_device(channel, i, channel->bytes[i])];
    *size = jpp__bytes_add(*size, aligned(channel->bytes[i]));
  }
}

static void place_slots(jpp_net_channel_t* channel, char* host, char* device) {
  for (uint32_t s = 0; s < channel->base.spec.slots; ++s) {
    for (uint32_t i = 0; i < channel->base.spec.capacity; ++i) {
      bool on_device = jpp__net_is_on_device(channel, i, channel->bytes[i]);
      char** at = on_device ? &device : &host;
      channel->receiver.slots[s].data[i] = *at;
      *at += aligned(channel->bytes[i]);
    }
  }
}

static jpp_status_t* allocate_blocks(jpp_net_channel_t* channel) {
  jpp_net_receiver_t* receiver = &channel->receiver;
  jpp_net_t* net = channel->net;
  uint32_t slots = channel->base.spec.slots;
  uint64_t message[2];
  void* device = NULL;
  measure_message(channel, message);
  uint64_t size = jpp__bytes_add(jpp__bytes_multiply(message[false], slots), kAlignment);
  JPP_RETURN_IF_ERROR_IN(jpp_alloc(size, &receiver->block), "slots of %llu bytes",
                         (unsigned long long)size);
  if (message[true]) {
    uint64_t device_size = jpp__bytes_multiply(message[true], slots);
    JPP_RETURN_IF_ERROR_IN(net->device->allocate(net, device_size, &device),
                           "slots of %llu bytes of device memory",
                           (unsigned long long)device_size);
  }
  char* host = (char*)receiver->block + (-(uintptr_t)receiver->block & (kAlignment - 1));
  place_slots(channel, host, device);
  return net->base.vtable->bytes->register_memory(&net->base, receiver->block, size,
                                                  &receiver->memory);
}

jpp_status_t* jpp__net_receiver_open(jpp_net_channel_t* channel) {
  jpp_net_receiver_t* receiver = &channel->receiver;
  uint32_t slots = channel->base.spec.slots;
  receiver->grant.peer = channel->peer;
  receiver->grant.channel = channel;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(slots, &receiver->slots));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(slots, &receiver->free_slots));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(slots, &receiver->slot_of));
  for (uint32_t s = 0; s < slots; ++s) {
    jpp_net_slot_t* slot = &receiver->slots[s];
    uint32_t capacity = channel->base.spec.capacity;
    slot->channel = channel;
    JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(capacity, &slot->data));
    JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(capacity, &slot->sizes));
    JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(capacity, &slot->shards));
    for (uint32_t i = 0; i < capacity; ++i) slot->shards[i].slot = slot;
    receiver->free_slots[receiver->num_free++] = s;
    receiver->slot_of[s] = JPP_NET_NO_SLOT;
  }
  JPP_RETURN_IF_ERROR(allocate_blocks(channel));
  receiver->granted = slots;
  receiver->must_grant = true;
  return NULL;
}

void jpp__net_receiver_close(jpp_net_channel_t* channel) {
  jpp_net_receiver_t* receiver = &channel->receiver;
  if (receiver->memory) {
    channel->net->base.vtable->bytes->unregister_memory(&channel->net->base,
                                                        receiver->memory);
  }
  for (uint32_t s = 0; receiver->slots && s < channel->base.spec.slots; ++s) {
    jpp_free(receiver->slots[s].data);
    jpp_free(receiver->slots[s].sizes);
    jpp_free(receiver->slots[s].shards);
  }
  jpp_free(receiver->slots);
  jpp_free(receiver->free_slots);
  jpp_free(receiver->slot_of);
  jpp_free(receiver->block);
}

// --- Slots ----------------------------------------------------------------------------

static void free_slot(jpp_net_channel_t* channel, jpp_net_slot_t* slot) {
  jpp_net_receiver_t* receiver = &channel->receiver;
  slot->state = JPP_NET_SLOT_FREE;
  receiver->free_slots[receiver->num_free++] = (uint32_t)(slot - receiver->slots);
  ++receiver->granted;
  atomic_store(&channel->net->work, true);
}

static void begin_slot(jpp_net_channel_t* channel, const jpp_packet_t* packet,
                       uint32_t* out_index) {
  jpp_net_receiver_t* receiver = &channel->receiver;
  *out_index = receiver->free_slots[--receiver->num_free];
  jpp_net_slot_t* slot = &receiver->slots[*out_index];
  slot->state = JPP_NET_SLOT_FILLING;
  slot->epoch = channel->epoch;
  slot->tag = packet->tag;
  slot->count = packet->count;
  slot->missing = packet->count ? packet->count : 1;
  for (uint32_t i = 0; i < channel->base.spec.capacity; ++i) {
    slot->shards[i].has_come = false;
  }
}

// What is wrong with the shard that a packet announces, or NULL.
static const char* check_data(const jpp_net_channel_t* channel,
                              const jpp_packet_t* packet) {
  const jpp_net_receiver_t* receiver = &channel->receiver;
  if (packet->epoch > channel->epoch || packet->number < receiver->taken ||
      packet->number >= receiver->granted) {
    return "the message was not granted";
  }
  if (packet->count > channel->base.spec.capacity) return "it has too many shards";
  if (packet->shard >= (packet->count ? packet->count : 1)) return "no such shard";
  if (packet->size > (packet->count ? channel->bytes[packet->shard] : 0)) {
    return "the shard is too large";
  }
  if (jpp__net_is_on_device(channel, packet->shard, packet->size) !=
      (packet->turn != 0)) {
    return "the shard is in another kind of memory";
  }
  uint32_t index = receiver->slot_of[packet->number % channel->base.spec.slots];
  if (index == JPP_NET_NO_SLOT) return NULL;
  const jpp_net_slot_t* slot = &receiver->slots[index];
  if (slot->tag != packet->tag || slot->count != packet->count) {
    return "its shards are of different messages";
  }
  return slot->shards[packet->shard].has_come ? "the shard arrived twice" : NULL;
}

const char* jpp__net_channel_data(jpp_net_channel_t* channel, const jpp_packet_t* packet,
                                  const void* data, jpp_net_place_t* out_place) {
  if (packet->epoch < channel->epoch) return NULL;
  const char* wrong = check_data(channel, packet);
  if (wrong) return wrong;
  uint32_t* index = &channel->receiver.slot_of[packet->number % channel->base.spec.slots];
  if (*index == JPP_NET_NO_SLOT) begin_slot(channel, packet, index);
  jpp_net_slot_t* slot = &channel->receiver.slots[*index];
  slot->shards[packet->shard].has_come = true;
  slot->sizes[packet->shard] = packet->size;
  if (data || packet->size == 0) {
    if (packet->size) memcpy(slot->data[packet->shard], data, packet->size);
    --slot->missing;
    return NULL;
  }
  ++slot->fetching;
  ++channel->busy;
  *out_place = (jpp_net_place_t){.data = slot->data[packet->shard],
                                 .shard = &slot->shards[packet->shard]};
  return NULL;
}

jpp_net_peer_t* jpp__net_shard_peer(const void* shard) {
  return ((const jpp_net_shard_t*)shard)->slot->channel->peer;
}

// The slot of a message that was dropped on arrival is free once nothing writes to it.
void jpp__net_received(void* shard, bool success) {
  jpp_net_slot_t* slot = ((jpp_net_shard_t*)shard)->slot;
  jpp_net_channel_t* channel = slot->channel;
  channel->net->some = true;
  --slot->fetching;
  if (slot->epoch == channel->epoch) {
    if (success) --slot->missing;
  } else if (!slot->fetching) {
    free_slot(channel, slot);
  }
  jpp__net_channel_idle(channel);
}

void jpp__net_receiver_reset(jpp_net_channel_t* channel) {
  jpp_net_receiver_t* receiver = &channel->receiver;
  for (uint32_t s = 0; s < channel->base.spec.slots; ++s) {
    jpp_net_slot_t* slot = &receiver->slots[s];
    receiver->slot_of[s] = JPP_NET_NO_SLOT;
    if (slot->state == JPP_NET_SLOT_FILLING && !slot->fetching) free_slot(channel, slot);
  }
  receiver->taken = 0;
  receiver->granted = receiver->num_free;
  receiver->told = 0;
  receiver->must_grant = true;
  atomic_store(&channel->net->work, true);
}

void jpp__net_receiver_collect(jpp_net_channel_t* channel) {
  jpp_net_receiver_t* receiver = &channel->receiver;
  if (!atomic_exchange(&receiver->released, false)) return;
  for (uint32_t s = 0; s < channel->base.spec.slots; ++s) {
    jpp_net_slot_t* slot = &receiver->slots[s];
    if (slot->state != JPP_NET_SLOT_TAKEN || !atomic_exchange(&slot->released, false)) {
      continue;
    }
    free_slot(channel, slot);
  }
}

// Grants are batched: the sender gets them when half of the slots are free again, or
// earlier when this process is idle.
bool jpp__net_receiver_may_grant(const jpp_net_channel_t* channel) {
  const jpp_net_receiver_t* receiver = &channel->receiver;
  uint64_t due = receiver->granted - receiver->told;
  return receiver->must_grant || due * 2 >= channel->base.spec.slots ||
         channel->net->idle >= kIdleCalls;
}

// --- Receive --------------------------------------------------------------------------

jpp_status_t* jpp__net_try_recv(jpp_channel_t* base, jpp_received_t* out_received,
                                bool* out_done) {
  jpp_net_channel_t* channel = (jpp_net_channel_t*)base;
  JPP_RETURN_IF_ERROR(jpp__net_channel_status(channel));
  if (channel->sends) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "channel %u: this is the sender's end",
                           base->spec.id);
  }
  jpp_net_receiver_t* receiver = &channel->receiver;
  uint32_t* index = &receiver->slot_of[receiver->taken % base->spec.slots];
  jpp_net_slot_t* slot = *index == JPP_NET_NO_SLOT ? NULL : &receiver->slots[*index];
  if (!slot || slot->missing) {
    bool can_come = !channel->peer->left || (slot && slot->fetching);
    return can_come ? NULL : jpp__net_left_status(channel->peer);
  }
  slot->state = JPP_NET_SLOT_TAKEN;
  *out_received = (jpp_received_t){.tag = slot->tag,
                                   .slot = *index,
                                   .count = slot->count,
                                   .data = slot->data,
                                   .sizes = slot->sizes};
  *index = JPP_NET_NO_SLOT;
  ++receiver->taken;
  *out_done = true;
  return NULL;
}

void jpp__net_release(jpp_channel_t* base, uint32_t slot) {
  jpp_net_channel_t* channel = (jpp_net_channel_t*)base;
  if (channel->sends || slot >= base->spec.slots) return;
  atomic_store(&channel->receiver.slots[slot].released, true);
  atomic_store(&channel->receiver.released, true);
  atomic_store(&channel->net->work, true);
}
