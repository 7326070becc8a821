// What the files of the runtime share.
//
//   runtime.c     create, destroy
//   actor.c       an actor's instructions, resolved when the runtime is created
//   issue.c       one actor's instructions, issued one after another
//   crew.c        the threads that issue, and how they stop
//   step.c        a step from its inputs to its outputs
//   nans.c        results that are no numbers, for debugging
//   cancel.c      waiting that can be given up
//   failure.c     which run failed first, in words
//   trace.c       what happened when; trace_json.c and trace_draw.c show it
//
// A step has two phases. While issuing, an actor and what it points to belong to the one
// thread that issues for it; only `jpp_link_t.received`, `halt`, `order` and what crew.c
// names are shared. Before and after, everything belongs to the thread that runs the
// step, which holds `step_mutex`.
#ifndef JPP_RUNTIME_ACTOR_H_
#define JPP_RUNTIME_ACTOR_H_

#include <pthread.h>
#include <stdatomic.h>

#include "base/arena.h"
#include "jaxpp/runtime.h"
#include "jaxpp/transport.h"

// What all runs of a task share.
typedef struct jpp_task_call {
  jpp_executable_t* executable;
  int32_t device;           // as jpp_execute_t has it
  uint32_t num_donated;     // args that are dead after a run
  const uint32_t* donated;  // [num_donated] positions among the args
} jpp_task_call_t;

// A channel with what both ends know about it.
typedef struct jpp_link {
  jpp_channel_t* channel;
  const jpp_plan_channel_t* plan;
  const uint32_t* devices;    // [devices_per_rank] of the destination
  uint32_t sends, recvs;      // instructions
  uint32_t first_message;     // in jpp_runtime.message_ends
  uint64_t sent;              // sender's
  _Atomic uint64_t received;  // written by the receiver
} jpp_link_t;

typedef struct jpp_actor_instr {
  uint8_t kind;  // jpp_instr_kind_t
  uint32_t num_args, num_results;
  uint32_t run;              // RUN: which of the actor's runs
  uint32_t source;           // index in the program
  uint32_t message;          // SEND, RECV: which of the channel's messages
  const uint32_t* operands;  // registers, args before results
  const jpp_task_call_t* call;
  jpp_link_t* link;
  uint64_t tag;        // SEND, RECV: value << 32 | microbatch
  int64_t live_bytes;  // what the instruction adds to the live bytes of each device
} jpp_actor_instr_t;

typedef struct jpp_run_waiter {
  jpp_event_waiter_t base;
  _Atomic uint64_t* pending;
  int64_t end;  // CLOCK_MONOTONIC, nanoseconds
} jpp_run_waiter_t;

// Arrays of buffers and events are [index][device], one row after another.
typedef struct jpp_actor {
  jpp_runtime_t* runtime;
  const jpp_program_t* program;
  const uint32_t* devices;  // [devices_per_rank]
  uint32_t num_instrs, num_runs;
  jpp_actor_instr_t* instrs;  // the program's, less runs of tasks without ops
  jpp_buffer_t** regs;
  jpp_buffer_t** constants;        // owned for the lifetime of the runtime
  jpp_buffer_t*** args;            // [devices_per_rank], rows for jpp_execute_t
  jpp_buffer_t*** results;         // [devices_per_rank]
  void** message;                  // [devices_per_rank]
  jpp_event_t** events;            // [num_runs] taken when the run was issued
  uint64_t* order;                 // [num_runs] in which all actors' runs were issued
  jpp_event_t** output_events;     // [num_outputs]
  const bool* output_needs_event;  // [num_outputs] no run's event stands for it
  jpp_buffer_t** outputs;          // the step's outputs[rank]
  uint64_t given_bytes;            // inputs, constants and receive slots

  // The step at hand.
  uint32_t at;          // next instruction; num_instrs + 1: outputs copied, all done
  uint32_t runs;        // issued
  jpp_status_t* error;  // why it stopped
  uint64_t error_order;
  uint64_t live_bytes, peak_live_bytes;  // when tracing
  jpp_run_waiter_t* waiters;             // [num_runs]
  jpp_trace_run_t* trace;                // [num_runs]
} jpp_actor_t;

typedef enum jpp_halt {
  JPP_HALT_NO,
  JPP_HALT_FAILED,  // an actor has an error
  JPP_HALT_STUCK,   // no actor can go on
  JPP_HALT_CANCELLED,
} jpp_halt_t;

// Issue thread `index` issues for actors index, index + count, ...
typedef struct jpp_issuer {
  jpp_runtime_t* runtime;
  uint32_t index;
  pthread_t thread;  // of all but issuer 0, which is the step's thread
  // The runtime's `progress` when a round without any began; UINT64_MAX: all done.
  _Atomic uint64_t idle_since;
} jpp_issuer_t;

typedef struct jpp_crew {
  uint32_t count;  // issuers, the step's thread included
  uint32_t started;
  jpp_issuer_t* issuers;
  pthread_mutex_t mutex;  // of the rest
  pthread_cond_t changed;
  uint64_t step;     // a step more: begin
  uint32_t working;  // issuers that have not finished it, without the step's thread
  bool stopping;
} jpp_crew_t;

