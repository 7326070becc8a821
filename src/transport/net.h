// Channels of bytes between processes, for drivers that can carry packets from one
// process to another: ucx.c, and the fake network of the tests. Slots, credits, epochs,
// the order of messages, the checks of everything that a peer sends, aborts and
// disconnection are implemented here once for all of them.
//
// A packet is a head of fixed size and perhaps data. A driver may deliver packets in any
// order, each once, until the peer fails. The packets between the two ends of a channel:
//
//   ASK    the sender is open and asks how many messages it may send
//   GRANT  the receiver is open, or has released slots: `number` messages may be sent in
//          this epoch, counted from its beginning
//   DATA   a shard of message `number`; messages without shards have one of size 0
//   ABORT  the data are a status
//
// and between two processes HELLO, BEAT (a heartbeat; the data are notes), BYE (the
// sender leaves, and has sent everything), GONE (BYE has arrived) and MEET (the data tell
// the peer how shards in device memory will arrive; jpp_net_device_t). A packet for a
// channel that is not open here is dropped, because each ASK is answered by a new GRANT;
// an ABORT is kept, as the reason why the peer left.
//
// An epoch is the time between two resets of a channel. Packets of an epoch before the
// channel's are dropped; data of a later epoch cannot arrive, because it was not granted.
//
// Threads: everything here belongs to the one thread that uses the transport, except
// atomics.
#ifndef JPP_TRANSPORT_NET_H_
#define JPP_TRANSPORT_NET_H_

#include <stdatomic.h>

#include "base/vec.h"
#include "transport/driver.h"
#include "transport/handshake.h"

typedef enum jpp_packet_kind {
  JPP_PACKET_HELLO = 1,
  JPP_PACKET_ASK,
  JPP_PACKET_GRANT,
  JPP_PACKET_DATA,
  JPP_PACKET_ABORT,
  JPP_PACKET_BYE,
  JPP_PACKET_GONE,
  JPP_PACKET_BEAT,
  JPP_PACKET_MEET,
} jpp_packet_kind_t;

// The head of a packet, in the byte order that both processes have. Fields that a kind
// does not use are 0.
typedef struct jpp_packet {
  uint8_t proof[kJppProofSize];
  uint32_t source;  // sending process
  uint32_t kind;    // jpp_packet_kind_t
  uint32_t channel;
  uint32_t epoch;
  // DATA: the message's number in its epoch; GRANT: how many; ABORT: the code.
  uint64_t number;
  uint64_t tag;    // DATA
  uint32_t shard;  // DATA: the shard; ASK and GRANT: slots
  // DATA: shards of the message; ASK and GRANT: capacity; BEAT: notes.
  uint32_t count;
  // DATA, ABORT, MEET, BEAT: size of the data; ASK and GRANT: hash of the spec.
  uint64_t size;
  // DATA that jpp_net_device_t carries: its number among such shards from this sender to
  // this peer, from 1.
  uint64_t turn;
} jpp_packet_t;

enum { kJppMostAbortText = 1000 };

typedef struct jpp_net jpp_net_t;
typedef struct jpp_net_peer jpp_net_peer_t;
typedef struct jpp_net_channel jpp_net_channel_t;
typedef struct jpp_net_message jpp_net_message_t;

// A packet that is being sent. The driver may use it from send until jpp__net_op_done().
typedef struct jpp_net_op {
  jpp_packet_t packet;
  jpp_net_peer_t* peer;
  jpp_net_channel_t* channel;  // NULL for packets between processes
  jpp_net_message_t* message;  // for DATA
  bool busy;
  // Calls of jpp__net_op_done() that are still to come: for the packet, and for data
  // beside it.
  uint32_t parts;
} jpp_net_op_t;

// Where the data of a packet go.
typedef struct jpp_net_place {
  void* data;   // NULL: drop the packet
  void* shard;  // for jpp__net_received()
} jpp_net_place_t;

// What a driver implements for this file.
typedef struct jpp_net_port {
  // Sends a packet to op->peer. True: done at once, even if it failed and
  // jpp__net_peer_failed() was called; false: jpp__net_op_done() will be called.
  bool (*send)(jpp_net_t* net, jpp_net_op_t* op, const void* data, size_t size,
               const jpp_transport_memory_t* memory);
} jpp_net_port_t;

