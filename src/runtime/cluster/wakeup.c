// An eventfd that is written only while the issuing thread sleeps; otherwise a call costs
// one atomic load.
#include "runtime/cluster/wakeup.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

jpp_status_t* jpp__wakeup_open(jpp_wakeup_t* wakeup) {
  wakeup->descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wakeup->descriptor >= 0) return NULL;
  return jpp_status_make(JPP_UNSUPPORTED, "eventfd: %s", strerror(errno));
}

void jpp__wakeup_close(jpp_wakeup_t* wakeup) {
  if (wakeup->descriptor >= 0) close(wakeup->descriptor);
  wakeup->descriptor = -1;
}

void jpp__wakeup_call(jpp_wakeup_t* wakeup) {
  if (!atomic_load(&wakeup->sleeps)) return;
  int error = errno;  // a signal handler must preserve errno
  (void)!write(wakeup->descriptor, &(uint64_t){1}, sizeof(uint64_t));
  errno = error;
}

void jpp__wakeup_begin(jpp_wakeup_t* wakeup) { atomic_store(&wakeup->sleeps, true); }

void jpp__wakeup_sleep(jpp_wakeup_t* wakeup, int descriptor, int64_t nanoseconds) {
  struct pollfd found[] = {{.fd = wakeup->descriptor, .events = POLLIN},
                           {.fd = descriptor, .events = POLLIN}};
  struct timespec limit = {.tv_sec = nanoseconds / 1000000000,
                           .tv_nsec = nanoseconds % 1000000000};
  ppoll(found, descriptor < 0 ? 1 : 2, &limit, NULL);
  // A call that comes too late for this sleep only shortens the next one.
  uint64_t calls = 0;
  if (found[0].revents) (void)!read(wakeup->descriptor, &calls, sizeof(calls));
}

void jpp__wakeup_end(jpp_wakeup_t* wakeup) { atomic_store(&wakeup->sleeps, false); }
