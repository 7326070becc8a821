// Visits each actor in turn until all are done. A blocked actor may wait for another one
// of this process, or for another process. Within a process, a round in which no actor
// advances and no other thread issues proves a deadlock; for other processes, only a
// timeout can decide.
#include "runtime/step/issuer.h"

#include "base/clock.h"
#include "runtime/cluster/network.h"
#include "runtime/cluster/peer_state.h"
#include "runtime/step/state.h"

// What a thread found when it visited all actors.
typedef struct round {
  bool some;      // one of them advanced
  bool all_done;  // nothing is left to issue
  bool shared;    // another thread had taken one of them
} round_t;

static void visit(jpp_runtime_t* runtime, jpp_actor_t* actor, round_t* round) {
  if (atomic_exchange_explicit(&actor->taken, true, memory_order_acquire)) {
    round->shared = true;
    round->all_done = false;
    return;
  }
  if (!actor->done) {
    jpp_advance_t advance = jpp__actor_advance(actor);
    if (advance == JPP_ADVANCE_FAILED) runtime->step->halt = JPP_HALT_FAILED;
    if (advance == JPP_ADVANCE_SOME) {
      round->some = true;
      jpp__crew_note_progress(&runtime->crew);
    }
    round->all_done &= actor->done;
  }
  atomic_store_explicit(&actor->taken, false, memory_order_release);
}

// Visits each actor once, beginning with the `share` ranks from `first` on. The other
// ones only get their turn if none of these advanced, and only up to the first that does.
static round_t issue_round(jpp_runtime_t* runtime, uint32_t first, uint32_t share) {
  round_t round = {.all_done = true};
  uint32_t ranks = runtime->plan->ranks;
  for (uint32_t i = 0; i < ranks; ++i) {
    if (jpp__step_is_halted(runtime, runtime->step)) break;
    if (i >= share && round.some) {
      round.all_done = false;
      break;
    }
    visit(runtime, &runtime->actors[(first + i) % ranks], &round);
  }
  return round;
}

// No rank advanced in a whole round. A round also ends when the step is halted, and then
// proves nothing.
static void note_stuck(jpp_runtime_t* runtime) {
  if (!jpp__step_is_halted(runtime, runtime->step)) runtime->step->halt = JPP_HALT_STUCK;
}

void jpp__issuer_share(jpp_runtime_t* runtime, uint32_t thread) {
  jpp_crew_t* crew = &runtime->crew;
  uint32_t ranks = runtime->plan->ranks, threads = crew->num_helpers + 1;
  uint32_t first = thread * ranks / threads, last = (thread + 1) * ranks / threads;
  bool alone = false;  // all others slept when this round began
  while (!jpp__step_is_halted(runtime, runtime->step)) {
    uint64_t seen = atomic_load(&crew->progress);
    round_t round = issue_round(runtime, first, last - first);
    if (round.all_done) break;
    if (round.some) continue;
    if (alone && !round.shared && atomic_load(&crew->progress) == seen) {
      note_stuck(runtime);
    } else {
      alone = !jpp__crew_await_progress(crew, seen);
    }
  }
  jpp__crew_note_progress(crew);  // sleeping threads see that the step has ended
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
static const jpp_actor_t* wait_for_network(jpp_runtime_t* runtime, int64_t quiet_since) {
  const jpp_actor_t* late = NULL;
  int64_t now = jpp__clock_now(), quiet = now - quiet_since;
  if (quiet / JPP_NANOSECONDS_OF_MS > runtime->stall_timeout_ms) {
    runtime->step->halt = JPP_HALT_STALLED;
  } else if (quiet > kJppDeadlineQuiet && (late = find_late(runtime, quiet_since, now))) {
    runtime->step->halt = JPP_HALT_LATE;
  } else {
    jpp__wakeup_begin(&runtime->wakeup);
    jpp__network_wait(runtime, false);
    jpp__wakeup_end(&runtime->wakeup);
  }
  return late;
}

const jpp_actor_t* jpp__issuer_run(jpp_runtime_t* runtime) {
  if (runtime->crew.num_helpers) {
    jpp__crew_call(&runtime->crew);
    jpp__issuer_share(runtime, 0);
    jpp__crew_dismiss(&runtime->crew);
    return NULL;
  }
  const jpp_actor_t* late = NULL;
  int64_t quiet_since = runtime->network ? jpp__clock_now() : 0;
  while (!jpp__step_is_halted(runtime, runtime->step)) {
    round_t round = issue_round(runtime, 0, runtime->plan->ranks);
    bool issued = round.some, arrived = jpp__network_progress(runtime);
    if (round.all_done) break;
    if (issued && runtime->network) quiet_since = jpp__clock_now();
    if (issued || arrived) continue;
    if (runtime->network) {
      late = wait_for_network(runtime, quiet_since);
    } else {
      note_stuck(runtime);
    }
  }
  return late;
}
