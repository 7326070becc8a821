// Struct size: how a library reads options that a caller of another version filled in.
//
// New fields are only added after the last one, and not into its padding, because older
// callers may have left garbage there. Such a struct is never embedded in another one,
// nor returned by value: a call returns a pointer to the library's own.
#ifndef JPP_BASE_STRUCT_SIZE_H_
#define JPP_BASE_STRUCT_SIZE_H_

#include <stddef.h>

#include "jaxpp/status.h"

// Copies `given`, options as in status.h, to `out`, which holds `known` bytes; fields
// that the caller's version lacks become zero. JPP_INVALID_ARGUMENT for fewer bytes than
// `first`, the size of the first version, for a size that no version has, and for nonzero
// bytes beyond the known ones. Messages begin with `name`.
jpp_status_t* jpp__options_copy(const char* name, const void* given, size_t first,
                                size_t known, void* out) JPP_MUST_USE;

// The same for a type whose first version ended with the field `last`. The conditional
// expressions make the compiler check the types of the pointers.
#define JPP_OPTIONS_COPY(type, last, given, out)                              \
  jpp__options_copy(#type, 1 ? (given) : (const type*)0,                      \
                    offsetof(type, last) + sizeof((out)->last), sizeof(type), \
                    1 ? (out) : (type*)0)

// Copies element `index` of a list. The distance between elements is the size of the type
// in the caller's version, the struct_size of the first element; all elements must have
// the same.
jpp_status_t* jpp__options_copy_at(const char* name, const void* list, size_t index,
                                   size_t first, size_t known, void* out) JPP_MUST_USE;

#define JPP_OPTIONS_COPY_AT(type, last, list, index, out)                        \
  jpp__options_copy_at(#type, 1 ? (list) : (const type*)0, (index),              \
                       offsetof(type, last) + sizeof((out)->last), sizeof(type), \
                       1 ? (out) : (type*)0)

#endif  // JPP_BASE_STRUCT_SIZE_H_
