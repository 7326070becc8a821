// Uses medians: one step that waited for a checkpoint does not change them, and a step
// that is somewhat slower than usual stays below a multiple of them.
#include "runtime/cluster/deadline.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

static int compare(const void* left, const void* right) {
  int64_t a = *(const int64_t*)left, b = *(const int64_t*)right;
  return (a > b) - (a < b);
}

// The median of the steps so far, at most kJppDeadlineSteps.
static int64_t median(const jpp_deadline_t* deadline,
                      const int64_t times[kJppDeadlineSteps]) {
  int64_t sorted[kJppDeadlineSteps];
  size_t known =
      deadline->count < kJppDeadlineSteps ? deadline->count : kJppDeadlineSteps;
  memcpy(sorted, times, sizeof(sorted));
  qsort(sorted, known, sizeof(*sorted), compare);
  return sorted[known / 2];
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t multiply(int64_t time) {
  return time < INT64_MAX / kJppDeadlineTimes ? time * kJppDeadlineTimes : INT64_MAX;
}

void jpp__deadline_begin(jpp_deadline_t* deadline, int64_t now) {
  deadline->begun = now;
  deadline->all_begun = 0;
}

void jpp__deadline_end(jpp_deadline_t* deadline, int64_t now) {
  // At least 1, because 0 means that no step has been measured.
  int64_t took = larger(1, now - larger(deadline->begun, deadline->all_begun));
  deadline->steps[deadline->count++ % kJppDeadlineSteps] = took;
  deadline->step = median(deadline, deadline->steps);
}

int64_t jpp__deadline_waited(const jpp_deadline_t* deadline, int64_t since, int64_t now) {
  return deadline->all_begun ? now - larger(since, deadline->all_begun) : 0;
}

// After a short wait it is unknown whether all processes were in the step.
static int64_t noted(const jpp_deadline_t* deadline, int64_t since, int64_t now) {
  if (!since) return 0;
  bool is_short = now - since <= kJppDeadlineQuiet;
  return is_short ? now - since : jpp__deadline_waited(deadline, since, now);
}

void jpp__deadline_note(const jpp_deadline_t* deadline, jpp_deadline_wait_t* wait,
                        int64_t since, int64_t now) {
  wait->last[deadline->count % kJppDeadlineSteps] = noted(deadline, since, now);
}

int64_t jpp__deadline_usual(const jpp_deadline_t* deadline,
                            const jpp_deadline_wait_t* wait) {
  int64_t predicted = (int64_t)(wait->share * (double)deadline->step);
  return larger(median(deadline, wait->last), predicted);
}

int64_t jpp__deadline_limit(const jpp_deadline_t* deadline,
                            const jpp_deadline_wait_t* wait, uint32_t least_ms) {
  int64_t least = least_ms * (int64_t)JPP_NANOSECONDS_OF_MS;
  if (!deadline->step) return INT64_MAX;
  return larger(larger(least, deadline->step),
                multiply(jpp__deadline_usual(deadline, wait)));
}
