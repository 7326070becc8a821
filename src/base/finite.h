// Finds the elements of a floating type that are NaN or infinite.
#ifndef JPP_BASE_FINITE_H_
#define JPP_BASE_FINITE_H_

#include <stddef.h>

#include "jaxpp/dtype.h"

enum { JPP_FIND_NANS = 1, JPP_FIND_INFS = 2 };

// Whether the type is floating or complex.
bool jpp__dtype_is_floating(jpp_dtype_t dtype);
// The index of the first of `count` elements that matches `what`; `count` if there is
// none, as for any other type. A complex element matches if either part does.
size_t jpp__find_nonfinite(jpp_dtype_t dtype, const void* data, size_t count,
                           unsigned what);

#endif  // JPP_BASE_FINITE_H_
