// Makes and prints jansson's values, whose NULL, made where memory ran out, becomes a
// status here: what builds a value needs no check of each of its parts.
#include "cli/json.h"

#include <string.h>

static jpp_status_t* out_of_memory(void) {
  return jpp_status_make(JPP_OUT_OF_MEMORY, "host memory: allocation for JSON failed");
}

json_t* jpp_cli_json_text(const char* text) {
  if (!text) return json_null();
  jpp_str_t str = {0};
  jpp_str_append_utf8(&str, text, strlen(text));
  json_t* value =
      str.error ? NULL : json_stringn_nocheck(str.data ? str.data : "", str.length);
  jpp_str_deinit(&str);
  return value;
}

void jpp_cli_json_append(json_t** list, json_t* value) {
  if (!json_array_append_new(*list, value)) return;
  json_decref(*list);
  *list = NULL;
}

static int append_chunk(const char* chunk, size_t size, void* out) {
  jpp_str_append_n(out, chunk, size);
  return 0;
}

jpp_status_t* jpp_cli_json_print(json_t* value, size_t digits, jpp_str_t* out) {
  size_t flags = JSON_INDENT(1) | JSON_REAL_PRECISION(digits);
  bool failed = !value || json_dump_callback(value, append_chunk, out, flags) < 0;
  json_decref(value);
  jpp_str_append(out, "\n");
  return failed ? out_of_memory() : NULL;
}
