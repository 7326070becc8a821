// The stub: two ends find each other by the id of their communicator, and the first
// operations of their streams complete when one sends and the other receives. One mutex
// guards everything.
#include "stub_nccl.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "transport/nccl_library.h"

#define DECLARE(result, name, parameters) result name parameters;
JPP_NCCL_FUNCTIONS(DECLARE)
JPP_CUDA_FUNCTIONS(DECLARE)
#undef DECLARE

enum { kVersion = 22809, kMostIds = 256, kMostBlocks = 1024, kMostDepth = 8 };
enum { kSystemError = 2, kCudaInvalid = 101, kCudaLost = 719, kUrgent = -5 };

typedef enum work_kind { WORK_SEND, WORK_RECV, WORK_EVENT } work_kind_t;

typedef struct work {
  struct work* next;
  work_kind_t kind;
  jpp_nccl_handle_t comm;
  jpp_cuda_stream_t stream;
  jpp_cuda_event_t event;
  void* data;
  size_t size;
  int wait;
} work_t;

struct jpp_nccl_handle {
  int id, rank, device;
  jpp_nccl_handle_t peer, next;
  bool making, ending, peer_ended;
  int busy;       // remaining queries
  work_t* batch;  // on its way to the stream
  jpp_nccl_result_t error;
};

struct jpp_cuda_stream {
  jpp_cuda_stream_t next;
  work_t* work;
  int stopping;  // remaining queries until it is idle after an abort
};

struct jpp_cuda_event {
  bool pending, fails;
};

struct jpp_cuda_context {
  int device;
  int retained;
};

static pthread_mutex_t g_mutex = PTHREAD_MUTEX_INITIALIZER;
static stub_faults_t g_faults;
static stub_counts_t g_live;
static stub_log_t g_log;
static int g_events, g_ids;
static int g_making[kStubDevices];
static jpp_nccl_handle_t g_ends[kMostIds][2];
static jpp_nccl_handle_t g_comms;
static jpp_cuda_stream_t g_streams;
static struct jpp_cuda_context g_contexts[kStubDevices];
static struct {
  char* data;
  size_t size;
} g_blocks[kMostBlocks];

static _Thread_local jpp_cuda_context_t g_current[kMostDepth];
static _Thread_local int g_depth, g_group;
static _Thread_local work_t* g_grouped;

// --- For tests ------------------------------------------------------------------------

// For programs that do not link the stub.
__attribute__((constructor)) static void read_delay(void) {
  const char* delay = getenv("STUB_NCCL_DELAY");
  if (delay) g_faults.delay = atoi(delay);
}

void stub_set_faults(const stub_faults_t* faults) {
  pthread_mutex_lock(&g_mutex);
  g_faults = *faults;
  g_log = (stub_log_t){0};
  g_events = 0;
  pthread_mutex_unlock(&g_mutex);
}

stub_counts_t stub_live(void) {
  pthread_mutex_lock(&g_mutex);
  stub_counts_t live = g_live;
  pthread_mutex_unlock(&g_mutex);
  live.current = g_depth;
  return live;
}

void stub_fail_all(void) {
  pthread_mutex_lock(&g_mutex);
  for (jpp_nccl_handle_t comm = g_comms; comm; comm = comm->next) {
    comm->error = (jpp_nccl_result_t)kSystemError;
  }
  pthread_mutex_unlock(&g_mutex);
}

void stub_forget_blocks(void) {
  pthread_mutex_lock(&g_mutex);
  for (int i = 0; i < kMostBlocks; ++i) {
    free(g_blocks[i].data);
    g_blocks[i].data = NULL;
  }
  g_live.blocks = 0;
  pthread_mutex_unlock(&g_mutex);
}

stub_log_t stub_get_log(void) {
  pthread_mutex_lock(&g_mutex);
  stub_log_t log = g_log;
  pthread_mutex_unlock(&g_mutex);
  return log;
}

