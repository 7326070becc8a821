// A channel of bytes, and its sending end.
#include "transport/net_channel.h"

#include <string.h>

#include "base/clock.h"
#include "base/hash.h"
#include "base/utf8.h"

// The tag of jpp_channel_warm_up()'s message; value ids are smaller.
static const uint64_t kWarmUpTag = UINT64_MAX;
enum { kMostWarmUp = 1 << 20 };  // bytes per shard: larger ones take another route

// --- Status ---------------------------------------------------------------------------

jpp_status_t* jpp__net_channel_status(const jpp_net_channel_t* channel) {
  const jpp_status_t* aborted =
      atomic_load_explicit(&channel->aborted, memory_order_acquire);
  if (aborted) return jpp_status_clone(aborted);
  if (channel->peer_aborted && channel->peer_aborted_epoch >= channel->epoch) {
    return jpp_status_clone(channel->peer_aborted);
  }
  return jpp_status_clone(channel->peer->status);
}

jpp_status_t* jpp__net_status_of(const jpp_channel_t* base) {
  return jpp__net_channel_status((const jpp_net_channel_t*)base);
}

static bool has_failed(const jpp_net_channel_t* channel) {
  return atomic_load_explicit(&channel->aborted, memory_order_relaxed) ||
         channel->peer_aborted || channel->peer->status || channel->peer->left;
}

// --- Open and close -------------------------------------------------------------------

bool jpp__net_is_on_device(const jpp_net_channel_t* channel, uint32_t shard,
                           uint64_t size) {
  return channel->on_device && size && channel->on_device[shard];
}

// Hashes everything on which both ends must agree.
static uint64_t hash_spec(const jpp_channel_spec_t* spec) {
  uint64_t hash = JPP_HASH_START;
  const uint64_t head[] = {spec->src_actor,   spec->dst_actor, spec->src_process,
                           spec->dst_process, spec->slots,     spec->capacity};
  hash = jpp__hash_bytes(hash, head, sizeof(head));
  hash = jpp__hash_bytes(hash, spec->bytes, spec->capacity * sizeof(*spec->bytes));
  if (spec->on_device) hash = jpp__hash_bytes(hash, spec->on_device, spec->capacity);
  return hash;
}

static jpp_status_t* open_sender(jpp_net_channel_t* channel) {
  jpp_net_sender_t* sender = &channel->sender;
  const jpp_channel_spec_t* spec = &channel->base.spec;
  sender->ask.peer = channel->peer;
  sender->ask.channel = channel;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(spec->slots, &sender->messages));
  for (uint32_t s = 0; s < spec->slots; ++s) {
    jpp_net_message_t* message = &sender->messages[s];
    JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(spec->capacity, &message->ops));
    for (uint32_t i = 0; i < spec->capacity; ++i) {
      message->ops[i] =
          (jpp_net_op_t){.peer = channel->peer, .channel = channel, .message = message};
    }
  }
  return NULL;
}

static void close_sender(jpp_net_channel_t* channel) {
  jpp_net_sender_t* sender = &channel->sender;
  for (uint32_t s = 0; sender->messages && s < channel->base.spec.slots; ++s) {
    jpp_net_message_t* message = &sender->messages[s];
    if (message->busy) {
      message->busy = 1;
      jpp__net_message_done(channel, message);
    }
    jpp_free(message->ops);
  }
  jpp_free(sender->messages);
}

// Call it when no operation is in flight, or the driver is gone.
void jpp__net_channel_free(jpp_net_channel_t* channel) {
  jpp_net_t* net = channel->net;
  for (size_t i = 0; i < net->closing.count; ++i) {
    if (net->closing.data[i] != channel) continue;
    net->closing.data[i] = net->closing.data[--net->closing.count];
    break;
  }
  if (channel->sends) {
    close_sender(channel);
  } else {
    jpp__net_receiver_close(channel);
  }
  jpp_status_free(atomic_load(&channel->aborted));
  jpp_status_free(channel->peer_aborted);
  jpp_free(channel->abort_text);
  jpp_free(channel->warm_up_data);
  jpp_free(channel->bytes);
  jpp_free(channel->on_device);
  jpp_free(channel);
}

