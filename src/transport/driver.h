// What a transport driver implements. transport.c lists the drivers.
#ifndef JPP_TRANSPORT_DRIVER_H_
#define JPP_TRANSPORT_DRIVER_H_

#include "jaxpp/transport.h"

// Every row is filled; a form's rows that a driver does not carry with
// jpp_transport_no_... of transport.c. transport.c has checked options, specs, counts and
// sizes, and has set what `out_` points to to NULL, 0 or false; jaxpp/transport.h has the
// contract.
typedef struct jpp_transport_vtable {
  const char* name;
  jpp_transport_form_t form;
  bool takes_device_memory;
  jpp_status_t* (*create)(const jpp_transport_options_t* options,
                          jpp_transport_t** out_transport);
  void (*destroy)(jpp_transport_t* transport);
  void (*address)(const jpp_transport_t* transport, const void** out_address,
                  size_t* out_size);
  jpp_status_t* (*connect)(jpp_transport_t* transport, uint32_t process,
                           const void* address, size_t size);
  void (*progress)(jpp_transport_t* transport, bool* out_some);
  jpp_status_t* (*arm)(jpp_transport_t* transport, int* out_descriptor, bool* out_armed);
  jpp_status_t* (*peer_status)(const jpp_transport_t* transport, uint32_t process);
  const char* (*peer_name)(const jpp_transport_t* transport, uint32_t process);
  jpp_status_t* (*open_notes)(jpp_transport_t* transport, uint32_t size,
                              jpp_transport_write_note_t write, void* user);
  const void* (*note)(const jpp_transport_t* transport, uint32_t process);
  jpp_status_t* (*register_memory)(jpp_transport_t* transport, void* data, size_t size,
                                   jpp_transport_memory_t** out_memory);
  void (*unregister_memory)(jpp_transport_t* transport, jpp_transport_memory_t* memory);

  jpp_status_t* (*open_channel)(jpp_transport_t* transport,
                                const jpp_channel_spec_t* spec,
                                jpp_channel_t** out_channel);
  jpp_status_t* (*warm_up)(jpp_channel_t* channel, bool* out_done);
  uint32_t (*credits)(jpp_channel_t* channel);
  jpp_status_t* (*channel_status)(const jpp_channel_t* channel);
  void (*set_abort)(jpp_channel_t* channel, const jpp_status_t* status);
  void (*reset)(jpp_channel_t* channel);
  void (*close)(jpp_channel_t* channel);

  jpp_status_t* (*try_send)(jpp_channel_t* channel, const jpp_message_t* message,
                            bool* out_done);
  jpp_status_t* (*try_recv)(jpp_channel_t* channel, jpp_message_t* message,
                            bool* out_done);

  jpp_status_t* (*try_send_bytes)(jpp_channel_t* channel, uint64_t tag,
                                  const jpp_shard_t* shards, uint32_t count, void* cookie,
                                  bool* out_done);
  jpp_status_t* (*try_recv_bytes)(jpp_channel_t* channel, jpp_received_t* out_received,
                                  bool* out_done);
  void (*release)(jpp_channel_t* channel, uint32_t slot);
} jpp_transport_vtable_t;

// The first members of every driver's transport and channel. `create` and `open_channel`
// allocate; transport.c fills these in afterwards.
struct jpp_transport {
  const jpp_transport_vtable_t* vtable;
  uint32_t process, num_processes;
};

struct jpp_channel {
  const jpp_transport_vtable_t* vtable;
  jpp_channel_spec_t spec;  // without its arrays, which are the caller's
};

// For the rows of the form that a driver does not carry: JPP_UNSUPPORTED.
jpp_status_t* jpp_transport_no_send(jpp_channel_t* channel, const jpp_message_t* message,
                                    bool* out_done) JPP_MUST_USE;
jpp_status_t* jpp_transport_no_recv(jpp_channel_t* channel, jpp_message_t* message,
                                    bool* out_done) JPP_MUST_USE;
jpp_status_t* jpp_transport_no_send_bytes(jpp_channel_t* channel, uint64_t tag,
                                          const jpp_shard_t* shards, uint32_t count,
                                          void* cookie, bool* out_done) JPP_MUST_USE;
jpp_status_t* jpp_transport_no_recv_bytes(jpp_channel_t* channel,
                                          jpp_received_t* out_received,
                                          bool* out_done) JPP_MUST_USE;
void jpp_transport_no_release(jpp_channel_t* channel, uint32_t slot);
// For drivers without other processes.
const char* jpp_transport_no_peer_name(const jpp_transport_t* transport,
                                       uint32_t process);
jpp_status_t* jpp_transport_no_notes(jpp_transport_t* transport, uint32_t size,
                                     jpp_transport_write_note_t write,
                                     void* user) JPP_MUST_USE;
const void* jpp_transport_no_note(const jpp_transport_t* transport, uint32_t process);

// jpp_transport_create() with a driver that transport.c does not list: those of the
// tests.
jpp_status_t* jpp_transport_create_with(const jpp_transport_vtable_t* driver,
                                        const jpp_transport_options_t* options,
                                        jpp_transport_t** out_transport) JPP_MUST_USE;

extern const jpp_transport_vtable_t jpp_transport_inproc;
extern const jpp_transport_vtable_t jpp_transport_nccl;
extern const jpp_transport_vtable_t jpp_transport_ucx;

#endif  // JPP_TRANSPORT_DRIVER_H_