// --- Work -----------------------------------------------------------------------------

static void append_work(work_t** list, work_t* work) {
  while (*list) list = &(*list)->next;
  *list = work;
}

static void pop_work(jpp_cuda_stream_t stream) {
  work_t* work = stream->work;
  stream->work = work->next;
  free(work);
}

// Finds the first operation of the other end's stream.
static jpp_cuda_stream_t partner_locked(const work_t* work) {
  for (jpp_cuda_stream_t at = g_streams; at; at = at->next) {
    const work_t* front = at->work;
    if (front && front->kind != WORK_EVENT && front->comm == work->comm->peer &&
        front->kind != work->kind) {
      return at;
    }
  }
  return NULL;
}

static void copy_locked(work_t* one, work_t* other) {
  const work_t* from = one->kind == WORK_SEND ? one : other;
  const work_t* to = one->kind == WORK_SEND ? other : one;
  ++g_log.transfers;
  if (from->size == to->size) {
    memcpy(to->data, from->data, to->size);
  } else {
    from->comm->error = to->comm->error = JPP_NCCL_INVALID_USAGE;
  }
}

static void advance_stream_locked(jpp_cuda_stream_t stream) {
  if (stream->stopping) {
    if (!g_faults.never_stops) --stream->stopping;
    return;
  }
  while (stream->work) {
    work_t* work = stream->work;
    if (work->kind == WORK_EVENT) {
      work->event->pending = false;
      pop_work(stream);
      continue;
    }
    jpp_cuda_stream_t other = partner_locked(work);
    if (!other || work->wait-- > 0) return;
    copy_locked(work, other->work);
    pop_work(other);
    pop_work(stream);
  }
}

static void advance_locked(void) {
  for (jpp_cuda_stream_t at = g_streams; at; at = at->next) advance_stream_locked(at);
}

static bool has_work_locked(jpp_nccl_handle_t comm) {
  for (jpp_cuda_stream_t at = g_streams; at; at = at->next) {
    for (const work_t* work = at->work; work; work = work->next) {
      if (work->kind != WORK_EVENT && work->comm == comm) return true;
    }
  }
  return comm->batch != NULL;
}

static void drop_work_locked(jpp_nccl_handle_t comm) {
  for (jpp_cuda_stream_t stream = g_streams; stream; stream = stream->next) {
    for (work_t** at = &stream->work; *at;) {
      work_t* work = *at;
      if (work->kind == WORK_EVENT || work->comm != comm) {
        at = &work->next;
        continue;
      }
      *at = work->next;
      free(work);
      if (g_faults.slow_abort || g_faults.never_stops) stream->stopping = 3;
    }
  }
  while (comm->batch) {
    work_t* work = comm->batch;
    comm->batch = work->next;
    free(work);
  }
}

// --- NCCL -----------------------------------------------------------------------------

jpp_nccl_result_t ncclGetVersion(int* out_version) {
  pthread_mutex_lock(&g_mutex);
  *out_version = g_faults.version ? g_faults.version : kVersion;
  pthread_mutex_unlock(&g_mutex);
  return JPP_NCCL_SUCCESS;
}

const char* ncclGetErrorString(jpp_nccl_result_t result) {
  return (int)result == kSystemError ? "unhandled system error" : "invalid usage";
}

const char* ncclGetLastError(jpp_nccl_handle_t comm) {
  (void)comm;
  return "the stub failed";
}

jpp_nccl_result_t ncclGetUniqueId(jpp_nccl_id_t* out_id) {
  memset(out_id, 0x5a, sizeof(*out_id));
  pthread_mutex_lock(&g_mutex);
  int id = g_ids++ % kMostIds;
  pthread_mutex_unlock(&g_mutex);
  memcpy(out_id, &id, sizeof(id));
  return JPP_NCCL_SUCCESS;
}

