// The state of a runtime. Who writes what:
//
// A step has two phases. While issuing, an actor and what it points to belong to the one
// thread that issues for it; only `jpp_link_t.received`, `halt`, `order` and what crew.c
// names are shared. Before and after, everything belongs to the thread that runs the
// step, which holds `step_mutex`.
#ifndef JPP_RUNTIME_STATE_H_
#define JPP_RUNTIME_STATE_H_

#include "base/arena.h"
#include "runtime/actor.h"
#include "runtime/cancel.h"
#include "runtime/crew.h"

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
  _Atomic uint64_t progress;  // rounds in which an issuer issued something

  atomic_uint checks_wanted;
  unsigned checks;  // this step: what to find, as base/finite.h has it
  atomic_bool tracing_wanted;
  bool tracing;  // this step
  bool traced;   // `trace` is complete
  jpp_trace_t trace;
  uint64_t* trace_peaks;  // its peak_live_bytes
  int64_t trace_start;
  int64_t* message_ends;           // [messages of all channels]
  int64_t* register_ends;          // [registers of the largest program]
  _Atomic uint64_t trace_pending;  // callbacks to come
};

#endif  // JPP_RUNTIME_STATE_H_
