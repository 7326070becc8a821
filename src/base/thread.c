// New threads inherit the signal mask of their creator.
#include "base/thread.h"

#include <signal.h>
#include <string.h>

jpp_status_t* jpp__thread_start(pthread_t* thread, void* (*run)(void*), void* user,
                                const char* name) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int error = pthread_create(thread, NULL, run, user);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (error) {
    return jpp_status_make(JPP_OUT_OF_MEMORY, "no thread %s could be started: %s", name,
                           strerror(error));
  }
  pthread_setname_np(*thread, name);
  return NULL;
}
