// The helpers of the issuing thread.
#include "runtime/step/crew.h"

#include <sched.h>

#include "base/clock.h"
#include "base/thread.h"
#include "device/wait.h"
#include "runtime/step/state.h"

// How long a thread looks for progress before it sleeps. A small program takes less; to
// sleep and to be woken takes about as long.
enum { kLookNanoseconds = 50000 };

// --- Threads --------------------------------------------------------------------------

struct jpp_helper {
  jpp_runtime_t* runtime;
  uint32_t number;  // from 1; the issuing thread is 0
  pthread_t thread;
};

static void* helper_main(void* user) {
  const jpp_helper_t* helper = user;
  jpp_crew_t* crew = &helper->runtime->crew;
  uint64_t answered = 0;
  pthread_mutex_lock(&crew->mutex);
  while (!crew->stopping) {
    if (!crew->open || answered == crew->calls) {
      pthread_cond_wait(&crew->changed, &crew->mutex);
      continue;
    }
    answered = crew->calls;
    ++crew->joined;
    pthread_mutex_unlock(&crew->mutex);
    jpp__issuer_share(helper->runtime, helper->number);
    pthread_mutex_lock(&crew->mutex);
    --crew->joined;
    pthread_cond_broadcast(&crew->changed);
  }
  pthread_mutex_unlock(&crew->mutex);
  return NULL;
}

static uint32_t count_cores(void) {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) ? 1 : (uint32_t)CPU_COUNT(&cores);
}

static uint32_t count_threads(const jpp_runtime_t* runtime) {
  if (runtime->network || !jpp_client_info(runtime->client)->runs_in_call) return 1;
  // Programs of two ranks with collectives need more threads than an XLA plugin has.
  if (runtime->devices_per_rank > 1) return 1;
  uint32_t cores = count_cores(), ranks = runtime->plan->ranks;
  return cores < ranks ? cores : ranks;
}

void jpp__crew_init(jpp_crew_t* crew) {
  pthread_mutex_init(&crew->mutex, NULL);
  jpp__wait_init_condition(&crew->changed);
}

jpp_status_t* jpp__crew_start(jpp_runtime_t* runtime) {
  jpp_crew_t* crew = &runtime->crew;
  uint32_t count = count_threads(runtime) - 1;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&runtime->arena, count, &crew->helpers));
  for (uint32_t i = 0; i < count; ++i) {
    jpp_helper_t* helper = &crew->helpers[i];
    *helper = (jpp_helper_t){.runtime = runtime, .number = i + 1};
    JPP_RETURN_IF_ERROR(
        jpp__thread_start(&helper->thread, helper_main, helper, "jpp-helper"));
    ++crew->num_helpers;
  }
  return NULL;
}

void jpp__crew_stop(jpp_crew_t* crew) {
  pthread_mutex_lock(&crew->mutex);
  crew->stopping = true;
  pthread_cond_broadcast(&crew->changed);
  pthread_mutex_unlock(&crew->mutex);
  for (uint32_t i = 0; i < crew->num_helpers; ++i) {
    pthread_join(crew->helpers[i].thread, NULL);
  }
}

void jpp__crew_deinit(jpp_crew_t* crew) {
  pthread_cond_destroy(&crew->changed);
  pthread_mutex_destroy(&crew->mutex);
}

// --- A step ---------------------------------------------------------------------------

void jpp__crew_call(jpp_crew_t* crew) {
  pthread_mutex_lock(&crew->mutex);
  crew->open = true;
  ++crew->joined;
  ++crew->calls;
  pthread_cond_broadcast(&crew->changed);
  pthread_mutex_unlock(&crew->mutex);
}

void jpp__crew_dismiss(jpp_crew_t* crew) {
  pthread_mutex_lock(&crew->mutex);
  crew->open = false;
  --crew->joined;
  while (crew->joined) pthread_cond_wait(&crew->changed, &crew->mutex);
  pthread_mutex_unlock(&crew->mutex);
}

// --- Progress -------------------------------------------------------------------------

void jpp__crew_note_progress(jpp_crew_t* crew) {
  atomic_fetch_add(&crew->progress, 1);
  if (!atomic_load(&crew->asleep)) return;
  pthread_mutex_lock(&crew->mutex);
  pthread_cond_broadcast(&crew->changed);
  pthread_mutex_unlock(&crew->mutex);
}

bool jpp__crew_await_progress(jpp_crew_t* crew, uint64_t seen) {
  for (int64_t since = jpp__clock_now(); jpp__clock_now() - since < kLookNanoseconds;) {
    if (atomic_load(&crew->progress) != seen) return true;
    sched_yield();  // to the threads of a program
  }
  pthread_mutex_lock(&crew->mutex);
  bool sleeps = atomic_load(&crew->asleep) + 1 < crew->joined;
  if (sleeps) {
    atomic_fetch_add(&crew->asleep, 1);
    while (atomic_load(&crew->progress) == seen) {
      pthread_cond_wait(&crew->changed, &crew->mutex);
    }
    atomic_fetch_sub(&crew->asleep, 1);
  }
  pthread_mutex_unlock(&crew->mutex);
  return sleeps;
}
