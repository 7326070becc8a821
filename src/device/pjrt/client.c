// Creates a client of a PJRT plugin and reads its platform and devices once, so that
// asking for them later is a read of memory.
#include <string.h>
#include <sys/stat.h>

#include "base/hash.h"
#include "base/log.h"
#include "base/struct_size.h"
#include "device/pjrt/pjrt.h"

static void pjrt_destroy(jpp_client_t* base) {
  jpp_pjrt_client_t* client = jpp_pjrt_client(base);
  if (client->client) {
    JPP_PJRT_ARGS(Client_Destroy, args);
    args.client = client->client;
    jpp_pjrt_ignore(client->api, client->api->PJRT_Client_Destroy(&args));
  }
  pthread_mutex_destroy(&client->loans);
  jpp_arena_deinit(&client->arena);
  jpp_free(client);
}

static const jpp_client_vtable_t kPjrtVtable = {
    .destroy = pjrt_destroy,
    .compile = jpp_pjrt_compile,
    .executable_serialize = jpp_pjrt_executable_serialize,
    .executable_load = jpp_pjrt_executable_load,
    .executable_result_count = jpp_pjrt_executable_result_count,
    .executable_destroy = jpp_pjrt_executable_destroy,
    .execute = jpp_pjrt_execute,
    .buffer_from_host = jpp_pjrt_buffer_from_host,
    .buffer_to_host = jpp_pjrt_buffer_to_host,
    .buffer_copy_to_device = jpp_pjrt_buffer_copy_to_device,
    .buffer_destroy = jpp_pjrt_buffer_destroy,
    .buffer_ready_event = jpp_pjrt_buffer_ready_event,
    .buffer_shape = jpp_pjrt_buffer_shape,
    .buffer_size = jpp_pjrt_buffer_size,
    .buffer_pointer = jpp_pjrt_buffer_pointer,
    .buffer_lend = jpp_pjrt_buffer_lend,
    .buffer_reclaim = jpp_pjrt_buffer_reclaim,
    .buffer_borrow = jpp_pjrt_buffer_borrow,
    .buffer_is_deleted = jpp_pjrt_buffer_is_deleted,
    .event_await = jpp_pjrt_event_await,
    .event_is_ready = jpp_pjrt_event_is_ready,
    .event_on_ready = jpp_pjrt_event_on_ready,
    .event_destroy = jpp_pjrt_event_destroy,
    .register_custom_call = jpp_pjrt_register_custom_call,
};

static jpp_status_t* named_value_from_option(const jpp_client_option_t* option,
                                             PJRT_NamedValue* out_value) {
  PJRT_NamedValue value = {.struct_size = PJRT_NamedValue_STRUCT_SIZE,
                           .name = option->name,
                           .name_size = strlen(option->name),
                           .value_size = 1};
  switch (option->type) {
    case JPP_OPTION_INT64:
      value.type = PJRT_NamedValue_kInt64;
      value.int64_value = option->int64_value;
      break;
    case JPP_OPTION_STRING:
      value.type = PJRT_NamedValue_kString;
      value.string_value = option->string_value;
      value.value_size = strlen(option->string_value);
      break;
    case JPP_OPTION_BOOL:
      value.type = PJRT_NamedValue_kBool;
      value.bool_value = option->bool_value;
      break;
    case JPP_OPTION_FLOAT:
      value.type = PJRT_NamedValue_kFloat;
      value.float_value = option->float_value;
      break;
    default:
      return jpp_status_make(JPP_INVALID_ARGUMENT, "option %s has unknown type %d",
                             option->name, (int)option->type);
  }
  *out_value = value;
  return NULL;
}

static jpp_status_t* client_open(jpp_pjrt_client_t* client,
                                 const jpp_pjrt_options_t* options) {
  PJRT_NamedValue* values = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&client->arena, options->option_count, &values));
  for (uint32_t i = 0; i < options->option_count; ++i) {
    JPP_RETURN_IF_ERROR(named_value_from_option(&options->options[i], &values[i]));
  }
  JPP_PJRT_ARGS(Client_Create, args);
  args.create_options = values;
  args.num_options = options->option_count;
  JPP_RETURN_IF_ERROR_IN(
      jpp_pjrt_status(client->api, client->api->PJRT_Client_Create(&args),
                      JPP_PLUGIN_ERROR, "cannot make a client"),
      "plugin %s", options->plugin_path);
  client->client = args.client;
  return NULL;
}

// The plugin's file as it was when it was loaded.
static uint64_t hash_file(const char* path) {
  struct stat info;
  if (stat(path, &info) != 0) return 0;
  uint64_t hash = jpp_hash_u64(JPP_HASH_START, (uint64_t)info.st_size);
  hash = jpp_hash_u64(hash, (uint64_t)info.st_mtim.tv_sec);
  return jpp_hash_u64(hash, (uint64_t)info.st_mtim.tv_nsec);
}

