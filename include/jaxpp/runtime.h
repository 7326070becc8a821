// Runtime: runs a plan's programs, one actor per pipeline rank, on a client's devices.
//
// A call takes its arguments and returns without waiting. One thread of the runtime
// issues the steps, another waits for them. Up to `steps_in_flight` steps run at a time;
// beyond that, a call waits. Executions, copies and sends are asynchronous, and buffers
// carry the dependences: the next step's tasks begin as soon as their inputs exist, while
// other tasks of this step still run. With a client that runs programs inside calls (see
// jpp_client_info_t), one step runs after another instead, on as many threads as there
// are cores or ranks. The step loop allocates nothing and looks nothing up.
//
// Ownership. The caller releases every array that it passed as an argument, donated or
// not, and every result, each once with jpp_array_release(). The call deletes the
// contents of a donated argument; its handle stays the caller's. The runtime holds
// arguments for as long as it reads them, so the caller may release them as soon as the
// call returns.
//
// Lifetimes. The runtime borrows client, plan and executables, which must outlive it.
// Arrays outlive the runtime and the plan, and need only their client. Traces belong to
// the runtime and end with it. jpp_runtime_destroy() waits for all steps. After it
// returns, devices may still do work of steps that were cancelled or, if
// jpp_runtime_has_given_up(), that failed.
//
// A step that fails releases everything it made. Its status (JPP_EXECUTION_ERROR,
// JPP_OUT_OF_MEMORY, JPP_NAN_ERROR, JPP_CANCELLED) names actor, instruction, task,
// microbatch and step. Waiting for one of its results returns that status; if no caller
// has waited, the next call returns it. The runtime continues with the next step.
//
// Threads: any thread may call anything but destroy at any time; steps are issued in the
// order of the calls. Read a trace while no traced step is in flight. Runtimes share
// only the client.
//
// Several processes: a call passes and returns arrays on the ranks of this process; the
// other processes do so for theirs. A step that fails in one process fails in all of
// them, with the status of the first failure. Their runtimes are then unusable: every
// further call returns that status.
//
// A rank whose devices belong to several processes: each of these processes has a runtime
// with some of the devices, the same number in each of its ranks, and `rank_process`
// names for every rank the process with which it exchanges its shards. Tasks are compiled
// for all devices of the rank (device.h), so that its processes execute them together. A
// process must have devices of one rank or of all ranks: the order in which it would
// issue several ranks depends on when messages from other processes arrive.
#ifndef JAXPP_RUNTIME_H_
#define JAXPP_RUNTIME_H_

#include "jaxpp/array_argument.h"
#include "jaxpp/program.h"
#include "jaxpp/transport.h"

typedef struct jpp_runtime jpp_runtime_t;

// The executable of a task. Tasks may share an executable. Its layout is final.
typedef struct jpp_task_executable {
  // NULL for a task without ops, which is skipped, and on CPUs also for a task of
  // jpp_plan_task_copies(): the runtime copies there itself, which takes no longer, and
  // saves a compilation. On a rank of several devices, each device copies from its own
  // shard of the argument. The copy must then be of the whole argument, or `by_rows` of
  // an argument that is not cut along its first dimension.
  jpp_executable_t* executable;
  // Compiled for any one device: runs on the rank's device if the rank has one device,
  // otherwise where it was compiled
  bool portable;
} jpp_task_executable_t;

