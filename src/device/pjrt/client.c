// Creates a client of a PJRT plugin and reads its platform and devices once, so that
// later queries only read memory.
#include <string.h>
#include <sys/stat.h>

#include "base/hash.h"
#include "base/log.h"
#include "base/null.h"
#include "base/struct_size.h"
#include "device/pjrt/pjrt.h"

static void pjrt_destroy(jpp_client_t* base) {
  jpp_pjrt_client_t* client = jpp__pjrt_client(base);
  if (client->client) {
    JPP_PJRT_ARGS(Client_Destroy, args);
    args.client = client->client;
    jpp__pjrt_ignore(client->api, client->api->PJRT_Client_Destroy(&args));
  }
  pthread_mutex_destroy(&client->loans);
  pthread_mutex_destroy(&client->loaded_lock);
  jpp_vec_deinit(&client->loaded);
  jpp__arena_deinit(&client->arena);
  jpp_free(client);
}

static const jpp_client_vtable_t kPjrtVtable = {
    .destroy = pjrt_destroy,
    .compile = jpp__pjrt_compile,
    .executable_serialize = jpp__pjrt_executable_serialize,
    .executable_load = jpp__pjrt_executable_load,
    .executable_result_count = jpp__pjrt_executable_result_count,
    .executable_hlo = jpp__pjrt_executable_hlo,
    .executable_memory = jpp__pjrt_executable_memory,
    .executable_destroy = jpp__pjrt_executable_destroy,
    .execute = jpp__pjrt_execute,
    .buffer_from_host = jpp__pjrt_buffer_from_host,
    .buffer_to_host = jpp__pjrt_buffer_to_host,
    .buffer_copy = jpp__pjrt_buffer_copy,
    .buffer_destroy = jpp__pjrt_buffer_destroy,
    .buffer_ready_event = jpp__pjrt_buffer_ready_event,
    .buffer_shape = jpp__pjrt_buffer_shape,
    .buffer_lend = jpp__pjrt_buffer_lend,
    .buffer_reclaim = jpp__pjrt_buffer_reclaim,
    .buffer_borrow = jpp__pjrt_buffer_borrow,
    .event_await = jpp__pjrt_event_await,
    .event_is_ready = jpp__pjrt_event_is_ready,
    .event_on_ready = jpp__pjrt_event_on_ready,
    .event_destroy = jpp__pjrt_event_destroy,
    .register_custom_call = jpp__pjrt_register_custom_call,
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
    case JPP_OPTION_INT64_LIST:
      value.type = PJRT_NamedValue_kInt64List;
      value.int64_array_value = option->int64_list_value->values;
      value.value_size = option->int64_list_value->count;
      break;
    default:
      return jpp_status_make(JPP_INVALID_ARGUMENT, "option %s has unknown type %d",
                             option->name, (int)option->type);
  }
  *out_value = value;
  return NULL;
}

static jpp_status_t* check_nodes(const jpp_pjrt_options_t* options) {
  uint32_t num_nodes = options->num_nodes ? options->num_nodes : 1;
  if (options->node_id >= num_nodes) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "plugin %s: expected a node_id below %u, num_nodes; found %u",
                           options->plugin_path, num_nodes, options->node_id);
  }
  if (num_nodes == 1 || options->store) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "plugin %s: expected a store for %u nodes, found NULL",
                         options->plugin_path, num_nodes);
}

// Adds to the caller's options those that describe the nodes to the plugin.
static jpp_status_t* make_named_values(jpp_pjrt_client_t* client,
                                       const jpp_pjrt_options_t* options,
                                       PJRT_Client_Create_Args* args) {
  const jpp_client_option_t nodes[] = {
      {.name = "node_id", .type = JPP_OPTION_INT64, .int64_value = options->node_id},
      {.name = "num_nodes", .type = JPP_OPTION_INT64, .int64_value = options->num_nodes}};
  uint32_t count = options->option_count, more = options->num_nodes > 1 ? 2 : 0;
  PJRT_NamedValue* values = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&client->arena, count + more, &values));
  for (uint32_t i = 0; i < count; ++i) {
    JPP_RETURN_IF_ERROR(named_value_from_option(&options->options[i], &values[i]));
  }
  for (uint32_t i = 0; i < more; ++i) {
    JPP_RETURN_IF_ERROR(named_value_from_option(&nodes[i], &values[count + i]));
  }
  args->create_options = values;
  args->num_options = count + more;
  return NULL;
}