static jpp_status_t* client_read_platform(jpp_pjrt_client_t* client) {
  JPP_PJRT_ARGS(Client_PlatformName, name);
  name.client = client->client;
  JPP_RETURN_IF_ERROR(jpp_pjrt_status(client->api,
                                      client->api->PJRT_Client_PlatformName(&name),
                                      JPP_PLUGIN_ERROR, "platform name"));
  JPP_PJRT_ARGS(Client_PlatformVersion, version);
  version.client = client->client;
  JPP_RETURN_IF_ERROR(jpp_pjrt_status(client->api,
                                      client->api->PJRT_Client_PlatformVersion(&version),
                                      JPP_PLUGIN_ERROR, "platform version"));
  JPP_RETURN_IF_ERROR(jpp_arena_strndup(&client->arena, name.platform_name,
                                        name.platform_name_size,
                                        &client->base.info.platform_name));
  return jpp_arena_strndup(&client->arena, version.platform_version,
                           version.platform_version_size,
                           &client->base.info.platform_version);
}

static jpp_status_t* client_read_device(jpp_pjrt_client_t* client, PJRT_Device* device,
                                        jpp_device_info_t* out_info) {
  const PJRT_Api* api = client->api;
  JPP_PJRT_ARGS(Device_GetDescription, description);
  description.device = device;
  JPP_RETURN_IF_ERROR(jpp_pjrt_status(api, api->PJRT_Device_GetDescription(&description),
                                      JPP_PLUGIN_ERROR, "device description"));
  JPP_PJRT_ARGS(DeviceDescription_Id, id);
  id.device_description = description.device_description;
  JPP_RETURN_IF_ERROR(jpp_pjrt_status(api, api->PJRT_DeviceDescription_Id(&id),
                                      JPP_PLUGIN_ERROR, "device id"));
  JPP_PJRT_ARGS(DeviceDescription_Kind, kind);
  kind.device_description = description.device_description;
  JPP_RETURN_IF_ERROR(jpp_pjrt_status(api, api->PJRT_DeviceDescription_Kind(&kind),
                                      JPP_PLUGIN_ERROR, "device kind"));
  out_info->id = id.id;
  return jpp_arena_strndup(&client->arena, kind.device_kind, kind.device_kind_size,
                           &out_info->kind);
}

static jpp_status_t* client_read_devices(jpp_pjrt_client_t* client) {
  JPP_PJRT_ARGS(Client_AddressableDevices, args);
  args.client = client->client;
  JPP_RETURN_IF_ERROR(jpp_pjrt_status(client->api,
                                      client->api->PJRT_Client_AddressableDevices(&args),
                                      JPP_PLUGIN_ERROR, "addressable devices"));
  client->devices = args.addressable_devices;
  uint32_t count = (uint32_t)args.num_addressable_devices;
  jpp_device_info_t* devices = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&client->arena, count, &devices));
  for (uint32_t i = 0; i < count; ++i) {
    JPP_RETURN_IF_ERROR_IN(client_read_device(client, client->devices[i], &devices[i]),
                           "device %u", i);
  }
  client->base.info.devices = devices;
  client->base.info.device_count = count;
  return NULL;
}

static jpp_status_t* client_init(jpp_pjrt_client_t* client,
                                 const jpp_pjrt_options_t* options) {
  JPP_RETURN_IF_ERROR(jpp_pjrt_plugin_load(options->plugin_path, &client->api));
  client->base.build = hash_file(options->plugin_path);
  JPP_RETURN_IF_ERROR(client_open(client, options));
  JPP_RETURN_IF_ERROR(client_read_platform(client));
  return client_read_devices(client);
}

jpp_status_t* jpp_client_create_pjrt(const jpp_pjrt_options_t* options,
                                     jpp_client_t** out_client) {
  *out_client = NULL;
  jpp_pjrt_options_t full;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_pjrt_options_t, option_count, options, &full));
  JPP_RETURN_IF_ERROR(jpp_process_begin_client());
  jpp_pjrt_client_t* client = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(*client), (void**)&client));
  client->base.vtable = &kPjrtVtable;
  client->base.info.driver = "pjrt";
  pthread_mutex_init(&client->loans, NULL);
  jpp_arena_init(&client->arena);
  jpp_status_t* status = client_init(client, &full);
  if (status) {
    pjrt_destroy(&client->base);
    return status;
  }
  JPP_LOG(JPP_LOG_INFO, "plugin %s: platform %s, %u devices", full.plugin_path,
          client->base.info.platform_name, client->base.info.device_count);
  *out_client = &client->base;
  return NULL;
}
