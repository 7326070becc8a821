// The driver for NCCL: another driver, with NCCL for shards in device memory (nccl.h).
// This file has the device, its memory, and the order in which communicators are created.
//
// A process creates one communicator at a time, in the order of the lowest numbers of the
// channels that need them. The plan numbers channels the same in all processes. The
// missing communicator with the lowest number is therefore the next one at both of its
// ends, and processes cannot wait for each other in a cycle.
#include "transport/nccl.h"

#include <time.h>

#include "base/alloc.h"
#include "base/clock.h"

static jpp_nccl_t* nccl_of(const jpp_transport_t* base) {
  return ((const jpp_net_t*)base)->device_state;
}

static void enter_context(const jpp_nccl_t* nccl) {
  nccl->library->cuCtxPushCurrent_v2(nccl->context);
}

static void leave_context(const jpp_nccl_t* nccl) {
  jpp_cuda_context_t context = NULL;
  nccl->library->cuCtxPopCurrent_v2(&context);
}

// --- Device ---------------------------------------------------------------------------

static jpp_status_t* open_device(jpp_nccl_t* nccl, uint64_t number) {
  const jpp_nccl_library_t* library = nccl->library;
  JPP_RETURN_IF_ERROR(jpp__cuda_error(library, library->cuInit(0), "cuInit"));
  JPP_RETURN_IF_ERROR_IN(
      jpp__cuda_error(library,
                      library->cuDeviceGet(&nccl->device,
                                           number <= INT32_MAX ? (int)number : INT32_MAX),
                      "cuDeviceGet"),
      "device %llu", (unsigned long long)number);
  return jpp__cuda_error(library,
                         library->cuDevicePrimaryCtxRetain(&nccl->context, nccl->device),
                         "cuDevicePrimaryCtxRetain");
}

// Freed only at the end, because freeing may make CUDA wait for all kernels.
static jpp_status_t* nccl_allocate(jpp_net_t* net, size_t size, void** out_data) {
  jpp_nccl_t* nccl = net->device_state;
  jpp_cuda_pointer_t pointer = 0;
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(&nccl->blocks, 1));
  enter_context(nccl);
  jpp_cuda_result_t result = nccl->library->cuMemAlloc_v2(&pointer, size);
  leave_context(nccl);
  JPP_RETURN_IF_ERROR(jpp__cuda_error(nccl->library, result, "cuMemAlloc"));
  *out_data = (void*)(uintptr_t)pointer;
  return JPP_VEC_PUSH(&nccl->blocks, pointer);
}

// --- Channels -------------------------------------------------------------------------

static uint64_t largest_on_device(const jpp_channel_spec_t* spec) {
  uint64_t largest = 0;
  for (uint32_t i = 0; i < spec->capacity; ++i) {
    if (spec->on_device[i] && spec->bytes[i] > largest) largest = spec->bytes[i];
  }
  return largest;
}

static jpp_status_t* nccl_open(jpp_net_peer_t* peer, const jpp_channel_spec_t* spec) {
  jpp_nccl_t* nccl = peer->net->device_state;
  bool sends = spec->src_process == peer->net->base.process;
  jpp_nccl_comm_t* comm = jpp__nccl_comm_of(peer, sends);
  uint64_t largest = largest_on_device(spec);
  if (!largest) return NULL;
  if (largest > nccl->scratch_size) {
    JPP_RETURN_IF_ERROR(nccl_allocate(peer->net, largest, &peer->net->scratch));
    nccl->scratch_size = largest;
  }
  size_t promised = comm->promised + (size_t)spec->slots * spec->capacity;
  JPP_RETURN_IF_ERROR(
      JPP_VEC_RESERVE(&comm->transfers, promised - comm->transfers.count));
  comm->promised = promised;
  if (comm->state == JPP_NCCL_UNUSED) {
    comm->state = JPP_NCCL_WANTED;
    comm->channel = spec->id;
    nccl->used.data[nccl->used.count++] = comm;
  }
  if (spec->id < comm->channel) comm->channel = spec->id;
  return NULL;
}

// --- Progress -------------------------------------------------------------------------

// False once its channels are closed, unless something was sent before.
static bool is_wanted(const jpp_nccl_comm_t* comm) {
  return comm->state == JPP_NCCL_WANTED &&
         (comm->peer->ends.count || comm->transfers.count);
}

