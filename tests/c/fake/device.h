// The fake device: a client without a device, for tests of what runs on devices. It keeps
// exact accounts, fails where told, and answers the use of a dead handle with an error
// instead of a crash; dead handles are kept until the client is destroyed for that.
//
// Programs have format "fake": a line for each result, in order, and optional headers.
//
//   args 3               # arguments; default: the highest one named, plus one
//   devices 0 1          # ids of the devices of JPP_DEVICE_COMPILED, a row for each that
//                        # is the client's; default: its first one
//   donate 0 2           # arguments that an execution deletes
//   f32[4,2] = sum 0 1   # element by element, added from left to right; also mul
//   f32[4,2] = copy 2
//   f32[4,2] = scale 0 0.5
//   f32[] = hash 0 1 2   # a number in [0, 1) from all bits of the arguments, in order
//   f32[4,2] = all_sum 0 # the sum over all devices, added in their order
//   f32[] = all_hash 0 1 # a hash of all arguments of the first device, of the next, ...
//
// Arguments of hashes are of any type and shape; others are f32 of the result's shape.
// Devices that a compilation request names stand for those of the text.
//
// Nodes: clients of one process may be the nodes of a job, one each. They find each other
// through the key-value store when they are made, so each in a thread of its own. A
// node's part of a program with one of the last two is done when all nodes have executed
// theirs: it fails on all of them if it fails on one, if they execute different programs
// (the n-th of each node over the same devices belong together), and if a node destroys
// its client.
//
// Threads: as device.h says.
#ifndef TESTS_C_FAKE_DEVICE_H_
#define TESTS_C_FAKE_DEVICE_H_

#include "jaxpp/device.h"

#define JPP_FAKE_MAX_DEVICES 64  // of a client
#define JPP_FAKE_MAX_NODES 64

// Which call fails. Counted are compile, execute, buffer_from_host, buffer_to_host and
// copies of buffers (buffer_read counts as buffer_to_host).
// Its layout is final.
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
  const jpp_key_value_store_t* store;  // needed for several nodes, else NULL
  uint32_t node_id;                    // of this client, below `num_nodes`
  uint32_t num_nodes;                  // at most JPP_FAKE_MAX_NODES; 0 and 1: it is alone
  uint32_t node_timeout_ms;            // of the wait for the other nodes; 0: a minute
  bool device_memory_only;             // its devices have no pinned_host
} jpp_fake_options_t;

// With several nodes JPP_PEER_ERROR when another one does not come in time or leaves
// something in the store that is no node's.
jpp_status_t* jpp_client_create_fake(const jpp_fake_options_t* options,
                                     jpp_client_t** out_client) JPP_MUST_USE;

// Replaces the failure, counting from now.
jpp_status_t* jpp_fake_set_failure(jpp_client_t* client,
                                   jpp_fake_failure_t failure) JPP_MUST_USE;

// While held, workers begin no work, as those of a device that hangs: for a client with
// `threads`. One that is destroyed is held no longer.
jpp_status_t* jpp_fake_set_held(jpp_client_t* client, bool held) JPP_MUST_USE;

// Bytes count as if each call took effect when it was made: a destroyed or donated buffer
// is gone at once, a result is there at once, donations before results. So the figures do
// not depend on how fast workers are.
typedef struct jpp_fake_stats {
  uint64_t live_buffers;  // handles not destroyed yet, donated ones too
  uint64_t live_executables;
  uint64_t live_events;
  uint64_t live_bytes;  // of all memories; borrowed memory does not count
  uint64_t calls;       // the counted ones, failed ones too
  uint64_t executions;  // that succeeded, as the next three
  uint64_t copies;      // from one device or memory to another
  uint64_t uploads;
  uint64_t downloads;
  uint64_t misuses;  // destroys of handles that were destroyed before, or are lent
  uint64_t device_live_bytes[JPP_FAKE_MAX_DEVICES];
  uint64_t device_peak_bytes[JPP_FAKE_MAX_DEVICES];
  uint64_t host_live_bytes[JPP_FAKE_MAX_DEVICES];  // of each device's pinned_host
  uint64_t host_peak_bytes[JPP_FAKE_MAX_DEVICES];
} jpp_fake_stats_t;

// JPP_INVALID_ARGUMENT when the client is not a fake.
jpp_status_t* jpp_fake_stats(jpp_client_t* client,
                             jpp_fake_stats_t* out_stats) JPP_MUST_USE;

#endif  // TESTS_C_FAKE_DEVICE_H_
