// Growth of JPP_VEC() arrays: capacity doubles, so that appending takes constant time on
// average.
#include "base/vec.h"

jpp_status_t* jpp__vec_reserve_bytes(void** data, size_t count, size_t* capacity,
                                     size_t element_size, size_t extra) {
  size_t needed = count + extra;
  if (needed <= *capacity) return NULL;
  size_t grown = *capacity ? *capacity * 2 : 8;
  if (grown < needed) grown = needed;
  JPP_RETURN_IF_ERROR(jpp__realloc(data, jpp__bytes_multiply(grown, element_size)));
  *capacity = grown;
  return NULL;
}
