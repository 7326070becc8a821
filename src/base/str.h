// Str: a text under construction. The first failed allocation sticks; jpp_str_finish()
// reports it, so printers need no check a line.
#ifndef JPP_BASE_STR_H_
#define JPP_BASE_STR_H_

#include "base/alloc.h"

typedef struct jpp_str {
  char* data;  // NUL-ended once anything was appended
  size_t length;
  size_t capacity;
  jpp_status_t* error;  // owned; sticky
} jpp_str_t;

void jpp_str_append(jpp_str_t* str, const char* text);
void jpp_str_append_n(jpp_str_t* str, const char* text, size_t length);
void jpp_str_appendf(jpp_str_t* str, const char* format, ...) JPP_PRINTF(2, 3);
// A quoted string with \" \\ \n \t and \xNN escapes, as the text forms read it back.
void jpp_str_append_quoted(jpp_str_t* str, const char* text);

// Hands the text over (free with jpp_free()) and empties the builder.
jpp_status_t* jpp_str_finish(jpp_str_t* str, char** out_text) JPP_MUST_USE;
// The same where writing the text may have failed: an error is returned as it is, and the
// text dropped.
jpp_status_t* jpp_str_finish_unless(jpp_status_t* error, jpp_str_t* str,
                                    char** out_text) JPP_MUST_USE;
void jpp_str_deinit(jpp_str_t* str);

#endif  // JPP_BASE_STR_H_
