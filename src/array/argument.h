// Declarations that deciding about an argument and making it share.
#ifndef JPP_ARRAY_ARGUMENT_H_
#define JPP_ARRAY_ARGUMENT_H_

#include "jaxpp/array_argument.h"

// The block of a rank's device.
static inline const int64_t* jpp__wanted_block(const jpp_wanted_t* wanted,
                                               uint32_t device) {
  return wanted->blocks + (size_t)device * wanted->ndim * 2;
}

static inline bool jpp__wanted_is_local(const jpp_wanted_t* wanted, uint32_t index) {
  return !wanted->is_local || wanted->is_local[index];
}

// Makes a checked copy of the caller's jpp_wanted_t.
jpp_status_t* jpp__wanted_read(const jpp_wanted_t* given,
                               jpp_wanted_t* out_wanted) JPP_MUST_USE;
// JPP_INVALID_ARGUMENT for a block that no array can have.
jpp_status_t* jpp__argument_check_block(const jpp_wanted_t* wanted,
                                        const int64_t* block) JPP_MUST_USE;
// The error for a process that lacks elements of a device's block.
jpp_status_t* jpp__argument_missing(const jpp_wanted_t* wanted, uint32_t device,
                                    uint64_t found) JPP_MUST_USE;
// Makes the argument on the local ranks from host blocks. `wanted` is a checked copy; the
// other parameters are those of jpp_argument_take().
jpp_status_t* jpp__argument_upload(const jpp_wanted_t* wanted, jpp_client_t* client,
                                   const uint32_t* devices,
                                   const jpp_host_block_t* blocks, uint32_t num_blocks,
                                   jpp_array_t** out_array) JPP_MUST_USE;

#endif  // JPP_ARRAY_ARGUMENT_H_
