// Where to look for a library that is loaded at run time, in which order, and the error
// if it is missing.
#include "transport/library.h"

#include <dlfcn.h>
#include <signal.h>
#include <string.h>

#include "base/alloc.h"
#include "base/log.h"
#include "base/str.h"

// UCX's constructor takes over signals that belong to the application.
static const int kSignals[] = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT};
enum { kSignalCount = sizeof(kSignals) / sizeof(*kSignals) };

static void* open_file(const jpp_library_t* library, const char* path) {
  struct sigaction before[kSignalCount];
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], NULL, &before[i]);
  void* handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  for (int i = 0; i < kSignalCount; ++i) sigaction(kSignals[i], &before[i], NULL);
  if (handle) JPP_LOG(JPP_LOG_INFO, "%s is %s", library->name, path);
  return handle;
}

// The Python packages are installed side by side: jaxpp/lib/libjaxpp.so and
// libucx/lib/libucp.so.0.
static jpp_status_t* open_beside(const jpp_library_t* library, void** out_handle) {
  static const char* const kUp[] = {"/../../", "/../"};
  Dl_info here;
  if (!library->package || !dladdr(kUp, &here) || !here.dli_fname) return NULL;
  const char* slash = strrchr(here.dli_fname, '/');
  for (size_t i = 0; slash && i < 2 && !*out_handle; ++i) {
    jpp_str_t path = {0};
    char* text = NULL;
    jpp_str_append_n(&path, here.dli_fname, (size_t)(slash - here.dli_fname));
    jpp_str_appendf(&path, "%s%s", kUp[i], library->package);
    JPP_RETURN_IF_ERROR(jpp_str_finish(&path, &text));
    *out_handle = open_file(library, text);
    jpp_free(text);
  }
  return NULL;
}

jpp_status_t* jpp__library_open(const jpp_library_t* library, void** out_handle) {
  const char* option = jpp_option_info(library->option)->name;
  const char* path = jpp_option_get(library->option);
  *out_handle = NULL;
  if (path) {
    *out_handle = open_file(library, path);
    if (*out_handle) return NULL;
    return jpp_status_make(JPP_UNSUPPORTED, "%s=%s could not be loaded: %s", option, path,
                           dlerror());
  }
  JPP_RETURN_IF_ERROR(open_beside(library, out_handle));
  if (!*out_handle) *out_handle = open_file(library, library->file);
  if (*out_handle) return NULL;
  return jpp_status_make(
      JPP_UNSUPPORTED,
      "the library %s was not found; install %s, or name its %s in %s (%s)",
      library->name, library->install, library->file, option, dlerror());
}
