// Struct size: how a library reads options that a caller of another version filled in.
//
// A field is only ever added behind the last one, and not into the padding there, which
// an older caller may have left with anything in it.
#ifndef JPP_BASE_STRUCT_SIZE_H_
#define JPP_BASE_STRUCT_SIZE_H_

#include <stddef.h>

#include "jaxpp/status.h"

// Copies `given`, options as status.h describes them, to `out`, which holds `known`
// bytes: what the caller's version did not have becomes zero. JPP_INVALID_ARGUMENT for
// fewer bytes than the `first` of the first version, for a size that no options have, and
// for anything but zeros beyond the known bytes. Messages begin with `name`.
jpp_status_t* jpp_options_copy(const char* name, const void* given, size_t first,
                               size_t known, void* out) JPP_MUST_USE;

// The same for a type whose first version ended with the field `last`. The conditionals
// are for the compiler, which compares the types of the pointers.
#define JPP_OPTIONS_COPY(type, last, given, out)                             \
  jpp_options_copy(#type, 1 ? (given) : (const type*)0,                      \
                   offsetof(type, last) + sizeof((out)->last), sizeof(type), \
                   1 ? (out) : (type*)0)

#endif  // JPP_BASE_STRUCT_SIZE_H_
