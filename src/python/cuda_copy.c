// The three functions of CUDA's driver that a callback into Python needs, looked up at
// the first call, so that neither building nor running requires CUDA.
#include "python/cuda_copy.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

// cuda.h: CUresult is an enum whose 0 is success, CUdeviceptr an address, CUstream a
// pointer.
typedef int (*cuda_to_host_t)(void* host, uintptr_t device, size_t bytes, void* stream);
typedef int (*cuda_to_device_t)(uintptr_t device, const void* host, size_t bytes,
                                void* stream);
typedef int (*cuda_wait_t)(void* stream);

static struct {
  cuda_to_host_t to_host;
  cuda_to_device_t to_device;
  cuda_wait_t wait;
} g_cuda;

static void find_cuda(void) {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (!library) return;
  g_cuda.to_host = (cuda_to_host_t)(uintptr_t)dlsym(library, "cuMemcpyDtoHAsync_v2");
  g_cuda.to_device = (cuda_to_device_t)(uintptr_t)dlsym(library, "cuMemcpyHtoDAsync_v2");
  g_cuda.wait = (cuda_wait_t)(uintptr_t)dlsym(library, "cuStreamSynchronize");
}

static bool has_cuda(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, find_cuda);
  return g_cuda.to_host && g_cuda.to_device && g_cuda.wait;
}

static const char kMissing[] = "a callback into Python: libcuda.so.1 cannot be used";

const char* jpp_py_cuda_to_host(void* stream, void* host, const void* device,
                                size_t bytes) {
  if (!has_cuda()) return kMissing;
  if (g_cuda.to_host(host, (uintptr_t)device, bytes, stream) == 0) return NULL;
  return "the operands of a callback into Python could not be copied to the host";
}

const char* jpp_py_cuda_to_device(void* stream, void* device, const void* host,
                                  size_t bytes) {
  if (!has_cuda()) return kMissing;
  if (g_cuda.to_device((uintptr_t)device, host, bytes, stream) == 0) return NULL;
  return "the results of a callback into Python could not be copied to the device";
}

const char* jpp_py_cuda_wait(void* stream) {
  if (!has_cuda()) return kMissing;
  if (g_cuda.wait(stream) == 0) return NULL;
  return "the device failed before or in a callback into Python";
}