static jpp_status_t* open_channel(jpp_net_channel_t* channel) {
  jpp_net_t* net = channel->net;
  const jpp_channel_spec_t* spec = &channel->base.spec;
  channel->abort.peer = channel->peer;
  channel->abort.channel = channel;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(spec->capacity, &channel->bytes));
  memcpy(channel->bytes, spec->bytes, spec->capacity * sizeof(*spec->bytes));
  if (spec->on_device) {
    JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(spec->capacity, &channel->on_device));
    memcpy(channel->on_device, spec->on_device, spec->capacity);
  }
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(kJppMostAbortText, &channel->abort_text));
  // Reserved here, so that closing a channel needs no memory.
  size_t open = 1;
  for (uint32_t p = 0; p < net->base.num_processes; ++p) open += net->peers[p].ends.count;
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(&net->closing, open));
  JPP_RETURN_IF_ERROR(channel->sends ? open_sender(channel)
                                     : jpp__net_receiver_open(channel));
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(&channel->peer->ends, 1));
  if (spec->on_device) JPP_RETURN_IF_ERROR(net->device->open(channel->peer, spec));
  return JPP_VEC_PUSH(&channel->peer->ends,
                      (jpp_net_end_t){.id = spec->id, .channel = channel});
}

static jpp_status_t* check_peer(const jpp_net_peer_t* peer, uint32_t id) {
  if (!peer->endpoint) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "process %u is not connected yet",
                           peer->process);
  }
  for (size_t i = 0; i < peer->ends.count; ++i) {
    if (peer->ends.data[i].id != id) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT, "channel %u is open already", id);
  }
  return NULL;
}

static void fill_control(const jpp_net_channel_t* channel, jpp_packet_t* packet) {
  const jpp_channel_spec_t* spec = &channel->base.spec;
  *packet = (jpp_packet_t){.channel = spec->id,
                           .epoch = channel->epoch,
                           .shard = spec->slots,
                           .count = spec->capacity,
                           .size = channel->spec_hash};
}

jpp_status_t* jpp__net_open_channel(jpp_transport_t* transport,
                                    const jpp_channel_spec_t* spec,
                                    jpp_channel_t** out_channel) {
  jpp_net_t* net = (jpp_net_t*)transport;
  bool sends = spec->src_process == net->base.process;
  jpp_net_peer_t* peer = &net->peers[sends ? spec->dst_process : spec->src_process];
  JPP_RETURN_IF_ERROR(check_peer(peer, spec->id));
  jpp_net_channel_t* channel = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &channel));
  channel->base.spec = *spec;
  channel->net = net;
  channel->peer = peer;
  channel->sends = sends;
  channel->spec_hash = hash_spec(spec);
  jpp_status_t* status = open_channel(channel);
  if (status) {
    jpp__net_channel_free(channel);
    return status;
  }
  if (sends) {
    fill_control(channel, &channel->sender.ask.packet);
    jpp__net_post(&channel->sender.ask, JPP_PACKET_ASK, NULL, 0, NULL);
  } else {
    jpp__net_channel_progress(channel);
  }
  *out_channel = &channel->base;
  return NULL;
}

void jpp__net_close(jpp_channel_t* base) {
  jpp_net_channel_t* channel = (jpp_net_channel_t*)base;
  jpp_net_peer_t* peer = channel->peer;
  for (size_t i = 0; i < peer->ends.count; ++i) {
    if (peer->ends.data[i].channel != channel) continue;
    peer->ends.data[i] = peer->ends.data[--peer->ends.count];
    break;
  }
  if (!channel->busy) {
    jpp__net_channel_free(channel);
    return;
  }
  channel->closed = true;
  channel->net->closing.data[channel->net->closing.count++] = channel;
}

void jpp__net_channel_idle(jpp_net_channel_t* channel) {
  if (--channel->busy == 0 && channel->closed) jpp__net_channel_free(channel);
}

// --- Abort and reset ------------------------------------------------------------------

void jpp__net_set_abort(jpp_channel_t* base, const jpp_status_t* status) {
  jpp_net_channel_t* channel = (jpp_net_channel_t*)base;
  jpp_status_t* copy = jpp_status_clone(status);
  jpp_status_t* none = NULL;
  if (!atomic_compare_exchange_strong(&channel->aborted, &none, copy)) {
    jpp_status_free(copy);
  }
  atomic_store(&channel->net->work, true);
}

static const char* check_abort(const jpp_packet_t* packet, const char* text) {
  if (packet->number == JPP_OK || packet->number >= JPP_STATUS_CODE_COUNT) {
    return "there is no such error";
  }
  if (packet->size > kJppMostAbortText || (packet->size && !text)) {
    return "the message is too long";
  }
  return NULL;
}

