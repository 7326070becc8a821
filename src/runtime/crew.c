// The threads that issue. Each takes its actors in turn; what one can not go on with may
// need another's actor, so a thread without progress tries again until it has, or until
// nobody can.
#include <sched.h>
#include <stdio.h>
#include <time.h>

#include "base/clock.h"
#include "base/thread.h"
#include "runtime/network.h"
#include "runtime/peers.h"
#include "runtime/state.h"

// What comes from another process comes soon: a hop costs tens of microseconds. Where
// processes share cores, though, each yield takes one from a process that has work.
enum { kYields = 64, kNetworkYields = 200, kNapNanoseconds = 50000 };
static const uint64_t kAllDone = UINT64_MAX;
static const uint64_t kNotIdleYet = UINT64_MAX - 1;

static void halt_step(jpp_runtime_t* runtime, jpp_halt_t why) {
  int running = JPP_HALT_NO;
  atomic_compare_exchange_strong(&runtime->step->halt, &running, (int)why);
}

// One visit to each actor of the issuer that is not done.
static void issue_round(const jpp_issuer_t* issuer, bool* out_some, bool* out_all_done) {
  jpp_runtime_t* runtime = issuer->runtime;
  *out_some = false;
  *out_all_done = true;
  for (uint32_t r = issuer->index; r < runtime->plan->ranks; r += runtime->crew.count) {
    jpp_actor_t* actor = &runtime->actors[r];
    if (actor->done) continue;
    if (jpp_step_is_halted(runtime, runtime->step)) return;
    jpp_advance_t advance = jpp_actor_advance(actor);
    if (advance == JPP_ADVANCE_FAILED) halt_step(runtime, JPP_HALT_FAILED);
    *out_some |= advance == JPP_ADVANCE_SOME;
    *out_all_done &= actor->done;
  }
}

// Whether every issuer's last round began at this value of `progress` and issued nothing.
// A successful round is counted in `progress` before its issuer declares itself idle
// again, so what any issuer achieved meanwhile shows either in its `idle_since` or in the
// counter.
static bool is_everyone_idle(jpp_runtime_t* runtime, uint64_t since) {
  for (uint32_t i = 0; i < runtime->crew.count; ++i) {
    uint64_t idle = atomic_load(&runtime->crew.issuers[i].idle_since);
    if (idle != since && idle != kAllDone) return false;
  }
  return atomic_load(&runtime->progress) == since;
}

static void back_off(jpp_runtime_t* runtime, uint32_t idle_rounds) {
  struct timespec nap = {.tv_nsec = kNapNanoseconds};
  if (idle_rounds < (runtime->network ? kNetworkYields : kYields)) {
    sched_yield();
  } else if (runtime->network) {
    jpp_network_wait(runtime);
  } else {
    nanosleep(&nap, NULL);
  }
}

// An actor whose instruction may wait for another process for less long than this one has
// had nothing to do, all of them being in the step; NULL: none. What a process does
// itself may be what the others wait for.
static const jpp_actor_t* find_late(jpp_runtime_t* runtime, int64_t quiet_since,
                                    int64_t now) {
  jpp_pace_t* pace = &runtime->pace;
  if (!pace->all_begun && jpp_peers_have_begun(runtime, runtime->begun)) {
    pace->all_begun = now;
  }
  int64_t waited = jpp_pace_waited(pace, quiet_since, now);
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    const jpp_actor_t* actor = &runtime->actors[r];
    if (!actor->waits_since) continue;
    const jpp_pace_wait_t* wait = actor->instrs[actor->at].wait;
    if (waited > jpp_pace_limit(pace, wait, runtime->step_timeout_ms)) return actor;
  }
  return NULL;
}

// Halts a step for which nobody can do anything any more, as far as is known: within a
// process that is certain, of others only time can tell.
static void halt_if_hopeless(jpp_runtime_t* runtime, uint64_t since,
                             int64_t quiet_since) {
  if (!runtime->network) {
    if (is_everyone_idle(runtime, since)) halt_step(runtime, JPP_HALT_STUCK);
    return;
  }
  int64_t now = jpp_clock_now(), quiet = now - quiet_since;
  if (quiet / JPP_NANOSECONDS_OF_MS > runtime->stall_timeout_ms) {
    halt_step(runtime, JPP_HALT_STALLED);
  } else if (quiet > kJppPaceQuiet) {
    runtime->crew.late = find_late(runtime, quiet_since, now);
    if (runtime->crew.late) halt_step(runtime, JPP_HALT_LATE);
  }
}

