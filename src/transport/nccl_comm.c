// One communicator: its creation, its batches of sends or receives, and its end. NCCL's
// calls return at once, and progress polls them. Only an abort blocks, until NCCL's
// kernels have stopped.
#include <string.h>

#include "base/log.h"
#include "transport/nccl.h"

enum { kMostAhead = 1 << 16 };  // limit on packets that overtake the one whose turn it is

jpp_nccl_comm_t* jpp__nccl_comm_of(const jpp_net_peer_t* peer, bool sends) {
  const jpp_nccl_t* nccl = peer->net->device_state;
  return &nccl->comms[peer->process * 2 + sends];
}

// --- Results --------------------------------------------------------------------------

static void nccl_failed(jpp_nccl_comm_t* comm, const char* call,
                        jpp_nccl_result_t result) {
  const jpp_nccl_library_t* library = comm->nccl->library;
  const char* more = library->ncclGetLastError(comm->handle);
  jpp__net_peer_failed(comm->peer, "%s: %s%s%s", call,
                       library->ncclGetErrorString(result),
                       more && *more ? "; NCCL says: " : "", more ? more : "");
  comm->state = JPP_NCCL_DOOMED;
}

static bool cuda_did(jpp_nccl_comm_t* comm, const char* call, jpp_cuda_result_t result) {
  if (result == JPP_CUDA_SUCCESS) return true;
  jpp__net_peer_failed(comm->peer, "%s: %s", call,
                       jpp__cuda_text(comm->nccl->library, result));
  comm->state = JPP_NCCL_DOOMED;
  return false;
}

// Whether NCCL has finished its last operation.
static bool has_settled(jpp_nccl_comm_t* comm, const char* call) {
  jpp_nccl_result_t result = JPP_NCCL_SUCCESS;
  jpp_nccl_result_t asked =
      comm->nccl->library->ncclCommGetAsyncError(comm->handle, &result);
  if (asked != JPP_NCCL_SUCCESS) result = asked;
  if (result == JPP_NCCL_IN_PROGRESS) return false;
  if (result == JPP_NCCL_SUCCESS) return true;
  nccl_failed(comm, call, result);
  return false;
}

// --- Make -----------------------------------------------------------------------------

// The peer has the token, because its address was sealed with it.
static bool send_id(jpp_nccl_comm_t* comm) {
  jpp_nccl_result_t result = comm->nccl->library->ncclGetUniqueId(&comm->id);
  if (result != JPP_NCCL_SUCCESS) {
    nccl_failed(comm, "ncclGetUniqueId", result);
    return false;
  }
  comm->has_id = true;
  comm->meet.peer = comm->peer;
  comm->meet.packet = (jpp_packet_t){.size = sizeof(comm->id)};
  jpp__net_post(&comm->meet, JPP_PACKET_MEET, &comm->id, sizeof(comm->id), NULL);
  return true;
}

const char* jpp__nccl_meet(jpp_net_peer_t* peer, const jpp_packet_t* packet,
                           const void* data) {
  jpp_nccl_comm_t* comm = jpp__nccl_comm_of(peer, false);
  if (packet->size != sizeof(comm->id)) return "it is not an NCCL id";
  if (comm->has_id) return "its NCCL id arrived twice";
  memcpy(&comm->id, data, sizeof(comm->id));
  comm->has_id = true;
  return NULL;
}

static bool make_stream(jpp_nccl_comm_t* comm) {
  const jpp_nccl_library_t* library = comm->nccl->library;
  int least = 0, most = 0;
  return cuda_did(comm, "cuCtxGetStreamPriorityRange",
                  library->cuCtxGetStreamPriorityRange(&least, &most)) &&
         cuda_did(comm, "cuStreamCreateWithPriority",
                  library->cuStreamCreateWithPriority(&comm->stream, kJppCudaNonBlocking,
                                                      most)) &&
         cuda_did(comm, "cuEventCreate",
                  library->cuEventCreate(&comm->event, kJppCudaDisableTiming));
}