// Whether a message begins with the process that failed, as in "process 2 has failed".
static bool names_a_process(const char* text) {
  static const char kWord[] = "process ";
  return !strncmp(text, kWord, sizeof(kWord) - 1) &&
         strspn(text + sizeof(kWord) - 1, "0123456789") > 0;
}

// A peer that only passes on the failure of another process, or that the job says has
// failed, is not named again.
static jpp_status_t* status_of_abort(const jpp_net_peer_t* peer,
                                     const jpp_packet_t* packet, const char* text) {
  jpp_str_t words = {0};
  if (packet->size) jpp_str_append_utf8(&words, text, packet->size);
  const char* message = words.data ? words.data : "aborted";
  jpp_status_code_t code = (jpp_status_code_t)packet->number;
  jpp_status_t* status = names_a_process(message)
                             ? jpp_status_make(code, "%s", message)
                             : jpp_status_make(code, "process %u at %s: %s",
                                               peer->process, peer->name, message);
  jpp_str_deinit(&words);
  return status;
}

const char* jpp__net_channel_abort(jpp_net_channel_t* channel, const jpp_packet_t* packet,
                                   const char* text) {
  const char* wrong = check_abort(packet, text);
  if (wrong) return wrong;
  if (packet->epoch < channel->epoch) return NULL;
  if (channel->peer_aborted && channel->peer_aborted_epoch >= channel->epoch) return NULL;
  jpp_status_free(channel->peer_aborted);
  channel->peer_aborted = status_of_abort(channel->peer, packet, text);
  channel->peer_aborted_epoch = packet->epoch;
  return NULL;
}

const char* jpp__net_early_abort(jpp_net_peer_t* peer, const jpp_packet_t* packet,
                                 const char* text) {
  const char* wrong = check_abort(packet, text);
  if (wrong || peer->last_words) return wrong;
  peer->last_words = status_of_abort(peer, packet, text);
  return NULL;
}

void jpp__net_reset(jpp_channel_t* base) {
  jpp_net_channel_t* channel = (jpp_net_channel_t*)base;
  jpp_net_sender_t* sender = &channel->sender;
  ++channel->epoch;
  jpp_status_free(atomic_exchange(&channel->aborted, NULL));
  channel->abort_told = false;
  if (channel->sends) {
    sender->sent = 0;
    sender->granted = sender->early_epoch == channel->epoch ? sender->early_granted : 0;
  } else {
    jpp__net_receiver_collect(channel);
    jpp__net_receiver_reset(channel);
  }
}

// --- Packets from the peer ---------------------------------------------------------

// Both ends must be opened from the same plan.
static bool check_agreement(jpp_net_channel_t* channel, const jpp_packet_t* packet) {
  if (packet->size == channel->spec_hash) return true;
  const jpp_channel_spec_t* spec = &channel->base.spec;
  jpp_status_t* status = jpp_status_make(
      JPP_PEER_ERROR,
      "channel %u from actor %u to %u: expected %u slots of %u shards at its other end, "
      "process %u at %s has %u of %u, or others in ranks or bytes; run the same plan in "
      "all processes",
      spec->id, spec->src_actor, spec->dst_actor, spec->slots, spec->capacity,
      channel->peer->process, channel->peer->name, packet->shard, packet->count);
  jpp__net_set_abort(&channel->base, status);
  jpp_status_free(status);
  return false;
}

void jpp__net_channel_ask(jpp_net_channel_t* channel, const jpp_packet_t* packet) {
  if (!check_agreement(channel, packet)) return;
  channel->receiver.must_grant = true;
  atomic_store(&channel->net->work, true);
}

const char* jpp__net_channel_grant(jpp_net_channel_t* channel,
                                   const jpp_packet_t* packet) {
  jpp_net_sender_t* sender = &channel->sender;
  if (!check_agreement(channel, packet) || packet->epoch < channel->epoch) return NULL;
  uint64_t sent = packet->epoch == channel->epoch ? sender->sent : 0;
  if (packet->number > sent + channel->base.spec.slots) {
    return "it grants more messages than there are slots";
  }
  // Packets may overtake each other.
  if (packet->epoch == channel->epoch) {
    if (packet->number > sender->granted) sender->granted = packet->number;
  } else if (packet->epoch > sender->early_epoch) {
    sender->early_epoch = packet->epoch;
    sender->early_granted = packet->number;
  } else if (packet->epoch == sender->early_epoch &&
             packet->number > sender->early_granted) {
    sender->early_granted = packet->number;
  }
  return NULL;
}

