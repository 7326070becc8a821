// Processes and their packets: connects peers, dispatches packets, and detects failed
// peers.
#include "transport/net.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sha256.h"
#include "transport/net_channel.h"

enum { kBeatsPerTimeout = 10 };

// --- Create ---------------------------------------------------------------------------

static jpp_status_t* check_net_options(const jpp_transport_options_t* options) {
  if (options->token_size < kJppLeastTokenSize) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected the job's token, of %d bytes at least; found %zu",
                           kJppLeastTokenSize, options->token_size);
  }
  if (options->address && *options->address) return NULL;
  return jpp_status_make(
      JPP_INVALID_ARGUMENT,
      "expected the address of the network interface that this process "
      "listens on (\"127.0.0.1\" for a job on one host), found none");
}

static jpp_status_t* draw_nonce(jpp_net_t* net) {
  if (getrandom(net->nonce, sizeof(net->nonce), 0) == (ssize_t)sizeof(net->nonce)) {
    return NULL;
  }
  return jpp_status_make(JPP_INTERNAL_ERROR, "no random numbers: %s", strerror(errno));
}

jpp_status_t* jpp__net_init(jpp_net_t* net, const jpp_net_port_t* port,
                            const jpp_transport_options_t* options) {
  JPP_RETURN_IF_ERROR(check_net_options(options));
  net->port = port;
  net->base.process = options->process;
  net->base.num_processes = options->num_processes;
  net->peer_timeout_ms = options->peer_timeout_ms;
  JPP_RETURN_IF_ERROR(draw_nonce(net));
  JPP_RETURN_IF_ERROR(jpp_alloc(options->token_size, &net->token));
  memcpy(net->token, options->token, options->token_size);
  net->token_size = options->token_size;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(options->num_processes, &net->peers));
  for (uint32_t i = 0; i < options->num_processes; ++i) {
    jpp_net_peer_t* peer = &net->peers[i];
    peer->net = net;
    peer->process = i;
    jpp__packet_proof(net->token, net->token_size, net->nonce, i, options->process,
                      peer->proof_in);
    peer->hello.peer = peer->bye.peer = peer->gone.peer = peer->beat.peer = peer;
  }
  return NULL;
}

jpp_status_t* jpp__net_publish(jpp_net_t* net, const char* name, const void* route,
                               size_t route_size) {
  jpp_address_t address = {.process = net->base.process,
                           .num_processes = net->base.num_processes,
                           .name = name,
                           .name_size = strlen(name),
                           .route = route,
                           .route_size = route_size};
  memcpy(address.nonce, net->nonce, sizeof(address.nonce));
  return jpp__address_seal(&address, net->token, net->token_size, &net->address,
                           &net->address_size);
}

void jpp__net_get_address(const jpp_transport_t* transport, const void** out_address,
                          size_t* out_size) {
  const jpp_net_t* net = (const jpp_net_t*)transport;
  *out_address = net->address;
  *out_size = net->address_size;
}

// --- Connect --------------------------------------------------------------------------

static jpp_status_t* check_peer_address(const jpp_net_t* net, uint32_t process,
                                        const jpp_address_t* address) {
  if (address->process != process || address->num_processes != net->base.num_processes) {
    return jpp_status_make(
        JPP_PEER_ERROR,
        "expected the address of process %u of %u, found that of %u of "
        "%u",
        process, net->base.num_processes, address->process, address->num_processes);
  }
  if (!net->peers[process].name) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT, "it is connected already");
}

jpp_status_t* jpp__net_open_address(jpp_net_t* net, uint32_t process, const void* bytes,
                                    size_t size, jpp_address_t* out_address) {
  jpp_net_peer_t* peer = &net->peers[process];
  jpp_status_t* status =
      jpp__address_open(bytes, size, net->token, net->token_size, out_address);
  if (!status) status = check_peer_address(net, process, out_address);
  if (!status) status = jpp_alloc(out_address->name_size + 1, (void**)&peer->name);
  if (status) return jpp_status_annotate(status, "process %u", process);
  memcpy(peer->name, out_address->name, out_address->name_size);
  jpp__packet_proof(net->token, net->token_size, out_address->nonce, net->base.process,
                    process, peer->proof_out);
  return NULL;
}

