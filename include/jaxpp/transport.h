// Transport: moves buffers from one actor to another, over channels of bounded depth.
//
// A channel has one sender and one receiver. A message is a few buffer pointers and a
// tag; the channel does not look at either: that tags come in the order the receiver
// expects is the caller's to check. Sending hands the buffers over; receiving takes them.
//
// Threads: a channel's sends come from one thread at a time, and so do its receives; the
// two may be different threads. jpp_channel_abort() may be called by any thread at any
// time, all other calls on a transport or a channel by one thread while nobody else uses
// it.
#ifndef JAXPP_TRANSPORT_H_
#define JAXPP_TRANSPORT_H_

#include <stdint.h>

#include "jaxpp/status.h"

typedef struct jpp_transport jpp_transport_t;
typedef struct jpp_channel jpp_channel_t;

//===-- Transport ------------------------------------------------------------------===//

// The drivers by name: "inproc" (actors of one process) and "null" (a skeleton: every
// call fails with JPP_UNSUPPORTED). NULL past the last one.
JPP_API const char* jpp_transport_driver_name(uint32_t index);

// JPP_INVALID_ARGUMENT lists the names there are when `name` is none of them.
JPP_API jpp_status_t* jpp_transport_create(const char* name,
                                           jpp_transport_t** out_transport) JPP_MUST_USE;

// Close every channel first. NULL is fine.
JPP_API void jpp_transport_destroy(jpp_transport_t* transport);

//===-- Channels -------------------------------------------------------------------===//

// Frees a buffer that nobody will receive. Called by reset and close, on their thread.
typedef void (*jpp_channel_release_t)(void* user, void* buffer);

typedef struct jpp_channel_spec {
  uint32_t src_actor;
  uint32_t dst_actor;
  uint32_t slots;                 // messages that may wait; at least 1
  uint32_t capacity;              // buffers a message may have; at least 1
  jpp_channel_release_t release;  // NULL: buffers left inside are dropped
  void* release_user;
} jpp_channel_spec_t;

// All memory of the channel is allocated here. The caller owns it, and closes it before
// the transport is destroyed.
JPP_API jpp_status_t* jpp_transport_open_channel(
    jpp_transport_t* transport, const jpp_channel_spec_t* spec,
    jpp_channel_t** out_channel) JPP_MUST_USE;

typedef struct jpp_message {
  void** buffers;
  uint32_t count;
  uint64_t tag;
} jpp_message_t;

// Sender's thread only; never blocks, never allocates unless it fails. When `out_done` is
// true the buffers are handed over; when false no slot is free, try again later. After an
// abort: the status it was given. JPP_INVALID_ARGUMENT for more buffers than `capacity`.
JPP_API jpp_status_t* jpp_channel_try_send(jpp_channel_t* channel,
                                           const jpp_message_t* message,
                                           bool* out_done) JPP_MUST_USE;

// Receiver's thread only; as above. The caller sets `message->buffers` to an array with
// room for `capacity` pointers; when `out_done` is true the buffers in it are the
// caller's, when false nothing has arrived.
JPP_API jpp_status_t* jpp_channel_try_recv(jpp_channel_t* channel, jpp_message_t* message,
                                           bool* out_done) JPP_MUST_USE;

// Any thread, at any time: from now on both ends get a copy of `status`, also the
// receiver for whom messages still wait. The first abort stays. `status` is only read.
JPP_API void jpp_channel_abort(jpp_channel_t* channel, const jpp_status_t* status);

// Releases what waits and clears the abort, so that the channel is as new. Nobody else
// may use the channel meanwhile.
JPP_API void jpp_channel_reset(jpp_channel_t* channel);

// Releases what waits and frees the channel. Nobody else may use it. NULL is fine.
JPP_API void jpp_channel_close(jpp_channel_t* channel);

#endif  // JAXPP_TRANSPORT_H_
