// Finds the elements of a floating type that are NaN or infinite.
#ifndef JPP_BASE_FINITE_H_
#define JPP_BASE_FINITE_H_

#include <stddef.h>

#include "jaxpp/dtype.h"

enum { JPP_FIND_NANS = 1, JPP_FIND_INFS = 2 };

// Floating or complex.
bool jpp__dtype_is_floating(jpp_dtype_t dtype);
// The first of `count` elements that is one of `what`; `count` if there is none, as for
// any type that is not floating. A complex element counts if either part does.
size_t jpp__find_nonfinite(jpp_dtype_t dtype, const void* data, size_t count,
                           unsigned what);

#endif  // JPP_BASE_FINITE_H_
