// Interruptible waits: they wait a while, call the caller's function, and repeat. Work
// that a device already has continues when a wait is interrupted.
#include "device/wait.h"

#include "base/alloc.h"
#include "base/clock.h"

enum { kPeriodUs = 50000, kSecond = 1000000000 };

void jpp__wait_init_condition(pthread_cond_t* condition) {
  pthread_condattr_t attributes;
  pthread_condattr_init(&attributes);
  pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
  pthread_cond_init(condition, &attributes);
  pthread_condattr_destroy(&attributes);
}

static struct timespec after(long nanoseconds) {
  int64_t until = jpp__clock_now() + nanoseconds;
  return (struct timespec){.tv_sec = until / kSecond, .tv_nsec = until % kSecond};
}

bool jpp__wait_slice(pthread_cond_t* condition, pthread_mutex_t* mutex,
                     const jpp_interrupt_t* interrupt) {
  if (!interrupt) {
    pthread_cond_wait(condition, mutex);
    return true;
  }
  long period_us = interrupt->period_us ? interrupt->period_us : kPeriodUs;
  struct timespec until = after(period_us * 1000);
  if (pthread_cond_timedwait(condition, mutex, &until) == 0) return true;
  pthread_mutex_unlock(mutex);
  bool requested = interrupt->requested(interrupt->user);
  pthread_mutex_lock(mutex);
  return !requested;
}

jpp_status_t* jpp__wait_end_of(jpp_client_t* client, jpp_event_t** event) {
  if (!*event) return NULL;
  jpp_status_t* status = jpp_client_event_await(client, *event);
  jpp_client_event_destroy(client, *event);
  *event = NULL;
  return status;
}

void jpp__wait_for(pthread_cond_t* condition, pthread_mutex_t* mutex, long nanoseconds) {
  struct timespec until = after(nanoseconds);
  pthread_cond_timedwait(condition, mutex, &until);
}

// --- Events ---------------------------------------------------------------------------

// Signals that an event is ready. If its waiter has left, it then frees itself.
typedef struct wait_alarm {
  jpp_event_waiter_t waiter;
  pthread_mutex_t mutex;  // guards the rest
  pthread_cond_t changed;
  bool rung, abandoned;
} wait_alarm_t;

static void alarm_destroy(wait_alarm_t* alarm) {
  pthread_cond_destroy(&alarm->changed);
  pthread_mutex_destroy(&alarm->mutex);
  jpp_free(alarm);
}

// Any thread, possibly the one that registers; holds only the alarm's lock, briefly.
static void alarm_ring(void* user, jpp_status_t* status) {
  wait_alarm_t* alarm = user;
  jpp_status_free(status);
  pthread_mutex_lock(&alarm->mutex);
  bool abandoned = alarm->abandoned;
  alarm->rung = true;
  pthread_cond_signal(&alarm->changed);
  pthread_mutex_unlock(&alarm->mutex);
  if (abandoned) alarm_destroy(alarm);
}

static bool await_alarm(wait_alarm_t* alarm, const jpp_interrupt_t* interrupt) {
  bool waiting = true;
  pthread_mutex_lock(&alarm->mutex);
  while (waiting && !alarm->rung) {
    waiting = jpp__wait_slice(&alarm->changed, &alarm->mutex, interrupt);
  }
  bool rung = alarm->rung;
  alarm->abandoned = !rung;
  pthread_mutex_unlock(&alarm->mutex);
  if (rung) alarm_destroy(alarm);
  return rung;
}

static jpp_status_t* set_alarm(jpp_client_t* client, jpp_event_t* event,
                               wait_alarm_t** out_alarm) {
  wait_alarm_t* alarm = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &alarm));
  pthread_mutex_init(&alarm->mutex, NULL);
  jpp__wait_init_condition(&alarm->changed);
  alarm->waiter = (jpp_event_waiter_t){.callback = alarm_ring, .user = alarm};
  jpp_status_t* status = jpp_client_event_on_ready(client, event, &alarm->waiter);
  if (status) {
    alarm_destroy(alarm);
    return status;
  }
  *out_alarm = alarm;
  return NULL;
}

bool jpp__wait_event(jpp_client_t* client, jpp_event_t* event,
                     const jpp_interrupt_t* interrupt) {
  bool ready = !event;
  wait_alarm_t* alarm = NULL;
  jpp_status_t* status = NULL;
  if (event) status = jpp_client_event_is_ready(client, event, &ready);
  if (!status && !ready) status = set_alarm(client, event, &alarm);
  if (alarm) return await_alarm(alarm, interrupt);
  if (status) {  // without it, the wait cannot be interrupted
    jpp_status_free(status);
    jpp_status_free(jpp_client_event_await(client, event));
  }
  return true;
}

bool jpp__wait_is_event_ready(jpp_client_t* client, jpp_event_t* event) {
  bool ready = false;
  if (!event) return true;
  jpp_status_free(jpp_client_event_is_ready(client, event, &ready));
  return ready;
}

jpp_status_t* jpp__wait_is_buffer_ready(jpp_client_t* client, jpp_buffer_t* buffer,
                                        bool* out_ready) {
  jpp_event_t* event = NULL;
  *out_ready = false;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_ready_event(client, buffer, &event));
  jpp_status_t* status = jpp_client_event_is_ready(client, event, out_ready);
  jpp_client_event_destroy(client, event);
  return status;
}

jpp_status_t* jpp__wait_buffer(jpp_client_t* client, jpp_buffer_t* buffer,
                               const char* what, const jpp_interrupt_t* interrupt) {
  jpp_event_t* event = NULL;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_ready_event(client, buffer, &event));
  bool ready = !interrupt || jpp__wait_event(client, event, interrupt);
  jpp_status_t* status = ready
                             ? jpp_client_event_await(client, event)
                             : jpp_status_make(JPP_CANCELLED, "%s was interrupted", what);
  jpp_client_event_destroy(client, event);
  return status;
}
