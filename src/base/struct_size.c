// Converts options of any version to the current one: fields that the caller's version
// lacks become zero, and fields that the library lacks must be zero.
#include "base/struct_size.h"

#include <stdint.h>
#include <string.h>

// No version sets a larger size, and bytes that far away may not belong to the caller.
enum { kMostOptionBytes = 4096 };

static jpp_status_t* check_size(const char* name, size_t size, size_t first) {
  if (size >= first && size <= kMostOptionBytes) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "%s: expected a struct_size of at least %zu and at most %d "
                         "bytes, found %zu; set it to sizeof(%s)",
                         name, first, kMostOptionBytes, size, name);
}

jpp_status_t* jpp__options_copy(const char* name, const void* given, size_t first,
                                size_t known, void* out) {
  if (!given) return jpp_status_make(JPP_INVALID_ARGUMENT, "%s: found NULL", name);
  size_t size;
  memcpy(&size, given, sizeof(size));
  JPP_RETURN_IF_ERROR(check_size(name, size, first));
  const uint8_t* bytes = given;
  for (size_t i = known; i < size; ++i) {
    if (!bytes[i]) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "%s: expected zeros after the %zu bytes that this version of "
                           "the library knows, found %u at byte %zu of %zu; leave the "
                           "newer fields 0, or use the library that has them",
                           name, known, bytes[i], i, size);
  }
  memset(out, 0, known);
  memcpy(out, given, size < known ? size : known);
  memcpy(out, &known, sizeof(known));
  return NULL;
}

jpp_status_t* jpp__options_copy_at(const char* name, const void* list, size_t index,
                                   size_t first, size_t known, void* out) {
  if (!list) return jpp_status_make(JPP_INVALID_ARGUMENT, "%s: found NULL", name);
  size_t stride, size;
  memcpy(&stride, list, sizeof(stride));
  JPP_RETURN_IF_ERROR(check_size(name, stride, first));
  const uint8_t* at = (const uint8_t*)list + index * stride;
  memcpy(&size, at, sizeof(size));
  if (size != stride) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "%s: expected a struct_size of %zu in element %zu of a list, as "
        "in the first one, found %zu; set it to sizeof(%s)",
        name, stride, index, size, name);
  }
  return jpp__options_copy(name, at, first, known, out);
}
