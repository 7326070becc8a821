// Forecast: how long each rank of a plan waits for others at each instruction, if a
// task's time is proportional to its cost and messages take no time.
//
// It follows the plan's own instructions, including the slots of channels, and assumes
// that all ranks begin idle: a step that overlaps with the previous one waits less. Times
// have the unit of the ops' costs, so only their ratios are meaningful.
#ifndef JPP_RUNTIME_FORECAST_H_
#define JPP_RUNTIME_FORECAST_H_

#include "base/arena.h"
#include "jaxpp/program.h"

typedef struct jpp_forecast {
  double step;     // until the last rank is done
  double** waits;  // [ranks][num_instrs] for the other end of a SEND or RECV
} jpp_forecast_t;

// Allocates from `arena`. For programs that deadlock, it covers the instructions before
// the deadlock.
jpp_status_t* jpp__forecast_make(const jpp_plan_t* plan, jpp_arena_t* arena,
                                 jpp_forecast_t* out_forecast) JPP_MUST_USE;

#endif  // JPP_RUNTIME_FORECAST_H_
