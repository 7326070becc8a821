// The fake network: packets go through lists in memory. It copies small data when they
// are sent; large data stay at the sender, and are copied to the slot some rounds after
// the packet arrives, as a network adapter would.
//
// One mutex guards all state that transports share; the callbacks of net.h are called
// without it, on the transport's thread.
#include "fake/transport.h"

#include <pthread.h>
#include <string.h>

#include "base/alloc.h"
#include "transport/nccl.h"
#include "transport/net.h"

enum { kLeastFetched = 4096 };

typedef struct fake_packet {
  struct fake_packet* next;
  uint64_t sender;  // its number
  uint64_t due;     // round
  jpp_packet_t head;
  jpp_net_op_t* op;  // the sender's op, completed when its data are no longer needed
  const void* data;  // the sender's memory, or memory behind this struct
  size_t size;
  jpp_net_place_t place;  // set when it has arrived and its data are being fetched
} fake_packet_t;

typedef struct fake_transport {
  jpp_net_t net;
  uint64_t number;  // part of its address; never reused
  uint64_t round;
  uint32_t rounds;  // the delay
  uint64_t random;  // state of the random generator
  struct fake_transport* next;
  // Guarded by g_mutex:
  bool dead;
  fake_packet_t* inbox;
  fake_packet_t* done;  // packets of this transport whose `op` can complete
} fake_transport_t;

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static fake_transport_t* g_transports = NULL;
static uint64_t g_numbers = 0;

// Returns NULL for a transport that is gone.
static fake_transport_t* find_locked(uint64_t number) {
  fake_transport_t* transport = g_transports;
  while (transport && transport->number != number) transport = transport->next;
  return transport && !transport->dead ? transport : NULL;
}

static void append_packet(fake_packet_t** list, fake_packet_t* packet) {
  while (*list) list = &(*list)->next;
  packet->next = NULL;
  *list = packet;
}

static uint64_t endpoint_number(const jpp_net_peer_t* peer) {
  return (uint64_t)(uintptr_t)peer->endpoint;
}

// --- Send -----------------------------------------------------------------------------

// xorshift64*
static uint64_t draw(fake_transport_t* transport) {
  transport->random ^= transport->random >> 12;
  transport->random ^= transport->random << 25;
  transport->random ^= transport->random >> 27;
  return transport->random * UINT64_C(0x2545f4914f6cdd1d);
}

static uint64_t due_after_locked(fake_transport_t* receiver) {
  return receiver->round + 1 + draw(receiver) % receiver->rounds;
}

static void fake_deliver(jpp_net_peer_t* peer, fake_packet_t* packet) {
  pthread_mutex_lock(&g_mutex);
  fake_transport_t* receiver = find_locked(endpoint_number(peer));
  if (receiver) {
    packet->due = due_after_locked(receiver);
    append_packet(&receiver->inbox, packet);
  }
  pthread_mutex_unlock(&g_mutex);
  if (receiver) return;
  jpp__net_peer_failed(peer, "the connection was lost");
  if (packet->op) jpp__net_op_done(packet->op);
  jpp_free(packet);
}

static bool fake_send(jpp_net_t* net, jpp_net_op_t* op, const void* data, size_t size,
                      const jpp_transport_memory_t* memory) {
  (void)memory;
  bool stays = op->packet.kind == JPP_PACKET_DATA && size >= kLeastFetched;
  fake_packet_t* packet = NULL;
  jpp_status_t* status = jpp_alloc(sizeof(*packet) + (stays ? 0 : size), (void**)&packet);
  if (status) {
    jpp__net_peer_failed(op->peer, "%s", jpp_status_message(status));
    jpp_status_free(status);
    return true;
  }
  packet->sender = ((fake_transport_t*)net)->number;
  packet->head = op->packet;
  packet->size = size;
  packet->data = stays ? data : packet + 1;
  packet->op = stays ? op : NULL;
  if (!stays && size) memcpy(packet + 1, data, size);
  fake_deliver(op->peer, packet);
  return !stays;
}

// --- Progress -------------------------------------------------------------------------

static void answer_locked(fake_packet_t* packet) {
  fake_transport_t* sender = packet->op ? find_locked(packet->sender) : NULL;
  if (sender) {
    append_packet(&sender->done, packet);
  } else {
    jpp_free(packet);
  }
}

