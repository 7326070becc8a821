// Channels of bytes over NCCL; private to nccl*.c.
//
// The driver uses another driver as its wire (UCX; a fake network in tests). The wire
// carries packets, credits, tags, releases, aborts and shards in host memory, as it does
// without NCCL. ncclSend() and ncclRecv() carry shards in device memory; a packet
// announces each such shard and numbers its ncclSend() among those of this direction.
//
// A communicator connects two processes in one direction. NCCL matches sends and receives
// in the order in which each process issues them, and an operation without a partner
// blocks those behind it. If both directions shared a communicator, two processes that
// send to each other would have to agree on an order first. With one direction, the
// sender decides: the receiver follows the numbers in the packets.
//
// A receive is issued only once its send has been announced, and is never skipped: data
// that a reset or a closed channel drops is received into scratch memory. Therefore an
// NCCL kernel, which occupies a part of the device until its partner runs, waits only for
// progress of the other process, and the abort of a channel leaves no kernel behind. A
// communicator is aborted when its peer has failed.
//
// Creating and freeing communicators allocates device memory, which may make CUDA wait
// for all kernels on the device; if one of these waited for a peer that does the same,
// neither would continue. Therefore nothing is issued while this process still has to
// create a communicator, all aborts happen together when the other communicators are
// idle, and device memory is freed at the end.
#ifndef JPP_TRANSPORT_NCCL_H_
#define JPP_TRANSPORT_NCCL_H_

#include "transport/nccl_library.h"
#include "transport/net.h"

typedef enum jpp_nccl_state {
  JPP_NCCL_UNUSED,  // no channel needs it, or none yet
  JPP_NCCL_WANTED,  // to be created after those before it
  JPP_NCCL_MAKING,
  JPP_NCCL_IDLE,
  JPP_NCCL_ISSUING,  // NCCL is passing a batch to the stream
  JPP_NCCL_RUNNING,  // the stream runs the batch
  JPP_NCCL_DOOMED,   // to be aborted
  JPP_NCCL_ABORTED,  // aborted; the stream has not stopped yet
  JPP_NCCL_FINALIZING,
  JPP_NCCL_ENDED,
} jpp_nccl_state_t;

// A shard to be sent or received.
typedef struct jpp_nccl_transfer {
  uint64_t turn;
  void* data;  // device memory
  size_t size;
  jpp_net_op_t* op;  // sends
  // Receives: for jpp__net_received(); NULL: the data is dropped.
  void* shard;
} jpp_nccl_transfer_t;

typedef struct jpp_nccl jpp_nccl_t;

typedef struct jpp_nccl_comm {
  jpp_nccl_t* nccl;
  jpp_net_peer_t* peer;
  bool sends;  // from this process to the peer
  jpp_nccl_state_t state;
  uint32_t channel;  // the lowest number of a channel that needs it
  bool has_id;
  jpp_nccl_id_t id;   // made by the sender
  jpp_net_op_t meet;  // the packet that carries the id
  jpp_nccl_handle_t handle;
  jpp_cuda_stream_t stream;
  jpp_cuda_event_t event;                  // recorded after the batch
  JPP_VEC(jpp_nccl_transfer_t) transfers;  // by turn; the first `batch` are in flight
  size_t batch;
  size_t promised;  // transfers for which room is reserved
  uint64_t turn;    // of the last send
  uint64_t issued;  // number of turns that were issued
} jpp_nccl_comm_t;

// What a transport has in addition to its wire.
struct jpp_nccl {
  const jpp_nccl_library_t* library;
  const jpp_transport_vtable_t* wire;
  jpp_net_t* net;  // of the wire
  jpp_cuda_device_t device;
  jpp_cuda_context_t context;  // NULL: not retained
  jpp_nccl_comm_t* comms;  // [num_processes * 2] per process, first the one that receives
  JPP_VEC(jpp_nccl_comm_t*) used;
  JPP_VEC(jpp_cuda_pointer_t) blocks;  // device memory
  size_t scratch_size;
  bool stuck;  // a stream did not stop: its memory is not freed
};

// The driver's `create`, on top of this wire.
jpp_status_t* jpp__nccl_create_over(const jpp_transport_vtable_t* wire,
                                    const jpp_transport_options_t* options,
                                    jpp_transport_t** out_transport) JPP_MUST_USE;

// All of these except send and fetch need the device's context to be current.

// Begins to create it; at the receiver's end, once the sender's id has arrived.
void jpp__nccl_comm_make(jpp_nccl_comm_t* comm);
// Checks the state of NCCL and of the stream.
void jpp__nccl_comm_advance(jpp_nccl_comm_t* comm);
// Passes to NCCL the transfers whose turn it is.
void jpp__nccl_comm_issue(jpp_nccl_comm_t* comm);
// Aborts all doomed communicators, if none of the others is active.
void jpp__nccl_comms_abort(jpp_nccl_t* nccl);
// Begins to end it: at once if transfers are left, otherwise once the peer has received
// everything.
void jpp__nccl_comm_finalize(jpp_nccl_comm_t* comm);
// Stops waiting for the peer.
void jpp__nccl_comm_doom(jpp_nccl_comm_t* comm);
// Calls back for the remaining transfers, whatever the stream is doing.
void jpp__nccl_comm_give_up(jpp_nccl_comm_t* comm);

// Rows of jpp_net_device_t.
void jpp__nccl_send(jpp_net_op_t* op, const void* data);
const char* jpp__nccl_fetch(jpp_net_peer_t* peer, const jpp_packet_t* packet,
                            const jpp_net_place_t* place);
const char* jpp__nccl_meet(jpp_net_peer_t* peer, const jpp_packet_t* packet,
                           const void* data);

jpp_nccl_comm_t* jpp__nccl_comm_of(const jpp_net_peer_t* peer, bool sends);

#endif  // JPP_TRANSPORT_NCCL_H_