// A plugin without nodes reports the option as unknown. Owns `status`.
static jpp_status_t* explain_nodes(jpp_status_t* status) {
  const char* text = jpp_status_message(status);
  if (!strstr(text, "num_nodes") && !strstr(text, "node_id")) return status;
  jpp_status_t* unsupported =
      jpp_status_make(JPP_UNSUPPORTED,
                      "expected a plugin that makes programs over the devices of several "
                      "processes, found one that does not: %s",
                      text);
  jpp_status_free(status);
  return unsupported;
}

static bool asks_for_runs_in_call(const jpp_pjrt_options_t* options) {
  for (uint32_t i = 0; i < options->option_count; ++i) {
    const jpp_client_option_t* option = &options->options[i];
    if (strcmp(option->name, "asynchronous") == 0 && option->type == JPP_OPTION_BOOL) {
      return !option->bool_value;
    }
  }
  return false;
}

static jpp_status_t* client_open(jpp_pjrt_client_t* client,
                                 const jpp_pjrt_options_t* options) {
  JPP_RETURN_IF_ERROR(check_nodes(options));
  JPP_PJRT_ARGS(Client_Create, args);
  JPP_RETURN_IF_ERROR(make_named_values(client, options, &args));
  if (options->num_nodes > 1) {
    client->store = *options->store;
    jpp__pjrt_store_give(&client->store, &args);
  }
  PJRT_Error* error = client->api->PJRT_Client_Create(&args);
  jpp_status_t* status =
      jpp__pjrt_status(client->api, error, JPP_PLUGIN_ERROR, "cannot make a client");
  if (status && options->num_nodes > 1) status = explain_nodes(status);
  if (status) return jpp_status_annotate(status, "plugin %s", options->plugin_path);
  client->client = args.client;
  client->base.info.runs_in_call = asks_for_runs_in_call(options);
  return NULL;
}

// Hashes the plugin's file, to identify its version.
static uint64_t hash_file(const char* path) {
  struct stat info;
  if (stat(path, &info) != 0) return 0;
  uint64_t hash = jpp__hash_u64(JPP_HASH_START, (uint64_t)info.st_size);
  hash = jpp__hash_u64(hash, (uint64_t)info.st_mtim.tv_sec);
  return jpp__hash_u64(hash, (uint64_t)info.st_mtim.tv_nsec);
}

static jpp_status_t* client_read_platform(jpp_pjrt_client_t* client) {
  JPP_PJRT_ARGS(Client_PlatformName, name);
  name.client = client->client;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(client->api,
                                       client->api->PJRT_Client_PlatformName(&name),
                                       JPP_PLUGIN_ERROR, "platform name"));
  JPP_PJRT_ARGS(Client_PlatformVersion, version);
  version.client = client->client;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(client->api,
                                       client->api->PJRT_Client_PlatformVersion(&version),
                                       JPP_PLUGIN_ERROR, "platform version"));
  JPP_RETURN_IF_ERROR(jpp__arena_strndup(&client->arena, name.platform_name,
                                         name.platform_name_size,
                                         &client->base.info.platform_name));
  return jpp__arena_strndup(&client->arena, version.platform_version,
                            version.platform_version_size,
                            &client->base.info.platform_version);
}

jpp_status_t* jpp__pjrt_device_description(const PJRT_Api* api, PJRT_Device* device,
                                           PJRT_DeviceDescription** out_description) {
  JPP_PJRT_ARGS(Device_GetDescription, args);
  args.device = device;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Device_GetDescription(&args),
                                       JPP_PLUGIN_ERROR, "device description"));
  *out_description = args.device_description;
  return NULL;
}

