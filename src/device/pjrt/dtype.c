// Maps element types to PJRT's types and back with one table.
#include "device/pjrt/pjrt.h"

static const PJRT_Buffer_Type kTypes[JPP_DTYPE_COUNT] = {
    [JPP_DTYPE_INVALID] = PJRT_Buffer_Type_INVALID,
    [JPP_DTYPE_BOOL] = PJRT_Buffer_Type_PRED,
    [JPP_DTYPE_S2] = PJRT_Buffer_Type_S2,
    [JPP_DTYPE_S4] = PJRT_Buffer_Type_S4,
    [JPP_DTYPE_S8] = PJRT_Buffer_Type_S8,
    [JPP_DTYPE_S16] = PJRT_Buffer_Type_S16,
    [JPP_DTYPE_S32] = PJRT_Buffer_Type_S32,
    [JPP_DTYPE_S64] = PJRT_Buffer_Type_S64,
    [JPP_DTYPE_U2] = PJRT_Buffer_Type_U2,
    [JPP_DTYPE_U4] = PJRT_Buffer_Type_U4,
    [JPP_DTYPE_U8] = PJRT_Buffer_Type_U8,
    [JPP_DTYPE_U16] = PJRT_Buffer_Type_U16,
    [JPP_DTYPE_U32] = PJRT_Buffer_Type_U32,
    [JPP_DTYPE_U64] = PJRT_Buffer_Type_U64,
    [JPP_DTYPE_F4E2M1FN] = PJRT_Buffer_Type_F4E2M1FN,
    [JPP_DTYPE_F8E3M4] = PJRT_Buffer_Type_F8E3M4,
    [JPP_DTYPE_F8E4M3] = PJRT_Buffer_Type_F8E4M3,
    [JPP_DTYPE_F8E4M3FN] = PJRT_Buffer_Type_F8E4M3FN,
    [JPP_DTYPE_F8E4M3FNUZ] = PJRT_Buffer_Type_F8E4M3FNUZ,
    [JPP_DTYPE_F8E4M3B11FNUZ] = PJRT_Buffer_Type_F8E4M3B11FNUZ,
    [JPP_DTYPE_F8E5M2] = PJRT_Buffer_Type_F8E5M2,
    [JPP_DTYPE_F8E5M2FNUZ] = PJRT_Buffer_Type_F8E5M2FNUZ,
    [JPP_DTYPE_F8E8M0FNU] = PJRT_Buffer_Type_F8E8M0FNU,
    [JPP_DTYPE_BF16] = PJRT_Buffer_Type_BF16,
    [JPP_DTYPE_F16] = PJRT_Buffer_Type_F16,
    [JPP_DTYPE_F32] = PJRT_Buffer_Type_F32,
    [JPP_DTYPE_F64] = PJRT_Buffer_Type_F64,
    [JPP_DTYPE_C64] = PJRT_Buffer_Type_C64,
    [JPP_DTYPE_C128] = PJRT_Buffer_Type_C128,
};

PJRT_Buffer_Type jpp__pjrt_type_from_dtype(jpp_dtype_t dtype) { return kTypes[dtype]; }

jpp_dtype_t jpp__pjrt_type_to_dtype(PJRT_Buffer_Type type) {
  for (int i = 1; i < JPP_DTYPE_COUNT; ++i) {
    if (kTypes[i] == type) return (jpp_dtype_t)i;
  }
  return JPP_DTYPE_INVALID;
}