typedef struct jpp_runtime_options {
  size_t struct_size;         // sizeof(jpp_runtime_options_t)
  jpp_client_t* client;       // borrowed
  const jpp_plan_t* plan;     // borrowed
  uint32_t devices_per_rank;  // >= 1
  // [ranks * devices_per_rank] client indices; a rank with fewer devices, for which its
  // tasks are compiled, has JPP_NO_DEVICE in the rest of its row. NULL: one rank after
  // the other, from 0.
  const uint32_t* devices;
  const jpp_task_executable_t* executables;  // [staged->num_tasks]
  const char* transport;                     // the driver between ranks; NULL: "inproc"
  uint32_t steps_in_flight;                  // 0: 2
  // Several processes with one plan: each has a runtime, which runs the ranks of its
  // process, and calls the same steps in the same order. NULL: this process has all
  // ranks.
  const uint32_t* rank_process;  // [ranks]
  uint32_t process;              // this process
  // A transport of bytes that is connected to the other processes; NULL for one process.
  // The runtime takes ownership of it, even if jpp_runtime_create() fails.
  jpp_transport_t* network;
  // A step that receives nothing from other processes for this long fails with
  // JPP_PEER_ERROR, which names what it waits for: a live process may hang. 0: 600000,
  // ten minutes.
  uint32_t stall_timeout_ms;
  // The limit for a send or receive in a step that all processes are known to have begun:
  // the largest of this, the time of a whole step, and 20 times its usual wait. 0: 60000.
  uint32_t step_timeout_ms;
  // [staged->num_tasks] for a task without executable whose rank has several devices: the
  // dims of its results on each device, one result after the other. NULL, here or for a
  // task: each device has the whole arrays.
  const uint64_t* const* shard_dims;
} jpp_runtime_options_t;

// Uploads the constants and allocates everything a step needs. JPP_DEVICES_ERROR names a
// rank whose device the client lacks, JPP_INVALID_ARGUMENT a task whose executable has a
// different number of results, dims of shards that do not divide those of the array, or
// an unknown transport; JPP_UNSUPPORTED a transport that cannot connect ranks. The caller
// frees the runtime with jpp_runtime_destroy().
JPP_API jpp_status_t* jpp_runtime_create(const jpp_runtime_options_t* options,
                                         jpp_runtime_t** out_runtime) JPP_MUST_USE;
// Waits for the steps in flight. No other thread may use the runtime from then on. Takes
// NULL.
JPP_API void jpp_runtime_destroy(jpp_runtime_t* runtime);

// Adds the collectives of the compiled tasks to the costs of a plan. `names` are the axes
// of a rank's mesh, and `sizes` are [ranks][num_axes]. `executables` are those of the
// tasks, as in jpp_runtime_options_t; one that is NULL, or whose program the plugin does
// not expose, adds nothing.
JPP_API jpp_status_t* jpp_plan_costs_add_compiled(
    jpp_plan_costs_t* costs, const jpp_plan_t* plan, jpp_client_t* client,
    const jpp_task_executable_t* executables, uint32_t num_axes, const char* const* names,
    const uint32_t* sizes) JPP_MUST_USE;

// Memory that a step uses on each device of a rank, in bytes. Its layout is final.
typedef struct jpp_rank_memory {
  uint64_t arguments, results;
  uint64_t donated;    // arguments whose memory the step may use
  uint64_t temporary;  // `peak` without arguments and without results that are not
                       // donated memory
  uint64_t code;       // of the rank's tasks
  // The planned peak plus the largest temporary memory of a task.
  uint64_t peak;
  // The same in pinned host memory, for each device.
  uint64_t host_arguments, host_results, host_donated, host_temporary, host_peak;
} jpp_rank_memory_t;

// What a plugin does not report counts as 0. `executables` are those of the tasks.
JPP_API jpp_status_t* jpp_plan_rank_memory(const jpp_plan_t* plan, uint32_t rank,
                                           jpp_client_t* client,
                                           const jpp_task_executable_t* executables,
                                           jpp_rank_memory_t* out_memory) JPP_MUST_USE;

// --- Steps ----------------------------------------------------------------------------

