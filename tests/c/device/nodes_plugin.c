// A PJRT plugin that supports nodes but implements only devices: its clients find each
// other through the key-value store as those of XLA's GPU plugin do. With the option
// `act` it misbehaves.
#include <pjrt_c_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kMostDevices = 16 };

struct PJRT_Error {
  PJRT_Error_Code code;
  size_t size;
  char text[512];
};

struct PJRT_DeviceDescription {
  int id, process;
};

struct PJRT_Device {
  PJRT_DeviceDescription description;
};

struct PJRT_Client {
  PJRT_Client_Create_Args args;  // for the callbacks
  int64_t node_id, num_nodes, own, timeout_ms;
  char act[32];
  size_t device_count;
  PJRT_Device table[kMostDevices];
  PJRT_Device* devices[kMostDevices];
};

// --- Errors ---------------------------------------------------------------------------

static PJRT_Error* make_error(PJRT_Error_Code code, const char* text, size_t size) {
  PJRT_Error* error = calloc(1, sizeof(*error));
  error->code = code;
  error->size = size < sizeof(error->text) ? size : sizeof(error->text);
  memcpy(error->text, text, error->size);
  return error;
}

static PJRT_Error* fail(PJRT_Error_Code code, const char* text) {
  return make_error(code, text, strlen(text));
}

static void error_destroy(PJRT_Error_Destroy_Args* args) { free(args->error); }

static void error_message(PJRT_Error_Message_Args* args) {
  args->message = args->error->text;
  args->message_size = args->error->size;
}

static PJRT_Error* error_get_code(PJRT_Error_GetCode_Args* args) {
  args->code = args->error->code;
  return NULL;
}

static PJRT_Error* initialize(PJRT_Plugin_Initialize_Args* args) {
  (void)args;
  return NULL;
}

// --- The store ------------------------------------------------------------------------

static PJRT_CallbackError g_make_error = make_error;

static PJRT_Error* put(const PJRT_Client* client, const char* key, size_t key_size,
                       const char* value) {
  PJRT_KeyValuePutCallback_Args args = {
      .struct_size = PJRT_KeyValuePutCallback_Args_STRUCT_SIZE,
      .key = key,
      .key_size = key_size,
      .value = value,
      .value_size = strlen(value),
      .callback_error = &g_make_error,
      .user_arg = client->args.kv_put_user_arg};
  return client->args.kv_put_callback(&args);
}

// Bytes after the key do not belong to it.
static PJRT_Error* put_of_node(const PJRT_Client* client, const char* what,
                               const char* value) {
  char key[64];
  int size = snprintf(key, sizeof(key), "%s/%dXX", what, (int)client->node_id);
  return put(client, key, (size_t)size - 2, value);
}

// Reads how many devices a node has.
static PJRT_Error* get_count(const PJRT_Client* client, int node, int* out_count) {
  char key[64];
  int size = snprintf(key, sizeof(key), "stub/%dXX", node);
  PJRT_KeyValueGetCallback_Args args = {
      .struct_size = PJRT_KeyValueGetCallback_Args_STRUCT_SIZE,
      .key = key,
      .key_size = (size_t)size - 2,
      .timeout_in_ms = (int)client->timeout_ms,
      .callback_error = &g_make_error,
      .user_arg = client->args.kv_get_user_arg};
  PJRT_Error* error = client->args.kv_get_callback(&args);
  if (error) return error;
  *out_count = args.value_size ? args.value[0] - '0' : 0;
  args.value_deleter_callback(args.value);
  return NULL;
}

static PJRT_Error* try_get(const PJRT_Client* client, const char* key) {
  PJRT_KeyValueTryGetCallback_Args args = {
      .struct_size = PJRT_KeyValueTryGetCallback_Args_STRUCT_SIZE,
      .key = key,
      .key_size = strlen(key),
      .callback_error = &g_make_error,
      .user_arg = client->args.kv_try_get_user_arg};
  PJRT_Error* error = client->args.kv_try_get_callback(&args);
  if (!error) args.value_deleter_callback(args.value);
  return error;
}

// --- The client -----------------------------------------------------------------------

static void read_options(PJRT_Client* client) {
  client->num_nodes = 1;
  client->own = 2;
  client->timeout_ms = 60000;
  for (size_t i = 0; i < client->args.num_options; ++i) {
    const PJRT_NamedValue* option = &client->args.create_options[i];
    if (strncmp(option->name, "act", option->name_size) == 0) {
      memcpy(client->act, option->string_value, option->value_size);
    } else if (strncmp(option->name, "visible_devices", option->name_size) == 0) {
      client->own = (int64_t)option->value_size;
      for (size_t k = 0; k < option->value_size; ++k) {
        if (option->int64_array_value[k] != (int64_t)k) client->own = 0;
      }
    } else if (strncmp(option->name, "node_id", option->name_size) == 0) {
      client->node_id = option->int64_value;
    } else if (strncmp(option->name, "num_nodes", option->name_size) == 0) {
      client->num_nodes = option->int64_value;
    } else if (strncmp(option->name, "timeout_ms", option->name_size) == 0) {
      client->timeout_ms = option->int64_value;
    }
  }
}

static void add_devices(PJRT_Client* client, int node, int count) {
  for (int i = 0; i < count; ++i) {
    PJRT_Device* device = &client->table[client->device_count];
    device->description = (PJRT_DeviceDescription){.id = node * 10 + i, .process = node};
    client->devices[client->device_count++] = device;
  }
}

