// Loads UCX at run time, once per process, so that the library also runs without it.
// Functions are looked up by name; the error for an incomplete installation names the
// missing one.
#include "transport/ucx_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "transport/library.h"

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static jpp_ucx_t g_ucx;        // under the mutex until g_loaded
static bool g_loaded = false;  // under the mutex

static const jpp_library_t kUcx = {
    .name = "UCX",
    .option = JPP_OPTION_UCX,
    .package = "libucx/lib/libucp.so.0",
    .file = "libucp.so.0",
    .install = "the Python package libucx-cu13 (or libucx-cu12) or Debian's libucx0",
};

static jpp_status_t* load_functions(void* library) {
  const char* missing = NULL;
// NOLINTBEGIN(bugprone-macro-parentheses): functions are named
#define JPP_UCX_LOAD(name)                               \
  g_ucx.name = (__typeof__(&name))dlsym(library, #name); \
  if (!g_ucx.name) missing = #name;
  JPP_UCX_FUNCTIONS(JPP_UCX_LOAD)
#undef JPP_UCX_LOAD
  // NOLINTEND(bugprone-macro-parentheses)
  if (!missing) return NULL;
  return jpp_status_make(
      JPP_UNSUPPORTED,
      "the library UCX that was found has no %s; expected release 1.13 "
      "or later",
      missing);
}

// For its cache of memory that RDMA devices can read, UCX overwrites the first
// instructions of mmap(), munmap() and others while the process runs. A thread that does
// not run for 5 ms in the middle of one crashes (openucx/ucx#9148). Other devices need no
// such cache. UCX reads the variable, which has no equivalent in ucp_config_modify(),
// when it is loaded.
static void keep_functions(const char* devices) {
  if (!strchr(devices, ':')) setenv("UCX_MEM_EVENTS", "n", /*overwrite=*/0);
}

static jpp_status_t* load_locked(const char* devices) {
  void* library = NULL;
  if (g_loaded) return NULL;
  keep_functions(devices);
  JPP_RETURN_IF_ERROR(jpp__library_open(&kUcx, &library));
  JPP_RETURN_IF_ERROR(load_functions(library));
  JPP_LOG(JPP_LOG_INFO, "UCX %s", g_ucx.ucp_get_version_string());
  g_loaded = true;
  return NULL;
}

jpp_status_t* jpp__ucx_load(const char* devices, const jpp_ucx_t** out_ucx) {
  *out_ucx = &g_ucx;
  pthread_mutex_lock(&g_mutex);
  jpp_status_t* status = load_locked(devices);
  pthread_mutex_unlock(&g_mutex);
  return status;
}

jpp_status_t* jpp__ucx_error(const jpp_ucx_t* ucx, ucs_status_t status,
                             const char* call) {
  if (status == UCS_OK) return NULL;
  return jpp_status_make(JPP_PEER_ERROR, "%s: %s", call, ucx->ucs_status_string(status));
}