void jpp__nccl_comm_make(jpp_nccl_comm_t* comm) {
  if (!comm->has_id && (!comm->sends || !send_id(comm))) return;
  if (!make_stream(comm)) return;
  jpp_nccl_config_t config = {.size = sizeof(config),
                              .magic = (unsigned)kJppNcclMagic,
                              .version = kJppNcclConfig,
                              .blocking = 0};
  jpp_nccl_result_t result = comm->nccl->library->ncclCommInitRankConfig(
      &comm->handle, 2, comm->id, comm->sends ? 0 : 1, &config);
  if (result == JPP_NCCL_SUCCESS || result == JPP_NCCL_IN_PROGRESS) {
    comm->state = JPP_NCCL_MAKING;
  } else {
    nccl_failed(comm, "ncclCommInitRankConfig", result);
  }
}

static void note_made(jpp_nccl_comm_t* comm) {
  comm->state = JPP_NCCL_IDLE;
  comm->peer->net->some = true;
  JPP_LOG(JPP_LOG_INFO, "process %u %s process %u by NCCL", comm->peer->net->base.process,
          comm->sends ? "sends to" : "receives from", comm->peer->process);
}

// --- Transfers ------------------------------------------------------------------------

void jpp__nccl_send(jpp_net_op_t* op, const void* data) {
  jpp_nccl_comm_t* comm = jpp__nccl_comm_of(op->peer, true);
  op->packet.turn = ++comm->turn;
  if (comm->state >= JPP_NCCL_DOOMED) {
    jpp__net_op_done(op);
    return;
  }
  // The room was reserved when the channel was opened.
  comm->transfers.data[comm->transfers.count++] =
      (jpp_nccl_transfer_t){.turn = op->packet.turn,
                            .data = (void*)(uintptr_t)data,
                            .size = op->packet.size,
                            .op = op};
}

// Packets may overtake each other.
static const char* insert(jpp_nccl_comm_t* comm, const jpp_nccl_transfer_t* transfer) {
  if (transfer->turn <= comm->issued || transfer->turn - comm->issued > kMostAhead ||
      transfer->size > comm->nccl->scratch_size) {
    return "it is too large, or its turn is past or too far ahead";
  }
  size_t at = comm->transfers.count;
  while (at && comm->transfers.data[at - 1].turn > transfer->turn) --at;
  if (at && comm->transfers.data[at - 1].turn == transfer->turn) {
    return "another transfer has the same turn";
  }
  jpp_status_t* status = JPP_VEC_PUSH(&comm->transfers, *transfer);
  if (status) {
    jpp_status_free(status);
    return "host memory is exhausted";
  }
  jpp_nccl_transfer_t* place = &comm->transfers.data[at];
  memmove(place + 1, place, (comm->transfers.count - 1 - at) * sizeof(*place));
  *place = *transfer;
  return NULL;
}

const char* jpp__nccl_fetch(jpp_net_peer_t* peer, const jpp_packet_t* packet,
                            const jpp_net_place_t* place) {
  jpp_nccl_comm_t* comm = jpp__nccl_comm_of(peer, false);
  jpp_nccl_transfer_t transfer = {.turn = packet->turn,
                                  .data = place->data ? place->data : peer->net->scratch,
                                  .size = packet->size,
                                  .shard = place->shard};
  if (comm->state == JPP_NCCL_UNUSED) return "this process receives nothing over NCCL";
  bool ends = comm->state >= JPP_NCCL_DOOMED;
  const char* wrong = ends ? NULL : insert(comm, &transfer);
  if ((ends || wrong) && place->shard) jpp__net_received(place->shard, false);
  return wrong;
}