static void log_init_locked(const struct jpp_nccl_handle* comm) {
  if (g_log.inits < kStubMostInits) {
    g_log.device[g_log.inits] = comm->device;
    g_log.id[g_log.inits] = comm->id;
    g_log.rank[g_log.inits] = comm->rank;
  }
  ++g_log.inits;
  int making = ++g_making[comm->device];
  if (making > g_log.most_making) g_log.most_making = making;
}

static void meet_locked(jpp_nccl_handle_t comm) {
  jpp_nccl_handle_t* ends = g_ends[comm->id];
  ends[comm->rank] = comm;
  if (!ends[0] || !ends[1]) return;
  ends[0]->peer = ends[1];
  ends[1]->peer = ends[0];
  ends[0] = ends[1] = NULL;
}

jpp_nccl_result_t ncclCommInitRankConfig(jpp_nccl_handle_t* out_comm, int ranks,
                                         jpp_nccl_id_t id, int rank,
                                         jpp_nccl_config_t* config) {
  int number = 0;
  memcpy(&number, &id, sizeof(number));
  bool right = g_depth && ranks == 2 && (rank == 0 || rank == 1) && number >= 0 &&
               number < kMostIds && id.bytes[127] == 0x5a &&
               config->magic == 0xcafebeef && config->blocking == 0 &&
               config->version >= 21400 && config->size == sizeof(*config);
  jpp_nccl_handle_t comm = right ? calloc(1, sizeof(*comm)) : NULL;
  if (!comm) return JPP_NCCL_INVALID_USAGE;
  comm->id = number;
  comm->rank = rank;
  comm->device = g_current[g_depth - 1]->device;
  comm->making = true;
  pthread_mutex_lock(&g_mutex);
  comm->busy = g_faults.delay;
  if (g_faults.fail_init && --g_faults.fail_init == 0)
    comm->error = (jpp_nccl_result_t)kSystemError;
  log_init_locked(comm);
  meet_locked(comm);
  comm->next = g_comms;
  g_comms = comm;
  ++g_live.comms;
  pthread_mutex_unlock(&g_mutex);
  *out_comm = comm;
  return JPP_NCCL_IN_PROGRESS;
}

// True if the communicator cannot be used yet.
static bool is_busy_locked(jpp_nccl_handle_t comm) {
  if (comm->making) {
    if (!comm->peer && !comm->peer_ended) return true;
    if (comm->busy-- > 0) return true;
    comm->making = false;
    comm->busy = 0;
    --g_making[comm->device];
  }
  if (comm->ending) {
    bool other = !g_faults.joint_end || !comm->peer || comm->peer->ending;
    return has_work_locked(comm) || !other;
  }
  if (!comm->batch) return false;
  if (comm->busy-- > 0) return true;
  comm->busy = 0;
  append_work(&comm->batch->stream->work, comm->batch);
  comm->batch = NULL;
  return false;
}

jpp_nccl_result_t ncclCommGetAsyncError(jpp_nccl_handle_t comm,
                                        jpp_nccl_result_t* out_result) {
  pthread_mutex_lock(&g_mutex);
  advance_locked();
  bool busy = !comm->error && is_busy_locked(comm);
  *out_result = comm->error ? comm->error : busy ? JPP_NCCL_IN_PROGRESS : 0;
  pthread_mutex_unlock(&g_mutex);
  return JPP_NCCL_SUCCESS;
}

static void free_comm_locked(jpp_nccl_handle_t comm) {
  jpp_nccl_handle_t* at = &g_comms;
  while (*at != comm) at = &(*at)->next;
  *at = comm->next;
  drop_work_locked(comm);
  if (comm->making) --g_making[comm->device];
  if (g_ends[comm->id][comm->rank] == comm) g_ends[comm->id][comm->rank] = NULL;
  if (comm->peer) {
    comm->peer->peer = NULL;
    comm->peer->peer_ended = true;
  }
  --g_live.comms;
  free(comm);
}

