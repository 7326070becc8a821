// Visits each actor in turn until all are done. A blocked actor may wait for another one
// of this process, or for another process. Within a process, a round in which no actor
// advances proves a deadlock; for other processes, only a timeout can decide.
#include "runtime/step/issuer.h"

#include <sched.h>

#include "base/clock.h"
#include "runtime/cluster/network.h"
#include "runtime/cluster/peer_state.h"
#include "runtime/step/state.h"

// Messages of other processes usually arrive soon: a hop takes tens of microseconds. If
// processes share cores, however, spinning takes a core from a process that has work.
enum { kNetworkYields = 200 };

// Visits each unfinished actor once; returns whether one of them advanced.
static bool issue_round(jpp_runtime_t* runtime, bool* out_all_done) {
  bool some = false;
  *out_all_done = true;
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    jpp_actor_t* actor = &runtime->actors[r];
    if (actor->done) continue;
    if (jpp__step_is_halted(runtime, runtime->step)) return some;
    jpp_advance_t advance = jpp__actor_advance(actor);
    if (advance == JPP_ADVANCE_FAILED) runtime->step->halt = JPP_HALT_FAILED;
    some |= advance == JPP_ADVANCE_SOME;
    *out_all_done &= actor->done;
  }
  return some;
}

// An actor whose wait for another process exceeds its limit, or NULL. Only time during
// which this process was idle and all processes were in the step counts, because the
// others may be waiting for this process.
static const jpp_actor_t* find_late(jpp_runtime_t* runtime, int64_t quiet_since,
                                    int64_t now) {
  jpp_deadline_t* deadline = &runtime->deadline;
  if (!deadline->all_begun && jpp__peer_state_all_begun(runtime, runtime->begun)) {
    deadline->all_begun = now;
  }
  int64_t waited = jpp__deadline_waited(deadline, quiet_since, now);
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    const jpp_actor_t* actor = &runtime->actors[r];
    if (!actor->waits_since) continue;
    const jpp_deadline_wait_t* wait = actor->instrs[actor->at].wait;
    if (waited > jpp__deadline_limit(deadline, wait, runtime->step_timeout_ms))
      return actor;
  }
  return NULL;
}

// Called after a round in which nothing was issued and nothing arrived.
static const jpp_actor_t* wait_for_network(jpp_runtime_t* runtime, int64_t quiet_since,
                                           uint32_t idle_rounds) {
  const jpp_actor_t* late = NULL;
  int64_t now = jpp__clock_now(), quiet = now - quiet_since;
  if (quiet / JPP_NANOSECONDS_OF_MS > runtime->stall_timeout_ms) {
    runtime->step->halt = JPP_HALT_STALLED;
  } else if (quiet > kJppDeadlineQuiet && (late = find_late(runtime, quiet_since, now))) {
    runtime->step->halt = JPP_HALT_LATE;
  } else if (idle_rounds < kNetworkYields) {
    sched_yield();
  } else {
    jpp__network_wait(runtime);
  }
  return late;
}

const jpp_actor_t* jpp__issuer_run(jpp_runtime_t* runtime) {
  const jpp_actor_t* late = NULL;
  bool all_done = false;
  int64_t quiet_since = runtime->network ? jpp__clock_now() : 0;
  for (uint32_t idle_rounds = 0; !jpp__step_is_halted(runtime, runtime->step);) {
    bool issued = issue_round(runtime, &all_done);
    bool arrived = jpp__network_progress(runtime);
    if (all_done) break;
    if (issued && runtime->network) quiet_since = jpp__clock_now();
    if (issued || arrived) {
      idle_rounds = 0;
    } else if (runtime->network) {
      late = wait_for_network(runtime, quiet_since, idle_rounds++);
    } else {
      runtime->step->halt = JPP_HALT_STUCK;
    }
  }
  return late;
}