static jpp_nccl_result_t issue_transfer(jpp_nccl_comm_t* comm,
                                        const jpp_nccl_transfer_t* transfer) {
  const jpp_nccl_library_t* library = comm->nccl->library;
  jpp_nccl_result_t result =
      comm->sends ? library->ncclSend(transfer->data, transfer->size, kJppNcclBytes, 1,
                                      comm->handle, comm->stream)
                  : library->ncclRecv(transfer->data, transfer->size, kJppNcclBytes, 0,
                                      comm->handle, comm->stream);
  return result == JPP_NCCL_IN_PROGRESS ? JPP_NCCL_SUCCESS : result;
}

// The number of transfers at the front whose turn has come.
static size_t count_ready(const jpp_nccl_comm_t* comm) {
  size_t count = 0;
  while (count < comm->transfers.count &&
         comm->transfers.data[count].turn == comm->issued + count + 1) {
    ++count;
  }
  return count;
}

void jpp__nccl_comm_issue(jpp_nccl_comm_t* comm) {
  const jpp_nccl_library_t* library = comm->nccl->library;
  jpp_nccl_result_t result = JPP_NCCL_SUCCESS;
  size_t ready = comm->state == JPP_NCCL_IDLE ? count_ready(comm) : 0;
  if (!ready) return;
  library->ncclGroupStart();
  for (size_t i = 0; i < ready && result == JPP_NCCL_SUCCESS; ++i) {
    result = issue_transfer(comm, &comm->transfers.data[i]);
  }
  jpp_nccl_result_t ended = library->ncclGroupEnd();
  comm->batch = ready;
  comm->issued += ready;
  comm->state = JPP_NCCL_ISSUING;
  comm->peer->net->some = true;
  if (result == JPP_NCCL_SUCCESS && ended != JPP_NCCL_IN_PROGRESS) result = ended;
  if (result != JPP_NCCL_SUCCESS) nccl_failed(comm, "ncclGroupEnd", result);
}

// Ends the first `count` transfers.
static void finish(jpp_nccl_comm_t* comm, size_t count, bool success) {
  for (size_t i = 0; i < count; ++i) {
    const jpp_nccl_transfer_t* transfer = &comm->transfers.data[i];
    if (transfer->op) jpp__net_op_done(transfer->op);
    if (transfer->shard) jpp__net_received(transfer->shard, success);
  }
  comm->transfers.count -= count;
  if (comm->transfers.count) {
    memmove(comm->transfers.data, comm->transfers.data + count,
            comm->transfers.count * sizeof(*comm->transfers.data));
  }
  comm->batch = 0;
}

// --- Advance --------------------------------------------------------------------------

// Whether the stream has passed the event, or has failed.
static bool has_stopped(jpp_nccl_comm_t* comm, jpp_cuda_result_t* out_result) {
  *out_result = comm->nccl->library->cuEventQuery(comm->event);
  return *out_result != JPP_CUDA_NOT_READY;
}

static void advance_batch(jpp_nccl_comm_t* comm) {
  jpp_cuda_result_t result = JPP_CUDA_SUCCESS;
  if (!has_settled(comm, "NCCL failed")) return;
  if (comm->state == JPP_NCCL_ISSUING) {
    result = comm->nccl->library->cuEventRecord(comm->event, comm->stream);
    if (!cuda_did(comm, "cuEventRecord", result)) return;
    comm->state = JPP_NCCL_RUNNING;
  }
  if (!has_stopped(comm, &result) || !cuda_did(comm, "cuEventQuery", result)) return;
  comm->state = JPP_NCCL_IDLE;
  finish(comm, comm->batch, true);
}

// Whether the communicator waits for a peer that will send nothing more. All messages
// that a peer sent before it left have arrived.
static bool is_lost(const jpp_nccl_comm_t* comm) {
  bool waits = comm->state <= JPP_NCCL_MAKING || (comm->sends && comm->transfers.count);
  return comm->peer->status || (comm->peer->left && waits);
}