jpp_status_t* jpp__pjrt_device_read(jpp_pjrt_client_t* client,
                                    PJRT_DeviceDescription* description,
                                    jpp_device_info_t* out_info) {
  const PJRT_Api* api = client->api;
  JPP_PJRT_ARGS(DeviceDescription_Id, id);
  id.device_description = description;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_DeviceDescription_Id(&id),
                                       JPP_PLUGIN_ERROR, "device id"));
  JPP_PJRT_ARGS(DeviceDescription_Kind, kind);
  kind.device_description = description;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_DeviceDescription_Kind(&kind),
                                       JPP_PLUGIN_ERROR, "device kind"));
  out_info->id = id.id;
  return jpp__arena_strndup(&client->arena, kind.device_kind, kind.device_kind_size,
                            &out_info->kind);
}

static jpp_status_t* client_read_device(jpp_pjrt_client_t* client, PJRT_Device* device,
                                        jpp_device_info_t* out_info) {
  PJRT_DeviceDescription* description = NULL;
  JPP_RETURN_IF_ERROR(jpp__pjrt_device_description(client->api, device, &description));
  JPP_PJRT_ARGS(Device_LocalHardwareId, hardware);
  hardware.device = device;
  JPP_RETURN_IF_ERROR(
      jpp__pjrt_status(client->api, client->api->PJRT_Device_LocalHardwareId(&hardware),
                       JPP_PLUGIN_ERROR, "hardware id"));
  out_info->hardware_id = hardware.local_hardware_id;
  return jpp__pjrt_device_read(client, description, out_info);
}

static jpp_status_t* client_read_devices(jpp_pjrt_client_t* client) {
  JPP_PJRT_ARGS(Client_AddressableDevices, args);
  args.client = client->client;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(client->api,
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

// If programs run in the call, all devices use the host's memory and the caller's thread.
// Every number then means the plugin's first device, and no buffer has to be copied from
// one device to another.
static jpp_status_t* join_devices(jpp_pjrt_client_t* client) {
  PJRT_Device** joined = NULL;
  if (!client->base.info.runs_in_call) return NULL;
  uint32_t count = client->base.info.device_count;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&client->arena, count, &joined));
  for (uint32_t i = 0; i < count; ++i) joined[i] = client->devices[0];
  client->devices = joined;
  client->base.info.shares_buffers = true;
  return NULL;
}

static jpp_status_t* client_init(jpp_pjrt_client_t* client,
                                 const jpp_pjrt_options_t* options) {
  JPP_RETURN_IF_ERROR(jpp__pjrt_plugin_load(options->plugin_path, &client->api));
  client->base.build = hash_file(options->plugin_path);
  JPP_RETURN_IF_ERROR(client_open(client, options));
  JPP_RETURN_IF_ERROR(client_read_platform(client));
  JPP_RETURN_IF_ERROR(client_read_devices(client));
  JPP_RETURN_IF_ERROR(jpp__pjrt_nodes_read(client, options));
  JPP_RETURN_IF_ERROR(join_devices(client));
  return jpp__pjrt_memories_read(client);
}

jpp_status_t* jpp_client_create_pjrt(const jpp_pjrt_options_t* options,
                                     jpp_client_t** out_client) {
  JPP_RETURN_IF_NULL(options, out_client);
  *out_client = NULL;
  jpp_pjrt_options_t full;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_pjrt_options_t, option_count, options, &full));
  JPP_RETURN_IF_ERROR(jpp__process_begin_client());
  jpp_pjrt_client_t* client = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(*client), (void**)&client));
  client->base.vtable = &kPjrtVtable;
  client->base.info.driver = "pjrt";
  pthread_mutex_init(&client->loans, NULL);
  pthread_mutex_init(&client->loaded_lock, NULL);
  jpp__arena_init(&client->arena);
  jpp_status_t* status = client_init(client, &full);
  if (status) {
    pjrt_destroy(&client->base);
    return status;
  }
  JPP_LOG(JPP_LOG_INFO, "plugin %s: platform %s, %u devices with %s", full.plugin_path,
          client->base.info.platform_name, client->base.info.device_count,
          client->base.info.memory_kinds);
  if (full.num_nodes > 1) {
    JPP_LOG(JPP_LOG_INFO, "plugin %s: node %u of %u, which have %u devices",
            full.plugin_path, full.node_id, full.num_nodes,
            client->base.info.global_device_count);
  }
  *out_client = &client->base;
  return NULL;
}
