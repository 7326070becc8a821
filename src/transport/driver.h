// What a transport driver implements: jpp_transport_vtable_t, and the table of its form
// of messages. Every row is filled.
//
// transport.c lists the drivers. It has checked options, specs, counts and sizes, and has
// set all `out_` parameters to NULL, 0 or false; jaxpp/transport.h has the contract. A
// network driver fills in few of these rows itself, because net.h implements the channels
// of bytes.
#ifndef JPP_TRANSPORT_DRIVER_H_
#define JPP_TRANSPORT_DRIVER_H_

#include "jaxpp/transport.h"

// Messages of handles.
typedef struct jpp_handles_vtable {
  // The sender's end. Returns the abort's status if there was one. Otherwise takes a free
  // slot, copies the message into it and sets *out_done; leaves it false when none is
  // free.
  jpp_status_t* (*try_send)(jpp_channel_t* channel, const jpp_message_t* message,
                            bool* out_done);
  // The receiver's end. Returns the abort's status if there was one. Otherwise copies the
  // oldest message out, frees its slot and sets *out_done; leaves it false when none
  // waits.
  jpp_status_t* (*try_recv)(jpp_channel_t* channel, jpp_message_t* message,
                            bool* out_done);
} jpp_handles_vtable_t;

// Messages of bytes, and the other processes that send them.
typedef struct jpp_bytes_vtable {
  bool takes_device_memory;
  // Returns what a peer needs to connect, with a proof of the job's token.
  void (*address)(const jpp_transport_t* transport, const void** out_address,
                  size_t* out_size);
  // Checks the proof before it reads anything else in the address, and begins to connect.
  jpp_status_t* (*connect)(jpp_transport_t* transport, uint32_t process,
                           const void* address, size_t size);
  // Sends and receives what it can without waiting; `out_some` says whether anything
  // happened.
  void (*progress)(jpp_transport_t* transport, bool* out_some);
  // Makes a descriptor readable at the next event, unless one occurred since progress.
  jpp_status_t* (*arm)(jpp_transport_t* transport, int* out_descriptor, bool* out_armed);
  // Why a process cannot be reached any more: JPP_PEER_ERROR with its number and address.
  jpp_status_t* (*peer_status)(const jpp_transport_t* transport, uint32_t process);
  // NULL: not connected.
  const char* (*peer_name)(const jpp_transport_t* transport, uint32_t process);
  jpp_status_t* (*open_notes)(jpp_transport_t* transport, uint32_t size,
                              jpp_transport_write_note_t write, void* user);
  const void* (*note)(const jpp_transport_t* transport, uint32_t process);
  // Registers memory with the devices that will send from it. *out_memory stays NULL
  // where the processor sends.
  jpp_status_t* (*register_memory)(jpp_transport_t* transport, void* data, size_t size,
                                   jpp_transport_memory_t** out_memory);
  void (*unregister_memory)(jpp_transport_t* transport, jpp_transport_memory_t* memory);

  // Sends a message through the channel.
  jpp_status_t* (*warm_up)(jpp_channel_t* channel, bool* out_done);
  // The sender's end. Returns the abort's or the peer's status if there is one. Otherwise
  // takes a credit, begins to send from the shards' memory and sets *out_done; calls
  // spec.sent when it no longer needs the memory.
  jpp_status_t* (*try_send)(jpp_channel_t* channel, uint64_t tag,
                            const jpp_shard_t* shards, uint32_t count, void* cookie,
                            bool* out_done);
  // The receiver's end. Lends the slot of the next message once it is complete.
  jpp_status_t* (*try_recv)(jpp_channel_t* channel, jpp_received_t* out_received,
                            bool* out_done);
  // Any thread. Frees the slot: the sender gets a credit at the next progress.
  void (*release)(jpp_channel_t* channel, uint32_t slot);
} jpp_bytes_vtable_t;

typedef struct jpp_transport_vtable {
  const char* name;
  // One of these two is NULL.
  const jpp_handles_vtable_t* handles;
  const jpp_bytes_vtable_t* bytes;

  // Creates the transport: workers, and listeners at options->address only.
  jpp_status_t* (*create)(const jpp_transport_options_t* options,
                          jpp_transport_t** out_transport);
  // All channels are closed. Tells the peers, waits at most options->peer_timeout_ms for
  // what is in flight, and frees what create allocated.
  void (*destroy)(jpp_transport_t* transport);

  // Allocates everything that sends and receives will need: a slot for each waiting
  // message, with room for spec->capacity buffers, or shards of spec->bytes.
  jpp_status_t* (*open_channel)(jpp_transport_t* transport,
                                const jpp_channel_spec_t* spec,
                                jpp_channel_t** out_channel);
  // The sender's end: how many of the receiver's slots are free, as far as it knows.
  uint32_t (*credits)(jpp_channel_t* channel);
  // Why the channel can no longer be used.
  jpp_status_t* (*channel_status)(const jpp_channel_t* channel);
  // Any thread. Keeps a copy of the status, unless it has one already, for both ends to
  // see at their next call; a driver between processes tells the peer.
  void (*set_abort)(jpp_channel_t* channel, const jpp_status_t* status);
  // No other call runs. Passes every buffer that is still inside to spec.release, frees
  // the abort's status, and leaves the channel as open_channel made it.
  void (*reset)(jpp_channel_t* channel);
  // No other call runs. Like reset, and frees the channel.
  void (*close)(jpp_channel_t* channel);
} jpp_transport_vtable_t;

// The first members of every driver's transport and channel. `create` and `open_channel`
// allocate; transport.c fills these in afterwards.
struct jpp_transport {
  const jpp_transport_vtable_t* vtable;
  uint32_t process, num_processes;
};

struct jpp_channel {
  const jpp_transport_vtable_t* vtable;
  jpp_channel_spec_t spec;  // without its arrays, which the caller owns
};

// jpp_transport_create() with a driver that transport.c does not list: the drivers of
// tests.
jpp_status_t* jpp__transport_create_with(const jpp_transport_vtable_t* driver,
                                         const jpp_transport_options_t* options,
                                         jpp_transport_t** out_transport) JPP_MUST_USE;

extern const jpp_transport_vtable_t jpp_transport_inproc;
extern const jpp_transport_vtable_t jpp_transport_nccl;
extern const jpp_transport_vtable_t jpp_transport_ucx;

#endif  // JPP_TRANSPORT_DRIVER_H_
