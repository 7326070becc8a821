// Looks many times a second whether the issuing thread has; the transport's own clock
// says when a heartbeat is due.
#include "runtime/pulse.h"

#include "base/thread.h"
#include "device/wait.h"
#include "jaxpp/job.h"
#include "runtime/network.h"
#include "runtime/state.h"

enum { kIntervalNanoseconds = 50000000 };

// What the transport does not see: a process that has no channel to this one, or one that
// failed between its steps.
static void break_with_the_job(jpp_runtime_t* runtime) {
  if (jpp_runtime_is_broken(runtime)) return;
  jpp_status_t* status = jpp_job_failure();
  if (status) jpp_runtime_break(runtime, status);
  jpp_status_free(status);
}

static void* pulse_main(void* user) {
  jpp_runtime_t* runtime = user;
  jpp_pulse_t* pulse = &runtime->pulse;
  pthread_mutex_lock(&pulse->mutex);
  while (!pulse->stopping) {
    uint64_t before = atomic_load(&pulse->rounds);
    jpp_wait_for(&pulse->changed, &pulse->mutex, kIntervalNanoseconds);
    pthread_mutex_unlock(&pulse->mutex);
    if (atomic_load(&pulse->rounds) == before) jpp_network_beat(runtime);
    break_with_the_job(runtime);
    pthread_mutex_lock(&pulse->mutex);
  }
  pthread_mutex_unlock(&pulse->mutex);
  return NULL;
}

jpp_status_t* jpp_pulse_start(jpp_runtime_t* runtime) {
  jpp_pulse_t* pulse = &runtime->pulse;
  pthread_mutex_init(&pulse->mutex, NULL);
  jpp_wait_init_condition(&pulse->changed);
  jpp_status_t* status =
      jpp_thread_start(&pulse->thread, pulse_main, runtime, "the network's thread");
  pulse->running = !status;
  if (!status) return NULL;
  pthread_cond_destroy(&pulse->changed);
  pthread_mutex_destroy(&pulse->mutex);
  return status;
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