// Carries shards in device memory, beside another driver's packets: nccl.c. A packet of
// such a shard has a turn and no data. Both ends send and receive the data in the order
// of the turns, even data that is dropped.
typedef struct jpp_net_device {
  // Called last when a channel with such shards is opened.
  jpp_status_t* (*open)(jpp_net_peer_t* peer, const jpp_channel_spec_t* spec);
  // Allocates device memory, aligned like slots, until the transport is destroyed.
  jpp_status_t* (*allocate)(jpp_net_t* net, size_t size, void** out_data);
  // Sets the packet's turn, and sends the data; jpp__net_op_done() will be called.
  void (*send)(jpp_net_op_t* op, const void* data);
  // A packet with a turn has arrived: receives its data, and calls jpp__net_received() if
  // they have a place. Returns what is wrong with the packet, or NULL.
  const char* (*fetch)(jpp_net_peer_t* peer, const jpp_packet_t* packet,
                       const jpp_net_place_t* place);
  // A packet of the kind MEET has arrived.
  const char* (*meet)(jpp_net_peer_t* peer, const jpp_packet_t* packet, const void* data);
  // Nothing will be sent or received any more: calls back for all remaining operations,
  // once they have ended or at `until`.
  void (*end)(jpp_net_t* net, int64_t until);
} jpp_net_device_t;

typedef struct jpp_net_end {
  uint32_t id;
  jpp_net_channel_t* channel;
} jpp_net_end_t;

struct jpp_net_peer {
  jpp_net_t* net;
  uint32_t process;
  void* endpoint;  // the driver's endpoint; NULL: not connected
  char* name;      // for messages; NULL until connected
  uint8_t proof_out[kJppProofSize], proof_in[kJppProofSize];
  JPP_VEC(jpp_net_end_t) ends;  // the open channels with this peer
  uint32_t busy;                // operations in flight
  jpp_status_t* status;         // why it cannot be reached; NULL: it can
  bool left;                    // BYE has arrived
  jpp_status_t* last_words;     // of an ABORT for a channel that is not open here yet
  bool knows_we_left;           // GONE has arrived
  jpp_net_op_t hello, bye, gone, beat;
  char* beat_data;     // [notes.most] entries; NULL: there are no notes
  uint32_t next_note;  // the process whose note comes first in the next heartbeat
  // A packet has arrived since net->looked_ms.
  bool heard;
  // The time of the last check that found a packet; 0: none arrived.
  int64_t heard_ms;
};

// Used by net_notes.c.
typedef struct jpp_net_notes {
  uint32_t size;  // size of a note; 0: there are none
  uint32_t most;  // largest number of notes in a heartbeat
  jpp_transport_write_note_t write;
  void* user;
  uint64_t* versions;  // [num_processes] 0: no note has arrived
  char* data;          // [num_processes] notes
} jpp_net_notes_t;

// The first member of every packet driver's transport.
struct jpp_net {
  jpp_transport_t base;
  const jpp_net_port_t* port;
  void* token;
  size_t token_size;
  uint32_t peer_timeout_ms;
  int64_t looked_ms;  // when the peers' heartbeats were last checked
  jpp_net_notes_t notes;
  uint8_t nonce[kJppNonceSize];
  void* address;
  size_t address_size;
  jpp_net_peer_t* peers;  // [num_processes]; the row of this process is not used
  JPP_VEC(jpp_net_channel_t*) closing;  // closed channels with operations in flight
  _Atomic bool work;                    // a channel has work for jpp__net_progress()
  uint32_t idle;     // consecutive calls of progress in which nothing happened
  bool some;         // something happened since the last progress
  bool failed;       // a peer failed; the driver then closes its endpoint
  uint64_t refused;  // packets without proof
  const jpp_net_device_t* device;  // NULL: host memory only
  void* device_state;              // of the device driver
  void* scratch;  // device memory as large as the largest shard there, for data that is
                  // dropped
};

// --- Transport (net.c) ----------------------------------------------------------------

// Checks and copies the options, and draws the nonce. After an error, call
// jpp__net_deinit().
jpp_status_t* jpp__net_init(jpp_net_t* net, const jpp_net_port_t* port,
                            const jpp_transport_options_t* options) JPP_MUST_USE;
// Makes the address from the route, which the driver's connect needs at the peer.
jpp_status_t* jpp__net_publish(jpp_net_t* net, const char* name, const void* route,
                               size_t route_size) JPP_MUST_USE;
// Checks a peer's address; the driver then makes peer->endpoint from out_address->route,
// and calls jpp__net_greet().
jpp_status_t* jpp__net_open_address(jpp_net_t* net, uint32_t process, const void* bytes,
                                    size_t size, jpp_address_t* out_address) JPP_MUST_USE;
