// Turns a plugin's error into a status and frees it; every call of a plugin goes through
// here.
#include "device/pjrt/pjrt.h"

static jpp_status_code_t code_from_pjrt(PJRT_Error_Code code,
                                        jpp_status_code_t otherwise) {
  switch (code) {
    case PJRT_Error_Code_RESOURCE_EXHAUSTED:
      return JPP_OUT_OF_MEMORY;
    case PJRT_Error_Code_UNIMPLEMENTED:
      return JPP_UNSUPPORTED;
    case PJRT_Error_Code_CANCELLED:
      return JPP_CANCELLED;
    default:
      return otherwise;
  }
}

static void error_destroy(const PJRT_Api* api, PJRT_Error* error) {
  JPP_PJRT_ARGS(Error_Destroy, args);
  args.error = error;
  api->PJRT_Error_Destroy(&args);
}

PJRT_Error_Code jpp__pjrt_error_code(const PJRT_Api* api, const PJRT_Error* error) {
  JPP_PJRT_ARGS(Error_GetCode, args);
  args.error = error;
  PJRT_Error* failed = api->PJRT_Error_GetCode(&args);
  if (!failed) return args.code;
  error_destroy(api, failed);
  return PJRT_Error_Code_UNKNOWN;
}

jpp_status_t* jpp__pjrt_status(const PJRT_Api* api, PJRT_Error* error,
                               jpp_status_code_t code, const char* doing) {
  if (!error) return NULL;
  JPP_PJRT_ARGS(Error_Message, args);
  args.error = error;
  api->PJRT_Error_Message(&args);
  jpp_status_t* status =
      jpp_status_make(code_from_pjrt(jpp__pjrt_error_code(api, error), code), "%s: %.*s",
                      doing, (int)args.message_size, args.message ? args.message : "");
  error_destroy(api, error);
  return status;
}

void jpp__pjrt_ignore(const PJRT_Api* api, PJRT_Error* error) {
  if (error) error_destroy(api, error);
}
