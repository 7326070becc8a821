// The state of a runtime. Which thread writes what:
//
// A step in flight belongs to one thread at a time: to the caller until it is submitted,
// then to the issuing thread, then to the finishing thread; queue.h passes it on. Actors,
// links and what they point to belong to the issuing thread; only `jpp_actor_t.shown` and
// `jpp_step_t.halt` are shared. If the issuing thread has helpers (crew.h), an actor
// belongs to the thread that has taken it, and an end of a link to its actor. The
// network, its outboxes and inboxes have a mutex, because heartbeat.c also uses them.
#ifndef JPP_RUNTIME_STATE_H_
#define JPP_RUNTIME_STATE_H_

#include "array/array.h"
#include "base/arena.h"
#include "runtime/cluster/deadline.h"
#include "runtime/cluster/heartbeat.h"
#include "runtime/cluster/peer_state.h"
#include "runtime/cluster/wakeup.h"
#include "runtime/step/actor.h"
#include "runtime/step/crew.h"
#include "runtime/step/issuer.h"
#include "runtime/step/queue.h"

// One step in flight.
typedef struct jpp_step {
  uint64_t number;           // from 1
  jpp_actor_step_t* actors;  // [ranks]
  unsigned checks;           // flags of base/finite.h
  jpp_step_trace_t* trace;   // NULL: the step is not traced
  _Atomic jpp_halt_t halt;   // set by the issuing thread and its helpers
  jpp_status_t* failure;     // a failure before anything was issued, or because of a halt
  jpp_array_t** args;        // [graph->num_args] held
  jpp_array_t** results;     // [graph->num_outputs] held
  jpp_outcome_t* outcome;
} jpp_step_t;

// The ranks that hold a result.
typedef struct jpp_holders {
  uint32_t count;
  uint32_t* ranks;
} jpp_holders_t;

struct jpp_runtime {
  jpp_client_t* client;
  const jpp_plan_t* plan;
  jpp_params_t params;  // of the graph's arguments, in `arena`
  uint32_t devices_per_rank;
  jpp_arena_t arena;
  jpp_transport_t* transport;    // between the ranks of this process
  const uint32_t* rank_process;  // [ranks] NULL: this process has all ranks
  uint32_t process;
  jpp_transport_t* network;       // to ranks of other processes; NULL: there are none
  pthread_mutex_t network_mutex;  // guards the network, outboxes and inboxes
  jpp_heartbeat_t heartbeat;
  jpp_wakeup_t wakeup;   // wakes the issuing thread; used if there is a network
  bool on_host;          // device memory is host memory
  bool device_messages;  // the transport between processes takes device memory
  uint32_t stall_timeout_ms, step_timeout_ms;
  jpp_peer_state_t peer_state;
  jpp_deadline_t deadline;
  jpp_link_t* links;          // [plan->num_channels]
  jpp_link_t** remote_links;  // [num_remote_links] links to and from other processes
  uint32_t num_remote_links;
  jpp_task_call_t* calls;
  void* zeros;          // [zero_bytes]; NULL: there is no memory for them
  uint64_t zero_bytes;  // of the largest array that a task fills with zeros itself
  jpp_actor_t* actors;  // [plan->ranks]
  jpp_queue_t queue;
  jpp_crew_t crew;

  jpp_step_t* step;        // the step that is being issued
  _Atomic uint64_t begun;  // the number of the last step whose issue has begun
  _Atomic uint64_t order;  // runs, sends and output copies begun in it

  jpp_holders_t* holders;  // [graph->num_outputs]
  // All steps up to this one are cancelled.
  _Atomic uint64_t cancelled;
  // Held: the outcome of the last failed step; under the arrays' lock.
  jpp_outcome_t* failed;
  // For good: another process has failed or left.
  atomic_bool broken;
  // When the failure was first known; nanoseconds, 0: no failure.
  _Atomic int64_t failed_at;
  atomic_bool given_up;    // devices did not finish a failed step in time
  jpp_status_t* breakage;  // the reason; under the arrays' lock
  bool breakage_told;      // whether it was reported; under the same lock
  atomic_uint checks_wanted;
  jpp_tracer_t tracer;
  jpp_flight_t flight;
};

bool jpp__runtime_has_rank(const jpp_runtime_t* runtime, uint32_t rank);
// With several processes a failure ends the job: records the first one and tells the
// other processes. `status` is only read. Any thread.
void jpp__runtime_break(jpp_runtime_t* runtime, const jpp_status_t* status);
// With several processes: the devices' remaining work has a bounded time from now on.
void jpp__runtime_note_failure(jpp_runtime_t* runtime);
// A copy of the breakage, or NULL.
jpp_status_t* jpp__runtime_breakage(const jpp_runtime_t* runtime) JPP_MUST_USE;
// Whether the step must stop.
bool jpp__step_is_halted(const jpp_runtime_t* runtime, const jpp_step_t* step);
// Issues all of the step's work to the devices, on the issuing thread.
void jpp__step_issue(jpp_runtime_t* runtime, jpp_step_t* step);
// Waits for the step on the finishing thread, and publishes its outcome.
void jpp__step_finish(jpp_runtime_t* runtime, jpp_step_t* step);

// call.c. Releases the arguments, results and outcome that the step holds.
void jpp__call_release(const jpp_runtime_t* runtime, jpp_step_t* step);
// handover.c. Moves the arguments' buffers to the step's inputs. Returns the step's
// failure if an argument has failed.
jpp_status_t* jpp__call_open_args(jpp_runtime_t* runtime, jpp_step_t* step) JPP_MUST_USE;
// Called when all is issued: the arguments have no reader any more, and if `success` the
// results get their buffers.
void jpp__call_issued(jpp_runtime_t* runtime, jpp_step_t* step, bool success);
// Owns `status`.
void jpp__call_finished(jpp_runtime_t* runtime, jpp_step_t* step, jpp_status_t* status);

// copies.c. Prepares the tasks that copy without an executable; `shard_dims` as in
// jpp_runtime_options_t.
jpp_status_t* jpp__copies_resolve(jpp_runtime_t* runtime,
                                  const uint64_t* const* shard_dims) JPP_MUST_USE;
// Runs one: fills actor->results.
jpp_status_t* jpp__copies_make(const jpp_actor_t* actor,
                               const jpp_actor_instr_t* instr) JPP_MUST_USE;

#endif  // JPP_RUNTIME_STATE_H_
