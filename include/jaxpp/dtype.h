// Element types of values, buffers and host arrays: one table for all layers.
//
// Threads: any thread may call any of these at any time.
#ifndef JAXPP_DTYPE_H_
#define JAXPP_DTYPE_H_

#include <stdbool.h>
#include <stdint.h>

#include "jaxpp/export.h"

typedef enum jpp_dtype {
  JPP_DTYPE_INVALID = 0,
  JPP_DTYPE_BOOL,
  JPP_DTYPE_S2,
  JPP_DTYPE_S4,
  JPP_DTYPE_S8,
  JPP_DTYPE_S16,
  JPP_DTYPE_S32,
  JPP_DTYPE_S64,
  JPP_DTYPE_U2,
  JPP_DTYPE_U4,
  JPP_DTYPE_U8,
  JPP_DTYPE_U16,
  JPP_DTYPE_U32,
  JPP_DTYPE_U64,
  JPP_DTYPE_F4E2M1FN,
  JPP_DTYPE_F8E3M4,
  JPP_DTYPE_F8E4M3,
  JPP_DTYPE_F8E4M3FN,
  JPP_DTYPE_F8E4M3FNUZ,
  JPP_DTYPE_F8E4M3B11FNUZ,
  JPP_DTYPE_F8E5M2,
  JPP_DTYPE_F8E5M2FNUZ,
  JPP_DTYPE_F8E8M0FNU,
  JPP_DTYPE_BF16,
  JPP_DTYPE_F16,
  JPP_DTYPE_F32,
  JPP_DTYPE_F64,
  JPP_DTYPE_C64,
  JPP_DTYPE_C128,
  JPP_DTYPE_COUNT
} jpp_dtype_t;

// The short name in text forms ("f32", "bf16", "bool"); lifetime static.
JPP_API const char* jpp_dtype_name(jpp_dtype_t dtype);
// Bits of one element as stored in host arrays; types of 2 and 4 bits take a byte: 8.
JPP_API uint32_t jpp_dtype_bits(jpp_dtype_t dtype);
// The size of elements on a device, in bytes: XLA packs types of 2 and 4 bits there.
JPP_API uint64_t jpp_dtype_device_bytes(jpp_dtype_t dtype, uint64_t elements);
// Accepts the short names and numpy's ("float32", "bfloat16", "int8", ...);
// JPP_DTYPE_INVALID when unknown.
JPP_API jpp_dtype_t jpp_dtype_parse(const char* name, uint32_t length);

#endif  // JAXPP_DTYPE_H_
