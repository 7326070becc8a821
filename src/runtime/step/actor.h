// Actor: one rank's program, resolved when the runtime is created so that the step loop
// looks nothing up. issue.c issues its instructions one after another.
#ifndef JPP_RUNTIME_ACTOR_H_
#define JPP_RUNTIME_ACTOR_H_

#include "flight/record.h"
#include "jaxpp/runtime.h"
#include "jaxpp/transport.h"
#include "runtime/cluster/deadline.h"
#include "runtime/observe/trace.h"

// The data that all runs of a task share.
typedef struct jpp_task_call {
  jpp_executable_t* executable;
  // [results] of a task without executable, else NULL: what each device copies from its
  // shard of an argument, and the type of what it makes, its shard of the result.
  const jpp_copy_t* copies;
  const jpp_type_t* shard_types;
  int32_t device;           // as in jpp_execute_t
  uint32_t num_donated;     // args that are dead after a run
  const uint32_t* donated;  // [num_donated] positions among the args
} jpp_task_call_t;

typedef struct jpp_outbox jpp_outbox_t;
typedef struct jpp_inbox jpp_inbox_t;

// A channel, with the state of both ends.
typedef struct jpp_link {
  jpp_channel_t* channel;
  const jpp_plan_channel_t* plan;
  const uint32_t* devices;  // [num_devices] of the destination
  uint32_t num_devices;
  uint32_t sends, recvs;   // instructions
  uint32_t first_message;  // in jpp_tracer_t.message_ends
  bool remote;             // to or from a rank of another process
  // Each rank takes the buffers of the other.
  bool same_buffers;
  // Of a remote link to which this process sends; else NULL.
  jpp_outbox_t* outbox;
  // Of a remote link from which this process receives; else NULL.
  jpp_inbox_t* inbox;
  uint64_t sent;      // by the sender
  uint64_t received;  // by the receiver
} jpp_link_t;

typedef struct jpp_actor_instr {
  uint8_t kind;  // jpp_instr_kind_t
  uint32_t num_args, num_results;
  uint32_t run;              // RUN: the number of the run in the actor's program
  uint32_t source;           // index in the program
  uint32_t message;          // SEND, RECV: the number of the message in its channel
  const uint32_t* operands;  // registers, args before results
  const jpp_task_call_t* call;
  jpp_link_t* link;
  jpp_deadline_wait_t* wait;  // SEND, RECV to or from another process; else NULL
  jpp_memory_t memory;        // MOVE: the memory of the result
  bool moves;  // SEND: the receiver gets the buffers themselves, not copies
  // SEND, RECV: value << 32 | microbatch.
  uint64_t tag;
  // Bytes that become live in the memory of each device, less those that die.
  int64_t live_bytes;
} jpp_actor_instr_t;

// The state that an actor keeps for one step until it is done; each step in flight has
// one. Arrays of buffers and events are [index][device], one row after another.
typedef struct jpp_actor_step {
  jpp_buffer_t** inputs;   // [num_inputs]
  bool* is_copy;           // [num_inputs] the step made a copy
  jpp_buffer_t** outputs;  // [num_outputs]
  // [num_runs] taken when the run was issued.
  jpp_event_t** events;
  // [num_runs] position among the runs of all actors, in the order of issue.
  uint64_t* order;
  jpp_event_t** output_events;  // [num_outputs]
  uint32_t runs;                // runs issued so far
  size_t settled;               // leading events of runs that are known to have succeeded
  jpp_status_t* error;          // the reason why the actor stopped issuing
  uint64_t error_order;
  jpp_actor_trace_t* trace;  // NULL: the step is not traced
} jpp_actor_step_t;

typedef struct jpp_actor {
  jpp_runtime_t* runtime;
  const jpp_program_t* program;  // empty for a rank of another process
  const uint32_t* devices;       // [devices_per_rank]; JPP_NO_DEVICE from num_devices on
  uint32_t num_devices;          // at most devices_per_rank
  uint32_t num_instrs, num_runs;
  jpp_actor_instr_t* instrs;  // those of the program, without runs of tasks without ops
  jpp_buffer_t** regs;
  jpp_buffer_t** constants;             // owned for the lifetime of the runtime
  jpp_buffer_t*** args;                 // [devices_per_rank], rows for jpp_execute_t
  jpp_buffer_t*** results;              // [devices_per_rank]
  void** message;                       // [devices_per_rank]
  const bool* output_needs_event;       // [num_outputs] not covered by the event of a run
  const jpp_memory_t* output_memories;  // [num_outputs]
  uint64_t given_bytes;  // inputs, constants and receive slots, in device memory

  jpp_flight_row_t* flight;  // NULL: not recorded

  // Whether a thread issues for this actor; see crew.h.
  atomic_bool taken;

  // The step that is being issued.
  jpp_actor_step_t* step;
  uint32_t at;          // next instruction
  bool done;            // all instructions are issued and the outputs copied
  int64_t waits_since;  // since when instruction `at` waits for another process; 0: it
                        // does not wait
  // The position in the program that other processes see; written only if there is a
  // network.
  _Atomic uint32_t shown;
  uint64_t live_bytes;  // while tracing
} jpp_actor_t;

// Resolves everything that needs no device (actor.c).
jpp_status_t* jpp__actor_resolve(jpp_runtime_t* runtime, uint32_t rank) JPP_MUST_USE;

// The tag of a message, the same on both ends: value << 32 | microbatch.
uint64_t jpp__plan_message_tag(const jpp_plan_t* plan, const jpp_program_t* program,
                               const jpp_instr_t* instr);

// Allocates the state that a resolved actor needs for one more step in flight.
jpp_status_t* jpp__actor_allocate_step(const jpp_actor_t* actor,
                                       jpp_actor_step_t* step) JPP_MUST_USE;

typedef enum jpp_advance {
  JPP_ADVANCE_BLOCKED,  // nothing could be issued
  JPP_ADVANCE_SOME,
  JPP_ADVANCE_FAILED,  // the actor has an error
} jpp_advance_t;

// Issues instructions until the second run, a blocked instruction or the end.
jpp_advance_t jpp__actor_advance(jpp_actor_t* actor);

// The failure of the actor's first run that failed, without its place; NULL if none of
// its runs failed up to the first that has not ended.
jpp_status_t* jpp__actor_known_failure(const jpp_actor_t* actor, jpp_actor_step_t* step);

#endif  // JPP_RUNTIME_ACTOR_H_
