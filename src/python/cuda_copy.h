// Copies between CUDA device memory and host memory, for callbacks into Python, by the
// driver's library, which the plugin has loaded.
#ifndef JPP_PYTHON_CUDA_COPY_H_
#define JPP_PYTHON_CUDA_COPY_H_

#include <stddef.h>

// The current context of the calling thread must be that of the device, as in a handler
// called by XLA. They queue the copy on `stream`, a CUstream, after the computation of
// `device`. They return NULL, or a constant text that says what failed.
const char* jpp_py_cuda_to_host(void* stream, void* host, const void* device,
                                size_t bytes);
// `host` must stay unchanged until jpp_py_cuda_wait().
const char* jpp_py_cuda_to_device(void* stream, void* device, const void* host,
                                  size_t bytes);
// Waits until all work queued on the stream is done.
const char* jpp_py_cuda_wait(void* stream);

#endif