jpp_nccl_result_t ncclCommFinalize(jpp_nccl_handle_t comm) {
  pthread_mutex_lock(&g_mutex);
  bool wrong = comm->making || comm->batch || comm->ending;
  comm->ending = true;
  pthread_mutex_unlock(&g_mutex);
  return wrong ? JPP_NCCL_INVALID_USAGE : JPP_NCCL_IN_PROGRESS;
}

jpp_nccl_result_t ncclCommDestroy(jpp_nccl_handle_t comm) {
  pthread_mutex_lock(&g_mutex);
  ++g_log.finalized;
  bool wrong = !comm->ending || has_work_locked(comm);
  free_comm_locked(comm);
  pthread_mutex_unlock(&g_mutex);
  return wrong ? JPP_NCCL_INVALID_USAGE : JPP_NCCL_SUCCESS;
}

jpp_nccl_result_t ncclCommAbort(jpp_nccl_handle_t comm) {
  pthread_mutex_lock(&g_mutex);
  ++g_log.aborts;
  free_comm_locked(comm);
  pthread_mutex_unlock(&g_mutex);
  return JPP_NCCL_SUCCESS;
}

jpp_nccl_result_t ncclGroupStart(void) {
  ++g_group;
  return JPP_NCCL_SUCCESS;
}

jpp_nccl_result_t ncclGroupEnd(void) {
  if (--g_group || !g_grouped) return JPP_NCCL_SUCCESS;
  jpp_nccl_handle_t comm = g_grouped->comm;
  pthread_mutex_lock(&g_mutex);
  g_log.sends += comm->rank == 0;
  comm->batch = g_grouped;
  comm->busy = g_faults.delay;
  if (g_faults.fail_group && --g_faults.fail_group == 0)
    comm->error = (jpp_nccl_result_t)kSystemError;
  pthread_mutex_unlock(&g_mutex);
  g_grouped = NULL;
  return JPP_NCCL_IN_PROGRESS;
}

static bool is_allocated_locked(const char* data, size_t size) {
  for (int i = 0; i < kMostBlocks; ++i) {
    const char* block = g_blocks[i].data;
    if (block && data >= block && data + size <= block + g_blocks[i].size) return true;
  }
  return false;
}

static jpp_nccl_result_t add_to_group(work_kind_t kind, void* data, size_t size, int peer,
                                      jpp_nccl_handle_t comm, jpp_cuda_stream_t stream) {
  pthread_mutex_lock(&g_mutex);
  bool right = g_group && g_depth && !comm->making && !comm->batch && !comm->ending &&
               comm->rank == (kind == WORK_SEND ? 0 : 1) && peer == 1 - comm->rank &&
               (!g_faults.own_memory || is_allocated_locked(data, size));
  int wait = g_faults.delay;
  pthread_mutex_unlock(&g_mutex);
  work_t* work = right ? calloc(1, sizeof(*work)) : NULL;
  if (!work) return JPP_NCCL_INVALID_USAGE;
  *work = (work_t){.kind = kind,
                   .comm = comm,
                   .stream = stream,
                   .data = data,
                   .size = size,
                   .wait = wait};
  append_work(&g_grouped, work);
  return JPP_NCCL_SUCCESS;
}

jpp_nccl_result_t ncclSend(const void* data, size_t count, int type, int peer,
                           jpp_nccl_handle_t comm, jpp_cuda_stream_t stream) {
  if (type != kJppNcclBytes) return JPP_NCCL_INVALID_USAGE;
  return add_to_group(WORK_SEND, (void*)(uintptr_t)data, count, peer, comm, stream);
}

jpp_nccl_result_t ncclRecv(void* data, size_t count, int type, int peer,
                           jpp_nccl_handle_t comm, jpp_cuda_stream_t stream) {
  if (type != kJppNcclBytes) return JPP_NCCL_INVALID_USAGE;
  return add_to_group(WORK_RECV, data, count, peer, comm, stream);
}

// --- CUDA -----------------------------------------------------------------------------

