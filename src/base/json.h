// Small helpers over jansson, which reads and writes all JSON.
#ifndef JPP_BASE_JSON_H_
#define JPP_BASE_JSON_H_

#include <jansson.h>

#include "base/str.h"

// Reads a text; `file` is named in errors ("FILE:LINE: ..."). JPP_PARSE_ERROR,
// JPP_OUT_OF_MEMORY. Free with json_decref().
jpp_status_t* jpp__json_read(const char* file, const char* text, size_t length,
                             json_t** out_value) JPP_MUST_USE;

// Appends the value's text and frees the value; flags: jansson's JSON_INDENT(1) and the
// like. NULL, which these functions and jansson's return when memory runs out, becomes
// JPP_OUT_OF_MEMORY, stored in `out`. Texts must be UTF-8 and numbers finite.
void jpp__json_take(json_t* value, size_t flags, jpp_str_t* out);
// Appends to an array and takes over the value. The array becomes NULL if either is NULL.
void jpp__json_append(json_t** list, json_t* value);
// An array of numbers.
json_t* jpp__json_ids(const uint32_t* ids, uint32_t count);
// null for NULL; U+FFFD for bytes that are not UTF-8.
json_t* jpp__json_text(const char* text);
// null for JPP_NONE.
json_t* jpp__json_id(uint32_t id);

#endif  // JPP_BASE_JSON_H_
