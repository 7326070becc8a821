// Str: jaxpp/str.h, and functions that only the library's own printers use.
#ifndef JPP_BASE_STR_H_
#define JPP_BASE_STR_H_

#include <stdint.h>

#include "base/alloc.h"
#include "jaxpp/str.h"

// Appends a quoted string with \" \\ \n \t and \xNN escapes, which the parsers of text
// forms read.
void jpp__str_append_quoted(jpp_str_t* str, const char* text);

// jpp_str_finish(), unless `error` is an error: then it is returned and the text is
// dropped.
jpp_status_t* jpp__str_finish_unless(jpp_status_t* error, jpp_str_t* str,
                                     char** out_text) JPP_MUST_USE;

// The "s" of a plural noun, unless the count is 1.
static inline const char* jpp__plural(uint64_t count) { return count == 1 ? "" : "s"; }

#endif  // JPP_BASE_STR_H_