// Copies the data while the sender cannot be destroyed.
static bool fetch(const fake_packet_t* packet) {
  pthread_mutex_lock(&g_mutex);
  bool there = find_locked(packet->sender) != NULL;
  if (there) memcpy(packet->place.data, packet->data, packet->size);
  pthread_mutex_unlock(&g_mutex);
  return there;
}

// Returns false to put the packet back into the inbox, to be fetched later.
static bool take_packet(fake_transport_t* transport, fake_packet_t* packet) {
  if (packet->place.data) {
    jpp__net_received(packet->place.shard, fetch(packet));
    return true;
  }
  jpp__net_arrived(&transport->net, &packet->head, sizeof(packet->head),
                   packet->op ? NULL : packet->data, packet->size, &packet->place);
  return !packet->place.data;
}

// Takes the packets that are due out of the inbox.
static fake_packet_t* take_due_locked(fake_transport_t* transport) {
  fake_packet_t* due = NULL;
  for (fake_packet_t** at = &transport->inbox; *at;) {
    fake_packet_t* packet = *at;
    if (packet->due > transport->round) {
      at = &packet->next;
      continue;
    }
    *at = packet->next;
    append_packet(&due, packet);
  }
  return due;
}

static void take_packets(fake_transport_t* transport, fake_packet_t* due) {
  while (due) {
    fake_packet_t* packet = due;
    due = packet->next;
    bool taken = take_packet(transport, packet);
    pthread_mutex_lock(&g_mutex);
    if (taken) {
      answer_locked(packet);
    } else {
      packet->due = due_after_locked(transport);
      append_packet(&transport->inbox, packet);
    }
    pthread_mutex_unlock(&g_mutex);
  }
}

static void finish_sends(fake_packet_t* done) {
  while (done) {
    fake_packet_t* packet = done;
    done = packet->next;
    jpp__net_op_done(packet->op);
    jpp_free(packet);
  }
}

static void notice_deaths(fake_transport_t* transport) {
  for (uint32_t i = 0; i < transport->net.base.num_processes; ++i) {
    jpp_net_peer_t* peer = &transport->net.peers[i];
    if (!peer->endpoint || peer->status) continue;
    pthread_mutex_lock(&g_mutex);
    bool there = find_locked(endpoint_number(peer)) != NULL;
    pthread_mutex_unlock(&g_mutex);
    if (!there) jpp__net_peer_failed(peer, "the connection was lost");
  }
}

static void fake_progress(jpp_transport_t* base, bool* out_some) {
  fake_transport_t* transport = (fake_transport_t*)base;
  pthread_mutex_lock(&g_mutex);
  ++transport->round;
  fake_packet_t* done = transport->done;
  fake_packet_t* due = take_due_locked(transport);
  bool dead = transport->dead;
  transport->done = NULL;
  pthread_mutex_unlock(&g_mutex);
  if (dead) return;
  finish_sends(done);
  take_packets(transport, due);
  notice_deaths(transport);
  jpp__net_progress(&transport->net, out_some);
}

static jpp_status_t* fake_arm(jpp_transport_t* transport, int* out_descriptor,
                              bool* out_armed) {
  (void)transport, (void)out_descriptor, (void)out_armed;
  return NULL;
}

// --- Faults ---------------------------------------------------------------------------

void jpp_transport_fake_set_delay(jpp_transport_t* base, uint32_t rounds, uint64_t seed) {
  fake_transport_t* transport = (fake_transport_t*)base;
  pthread_mutex_lock(&g_mutex);
  transport->rounds = rounds ? rounds : 1;
  transport->random = seed * 2 + 1;
  pthread_mutex_unlock(&g_mutex);
}

// Returns memory to the senders and frees the packets that cannot be delivered.
static void die_locked(fake_transport_t* transport) {
  transport->dead = true;
  while (transport->inbox) {
    fake_packet_t* packet = transport->inbox;
    transport->inbox = packet->next;
    answer_locked(packet);
  }
  while (transport->done) {
    fake_packet_t* packet = transport->done;
    transport->done = packet->next;
    jpp_free(packet);
  }
}

void jpp_transport_fake_kill(jpp_transport_t* base) {
  pthread_mutex_lock(&g_mutex);
  die_locked((fake_transport_t*)base);
  pthread_mutex_unlock(&g_mutex);
}

