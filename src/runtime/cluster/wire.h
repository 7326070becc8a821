// Wire: the contents of a message between processes. Its first shard, in host memory,
// describes the others, one for each device of a rank: the plan does not know their
// shapes, only the program that made them does.
#ifndef JPP_RUNTIME_WIRE_H_
#define JPP_RUNTIME_WIRE_H_

#include "base/bytes.h"
#include "jaxpp/device.h"

// The description of a shard on the wire. All processes of a job have the same byte
// order, which the transport's handshake checks.
typedef struct jpp_wire_shape {
  uint32_t dtype;  // jpp_dtype_t
  uint32_t rank;
  int64_t dims[JPP_BUFFER_MAX_RANK];
} jpp_wire_shape_t;

// Bytes of a shard. Device memory packs types of 2 and 4 bits, host memory does not.
static inline uint64_t jpp__wire_bytes(const jpp_wire_shape_t* shape, bool on_device) {
  uint64_t elements = 1;
  for (uint32_t i = 0; i < shape->rank; ++i) {
    elements = jpp__bytes_multiply(elements, (uint64_t)shape->dims[i]);
  }
  if (on_device) return jpp_dtype_device_bytes((jpp_dtype_t)shape->dtype, elements);
  return jpp__bytes_multiply(elements, jpp_dtype_bits((jpp_dtype_t)shape->dtype) / 8);
}

#endif  // JPP_RUNTIME_WIRE_H_