typedef struct jpp_call {
  size_t struct_size;  // sizeof(jpp_call_t)
  // [num_args] The call deletes the contents of the donated arguments: of all of them, or
  // of none if it returns an error. An argument that is not on every rank that needs it
  // is copied there first. The caller still releases each handle.
  jpp_array_t* const* args;
  // Graph->num_args; jpp_planfile_step_call() takes no constants.
  uint32_t num_args;
  // [num_results] Filled with promises, each held once for the caller, who releases them;
  // all NULL after an error. Previous elements of the list are not released.
  jpp_array_t** results;
  uint32_t num_results;  // graph->num_outputs
  // Ends the call's wait for its turn, or for other readers of donated arguments. NULL:
  // the wait cannot be interrupted.
  const jpp_interrupt_t* interrupt;
} jpp_call_t;

// Takes the arguments and returns without waiting for the step. JPP_DONATED_ERROR for an
// argument that is deleted, or that is donated and given twice; JPP_CANCELLED if
// interrupted; the status of an argument that failed, or of an earlier step whose failure
// was not reported to any caller. After an error nothing has changed: no argument is
// deleted, and no step was called.
JPP_API jpp_status_t* jpp_runtime_call(jpp_runtime_t* runtime,
                                       const jpp_call_t* call) JPP_MUST_USE;

// Makes an argument for jpp_runtime_call() from an array that the program describes: on
// the host, in memory of another framework, or on other ranks. jpp_argument_take()
// decides and does what the plan requires of argument `arg`; in the description of an
// array on the runtime's devices, `devices` is 1. `blocks` are those of a rank's devices,
// [devices_per_rank][ndim][2]; NULL: each device has the whole array. The caller holds
// the array. Errors: those of jpp_argument_take(), whose JPP_OUT_OF_MEMORY also says how
// much the plan needs, and JPP_INVALID_ARGUMENT for an argument number that is out of
// range.
JPP_API jpp_status_t* jpp_runtime_take(jpp_runtime_t* runtime, uint32_t arg,
                                       JPP_OPTIONAL const int64_t* blocks,
                                       const jpp_source_t* source,
                                       jpp_array_t** out_array) JPP_MUST_USE;

// Waits until all steps called so far are done. Returns the status of a step that failed,
// if it was not reported to any caller before; JPP_CANCELLED if interrupted.
JPP_API jpp_status_t* jpp_runtime_await(
    jpp_runtime_t* runtime, JPP_OPTIONAL const jpp_interrupt_t* interrupt) JPP_MUST_USE;
// The number of steps called so far.
JPP_API uint64_t jpp_runtime_num_steps(const jpp_runtime_t* runtime);
// The same for the first `steps` of them; later steps may still run.
JPP_API jpp_status_t* jpp_runtime_await_steps(
    jpp_runtime_t* runtime, uint64_t steps,
    JPP_OPTIONAL const jpp_interrupt_t* interrupt) JPP_MUST_USE;

// Whether the job has failed, here or in another process: the runtime is unusable.
JPP_API bool jpp_runtime_is_broken(const jpp_runtime_t* runtime);
// Whether the runtime stopped waiting for devices that still worked on a step long after
// the step or the job had failed. They may still run executables, which must then not be
// destroyed, after jpp_runtime_destroy() too. Once the job has failed, destroying the
// runtime would wait for these devices.
JPP_API bool jpp_runtime_has_given_up(const jpp_runtime_t* runtime);

// Any thread, also from a signal handler: the steps in flight stop issuing and fail with
// JPP_CANCELLED, even those that were issued completely. Arguments donated to them are
// lost. The runtime does not wait for work that the devices still do, unless it is
// traced; the work of the next step follows it. Without a step in flight it does nothing.
JPP_API void jpp_runtime_cancel(jpp_runtime_t* runtime);

// For debugging: a task whose floating-point results contain a NaN or an infinity fails
// with JPP_NAN_ERROR. The runtime awaits every run and copies its results to the host,
// which is slow. Off by default; takes effect with the next step.
JPP_API void jpp_runtime_set_checks(jpp_runtime_t* runtime, bool nans, bool infs);

// Extends a JPP_OUT_OF_MEMORY on a device of the rank with the plan's memory use and with
// remedies. Returns any other status, and NULL, unchanged. Takes and returns ownership.
JPP_API jpp_status_t* jpp_plan_explain_memory(const jpp_plan_t* plan, uint32_t rank,
                                              jpp_status_t* status) JPP_MUST_USE;