static bool is_grant_due(const jpp_net_receiver_t* receiver) {
  return receiver->must_grant || receiver->granted != receiver->told;
}

void jpp__net_channel_progress(jpp_net_channel_t* channel) {
  if (channel->peer->status || channel->peer->left) return;
  const jpp_status_t* aborted = atomic_load(&channel->aborted);
  bool busy = false;
  if (aborted && !channel->abort_told) {
    busy = channel->abort.busy;
    if (!busy) {
      const char* text = jpp_status_message(aborted);
      size_t size = strnlen(text, kJppMostAbortText);
      memcpy(channel->abort_text, text, size);
      channel->abort.packet = (jpp_packet_t){.channel = channel->base.spec.id,
                                             .epoch = channel->epoch,
                                             .number = jpp_status_code(aborted),
                                             .size = size};
      channel->abort_told = true;
      jpp__net_post(&channel->abort, JPP_PACKET_ABORT, channel->abort_text, size, NULL);
    }
  }
  if (!channel->sends) {
    jpp_net_receiver_t* receiver = &channel->receiver;
    jpp__net_receiver_collect(channel);
    if (is_grant_due(receiver) && !receiver->grant.busy &&
        jpp__net_receiver_may_grant(channel)) {
      fill_control(channel, &receiver->grant.packet);
      receiver->grant.packet.number = receiver->told = receiver->granted;
      receiver->must_grant = false;
      jpp__net_post(&receiver->grant, JPP_PACKET_GRANT, NULL, 0, NULL);
    }
    busy |= is_grant_due(receiver);
  }
  if (busy) atomic_store(&channel->net->work, true);
}

// --- Send -----------------------------------------------------------------------------

static bool can_send(const jpp_net_channel_t* channel) {
  const jpp_net_sender_t* sender = &channel->sender;
  return channel->sends && sender->sent < sender->granted &&
         !sender->messages[sender->turn].busy;
}

uint32_t jpp__net_credits(jpp_channel_t* base) {
  const jpp_net_channel_t* channel = (const jpp_net_channel_t*)base;
  const jpp_net_sender_t* sender = &channel->sender;
  if (has_failed(channel)) return base->spec.slots;
  return can_send(channel) ? (uint32_t)(sender->granted - sender->sent) : 0;
}

void jpp__net_message_done(jpp_net_channel_t* channel, jpp_net_message_t* message) {
  if (--message->busy || message->warms_up || !channel->base.spec.sent) return;
  channel->base.spec.sent(channel->base.spec.user, message->cookie);
}

static jpp_status_t* check_shards(const jpp_net_channel_t* channel, uint64_t tag,
                                  const jpp_shard_t* shards, uint32_t count) {
  const jpp_channel_spec_t* spec = &channel->base.spec;
  if (!channel->sends) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "channel %u: this is the receiver's end",
                           spec->id);
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (shards[i].size <= channel->bytes[i]) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "channel from actor %u to %u: expected %llu bytes at most in "
                           "shard %u, found %zu in message %llu",
                           spec->src_actor, spec->dst_actor,
                           (unsigned long long)channel->bytes[i], i, shards[i].size,
                           (unsigned long long)tag);
  }
  return NULL;
}

static jpp_status_t* try_send(jpp_net_channel_t* channel, uint64_t tag,
                              const jpp_shard_t* shards, uint32_t count, void* cookie,
                              bool warms_up, bool* out_done) {
  JPP_RETURN_IF_ERROR(jpp__net_channel_status(channel));
  JPP_RETURN_IF_ERROR(check_shards(channel, tag, shards, count));
  if (channel->peer->left) return jpp__net_left_status(channel->peer);
  if (!can_send(channel)) return NULL;
  jpp_net_message_t* message = &channel->sender.messages[channel->sender.turn];
  message->cookie = cookie;
  message->warms_up = warms_up;
  static const jpp_shard_t kNoShard = {0};
  jpp_net_sender_t* sender = &channel->sender;
  uint32_t packets = count ? count : 1;
  message->busy = packets + 1;
  for (uint32_t i = 0; i < packets; ++i) {
    const jpp_shard_t* shard = count ? &shards[i] : &kNoShard;
    message->ops[i].packet = (jpp_packet_t){.channel = channel->base.spec.id,
                                            .epoch = channel->epoch,
                                            .number = sender->sent,
                                            .tag = tag,
                                            .shard = i,
                                            .count = count,
                                            .size = shard->size};
    jpp__net_post(&message->ops[i], JPP_PACKET_DATA, shard->data, shard->size,
                  shard->memory);
  }
  ++sender->sent;
  sender->turn = sender->turn + 1 == channel->base.spec.slots ? 0 : sender->turn + 1;
  jpp__net_message_done(channel, message);
  *out_done = true;
  return NULL;
}

