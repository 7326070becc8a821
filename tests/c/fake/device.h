// The fake device: a client without hardware, for tests of code that runs on devices. It
// counts bytes and handles exactly, fails on request, and answers the use of a dead
// handle with an error instead of a crash, for which it keeps dead handles until the
// client is destroyed.
//
// Programs have the format "fake": optional headers, then a line for each result, in
// order.
//
//   args 3               # arguments; default: the highest one named, plus one
//   devices 0 1          # ids of the devices of JPP_DEVICE_COMPILED, one row for each of
//                        # them in the client; default: its first device
//   donate 0 2           # arguments that an execution deletes
//   f32[4,2] = sum 0 1   # element by element, added from left to right; also mul
//   f32[4,2] = copy 2
//   f32[4,2] = scale 0 0.5
//   f32[] = hash 0 1 2   # a number in [0, 1) from all bits of the arguments, in order
//   f32[4,2] = all_sum 0 # the sum over all devices, added in their order
//   f32[] = all_hash 0 1 # a hash of all arguments of the first device, of the next, ...
//
// Arguments of hashes have any type and shape; others are f32 of the result's shape. If a
// compilation request names devices, they replace the devices of the text.
//
// Nodes: clients of one process may be the nodes of a job, one each. They find each other
// through the key-value store when they are created, so each needs a separate thread. A
// node's part of a program with one of the last two is done when all nodes have executed
// theirs: it fails on all of them if it fails on one, if they execute different programs
// (the n-th of each node over the same devices belong together), and if a node destroys
// its client.
//
// Threads: as device.h says.
#ifndef TESTS_C_FAKE_DEVICE_H_
#define TESTS_C_FAKE_DEVICE_H_

#include "jaxpp/device.h"

#define JPP_FAKE_MAX_DEVICES 64  // per client
#define JPP_FAKE_MAX_NODES 64

// The call that fails. Compile, execute, buffer_from_host, buffer_to_host and copies of
// buffers count (buffer_read counts as buffer_to_host). Its layout is final.
typedef struct jpp_fake_failure {
  uint64_t at;  // 1 is the next counted call; 0: none. Fails once.
  bool async;   // the call succeeds and its buffers and event fail; not for compile
  jpp_status_code_t code;  // 0: JPP_EXECUTION_ERROR
} jpp_fake_failure_t;

typedef struct jpp_fake_options {
  size_t struct_size;     // sizeof(jpp_fake_options_t)
  uint32_t device_count;  // 1 to JPP_FAKE_MAX_DEVICES
  uint32_t threads;       // worker threads; 0: the work is done when the call returns
  uint32_t latency_us;    // of an execution, also of one that `failure` fails
  jpp_fake_failure_t failure;
  const jpp_key_value_store_t* store;  // required for several nodes, else NULL
  uint32_t node_id;                    // of this client, less than `num_nodes`
  uint32_t num_nodes;        // at most JPP_FAKE_MAX_NODES; 0 and 1: no other nodes
  uint32_t node_timeout_ms;  // how long to wait for the other nodes; 0: a minute
  bool device_memory_only;   // its devices have no pinned_host memory
} jpp_fake_options_t;

// With several nodes, fails with JPP_PEER_ERROR when another node does not come in time
// or puts a value into the store that no node would.
jpp_status_t* jpp_client_create_fake(const jpp_fake_options_t* options,
                                     jpp_client_t** out_client) JPP_MUST_USE;

// Replaces the failure; `at` counts from now.
jpp_status_t* jpp_fake_set_failure(jpp_client_t* client,
                                   jpp_fake_failure_t failure) JPP_MUST_USE;

// While the client is held, workers begin no work, like a device that hangs; for a client
// with `threads`. Destroying the client releases it.
jpp_status_t* jpp_fake_set_held(jpp_client_t* client, bool held) JPP_MUST_USE;

// Bytes are counted as if each call took effect at once: a destroyed or donated buffer is
// gone and a result exists immediately, donations before results. The figures therefore
// do not depend on the speed of workers.
typedef struct jpp_fake_stats {
  uint64_t live_buffers;  // handles not destroyed yet, including donated ones
  uint64_t live_executables;
  uint64_t live_events;
  uint64_t live_bytes;  // in all memories, without borrowed memory
  uint64_t calls;       // counted calls, including failed ones
  uint64_t executions;  // successful ones, as the next three
  uint64_t copies;      // from one device or memory to another
  uint64_t uploads;
  uint64_t downloads;
  uint64_t misuses;  // calls that destroy a handle twice, or while it is lent
  uint64_t device_live_bytes[JPP_FAKE_MAX_DEVICES];
  uint64_t device_peak_bytes[JPP_FAKE_MAX_DEVICES];
  // In the pinned_host memory of each device.
  uint64_t host_live_bytes[JPP_FAKE_MAX_DEVICES];
  uint64_t host_peak_bytes[JPP_FAKE_MAX_DEVICES];
} jpp_fake_stats_t;

// Fails with JPP_INVALID_ARGUMENT when the client is not a fake.
jpp_status_t* jpp_fake_stats(jpp_client_t* client,
                             jpp_fake_stats_t* out_stats) JPP_MUST_USE;

#endif  // TESTS_C_FAKE_DEVICE_H_
