// Medians: a step that waited for a checkpoint does not move them, and one that takes
// longer than usual does not reach a multiple of them.
#include "runtime/pace.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

static int compare(const void* left, const void* right) {
  int64_t a = *(const int64_t*)left, b = *(const int64_t*)right;
  return (a > b) - (a < b);
}

// Of the steps there were.
static int64_t median(const jpp_pace_t* pace, const int64_t times[kJppPaceSteps]) {
  int64_t sorted[kJppPaceSteps];
  size_t known = pace->count < kJppPaceSteps ? pace->count : kJppPaceSteps;
  memcpy(sorted, times, sizeof(sorted));
  qsort(sorted, known, sizeof(*sorted), compare);
  return sorted[known / 2];
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t multiply(int64_t time) {
  return time < INT64_MAX / kJppPaceTimes ? time * kJppPaceTimes : INT64_MAX;
}

void jpp_pace_begin(jpp_pace_t* pace, int64_t now) {
  pace->begun = now;
  pace->all_begun = 0;
}

void jpp_pace_end(jpp_pace_t* pace, int64_t now) {
  // One that took no time is known nevertheless.
  int64_t took = larger(1, now - larger(pace->begun, pace->all_begun));
  pace->steps[pace->count++ % kJppPaceSteps] = took;
  pace->step = median(pace, pace->steps);
}

int64_t jpp_pace_waited(const jpp_pace_t* pace, int64_t since, int64_t now) {
  return pace->all_begun ? now - larger(since, pace->all_begun) : 0;
}

// Of a short wait nobody has asked whether all were in the step.
static int64_t noted(const jpp_pace_t* pace, int64_t since, int64_t now) {
  if (!since) return 0;
  bool is_short = now - since <= kJppPaceQuiet;
  return is_short ? now - since : jpp_pace_waited(pace, since, now);
}

void jpp_pace_note(const jpp_pace_t* pace, jpp_pace_wait_t* wait, int64_t since,
                   int64_t now) {
  wait->last[pace->count % kJppPaceSteps] = noted(pace, since, now);
}

int64_t jpp_pace_usual(const jpp_pace_t* pace, const jpp_pace_wait_t* wait) {
  int64_t predicted = (int64_t)(wait->share * (double)pace->step);
  return larger(median(pace, wait->last), predicted);
}

int64_t jpp_pace_limit(const jpp_pace_t* pace, const jpp_pace_wait_t* wait,
                       uint32_t least_ms) {
  int64_t least = least_ms * (int64_t)JPP_NANOSECONDS_OF_MS;
  if (!pace->step) return INT64_MAX;
  return larger(larger(least, pace->step), multiply(jpp_pace_usual(pace, wait)));
}
