// The only door to the heap. A test can make the n-th allocation fail.
#ifndef JPP_BASE_ALLOC_H_
#define JPP_BASE_ALLOC_H_

#include <stddef.h>
#include <stdint.h>

#include "base/bytes.h"
#include "jaxpp/status.h"

// Zeroed memory, or JPP_OUT_OF_MEMORY. `size` 0 gives a unique pointer.
jpp_status_t* jpp_alloc(size_t size, void** out_memory) JPP_MUST_USE;
// Grows or shrinks; new bytes are not zeroed. On failure the old block stays valid.
jpp_status_t* jpp_realloc(void** memory, size_t size) JPP_MUST_USE;
void jpp_free(void* memory);

// Zeroed array of `count` elements of *out's type.
#define JPP_ALLOC_ARRAY(count, out) \
  jpp_alloc(jpp_bytes_multiply((count), sizeof(**(out))), (void**)(out))

// For tests: the allocation after `successes` more ones fails, once. Negative: never.
void jpp_alloc_fail_after(int64_t successes);

#endif  // JPP_BASE_ALLOC_H_