// --- What happened --------------------------------------------------------------------

// One task run of a traced step. Times in nanoseconds from the step's start.
typedef struct jpp_trace_run {
  uint32_t rank;
  uint32_t task;        // staged task id
  uint32_t microbatch;  // JPP_NONE outside loops
  int64_t issued;       // the call was made
  // When the device could begin: the run was issued, its arguments exist, and the device
  // has finished its previous run. If programs run inside calls, actors that share a
  // device do not wait for each other.
  int64_t start;
  int64_t end;  // results exist
} jpp_trace_run_t;

typedef struct jpp_trace {
  const jpp_plan_t* plan;
  uint64_t step;  // the number of the call, from 1
  int64_t start;  // when issuing began: CLOCK_MONOTONIC, nanoseconds
  int64_t clock;  // the same as CLOCK_REALTIME, which aligns traces of several processes
  uint64_t num_runs;
  // By rank, then in the program's order.
  const jpp_trace_run_t* runs;
  // [ranks] counted while issuing, on each device, receive slots included
  const uint64_t* peak_live_bytes;
  int64_t length;  // from its start until all work was done
} jpp_trace_t;

// Tracing costs an event per run. Off by default; takes effect with the next step.
JPP_API void jpp_runtime_set_tracing(jpp_runtime_t* runtime, bool enabled);

// While there is an observer, all steps of all runtimes are traced, and the thread that
// finishes a step calls the observer if the step succeeded, one call at a time. NULL
// removes the observer and waits for the steps in flight, two seconds at most; the former
// observer is not called any more after this returns. Any thread may call this, but not
// an observer.
typedef void (*jpp_trace_observer_t)(void* user, const jpp_trace_t* trace);
JPP_API void jpp_trace_observe(jpp_trace_observer_t observer, void* user);

// The trace of the last traced step, borrowed until the next step is called. NULL before
// the first one, and when it failed. Call jpp_runtime_await() first.
JPP_API const jpp_trace_t* jpp_runtime_last_trace(const jpp_runtime_t* runtime);
// The trace of the step `back` steps before the last one. `back` is less than
// `steps_in_flight`: only steps that overlap are kept. NULL as above, or if that step was
// not traced.
JPP_API const jpp_trace_t* jpp_runtime_trace(const jpp_runtime_t* runtime, uint32_t back);

// The time that each stage of a loop took for one microbatch, in milliseconds: the mean
// over the runs of each task, since a short run may be recorded together with its
// neighbour. Half of a whole backward counts as input gradient. JPP_INVALID_ARGUMENT for
// an unknown loop, and unless `count`, the length of `out_costs`, is the loop's number of
// stages.
JPP_API jpp_status_t* jpp_trace_costs(const jpp_trace_t* trace, uint32_t loop,
                                      uint32_t count, jpp_cost_t* out_costs) JPP_MUST_USE;

// Calls the step a few times on the same arguments, none of which may be donated, and
// returns the mean times of the stages without the first call, in ms per microbatch: the
// stages of each loop, one loop after the other. Tasks that share an executable are
// equal, and measured together. out_spreads: the standard deviations of their runs; each
// kind of gradient gets half of a whole backward's time and half of its deviation. Waits,
// and leaves tracing on. JPP_CANCELLED if interrupted, JPP_INVALID_ARGUMENT unless
// `count`, the length of both lists, is the number of all stages.
JPP_API jpp_status_t* jpp_runtime_measure(jpp_runtime_t* runtime,
                                          jpp_array_t* const* args,
                                          JPP_OPTIONAL const jpp_interrupt_t* interrupt,
                                          uint32_t count, jpp_cost_t* out_costs,
                                          jpp_cost_t* out_spreads) JPP_MUST_USE;

#endif  // JAXPP_RUNTIME_H_
