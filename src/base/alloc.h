// The only access to the heap: jaxpp/alloc.h, and additional functions for containers and
// tests. A test can make the n-th allocation fail.
#ifndef JPP_BASE_ALLOC_H_
#define JPP_BASE_ALLOC_H_

#include <stdint.h>

#include "base/bytes.h"
#include "jaxpp/alloc.h"

// Grows or shrinks; new bytes are not zeroed. On failure the old block stays valid.
jpp_status_t* jpp__realloc(void** memory, size_t size) JPP_MUST_USE;

// For tests: the allocation after `successes` further ones fails, once. Negative: never.
void jpp__alloc_fail_after(int64_t successes);

#endif  // JPP_BASE_ALLOC_H_
