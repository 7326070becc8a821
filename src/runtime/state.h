// The state of a runtime. Who writes what:
//
// A step in flight belongs to one thread at a time: to the caller until it is submitted,
// then to the issuing thread, then to the finishing one; queue.h passes it on. Actors,
// links and what they point to belong to the issuing thread, or, while it issues with
// helpers, each actor to the one thread that issues for it; only `jpp_link_t.received`,
// `jpp_actor_t.shown`, `order`, `jpp_step_t.halt` and what crew.c names are shared. The
// network and its outboxes have a mutex, for the sake of pulse.c.
#ifndef JPP_RUNTIME_STATE_H_
#define JPP_RUNTIME_STATE_H_

#include "array/array.h"
#include "base/arena.h"
#include "runtime/actor.h"
#include "runtime/crew.h"
#include "runtime/pace.h"
#include "runtime/peers.h"
#include "runtime/pulse.h"
#include "runtime/queue.h"
#include "runtime/waker.h"

// Whose outcome is awaited by a caller of jpp_runtime_step(): lives with that.
typedef struct jpp_step_waiter {
  const jpp_step_io_t* io;
  jpp_status_t* status;
} jpp_step_waiter_t;

// One step in flight.
typedef struct jpp_step {
  uint64_t number;           // from 1
  jpp_actor_step_t* actors;  // [ranks]
  unsigned checks;           // what to find, as base/finite.h has it
  jpp_step_trace_t* trace;   // NULL: it is not traced
  _Atomic int halt;          // jpp_halt_t
  atomic_bool cancelled;     // this one alone
  jpp_status_t* failure;     // known before anything was issued, or because of a halt
  // A call: its arrays, held. All NULL for a step on bare buffers, which has a waiter.
  jpp_array_t** args;     // [graph->num_args]
  jpp_array_t** results;  // [graph->num_outputs]
  jpp_outcome_t* outcome;
  jpp_step_waiter_t* waiter;
} jpp_step_t;

// The ranks that hold a result.
typedef struct jpp_holders {
  uint32_t count;
  uint32_t* ranks;
} jpp_holders_t;

struct jpp_runtime {
  jpp_client_t* client;
  const jpp_plan_t* plan;
  uint32_t devices_per_rank;
  jpp_arena_t arena;
  jpp_transport_t* transport;    // between the ranks of this process
  const uint32_t* rank_process;  // [ranks]; NULL: all are this process'
  uint32_t process;
  jpp_transport_t* network;       // to other processes' ranks; NULL: there are none
  pthread_mutex_t network_mutex;  // of it, and of the outboxes and inboxes
  jpp_pulse_t pulse;
  jpp_waker_t waker;     // of the issuing thread; if there is a network
  bool on_host;          // the devices' memory is the host's
  bool device_messages;  // values go to other processes from and to device memory
  uint32_t stall_timeout_ms, step_timeout_ms;
  jpp_peers_t peers;
  jpp_pace_t pace;
  jpp_link_t* links;  // [plan->num_channels]
  jpp_task_call_t* calls;
  jpp_actor_t* actors;  // [plan->ranks]
  jpp_crew_t crew;
  jpp_queue_t queue;

  jpp_step_t* step;           // that is being issued
  _Atomic uint64_t begun;     // the number of the last one that was
  _Atomic uint64_t order;     // runs, sends and output copies of it begun
  _Atomic uint64_t progress;  // rounds in which an issuer issued something

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

bool jpp_runtime_has_rank(const jpp_runtime_t* runtime, uint32_t rank);
// With several processes: nobody can go on after a failure, of which the others are told.
// The first one counts; `status` is only read. Any thread.
void jpp_runtime_break(jpp_runtime_t* runtime, const jpp_status_t* status);
// With several processes: from now on devices have a bounded time to end their work.
void jpp_runtime_note_failure(jpp_runtime_t* runtime);
// A copy of it, or NULL.
jpp_status_t* jpp_runtime_breakage(const jpp_runtime_t* runtime) JPP_MUST_USE;
// Whether the step is to stop.
bool jpp_step_is_halted(const jpp_runtime_t* runtime, const jpp_step_t* step);
// In the issuing thread: everything that the devices are to do.
void jpp_step_issue(jpp_runtime_t* runtime, jpp_step_t* step);
// In the finishing thread: waits until it is done, and hands out what came of it.
void jpp_step_finish(jpp_runtime_t* runtime, jpp_step_t* step);

// Whether what was found is what argument `arg` is to be, or the error that says so.
jpp_status_t* jpp_call_check_type(const jpp_runtime_t* runtime, uint32_t arg,
                                  const jpp_array_type_t* found) JPP_MUST_USE;

// call.c: arguments into buffers, under the names of the runtime's inputs; the step's
// failure if one of them failed.
jpp_status_t* jpp_call_open_args(jpp_runtime_t* runtime, jpp_step_t* step) JPP_MUST_USE;
// All is issued: the arguments have no reader any more, and the results their buffers if
// `success`.
void jpp_call_issued(jpp_runtime_t* runtime, jpp_step_t* step, bool success);
// Owns `status`.
void jpp_call_finished(jpp_runtime_t* runtime, jpp_step_t* step, jpp_status_t* status);

#endif  // JPP_RUNTIME_STATE_H_
