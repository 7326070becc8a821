// A library whose GetPjrtApi is wrong in the way that the build chooses.
#include <pjrt_c_api.h>

#ifndef STUB_MAJOR
#define STUB_MAJOR PJRT_API_MAJOR
#endif
#ifndef STUB_MINOR
#define STUB_MINOR PJRT_API_MINOR
#endif
#ifndef STUB_SIZE
#define STUB_SIZE PJRT_Api_STRUCT_SIZE
#endif

static const char kMessage[] = "the stub does not start";

static void error_destroy(PJRT_Error_Destroy_Args* args) { (void)args; }

static void error_message(PJRT_Error_Message_Args* args) {
  args->message = kMessage;
  args->message_size = sizeof(kMessage) - 1;
}

static PJRT_Error* error_get_code(PJRT_Error_GetCode_Args* args) {
  args->code = PJRT_Error_Code_INTERNAL;
  return NULL;
}

static PJRT_Error* initialize(PJRT_Plugin_Initialize_Args* args) {
  (void)args;
  return (PJRT_Error*)(void*)kMessage;
}

static const PJRT_Api kApi = {
    .struct_size = STUB_SIZE,
    .pjrt_api_version = {.struct_size = PJRT_Api_Version_STRUCT_SIZE,
                         .major_version = STUB_MAJOR,
                         .minor_version = STUB_MINOR},
    .PJRT_Error_Destroy = error_destroy,
    .PJRT_Error_Message = error_message,
    .PJRT_Error_GetCode = error_get_code,
    .PJRT_Plugin_Initialize = initialize,
};

#ifndef STUB_NO_ENTRY
__attribute__((visibility("default"))) const PJRT_Api* GetPjrtApi(void);
const PJRT_Api* GetPjrtApi(void) { return &kApi; }
#else
__attribute__((visibility("default"))) const PJRT_Api* SomethingElse(void);
const PJRT_Api* SomethingElse(void) { return &kApi; }
#endif
