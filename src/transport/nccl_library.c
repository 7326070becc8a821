// Loads NCCL and the CUDA driver once per process, looks up their functions by name, and
// refuses a release of NCCL that is too old.
#include "transport/nccl_library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "base/log.h"
#include "transport/library.h"

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static jpp_nccl_library_t g_library;  // under the mutex until g_loaded
static bool g_loaded = false;         // under the mutex

static const jpp_library_t kNccl = {
    .name = "NCCL",
    .option = JPP_OPTION_NCCL,
    .package = "nvidia/nccl/lib/libnccl.so.2",
    .file = "libnccl.so.2",
    .install = "the Python package nvidia-nccl-cu13 (or nvidia-nccl-cu12)",
};

static const jpp_library_t kCuda = {
    .name = "CUDA",
    .option = JPP_OPTION_CUDA,
    .file = "libcuda.so.1",
    .install = "the driver of NVIDIA's GPUs",
};

static jpp_status_t* find_functions(void* nccl, void* cuda) {
  const char* missing = NULL;
// NOLINTBEGIN(bugprone-macro-parentheses): functions are named
#define JPP_NCCL_LOAD(result, name, parameters)                    \
  g_library.name = (__typeof__(g_library.name))dlsym(nccl, #name); \
  if (!g_library.name) missing = #name;
#define JPP_CUDA_LOAD(result, name, parameters)                    \
  g_library.name = (__typeof__(g_library.name))dlsym(cuda, #name); \
  if (!g_library.name) missing = #name;
  JPP_NCCL_FUNCTIONS(JPP_NCCL_LOAD)
  JPP_CUDA_FUNCTIONS(JPP_CUDA_LOAD)
#undef JPP_NCCL_LOAD
#undef JPP_CUDA_LOAD
  // NOLINTEND(bugprone-macro-parentheses)
  if (!missing) return NULL;
  return jpp_status_make(
      JPP_UNSUPPORTED,
      "the libraries NCCL and CUDA that were found have no %s; expected "
      "NCCL 2.22 or later, and the driver of CUDA 11 or later",
      missing);
}

static jpp_status_t* check_version(void) {
  int version = 0;
  jpp_nccl_result_t result = g_library.ncclGetVersion(&version);
  if (result != JPP_NCCL_SUCCESS) {
    return jpp_status_make(JPP_UNSUPPORTED, "ncclGetVersion: %s",
                           g_library.ncclGetErrorString(result));
  }
  char text[kJppNcclVersionSize];
  g_library.version = (uint32_t)version;
  jpp__nccl_version_text(g_library.version, text);
  JPP_LOG(JPP_LOG_INFO, "NCCL %s", text);
  if (version >= kJppNcclLeast) return NULL;
  return jpp_status_make(JPP_UNSUPPORTED,
                         "expected NCCL 2.22 or later, found %s; install a newer Python "
                         "package nvidia-nccl-cu13 (or nvidia-nccl-cu12)",
                         text);
}

static jpp_status_t* load_locked(void) {
  void *nccl = NULL, *cuda = NULL;
  if (g_loaded) return NULL;
  JPP_RETURN_IF_ERROR(jpp__library_open(&kCuda, &cuda));
  JPP_RETURN_IF_ERROR(jpp__library_open(&kNccl, &nccl));
  JPP_RETURN_IF_ERROR(find_functions(nccl, cuda));
  JPP_RETURN_IF_ERROR(check_version());
  g_loaded = true;
  return NULL;
}

jpp_status_t* jpp__nccl_load(const jpp_nccl_library_t** out_library) {
  *out_library = &g_library;
  pthread_mutex_lock(&g_mutex);
  jpp_status_t* status = load_locked();
  pthread_mutex_unlock(&g_mutex);
  return status;
}

const char* jpp__cuda_text(const jpp_nccl_library_t* library, jpp_cuda_result_t result) {
  const char* text = NULL;
  library->cuGetErrorString(result, &text);
  return text ? text : "unknown error";
}

jpp_status_t* jpp__cuda_error(const jpp_nccl_library_t* library, jpp_cuda_result_t result,
                              const char* call) {
  if (result == JPP_CUDA_SUCCESS) return NULL;
  return jpp_status_make(
      result == JPP_CUDA_OUT_OF_MEMORY ? JPP_OUT_OF_MEMORY : JPP_UNSUPPORTED, "%s: %s",
      call, jpp__cuda_text(library, result));
}

void jpp__nccl_version_text(uint32_t version, char out_text[kJppNcclVersionSize]) {
  if (version == 0) {
    snprintf(out_text, kJppNcclVersionSize, "none");
    return;
  }
  // The format since 2.9; before, the major number was multiplied by a thousand.
  uint32_t major = version >= 10000 ? 10000 : 1000;
  snprintf(out_text, kJppNcclVersionSize, "%u.%u.%u", version / major,
           version % major / 100, version % 100);
}
