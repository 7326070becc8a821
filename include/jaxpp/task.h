// Task: types that schedules, partitions, programs and the runtime share for a stage's
// work on one microbatch: its kind, its cost, and the rank of a stage.
//
// Threads: any thread; all of this is constant.
#ifndef JAXPP_TASK_H_
#define JAXPP_TASK_H_

#include <stdbool.h>
#include <stdint.h>

#include "jaxpp/export.h"

// No id, stage, loop or microbatch.
#define JPP_NONE UINT32_MAX

typedef enum jpp_task_kind {
  JPP_TASK_IDLE,   // in schedules only: the rank waits
  JPP_TASK_FWD,    // a stage's forward
  JPP_TASK_BWD,    // its whole backward
  JPP_TASK_BWD_I,  // input gradients only
  JPP_TASK_BWD_W,  // weight gradients only
  JPP_TASK_OUTER,  // outside the loops
  JPP_TASK_KIND_COUNT,
} jpp_task_kind_t;

// "idle", "fwd", "bwd", "bwd_i", "bwd_w", "outer"; lifetime static. NULL for an unknown
// kind.
JPP_API const char* jpp_task_kind_name(jpp_task_kind_t kind);

// In the relative units of schedules: FWD 1, BWD 2, BWD_I 1, BWD_W 1, all others 0.
JPP_API uint16_t jpp_task_default_latency(jpp_task_kind_t kind);

// How the stages of a loop are placed on ranks, and whether their backwards are split.
// Its layout is final.
typedef struct jpp_loop_placement {
  uint32_t stages;
  const uint32_t* stage_rank;  // [stages]
  bool split_backward;         // bwd_i and bwd_w instead of bwd
  // The rank of the last stage runs each fwd of that stage directly before the bwd of the
  // same microbatch.
  bool backward_follows;
} jpp_loop_placement_t;

// The times of a stage for one microbatch: a FWD takes `forward`, a BWD_I `backward`, a
// BWD_W `weight`, and a BWD `backward` + `weight`. None is negative. Times are 0 or from
// JPP_SHORTEST_TIME to JPP_LONGEST_TIME, so that sums stay finite and shares do not
// underflow. The struct's layout is final.
#define JPP_SHORTEST_TIME 1e-100
#define JPP_LONGEST_TIME 1e100
typedef struct jpp_cost {
  double forward;
  double backward;
  double weight;
} jpp_cost_t;

// 0 for kinds that belong to no stage.
JPP_API double jpp_task_cost(const jpp_cost_t* cost, jpp_task_kind_t kind);

#endif  // JAXPP_TASK_H_