// --- Create, connect and destroy ------------------------------------------------------

static const jpp_net_port_t kPort = {.send = fake_send};

static jpp_status_t* fake_create(const jpp_transport_options_t* options,
                                 jpp_transport_t** out_transport) {
  fake_transport_t* transport = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &transport));
  jpp_status_t* status = jpp__net_init(&transport->net, &kPort, options);
  pthread_mutex_lock(&g_mutex);
  transport->number = ++g_numbers;
  pthread_mutex_unlock(&g_mutex);
  if (!status) {
    status = jpp__net_publish(&transport->net, options->address, &transport->number,
                              sizeof(transport->number));
  }
  if (status) {
    jpp__net_deinit(&transport->net);
    jpp_free(transport);
    return status;
  }
  jpp_transport_fake_set_delay(&transport->net.base, 1, 0);
  pthread_mutex_lock(&g_mutex);
  transport->next = g_transports;
  g_transports = transport;
  pthread_mutex_unlock(&g_mutex);
  *out_transport = &transport->net.base;
  return NULL;
}

static jpp_status_t* fake_connect(jpp_transport_t* base, uint32_t process,
                                  const void* address, size_t size) {
  jpp_net_t* net = (jpp_net_t*)base;
  jpp_address_t opened;
  uint64_t number = 0;
  JPP_RETURN_IF_ERROR(jpp__net_open_address(net, process, address, size, &opened));
  if (opened.route_size != sizeof(number)) {
    return jpp_status_make(JPP_PEER_ERROR, "process %u: expected an address of fake",
                           process);
  }
  memcpy(&number, opened.route, sizeof(number));
  net->peers[process].endpoint = (void*)(uintptr_t)number;
  jpp__net_greet(&net->peers[process]);
  return NULL;
}

static void fake_destroy(jpp_transport_t* base) {
  fake_transport_t* transport = (fake_transport_t*)base;
  pthread_mutex_lock(&g_mutex);
  bool dead = transport->dead;
  pthread_mutex_unlock(&g_mutex);
  if (!dead) jpp__net_leave(&transport->net);
  pthread_mutex_lock(&g_mutex);
  die_locked(transport);
  fake_transport_t** at = &g_transports;
  while (*at != transport) at = &(*at)->next;
  *at = transport->next;
  pthread_mutex_unlock(&g_mutex);
  jpp__net_deinit(&transport->net);
  jpp_free(transport);
}

// The processor copies, so memory needs no registration.
static jpp_status_t* fake_register(jpp_transport_t* transport, void* data, size_t size,
                                   jpp_transport_memory_t** out_memory) {
  (void)transport, (void)data, (void)size, (void)out_memory;
  return NULL;
}

static void fake_unregister(jpp_transport_t* transport, jpp_transport_memory_t* memory) {
  (void)transport, (void)memory;
}

static const jpp_bytes_vtable_t kBytes = {
    .connect = fake_connect,
    .progress = fake_progress,
    .arm = fake_arm,
    .register_memory = fake_register,
    .unregister_memory = fake_unregister,
    JPP_NET_BYTES_ROWS,
};

static const jpp_transport_vtable_t kFake = {
    .name = "fake",
    .bytes = &kBytes,
    .create = fake_create,
    .destroy = fake_destroy,
    JPP_NET_ROWS,
};

// --- By name --------------------------------------------------------------------------

static jpp_status_t* nccl_fake_create(const jpp_transport_options_t* options,
                                      jpp_transport_t** out_transport) {
  return jpp__nccl_create_over(&kFake, options, out_transport);
}

static jpp_transport_vtable_t g_nccl_fake;

static void make_nccl_fake(void) {
  g_nccl_fake = jpp_transport_nccl;
  g_nccl_fake.name = "nccl-fake";
  g_nccl_fake.create = nccl_fake_create;
}

jpp_status_t* test_transport_create(const jpp_transport_options_t* options,
                                    jpp_transport_t** out_transport) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, make_nccl_fake);
  const jpp_transport_vtable_t* const drivers[] = {&kFake, &g_nccl_fake};
  *out_transport = NULL;
  for (int i = 0; i < 2; ++i) {
    if (strcmp(options->driver, drivers[i]->name) != 0) continue;
    return jpp__transport_create_with(drivers[i], options, out_transport);
  }
  return jpp_transport_create(options, out_transport);
}
