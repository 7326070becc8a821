// Struct size: how a library reads options that a caller of another version filled in.
//
// A field is only ever added after the last one, and not into the padding there, because
// an older caller may have left garbage in it. Such a struct is never embedded in another
// one, nor returned by value: a call returns a pointer to the library's own.
#ifndef JPP_BASE_STRUCT_SIZE_H_
#define JPP_BASE_STRUCT_SIZE_H_

#include <stddef.h>

#include "jaxpp/status.h"

// Copies `given`, options as status.h describes them, to `out`, which holds `known`
// bytes: what the caller's version did not have becomes zero. JPP_INVALID_ARGUMENT for
// fewer bytes than the `first` of the first version, for a size that no options have, and
// for anything but zeros beyond the known bytes. Messages begin with `name`.
jpp_status_t* jpp__options_copy(const char* name, const void* given, size_t first,
                                size_t known, void* out) JPP_MUST_USE;

// The same for a type whose first version ended with the field `last`. The conditionals
// are for the compiler, which compares the types of the pointers.
#define JPP_OPTIONS_COPY(type, last, given, out)                              \
  jpp__options_copy(#type, 1 ? (given) : (const type*)0,                      \
                    offsetof(type, last) + sizeof((out)->last), sizeof(type), \
                    1 ? (out) : (type*)0)

// Copies element `index` of a list. Elements are as far apart as the caller's version of
// the type is long, which is the struct_size of the first one; all must have the same.
jpp_status_t* jpp__options_copy_at(const char* name, const void* list, size_t index,
                                   size_t first, size_t known, void* out) JPP_MUST_USE;

#define JPP_OPTIONS_COPY_AT(type, last, list, index, out)                        \
  jpp__options_copy_at(#type, 1 ? (list) : (const type*)0, (index),              \
                       offsetof(type, last) + sizeof((out)->last), sizeof(type), \
                       1 ? (out) : (type*)0)

#endif  // JPP_BASE_STRUCT_SIZE_H_
