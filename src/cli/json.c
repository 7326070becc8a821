#include "cli/json.h"

static int append_chunk(const char* chunk, size_t size, void* user) {
  jpp_str_t* out = user;
  jpp_str_append_n(out, chunk, size);
  return out->error ? -1 : 0;
}

jpp_status_t* jpp_json_take(json_t* value, jpp_str_t* out) {
  if (!value) return jpp_status_make(JPP_OUT_OF_MEMORY, "host memory: no room for JSON");
  int failed = json_dump_callback(value, append_chunk, out, JSON_INDENT(1));
  json_decref(value);
  if (failed && !out->error) {
    return jpp_status_make(JPP_INTERNAL_ERROR, "JSON could not be written");
  }
  jpp_str_append(out, "\n");
  return NULL;
}

void jpp_json_append(json_t** list, json_t* value) {
  if (!json_array_append_new(*list, value)) return;
  json_decref(*list);
  *list = NULL;
}

json_t* jpp_json_ids(const uint32_t* ids, uint32_t count) {
  json_t* list = json_array();
  for (uint32_t i = 0; i < count; ++i) jpp_json_append(&list, json_integer(ids[i]));
  return list;
}

json_t* jpp_json_text(const char* text) { return text ? json_string(text) : json_null(); }

json_t* jpp_json_id(uint32_t id) {
  return id == UINT32_MAX ? json_null() : json_integer(id);
}
