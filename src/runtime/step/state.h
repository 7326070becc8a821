// The state of a runtime. Who writes what:
//
// A step in flight belongs to one thread at a time: to the caller until it is submitted,
// then to the issuing thread, then to the finishing one; queue.h passes it on. Actors,
// links and what they point to belong to the issuing thread; only `jpp_actor_t.shown` and
// `jpp_step_t.halt` are shared. The network and its outboxes have a mutex, for the sake
// of heartbeat.c.
#ifndef JPP_RUNTIME_STATE_H_
#define JPP_RUNTIME_STATE_H_

#include "array/array.h"
#include "base/arena.h"
#include "runtime/cluster/deadline.h"
#include "runtime/cluster/heartbeat.h"
#include "runtime/cluster/peer_state.h"
#include "runtime/cluster/wakeup.h"
#include "runtime/step/actor.h"
#include "runtime/step/issuer.h"
#include "runtime/step/queue.h"

// One step in flight.
typedef struct jpp_step {
  uint64_t number;           // from 1
  jpp_actor_step_t* actors;  // [ranks]
  unsigned checks;           // what to find, as base/finite.h has it
  jpp_step_trace_t* trace;   // NULL: it is not traced
  jpp_halt_t halt;           // the issuing thread's
  jpp_status_t* failure;     // known before anything was issued, or because of a halt
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
  jpp_params_t params;  // of the graph, in `arena`
  uint32_t devices_per_rank;
  jpp_arena_t arena;
  jpp_transport_t* transport;    // between the ranks of this process
  const uint32_t* rank_process;  // [ranks]; NULL: all are this process'
  uint32_t process;
  jpp_transport_t* network;       // to other processes' ranks; NULL: there are none
  pthread_mutex_t network_mutex;  // of it, and of the outboxes and inboxes
  jpp_heartbeat_t heartbeat;
  jpp_wakeup_t wakeup;   // of the issuing thread; if there is a network
  bool on_host;          // the devices' memory is the host's
  bool device_messages;  // values go to other processes from and to device memory
  uint32_t stall_timeout_ms, step_timeout_ms;
  jpp_peer_state_t peer_state;
  jpp_deadline_t deadline;
  jpp_link_t* links;          // [plan->num_channels]
  jpp_link_t** remote_links;  // [num_remote_links] those to and from other processes
  uint32_t num_remote_links;
  jpp_task_call_t* calls;
  jpp_actor_t* actors;  // [plan->ranks]
  jpp_queue_t queue;

  jpp_step_t* step;        // that is being issued
  _Atomic uint64_t begun;  // the number of the last one that was
  uint64_t order;          // runs, sends and output copies of it begun

  jpp_holders_t* holders;      // [graph->num_outputs]
  _Atomic uint64_t cancelled;  // all steps up to this one
  jpp_outcome_t* failed;       // held: of the last step that failed; under the
                               // arrays' lock
  atomic_bool broken;          // for good: another process does not go on
  _Atomic int64_t failed_at;   // when it was first known to fail; nanoseconds, 0: not
  atomic_bool given_up;        // the devices still had work of a step then
  jpp_status_t* breakage;      // why; under the arrays' lock
  bool breakage_told;          // under the same lock
  atomic_uint checks_wanted;
  jpp_tracer_t tracer;
  jpp_flight_t flight;
};

bool jpp__runtime_has_rank(const jpp_runtime_t* runtime, uint32_t rank);
// With several processes a failure ends all of them: records the first one and tells the
// other processes. `status` is only read. Any thread.
void jpp__runtime_break(jpp_runtime_t* runtime, const jpp_status_t* status);
// With several processes: from now on devices have a bounded time to end their work.
void jpp__runtime_note_failure(jpp_runtime_t* runtime);
// A copy of it, or NULL.
jpp_status_t* jpp__runtime_breakage(const jpp_runtime_t* runtime) JPP_MUST_USE;
// Whether the step is to stop.
bool jpp__step_is_halted(const jpp_runtime_t* runtime, const jpp_step_t* step);
// In the issuing thread: everything that the devices are to do.
void jpp__step_issue(jpp_runtime_t* runtime, jpp_step_t* step);
// In the finishing thread: waits until it is done, and hands out what came of it.
void jpp__step_finish(jpp_runtime_t* runtime, jpp_step_t* step);

// call.c. Gives up the step's holds of its arguments, results and outcome.
void jpp__call_release(const jpp_runtime_t* runtime, jpp_step_t* step);
// handover.c. The arguments' buffers become the step's inputs. The step's failure if an
// argument has failed.
jpp_status_t* jpp__call_open_args(jpp_runtime_t* runtime, jpp_step_t* step) JPP_MUST_USE;
// All is issued: the arguments have no reader any more, and the results their buffers if
// `success`.
void jpp__call_issued(jpp_runtime_t* runtime, jpp_step_t* step, bool success);
// Owns `status`.
void jpp__call_finished(jpp_runtime_t* runtime, jpp_step_t* step, jpp_status_t* status);

#endif  // JPP_RUNTIME_STATE_H_
