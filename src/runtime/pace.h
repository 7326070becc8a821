// Pace: how long a step takes here, and so how long one may stand still once all
// processes are in it. A process that has not called the step yet may be busy with
// something else, such as a checkpoint, and has longer.
#ifndef JPP_RUNTIME_PACE_H_
#define JPP_RUNTIME_PACE_H_

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { kJppPaceSteps = 9 };

typedef struct jpp_pace {
  // The finishing thread's: of the last steps, nanoseconds.
  int64_t durations[kJppPaceSteps];
  uint32_t count;
  // The median of them; 0: too few are known.
  _Atomic int64_t typical;
  // The issuing thread's: when all processes were first known to have begun the step at
  // hand; 0: not yet.
  int64_t all_begun;
} jpp_pace_t;

void jpp_pace_add(jpp_pace_t* pace, int64_t duration);
// How long a step may stand still that typically takes so long, at least `least_ms`;
// nanoseconds. INT64_MAX: nothing is known of the steps.
int64_t jpp_pace_limit(int64_t typical, uint32_t least_ms);

#endif  // JPP_RUNTIME_PACE_H_
