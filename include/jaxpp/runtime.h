// Runtime: runs a plan's programs, one actor a pipeline rank, on a client's devices.
//
// A call takes its arguments and returns; a thread of the runtime issues the step,
// another one waits for it. Up to `steps_in_flight` steps are under way, and the next
// call waits. Executions, copies and sends are asynchronous and dependence is carried by
// the device's buffers, so the next step's tasks begin as soon as what they need exists,
// while others of this one still run. The step loop allocates nothing and looks nothing
// up.
//
// A step that fails releases everything it made. Its status (JPP_EXECUTION_ERROR,
// JPP_OUT_OF_MEMORY, JPP_NAN_ERROR, JPP_CANCELLED) names actor, instruction, task,
// microbatch and step; whoever waits for a result gets it, and if nobody did, the next
// call. The runtime goes on with the next step.
//
// Threads: everything but destroy may be called by any thread at any time; steps are
// issued in the order of the calls. Read a trace while no traced step is under way.
// Runtimes do not share anything but the client.
//
// Several processes: arguments and results lie on the ranks of this process; what other
// ranks hold of them is the other processes' affair. A step that fails in one process
// fails in all of them, with the status of the first, and their runtimes are of no more
// use: every further call gives that status.
//
// A rank whose devices lie in several processes: each of these has a runtime with some of
// the devices, as many in each of its ranks, and `rank_process` names of every rank the
// process with which it exchanges its shards. Tasks are compiled for all devices of the
// rank (device.h), so that its processes execute them together. A process has devices of
// one rank or of all: in which order several ranks are issued depends on what arrives
// from other processes.
#ifndef JAXPP_RUNTIME_H_
#define JAXPP_RUNTIME_H_

#include "jaxpp/array.h"
#include "jaxpp/program.h"
#include "jaxpp/transport.h"

typedef struct jpp_runtime jpp_runtime_t;

// What runs a task. Tasks may share an executable.
typedef struct jpp_task_executable {
  jpp_executable_t* executable;  // NULL for a task without ops, which is skipped
  bool portable;                 // compiled for any one device; with one device a rank
                                 // it runs on the rank's, otherwise where it was compiled
} jpp_task_executable_t;

typedef struct jpp_runtime_options {
  size_t struct_size;
  jpp_client_t* client;       // borrowed
  const jpp_plan_t* plan;     // borrowed
  uint32_t devices_per_rank;  // >= 1
  // [ranks * devices_per_rank] client indices; NULL: one rank after the other, from 0.
  const uint32_t* devices;
  const jpp_task_executable_t* executables;  // [staged->num_tasks]
  const char* transport;                     // the driver between ranks; NULL: "inproc"
  // 0 or 1: one thread issues. More help only where a plugin's calls take long.
  uint32_t issue_threads;
  uint32_t steps_in_flight;  // 0: 2
  // Several processes with one plan: each has a runtime, which runs the ranks that are
  // its own, and calls the same steps in the same order. NULL: this one has all ranks.
  const uint32_t* rank_process;  // [ranks]
  uint32_t process;              // this one
  // Of bytes, connected to the others. The runtime takes it over, whatever the outcome.
  jpp_transport_t* network;
  // A step for which nothing comes from other processes for so long fails with
  // JPP_PEER_ERROR, which says what is waited for: a process may be alive and stand
  // still. 0: 600000, ten minutes.
  uint32_t stall_timeout_ms;
  // The same for a send or receive in a step that all processes are known to have begun:
  // at least this, a whole step, and 20 times what it usually waits. 0: 60000, a minute.
  uint32_t step_timeout_ms;
} jpp_runtime_options_t;

// Uploads the constants and sizes everything a step needs. Client, plan and executables
// must outlive the runtime. JPP_DEVICES_ERROR names a rank whose device is not there,
// JPP_INVALID_ARGUMENT a task whose executable has another number of results, or an
// unknown transport; JPP_UNSUPPORTED one that cannot connect ranks.
JPP_API jpp_status_t* jpp_runtime_create(const jpp_runtime_options_t* options,
                                         jpp_runtime_t** out_runtime) JPP_MUST_USE;
// Waits for the steps under way; nobody else may use the runtime any more. NULL is fine.
JPP_API void jpp_runtime_destroy(jpp_runtime_t* runtime);

// --- Steps ----------------------------------------------------------------------------

typedef struct jpp_call {
  // [graph->num_args] Arguments that are donated are deleted, all of them or, where the
  // call is refused, none. One that does not lie on every rank that needs it is copied
  // there first.
  jpp_array_t* const* args;
  // [graph->num_outputs] Promises, held once for the caller; NULL after an error.
  jpp_array_t** results;
  // While the call waits for its turn, or for other readers of what is donated to it.
  const jpp_interrupt_t* interrupt;  // NULL: never
} jpp_call_t;

// Takes the arguments and returns. JPP_DONATED_ERROR for one that is deleted, or donated
// and given twice; JPP_CANCELLED if interrupted; the status of an argument that failed,
// or of an earlier step that failed and of which nobody has heard. Nothing has happened
// then.
JPP_API jpp_status_t* jpp_runtime_call(jpp_runtime_t* runtime,
                                       const jpp_call_t* call) JPP_MUST_USE;

// Until all steps called so far are done. The status of one that failed, if nobody has
// heard of it; JPP_CANCELLED if interrupted (`interrupt` may be NULL).
JPP_API jpp_status_t* jpp_runtime_await(
    jpp_runtime_t* runtime, JPP_OPTIONAL const jpp_interrupt_t* interrupt) JPP_MUST_USE;
