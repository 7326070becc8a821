// The fake device: a client without a device, for tests of what runs on devices. It keeps
// exact accounts, fails where told, and answers the use of a dead handle with an error
// instead of a crash; dead handles are kept until the client is destroyed for that.
//
// Programs have format "fake": a line for each result, in order, and optional headers.
//
//   args 3               # arguments; default: the highest one named, plus one
//   devices 0 1          # devices of JPP_DEVICE_COMPILED, a row each; default: 0
//   donate 0 2           # arguments that an execution deletes
//   f32[4,2] = sum 0 1   # element by element, added from left to right; also mul
//   f32[4,2] = copy 2
//   f32[4,2] = scale 0 0.5
//   f32[] = hash 0 1 2   # a number in [0, 1) from all bits of the arguments, in order
//
// Arguments of a hash are of any type and shape; others are f32 of the result's shape.
//
// Threads: as device.h says.
#ifndef JAXPP_DEVICE_FAKE_H_
#define JAXPP_DEVICE_FAKE_H_

#include "jaxpp/device.h"

#define JPP_FAKE_MAX_DEVICES 64

// Which call fails. Counted are compile, execute, buffer_from_host, buffer_to_host and
// buffer_copy_to_device (buffer_read counts as buffer_to_host).
typedef struct jpp_fake_failure {
  uint64_t at;  // 1 is the next counted call; 0: none. Fails once.
  bool async;   // the call succeeds and its buffers and event fail; not for compile
  jpp_status_code_t code;  // 0: JPP_EXECUTION_ERROR
} jpp_fake_failure_t;

typedef struct jpp_fake_options {
  size_t struct_size;     // sizeof(jpp_fake_options_t)
  uint32_t device_count;  // 1 to JPP_FAKE_MAX_DEVICES
  uint32_t threads;       // workers that do the work; 0: done when the call returns
  uint32_t latency_us;    // microseconds that an execution takes
  jpp_fake_failure_t failure;
} jpp_fake_options_t;

JPP_API jpp_status_t* jpp_client_create_fake(const jpp_fake_options_t* options,
                                             jpp_client_t** out_client) JPP_MUST_USE;

// Replaces the failure, counting from now.
JPP_API jpp_status_t* jpp_fake_set_failure(jpp_client_t* client,
                                           jpp_fake_failure_t failure) JPP_MUST_USE;

// Bytes count as if each call took effect when it was made: a destroyed or donated buffer
// is gone at once, a result is there at once, donations before results. So the figures do
// not depend on how fast workers are.
typedef struct jpp_fake_stats {
  uint64_t live_buffers;  // handles not destroyed yet, donated ones too
  uint64_t live_executables;
  uint64_t live_events;
  uint64_t live_bytes;  // over all devices; borrowed memory does not count
  uint64_t calls;       // the counted ones, failed ones too
  uint64_t executions;  // that succeeded, as the next three
  uint64_t copies;      // device to device
  uint64_t uploads;
  uint64_t downloads;
  uint64_t misuses;  // destroys of handles that were destroyed before, or are lent
  uint64_t device_live_bytes[JPP_FAKE_MAX_DEVICES];
  uint64_t device_peak_bytes[JPP_FAKE_MAX_DEVICES];
} jpp_fake_stats_t;

// JPP_INVALID_ARGUMENT when the client is not a fake.
JPP_API jpp_status_t* jpp_fake_stats(jpp_client_t* client,
                                     jpp_fake_stats_t* out_stats) JPP_MUST_USE;

#endif  // JAXPP_DEVICE_FAKE_H_
