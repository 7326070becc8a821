// The profiler of a PJRT plugin, in the form that JAX calls. The types are those of XLA's
// profiler_c_api.h and pjrt_c_api_profiler_extension.h, which no package contains. Only
// the used parts are declared here, and an error is a jpp_status_t.
#ifndef JPP_PROFILE_PLUGIN_H_
#define JPP_PROFILE_PLUGIN_H_

#include <pjrt_c_api.h>

#include "jaxpp/profile.h"
#include "jaxpp/status.h"

typedef struct jpp_profiler jpp_profiler_t;

typedef struct jpp_profiler_call {
  size_t struct_size;
  jpp_profiler_t* profiler;
} jpp_profiler_call_t;

typedef struct jpp_profiler_create {
  size_t struct_size;
  const char* options;
  size_t options_size;
  jpp_profiler_t* profiler;  // out
} jpp_profiler_create_t;

typedef struct jpp_profiler_collect {
  size_t struct_size;
  jpp_profiler_t* profiler;
  uint8_t* buffer;  // where to copy the data; NULL: out, the profiler's memory
  size_t size;      // out: bytes
} jpp_profiler_collect_t;

typedef struct jpp_profiler_message {
  size_t struct_size;
  void* priv;
  const jpp_status_t* error;
  const char* message;  // out
  size_t message_size;  // out
} jpp_profiler_message_t;

typedef struct jpp_profiler_code {
  size_t struct_size;
  void* priv;
  const jpp_status_t* error;
  int32_t code;  // out: of absl
} jpp_profiler_code_t;

typedef struct jpp_profiler_forget {
  size_t struct_size;
  void* priv;
  jpp_status_t* error;
} jpp_profiler_forget_t;

typedef struct jpp_profiler_api {
  size_t struct_size;
  void* priv;
  void (*error_destroy)(jpp_profiler_forget_t* args);
  void (*error_message)(jpp_profiler_message_t* args);
  jpp_status_t* (*error_get_code)(jpp_profiler_code_t* args);
  jpp_status_t* (*create)(jpp_profiler_create_t* args);
  jpp_status_t* (*destroy)(jpp_profiler_call_t* args);
  jpp_status_t* (*start)(jpp_profiler_call_t* args);
  jpp_status_t* (*stop)(jpp_profiler_call_t* args);
  jpp_status_t* (*collect_data)(jpp_profiler_collect_t* args);
} jpp_profiler_api_t;

typedef struct jpp_profiler_extension {
  PJRT_Extension_Base base;
  const jpp_profiler_api_t* api;
  int64_t traceme_context_id;
} jpp_profiler_extension_t;

#endif  // JPP_PROFILE_PLUGIN_H_
