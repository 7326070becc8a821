// The queue of steps and its two threads.
#include "runtime/step/queue.h"

#include "base/thread.h"
#include "device/wait.h"
#include "runtime/cluster/network.h"
#include "runtime/step/state.h"

// How often an idle issuing thread drives the network.
enum { kBriefNanoseconds = 300000 };

static jpp_step_t* slot_of(jpp_queue_t* queue, uint64_t number) {
  return &queue->slots[number % queue->count];
}

// --- Threads --------------------------------------------------------------------------

// While this process has nothing to issue, it still receives messages of other processes,
// and sends its remaining ones. While its devices work on a step, it also checks for
// failures.
static void await_submission(jpp_runtime_t* runtime) {
  jpp_queue_t* queue = &runtime->queue;
  if (!runtime->network) {
    pthread_cond_wait(&queue->to_issue, &queue->mutex);
    return;
  }
  bool working = queue->finished < queue->issued;
  pthread_mutex_unlock(&queue->mutex);
  bool some = jpp__network_progress(runtime);
  if (working && !some) jpp__network_check(runtime);
  pthread_mutex_lock(&queue->mutex);
  bool idle = queue->issued == atomic_load(&queue->submitted) && !queue->stopping;
  if (!some && idle) jpp__wait_for(&queue->to_issue, &queue->mutex, kBriefNanoseconds);
}

// Takes one step after the other, and issues or finishes it.
static void follow_steps(jpp_runtime_t* runtime, bool finishes) {
  jpp_queue_t* queue = &runtime->queue;
  uint64_t* done = finishes ? &queue->finished : &queue->issued;
  pthread_mutex_lock(&queue->mutex);
  while (!queue->stopping || *done < atomic_load(&queue->submitted)) {
    if (*done == (finishes ? queue->issued : atomic_load(&queue->submitted))) {
      if (finishes) {
        pthread_cond_wait(&queue->to_finish, &queue->mutex);
      } else {
        await_submission(runtime);
      }
      continue;
    }
    jpp_step_t* step = slot_of(queue, *done + 1);
    pthread_mutex_unlock(&queue->mutex);
    (finishes ? jpp__step_finish : jpp__step_issue)(runtime, step);
    pthread_mutex_lock(&queue->mutex);
    ++*done;
    if (finishes) jpp__flight_finished(&runtime->flight, *done);
    pthread_cond_broadcast(finishes ? &queue->has_finished : &queue->to_finish);
  }
  pthread_mutex_unlock(&queue->mutex);
}

static void* issuer_main(void* runtime) {
  follow_steps(runtime, false);
  return NULL;
}

static void* finisher_main(void* runtime) {
  follow_steps(runtime, true);
  return NULL;
}

static jpp_status_t* start_thread(jpp_runtime_t* runtime, void* (*run)(void*),
                                  pthread_t* thread) {
  JPP_RETURN_IF_ERROR(jpp__thread_start(thread, run, runtime, "a thread of the runtime"));
  ++runtime->queue.threads;
  return NULL;
}

void jpp__queue_init(jpp_queue_t* queue) {
  pthread_mutex_init(&queue->mutex, NULL);
  jpp__wait_init_condition(&queue->to_issue);
  jpp__wait_init_condition(&queue->to_finish);
  jpp__wait_init_condition(&queue->has_finished);
}

void jpp__queue_deinit(jpp_queue_t* queue) {
  pthread_cond_destroy(&queue->has_finished);
  pthread_cond_destroy(&queue->to_finish);
  pthread_cond_destroy(&queue->to_issue);
  pthread_mutex_destroy(&queue->mutex);
}

jpp_status_t* jpp__queue_start(jpp_runtime_t* runtime) {
  JPP_RETURN_IF_ERROR(start_thread(runtime, issuer_main, &runtime->queue.issuer));
  return start_thread(runtime, finisher_main, &runtime->queue.finisher);
}

void jpp__queue_stop(jpp_runtime_t* runtime) {
  jpp_queue_t* queue = &runtime->queue;
  pthread_mutex_lock(&queue->mutex);
  queue->stopping = true;
  pthread_cond_signal(&queue->to_issue);
  pthread_cond_signal(&queue->to_finish);
  pthread_mutex_unlock(&queue->mutex);
  if (queue->threads > 0) pthread_join(queue->issuer, NULL);
  if (queue->threads > 1) pthread_join(queue->finisher, NULL);
}

// --- Callers --------------------------------------------------------------------------

jpp_step_t* jpp__queue_reserve(jpp_runtime_t* runtime, const jpp_interrupt_t* interrupt) {
  jpp_queue_t* queue = &runtime->queue;
  bool waiting = true;
  jpp_step_t* step = NULL;
  pthread_mutex_lock(&queue->mutex);
  while (waiting && !step) {
    uint64_t submitted = atomic_load(&queue->submitted);
    if (!queue->reserved && submitted - queue->finished < queue->count) {
      step = slot_of(queue, submitted + 1);
      step->number = submitted + 1;
      queue->reserved = true;
    } else {
      waiting = jpp__wait_slice(&queue->has_finished, &queue->mutex, interrupt);
    }
  }
  pthread_mutex_unlock(&queue->mutex);
  return step;
}

static void end_reservation(jpp_queue_t* queue, uint64_t submitted) {
  pthread_mutex_lock(&queue->mutex);
  queue->reserved = false;
  atomic_fetch_add(&queue->submitted, submitted);
  pthread_cond_signal(&queue->to_issue);
  pthread_cond_broadcast(&queue->has_finished);  // to callers that wait for a slot
  pthread_mutex_unlock(&queue->mutex);
}

void jpp__queue_give_up(jpp_runtime_t* runtime) { end_reservation(&runtime->queue, 0); }

void jpp__queue_submit(jpp_runtime_t* runtime) {
  jpp__flight_submitted(&runtime->flight);
  end_reservation(&runtime->queue, 1);
}

bool jpp__queue_await(jpp_runtime_t* runtime, uint64_t steps,
                      const jpp_interrupt_t* interrupt) {
  jpp_queue_t* queue = &runtime->queue;
  bool waiting = true;
  pthread_mutex_lock(&queue->mutex);
  while (waiting && queue->finished < steps) {
    waiting = jpp__wait_slice(&queue->has_finished, &queue->mutex, interrupt);
  }
  bool finished = queue->finished >= steps;
  pthread_mutex_unlock(&queue->mutex);
  return finished;
}
