// The devices of all nodes, as one node's plugin client lists them.
#include "base/alloc.h"
#include "device/pjrt/pjrt.h"

static jpp_status_t* read_global_device(jpp_pjrt_client_t* client, PJRT_Device* device,
                                        jpp_global_device_t* out_device) {
  const PJRT_Api* api = client->api;
  jpp_device_info_t info = {0};
  JPP_PJRT_ARGS(DeviceDescription_ProcessIndex, process);
  JPP_RETURN_IF_ERROR(
      jpp__pjrt_device_description(api, device, &process.device_description));
  JPP_RETURN_IF_ERROR(jpp__pjrt_device_read(client, process.device_description, &info));
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api,
                                       api->PJRT_DeviceDescription_ProcessIndex(&process),
                                       JPP_PLUGIN_ERROR, "device's process index"));
  *out_device = (jpp_global_device_t){
      .id = info.id, .node = (uint32_t)process.process_index, .kind = info.kind};
  return NULL;
}

static bool is_own(const jpp_client_info_t* info, int32_t id) {
  for (uint32_t i = 0; i < info->device_count; ++i) {
    if (info->devices[i].id == id) return true;
  }
  return false;
}

// Inserts `device` by id into the `count` sorted devices.
static void insert_by_id(jpp_global_device_t* devices, uint32_t count,
                         jpp_global_device_t device) {
  uint32_t at = count;
  for (; at > 0 && devices[at - 1].id > device.id; --at) devices[at] = devices[at - 1];
  devices[at] = device;
}

static jpp_status_t* fill_devices(jpp_pjrt_client_t* client, PJRT_Device* const* all,
                                  uint32_t count, jpp_global_device_t* devices) {
  jpp_client_info_t* info = &client->base.info;
  uint32_t own = info->device_count, filled = own;
  for (uint32_t i = 0; i < own; ++i) {
    JPP_RETURN_IF_ERROR(read_global_device(client, client->devices[i], &devices[i]));
  }
  for (uint32_t i = 0; i < count; ++i) {
    jpp_global_device_t device;
    JPP_RETURN_IF_ERROR(read_global_device(client, all[i], &device));
    if (is_own(info, device.id)) continue;
    insert_by_id(devices + own, filled++ - own, device);
  }
  info->global_devices = devices;
  info->global_device_count = filled;
  return NULL;
}

// A plugin without nodes ignores the options for them.
static jpp_status_t* check_nodes(const jpp_client_info_t* info,
                                 const jpp_pjrt_options_t* options) {
  bool as_told = info->node_id == options->node_id;
  for (uint32_t i = 0; i < info->device_count; ++i) {
    as_told &= info->global_devices[i].node == options->node_id;
  }
  for (uint32_t node = 0; node < options->num_nodes && as_told; ++node) {
    bool has_device = false;
    for (uint32_t i = 0; i < info->global_device_count; ++i) {
      has_device |= info->global_devices[i].node == node;
    }
    as_told = has_device;
  }
  if (as_told) return NULL;
  return jpp_status_make(
      JPP_UNSUPPORTED,
      "plugin %s (platform %s): expected a client that is node %u of %u and knows the "
      "devices of each, found one that is node %u and knows %u devices, %u of its own; "
      "this plugin has no programs over several processes, or a node has no devices",
      options->plugin_path, info->platform_name, options->node_id, options->num_nodes,
      info->node_id, info->global_device_count, info->device_count);
}

jpp_status_t* jpp__pjrt_nodes_read(jpp_pjrt_client_t* client,
                                   const jpp_pjrt_options_t* options) {
  const PJRT_Api* api = client->api;
  JPP_PJRT_ARGS(Client_ProcessIndex, process);
  process.client = client->client;
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Client_ProcessIndex(&process),
                                       JPP_PLUGIN_ERROR, "process index"));
  JPP_PJRT_ARGS(Client_Devices, all);
  all.client = client->client;
  JPP_RETURN_IF_ERROR(
      jpp__pjrt_status(api, api->PJRT_Client_Devices(&all), JPP_PLUGIN_ERROR, "devices"));
  jpp_global_device_t* devices = NULL;
  // There is room for all devices, even if a plugin omits its own from the list.
  size_t room = all.num_devices + client->base.info.device_count;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&client->arena, room, &devices));
  client->base.info.node_id = (uint32_t)process.process_index;
  JPP_RETURN_IF_ERROR(
      fill_devices(client, all.devices, (uint32_t)all.num_devices, devices));
  return options->num_nodes > 1 ? check_nodes(&client->base.info, options) : NULL;
}