// Returns whether every communicator is created.
static bool make_next(const jpp_nccl_t* nccl) {
  jpp_nccl_comm_t* next = NULL;
  for (size_t i = 0; i < nccl->used.count; ++i) {
    jpp_nccl_comm_t* comm = nccl->used.data[i];
    if (comm->state == JPP_NCCL_MAKING) return false;
    if (!is_wanted(comm)) continue;
    if (!next || comm->channel < next->channel) next = comm;
  }
  if (next) jpp__nccl_comm_make(next);
  return !next;
}

static void nccl_progress(jpp_transport_t* base, bool* out_some) {
  jpp_nccl_t* nccl = nccl_of(base);
  if (nccl->used.count) {
    enter_context(nccl);
    for (size_t i = 0; i < nccl->used.count; ++i) {
      jpp__nccl_comm_advance(nccl->used.data[i]);
    }
    jpp__nccl_comms_abort(nccl);
    bool made = make_next(nccl);
    for (size_t i = 0; made && i < nccl->used.count; ++i) {
      jpp__nccl_comm_issue(nccl->used.data[i]);
    }
    leave_context(nccl);
  }
  nccl->wire->bytes->progress(base, out_some);
}

// NCCL has no descriptor to poll.
static jpp_status_t* nccl_arm(jpp_transport_t* base, int* out_descriptor,
                              bool* out_armed) {
  const jpp_nccl_t* nccl = nccl_of(base);
  for (size_t i = 0; i < nccl->used.count; ++i) {
    const jpp_nccl_comm_t* comm = nccl->used.data[i];
    bool idle = comm->state == JPP_NCCL_IDLE || comm->state == JPP_NCCL_ENDED;
    if (!idle || comm->transfers.count) return NULL;
  }
  return nccl->wire->bytes->arm(base, out_descriptor, out_armed);
}

static bool has_ended(const jpp_nccl_t* nccl) {
  for (size_t i = 0; i < nccl->used.count; ++i) {
    if (nccl->used.data[i]->state != JPP_NCCL_ENDED) return false;
  }
  return true;
}

static void end_all(jpp_nccl_t* nccl) {
  jpp__nccl_comms_abort(nccl);
  for (size_t i = 0; i < nccl->used.count; ++i) {
    jpp__nccl_comm_advance(nccl->used.data[i]);
  }
}

static void nccl_end(jpp_net_t* net, int64_t until) {
  const struct timespec nap = {.tv_nsec = 50000};
  jpp_nccl_t* nccl = net->device_state;
  if (has_ended(nccl)) return;
  enter_context(nccl);
  for (size_t i = 0; i < nccl->used.count; ++i) {
    jpp__nccl_comm_finalize(nccl->used.data[i]);
  }
  for (end_all(nccl); !has_ended(nccl) && jpp__clock_now_ms() < until; end_all(nccl)) {
    nanosleep(&nap, NULL);
  }
  for (size_t i = 0; i < nccl->used.count; ++i) {
    jpp__nccl_comm_doom(nccl->used.data[i]);
  }
  end_all(nccl);
  for (size_t i = 0; i < nccl->used.count; ++i) {
    jpp__nccl_comm_give_up(nccl->used.data[i]);
  }
  leave_context(nccl);
}

// --- The wire's rows ------------------------------------------------------------------

static jpp_status_t* check_version(const jpp_nccl_t* nccl, uint32_t process,
                                   const void* address, size_t size) {
  jpp_address_t opened;
  JPP_RETURN_IF_ERROR_IN(
      jpp__address_open(address, size, nccl->net->token, nccl->net->token_size, &opened),
      "process %u", process);
  uint32_t expected = nccl->library->version;
  if (opened.device_version == expected) return NULL;
  char here[kJppNcclVersionSize], there[kJppNcclVersionSize];
  jpp__nccl_version_text(expected, here);
  jpp__nccl_version_text(opened.device_version, there);
  return jpp_status_make(JPP_PEER_ERROR,
                         "process %u: expected NCCL %s, as in process %u, found %s; "
                         "install the same release in all processes",
                         process, here, nccl->net->base.process, there);
}

static jpp_status_t* nccl_connect(jpp_transport_t* base, uint32_t process,
                                  const void* address, size_t size) {
  const jpp_nccl_t* nccl = nccl_of(base);
  JPP_RETURN_IF_ERROR(check_version(nccl, process, address, size));
  return nccl->wire->bytes->connect(base, process, address, size);
}

