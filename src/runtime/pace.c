// The limit is a multiple of the median: a step that waited for a checkpoint does not
// move it, and one whose loops run longer than usual does not reach it.
#include "runtime/pace.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

enum { kTimes = 20 };

static int compare(const void* left, const void* right) {
  int64_t a = *(const int64_t*)left, b = *(const int64_t*)right;
  return (a > b) - (a < b);
}

void jpp_pace_begin(jpp_pace_t* pace) { pace->longest = pace->all_begun = 0; }

int64_t jpp_pace_wait(const jpp_pace_t* pace, int64_t since, int64_t now) {
  if (!pace->all_begun) return 0;
  return now - (since > pace->all_begun ? since : pace->all_begun);
}

void jpp_pace_note(jpp_pace_t* pace, int64_t since, int64_t now) {
  int64_t wait = jpp_pace_wait(pace, since, now);
  if (wait > pace->longest) pace->longest = wait;
}

void jpp_pace_end(jpp_pace_t* pace) {
  int64_t sorted[kJppPaceSteps];
  // One that never waited says of the steps that they do not wait for long.
  pace->waits[pace->count++ % kJppPaceSteps] = pace->longest ? pace->longest : 1;
  size_t known = pace->count < kJppPaceSteps ? pace->count : kJppPaceSteps;
  memcpy(sorted, pace->waits, sizeof(sorted));
  qsort(sorted, known, sizeof(*sorted), compare);
  pace->typical = sorted[known / 2];
}

int64_t jpp_pace_limit(const jpp_pace_t* pace, uint32_t least_ms) {
  int64_t least = least_ms * (int64_t)JPP_NANOSECONDS_OF_MS;
  if (!pace->typical) return INT64_MAX;
  return pace->typical > least / kTimes ? pace->typical * kTimes : least;
}
