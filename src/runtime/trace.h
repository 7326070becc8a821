// Trace: when each run was issued, could begin and had ended.
#ifndef JPP_RUNTIME_TRACE_H_
#define JPP_RUNTIME_TRACE_H_

#include "jaxpp/runtime.h"

struct jpp_actor;
struct jpp_actor_instr;

typedef struct jpp_run_waiter {
  jpp_event_waiter_t base;
  _Atomic uint64_t* pending;
  int64_t end;  // CLOCK_MONOTONIC, nanoseconds
} jpp_run_waiter_t;

jpp_status_t* jpp_trace_allocate(jpp_runtime_t* runtime) JPP_MUST_USE;
int64_t jpp_trace_now(void);
void jpp_trace_begin(jpp_runtime_t* runtime);
// Adds what the instruction adds to the live bytes.
void jpp_trace_count(struct jpp_actor* actor, const struct jpp_actor_instr* instr);
// Has the end of a run noted, which was issued at `issued`.
jpp_status_t* jpp_trace_watch(struct jpp_actor* actor, uint32_t run,
                              int64_t issued) JPP_MUST_USE;
// All events are ready: waits for their callbacks.
void jpp_trace_drain(jpp_runtime_t* runtime);
void jpp_trace_finish(jpp_runtime_t* runtime);

#endif  // JPP_RUNTIME_TRACE_H_
