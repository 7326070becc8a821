// JSON with jansson.
#include "base/json.h"

#include <errno.h>
#include <string.h>

#include "base/utf8.h"

static jpp_status_t* out_of_memory(void) {
  return jpp_status_make(JPP_OUT_OF_MEMORY, "host memory: allocation for JSON failed");
}

jpp_status_t* jpp__json_read(const char* file, const char* text, size_t length,
                             json_t** out_value) {
  json_error_t error;
  errno = 0;
  *out_value = json_loadb(text, length, 0, &error);
  if (*out_value) return NULL;
  // If memory runs out in the middle of a string, jansson reports a syntax error.
  if (errno == ENOMEM) {
    return jpp_status_annotate(out_of_memory(), "%s", file);
  }
  return jpp_status_make(JPP_PARSE_ERROR, "%s:%d: %s", file, error.line, error.text);
}

static int append_chunk(const char* chunk, size_t size, void* user) {
  jpp_str_t* out = user;
  jpp_str_append_n(out, chunk, size);
  return out->error ? -1 : 0;
}

void jpp__json_take(json_t* value, size_t flags, jpp_str_t* out) {
  // A value that exists can be written, unless memory runs out.
  bool failed = !value || json_dump_callback(value, append_chunk, out, flags) < 0;
  json_decref(value);
  if (failed && !out->error) out->error = out_of_memory();
}

void jpp__json_append(json_t** list, json_t* value) {
  if (!json_array_append_new(*list, value)) return;
  json_decref(*list);
  *list = NULL;
}

json_t* jpp__json_ids(const uint32_t* ids, uint32_t count) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < count; ++i) jpp__json_append(&list, json_integer(ids[i]));
  return list;
}

json_t* jpp__json_text(const char* text) {
  if (!text) return json_null();
  if (jpp__utf8_is_valid(text, strlen(text))) return json_string_nocheck(text);
  jpp_str_t str = {0};
  char* repaired = NULL;
  jpp_str_append_utf8(&str, text, strlen(text));
  jpp_status_t* status = jpp_str_finish(&str, &repaired);
  json_t* value = status ? NULL : json_string_nocheck(repaired);
  jpp_status_free(status);
  jpp_free(repaired);
  return value;
}

json_t* jpp__json_id(uint32_t id) {
  return id == UINT32_MAX ? json_null() : json_integer(id);
}
