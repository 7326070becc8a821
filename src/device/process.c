// Detects that a process was forked from one with a client: the child has none of the
// client's threads, so using a device there would hang and is refused instead.
#include "device/process.h"

#include <pthread.h>
#include <stdatomic.h>

#include "jaxpp/device.h"

bool jpp_process_is_forked;
static atomic_bool g_has_client;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

// Runs in the child, whose only thread is the one that called fork().
static void note_fork(void) {
  if (atomic_load(&g_has_client)) jpp_process_is_forked = true;
}

static void watch_forks(void) { pthread_atfork(NULL, NULL, note_fork); }

jpp_status_t* jpp_process_check(void) {
  if (!jpp_process_is_forked) return NULL;
  return jpp_status_make(
      JPP_UNSUPPORTED,
      "this process was forked while its parent used the devices, and lacks the threads "
      "that serve them; expected a new process (multiprocessing: "
      "get_context(\"spawn\")), or a fork before the first step is compiled");
}

jpp_status_t* jpp__process_begin_client(void) {
  JPP_RETURN_IF_ERROR(jpp_process_check());
  pthread_once(&g_once, watch_forks);
  atomic_store(&g_has_client, true);
  return NULL;
}