void jpp__net_greet(jpp_net_peer_t* peer) {
  JPP_LOG(JPP_LOG_INFO, "process %u connects to process %u at %s",
          peer->net->base.process, peer->process, peer->name);
  jpp__net_post(&peer->hello, JPP_PACKET_HELLO, NULL, 0, NULL);
}

jpp_status_t* jpp__net_peer_status(const jpp_transport_t* transport, uint32_t process) {
  const jpp_net_t* net = (const jpp_net_t*)transport;
  if (process >= net->base.num_processes) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "expected a process below %u, found %u",
                           net->base.num_processes, process);
  }
  const jpp_net_peer_t* peer = &net->peers[process];
  if (peer->status) return jpp_status_clone(peer->status);
  return peer->left ? jpp__net_left_status(peer) : NULL;
}

const char* jpp__net_peer_name(const jpp_transport_t* transport, uint32_t process) {
  const jpp_net_t* net = (const jpp_net_t*)transport;
  return process < net->base.num_processes ? net->peers[process].name : NULL;
}

jpp_status_t* jpp__net_left_status(const jpp_net_peer_t* peer) {
  if (peer->last_words) return jpp_status_clone(peer->last_words);
  return jpp_status_make(JPP_PEER_ERROR, "process %u at %s has left the job",
                         peer->process, peer->name ? peer->name : "an unknown address");
}

void jpp__net_peer_failed(jpp_net_peer_t* peer, const char* format, ...) {
  if (peer->status || peer->left) return;
  char what[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof(what), format, arguments);
  va_end(arguments);
  peer->status = jpp_status_make(JPP_PEER_ERROR, "process %u at %s: %s", peer->process,
                                 peer->name ? peer->name : "an unknown address", what);
  peer->net->some = peer->net->failed = true;
}

// --- Packets out ----------------------------------------------------------------------

void jpp__net_post(jpp_net_op_t* op, jpp_packet_kind_t kind, const void* data,
                   size_t size, const jpp_transport_memory_t* memory) {
  jpp_net_peer_t* peer = op->peer;
  op->packet.kind = kind;
  op->packet.source = peer->net->base.process;
  memcpy(op->packet.proof, peer->proof_out, sizeof(op->packet.proof));
  op->busy = true;
  op->parts = 1;
  ++peer->busy;
  if (op->channel) ++op->channel->busy;
  // A peer without an endpoint has failed.
  if (!peer->endpoint) {
    jpp__net_op_done(op);
    return;
  }
  if (kind == JPP_PACKET_DATA &&
      jpp__net_is_on_device(op->channel, op->packet.shard, size)) {
    op->parts = 2;
    peer->net->device->send(op, data);
    data = NULL;
    size = 0;
  }
  if (peer->net->port->send(peer->net, op, data, size, memory)) jpp__net_op_done(op);
}

void jpp__net_op_done(jpp_net_op_t* op) {
  if (--op->parts) return;
  jpp_net_channel_t* channel = op->channel;
  op->busy = false;
  --op->peer->busy;
  op->peer->net->some = true;
  if (op->message) jpp__net_message_done(channel, op->message);
  if (channel) jpp__net_channel_idle(channel);
}

// --- Packets in -----------------------------------------------------------------------

static jpp_net_channel_t* find_channel(const jpp_net_peer_t* peer, uint32_t id) {
  for (size_t i = 0; i < peer->ends.count; ++i) {
    if (peer->ends.data[i].id == id) return peer->ends.data[i].channel;
  }
  return NULL;
}

// NULL for a packet whose sender does not know this job's token.
static jpp_net_peer_t* authenticate(jpp_net_t* net, const void* head, size_t head_size,
                                    jpp_packet_t* out_packet) {
  if (head_size != sizeof(*out_packet)) return NULL;
  memcpy(out_packet, head, sizeof(*out_packet));
  if (out_packet->source >= net->base.num_processes) return NULL;
  jpp_net_peer_t* peer = &net->peers[out_packet->source];
  return jpp__bytes_equal_in_constant_time(out_packet->proof, peer->proof_in,
                                           sizeof(out_packet->proof))
             ? peer
             : NULL;
}

static void refuse_packet(jpp_net_t* net) {
  if (net->refused++) return;
  JPP_LOG(JPP_LOG_WARNING,
          "process %u: dropped a packet without proof of the job's token; further ones "
          "are not reported",
          net->base.process);
}

