// Shared by every FFI handler of the tests. Needs jaxlib's xla/ffi/api/c_api.h.
#ifndef TESTS_C_DEVICE_FFI_HANDLER_H_
#define TESTS_C_DEVICE_FFI_HANDLER_H_

#include <stdbool.h>
#include <xla/ffi/api/c_api.h>

// Answers the call in which a plugin asks for the handler's version; returns true if it
// was that call. The type of the field that begins every extension differs between
// versions of XLA, with the same members, and the plugin may be older than the header.
static inline bool ffi_answer_metadata(const XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Metadata_Extension* extension =
      (const XLA_FFI_Metadata_Extension*)frame->extension_start;
  if (!extension || extension->extension_base.type != XLA_FFI_Extension_Metadata) {
    return false;
  }
  int known = frame->api ? frame->api->api_version.minor_version : XLA_FFI_API_MINOR;
  XLA_FFI_Metadata* metadata = extension->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version =
      known < XLA_FFI_API_MINOR ? known : XLA_FFI_API_MINOR;
  return true;
}

static inline XLA_FFI_Error* ffi_fail(const XLA_FFI_CallFrame* frame, const char* message,
                                      XLA_FFI_Error_Code code) {
  XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                    .message = message,
                                    .errc = code};
  return frame->api->XLA_FFI_Error_Create(&args);
}

#endif  // TESTS_C_DEVICE_FFI_HANDLER_H_
