// Small helpers over jansson.
#ifndef JPP_CLI_JSON_H_
#define JPP_CLI_JSON_H_

#include <jansson.h>

#include "base/str.h"

// Appends the value's text and frees the value. JPP_OUT_OF_MEMORY for NULL, which is what
// jansson gives when memory is out.
jpp_status_t* jpp_json_take(json_t* value, jpp_str_t* out) JPP_MUST_USE;
// Appends to an array and takes over the value. The array becomes NULL when either is.
void jpp_json_append(json_t** list, json_t* value);
// An array of numbers.
json_t* jpp_json_ids(const uint32_t* ids, uint32_t count);
// null for NULL.
json_t* jpp_json_text(const char* text);
// null for JPP_NONE.
json_t* jpp_json_id(uint32_t id);

#endif  // JPP_CLI_JSON_H_
