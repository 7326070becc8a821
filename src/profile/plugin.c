// A profiler in the form that JAX drives: created, started, stopped, asked for its data,
// destroyed. Once started, it observes all steps.
#include "profile/plugin.h"

#include <string.h>

#include "profile/session.h"

struct jpp_profiler {
  jpp_profile_session_t session;
  char* bytes;  // owned; the data, once JAX has asked for it
  size_t size;
  bool started;
};

enum { kAbslResourceExhausted = 8 };

// --- Errors ---------------------------------------------------------------------------

static void destroy_error(jpp_profiler_forget_t* args) { jpp_status_free(args->error); }

static void get_message(jpp_profiler_message_t* args) {
  args->message = jpp_status_message(args->error);
  args->message_size = strlen(args->message);
}

// The only possible failure here is running out of memory.
static jpp_status_t* get_code(jpp_profiler_code_t* args) {
  args->code = kAbslResourceExhausted;
  return NULL;
}

// --- A profiler -----------------------------------------------------------------------

static void add_step(void* user, const jpp_trace_t* trace) {
  jpp__profile_add_step(user, trace);
}

static jpp_status_t* create_profiler(jpp_profiler_create_t* args) {
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &args->profiler));
  jpp__profile_init(&args->profiler->session);
  return NULL;
}

static jpp_status_t* stop_profiler(jpp_profiler_call_t* args) {
  if (args->profiler->started) jpp_trace_observe(NULL, NULL);
  args->profiler->started = false;
  return NULL;
}

static jpp_status_t* destroy_profiler(jpp_profiler_call_t* args) {
  if (!args->profiler) return NULL;
  JPP_RETURN_IF_ERROR(stop_profiler(args));
  jpp__profile_deinit(&args->profiler->session);
  jpp_text_free(args->profiler->bytes);
  jpp_free(args->profiler);
  return NULL;
}

static jpp_status_t* start_profiler(jpp_profiler_call_t* args) {
  args->profiler->started = true;
  jpp_trace_observe(add_step, &args->profiler->session);
  return NULL;
}

// JAX calls it once for the size, and once more for the bytes if it wants them in its own
// memory.
static jpp_status_t* collect_data(jpp_profiler_collect_t* args) {
  jpp_profiler_t* profiler = args->profiler;
  if (!profiler->bytes) {
    JPP_RETURN_IF_ERROR(
        jpp__profile_serialize(&profiler->session, &profiler->bytes, &profiler->size));
  }
  args->size = profiler->size;
  if (!args->buffer) {
    args->buffer = (uint8_t*)profiler->bytes;
  } else if (profiler->size) {
    memcpy(args->buffer, profiler->bytes, profiler->size);
  }
  return NULL;
}

// --- The plugin -----------------------------------------------------------------------

static const jpp_profiler_api_t kProfiler = {.struct_size = sizeof(kProfiler),
                                             .error_destroy = destroy_error,
                                             .error_message = get_message,
                                             .error_get_code = get_code,
                                             .create = create_profiler,
                                             .destroy = destroy_profiler,
                                             .start = start_profiler,
                                             .stop = stop_profiler,
                                             .collect_data = collect_data};

const void* jpp_profile_plugin(void) {
  static jpp_profiler_extension_t extension = {
      .base = {.struct_size = sizeof(extension), .type = PJRT_Extension_Type_Profiler},
      .api = &kProfiler,
      .traceme_context_id = -1};
  static const PJRT_Api kApi = {
      .struct_size = sizeof(kApi),
      .extension_start = &extension.base,
      .pjrt_api_version = {.struct_size = sizeof(kApi.pjrt_api_version),
                           .major_version = PJRT_API_MAJOR,
                           .minor_version = PJRT_API_MINOR}};
  return &kApi;
}
