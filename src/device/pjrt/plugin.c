// Loads plugins with dlopen(). A loaded plugin is never unloaded: it has started threads
// and registered exit handlers, which would run in unmapped code.
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>

#include "device/pjrt/pjrt.h"

// Before 0.57 the function table had another order; since then it has every function that
// this driver calls (xla/pjrt/c/CHANGELOG.md).
#define PJRT_MINOR_NEEDED 57
// The size of the table up to the last function that this driver needs.
#define PJRT_API_BYTES_NEEDED \
  PJRT_STRUCT_SIZE(PJRT_Api, PJRT_Buffer_OpaqueDeviceMemoryDataPointer)

typedef struct loaded_plugin {
  struct loaded_plugin* next;
  const PJRT_Api* api;
  dev_t device;  // together with `inode` identifies the file, whatever its path
  ino_t inode;
} loaded_plugin_t;

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static loaded_plugin_t* g_plugins;  // guarded by g_mutex; nodes are never freed

static jpp_status_t* plugin_check_version(const char* path, const PJRT_Api* api) {
  const PJRT_Api_Version* version = &api->pjrt_api_version;
  if (api->struct_size < PJRT_STRUCT_SIZE(PJRT_Api, pjrt_api_version)) {
    return jpp_status_make(JPP_PLUGIN_ERROR,
                           "plugin %s: its PJRT_Api has %zu bytes, too few for a version",
                           path, api->struct_size);
  }
  if (version->major_version != PJRT_API_MAJOR ||
      version->minor_version < PJRT_MINOR_NEEDED) {
    return jpp_status_make(
        JPP_PLUGIN_ERROR,
        "plugin %s: expected PJRT API %d.%d or a later %d.x, found %d.%d", path,
        PJRT_API_MAJOR, PJRT_MINOR_NEEDED, PJRT_API_MAJOR, version->major_version,
        version->minor_version);
  }
  if (api->struct_size < PJRT_API_BYTES_NEEDED) {
    return jpp_status_make(JPP_PLUGIN_ERROR,
                           "plugin %s: expected a PJRT_Api of %zu bytes or more, found "
                           "%zu in API %d.%d",
                           path, (size_t)PJRT_API_BYTES_NEEDED, api->struct_size,
                           version->major_version, version->minor_version);
  }
  return NULL;
}

static jpp_status_t* plugin_open(const char* path, const PJRT_Api** out_api) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* reason = dlerror();
    return jpp_status_make(JPP_PLUGIN_ERROR, "plugin %s: not a loadable library: %s",
                           path, reason ? reason : "unknown reason");
  }
  const PJRT_Api* (*get_api)(void) =
      (const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi");
  if (!get_api) {
    dlclose(library);
    return jpp_status_make(
        JPP_PLUGIN_ERROR, "plugin %s: not a PJRT plugin: it exports no GetPjrtApi", path);
  }
  *out_api = get_api();
  if (*out_api) return NULL;
  return jpp_status_make(JPP_PLUGIN_ERROR, "plugin %s: GetPjrtApi gave NULL", path);
}

static jpp_status_t* plugin_load_new(const char* path, const struct stat* file,
                                     const PJRT_Api** out_api) {
  const PJRT_Api* api = NULL;
  loaded_plugin_t* plugin = NULL;
  JPP_RETURN_IF_ERROR(plugin_open(path, &api));
  JPP_RETURN_IF_ERROR(plugin_check_version(path, api));
  JPP_RETURN_IF_ERROR(jpp_alloc(sizeof(*plugin), (void**)&plugin));
  JPP_PJRT_ARGS(Plugin_Initialize, args);
  jpp_status_t* status = jpp__pjrt_status(api, api->PJRT_Plugin_Initialize(&args),
                                          JPP_PLUGIN_ERROR, "cannot be initialised");
  if (status) {
    jpp_free(plugin);
    return jpp_status_annotate(status, "plugin %s", path);
  }
  *plugin = (loaded_plugin_t){
      .next = g_plugins, .api = api, .device = file->st_dev, .inode = file->st_ino};
  g_plugins = plugin;
  *out_api = api;
  return NULL;
}

static const PJRT_Api* plugin_find(const struct stat* file) {
  for (const loaded_plugin_t* p = g_plugins; p; p = p->next) {
    if (p->device == file->st_dev && p->inode == file->st_ino) return p->api;
  }
  return NULL;
}

jpp_status_t* jpp__pjrt_plugin_load(const char* path, const PJRT_Api** out_api) {
  *out_api = NULL;
  struct stat file;
  if (!path || stat(path, &file) != 0) {
    return jpp_status_make(JPP_PLUGIN_ERROR, "plugin %s: no such file",
                           path ? path : "(none)");
  }
  pthread_mutex_lock(&g_mutex);
  jpp_status_t* status = NULL;
  *out_api = plugin_find(&file);
  if (!*out_api) status = plugin_load_new(path, &file, out_api);
  pthread_mutex_unlock(&g_mutex);
  return status;
}
