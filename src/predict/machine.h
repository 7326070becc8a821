// A machine description with every list checked and filled in.
#ifndef JPP_PREDICT_MACHINE_H_
#define JPP_PREDICT_MACHINE_H_

#include "base/arena.h"
#include "jaxpp/predict.h"

// `machine` may be NULL. No list of *out_machine is NULL, and `threads` and `processes`
// are not 0; lists that the caller left out are in `arena`.
jpp_status_t* jpp__machine_complete(const jpp_machine_t* machine, uint32_t ranks,
                                    jpp_arena_t* arena,
                                    jpp_machine_t* out_machine) JPP_MUST_USE;

// Whether a prediction accepts the time: it is finite, and small enough that sums are,
// too.
static inline bool jpp__machine_takes(double time) {
  return time >= 0 && time <= JPP_LONGEST_TIME;
}

#endif  // JPP_PREDICT_MACHINE_H_