static const char* take_channel_packet(jpp_net_channel_t* channel,
                                       const jpp_packet_t* packet, const void* data,
                                       jpp_net_place_t* out_place) {
  static const char kWrongEnd[] = "it has the same end of the channel as this process";
  switch (packet->kind) {
    case JPP_PACKET_ASK:
      if (channel->sends) return kWrongEnd;
      jpp__net_channel_ask(channel, packet);
      return NULL;
    case JPP_PACKET_GRANT:
      if (!channel->sends) return kWrongEnd;
      return jpp__net_channel_grant(channel, packet);
    case JPP_PACKET_DATA:
      if (channel->sends) return kWrongEnd;
      return jpp__net_channel_data(channel, packet, data, out_place);
    default:
      return jpp__net_channel_abort(channel, packet, data);
  }
}

// What is wrong with the packet, or NULL.
static const char* take_packet(jpp_net_peer_t* peer, const jpp_packet_t* packet,
                               const void* data, size_t size,
                               jpp_net_place_t* out_place) {
  bool device = packet->kind == JPP_PACKET_MEET || packet->turn;
  if (device && !peer->net->device) return "this process takes host memory only";
  bool has_data = (packet->kind == JPP_PACKET_DATA && !packet->turn) ||
                  packet->kind == JPP_PACKET_ABORT || packet->kind == JPP_PACKET_MEET ||
                  packet->kind == JPP_PACKET_BEAT;
  if (size != (has_data ? packet->size : 0)) return "its length does not match its data";
  switch (packet->kind) {
    case JPP_PACKET_HELLO:
      return NULL;
    case JPP_PACKET_BEAT:
      return jpp__net_take_notes(peer->net, packet, data);
    case JPP_PACKET_BYE:
      peer->left = true;
      if (peer->endpoint && !peer->gone.busy && !peer->status) {
        jpp__net_post(&peer->gone, JPP_PACKET_GONE, NULL, 0, NULL);
      }
      return NULL;
    case JPP_PACKET_GONE:
      peer->knows_we_left = true;
      return NULL;
    case JPP_PACKET_MEET:
      return peer->net->device->meet(peer, packet, data);
    case JPP_PACKET_ASK:
    case JPP_PACKET_GRANT:
    case JPP_PACKET_DATA:
    case JPP_PACKET_ABORT:
      break;
    default:
      return "its kind is unknown";
  }
  jpp_net_channel_t* channel = find_channel(peer, packet->channel);
  if (!channel && packet->kind == JPP_PACKET_ABORT) {
    return jpp__net_early_abort(peer, packet, data);
  }
  if (packet->kind == JPP_PACKET_DATA && packet->turn) {
    // nccl.c carries the data of a shard in device memory, even if it is dropped.
    jpp_net_place_t place = {0};
    const char* wrong =
        channel ? take_channel_packet(channel, packet, NULL, &place) : NULL;
    return wrong ? wrong : peer->net->device->fetch(peer, packet, &place);
  }
  return channel ? take_channel_packet(channel, packet, data, out_place) : NULL;
}

void jpp__net_arrived(jpp_net_t* net, const void* head, size_t head_size,
                      const void* data, size_t size, jpp_net_place_t* out_place) {
  *out_place = (jpp_net_place_t){0};
  jpp_packet_t packet;
  jpp_net_peer_t* peer = authenticate(net, head, head_size, &packet);
  if (!peer) {
    refuse_packet(net);
    return;
  }
  net->some = true;
  peer->heard = true;
  if (peer->status) return;
  const char* wrong = take_packet(peer, &packet, data, size, out_place);
  if (!wrong) return;
  jpp__net_peer_failed(
      peer,
      "it sent a packet of kind %u for channel %u that the plan does not "
      "allow (message %llu, shard %u of %u, %zu bytes): %s",
      packet.kind, packet.channel, (unsigned long long)packet.number, packet.shard,
      packet.count, size, wrong);
}

// --- Progress -------------------------------------------------------------------------

