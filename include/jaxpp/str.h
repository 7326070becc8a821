// Str: a growing text, for programs that print what this library gives them.
//
//   jpp_str_t str = {0};
//   jpp_str_appendf(&str, "%u ranks\n", planned->ranks);
//   char* text = NULL;
//   JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
//
// The first failed allocation sticks: later appends do nothing, and jpp_str_finish()
// reports it, so that printers need not check each line.
//
// Threads: any thread; one text belongs to one thread at a time.
#ifndef JAXPP_STR_H_
#define JAXPP_STR_H_

#include <stddef.h>

#include "jaxpp/status.h"

// Empty when zeroed.
typedef struct jpp_str {
  char* data;  // owned; NUL-ended once anything was appended, NULL before
  size_t length;
  size_t capacity;
  jpp_status_t* error;  // owned; sticky
} jpp_str_t;

JPP_API void jpp_str_append(jpp_str_t* str, const char* text);
JPP_API void jpp_str_append_n(jpp_str_t* str, const char* text, size_t length);
JPP_API void jpp_str_appendf(jpp_str_t* str, const char* format, ...) JPP_PRINTF(2, 3);
// Appends the text with U+FFFD in place of each byte that is not part of a UTF-8
// character: names and files may hold any bytes, while JSON, XML and most readers accept
// UTF-8 only.
JPP_API void jpp_str_append_utf8(jpp_str_t* str, const char* text, size_t length);

// Hands the text over and empties *str. Free the text with jpp_text_free().
// JPP_OUT_OF_MEMORY if memory ran out in any earlier call.
JPP_API jpp_status_t* jpp_str_finish(jpp_str_t* str, char** out_text) JPP_MUST_USE;
// Drops the text; *str is empty and usable again.
JPP_API void jpp_str_deinit(jpp_str_t* str);

#endif  // JAXPP_STR_H_
