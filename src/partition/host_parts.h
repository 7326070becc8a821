// Parts of a task outside the loops that uses host memory.
//
// In: the ops of the task, in an order in which they can run.
// Out: the part of each of them.
#ifndef JPP_PARTITION_HOST_PARTS_H_
#define JPP_PARTITION_HOST_PARTS_H_

#include "partition/partitioner.h"

// Sets out_parts[count]: parts run in the order of their numbers. All are 0 if the task
// is not worth dividing, or cannot be divided. positions[all ops] is all JPP_NONE, also
// afterwards.
jpp_status_t* jpp__partition_divide_for_host(jpp_partitioner_t* p, const uint32_t* ops,
                                             uint32_t count, uint32_t* positions,
                                             uint32_t* out_parts) JPP_MUST_USE;

#endif  // JPP_PARTITION_HOST_PARTS_H_
