// Waits that can be cancelled: they wait in slices and ask in between whether the step is
// still wanted. Work that the devices already have is finished, and its results are
// ignored.
#include <time.h>

#include "base/alloc.h"
#include "runtime/state.h"

enum { kSliceNanoseconds = 50000000, kSecond = 1000000000 };

// May run in a signal handler: one atomic operation. A step that begins clears it.
void jpp_runtime_cancel(jpp_runtime_t* runtime) {
  int running = JPP_HALT_NO;
  atomic_compare_exchange_strong(&runtime->halt, &running, JPP_HALT_CANCELLED);
}

// --- Asking ---------------------------------------------------------------------------

bool jpp_cancel_poll(jpp_runtime_t* runtime) {
  jpp_cancel_t* cancel = &runtime->cancel;
  if (cancel->wanted || atomic_load(&runtime->halt) == JPP_HALT_CANCELLED) return true;
  if (!cancel->should_cancel) return false;
  int64_t now = jpp_trace_now();
  if (now < cancel->next_question) return false;
  cancel->wanted = cancel->should_cancel(cancel->user);
  cancel->next_question = jpp_trace_now() + kSliceNanoseconds;
  if (cancel->wanted) jpp_runtime_cancel(runtime);
  return cancel->wanted;
}

static struct timespec slice_from_now(clockid_t clock) {
  struct timespec until;
  clock_gettime(clock, &until);
  until.tv_nsec += kSliceNanoseconds;
  if (until.tv_nsec >= kSecond) {
    until.tv_nsec -= kSecond;
    ++until.tv_sec;
  }
  return until;
}

struct timespec jpp_cancel_slice(void) {
  return slice_from_now(CLOCK_MONOTONIC);
}

static bool lock_step_mutex(jpp_runtime_t* runtime, const jpp_step_io_t* io) {
  if (!io->should_cancel) return pthread_mutex_lock(&runtime->step_mutex) == 0;
  if (pthread_mutex_trylock(&runtime->step_mutex) == 0) return true;
  do {
    // No lock of pthreads waits on the monotonic clock in every sanitizer.
    struct timespec until = slice_from_now(CLOCK_REALTIME);
    if (pthread_mutex_timedlock(&runtime->step_mutex, &until) == 0) return true;
  } while (!io->should_cancel(io->user));
  return false;
}

bool jpp_cancel_lock(jpp_runtime_t* runtime, const jpp_step_io_t* io) {
  if (!lock_step_mutex(runtime, io)) return false;
  jpp_cancel_t* cancel = &runtime->cancel;
  cancel->should_cancel = io->should_cancel;
  cancel->user = io->user;
  cancel->next_question = jpp_trace_now() + kSliceNanoseconds;
  cancel->wanted = false;
  return true;
}

// --- Waiting --------------------------------------------------------------------------

// Rings when an event is ready. One that was given up frees itself when it rings.
typedef struct jpp_alarm {
  jpp_event_waiter_t waiter;
  pthread_mutex_t mutex;  // of the rest
  pthread_cond_t rung_changed;
  bool rung, abandoned;
} jpp_alarm_t;

void jpp_cancel_init_condition(pthread_cond_t* condition) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(condition, &attributes);
  pthread_condattr_destroy(&attributes);
}

static void alarm_destroy(jpp_alarm_t* alarm) {
  pthread_cond_destroy(&alarm->rung_changed);
  pthread_mutex_destroy(&alarm->mutex);
  jpp_free(alarm);
}

// Any thread, possibly the one that registers; takes only the alarm's lock, for an
// instant.
static void alarm_ring(void* user, jpp_status_t* status) {
  jpp_alarm_t* alarm = user;
  jpp_status_free(status);
  pthread_mutex_lock(&alarm->mutex);
  bool abandoned = alarm->abandoned;
  alarm->rung = true;
  pthread_cond_signal(&alarm->rung_changed);
  pthread_mutex_unlock(&alarm->mutex);
  if (abandoned) alarm_destroy(alarm);
}

static jpp_status_t* take_alarm(jpp_cancel_t* cancel) {
  jpp_alarm_t* alarm = cancel->alarm;
  if (!alarm) {
    JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &alarm));
    pthread_mutex_init(&alarm->mutex, NULL);
    jpp_cancel_init_condition(&alarm->rung_changed);
    cancel->alarm = alarm;
  }
  alarm->rung = false;
  alarm->waiter = (jpp_event_waiter_t){.callback = alarm_ring, .user = alarm};
  return NULL;
}

// Gives the alarm away unless it has rung.
static void give_up_alarm(jpp_cancel_t* cancel) {
  jpp_alarm_t* alarm = cancel->alarm;
  pthread_mutex_lock(&alarm->mutex);
  alarm->abandoned = !alarm->rung;
  if (alarm->abandoned) cancel->alarm = NULL;
  pthread_mutex_unlock(&alarm->mutex);
}

// False when a slice has passed.
static bool alarm_await_slice(jpp_alarm_t* alarm) {
  struct timespec until = jpp_cancel_slice();
  int error = 0;
  pthread_mutex_lock(&alarm->mutex);
  while (!alarm->rung && !error) {
    error = pthread_cond_timedwait(&alarm->rung_changed, &alarm->mutex, &until);
  }
  bool rung = alarm->rung;
  pthread_mutex_unlock(&alarm->mutex);
  return rung;
}

// True: ready, or it can only be awaited without slices.
static bool await_event_in_slices(jpp_runtime_t* runtime, jpp_event_t* event) {
  bool ready = !event;
  jpp_cancel_t* cancel = &runtime->cancel;
  jpp_status_t* status = NULL;
  if (event) status = jpp_client_event_is_ready(runtime->client, event, &ready);
  if (!status && !ready) status = take_alarm(cancel);
  if (!status && !ready) {
    status = jpp_client_event_on_ready(runtime->client, event, &cancel->alarm->waiter);
  }
  if (status || ready) {
    jpp_status_free(status);
    return true;
  }
  while (!alarm_await_slice(cancel->alarm)) {
    if (!jpp_cancel_poll(runtime)) continue;
    give_up_alarm(cancel);
    return false;
  }
  return true;
}

static bool await_actor(jpp_actor_t* actor) {
  size_t devices = actor->runtime->devices_per_rank;
  // The last run first: when it is done, the others mostly are.
  for (size_t i = actor->runs * devices; i-- > 0;) {
    if (!await_event_in_slices(actor->runtime, actor->events[i])) return false;
  }
  for (size_t i = 0; i < actor->program->num_outputs * devices; ++i) {
    if (!await_event_in_slices(actor->runtime, actor->output_events[i])) return false;
  }
  return true;
}

bool jpp_cancel_await(jpp_runtime_t* runtime) {
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    if (jpp_cancel_poll(runtime) || !await_actor(&runtime->actors[r])) return false;
  }
  return true;
}

void jpp_cancel_deinit(jpp_runtime_t* runtime) {
  if (runtime->cancel.alarm) alarm_destroy(runtime->cancel.alarm);
}
