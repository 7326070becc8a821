// Loads UCX at run time, once a process, so that the library runs without it. Every
// function that is used is looked up by name, and an installation that lacks one is
// named.
#include "transport/ucx_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "base/log.h"
#include "base/str.h"
#include "jaxpp/option.h"

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static jpp_ucx_t g_ucx;        // under the mutex until g_loaded
static bool g_loaded = false;  // under the mutex

// UCX' constructor takes signals over that are the application's.
static const int kSignals[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT};
enum { kSignalCount = sizeof(kSignals) / sizeof(*kSignals) };

static void* open_library(const char* path) {
  struct sigaction before[kSignalCount];
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], NULL, &before[i]);
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &before[i], NULL);
  if (library) JPP_LOG(JPP_LOG_INFO, "UCX is %s", path);
  return library;
}

// The Python packages lie side by side: jaxpp/lib/libjaxpp.so and libucx/lib/libucp.so.0.
static jpp_status_t* open_beside(void** out_library) {
  static const char* const kPlaces[] = {"/../../libucx/lib/libucp.so.0",
                                        "/../libucx/lib/libucp.so.0"};
  Dl_info here;
  *out_library = NULL;
  if (!dladdr(kPlaces, &here) || !here.dli_fname) return NULL;
  const char* slash = strrchr(here.dli_fname, '/');
  for (size_t i = 0; slash && i < 2 && !*out_library; ++i) {
    jpp_str_t path = {0};
    char* text = NULL;
    jpp_str_append_n(&path, here.dli_fname, (size_t)(slash - here.dli_fname));
    jpp_str_append(&path, kPlaces[i]);
    JPP_RETURN_IF_ERROR(jpp_str_finish(&path, &text));
    *out_library = open_library(text);
    jpp_free(text);
  }
  return NULL;
}

static jpp_status_t* find_library(void** out_library) {
  const char* path = jpp_option_get(JPP_OPTION_UCX);
  if (path) {
    *out_library = open_library(path);
    if (*out_library) return NULL;
    return jpp_status_make(JPP_UNSUPPORTED, "JPP_UCX=%s could not be loaded: %s", path,
                           dlerror());
  }
  JPP_RETURN_IF_ERROR(open_beside(out_library));
  if (!*out_library) *out_library = open_library("libucp.so.0");
  if (*out_library) return NULL;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "the library UCX was not found; install the Python package "
                         "libucx-cu13 (or libucx-cu12) or Debian's libucx0, or name its "
                         "libucp.so.0 in JPP_UCX (%s)",
                         dlerror());
}

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

static jpp_status_t* load_locked(void) {
  void* library = NULL;
  if (g_loaded) return NULL;
  JPP_RETURN_IF_ERROR(find_library(&library));
  JPP_RETURN_IF_ERROR(load_functions(library));
  JPP_LOG(JPP_LOG_INFO, "UCX %s", g_ucx.ucp_get_version_string());
  g_loaded = true;
  return NULL;
}

jpp_status_t* jpp_ucx_load(const jpp_ucx_t** out_ucx) {
  *out_ucx = &g_ucx;
  pthread_mutex_lock(&g_mutex);
  jpp_status_t* status = load_locked();
  pthread_mutex_unlock(&g_mutex);
  return status;
}

jpp_status_t* jpp_ucx_error(const jpp_ucx_t* ucx, ucs_status_t status, const char* call) {
  if (status == UCS_OK) return NULL;
  return jpp_status_make(JPP_PEER_ERROR, "%s: %s", call, ucx->ucs_status_string(status));
}
