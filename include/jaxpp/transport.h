// Transport: moves the values of a plan from one rank to another, over channels of
// bounded depth.
//
// A channel has one sending rank, one receiving rank and a number of slots. A message is
// one value: a shard for each device of a rank, and a tag. Messages of a channel arrive
// in the order in which they were sent; the caller checks their tags.
//
// There are two forms of messages, and a driver carries one of them:
//
//  - handles, between the ranks of one process: a send hands pointers over, a receive
//    takes them. The transport does not read what they point to.
//  - bytes, between processes: a send names the memory of each shard, and `sent` reports
//    when that memory may be reused; the receiver has memory for `slots` messages, which
//    the driver registers when the channel is opened and into which it receives ahead of
//    time. A receive borrows a slot and gives it back by releasing it.
//
// A free slot at the receiver is a credit at the sender. A send needs a credit, so the
// plan bounds what is in flight.
//
// Ownership. A message of handles belongs to its sender until jpp_channel_try_send() says
// done, and to its receiver from jpp_channel_try_recv() on; in between it belongs to the
// channel, which calls `release` for each buffer that reset or close drop. The memory of
// a message of bytes keeps its owner, who must not change it until `sent`.
//
// Only jpp_transport_destroy() waits for a peer, for a bounded time. If a process dies,
// leaves, or sends something that the plan does not allow, the calls on its channels fail
// with JPP_PEER_ERROR, which names it.
//
// Threads: one thread at a time sends to a channel of handles, and one thread at a time
// receives from it; they may differ. One thread at a time calls a transport of bytes and
// its channels. Any thread may call jpp_channel_abort() and jpp_channel_release() at any
// time while the channel is open.
#ifndef JAXPP_TRANSPORT_H_
#define JAXPP_TRANSPORT_H_

#include <stdint.h>

#include "jaxpp/status.h"

typedef struct jpp_transport jpp_transport_t;
typedef struct jpp_channel jpp_channel_t;
// Memory that a driver has registered with the devices that will read it.
typedef struct jpp_transport_memory jpp_transport_memory_t;

//===-- Transport ------------------------------------------------------------------===//

// The drivers by name: "inproc" (handles, within a process), "ucx" (bytes, over shared
// memory, TCP or RDMA) and "nccl" (as "ucx", and shards in the memory of NVIDIA's GPUs
// over NCCL).

typedef struct jpp_transport_options {
  size_t struct_size;      // sizeof(jpp_transport_options_t)
  const char* driver;      // a driver's name
  uint32_t process;        // this process, below num_processes
  uint32_t num_processes;  // of the job; 0 counts as 1
  // Where this process listens: the address of a network interface ("192.0.2.7"), or the
  // name of one as the driver knows it ("eth0", "mlx5_0:1"), or several, separated by
  // commas. There is no default, and a transport of bytes listens nowhere else.
  const char* address;
  // The job's secret, the same in all processes; a peer must prove that it knows the
  // secret before this process reads anything else from it. Transports of bytes need at
  // least 16 bytes.
  const void* token;
  size_t token_size;
  // A peer that is silent for this long counts as dead; jpp_transport_destroy() waits at
  // most this long. 0: 10000.
  uint32_t peer_timeout_ms;
  // CUDA's number of the device whose memory may hold shards, for drivers that accept
  // device memory.
  uint64_t device;
} jpp_transport_options_t;

// Copies what it needs of the options. JPP_INVALID_ARGUMENT lists the drivers if `driver`
// is unknown, or says what is wrong with an address; JPP_UNSUPPORTED says what to install
// for a driver whose library is missing.
JPP_API jpp_status_t* jpp_transport_create(const jpp_transport_options_t* options,
                                           jpp_transport_t** out_transport) JPP_MUST_USE;

// Close every channel first. Tells the peers, delivers the messages that were sent while
// the peers accept them, and calls jpp_channel_spec_t.sent for the rest. Takes NULL.
JPP_API void jpp_transport_destroy(jpp_transport_t* transport);

typedef enum jpp_transport_form {
  JPP_TRANSPORT_HANDLES,
  JPP_TRANSPORT_BYTES,
} jpp_transport_form_t;

JPP_API jpp_transport_form_t jpp_transport_form(const jpp_transport_t* transport);

// Of the job; 1 where the transport carries handles.
JPP_API uint32_t jpp_transport_num_processes(const jpp_transport_t* transport);

// Whether the memory of a device may hold shards (jpp_channel_spec_t.on_device).
JPP_API bool jpp_transport_takes_device_memory(const jpp_transport_t* transport);

// The data that other processes need to reach this one, with a proof of the token. The
// caller passes it to them. Borrowed for the lifetime of the transport; transports of
// handles have none: size 0.
JPP_API void jpp_transport_address(const jpp_transport_t* transport,
                                   const void** out_address, size_t* out_size);

