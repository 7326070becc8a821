// The clock for durations and deadlines, and the clock that hosts share.
#ifndef JPP_BASE_CLOCK_H_
#define JPP_BASE_CLOCK_H_

#include <stdint.h>
#include <time.h>

enum { JPP_NANOSECONDS_OF_MS = 1000000 };

// CLOCK_MONOTONIC in nanoseconds.
static inline int64_t jpp__clock_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// CLOCK_REALTIME in nanoseconds.
static inline int64_t jpp__clock_real_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline int64_t jpp__clock_now_ms(void) {
  return jpp__clock_now() / JPP_NANOSECONDS_OF_MS;
}

// The same with an error of a few milliseconds, in half the time: for calls in loops.
static inline int64_t jpp__clock_coarse_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return (int64_t)now.tv_sec * 1000 + now.tv_nsec / JPP_NANOSECONDS_OF_MS;
}

#endif  // JPP_BASE_CLOCK_H_