static void issue_all(jpp_issuer_t* issuer) {
  jpp_runtime_t* runtime = issuer->runtime;
  int64_t quiet_since = runtime->network ? jpp_clock_now() : 0;
  for (uint32_t idle_rounds = 0; !jpp_step_is_halted(runtime, runtime->step);) {
    bool some = false, all_done = false;
    uint64_t since = atomic_load(&runtime->progress);
    issue_round(issuer, &some, &all_done);
    if (some) {
      atomic_fetch_add(&runtime->progress, 1);
      if (runtime->network) quiet_since = jpp_clock_now();
    }
    if (issuer->index == 0) some |= jpp_network_progress(runtime);
    if (all_done) {
      atomic_store(&issuer->idle_since, kAllDone);
      return;
    }
    atomic_store(&issuer->idle_since, some ? kNotIdleYet : since);
    if (!some) halt_if_hopeless(runtime, since, quiet_since);
    if (some) {
      idle_rounds = 0;
    } else {
      back_off(runtime, idle_rounds++);
    }
  }
}

// --- Threads --------------------------------------------------------------------------

static void* issuer_main(void* user) {
  jpp_issuer_t* issuer = user;
  jpp_crew_t* crew = &issuer->runtime->crew;
  uint64_t step = 0;
  pthread_mutex_lock(&crew->mutex);
  while (!crew->stopping) {
    if (crew->step == step) {
      pthread_cond_wait(&crew->changed, &crew->mutex);
      continue;
    }
    step = crew->step;
    pthread_mutex_unlock(&crew->mutex);
    issue_all(issuer);
    pthread_mutex_lock(&crew->mutex);
    if (--crew->working == 0) pthread_cond_broadcast(&crew->changed);
  }
  pthread_mutex_unlock(&crew->mutex);
  return NULL;
}

static jpp_status_t* start_issuer(jpp_issuer_t* issuer) {
  char what[32];
  snprintf(what, sizeof(what), "issue thread %u", issuer->index);
  return jpp_thread_start(&issuer->thread, issuer_main, issuer, what);
}

jpp_status_t* jpp_crew_start(jpp_runtime_t* runtime, uint32_t count) {
  jpp_crew_t* crew = &runtime->crew;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, count, &crew->issuers));
  crew->count = count;
  for (uint32_t i = 0; i < count; ++i) {
    crew->issuers[i].runtime = runtime;
    crew->issuers[i].index = i;
  }
  jpp_status_t* status = NULL;
  for (crew->started = 1; crew->started < count && !status;) {
    status = start_issuer(&crew->issuers[crew->started]);
    if (!status) ++crew->started;
  }
  return status;
}

void jpp_crew_stop(jpp_runtime_t* runtime) {
  jpp_crew_t* crew = &runtime->crew;
  pthread_mutex_lock(&crew->mutex);
  crew->stopping = true;
  pthread_cond_broadcast(&crew->changed);
  pthread_mutex_unlock(&crew->mutex);
  for (uint32_t i = 1; i < crew->started; ++i) {
    pthread_join(crew->issuers[i].thread, NULL);
  }
}

static void wake_issuers(jpp_crew_t* crew) {
  if (crew->count == 1) return;
  pthread_mutex_lock(&crew->mutex);
  ++crew->step;
  crew->working = crew->count - 1;
  pthread_cond_broadcast(&crew->changed);
  pthread_mutex_unlock(&crew->mutex);
}

static void await_issuers(jpp_crew_t* crew) {
  if (crew->count == 1) return;
  pthread_mutex_lock(&crew->mutex);
  while (crew->working) pthread_cond_wait(&crew->changed, &crew->mutex);
  pthread_mutex_unlock(&crew->mutex);
}

void jpp_crew_issue(jpp_runtime_t* runtime) {
  jpp_crew_t* crew = &runtime->crew;
  atomic_store(&runtime->progress, 0);
  for (uint32_t i = 0; i < crew->count; ++i) {
    atomic_store(&crew->issuers[i].idle_since, kNotIdleYet);
  }
  wake_issuers(crew);
  issue_all(&crew->issuers[0]);
  await_issuers(crew);
}
