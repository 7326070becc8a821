// Fit: which built-in schedule would hold a plan's step within a memory limit.
#ifndef JPP_CHECK_FIT_H_
#define JPP_CHECK_FIT_H_

#include "jaxpp/check.h"

typedef struct jpp_fit {
  const char* name;  // the built-in schedule that fits and is simulated fastest, or NULL
  uint64_t peak;     // of the rank of it that needs most
  double slowdown;   // its simulated time over that of the plan's own schedules
  const char* smallest_name;  // what needs least: a built-in one, or the plan's own
  uint64_t smallest;          // the peak of the rank of it that needs most
} jpp_fit_t;

// Plans the step under every built-in schedule that serves the sizes of all its loops.
// Where a value's bytes on a device are not known, because it stays inside a task of the
// plan, the whole value counts. Names have the lifetime of the schedules' and the
// library's.
jpp_status_t* jpp_check_find_fit(const jpp_plan_t* plan,
                                 const jpp_schedule_t* const* schedules,
                                 const uint64_t* limits, jpp_fit_t* out_fit) JPP_MUST_USE;

#endif  // JPP_CHECK_FIT_H_
