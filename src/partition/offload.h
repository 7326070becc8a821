// Offload: keeps activations in pinned host memory between a stage's forward and
// backward.
#ifndef JPP_PARTITION_OFFLOAD_H_
#define JPP_PARTITION_OFFLOAD_H_

#include "jaxpp/partition.h"

// Puts into pinned host memory, for stages of the ranks in `ranks`, what both a stage's
// forward has (takes or makes) and its backward takes, once a microbatch and at least
// 4 KiB on a device. The backward of the last stage follows its forward at once, so its
// activations stay. `ranks`: [ranks]; `value_bytes`: [num_values] of each value on one
// device.
void jpp__staged_offload(jpp_staged_t* staged, const bool* ranks,
                         const uint64_t* value_bytes);

// Whether the backward of a stage, or one of its parts, takes the value. The loop has a
// backward.
bool jpp__staged_backward_takes(const jpp_staged_t* staged, uint32_t loop, uint32_t stage,
                                uint32_t value);

#endif  // JPP_PARTITION_OFFLOAD_H_
