// Finds NaNs and infinities by comparing bit patterns as integers. In IEEE-like formats
// these are above the largest finite number, so each format is a row of limits and needs
// no arithmetic of its own.
#include "base/finite.h"

// Without the sign bit, infinity and then the NaNs follow the largest finite number;
// types without infinities have only NaNs there, or a single one. The "uz" types have a
// single NaN, whose encoding is that of minus zero in other types.
typedef struct format {
  uint32_t bytes;  // of one part; 0: every encoding is a number
  uint32_t parts;  // per element: 2 for complex types
  uint64_t magnitude;
  uint64_t infinity;  // magnitude of infinity; magnitude + 1: the type has none
  uint64_t first_nan;
  uint64_t only_nan;  // all bits of the only NaN; 0: the type has several
} format_t;

static const format_t kFormats[JPP_DTYPE_COUNT] = {
    [JPP_DTYPE_F8E3M4] = {1, 1, 0x7f, 0x70, 0x71, 0},
    [JPP_DTYPE_F8E4M3] = {1, 1, 0x7f, 0x78, 0x79, 0},
    [JPP_DTYPE_F8E4M3FN] = {1, 1, 0x7f, 0x80, 0x7f, 0},
    [JPP_DTYPE_F8E4M3FNUZ] = {1, 1, 0x7f, 0x80, 0x80, 0x80},
    [JPP_DTYPE_F8E4M3B11FNUZ] = {1, 1, 0x7f, 0x80, 0x80, 0x80},
    [JPP_DTYPE_F8E5M2] = {1, 1, 0x7f, 0x7c, 0x7d, 0},
    [JPP_DTYPE_F8E5M2FNUZ] = {1, 1, 0x7f, 0x80, 0x80, 0x80},
    [JPP_DTYPE_F8E8M0FNU] = {1, 1, 0xff, 0x100, 0xff, 0},
    [JPP_DTYPE_BF16] = {2, 1, 0x7fff, 0x7f80, 0x7f81, 0},
    [JPP_DTYPE_F16] = {2, 1, 0x7fff, 0x7c00, 0x7c01, 0},
    [JPP_DTYPE_F32] = {4, 1, 0x7fffffff, 0x7f800000, 0x7f800001, 0},
    [JPP_DTYPE_F64] = {8, 1, INT64_MAX, 0x7ff0000000000000, 0x7ff0000000000001, 0},
    [JPP_DTYPE_C64] = {4, 2, 0x7fffffff, 0x7f800000, 0x7f800001, 0},
    [JPP_DTYPE_C128] = {8, 2, INT64_MAX, 0x7ff0000000000000, 0x7ff0000000000001, 0},
};

bool jpp__dtype_is_floating(jpp_dtype_t dtype) {
  return (unsigned)dtype < JPP_DTYPE_COUNT && kFormats[dtype].bytes > 0;
}

static uint64_t load(const unsigned char* data, uint32_t bytes) {
  uint64_t bits = 0;
  for (uint32_t i = bytes; i-- > 0;) bits = bits << 8 | data[i];
  return bits;
}

static bool is_found(const format_t* format, uint64_t bits, unsigned what) {
  uint64_t magnitude = bits & format->magnitude;
  if (what & JPP_FIND_INFS && magnitude == format->infinity) return true;
  if (!(what & JPP_FIND_NANS)) return false;
  return magnitude >= format->first_nan || (format->only_nan && bits == format->only_nan);
}

size_t jpp__find_nonfinite(jpp_dtype_t dtype, const void* data, size_t count,
                           unsigned what) {
  if (!jpp__dtype_is_floating(dtype)) return count;
  const format_t* format = &kFormats[dtype];
  const unsigned char* bytes = data;
  for (size_t i = 0; i < count * format->parts; ++i, bytes += format->bytes) {
    if (is_found(format, load(bytes, format->bytes), what)) return i / format->parts;
  }
  return count;
}
