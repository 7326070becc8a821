// Pace: how long this process waits for others at a time while all of them are in a step,
// and so how long one may stand still. A process that has not called the step yet may be
// busy with something else, such as a checkpoint, and has longer.
//
// All of it is the issuing thread's.
#ifndef JPP_RUNTIME_PACE_H_
#define JPP_RUNTIME_PACE_H_

#include <stdbool.h>
#include <stdint.h>

enum { kJppPaceSteps = 9 };

typedef struct jpp_pace {
  // Of each of the last steps the longest wait, nanoseconds.
  int64_t waits[kJppPaceSteps];
  uint32_t count;
  // The median of them; 0: none is known.
  int64_t typical;
  // Of the step at hand.
  int64_t longest;
  // When all processes were first known to have begun it; 0: not yet.
  int64_t all_begun;
} jpp_pace_t;

// A step begins.
void jpp_pace_begin(jpp_pace_t* pace);
// What was waited for since `since` has come.
void jpp_pace_note(jpp_pace_t* pace, int64_t since, int64_t now);
// All of the step is issued.
void jpp_pace_end(jpp_pace_t* pace);
// How long of a wait since `since` all processes have been in the step.
int64_t jpp_pace_wait(const jpp_pace_t* pace, int64_t since, int64_t now);
// The longest such wait that is not taken for a hang, at least `least_ms`; nanoseconds.
// INT64_MAX: no step is done, and nobody knows how long the devices take for one.
int64_t jpp_pace_limit(const jpp_pace_t* pace, uint32_t least_ms);

#endif  // JPP_RUNTIME_PACE_H_