static jpp_cuda_result_t cuda_result(bool right) {
  return right ? JPP_CUDA_SUCCESS : (jpp_cuda_result_t)kCudaInvalid;
}

static void add_live(int* count, int change) {
  pthread_mutex_lock(&g_mutex);
  *count += change;
  pthread_mutex_unlock(&g_mutex);
}

jpp_cuda_result_t cuInit(unsigned flags) { return cuda_result(flags == 0); }

jpp_cuda_result_t cuGetErrorString(jpp_cuda_result_t result, const char** out_text) {
  *out_text = (int)result == kCudaLost           ? "unspecified launch failure"
              : result == JPP_CUDA_OUT_OF_MEMORY ? "out of memory"
                                                 : "invalid device ordinal";
  return JPP_CUDA_SUCCESS;
}

jpp_cuda_result_t cuDeviceGet(jpp_cuda_device_t* out_device, int number) {
  *out_device = number;
  return cuda_result(number >= 0 && number < kStubDevices);
}

jpp_cuda_result_t cuDevicePrimaryCtxRetain(jpp_cuda_context_t* out_context,
                                           jpp_cuda_device_t device) {
  *out_context = &g_contexts[device];
  pthread_mutex_lock(&g_mutex);
  g_contexts[device].device = device;
  ++g_contexts[device].retained;
  ++g_live.contexts;
  pthread_mutex_unlock(&g_mutex);
  return JPP_CUDA_SUCCESS;
}

jpp_cuda_result_t cuDevicePrimaryCtxRelease_v2(jpp_cuda_device_t device) {
  pthread_mutex_lock(&g_mutex);
  bool right = g_contexts[device].retained-- > 0;
  --g_live.contexts;
  pthread_mutex_unlock(&g_mutex);
  return cuda_result(right);
}

jpp_cuda_result_t cuCtxPushCurrent_v2(jpp_cuda_context_t context) {
  if (!context || g_depth == kMostDepth) return cuda_result(false);
  g_current[g_depth++] = context;
  return JPP_CUDA_SUCCESS;
}

jpp_cuda_result_t cuCtxPopCurrent_v2(jpp_cuda_context_t* out_context) {
  if (!g_depth) return cuda_result(false);
  *out_context = g_current[--g_depth];
  return JPP_CUDA_SUCCESS;
}

jpp_cuda_result_t cuCtxGetStreamPriorityRange(int* out_least, int* out_most) {
  *out_least = 0;
  *out_most = kUrgent;
  return cuda_result(g_depth);
}

jpp_cuda_result_t cuStreamCreateWithPriority(jpp_cuda_stream_t* out_stream,
                                             unsigned flags, int priority) {
  if (!g_depth || flags != kJppCudaNonBlocking) return cuda_result(false);
  jpp_cuda_stream_t stream = calloc(1, sizeof(*stream));
  pthread_mutex_lock(&g_mutex);
  stream->next = g_streams;
  g_streams = stream;
  ++g_live.streams;
  g_log.least_priority = priority;
  pthread_mutex_unlock(&g_mutex);
  *out_stream = stream;
  return JPP_CUDA_SUCCESS;
}

jpp_cuda_result_t cuStreamDestroy_v2(jpp_cuda_stream_t stream) {
  pthread_mutex_lock(&g_mutex);
  jpp_cuda_stream_t* at = &g_streams;
  while (*at != stream) at = &(*at)->next;
  *at = stream->next;
  while (stream->work) pop_work(stream);
  --g_live.streams;
  pthread_mutex_unlock(&g_mutex);
  free(stream);
  return JPP_CUDA_SUCCESS;
}

jpp_cuda_result_t cuEventCreate(jpp_cuda_event_t* out_event, unsigned flags) {
  *out_event = calloc(1, sizeof(**out_event));
  add_live(&g_live.events, 1);
  return cuda_result(g_depth && flags == kJppCudaDisableTiming);
}