static void release(jpp_nccl_comm_t* comm) {
  const jpp_nccl_library_t* library = comm->nccl->library;
  if (comm->event) library->cuEventDestroy_v2(comm->event);
  if (comm->stream) library->cuStreamDestroy_v2(comm->stream);
  comm->event = NULL;
  comm->stream = NULL;
  comm->state = JPP_NCCL_ENDED;
  finish(comm, comm->transfers.count, false);
}

void jpp__nccl_comm_advance(jpp_nccl_comm_t* comm) {
  jpp_cuda_result_t stopped;
  if (comm->state < JPP_NCCL_DOOMED && is_lost(comm)) comm->state = JPP_NCCL_DOOMED;
  switch (comm->state) {
    case JPP_NCCL_MAKING:
      if (has_settled(comm, "ncclCommInitRankConfig")) note_made(comm);
      break;
    case JPP_NCCL_IDLE:
      has_settled(comm, "NCCL failed");
      break;
    case JPP_NCCL_ISSUING:
    case JPP_NCCL_RUNNING:
      advance_batch(comm);
      break;
    case JPP_NCCL_ABORTED:
      if (has_stopped(comm, &stopped)) release(comm);
      break;
    case JPP_NCCL_FINALIZING:
      if (!has_settled(comm, "ncclCommFinalize")) break;
      comm->nccl->library->ncclCommDestroy(comm->handle);
      release(comm);
      break;
    default:
      break;
  }
}

// --- End ------------------------------------------------------------------------------

void jpp__nccl_comms_abort(jpp_nccl_t* nccl) {
  bool some = false;
  for (size_t i = 0; i < nccl->used.count; ++i) {
    const jpp_nccl_comm_t* comm = nccl->used.data[i];
    if (comm->state == JPP_NCCL_ISSUING || comm->state == JPP_NCCL_RUNNING) return;
    some |= comm->state == JPP_NCCL_DOOMED;
  }
  if (!some) return;
  // Abort all of them before freeing the memory of any.
  nccl->library->ncclGroupStart();
  for (size_t i = 0; i < nccl->used.count; ++i) {
    const jpp_nccl_comm_t* comm = nccl->used.data[i];
    if (comm->state == JPP_NCCL_DOOMED && comm->handle) {
      nccl->library->ncclCommAbort(comm->handle);
    }
  }
  nccl->library->ncclGroupEnd();
  for (size_t i = 0; i < nccl->used.count; ++i) {
    jpp_nccl_comm_t* comm = nccl->used.data[i];
    if (comm->state == JPP_NCCL_DOOMED) {
      // The stream stops after the work that it already has.
      comm->state = JPP_NCCL_ABORTED;
      if (!comm->batch || comm->nccl->library->cuEventRecord(comm->event, comm->stream) !=
                              JPP_CUDA_SUCCESS) {
        release(comm);
      }
    }
  }
}

void jpp__nccl_comm_finalize(jpp_nccl_comm_t* comm) {
  if (comm->state >= JPP_NCCL_DOOMED) return;
  comm->state = comm->state == JPP_NCCL_IDLE ? JPP_NCCL_FINALIZING : JPP_NCCL_DOOMED;
  if (comm->state == JPP_NCCL_DOOMED) return;
  jpp_nccl_result_t result = comm->nccl->library->ncclCommFinalize(comm->handle);
  if (result != JPP_NCCL_SUCCESS && result != JPP_NCCL_IN_PROGRESS) {
    comm->state = JPP_NCCL_DOOMED;
  }
}

void jpp__nccl_comm_doom(jpp_nccl_comm_t* comm) {
  if (comm->state == JPP_NCCL_FINALIZING) comm->state = JPP_NCCL_DOOMED;
}

void jpp__nccl_comm_give_up(jpp_nccl_comm_t* comm) {
  if (comm->state == JPP_NCCL_ENDED) return;
  comm->nccl->stuck = true;
  release(comm);
}
