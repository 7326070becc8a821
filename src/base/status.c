// Errors as values: a code and a message made once, annotated on the way up. Making one
// cannot fail: without memory for the message, a static status is returned instead.
#include "jaxpp/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Allocated with plain malloc: an injected allocation failure must not lose its own
// report.
struct jpp_status {
  jpp_status_code_t code;
  char message[];
};

// The status that jpp_status_make() returns when there is no memory for a message. Never
// freed.
static struct {
  jpp_status_code_t code;
  char message[32];
} g_out_of_memory = {JPP_OUT_OF_MEMORY, "host memory is exhausted"};

static const char* const kCodeNames[JPP_STATUS_CODE_COUNT] = {
    [JPP_OK] = "ok",
    [JPP_INVALID_ARGUMENT] = "invalid-argument",
    [JPP_PARSE_ERROR] = "parse",
    [JPP_GRAPH_ERROR] = "graph",
    [JPP_MARKS_ERROR] = "stage-marks",
    [JPP_SCHEDULE_ERROR] = "schedule",
    [JPP_MESH_ERROR] = "mesh",
    [JPP_MICROBATCH_ERROR] = "microbatch",
    [JPP_OPERATION_ERROR] = "operation",
    [JPP_SHARDING_ERROR] = "sharding",
    [JPP_PLUGIN_ERROR] = "plugin",
    [JPP_DEVICES_ERROR] = "devices",
    [JPP_DONATED_ERROR] = "donated",
    [JPP_PROGRAM_ERROR] = "program",
    [JPP_EXECUTION_ERROR] = "execution",
    [JPP_NAN_ERROR] = "nan",
    [JPP_OUT_OF_MEMORY] = "out-of-memory",
    [JPP_UNSUPPORTED] = "unsupported",
    [JPP_PEER_ERROR] = "peer",
    [JPP_CANCELLED] = "cancelled",
    [JPP_INTERNAL_ERROR] = "internal",
};

static jpp_status_t* status_out_of_memory(void) {
  return (jpp_status_t*)(void*)&g_out_of_memory;
}

static jpp_status_t* status_make_v(jpp_status_code_t code, const char* tail,
                                   const char* format, va_list args) {
  va_list measure;
  va_copy(measure, args);
  int length = vsnprintf(NULL, 0, format, measure);
  va_end(measure);
  if (length < 0) length = 0;
  size_t tail_length = tail ? strlen(tail) + 2 : 0;
  size_t size = (size_t)length + tail_length + 1;
  jpp_status_t* status = malloc(sizeof(*status) + size);
  if (!status) return status_out_of_memory();
  status->code = code;
  vsnprintf(status->message, size, format, args);
  if (tail) snprintf(status->message + length, size - (size_t)length, ": %s", tail);
  return status;
}

jpp_status_t* jpp_status_make(jpp_status_code_t code, const char* format, ...) {
  va_list args;
  va_start(args, format);
  jpp_status_t* status = status_make_v(code, NULL, format, args);
  va_end(args);
  return status;
}

jpp_status_t* jpp_status_annotate(jpp_status_t* status, const char* format, ...) {
  if (!status) return NULL;
  va_list args;
  va_start(args, format);
  jpp_status_t* annotated = status_make_v(status->code, status->message, format, args);
  va_end(args);
  jpp_status_free(status);
  return annotated;
}

jpp_status_t* jpp_status_clone(const jpp_status_t* status) {
  return status ? jpp_status_make(status->code, "%s", status->message) : NULL;
}

jpp_status_code_t jpp_status_code(const jpp_status_t* status) {
  return status ? status->code : JPP_OK;
}

const char* jpp_status_message(const jpp_status_t* status) {
  return status ? status->message : "ok";
}

const char* jpp_status_code_name(jpp_status_code_t code) {
  return (unsigned)code < JPP_STATUS_CODE_COUNT ? kCodeNames[code] : "unknown";
}

void jpp_status_free(jpp_status_t* status) {
  if (status != status_out_of_memory()) free(status);
}
