// The limit is a multiple of the median: a step that waited for a checkpoint does not
// move it, and one whose loops run longer than usual does not reach it.
#include "runtime/pace.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

enum { kLeastSteps = 3, kTimes = 20 };

static int compare(const void* left, const void* right) {
  int64_t a = *(const int64_t*)left, b = *(const int64_t*)right;
  return (a > b) - (a < b);
}

void jpp_pace_add(jpp_pace_t* pace, int64_t duration) {
  int64_t sorted[kJppPaceSteps];
  pace->durations[pace->count++ % kJppPaceSteps] = duration;
  if (pace->count < kLeastSteps) return;
  size_t known = pace->count < kJppPaceSteps ? pace->count : kJppPaceSteps;
  memcpy(sorted, pace->durations, sizeof(sorted));
  qsort(sorted, known, sizeof(*sorted), compare);
  atomic_store(&pace->typical, sorted[known / 2]);
}

int64_t jpp_pace_limit(int64_t typical, uint32_t least_ms) {
  int64_t least = least_ms * (int64_t)JPP_NANOSECONDS_OF_MS;
  if (!typical) return INT64_MAX;
  return typical > least / kTimes ? typical * kTimes : least;
}
