// An eventfd, which is written only while somebody sleeps: a call costs a load otherwise.
#include "runtime/waker.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

jpp_status_t* jpp_waker_open(jpp_waker_t* waker) {
  waker->descriptor = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (waker->descriptor >= 0) return NULL;
  return jpp_status_make(JPP_UNSUPPORTED, "eventfd: %s", strerror(errno));
}

void jpp_waker_close(jpp_waker_t* waker) {
  if (waker->descriptor >= 0) close(waker->descriptor);
  waker->descriptor = -1;
}

void jpp_waker_call(jpp_waker_t* waker) {
  if (!atomic_load(&waker->sleeps)) return;
  int error = errno;  // a signal handler leaves it as it is
  (void)!write(waker->descriptor, &(uint64_t){1}, sizeof(uint64_t));
  errno = error;
}

void jpp_waker_begin(jpp_waker_t* waker) { atomic_store(&waker->sleeps, true); }

void jpp_waker_sleep(jpp_waker_t* waker, int descriptor, int64_t nanoseconds) {
  struct pollfd found[] = {{.fd = waker->descriptor, .events = POLLIN},
                           {.fd = descriptor, .events = POLLIN}};
  struct timespec limit = {.tv_sec = nanoseconds / 1000000000,
                           .tv_nsec = nanoseconds % 1000000000};
  ppoll(found, descriptor < 0 ? 1 : 2, &limit, NULL);
  // A call that comes too late for this one shortens the next sleep, no more.
  uint64_t calls = 0;
  if (found[0].revents) (void)!read(waker->descriptor, &calls, sizeof(calls));
}

void jpp_waker_end(jpp_waker_t* waker) { atomic_store(&waker->sleeps, false); }