jpp_status_t* jpp__net_try_send(jpp_channel_t* base, uint64_t tag,
                                const jpp_shard_t* shards, uint32_t count, void* cookie,
                                bool* out_done) {
  return try_send((jpp_net_channel_t*)base, tag, shards, count, cookie, false, out_done);
}

// --- Warm up --------------------------------------------------------------------------

// Each shard has its largest size, up to kMostWarmUp; all shards of one kind share
// memory.
static jpp_status_t* send_warm_up(jpp_net_channel_t* channel, bool* out_sent) {
  uint32_t capacity = channel->base.spec.capacity;
  jpp_shard_t* shards = NULL;
  size_t head = capacity * sizeof(*shards);
  if (!channel->warm_up_data) {
    JPP_RETURN_IF_ERROR(jpp_alloc(head + kMostWarmUp, &channel->warm_up_data));
  }
  shards = channel->warm_up_data;
  for (uint32_t i = 0; i < capacity; ++i) {
    shards[i].size = channel->bytes[i] < kMostWarmUp ? channel->bytes[i] : kMostWarmUp;
    shards[i].data = jpp__net_is_on_device(channel, i, shards[i].size)
                         ? channel->net->scratch
                         : (const char*)channel->warm_up_data + head;
  }
  return try_send(channel, kWarmUpTag, shards, capacity, NULL, true, out_sent);
}

// Done when the receiver has returned all credits.
static jpp_status_t* warm_up_sender(jpp_net_channel_t* channel, bool* out_done) {
  const jpp_net_sender_t* sender = &channel->sender;
  if (!channel->warm_up_sent) return send_warm_up(channel, &channel->warm_up_sent);
  JPP_RETURN_IF_ERROR(jpp__net_channel_status(channel));
  *out_done =
      sender->granted - sender->sent == channel->base.spec.slots && channel->busy == 0;
  // A peer may return the credits and leave.
  return channel->peer->left && !*out_done ? jpp__net_left_status(channel->peer) : NULL;
}

// Done when the credit has been posted.
static jpp_status_t* warm_up_receiver(jpp_net_channel_t* channel, bool* out_done) {
  jpp_received_t received = {0};
  if (channel->warm_up_sent) {
    JPP_RETURN_IF_ERROR(jpp__net_channel_status(channel));
    *out_done = !atomic_load(&channel->receiver.released) &&
                !is_grant_due(&channel->receiver) && channel->busy == 0;
    return NULL;
  }
  JPP_RETURN_IF_ERROR(
      jpp__net_try_recv(&channel->base, &received, &channel->warm_up_sent));
  if (!channel->warm_up_sent) return NULL;
  jpp__net_release(&channel->base, received.slot);
  if (received.tag == kWarmUpTag) return NULL;
  return jpp_status_make(JPP_PEER_ERROR,
                         "process %u at %s: expected its message that warms channel %u "
                         "up, found message %llu",
                         channel->peer->process, channel->peer->name,
                         channel->base.spec.id, (unsigned long long)received.tag);
}

jpp_status_t* jpp__net_warm_up(jpp_channel_t* base, bool* out_done) {
  jpp_net_channel_t* channel = (jpp_net_channel_t*)base;
  uint32_t timeout = channel->net->peer_timeout_ms;
  if (!channel->warm_up_until) channel->warm_up_until = jpp__clock_now_ms() + timeout;
  JPP_RETURN_IF_ERROR(channel->sends ? warm_up_sender(channel, out_done)
                                     : warm_up_receiver(channel, out_done));
  if (*out_done) {
    jpp_free(channel->warm_up_data);
    channel->warm_up_data = NULL;
    return NULL;
  }
  if (jpp__clock_now_ms() < channel->warm_up_until) return NULL;
  return jpp_status_make(
      JPP_PEER_ERROR,
      "process %u at %s: channel %u has not warmed up within %u ms; is "
      "it running, and can it be reached from here?",
      channel->peer->process, channel->peer->name, base->spec.id, timeout);
}