static void watch_peer(jpp_net_peer_t* peer, int64_t now) {
  // Peers without channels between them do not watch each other.
  if (!peer->endpoint || !peer->ends.count || peer->status || peer->left) return;
  if (!peer->beat.busy) {
    size_t size = 0;
    peer->beat.packet.count = jpp__net_pack_notes(peer, &size);
    peer->beat.packet.size = size;
    jpp__net_post(&peer->beat, JPP_PACKET_BEAT, peer->beat_data, size, NULL);
  }
  uint32_t timeout = peer->net->peer_timeout_ms;
  if (!peer->heard_ms || now - peer->heard_ms <= timeout) return;
  jpp__net_peer_failed(peer,
                       "it has sent nothing for %g s: it was stopped, its machine hangs, "
                       "or the network to it is down",
                       (double)timeout / 1000);
}

// A living process sends heartbeats whatever its program does, because its runtime makes
// progress between steps too. A process that has not polled for a long time itself cannot
// judge others.
static void watch_peers(jpp_net_t* net) {
  int64_t now = jpp__clock_coarse_ms(), since = now - net->looked_ms;
  uint32_t interval = net->peer_timeout_ms / kBeatsPerTimeout;
  if (since < (interval ? interval : 1)) return;
  bool looked_away = since > net->peer_timeout_ms / 2;
  net->looked_ms = now;
  jpp__net_write_note(net);
  for (uint32_t p = 0; p < net->base.num_processes; ++p) {
    jpp_net_peer_t* peer = &net->peers[p];
    if (peer->heard || (looked_away && peer->heard_ms)) peer->heard_ms = now;
    peer->heard = false;
    watch_peer(peer, now);
  }
}

void jpp__net_progress(jpp_net_t* net, bool* out_some) {
  watch_peers(net);
  net->idle = *out_some || net->some ? 0 : net->idle + 1;
  if (atomic_load_explicit(&net->work, memory_order_relaxed) &&
      atomic_exchange(&net->work, false)) {
    for (uint32_t p = 0; p < net->base.num_processes; ++p) {
      const jpp_net_peer_t* peer = &net->peers[p];
      for (size_t i = 0; i < peer->ends.count; ++i) {
        jpp__net_channel_progress(peer->ends.data[i].channel);
      }
    }
  }
  *out_some |= net->some;
  net->some = false;
}

// --- Destroy --------------------------------------------------------------------------

static bool can_reach(const jpp_net_peer_t* peer) {
  return peer->endpoint && !peer->status && !peer->left;
}

static bool is_sending(const jpp_net_peer_t* peer) {
  return can_reach(peer) && peer->busy;
}

static bool waits_for_gone(const jpp_net_peer_t* peer) {
  return can_reach(peer) && !peer->knows_we_left;
}

static void progress_while(jpp_net_t* net, bool (*condition)(const jpp_net_peer_t* peer),
                           int64_t until) {
  const struct timespec nap = {.tv_nsec = 50000};
  while (jpp__clock_now_ms() < until) {
    bool holds = false, some = false;
    for (uint32_t i = 0; i < net->base.num_processes && !holds; ++i) {
      holds = condition(&net->peers[i]);
    }
    if (!holds) return;
    net->base.vtable->bytes->progress(&net->base, &some);
    if (!some) nanosleep(&nap, NULL);
  }
}

void jpp__net_leave(jpp_net_t* net) {
  int64_t until = jpp__clock_now_ms() + net->peer_timeout_ms;
  progress_while(net, is_sending, until);
  for (uint32_t i = 0; i < net->base.num_processes; ++i) {
    jpp_net_peer_t* peer = &net->peers[i];
    if (can_reach(peer)) jpp__net_post(&peer->bye, JPP_PACKET_BYE, NULL, 0, NULL);
  }
  progress_while(net, waits_for_gone, until);
  if (net->device) net->device->end(net, until);
}

void jpp__net_deinit(jpp_net_t* net) {
  if (net->device) net->device->end(net, 0);
  while (net->closing.count) jpp__net_channel_free(net->closing.data[0]);
  jpp_vec_deinit(&net->closing);
  for (uint32_t i = 0; net->peers && i < net->base.num_processes; ++i) {
    jpp_net_peer_t* peer = &net->peers[i];
    jpp_vec_deinit(&peer->ends);
    jpp_status_free(peer->status);
    jpp_status_free(peer->last_words);
    jpp_free(peer->name);
  }
  jpp__net_notes_deinit(net);
  jpp_free(net->peers);
  jpp_free(net->address);
  jpp_free(net->token);
}
