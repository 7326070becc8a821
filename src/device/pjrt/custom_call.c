// Custom calls through PJRT's FFI extension. Its header does not ship with pjrt_c_api.h,
// so its layout is declared here: xla/pjrt/c/pjrt_c_api_ffi_extension.h. Older plugins
// have an api_version before the handler, which cannot be detected; if they are given
// this layout, some of them register garbage and report success. Therefore only versions
// known to have this layout are used.
#include <string.h>

#include "base/null.h"
#include "device/pjrt/pjrt.h"

// Tests showed that 0.115 has this layout and 0.81 the older one.
#define FFI_MINOR_NEEDED 115

typedef struct ffi_register_handler_args {
  size_t struct_size;
  const char* target_name;
  size_t target_name_size;
  void* handler;
  const char* platform_name;
  size_t platform_name_size;
  uint32_t traits;
} ffi_register_handler_args_t;

typedef struct ffi_extension {
  PJRT_Extension_Base base;
  void* type_register;
  void* user_data_add;
  PJRT_Error* (*register_handler)(ffi_register_handler_args_t* args);
} ffi_extension_t;

static const ffi_extension_t* ffi_extension_find(const PJRT_Api* api) {
  if (api->pjrt_api_version.minor_version < FFI_MINOR_NEEDED) return NULL;
  for (const PJRT_Extension_Base* e = api->extension_start; e; e = e->next) {
    if (e->type != PJRT_Extension_Type_FFI) continue;
    bool whole = e->struct_size >= PJRT_STRUCT_SIZE(ffi_extension_t, register_handler);
    return whole ? (const ffi_extension_t*)e : NULL;
  }
  return NULL;
}

jpp_status_t* jpp__pjrt_register_custom_call(jpp_client_t* base,
                                             const jpp_custom_call_t* custom_call) {
  JPP_RETURN_IF_NULL(custom_call->handler);
  const PJRT_Api* api = jpp__pjrt_client(base)->api;
  const ffi_extension_t* ffi = ffi_extension_find(api);
  if (!ffi) {
    return jpp_status_make(
        JPP_UNSUPPORTED,
        "custom call %s: expected a plugin of PJRT API %d.%d or later "
        "with an FFI extension, found %d.%d%s",
        custom_call->name, PJRT_API_MAJOR, FFI_MINOR_NEEDED,
        api->pjrt_api_version.major_version, api->pjrt_api_version.minor_version,
        api->pjrt_api_version.minor_version < FFI_MINOR_NEEDED ? "" : " without one");
  }
  ffi_register_handler_args_t args = {
      .struct_size = PJRT_STRUCT_SIZE(ffi_register_handler_args_t, traits),
      .target_name = custom_call->name,
      .target_name_size = strlen(custom_call->name),
      .handler = custom_call->handler,
      .platform_name = custom_call->platform,
      .platform_name_size = strlen(custom_call->platform),
      .traits = custom_call->traits,
  };
  JPP_RETURN_IF_ERROR_IN(jpp__pjrt_status(api, ffi->register_handler(&args),
                                          JPP_INVALID_ARGUMENT, "cannot be registered"),
                         "custom call %s", custom_call->name);
  return NULL;
}