void jpp__net_greet(jpp_net_peer_t* peer);
// First part of destroy: waits at most peer_timeout_ms for operations in flight.
void jpp__net_leave(jpp_net_t* net);
// Last part of destroy: the driver will not call back any more. Calls `sent` for the
// remaining messages.
void jpp__net_deinit(jpp_net_t* net);

void jpp__net_get_address(const jpp_transport_t* transport, const void** out_address,
                          size_t* out_size);
jpp_status_t* jpp__net_peer_status(const jpp_transport_t* transport, uint32_t process);
const char* jpp__net_peer_name(const jpp_transport_t* transport, uint32_t process);

// The part of progress that does not depend on the driver. Sets `out_some` if something
// happened.
void jpp__net_progress(jpp_net_t* net, bool* out_some);

// --- For drivers' callbacks (net.c) ---------------------------------------------------

// A packet has arrived from any sender. `data` NULL: the data are still at the peer, and
// the driver fetches them to `out_place`; otherwise this call consumes them.
void jpp__net_arrived(jpp_net_t* net, const void* head, size_t head_size,
                      const void* data, size_t size, jpp_net_place_t* out_place);
// The driver has fetched the data, or failed to.
void jpp__net_received(void* shard, bool success);
// The peer that sent the shard's data.
jpp_net_peer_t* jpp__net_shard_peer(const void* shard);
void jpp__net_op_done(jpp_net_op_t* op);
// Only the first failure is kept. A peer that has left does not fail.
void jpp__net_peer_failed(jpp_net_peer_t* peer, const char* format, ...) JPP_PRINTF(2, 3);

void jpp__net_post(jpp_net_op_t* op, jpp_packet_kind_t kind, const void* data,
                   size_t size, const jpp_transport_memory_t* memory);

// --- Notes (net_notes.c) --------------------------------------------------------------

jpp_status_t* jpp__net_open_notes(jpp_transport_t* transport, uint32_t size,
                                  jpp_transport_write_note_t write, void* user);
const void* jpp__net_note(const jpp_transport_t* transport, uint32_t process);
void jpp__net_notes_deinit(jpp_net_t* net);
// Asks the caller for this process's note.
void jpp__net_write_note(jpp_net_t* net);
// Puts notes into peer->beat_data; returns how many.
uint32_t jpp__net_pack_notes(jpp_net_peer_t* peer, size_t* out_size);
// What is wrong with the notes of a heartbeat, or NULL.
const char* jpp__net_take_notes(jpp_net_t* net, const jpp_packet_t* packet,
                                const void* data) JPP_MUST_USE;

// --- Channels (net_channel.c) ---------------------------------------------------------

// The rows of the two tables that are the same for all packet drivers.
#define JPP_NET_ROWS                                                     \
  .open_channel = jpp__net_open_channel, .credits = jpp__net_credits,    \
  .channel_status = jpp__net_status_of, .set_abort = jpp__net_set_abort, \
  .reset = jpp__net_reset, .close = jpp__net_close
#define JPP_NET_BYTES_ROWS                                                           \
  .address = jpp__net_get_address, .peer_status = jpp__net_peer_status,              \
  .peer_name = jpp__net_peer_name, .open_notes = jpp__net_open_notes,                \
  .note = jpp__net_note, .warm_up = jpp__net_warm_up, .try_send = jpp__net_try_send, \
  .try_recv = jpp__net_try_recv, .release = jpp__net_release

jpp_status_t* jpp__net_open_channel(jpp_transport_t* transport,
                                    const jpp_channel_spec_t* spec,
                                    jpp_channel_t** out_channel);
jpp_status_t* jpp__net_warm_up(jpp_channel_t* base, bool* out_done);
jpp_status_t* jpp__net_status_of(const jpp_channel_t* base);
uint32_t jpp__net_credits(jpp_channel_t* base);
void jpp__net_set_abort(jpp_channel_t* base, const jpp_status_t* status);
void jpp__net_reset(jpp_channel_t* base);
void jpp__net_close(jpp_channel_t* base);
jpp_status_t* jpp__net_try_send(jpp_channel_t* base, uint64_t tag,
                                const jpp_shard_t* shards, uint32_t count, void* cookie,
                                bool* out_done);
jpp_status_t* jpp__net_try_recv(jpp_channel_t* base, jpp_received_t* out_received,
                                bool* out_done);
void jpp__net_release(jpp_channel_t* base, uint32_t slot);

#endif  // JPP_TRANSPORT_NET_H_