jpp_cuda_result_t cuEventRecord(jpp_cuda_event_t event, jpp_cuda_stream_t stream) {
  work_t* work = calloc(1, sizeof(*work));
  *work = (work_t){.kind = WORK_EVENT, .event = event, .stream = stream};
  pthread_mutex_lock(&g_mutex);
  // An event that is recorded again counts anew.
  for (work_t** at = &stream->work; *at;) {
    work_t* old = *at;
    if (old->event == event) {
      *at = old->next;
      free(old);
    } else {
      at = &old->next;
    }
  }
  event->pending = true;
  event->fails = g_faults.fail_event && ++g_events == g_faults.fail_event;
  append_work(&stream->work, work);
  pthread_mutex_unlock(&g_mutex);
  return JPP_CUDA_SUCCESS;
}

jpp_cuda_result_t cuEventQuery(jpp_cuda_event_t event) {
  pthread_mutex_lock(&g_mutex);
  advance_locked();
  jpp_cuda_result_t result = event->fails     ? (jpp_cuda_result_t)kCudaLost
                             : event->pending ? JPP_CUDA_NOT_READY
                                              : JPP_CUDA_SUCCESS;
  pthread_mutex_unlock(&g_mutex);
  return result;
}

jpp_cuda_result_t cuEventDestroy_v2(jpp_cuda_event_t event) {
  pthread_mutex_lock(&g_mutex);
  for (jpp_cuda_stream_t stream = g_streams; stream; stream = stream->next) {
    for (work_t** at = &stream->work; *at;) {
      work_t* work = *at;
      if (work->event == event) {
        *at = work->next;
        free(work);
      } else {
        at = &work->next;
      }
    }
  }
  --g_live.events;
  pthread_mutex_unlock(&g_mutex);
  free(event);
  return JPP_CUDA_SUCCESS;
}

jpp_cuda_result_t cuMemAlloc_v2(jpp_cuda_pointer_t* out_pointer, size_t size) {
  size_t rounded = (size + 255) / 256 * 256;
  pthread_mutex_lock(&g_mutex);
  int at = 0;
  while (at < kMostBlocks && g_blocks[at].data) ++at;
  bool right = g_depth && at < kMostBlocks && size < (size_t)1 << 40;
  if (right) {
    g_blocks[at].data = aligned_alloc(256, rounded);
    g_blocks[at].size = size;
    *out_pointer = (uintptr_t)g_blocks[at].data;
    ++g_live.blocks;
  }
  pthread_mutex_unlock(&g_mutex);
  return right ? JPP_CUDA_SUCCESS : JPP_CUDA_OUT_OF_MEMORY;
}

jpp_cuda_result_t cuMemFree_v2(jpp_cuda_pointer_t pointer) {
  pthread_mutex_lock(&g_mutex);
  int at = 0;
  while (at < kMostBlocks && (uintptr_t)g_blocks[at].data != pointer) ++at;
  bool right = g_depth && at < kMostBlocks;
  if (right) {
    free(g_blocks[at].data);
    g_blocks[at].data = NULL;
    --g_live.blocks;
  }
  pthread_mutex_unlock(&g_mutex);
  return cuda_result(right);
}

// Only tests copy; the transport does not.
jpp_cuda_result_t cuMemcpyHtoD_v2(jpp_cuda_pointer_t to, const void* from, size_t size);
jpp_cuda_result_t cuMemcpyDtoH_v2(void* to, jpp_cuda_pointer_t from, size_t size);

jpp_cuda_result_t cuMemcpyHtoD_v2(jpp_cuda_pointer_t to, const void* from, size_t size) {
  memcpy((void*)(uintptr_t)to, from, size);
  return cuda_result(g_depth);
}

jpp_cuda_result_t cuMemcpyDtoH_v2(void* to, jpp_cuda_pointer_t from, size_t size) {
  memcpy(to, (const void*)(uintptr_t)from, size);
  return cuda_result(g_depth);
}
