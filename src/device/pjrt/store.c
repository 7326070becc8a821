// Connects a plugin to the key-value store: PJRT's callbacks, implemented with the
// store's two functions.
#include <string.h>

#include "base/alloc.h"
#include "device/pjrt/pjrt.h"

static PJRT_Error_Code code_to_pjrt(jpp_status_code_t code) {
  switch (code) {
    case JPP_OUT_OF_MEMORY:
      return PJRT_Error_Code_RESOURCE_EXHAUSTED;
    case JPP_UNSUPPORTED:
      return PJRT_Error_Code_UNIMPLEMENTED;
    case JPP_CANCELLED:
      return PJRT_Error_Code_CANCELLED;
    case JPP_PEER_ERROR:
      return PJRT_Error_Code_UNAVAILABLE;
    default:
      return PJRT_Error_Code_INTERNAL;
  }
}

// The plugin copies the message.
static PJRT_Error* make_error(PJRT_CallbackError* make, PJRT_Error_Code code,
                              const char* message) {
  return (*make)(code, message, strlen(message));
}

// Owns `status`; NULL is success.
static PJRT_Error* take_status(PJRT_CallbackError* make, jpp_status_t* status) {
  if (!status) return NULL;
  PJRT_Error* error =
      make_error(make, code_to_pjrt(jpp_status_code(status)), jpp_status_message(status));
  jpp_status_free(status);
  return error;
}

// A plugin's keys have a size and no NUL at the end.
static jpp_status_t* copy_key(const char* key, size_t size, char** out_key) {
  if (memchr(key, 0, size)) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "a key of %zu bytes has a NUL in it",
                           size);
  }
  JPP_RETURN_IF_ERROR(jpp_alloc(size + 1, (void**)out_key));
  memcpy(*out_key, key, size);
  return NULL;
}

static jpp_status_t* store_get(const jpp_key_value_store_t* store, const char* key,
                               size_t key_size, uint32_t timeout_ms, void** out_value,
                               size_t* out_size) {
  char* copy = NULL;
  JPP_RETURN_IF_ERROR(copy_key(key, key_size, &copy));
  jpp_status_t* status = store->get(store->user, copy, timeout_ms, out_value, out_size);
  jpp_free(copy);
  return status;
}

static void delete_value(char* value) { jpp_free(value); }

// Called on any thread of the plugin, like the next two.
static PJRT_Error* handle_get(PJRT_KeyValueGetCallback_Args* args) {
  void* value = NULL;
  size_t size = 0;
  uint32_t timeout_ms = args->timeout_in_ms > 0 ? (uint32_t)args->timeout_in_ms : 0;
  jpp_status_t* status =
      store_get(args->user_arg, args->key, args->key_size, timeout_ms, &value, &size);
  if (status) return take_status(args->callback_error, status);
  if (!value) {
    status = jpp_status_make(JPP_PEER_ERROR, "%.*s: no node has put the key in %u ms",
                             (int)args->key_size, args->key, timeout_ms);
    PJRT_Error* error =
        make_error(args->callback_error, PJRT_Error_Code_DEADLINE_EXCEEDED,
                   jpp_status_message(status));
    jpp_status_free(status);
    return error;
  }
  args->value = value;
  args->value_size = size;
  args->value_deleter_callback = delete_value;
  return NULL;
}

static PJRT_Error* handle_try_get(PJRT_KeyValueTryGetCallback_Args* args) {
  void* value = NULL;
  size_t size = 0;
  jpp_status_t* status =
      store_get(args->user_arg, args->key, args->key_size, 0, &value, &size);
  if (status) return take_status(args->callback_error, status);
  if (!value) {
    return make_error(args->callback_error, PJRT_Error_Code_NOT_FOUND,
                      "no node has put the key yet");
  }
  args->value = value;
  args->value_size = size;
  args->value_deleter_callback = delete_value;
  return NULL;
}

static PJRT_Error* handle_put(PJRT_KeyValuePutCallback_Args* args) {
  const jpp_key_value_store_t* store = args->user_arg;
  char* key = NULL;
  jpp_status_t* status = copy_key(args->key, args->key_size, &key);
  if (!status) status = store->put(store->user, key, args->value, args->value_size);
  jpp_free(key);
  return take_status(args->callback_error, status);
}

void jpp__pjrt_store_give(jpp_key_value_store_t* store, PJRT_Client_Create_Args* args) {
  args->kv_get_callback = handle_get;
  args->kv_try_get_callback = handle_try_get;
  args->kv_put_callback = handle_put;
  args->kv_get_user_arg = store;
  args->kv_try_get_user_arg = store;
  args->kv_put_user_arg = store;
}
