// The command's JSON, by jansson.
#ifndef JPP_CLI_JSON_H_
#define JPP_CLI_JSON_H_

#include <jansson.h>

#include "jaxpp/str.h"

// A string, with U+FFFD for bytes that are no UTF-8; null for NULL.
json_t* jpp_cli_json_text(const char* text);
// Appends to an array and takes over the value. The array becomes NULL when either is.
void jpp_cli_json_append(json_t** list, json_t* value);
// Appends the value's text, indented, and a line's end; frees the value. Reals have
// `digits` digits. JPP_OUT_OF_MEMORY for NULL, which is what jansson makes without
// memory.
jpp_status_t* jpp_cli_json_print(json_t* value, size_t digits,
                                 jpp_str_t* out) JPP_MUST_USE;

#endif  // JPP_CLI_JSON_H_