// How many were called so far.
JPP_API uint64_t jpp_runtime_num_steps(const jpp_runtime_t* runtime);
// The same for the first `steps` of them, while later ones go on.
JPP_API jpp_status_t* jpp_runtime_await_steps(
    jpp_runtime_t* runtime, uint64_t steps,
    JPP_OPTIONAL const jpp_interrupt_t* interrupt) JPP_MUST_USE;

// Whether the job has failed, here or in another process: the runtime is of no more use.
JPP_API bool jpp_runtime_is_broken(const jpp_runtime_t* runtime);
// Whether devices of this process were still at work on a step long after the job had
// failed, so that nobody waited for them any more; jpp_runtime_destroy() would.
JPP_API bool jpp_runtime_has_given_up(const jpp_runtime_t* runtime);

// Any thread, also a signal handler: the steps under way stop issuing and fail with
// JPP_CANCELLED, also those of which all was issued already; what was donated to them is
// gone. Nobody waits for what the devices still do, unless it is traced: the next step's
// work comes after that. Without a step under way: nothing.
JPP_API void jpp_runtime_cancel(jpp_runtime_t* runtime);

// A step on bare buffers, which waits: given and taken as [rank][input or output of that
// rank's program][device].
typedef struct jpp_step_io {
  // inputs[r][i * devices_per_rank + d]: shard d of programs[r].inputs[i]. The step owns
  // the handles of inputs the program owns, whatever the outcome; the others stay the
  // caller's.
  jpp_buffer_t* const* const* inputs;
  // outputs[r][o * devices_per_rank + d]: filled on success, the caller's to destroy; all
  // NULL after an error.
  jpp_buffer_t** const* outputs;
  // While it stands in line and while it runs: a request cancels the step.
  const jpp_interrupt_t* interrupt;  // NULL: never
} jpp_step_io_t;

// Runs one step and waits until it is done.
JPP_API jpp_status_t* jpp_runtime_step(jpp_runtime_t* runtime,
                                       const jpp_step_io_t* io) JPP_MUST_USE;

// For debugging: a task whose floating results have a NaN or an infinity fails with
// JPP_NAN_ERROR. Every run is awaited and copied to the host, so a step is slow. Off at
// first; takes effect with the next step.
JPP_API void jpp_runtime_set_checks(jpp_runtime_t* runtime, bool nans, bool infs);

// JPP_OUT_OF_MEMORY on a device of the rank: adds what the plan says of its memory and
// what to do. Other statuses and NULL come back as they are. Takes and returns ownership.
JPP_API jpp_status_t* jpp_plan_explain_memory(const jpp_plan_t* plan, uint32_t rank,
                                              jpp_status_t* status) JPP_MUST_USE;

// --- What happened --------------------------------------------------------------------

// One task run of a traced step. Times in nanoseconds from the step's start.
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
  uint64_t step;  // which call, from 1
  int64_t start;  // when its issue began: CLOCK_MONOTONIC, nanoseconds
  int64_t clock;  // the same as CLOCK_REALTIME, by which traces of processes are joined
  uint64_t num_runs;
  const jpp_trace_run_t* runs;      // by rank, then in the program's order
  const uint64_t* peak_live_bytes;  // [ranks] counted while issuing, on each device,
                                    // receive slots included
  int64_t length;                   // from its start until all was done
} jpp_trace_t;

// Tracing costs an event a run. Off at first; takes effect with the next step.
JPP_API void jpp_runtime_set_tracing(jpp_runtime_t* runtime, bool enabled);

// While there is an observer, all steps of all runtimes are traced, and it is called
// after each that succeeded, by the thread that finished it, one call at a time. NULL
// ends that, and waits for the steps under way, two seconds at most; the former observer
// is not called any more when it returns. Any thread, but not from an observer.
typedef void (*jpp_trace_observer_t)(void* user, const jpp_trace_t* trace);
JPP_API void jpp_trace_observe(jpp_trace_observer_t observer, void* user);

// Of the last step that was traced: borrowed until the next one is called. NULL before
// the first one and when it failed. jpp_runtime_await() first.
JPP_API const jpp_trace_t* jpp_runtime_last_trace(const jpp_runtime_t* runtime);
// Of the traced step that came `back` steps before the last one, at most
// `steps_in_flight`
// - 1: what overlaps. NULL as above, or if it was not traced.
JPP_API const jpp_trace_t* jpp_runtime_trace(const jpp_runtime_t* runtime, uint32_t back);

// What a stage of a loop took for one microbatch, in milliseconds: the mean over the runs
// of each task, since a short run may be noted together with its neighbour. A whole
// backward counts half as input gradient. `out_costs` has room for the loop's stages.
JPP_API void jpp_trace_costs(const jpp_trace_t* trace, uint32_t loop,
                             jpp_cost_t* out_costs);

// Calls the step a few times on the same arguments, none of which may be donated, and
// gives the mean of what the stages took after the first time: those of each loop, one
// loop after the other. Waits; leaves tracing on. JPP_CANCELLED if interrupted
// (`interrupt` may be NULL).
JPP_API jpp_status_t* jpp_runtime_measure(jpp_runtime_t* runtime,
                                          jpp_array_t* const* args,
                                          JPP_OPTIONAL const jpp_interrupt_t* interrupt,
                                          jpp_cost_t* out_costs) JPP_MUST_USE;

#endif  // JAXPP_RUNTIME_H_
