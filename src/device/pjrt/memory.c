// The memories of a plugin's devices, read once. A plugin that does not list them has
// device memory only.
#include <string.h>

#include "base/str.h"
#include "device/pjrt/pjrt.h"

static bool lists_memories(const PJRT_Api* api) {
  return api->struct_size >= PJRT_STRUCT_SIZE(PJRT_Api, PJRT_Buffer_CopyToMemory) &&
         api->PJRT_Device_AddressableMemories && api->PJRT_Memory_Kind &&
         api->PJRT_Buffer_CopyToMemory;
}

static bool is_named(const PJRT_Memory_Kind_Args* kind, jpp_memory_t memory) {
  return jpp_memory_parse(kind->kind, (uint32_t)kind->kind_size) == memory;
}

// Appends the names of the memories to `kinds`, unless it is NULL.
static jpp_status_t* read_memories(jpp_pjrt_client_t* client, uint32_t device,
                                   jpp_str_t* kinds) {
  const PJRT_Api* api = client->api;
  JPP_PJRT_ARGS(Device_AddressableMemories, args);
  args.device = client->devices[device];
  JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Device_AddressableMemories(&args),
                                       JPP_PLUGIN_ERROR, "addressable memories"));
  for (size_t i = 0; i < args.num_memories; ++i) {
    JPP_PJRT_ARGS(Memory_Kind, kind);
    kind.memory = args.memories[i];
    JPP_RETURN_IF_ERROR(jpp__pjrt_status(api, api->PJRT_Memory_Kind(&kind),
                                         JPP_PLUGIN_ERROR, "memory kind"));
    if (is_named(&kind, JPP_MEMORY_PINNED_HOST)) {
      client->pinned_host[device] = args.memories[i];
    }
    if (kinds) {
      jpp_str_appendf(kinds, "%s%.*s", i ? ", " : "", (int)kind.kind_size, kind.kind);
    }
  }
  return NULL;
}

static jpp_status_t* read_all(jpp_pjrt_client_t* client, jpp_str_t* kinds) {
  jpp_client_info_t* info = &client->base.info;
  bool all = info->device_count > 0;
  for (uint32_t i = 0; i < info->device_count; ++i) {
    JPP_RETURN_IF_ERROR_IN(read_memories(client, i, i ? NULL : kinds), "device %u", i);
    all = all && client->pinned_host[i];
  }
  if (all) info->memories |= 1u << JPP_MEMORY_PINNED_HOST;
  return NULL;
}

jpp_status_t* jpp__pjrt_memories_read(jpp_pjrt_client_t* client) {
  jpp_client_info_t* info = &client->base.info;
  // Whatever name a plugin gives to its default memory, it is device memory.
  info->memories = 1u << JPP_MEMORY_DEVICE;
  info->memory_kinds = jpp_memory_name(JPP_MEMORY_DEVICE);
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&client->arena, info->device_count, &client->pinned_host));
  if (!lists_memories(client->api)) return NULL;
  jpp_str_t kinds = {0};
  jpp_status_t* status = read_all(client, &kinds);
  if (status || !kinds.length) {
    jpp_str_deinit(&kinds);
    return status;
  }
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&kinds, &text));
  status = jpp__arena_strdup(&client->arena, text, &info->memory_kinds);
  jpp_free(text);
  return status;
}
