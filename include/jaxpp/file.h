// File: reads a whole text file, in the form that the parsers of this library take.
//
// Threads: any thread.
#ifndef JAXPP_FILE_H_
#define JAXPP_FILE_H_

#include <stddef.h>

#include "jaxpp/status.h"

// A whole file ("-": standard input), NUL-ended, without a byte order mark; *out_length
// does not count the NUL. Free *out_text with jpp_text_free(). JPP_INVALID_ARGUMENT,
// which begins with the file's name, for a file that cannot be read or has more than 1
// GiB; JPP_OUT_OF_MEMORY.
JPP_API jpp_status_t* jpp_file_read(const char* file, char** out_text,
                                    size_t* out_length) JPP_MUST_USE;

#endif  // JAXPP_FILE_H_
