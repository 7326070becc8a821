// Alloc: host memory, from functions that return a status. The library allocates with
// them; programs free with jpp_free() what a function's comment tells them to free.
//
// Threads: any thread may allocate, and free memory that another thread allocated.
#ifndef JAXPP_ALLOC_H_
#define JAXPP_ALLOC_H_

#include <stddef.h>

#include "jaxpp/status.h"

// Zeroed memory, aligned for any type, or JPP_OUT_OF_MEMORY. `size` 0 gives a unique
// pointer. Free with jpp_free().
JPP_API jpp_status_t* jpp_alloc(size_t size, void** out_memory) JPP_MUST_USE;
// The same for `count` elements of `size` bytes. JPP_OUT_OF_MEMORY also if their product
// overflows.
JPP_API jpp_status_t* jpp_alloc_array(size_t count, size_t size,
                                      void** out_memory) JPP_MUST_USE;
// Takes NULL.
JPP_API void jpp_free(void* memory);

// `count` zeroed elements of *out's type: uint32_t* ids; JPP_ALLOC_ARRAY(8, &ids).
#define JPP_ALLOC_ARRAY(count, out) \
  jpp_alloc_array((count), sizeof(**(out)), (void**)(out))

#endif  // JAXPP_ALLOC_H_
