// Trace: when each run was issued, when it could begin and when it ended.
#ifndef JPP_RUNTIME_TRACE_H_
#define JPP_RUNTIME_TRACE_H_

#include <stdatomic.h>

#include "jaxpp/runtime.h"

struct jpp_actor;
struct jpp_actor_instr;
struct jpp_step;

typedef struct jpp_run_waiter {
  jpp_event_waiter_t base;
  _Atomic uint64_t* pending;
  int64_t end;  // CLOCK_MONOTONIC, nanoseconds
} jpp_run_waiter_t;

typedef struct jpp_actor_trace {
  jpp_run_waiter_t* waiters;  // [num_runs][device]
  jpp_trace_run_t* runs;      // [num_runs]
  uint64_t peak_live_bytes;
  // When its last run ended: CLOCK_MONOTONIC, nanoseconds.
  int64_t last_end;
} jpp_actor_trace_t;

// The trace of one step. There is one for each step in flight, and the same number again
// for steps that are done.
typedef struct jpp_step_trace {
  jpp_trace_t trace;
  jpp_actor_trace_t* actors;  // [ranks]
  uint64_t* peaks;            // [ranks] the trace's peak_live_bytes
  _Atomic uint64_t pending;   // callbacks that have not run yet
  bool observed;              // one of the steps for which a removed observer waits
  bool complete;
} jpp_step_trace_t;

typedef struct jpp_tracer {
  atomic_bool wanted;
  uint32_t count;           // number of `steps`
  jpp_step_trace_t* steps;  // [count] step n uses n % count
  uint64_t last;            // the last traced step that is done; 0: none
  int64_t* message_ends;    // [messages of all channels]
  int64_t* register_ends;   // [registers of the largest program]
  uint32_t* heads;          // [ranks] runs of each that a walk by device has visited
} jpp_tracer_t;

jpp_status_t* jpp__trace_allocate(jpp_runtime_t* runtime) JPP_MUST_USE;
// Called before the step is issued; traces it if tracing is on.
void jpp__trace_begin(jpp_runtime_t* runtime, struct jpp_step* step);
// Counts bytes that are live on each device from now on; negative: no longer.
void jpp__trace_count(struct jpp_actor* actor, int64_t bytes);
// Records the end of a run that was issued at `issued`.
jpp_status_t* jpp__trace_watch(struct jpp_actor* actor, uint32_t run,
                               int64_t issued) JPP_MUST_USE;
// Waits for the callbacks of all events, which are ready.
void jpp__trace_drain(struct jpp_step* step);
void jpp__trace_finish(jpp_runtime_t* runtime, struct jpp_step* step, bool success);

#endif  // JPP_RUNTIME_TRACE_H_
