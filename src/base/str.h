// Str: jaxpp/str.h, and what only the library's own printers append.
#ifndef JPP_BASE_STR_H_
#define JPP_BASE_STR_H_

#include <stdint.h>

#include "base/alloc.h"
#include "jaxpp/str.h"

// A quoted string with \" \\ \n \t and \xNN escapes, as the text forms read it back.
void jpp__str_append_quoted(jpp_str_t* str, const char* text);

// jpp_str_finish(), unless `error` is one: then it is returned and the text is dropped.
jpp_status_t* jpp__str_finish_unless(jpp_status_t* error, jpp_str_t* str,
                                     char** out_text) JPP_MUST_USE;

// "s" behind a noun, unless there is one of it.
static inline const char* jpp__plural(uint64_t count) { return count == 1 ? "" : "s"; }

#endif  // JPP_BASE_STR_H_
