// File: a text file read whole.
#ifndef JPP_BASE_FILE_H_
#define JPP_BASE_FILE_H_

#include <stddef.h>

#include "jaxpp/status.h"

// A whole file ("-": standard input), NUL-ended, without a byte order mark; free with
// jpp_free(). Errors begin with its name; JPP_INVALID_ARGUMENT for more than 1 GiB.
jpp_status_t* jpp_file_read(const char* file, char** out_text,
                            size_t* out_length) JPP_MUST_USE;

#endif  // JPP_BASE_FILE_H_
