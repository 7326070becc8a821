// Drives the network 20 times a second, except when the issuing thread has just done so.
// The transport decides when a heartbeat is due.
#include "runtime/cluster/heartbeat.h"

#include "base/thread.h"
#include "device/wait.h"
#include "jaxpp/job.h"
#include "runtime/cluster/network.h"
#include "runtime/step/state.h"

enum { kIntervalNanoseconds = 50000000 };

// The transport does not notice the failure of a process that has no channel to this one,
// or that fails between two steps; the job does.
static void break_with_the_job(jpp_runtime_t* runtime) {
  if (jpp_runtime_is_broken(runtime)) return;
  jpp_status_t* status = jpp_job_failure();
  if (status) jpp__runtime_break(runtime, status);
  jpp_status_free(status);
}

static void* heartbeat_main(void* user) {
  jpp_runtime_t* runtime = user;
  jpp_heartbeat_t* heartbeat = &runtime->heartbeat;
  pthread_mutex_lock(&heartbeat->mutex);
  while (!heartbeat->stopping) {
    uint64_t before = atomic_load(&heartbeat->rounds);
    jpp__wait_for(&heartbeat->changed, &heartbeat->mutex, kIntervalNanoseconds);
    pthread_mutex_unlock(&heartbeat->mutex);
    if (atomic_load(&heartbeat->rounds) == before) jpp__network_beat(runtime);
    break_with_the_job(runtime);
    pthread_mutex_lock(&heartbeat->mutex);
  }
  pthread_mutex_unlock(&heartbeat->mutex);
  return NULL;
}

jpp_status_t* jpp__heartbeat_start(jpp_runtime_t* runtime) {
  jpp_heartbeat_t* heartbeat = &runtime->heartbeat;
  pthread_mutex_init(&heartbeat->mutex, NULL);
  jpp__wait_init_condition(&heartbeat->changed);
  jpp_status_t* status =
      jpp__thread_start(&heartbeat->thread, heartbeat_main, runtime, "jpp-network");
  heartbeat->running = !status;
  if (!status) return NULL;
  pthread_cond_destroy(&heartbeat->changed);
  pthread_mutex_destroy(&heartbeat->mutex);
  return status;
}

void jpp__heartbeat_stop(jpp_runtime_t* runtime) {
  jpp_heartbeat_t* heartbeat = &runtime->heartbeat;
  if (!heartbeat->running) return;
  pthread_mutex_lock(&heartbeat->mutex);
  heartbeat->stopping = true;
  pthread_cond_broadcast(&heartbeat->changed);
  pthread_mutex_unlock(&heartbeat->mutex);
  pthread_join(heartbeat->thread, NULL);
  pthread_cond_destroy(&heartbeat->changed);
  pthread_mutex_destroy(&heartbeat->mutex);
}
