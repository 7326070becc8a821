// The queue of steps and its two threads.
#include "runtime/step/queue.h"

#include "base/thread.h"
#include "device/wait.h"
#include "runtime/cluster/network.h"
#include "runtime/step/state.h"

static jpp_step_t* slot_of(jpp_queue_t* queue, uint64_t number) {
  return &queue->slots[number % queue->count];
}

// --- Threads --------------------------------------------------------------------------

static bool has_nothing_to_issue(jpp_queue_t* queue) {
  pthread_mutex_lock(&queue->mutex);
  bool nothing = queue->issued == atomic_load(&queue->submitted) && !queue->stopping;
  pthread_mutex_unlock(&queue->mutex);
  return nothing;
}

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
  jpp__wakeup_begin(&runtime->wakeup);
  if (!some && has_nothing_to_issue(queue)) jpp__network_wait(runtime, true);
  jpp__wakeup_end(&runtime->wakeup);
  pthread_mutex_lock(&queue->mutex);
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
  jpp_queue_t* queue = &runtime->queue;
  JPP_RETURN_IF_ERROR(
      jpp__thread_start(&queue->issuer, issuer_main, runtime, "jpp-issue"));
  ++queue->threads;
  JPP_RETURN_IF_ERROR(
      jpp__thread_start(&queue->finisher, finisher_main, runtime, "jpp-finish"));
  ++queue->threads;
  return NULL;
}

void jpp__queue_stop(jpp_runtime_t* runtime) {
  jpp_queue_t* queue = &runtime->queue;
  pthread_mutex_lock(&queue->mutex);
  queue->stopping = true;
  pthread_cond_signal(&queue->to_issue);
  pthread_cond_signal(&queue->to_finish);
  pthread_mutex_unlock(&queue->mutex);
  jpp__wakeup_call(&runtime->wakeup);
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

static void end_reservation(jpp_runtime_t* runtime, uint64_t submitted) {
  jpp_queue_t* queue = &runtime->queue;
  pthread_mutex_lock(&queue->mutex);
  queue->reserved = false;
  atomic_fetch_add(&queue->submitted, submitted);
  pthread_cond_signal(&queue->to_issue);
  pthread_cond_broadcast(&queue->has_finished);  // to callers that wait for a slot
  pthread_mutex_unlock(&queue->mutex);
  jpp__wakeup_call(&runtime->wakeup);
}

void jpp__queue_give_up(jpp_runtime_t* runtime) { end_reservation(runtime, 0); }

void jpp__queue_submit(jpp_runtime_t* runtime) {
  jpp__flight_submitted(&runtime->flight);
  end_reservation(runtime, 1);
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
