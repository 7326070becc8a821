// Checks at the start of each public function: status.h's rule about NULL, and the
// lengths of a caller's lists.
#ifndef JPP_BASE_NULL_H_
#define JPP_BASE_NULL_H_

#include <stddef.h>
#include <stdint.h>

#include "jaxpp/status.h"

// `names` is a list with commas; the argument named by entry `index` is NULL.
jpp_status_t* jpp__null_error(const char* function, const char* names,
                              size_t index) JPP_MUST_USE;

// Returns JPP_INVALID_ARGUMENT from the calling function if one of the pointers is NULL.
#define JPP_RETURN_IF_NULL(...)                                                      \
  do {                                                                               \
    const void* const jpp_local_[] = {__VA_ARGS__};                                  \
    for (size_t jpp_i_ = 0; jpp_i_ < sizeof(jpp_local_) / sizeof(void*); ++jpp_i_) { \
      if (!jpp_local_[jpp_i_]) {                                                     \
        return jpp__null_error(__func__, #__VA_ARGS__, jpp_i_);                      \
      }                                                                              \
    }                                                                                \
  } while (0)

// JPP_INVALID_ARGUMENT unless a caller's list of `what` has the expected length.
jpp_status_t* jpp__check_count(const char* what, uint64_t expected,
                               uint64_t found) JPP_MUST_USE;

#endif  // JPP_BASE_NULL_H_
