// A growing text whose first failed allocation is kept and reported by jpp_str_finish();
// appending after it does nothing. Printers can therefore append without a check.
#include "base/str.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/null.h"

static bool str_reserve(jpp_str_t* str, size_t extra) {
  if (str->error) return false;
  size_t needed = str->length + extra + 1;
  if (needed <= str->capacity) return true;
  size_t grown = str->capacity ? str->capacity * 2 : 256;
  if (grown < needed) grown = needed;
  str->error = jpp__realloc((void**)&str->data, grown);
  if (str->error) return false;
  str->capacity = grown;
  return true;
}

void jpp_str_append_n(jpp_str_t* str, const char* text, size_t length) {
  if (!str_reserve(str, length)) return;
  if (length) memcpy(str->data + str->length, text, length);
  str->length += length;
  str->data[str->length] = 0;
}

void jpp_str_append(jpp_str_t* str, const char* text) {
  jpp_str_append_n(str, text, strlen(text));
}

void jpp_str_appendf(jpp_str_t* str, const char* format, ...) {
  va_list args;
  va_start(args, format);
  va_list measure;
  va_copy(measure, args);
  int length = vsnprintf(NULL, 0, format, measure);
  va_end(measure);
  if (length > 0 && str_reserve(str, (size_t)length)) {
    vsnprintf(str->data + str->length, (size_t)length + 1, format, args);
    str->length += (size_t)length;
  }
  va_end(args);
}

void jpp__str_append_quoted(jpp_str_t* str, const char* text) {
  jpp_str_append_n(str, "\"", 1);
  for (const unsigned char* c = (const unsigned char*)text; *c; ++c) {
    switch (*c) {
      case '"':
        jpp_str_append(str, "\\\"");
        break;
      case '\\':
        jpp_str_append(str, "\\\\");
        break;
      case '\n':
        jpp_str_append(str, "\\n");
        break;
      case '\t':
        jpp_str_append(str, "\\t");
        break;
      default:
        if (*c < 0x20) {
          jpp_str_appendf(str, "\\x%02x", *c);
        } else {
          jpp_str_append_n(str, (const char*)c, 1);
        }
    }
  }
  jpp_str_append_n(str, "\"", 1);
}

jpp_status_t* jpp_str_finish(jpp_str_t* str, char** out_text) {
  JPP_RETURN_IF_NULL(str, out_text);
  *out_text = NULL;
  if (!str->error && !str->data) str_reserve(str, 0);
  if (str->error) {
    jpp_status_t* error = str->error;
    str->error = NULL;
    jpp_str_deinit(str);
    return error;
  }
  if (!str->length) str->data[0] = 0;
  *out_text = str->data;
  *str = (jpp_str_t){0};
  return NULL;
}

jpp_status_t* jpp__str_finish_unless(jpp_status_t* error, jpp_str_t* str,
                                     char** out_text) {
  *out_text = NULL;
  if (!error) return jpp_str_finish(str, out_text);
  jpp_str_deinit(str);
  return error;
}

void jpp_str_deinit(jpp_str_t* str) {
  jpp_free(str->data);
  jpp_status_free(str->error);
  *str = (jpp_str_t){0};
}

void jpp_text_free(char* text) { jpp_free(text); }
