// Copies between the memory of a CUDA device and the host's, for callbacks into Python:
// by the driver's own library, which the plugin has loaded.
#ifndef JPP_PYTHON_CUDA_COPY_H_
#define JPP_PYTHON_CUDA_COPY_H_

#include <stddef.h>

// Both are for a thread whose current context is the device's, as a handler of XLA's
// finds it. They queue the copy on `stream`, a CUstream, behind the computation of
// `device`. NULL, or what failed, a constant text.
const char* jpp_py_cuda_to_host(void* stream, void* host, const void* device,
                                size_t bytes);
// `host` must stay as it is until jpp_py_cuda_wait().
const char* jpp_py_cuda_to_device(void* stream, void* device, const void* host,
                                  size_t bytes);
// Waits until all work queued on the stream is done.
const char* jpp_py_cuda_wait(void* stream);

#endif
