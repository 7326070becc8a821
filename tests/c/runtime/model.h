// Shared by the runtime tests: turns a graph text into a plan, every task into a program
// of the fake device, and creates a runtime that runs them.
//
// On the fake, result k of a task is a hash of all its arguments, beginning with the
// k-th: a wrong, late or missing value anywhere upstream changes every number downstream.
// On a plugin it is the sum of k + 1 and all arguments of its type and all microbatch
// numbers.
#ifndef TESTS_C_RUNTIME_MODEL_H_
#define TESTS_C_RUNTIME_MODEL_H_

#include "fake/device.h"
#include "jaxpp/plan.h"
#include "jaxpp/runtime.h"
#include "test_util.h"

typedef struct model_options {
  const char* schedule;       // NULL: as the text says
  uint32_t ranks;             // 0: as the text says
  uint32_t devices_per_rank;  // 0: 1
  bool odd_have_one;          // ranks with odd numbers have one device
  uint32_t ranks_per_device;  // 0: 1; neighbouring ranks share a group of devices
  uint32_t steps_in_flight;
  uint32_t device_threads;  // of the fake
  uint32_t latency_us;      // of the fake
  bool portable;            // one executable for any device
  bool device_memory_only;  // of the fake
  // As in jpp_runtime_options_t.
  const uint32_t* rank_process;
  uint32_t process;
  jpp_transport_t* network;
  uint32_t stall_timeout_ms, step_timeout_ms;
  // Only on the fake: results hash the arguments of all devices of a rank, which differ.
  bool collective;
  // Ranks that span nodes: each rank has `devices_per_rank` devices in each of this many
  // slices (0: 1); this model is one slice. The processes of a slice exchange values;
  // each process is a node, beginning with those of slice 0.
  uint32_t slices, slice;
  uint32_t processes;  // of a slice
  const jpp_key_value_store_t* store;
  const char* plugin_path;  // NULL: the fake. With a plugin executables are portable.
  bool copies;  // tasks that only copy have no executable; others begin sums with 1
  const char* custom_call;       // plugin: what result 0 of task `custom_call_task` goes
  const char* custom_call_task;  // through
} model_options_t;

typedef struct model {
  model_options_t options;
  jpp_graph_t* graph;
  jpp_planned_t* planned;
  const jpp_staged_t* staged;  // of it
  const jpp_plan_t* plan;      // of it
  jpp_client_t* client;
  uint32_t devices[JPP_FAKE_MAX_DEVICES];
  jpp_task_executable_t* executables;
  jpp_runtime_t* runtime;
  jpp_buffer_t*** inputs;   // [rank][input * devices_per_rank + device]
  jpp_buffer_t*** outputs;  // the same
} model_t;

// A chain of stages that each multiply by a weight, with a backward pass, sums of the
// gradients and updates; the caller frees it with free(). Outputs: new weights, then
// gradients, then the loss.
char* model_chain(uint32_t stages, uint32_t ranks, uint32_t microbatches);

// %w is an output unchanged, %L and %v are outputs twice, and stage 0 has no weights, so
// that bwd_0 has no ops and no results.
extern const char kModelOutputs[];

// Creates everything but the runtime and, with a custom call, the executables.
model_t* model_plan(const char* text, model_options_t options);
void model_compile(model_t* model);
jpp_executable_t* model_compile_task(const model_t* model, uint32_t task);
jpp_status_t* model_try_create_runtime(model_t* model);
model_t* model_create(const char* text, model_options_t options);
void model_destroy(model_t* model);

// An argument on one rank, with elements first, first + more, ...
jpp_array_t* model_array(const model_t* model, uint32_t arg, uint32_t rank, float first,
                         float more);
// Waits for the array; returns the first element of the first rank's shard.
float model_read_array(jpp_array_t* array);

// Uploads inputs, each filled with a number that depends on the argument.
void model_give(model_t* model);
// Destroys the inputs and outputs that the caller still owns.
void model_take_back(model_t* model);
// Runs a step on the inputs and waits for it. A failed step leaves no outputs.
jpp_status_t* model_step(model_t* model);
// The two halves around the call: turns the inputs into arrays and back, and the results
// into outputs.
jpp_call_t model_wrap(model_t* model);
void model_unwrap(model_t* model, const jpp_call_t* call);
// Uploads inputs, runs steps, reads a number of each output of the graph and frees
// everything. Fails unless all shards and replicas of an output agree.
void model_run(model_t* model, float* numbers);
// The node number of a process of a slice.
uint32_t model_node_of(const model_t* model, uint32_t slice, uint32_t process);
// Returns the task's program; the caller frees it with free().
char* model_fake_code(const model_t* model, uint32_t task);
char* model_mlir_code(const model_t* model, uint32_t task);
jpp_fake_stats_t model_stats(model_t* model);
// Checks that only the constants are left on the device, if it is a fake.
void model_expect_clean(model_t* model);

#endif  // TESTS_C_RUNTIME_MODEL_H_
