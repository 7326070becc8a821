// What a transport driver implements; null.c is the one to copy. transport.c lists them.
#ifndef JPP_TRANSPORT_DRIVER_H_
#define JPP_TRANSPORT_DRIVER_H_

#include "jaxpp/transport.h"

// Every row is filled. transport.c has checked the spec and the messages' counts, and has
// set what `out_` points to to NULL or false; jaxpp/transport.h has the contract.
typedef struct jpp_transport_vtable {
  const char* name;
  jpp_status_t* (*create)(jpp_transport_t** out_transport);
  void (*destroy)(jpp_transport_t* transport);
  jpp_status_t* (*open_channel)(jpp_transport_t* transport,
                                const jpp_channel_spec_t* spec,
                                jpp_channel_t** out_channel);
  jpp_status_t* (*try_send)(jpp_channel_t* channel, const jpp_message_t* message,
                            bool* out_done);
  jpp_status_t* (*try_recv)(jpp_channel_t* channel, jpp_message_t* message,
                            bool* out_done);
  void (*set_abort)(jpp_channel_t* channel, const jpp_status_t* status);
  void (*reset)(jpp_channel_t* channel);
  void (*close)(jpp_channel_t* channel);
} jpp_transport_vtable_t;

// The first members of every driver's transport and channel. `create` and `open_channel`
// allocate; transport.c fills these in afterwards.
struct jpp_transport {
  const jpp_transport_vtable_t* vtable;
};

struct jpp_channel {
  const jpp_transport_vtable_t* vtable;
  jpp_channel_spec_t spec;
};

extern const jpp_transport_vtable_t jpp_transport_inproc;
extern const jpp_transport_vtable_t jpp_transport_null;

#endif  // JPP_TRANSPORT_DRIVER_H_
