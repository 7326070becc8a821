// The two ends of a channel of bytes; private to net*.c.
#ifndef JPP_TRANSPORT_NET_CHANNEL_H_
#define JPP_TRANSPORT_NET_CHANNEL_H_

#include "transport/net.h"

// A message that is being sent.
struct jpp_net_message {
  void* cookie;
  bool warms_up;
  uint32_t busy;      // operations in flight, plus 1 while more are being started
  jpp_net_op_t* ops;  // [capacity]
};

// The sender's end. Messages take turns, over all epochs, so that a message that is still
// in flight after a reset is not reused.
typedef struct jpp_net_sender {
  jpp_net_message_t* messages;  // [slots]
  uint32_t turn;
  uint64_t sent, granted;  // in this epoch
  uint32_t early_epoch;    // the receiver's epoch, if it was reset first
  uint64_t early_granted;
  jpp_net_op_t ask;
} jpp_net_sender_t;

typedef enum jpp_net_slot_state {
  JPP_NET_SLOT_FREE,
  JPP_NET_SLOT_FILLING,  // has a message that is not complete or not taken yet
  JPP_NET_SLOT_TAKEN,
} jpp_net_slot_state_t;

typedef struct jpp_net_slot jpp_net_slot_t;

typedef struct jpp_net_shard {
  jpp_net_slot_t* slot;
  bool has_come;
} jpp_net_shard_t;

struct jpp_net_slot {
  jpp_net_channel_t* channel;
  jpp_net_slot_state_t state;
  _Atomic bool released;  // set by any thread once the message was taken
  uint32_t epoch;         // of the message
  uint32_t count, missing;
  uint32_t fetching;  // shards to which the driver is writing
  uint64_t tag;
  void** data;              // [capacity]
  uint64_t* sizes;          // [capacity]
  jpp_net_shard_t* shards;  // [capacity]
};

// The receiver's end. Of the granted messages, those from `taken` on have not been taken;
// each of them has a slot or will have one, and the invariant that makes this possible
// is: slots that are free or filling in this epoch = granted - taken.
typedef struct jpp_net_receiver {
  jpp_net_slot_t* slots;
  uint32_t* free_slots;  // used as a stack
  uint32_t num_free;
  // [slots] the slot of message number % slots, or JPP_NET_NO_SLOT.
  uint32_t* slot_of;
  uint64_t taken, granted;  // in this epoch
  uint64_t told;            // the part of `granted` that the sender has been told
  bool must_grant;          // the sender has asked, or does not know of this epoch
  _Atomic bool released;    // a slot was released
  jpp_net_op_t grant;
  void* block;  // the memory of all slots
  jpp_transport_memory_t* memory;
} jpp_net_receiver_t;

#define JPP_NET_NO_SLOT UINT32_MAX

struct jpp_net_channel {
  jpp_channel_t base;
  jpp_net_t* net;
  jpp_net_peer_t* peer;
  bool sends;  // this process has the sender's end
  bool closed;
  uint32_t busy;    // operations and fetches in flight
  uint64_t* bytes;  // [capacity]
  bool* on_device;  // [capacity] NULL: all shards are in host memory
  uint64_t spec_hash;
  uint32_t epoch;
  _Atomic(jpp_status_t*) aborted;  // owned; set once until reset
  bool abort_told;
  jpp_status_t* peer_aborted;  // owned
  uint32_t peer_aborted_epoch;
  jpp_net_op_t abort;
  char* abort_text;  // [kJppMostAbortText]
  void* warm_up_data;
  int64_t warm_up_until;  // 0: not begun
  bool warm_up_sent;
  jpp_net_sender_t sender;      // if this process sends
  jpp_net_receiver_t receiver;  // if this process receives
};

// Whether a shard's data is in device memory; empty shards have no data.
bool jpp__net_is_on_device(const jpp_net_channel_t* channel, uint32_t shard,
                           uint64_t size);
// Why nothing can be sent or received any more; NULL: no known reason.
jpp_status_t* jpp__net_channel_status(const jpp_net_channel_t* channel) JPP_MUST_USE;
jpp_status_t* jpp__net_left_status(const jpp_net_peer_t* peer) JPP_MUST_USE;

// Takes a packet for the channel from its peer. Returns what is wrong with it, or NULL.
void jpp__net_channel_ask(jpp_net_channel_t* channel, const jpp_packet_t* packet);
const char* jpp__net_channel_grant(jpp_net_channel_t* channel,
                                   const jpp_packet_t* packet) JPP_MUST_USE;
const char* jpp__net_channel_data(jpp_net_channel_t* channel, const jpp_packet_t* packet,
                                  const void* data,
                                  jpp_net_place_t* out_place) JPP_MUST_USE;
const char* jpp__net_channel_abort(jpp_net_channel_t* channel, const jpp_packet_t* packet,
                                   const char* text) JPP_MUST_USE;
// For a channel that is not open here, or not yet: the peer aborted it before.
const char* jpp__net_early_abort(jpp_net_peer_t* peer, const jpp_packet_t* packet,
                                 const char* text) JPP_MUST_USE;

// Sends pending grants, aborts and messages.
void jpp__net_channel_progress(jpp_net_channel_t* channel);
// An operation or a fetch has ended.
void jpp__net_channel_idle(jpp_net_channel_t* channel);
void jpp__net_channel_free(jpp_net_channel_t* channel);
void jpp__net_message_done(jpp_net_channel_t* channel, jpp_net_message_t* message);

// The receiver's end (net_recv.c).
jpp_status_t* jpp__net_receiver_open(jpp_net_channel_t* channel) JPP_MUST_USE;
void jpp__net_receiver_close(jpp_net_channel_t* channel);
void jpp__net_receiver_reset(jpp_net_channel_t* channel);
bool jpp__net_receiver_may_grant(const jpp_net_channel_t* channel);
void jpp__net_receiver_collect(jpp_net_channel_t* channel);

#endif  // JPP_TRANSPORT_NET_CHANNEL_H_
