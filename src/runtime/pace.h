// Pace: how long an instruction usually waits for another process, and so how long it may
// before that counts as a hang.
//
// What is usual is measured: the middle one of its waits in the last steps. An
// instruction may have been lucky in all of them, as where the devices were still at work
// on the step before; so it is also taken to wait for as much of a step as the plan's
// forecast (program/forecast.h) says. It may then take many times as long, and in any
// case as long as a whole step.
//
// Only what all processes are in the step for is a wait: one that has not called the step
// yet may be busy with something else, such as a checkpoint, and has longer.
//
// All of it is the issuing thread's.
#ifndef JPP_RUNTIME_PACE_H_
#define JPP_RUNTIME_PACE_H_

#include <stdint.h>

enum {
  kJppPaceSteps = 9,
  kJppPaceTimes = 20,
  // Nanoseconds after which it is asked whether all processes are in the step.
  kJppPaceQuiet = 100000000,
};

typedef struct jpp_pace {
  int64_t steps[kJppPaceSteps];  // how long the last ones took, nanoseconds
  uint32_t count;                // of all there were
  int64_t step;                  // how long one usually takes; 0: none is known
  // Of the step at hand: when this process began it, and when all were first known to
  // have; 0: not yet.
  int64_t begun, all_begun;
} jpp_pace_t;

// Of one instruction that sends to another process or receives from one.
typedef struct jpp_pace_wait {
  int64_t last[kJppPaceSteps];  // in the same steps, nanoseconds
  double share;                 // of a step, as the forecast has it
} jpp_pace_wait_t;

// A step begins.
void jpp_pace_begin(jpp_pace_t* pace, int64_t now);
// All of the step is issued.
void jpp_pace_end(jpp_pace_t* pace, int64_t now);
// The instruction went on at `now`, and could not since `since`; 0: it could at once.
void jpp_pace_note(const jpp_pace_t* pace, jpp_pace_wait_t* wait, int64_t since,
                   int64_t now);

// How long of the time since `since` all processes have been in the step.
int64_t jpp_pace_waited(const jpp_pace_t* pace, int64_t since, int64_t now);
// How long the instruction usually waits, nanoseconds. Of no use before the first
// jpp_pace_end().
int64_t jpp_pace_usual(const jpp_pace_t* pace, const jpp_pace_wait_t* wait);
// How long it may, at least `least_ms`; nanoseconds. INT64_MAX: no step is done, and
// nobody knows how long the devices take for one.
int64_t jpp_pace_limit(const jpp_pace_t* pace, const jpp_pace_wait_t* wait,
                       uint32_t least_ms);

#endif  // JPP_RUNTIME_PACE_H_