// Begins to connect to the process with this address. Each of the two processes calls it
// once, before the first channel between them is opened. JPP_PEER_ERROR for an address
// that is damaged, belongs to another process, or was made with another token or version.
JPP_API jpp_status_t* jpp_transport_connect(jpp_transport_t* transport, uint32_t process,
                                            const void* address,
                                            size_t size) JPP_MUST_USE;

// Advances all sends and receives: call it in the loop that makes them. Calls `sent`.
// `out_some` says whether anything happened. The affected channels report failures.
JPP_API void jpp_transport_progress(jpp_transport_t* transport, bool* out_some);

// For an idle caller: when `out_armed` is true, `out_descriptor` becomes readable once
// jpp_transport_progress() has work; when false, there is work already. -1 for drivers
// that never need it. Releases and aborts of this process do not make it readable.
JPP_API jpp_status_t* jpp_transport_arm(jpp_transport_t* transport, int* out_descriptor,
                                        bool* out_armed) JPP_MUST_USE;

// NULL while the process is reachable as far as this one knows, or else the reason. The
// caller frees the status.
JPP_API jpp_status_t* jpp_transport_peer_status(const jpp_transport_t* transport,
                                                uint32_t process) JPP_MUST_USE;

// The address, host and process id of a connected process, for messages. Borrowed.
JPP_API const char* jpp_transport_peer_name(const jpp_transport_t* transport,
                                            uint32_t process);

// Registers host memory to send from. The caller keeps it allocated until it unregisters
// it, before the transport is destroyed. A send from unregistered memory also works, but
// the driver may have to register it then.
JPP_API jpp_status_t* jpp_transport_register(
    jpp_transport_t* transport, void* data, size_t size,
    jpp_transport_memory_t** out_memory) JPP_MUST_USE;
// Takes NULL.
JPP_API void jpp_transport_unregister(jpp_transport_t* transport,
                                      jpp_transport_memory_t* memory);

//===-- Notes ----------------------------------------------------------------------===//

// Each process can tell all others its progress. Its note, of a fixed size, travels with
// its heartbeats to the processes that it has channels with, and with their heartbeats to
// the rest of the job. A note is a few heartbeats old when it is read, more in a large
// job; heartbeats are a tenth of peer_timeout_ms apart.

// Fills the note. Called by jpp_transport_progress(), on its thread, before each
// heartbeat.
typedef void (*jpp_transport_write_note_t)(void* user, void* note);

// All processes of the job call this once, with the same size in bytes. JPP_UNSUPPORTED
// for a transport of handles.
JPP_API jpp_status_t* jpp_transport_open_notes(jpp_transport_t* transport, uint32_t size,
                                               jpp_transport_write_note_t write,
                                               JPP_OPTIONAL void* user) JPP_MUST_USE;

// The newest note known of a process; NULL: none yet. Borrowed until the next
// jpp_transport_progress().
JPP_API const void* jpp_transport_note(const jpp_transport_t* transport,
                                       uint32_t process);

//===-- Channels -------------------------------------------------------------------===//

// Handles: frees a buffer that will not be received. Called by reset and close, on their
// thread.
typedef void (*jpp_channel_release_t)(void* user, void* buffer);

// Bytes: the memory of a message may be reused. Called once for each message that was
// sent, even if it was not delivered, with its cookie; by try_send, progress, close or
// destroy, on their thread, in any order. Must not call the transport.
typedef void (*jpp_channel_sent_t)(void* user, void* cookie);

// Both ends of a channel have the same numbers; a transport of bytes compares them.
typedef struct jpp_channel_spec {
  size_t struct_size;  // sizeof(jpp_channel_spec_t)
  uint32_t id;         // the plan's number of the channel
  uint32_t src_actor;  // the sending rank
  uint32_t dst_actor;  // the receiving rank
  // The process of src_actor; this process has at least one of the two.
  uint32_t src_process;
  uint32_t dst_process;           // the process of dst_actor; not used with handles
  uint32_t slots;                 // messages that may wait; at least 1
  uint32_t capacity;              // shards that a message may have; at least 1
  const uint64_t* bytes;          // [capacity] the largest size of each shard; bytes only
  jpp_channel_release_t release;  // handles; NULL: dropped buffers are not released
  jpp_channel_sent_t sent;        // bytes; NULL: the caller does not need it
  void* user;                     // passed to both
  // [capacity] Bytes: which shards are in the memory of the transport's device, at both
  // ends, and have their slots there; all work that writes such a shard must have ended
  // when it is sent. NULL: none, the only choice if the transport does not take device
  // memory. Open channels with such shards before the first progress, or later if another
  // one exists between the same processes in the same direction.
  const bool* on_device;
} jpp_channel_spec_t;

