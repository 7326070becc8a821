// Looks many times a second whether the issuing thread has; the transport's own clock
// says when a heartbeat is due.
#include "runtime/pulse.h"

#include <signal.h>
#include <time.h>

#include "device/wait.h"
#include "runtime/network.h"
#include "runtime/state.h"

enum { kIntervalNanoseconds = 50000000 };

static void wait_for_interval(jpp_pulse_t* pulse) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += kIntervalNanoseconds;
  until.tv_sec += until.tv_nsec / 1000000000;
  until.tv_nsec %= 1000000000;
  pthread_cond_timedwait(&pulse->changed, &pulse->mutex, &until);
}

static void* pulse_main(void* user) {
  jpp_runtime_t* runtime = user;
  jpp_pulse_t* pulse = &runtime->pulse;
  pthread_mutex_lock(&pulse->mutex);
  while (!pulse->stopping) {
    uint64_t before = atomic_load(&pulse->rounds);
    wait_for_interval(pulse);
    pthread_mutex_unlock(&pulse->mutex);
    if (atomic_load(&pulse->rounds) == before) jpp_network_beat(runtime);
    pthread_mutex_lock(&pulse->mutex);
  }
  pthread_mutex_unlock(&pulse->mutex);
  return NULL;
}

jpp_status_t* jpp_pulse_start(jpp_runtime_t* runtime) {
  jpp_pulse_t* pulse = &runtime->pulse;
  pthread_mutex_init(&pulse->mutex, NULL);
  jpp_wait_init_condition(&pulse->changed);
  // Signals are the application's: its own threads take them.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(&pulse->thread, NULL, pulse_main, runtime);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pulse->running = !error;
  if (!error) return NULL;
  pthread_cond_destroy(&pulse->changed);
  pthread_mutex_destroy(&pulse->mutex);
  return jpp_status_make(JPP_OUT_OF_MEMORY,
                         "the network's thread could not be started: error %d", error);
}

void jpp_pulse_stop(jpp_runtime_t* runtime) {
  jpp_pulse_t* pulse = &runtime->pulse;
  if (!pulse->running) return;
  pthread_mutex_lock(&pulse->mutex);
  pulse->stopping = true;
  pthread_cond_broadcast(&pulse->changed);
  pthread_mutex_unlock(&pulse->mutex);
  pthread_join(pulse->thread, NULL);
  pthread_cond_destroy(&pulse->changed);
  pthread_mutex_destroy(&pulse->mutex);
}
