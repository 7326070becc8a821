// Deadline: how long a send to or a receive from another process may wait before the step
// fails as hung.
//
// The limit follows the instruction's usual wait: the median of its waits in the last
// steps. A median alone would be too low for an instruction that never waited because the
// devices still worked on the previous step; therefore the plan's forecast (forecast.h)
// of its share of a step counts as well. The limit is a multiple of the larger of the
// two, and at least a whole step.
//
// Only time during which all processes are in the step counts: a process that has not
// called the step yet may be busy with something else, such as a checkpoint, and gets
// longer.
//
// The issuing thread owns all of this.
#ifndef JPP_RUNTIME_DEADLINE_H_
#define JPP_RUNTIME_DEADLINE_H_

#include <stdint.h>

enum {
  kJppDeadlineSteps = 9,
  kJppDeadlineTimes = 20,
  // Nanoseconds after which the runtime checks whether all processes are in the step.
  kJppDeadlineQuiet = 100000000,
};

typedef struct jpp_deadline {
  int64_t steps[kJppDeadlineSteps];  // durations of the last steps, nanoseconds
  uint32_t count;                    // number of steps so far
  // Usual duration of a step; 0: unknown.
  int64_t step;
  // When this process began the current step, and when all processes were first known to
  // have begun it; 0: not yet.
  int64_t begun, all_begun;
} jpp_deadline_t;

// The waits of one instruction that sends to or receives from another process.
typedef struct jpp_deadline_wait {
  int64_t last[kJppDeadlineSteps];  // in the last steps, nanoseconds
  double share;                     // the forecast's share of a step
} jpp_deadline_wait_t;

// A step begins.
void jpp__deadline_begin(jpp_deadline_t* deadline, int64_t now);
// All instructions of the step are issued.
void jpp__deadline_end(jpp_deadline_t* deadline, int64_t now);
// The instruction continued at `now` after it had waited since `since`; 0: it did not
// wait.
void jpp__deadline_note(const jpp_deadline_t* deadline, jpp_deadline_wait_t* wait,
                        int64_t since, int64_t now);

// How much of the time since `since` all processes have been in the step.
int64_t jpp__deadline_waited(const jpp_deadline_t* deadline, int64_t since, int64_t now);
// How long the instruction usually waits, nanoseconds. Not meaningful before the first
// jpp__deadline_end().
int64_t jpp__deadline_usual(const jpp_deadline_t* deadline,
                            const jpp_deadline_wait_t* wait);
// The limit of its wait, at least `least_ms`, in nanoseconds. INT64_MAX until the first
// step is done, because the length of a step is unknown until then.
int64_t jpp__deadline_limit(const jpp_deadline_t* deadline,
                            const jpp_deadline_wait_t* wait, uint32_t least_ms);

#endif  // JPP_RUNTIME_DEADLINE_H_
