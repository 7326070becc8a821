// Runtime: runs a plan's programs, one actor a pipeline rank, on a client's devices.
//
// A step is issued ahead: executions, copies and sends are asynchronous, dependence is
// carried by the device's buffers. By default one thread, the caller's, issues for all
// actors in turn, each up to its next execution, so that no device waits for another
// actor's issue; with `issue_threads` several share the actors. The step loop allocates
// nothing and looks nothing up.
//
// A step that fails releases everything it made, names actor, instruction, task and
// microbatch in its status (JPP_EXECUTION_ERROR, JPP_OUT_OF_MEMORY, JPP_CANCELLED), and
// leaves the runtime ready for the next step.
//
// Threads: step, cancel and the two switches may be called by any thread; steps of one
// runtime run one after another. Read a trace and destroy the runtime while no step runs.
// Runtimes do not share anything but the client.
#ifndef JAXPP_RUNTIME_H_
#define JAXPP_RUNTIME_H_

#include "jaxpp/device.h"
#include "jaxpp/program.h"

typedef struct jpp_runtime jpp_runtime_t;

// What runs a task. Tasks may share an executable.
typedef struct jpp_task_executable {
  jpp_executable_t* executable;  // NULL for a task without ops, which is skipped
  bool portable;                 // compiled for any one device; with one device a rank
                                 // it runs on the rank's, otherwise where it was compiled
} jpp_task_executable_t;

typedef struct jpp_runtime_options {
  jpp_client_t* client;                      // borrowed
  const jpp_plan_t* plan;                    // borrowed
  uint32_t devices_per_rank;                 // >= 1
  const uint32_t* devices;                   // [ranks * devices_per_rank] client indices
  const jpp_task_executable_t* executables;  // [staged->num_tasks]
  const char* transport;                     // the driver between ranks; NULL: "inproc"
  // 0 or 1: the caller's thread alone. More help only where a plugin's calls take long.
  uint32_t issue_threads;
} jpp_runtime_options_t;

// Uploads the constants and sizes everything a step needs. Client, plan and executables
// must outlive the runtime. JPP_DEVICES_ERROR names a rank whose device is not there,
// JPP_INVALID_ARGUMENT a task whose executable has another number of results, or an
// unknown transport; JPP_UNSUPPORTED one that cannot connect ranks.
JPP_API jpp_status_t* jpp_runtime_create(const jpp_runtime_options_t* options,
                                         jpp_runtime_t** out_runtime) JPP_MUST_USE;
// Does not wait: no step may be running. NULL is fine.
JPP_API void jpp_runtime_destroy(jpp_runtime_t* runtime);

// Buffers are given and taken as [rank][input or output of that rank's program][device].
typedef struct jpp_step_io {
  // inputs[r][i * devices_per_rank + d]: shard d of programs[r].inputs[i]. The step owns
  // the handles of inputs the program owns, whatever the outcome; the others stay the
  // caller's.
  jpp_buffer_t* const* const* inputs;
  // outputs[r][o * devices_per_rank + d]: filled on success, the caller's to destroy; all
  // NULL after an error.
  jpp_buffer_t** const* outputs;
  // Asked by the step's thread about 20 times a second, while it stands in line, issues
  // or waits; true cancels the step. Must not step or destroy this runtime. NULL: never.
  bool (*should_cancel)(void* user);
  void* user;
} jpp_step_io_t;

// Issues one step and waits until it is done. One thread at a time per runtime; a second
// one waits for its turn.
JPP_API jpp_status_t* jpp_runtime_step(jpp_runtime_t* runtime,
                                       const jpp_step_io_t* io) JPP_MUST_USE;

// Any thread, also a signal handler: the running step stops issuing and fails with
// JPP_CANCELLED, also when all of it was issued already; owned inputs are gone as after
// any failure. It does not wait for what the devices still do, unless it is traced: the
// next step's work comes after that. Without a running step: nothing.
JPP_API void jpp_runtime_cancel(jpp_runtime_t* runtime);

// For debugging: a task whose floating results have a NaN or an infinity fails with
// JPP_NAN_ERROR. Every run is awaited and copied to the host, so a step is slow. Off at
// first; takes effect with the next step.
JPP_API void jpp_runtime_set_checks(jpp_runtime_t* runtime, bool nans, bool infs);

// JPP_OUT_OF_MEMORY on a device of the rank: adds what the plan says of its memory and
// what to do. Other statuses and NULL come back as they are. Takes and returns ownership.
JPP_API jpp_status_t* jpp_plan_explain_memory(const jpp_plan_t* plan, uint32_t rank,
                                              jpp_status_t* status) JPP_MUST_USE;

// --- What happened --------------------------------------------------------------------

// One task run of the last traced step. Times in nanoseconds from the step's start.
typedef struct jpp_trace_run {
  uint32_t rank;
  uint32_t task;        // staged task id
  uint32_t microbatch;  // JPP_NONE outside loops
  int64_t issued;       // the call was made
  int64_t start;        // the device could begin: issued, arguments there, the actor's
                        // previous run done
  int64_t end;          // results there
} jpp_trace_run_t;

typedef struct jpp_trace {
  const jpp_plan_t* plan;
  uint64_t num_runs;
  const jpp_trace_run_t* runs;      // by rank, then in the program's order
  const uint64_t* peak_live_bytes;  // [ranks] counted while issuing, on each device,
                                    // receive slots included
  int64_t length;                   // of the step
} jpp_trace_t;

// Tracing costs an event a run. Off at first; takes effect with the next step.
JPP_API void jpp_runtime_set_tracing(jpp_runtime_t* runtime, bool enabled);
// Borrowed until the next step; NULL before the first traced step and when the last one
// failed.
JPP_API const jpp_trace_t* jpp_runtime_last_trace(const jpp_runtime_t* runtime);

// What a stage of a loop took for one microbatch, in milliseconds: the mean over the runs
// of each task, since a short run may be noted together with its neighbour. A whole
// backward counts half as input gradient. `out_costs` has room for the loop's stages.
JPP_API void jpp_trace_costs(const jpp_trace_t* trace, uint32_t loop,
                             jpp_cost_t* out_costs);
#endif  // JAXPP_RUNTIME_H_