// How a step hears that it is to stop. The step's thread's.
typedef struct jpp_cancel {
  bool (*should_cancel)(void* user);  // NULL: nobody is asked
  void* user;
  int64_t next_question;    // when
  bool wanted;              // the answer was yes
  struct jpp_alarm* alarm;  // NULL until a step had to wait
} jpp_cancel_t;

struct jpp_runtime {
  jpp_client_t* client;
  const jpp_plan_t* plan;
  uint32_t devices_per_rank;
  jpp_arena_t arena;
  jpp_transport_t* transport;
  jpp_link_t* links;  // [plan->num_channels]
  jpp_task_call_t* calls;
  jpp_actor_t* actors;  // [plan->ranks]
  jpp_crew_t crew;
  pthread_mutex_t step_mutex;
  jpp_cancel_t cancel;

  _Atomic int halt;           // jpp_halt_t
  _Atomic uint64_t order;     // runs, sends and output copies begun
  _Atomic uint64_t progress;  // rounds of issuers that got somewhere

  atomic_uint checks_wanted;
  unsigned checks;  // this step: what to find, as base/finite.h has it
  atomic_bool tracing_wanted;
  bool tracing;  // this step
  bool traced;   // `trace` is whole
  jpp_trace_t trace;
  uint64_t* trace_peaks;  // its peak_live_bytes
  int64_t trace_start;
  int64_t* message_ends;           // [messages of all channels]
  int64_t* register_ends;          // [registers of the largest program]
  _Atomic uint64_t trace_pending;  // callbacks to come
};

// --- actor.c

// The parts of an actor that need no device.
jpp_status_t* jpp_actor_resolve(jpp_runtime_t* runtime, uint32_t rank) JPP_MUST_USE;

// --- issue.c

typedef enum jpp_advance {
  JPP_ADVANCE_BLOCKED,  // nothing could be issued
  JPP_ADVANCE_SOME,
  JPP_ADVANCE_FAILED,  // the actor has an error
} jpp_advance_t;

// Issues up to the second run from here, or until blocked or done.
jpp_advance_t jpp_actor_advance(jpp_actor_t* actor);
static inline bool jpp_actor_is_done(const jpp_actor_t* actor) {
  return actor->at > actor->num_instrs;
}

// --- crew.c

jpp_status_t* jpp_crew_start(jpp_runtime_t* runtime, uint32_t count) JPP_MUST_USE;
void jpp_crew_stop(jpp_runtime_t* runtime);
// Issues for all actors until all are done or `halt` says otherwise.
void jpp_crew_issue(jpp_runtime_t* runtime);

// --- cancel.c

// Takes `step_mutex` and prepares the questions; false when the answer was yes meanwhile.
bool jpp_cancel_lock(jpp_runtime_t* runtime, const jpp_step_io_t* io);
// Asks when it is time to. True: the step is to stop.
bool jpp_cancel_poll(jpp_runtime_t* runtime);
// A condition to wait on in slices, and until when to wait before the next poll.
void jpp_cancel_init_condition(pthread_cond_t* condition);
struct timespec jpp_cancel_slice(void);
// Until all events of the step are ready; false: given up, as the step is to stop.
bool jpp_cancel_await(jpp_runtime_t* runtime);
void jpp_cancel_deinit(jpp_runtime_t* runtime);

// --- nans.c

// Waits for the results of the run that was just issued and looks at them.
jpp_status_t* jpp_nans_check(const jpp_actor_t* actor,
                             const jpp_actor_instr_t* instr) JPP_MUST_USE;

// --- failure.c

// Puts the place in front: "rank 2, instruction 14, bwd_2 of microbatch 3".
jpp_status_t* jpp_failure_locate(const jpp_actor_t* actor, uint32_t instr,
                                 jpp_status_t* status);
// "rank 2, output 3 ('loss')".
jpp_status_t* jpp_failure_locate_output(const jpp_actor_t* actor, uint32_t output,
                                        jpp_status_t* status);
// A message that is not the one the receiver was to get. Not located yet.
jpp_status_t* jpp_failure_mismatch(const jpp_actor_t* actor,
                                   const jpp_actor_instr_t* instr, uint64_t found_tag);
// What every actor that is not done waits for.
jpp_status_t* jpp_failure_stuck(const jpp_runtime_t* runtime);

// --- trace.c

jpp_status_t* jpp_trace_allocate(jpp_runtime_t* runtime) JPP_MUST_USE;
int64_t jpp_trace_now(void);
void jpp_trace_begin(jpp_runtime_t* runtime);
// Adds what the instruction adds to the live bytes.
void jpp_trace_count(jpp_actor_t* actor, const jpp_actor_instr_t* instr);
// Has the end of a run noted, which was issued at `issued`.
jpp_status_t* jpp_trace_watch(jpp_actor_t* actor, uint32_t run,
                              int64_t issued) JPP_MUST_USE;
// All events are ready: waits for their callbacks.
void jpp_trace_drain(jpp_runtime_t* runtime);
void jpp_trace_finish(jpp_runtime_t* runtime);

#endif  // JPP_RUNTIME_ACTOR_H_