// All memory of the channel is allocated here, and registered: at the receiver `slots`
// messages of the largest size. Bytes: this process opens the ends whose ranks it has;
// the other process must be connected. The caller closes the channel before the transport
// is destroyed.
JPP_API jpp_status_t* jpp_transport_open_channel(
    jpp_transport_t* transport, const jpp_channel_spec_t* spec,
    jpp_channel_t** out_channel) JPP_MUST_USE;

// Bytes: sends a message through the channel, so that connections are made, memory is
// registered and the route is known to work before the first step. Both ends call it,
// with progress in between, until `out_done` is true; nothing may be sent before.
// Handles: done at once.
JPP_API jpp_status_t* jpp_channel_warm_up(jpp_channel_t* channel,
                                          bool* out_done) JPP_MUST_USE;

// A lower bound on the number of messages that can be sent now; 0 only if none can. Not 0
// after an abort or a failure: a send then returns the error at once. Sender's thread.
JPP_API uint32_t jpp_channel_credits(jpp_channel_t* channel);

// Why nothing can be sent or received any more; NULL: no known reason.
JPP_API jpp_status_t* jpp_channel_status(const jpp_channel_t* channel) JPP_MUST_USE;

// Any thread, at any time: both ends then get a copy of `status`, even a receiver with
// waiting messages. An end in another process gets it when the abort arrives, with this
// process' name in front. Later aborts are ignored. `status` is only read.
JPP_API void jpp_channel_abort(jpp_channel_t* channel, const jpp_status_t* status);

// Drops waiting messages and clears the abort, so that the channel is like new. No other
// thread may use the channel meanwhile. Bytes: both ends must be reset, each by its
// process; the sender has no credit until the other end has been reset. The receiver
// keeps slots that it has not released, and `sent` is still called for messages in
// flight.
JPP_API void jpp_channel_reset(jpp_channel_t* channel);

// Drops waiting messages and frees the channel. No other thread may use it. Bytes: memory
// that is being sent must stay valid until `sent` was called for it, at the latest by
// jpp_transport_destroy(); all slots are freed, including those that were not released.
// NULL is fine.
JPP_API void jpp_channel_close(jpp_channel_t* channel);

//===-- Messages of handles --------------------------------------------------------===//

// Its layout is final.
typedef struct jpp_message {
  void** buffers;
  uint32_t count;
  uint64_t tag;
} jpp_message_t;

// Sender's thread only; never blocks, never allocates unless it fails. When `out_done` is
// true the buffers are handed over; when false there is no credit, try again later. After
// an abort: the status it was given. JPP_INVALID_ARGUMENT for more buffers than
// `capacity`.
JPP_API jpp_status_t* jpp_channel_try_send(jpp_channel_t* channel,
                                           const jpp_message_t* message,
                                           bool* out_done) JPP_MUST_USE;

// Receiver's thread only; as above. The caller sets `message->buffers` to an array with
// room for `capacity` pointers; when `out_done` is true the caller owns the buffers in
// it, when false nothing has arrived.
JPP_API jpp_status_t* jpp_channel_try_recv(jpp_channel_t* channel, jpp_message_t* message,
                                           bool* out_done) JPP_MUST_USE;

//===-- Messages of bytes ----------------------------------------------------------===//

// Its layout is final.
typedef struct jpp_shard {
  const void* data;
  size_t size;  // 0: `data` is not read
  // the registered memory that contains `data`; NULL: not registered
  const jpp_transport_memory_t* memory;
} jpp_shard_t;

// Never blocks, never allocates unless it fails. When `out_done` is true the shards'
// memory must not change until `sent` was called with the cookie; when false there is no
// credit, and nothing happened. JPP_INVALID_ARGUMENT for more shards than `capacity`, or
// for a shard larger than its entry in `bytes`.
JPP_API jpp_status_t* jpp_channel_try_send_bytes(jpp_channel_t* channel, uint64_t tag,
                                                 const jpp_shard_t* shards,
                                                 uint32_t count,
                                                 JPP_OPTIONAL void* cookie,
                                                 bool* out_done) JPP_MUST_USE;

// A message in a slot. The shards' memory begins at multiples of 64 bytes. The caller may
// read and write it until the slot is released. Its layout is final.
typedef struct jpp_received {
  uint64_t tag;
  uint32_t slot;
  uint32_t count;
  void* const* data;      // [count] in the slot
  const uint64_t* sizes;  // [count]
} jpp_received_t;

// Takes the next message if all of it has arrived. The arrays belong to the channel and
// stay valid until the slot is released.
JPP_API jpp_status_t* jpp_channel_try_recv_bytes(jpp_channel_t* channel,
                                                 jpp_received_t* out_received,
                                                 bool* out_done) JPP_MUST_USE;

// Any thread, once for each message that was taken, in any order: frees the slot, which
// the next jpp_transport_progress() reports to the sender.
JPP_API void jpp_channel_release(jpp_channel_t* channel, uint32_t slot);

#endif  // JAXPP_TRANSPORT_H_
