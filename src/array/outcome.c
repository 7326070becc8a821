// Outcomes of steps, and the waits for them. One condition variable serves all: at most a
// few thousand steps end per second.
#include <pthread.h>

#include "array/array.h"
#include "array/lock.h"
#include "base/alloc.h"
#include "device/wait.h"

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t g_changed;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

static void init_condition(void) { jpp__wait_init_condition(&g_changed); }

void jpp__arrays_lock(void) { pthread_mutex_lock(&g_lock); }

void jpp__arrays_unlock(void) { pthread_mutex_unlock(&g_lock); }

bool jpp__arrays_wait(const jpp_interrupt_t* interrupt) {
  pthread_once(&g_once, init_condition);
  return jpp__wait_slice(&g_changed, &g_lock, interrupt);
}

void jpp__arrays_changed(void) {
  pthread_once(&g_once, init_condition);
  pthread_cond_broadcast(&g_changed);
}

jpp_status_t* jpp__outcome_create(const void* runtime, jpp_outcome_t** out_outcome) {
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, out_outcome));
  (*out_outcome)->runtime = runtime;
  (*out_outcome)->holders = 1;
  return NULL;
}

void jpp__outcome_hold(jpp_outcome_t* outcome) {
  jpp__arrays_lock();
  ++outcome->holders;
  jpp__arrays_unlock();
}

void jpp__outcome_release(jpp_outcome_t* outcome) {
  if (!outcome) return;
  jpp__arrays_lock();
  bool last = --outcome->holders == 0;
  jpp__arrays_unlock();
  if (!last) return;
  jpp__outcome_release(outcome->cause);
  jpp_status_free(outcome->failure);
  jpp_free(outcome);
}

void jpp__outcome_set_issued(jpp_outcome_t* outcome) {
  outcome->issued = true;
  jpp__arrays_changed();
}

void jpp__outcome_finish(jpp_outcome_t* outcome, jpp_status_t* failure) {
  outcome->finished = true;
  outcome->failure = failure;
  jpp__arrays_changed();
}

jpp_status_t* jpp__outcome_tell(jpp_outcome_t* outcome) {
  if (!outcome || !outcome->failure) return NULL;
  outcome->told = true;
  if (outcome->cause) outcome->cause->told = true;
  return jpp_status_clone(outcome->failure);
}
