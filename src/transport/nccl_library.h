// NCCL and the CUDA driver, loaded at run time: the functions that nccl.c and nccl_comm.c
// call. NCCL is the library that JPP_NCCL names, else the one in the Python package
// nvidia-nccl-cu13 or nvidia-nccl-cu12 beside this library, else the system's.
//
// The types are declared here, because NCCL's header needs the CUDA toolkit, and few of
// them are used: those of <nccl.h> of NCCL 2.14, whose ncclConfig_t began with these
// members, and of <cuda.h>. Later releases are compatible with both.
#ifndef JPP_TRANSPORT_NCCL_LIBRARY_H_
#define JPP_TRANSPORT_NCCL_LIBRARY_H_

#include <stddef.h>
#include <stdint.h>

#include "jaxpp/status.h"

typedef struct jpp_nccl_handle* jpp_nccl_handle_t;  // ncclComm_t

typedef struct jpp_nccl_id {  // ncclUniqueId
  char bytes[128];
} jpp_nccl_id_t;

typedef enum jpp_nccl_result {  // ncclResult_t
  JPP_NCCL_SUCCESS = 0,
  JPP_NCCL_INVALID_USAGE = 5,
  JPP_NCCL_REMOTE_ERROR = 6,
  JPP_NCCL_IN_PROGRESS = 7,
} jpp_nccl_result_t;

typedef struct jpp_nccl_config {  // ncclConfig_t
  size_t size;
  unsigned magic;
  unsigned version;  // of NCCL: tells it which members exist
  int blocking;
} jpp_nccl_config_t;

enum {
  kJppNcclMagic = (int)0xcafebeefu,
  // The release of jpp_nccl_config_t.
  kJppNcclConfig = 21400,
  // The first release in which aborts in a group stop all kernels before memory is freed.
  kJppNcclLeast = 22200,
  kJppNcclBytes = 1,  // ncclUint8
};

typedef enum jpp_cuda_result {  // CUresult
  JPP_CUDA_SUCCESS = 0,
  JPP_CUDA_OUT_OF_MEMORY = 2,
  JPP_CUDA_NOT_READY = 600,
} jpp_cuda_result_t;

enum {
  kJppCudaNonBlocking = 1,    // CU_STREAM_NON_BLOCKING
  kJppCudaDisableTiming = 2,  // CU_EVENT_DISABLE_TIMING
};

typedef int jpp_cuda_device_t;                        // CUdevice
typedef struct jpp_cuda_context* jpp_cuda_context_t;  // CUcontext
typedef struct jpp_cuda_stream* jpp_cuda_stream_t;    // CUstream
typedef struct jpp_cuda_event* jpp_cuda_event_t;      // CUevent
typedef unsigned long long jpp_cuda_pointer_t;        // CUdeviceptr

// Result, name and parameters of each function.
#define JPP_NCCL_FUNCTIONS(F)                                                    \
  F(jpp_nccl_result_t, ncclGetVersion, (int* out_version))                       \
  F(jpp_nccl_result_t, ncclGetUniqueId, (jpp_nccl_id_t * out_id))                \
  F(jpp_nccl_result_t, ncclCommInitRankConfig,                                   \
    (jpp_nccl_handle_t * out_comm, int ranks, jpp_nccl_id_t id, int rank,        \
     jpp_nccl_config_t* config))                                                 \
  F(jpp_nccl_result_t, ncclCommFinalize, (jpp_nccl_handle_t comm))               \
  F(jpp_nccl_result_t, ncclCommDestroy, (jpp_nccl_handle_t comm))                \
  F(jpp_nccl_result_t, ncclCommAbort, (jpp_nccl_handle_t comm))                  \
  F(jpp_nccl_result_t, ncclCommGetAsyncError,                                    \
    (jpp_nccl_handle_t comm, jpp_nccl_result_t * out_result))                    \
  F(const char*, ncclGetErrorString, (jpp_nccl_result_t result))                 \
  F(const char*, ncclGetLastError, (jpp_nccl_handle_t comm))                     \
  F(jpp_nccl_result_t, ncclGroupStart, (void))                                   \
  F(jpp_nccl_result_t, ncclGroupEnd, (void))                                     \
  F(jpp_nccl_result_t, ncclSend,                                                 \
    (const void* data, size_t count, int type, int peer, jpp_nccl_handle_t comm, \
     jpp_cuda_stream_t stream))                                                  \
  F(jpp_nccl_result_t, ncclRecv,                                                 \
    (void* data, size_t count, int type, int peer, jpp_nccl_handle_t comm,       \
     jpp_cuda_stream_t stream))