// Lists devices from the last node to the first.
static PJRT_Error* meet_others(PJRT_Client* client) {
  char own[2] = {(char)('0' + client->own), 0};
  PJRT_Error* error = put_of_node(client, "stub", own);
  for (int node = (int)client->num_nodes; !error && node-- > 0;) {
    int count = 0;
    error = get_count(client, node, &count);
    if (!error) add_devices(client, node, count);
  }
  return error;
}

static PJRT_Error* act(PJRT_Client* client) {
  if (strcmp(client->act, "try missing") == 0) return try_get(client, "stub/missing");
  if (strcmp(client->act, "NUL") == 0) return put(client, "a\0b", 3, "1");
  if (strcmp(client->act, "unknown") == 0) {
    return fail(PJRT_Error_Code_INVALID_ARGUMENT, "unknown option: num_nodes");
  }
  if (strcmp(client->act, "alone") == 0) {  // as if it had got no node options
    client->node_id = 0;
    add_devices(client, 0, (int)client->own);
    return NULL;
  }
  PJRT_Error* error = meet_others(client);
  return error ? error : try_get(client, "stub/0");
}

static PJRT_Error* client_create(PJRT_Client_Create_Args* args) {
  PJRT_Client* client = calloc(1, sizeof(*client));
  client->args = *args;
  read_options(client);
  if (client->num_nodes == 1) {
    add_devices(client, 0, (int)client->own);
    client->args.kv_put_callback = NULL;
  } else {
    PJRT_Error* error = act(client);
    if (error) {
      free(client);
      return error;
    }
  }
  args->client = client;
  return NULL;
}

// The store that it was given is still valid.
static PJRT_Error* client_destroy(PJRT_Client_Destroy_Args* args) {
  PJRT_Error* error = NULL;
  if (args->client->args.kv_put_callback) error = put_of_node(args->client, "bye", "1");
  free(args->client);
  return error;
}

static PJRT_Error* platform_name(PJRT_Client_PlatformName_Args* args) {
  args->platform_name = "stub";
  args->platform_name_size = 4;
  return NULL;
}

static PJRT_Error* platform_version(PJRT_Client_PlatformVersion_Args* args) {
  args->platform_version = "1";
  args->platform_version_size = 1;
  return NULL;
}

static PJRT_Error* process_index(PJRT_Client_ProcessIndex_Args* args) {
  args->process_index = (int)args->client->node_id;
  return NULL;
}

static PJRT_Error* devices(PJRT_Client_Devices_Args* args) {
  args->devices = args->client->devices;
  args->num_devices = args->client->device_count;
  return NULL;
}

static PJRT_Error* addressable_devices(PJRT_Client_AddressableDevices_Args* args) {
  const PJRT_Client* client = args->client;
  size_t first = 0;
  while (client->table[first].description.process != (int)client->node_id) ++first;
  args->addressable_devices = &client->devices[first];
  args->num_addressable_devices = (size_t)client->own;
  return NULL;
}

static PJRT_Error* description(PJRT_Device_GetDescription_Args* args) {
  args->device_description = &args->device->description;
  return NULL;
}

// The device's number in its machine; the tests need no other attribute.
static PJRT_Error* hardware_id(PJRT_Device_LocalHardwareId_Args* args) {
  args->local_hardware_id = args->device->description.id;
  return NULL;
}

static PJRT_Error* description_id(PJRT_DeviceDescription_Id_Args* args) {
  args->id = args->device_description->id;
  return NULL;
}

static PJRT_Error* description_kind(PJRT_DeviceDescription_Kind_Args* args) {
  args->device_kind = "stub";
  args->device_kind_size = 4;
  return NULL;
}

static PJRT_Error* description_process(PJRT_DeviceDescription_ProcessIndex_Args* args) {
  args->process_index = args->device_description->process;
  return NULL;
}

static const PJRT_Api kApi = {
    .struct_size = PJRT_Api_STRUCT_SIZE,
    .pjrt_api_version = {.struct_size = PJRT_Api_Version_STRUCT_SIZE,
                         .major_version = PJRT_API_MAJOR,
                         .minor_version = PJRT_API_MINOR},
    .PJRT_Error_Destroy = error_destroy,
    .PJRT_Error_Message = error_message,
    .PJRT_Error_GetCode = error_get_code,
    .PJRT_Plugin_Initialize = initialize,
    .PJRT_Client_Create = client_create,
    .PJRT_Client_Destroy = client_destroy,
    .PJRT_Client_PlatformName = platform_name,
    .PJRT_Client_PlatformVersion = platform_version,
    .PJRT_Client_ProcessIndex = process_index,
    .PJRT_Client_Devices = devices,
    .PJRT_Client_AddressableDevices = addressable_devices,
    .PJRT_Device_GetDescription = description,
    .PJRT_Device_LocalHardwareId = hardware_id,
    .PJRT_DeviceDescription_Id = description_id,
    .PJRT_DeviceDescription_Kind = description_kind,
    .PJRT_DeviceDescription_ProcessIndex = description_process,
};

__attribute__((visibility("default"))) const PJRT_Api* GetPjrtApi(void);
const PJRT_Api* GetPjrtApi(void) { return &kApi; }
