// Element types: one table gives the name, the NumPy name and the size of each, so a new
// type is one row.
#include "jaxpp/dtype.h"

#include <string.h>

#include "base/alloc.h"

static const struct {
  const char* name;
  const char* numpy_name;
  uint32_t bits;
  uint32_t packed_bits;  // 0: the same number
} kDtypes[JPP_DTYPE_COUNT] = {
    [JPP_DTYPE_INVALID] = {"invalid", "invalid", 0},
    [JPP_DTYPE_BOOL] = {"bool", "bool", 8},
    [JPP_DTYPE_S2] = {"s2", "int2", 8, 2},
    [JPP_DTYPE_S4] = {"s4", "int4", 8, 4},
    [JPP_DTYPE_S8] = {"s8", "int8", 8},
    [JPP_DTYPE_S16] = {"s16", "int16", 16},
    [JPP_DTYPE_S32] = {"s32", "int32", 32},
    [JPP_DTYPE_S64] = {"s64", "int64", 64},
    [JPP_DTYPE_U2] = {"u2", "uint2", 8, 2},
    [JPP_DTYPE_U4] = {"u4", "uint4", 8, 4},
    [JPP_DTYPE_U8] = {"u8", "uint8", 8},
    [JPP_DTYPE_U16] = {"u16", "uint16", 16},
    [JPP_DTYPE_U32] = {"u32", "uint32", 32},
    [JPP_DTYPE_U64] = {"u64", "uint64", 64},
    [JPP_DTYPE_F4E2M1FN] = {"f4e2m1fn", "float4_e2m1fn", 8, 4},
    [JPP_DTYPE_F8E3M4] = {"f8e3m4", "float8_e3m4", 8},
    [JPP_DTYPE_F8E4M3] = {"f8e4m3", "float8_e4m3", 8},
    [JPP_DTYPE_F8E4M3FN] = {"f8e4m3fn", "float8_e4m3fn", 8},
    [JPP_DTYPE_F8E4M3FNUZ] = {"f8e4m3fnuz", "float8_e4m3fnuz", 8},
    [JPP_DTYPE_F8E4M3B11FNUZ] = {"f8e4m3b11fnuz", "float8_e4m3b11fnuz", 8},
    [JPP_DTYPE_F8E5M2] = {"f8e5m2", "float8_e5m2", 8},
    [JPP_DTYPE_F8E5M2FNUZ] = {"f8e5m2fnuz", "float8_e5m2fnuz", 8},
    [JPP_DTYPE_F8E8M0FNU] = {"f8e8m0fnu", "float8_e8m0fnu", 8},
    [JPP_DTYPE_BF16] = {"bf16", "bfloat16", 16},
    [JPP_DTYPE_F16] = {"f16", "float16", 16},
    [JPP_DTYPE_F32] = {"f32", "float32", 32},
    [JPP_DTYPE_F64] = {"f64", "float64", 64},
    [JPP_DTYPE_C64] = {"c64", "complex64", 64},
    [JPP_DTYPE_C128] = {"c128", "complex128", 128},
};

const char* jpp_dtype_name(jpp_dtype_t dtype) {
  return (unsigned)dtype < JPP_DTYPE_COUNT ? kDtypes[dtype].name : "invalid";
}

uint32_t jpp_dtype_bits(jpp_dtype_t dtype) {
  return (unsigned)dtype < JPP_DTYPE_COUNT ? kDtypes[dtype].bits : 0;
}

uint64_t jpp_dtype_device_bytes(jpp_dtype_t dtype, uint64_t elements) {
  if ((unsigned)dtype >= JPP_DTYPE_COUNT) return 0;
  uint32_t packed = kDtypes[dtype].packed_bits;
  if (!packed) return jpp__bytes_multiply(elements, kDtypes[dtype].bits / 8);
  uint32_t in_byte = 8 / packed;
  return elements / in_byte + (elements % in_byte != 0);
}

static bool dtype_name_equal(const char* name, const char* text, uint32_t length) {
  return length && *name == *text && strlen(name) == length &&
         memcmp(name, text, length) == 0;
}

jpp_dtype_t jpp_dtype_parse(const char* name, uint32_t length) {
  for (int i = 1; i < JPP_DTYPE_COUNT; ++i) {
    if (dtype_name_equal(kDtypes[i].name, name, length) ||
        dtype_name_equal(kDtypes[i].numpy_name, name, length)) {
      return (jpp_dtype_t)i;
    }
  }
  return JPP_DTYPE_INVALID;
}