#define JPP_CUDA_FUNCTIONS(F)                                                          \
  F(jpp_cuda_result_t, cuInit, (unsigned flags))                                       \
  F(jpp_cuda_result_t, cuGetErrorString,                                               \
    (jpp_cuda_result_t result, const char** out_text))                                 \
  F(jpp_cuda_result_t, cuDeviceGet, (jpp_cuda_device_t * out_device, int number))      \
  F(jpp_cuda_result_t, cuDevicePrimaryCtxRetain,                                       \
    (jpp_cuda_context_t * out_context, jpp_cuda_device_t device))                      \
  F(jpp_cuda_result_t, cuDevicePrimaryCtxRelease_v2, (jpp_cuda_device_t device))       \
  F(jpp_cuda_result_t, cuCtxPushCurrent_v2, (jpp_cuda_context_t context))              \
  F(jpp_cuda_result_t, cuCtxPopCurrent_v2, (jpp_cuda_context_t * out_context))         \
  F(jpp_cuda_result_t, cuCtxGetStreamPriorityRange, (int* out_least, int* out_most))   \
  F(jpp_cuda_result_t, cuStreamCreateWithPriority,                                     \
    (jpp_cuda_stream_t * out_stream, unsigned flags, int priority))                    \
  F(jpp_cuda_result_t, cuStreamDestroy_v2, (jpp_cuda_stream_t stream))                 \
  F(jpp_cuda_result_t, cuEventCreate, (jpp_cuda_event_t * out_event, unsigned flags))  \
  F(jpp_cuda_result_t, cuEventRecord,                                                  \
    (jpp_cuda_event_t event, jpp_cuda_stream_t stream))                                \
  F(jpp_cuda_result_t, cuEventQuery, (jpp_cuda_event_t event))                         \
  F(jpp_cuda_result_t, cuEventDestroy_v2, (jpp_cuda_event_t event))                    \
  F(jpp_cuda_result_t, cuMemAlloc_v2, (jpp_cuda_pointer_t * out_pointer, size_t size)) \
  F(jpp_cuda_result_t, cuMemFree_v2, (jpp_cuda_pointer_t pointer))

typedef struct jpp_nccl_library {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a member is declared
#define JPP_NCCL_MEMBER(result, name, parameters) result(*name) parameters;
  JPP_NCCL_FUNCTIONS(JPP_NCCL_MEMBER)
  JPP_CUDA_FUNCTIONS(JPP_NCCL_MEMBER)
#undef JPP_NCCL_MEMBER
  uint32_t version;  // 22809 is 2.28.9
} jpp_nccl_library_t;

// Lifetime static. JPP_UNSUPPORTED says what to install, also if the release is too old.
// Any thread.
jpp_status_t* jpp__nccl_load(const jpp_nccl_library_t** out_library) JPP_MUST_USE;

// NULL for JPP_CUDA_SUCCESS; JPP_OUT_OF_MEMORY or JPP_UNSUPPORTED.
jpp_status_t* jpp__cuda_error(const jpp_nccl_library_t* library, jpp_cuda_result_t result,
                              const char* call) JPP_MUST_USE;
// Lifetime static.
const char* jpp__cuda_text(const jpp_nccl_library_t* library, jpp_cuda_result_t result);

enum { kJppNcclVersionSize = 16 };
// "2.28.9"; "none" for 0.
void jpp__nccl_version_text(uint32_t version, char out_text[kJppNcclVersionSize]);

#endif  // JPP_TRANSPORT_NCCL_LIBRARY_H_