static jpp_status_t* nccl_register(jpp_transport_t* base, void* data, size_t size,
                                   jpp_transport_memory_t** out_memory) {
  return nccl_of(base)->wire->bytes->register_memory(base, data, size, out_memory);
}

static void nccl_unregister(jpp_transport_t* base, jpp_transport_memory_t* memory) {
  nccl_of(base)->wire->bytes->unregister_memory(base, memory);
}

// --- Create and destroy ---------------------------------------------------------------

static const jpp_net_device_t kDevice = {.open = nccl_open,
                                         .allocate = nccl_allocate,
                                         .send = jpp__nccl_send,
                                         .fetch = jpp__nccl_fetch,
                                         .meet = jpp__nccl_meet,
                                         .end = nccl_end};

static jpp_status_t* attach(jpp_nccl_t* nccl, jpp_net_t* net) {
  size_t count = (size_t)net->base.num_processes * 2;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(count, &nccl->comms));
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(&nccl->used, count));
  for (size_t i = 0; i < count; ++i) {
    nccl->comms[i].nccl = nccl;
    nccl->comms[i].peer = &net->peers[i / 2];
    nccl->comms[i].sends = i % 2;
  }
  nccl->net = net;
  net->device = &kDevice;
  net->device_state = nccl;
  // Adds NCCL's version to the wire's address.
  jpp_address_t address;
  void* sealed = NULL;
  size_t size = 0;
  JPP_RETURN_IF_ERROR(jpp__address_open(net->address, net->address_size, net->token,
                                        net->token_size, &address));
  address.device_version = nccl->library->version;
  JPP_RETURN_IF_ERROR(
      jpp__address_seal(&address, net->token, net->token_size, &sealed, &size));
  jpp_free(net->address);
  net->address = sealed;
  net->address_size = size;
  return NULL;
}

static void free_nccl(jpp_nccl_t* nccl) {
  if (nccl->context) {
    enter_context(nccl);
    for (size_t i = 0; i < nccl->blocks.count && !nccl->stuck; ++i) {
      nccl->library->cuMemFree_v2(nccl->blocks.data[i]);
    }
    leave_context(nccl);
    nccl->library->cuDevicePrimaryCtxRelease_v2(nccl->device);
  }
  for (size_t i = 0; i < nccl->used.count; ++i) {
    jpp_vec_deinit(&nccl->used.data[i]->transfers);
  }
  jpp_vec_deinit(&nccl->used);
  jpp_vec_deinit(&nccl->blocks);
  jpp_free(nccl->comms);
  jpp_free(nccl);
}

jpp_status_t* jpp__nccl_create_over(const jpp_transport_vtable_t* wire,
                                    const jpp_transport_options_t* options,
                                    jpp_transport_t** out_transport) {
  jpp_nccl_t* nccl = NULL;
  jpp_transport_t* base = NULL;
  const jpp_nccl_library_t* library = NULL;
  JPP_RETURN_IF_ERROR(jpp__nccl_load(&library));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &nccl));
  nccl->library = library;
  nccl->wire = wire;
  jpp_status_t* status = open_device(nccl, options->device);
  if (!status) status = wire->create(options, &base);
  if (!status) status = attach(nccl, (jpp_net_t*)base);
  if (status) {
    if (base) wire->destroy(base);
    free_nccl(nccl);
    return status;
  }
  *out_transport = base;
  return NULL;
}

static jpp_status_t* nccl_create(const jpp_transport_options_t* options,
                                 jpp_transport_t** out_transport) {
  return jpp__nccl_create_over(&jpp_transport_ucx, options, out_transport);
}

static void nccl_destroy(jpp_transport_t* base) {
  jpp_nccl_t* nccl = nccl_of(base);
  nccl->wire->destroy(base);
  free_nccl(nccl);
}

static const jpp_bytes_vtable_t kBytes = {
    .takes_device_memory = true,
    .connect = nccl_connect,
    .progress = nccl_progress,
    .arm = nccl_arm,
    .register_memory = nccl_register,
    .unregister_memory = nccl_unregister,
    JPP_NET_BYTES_ROWS,
};

const jpp_transport_vtable_t jpp_transport_nccl = {
    .name = "nccl",
    .bytes = &kBytes,
    .create = nccl_create,
    .destroy = nccl_destroy,
    JPP_NET_ROWS,
};
