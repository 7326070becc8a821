// Counts the holders and readers of arrays, and frees their buffers.
//
// The buffers of an array are freed when it is deleted or released and has no reader; a
// lent buffer is freed with its last loan. No call blocks, and nothing is freed, under
// the lock.
#include "array/array.h"

#include <stdatomic.h>
#include <string.h>

#include "array/lock.h"
#include "base/alloc.h"
#include "base/bytes.h"
#include "base/null.h"
#include "base/struct_size.h"
#include "device/process.h"
#include "device/wait.h"

// --- Create and release ---------------------------------------------------------------

static size_t count_shards(const jpp_array_t* array) {
  return (size_t)array->layout.num_ranks * array->layout.devices_per_rank;
}

// Borrows the shape's dims.
static jpp_array_type_t type_of_piece(const jpp_buffer_shape_t* shape) {
  uint64_t elements = 1;
  for (uint32_t i = 0; i < shape->rank; ++i) {
    elements = jpp__bytes_multiply(elements, (uint64_t)shape->dims[i]);
  }
  return (jpp_array_type_t){
      .dtype = shape->dtype,
      .ndim = shape->rank,
      .dims = shape->dims,
      .device_bytes = jpp_dtype_device_bytes(shape->dtype, elements)};
}

jpp_status_t* jpp__array_promise(const jpp_array_layout_t* layout,
                                 const jpp_array_type_t* type, jpp_outcome_t* outcome,
                                 jpp_array_t** out_array) {
  size_t shards = (size_t)layout->num_ranks * layout->devices_per_rank;
  size_t dims_at = jpp__bytes_add(sizeof(jpp_array_t),
                                  jpp__bytes_multiply(shards, sizeof(jpp_buffer_t*)));
  size_t ranks_at = jpp__bytes_add(dims_at, type->ndim * sizeof(int64_t));
  size_t numbers = jpp__bytes_add(layout->num_ranks, shards);
  size_t bytes = jpp__bytes_add(ranks_at, jpp__bytes_multiply(numbers, sizeof(uint32_t)));
  jpp_array_t* array = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(bytes, (void**)&array));
  array->layout = *layout;
  array->buffers = (jpp_buffer_t**)(array + 1);
  int64_t* dims = (int64_t*)((char*)array + dims_at);
  for (uint32_t i = 0; i < type->ndim; ++i) dims[i] = type->dims[i];
  array->type = *type;
  array->type.dims = dims;
  array->ranks = (uint32_t*)((char*)array + ranks_at);
  for (uint32_t i = 0; i < layout->num_ranks; ++i) array->ranks[i] = layout->ranks[i];
  array->layout.ranks = array->ranks;
  array->loans = array->ranks + layout->num_ranks;
  array->holders = 1;
  array->outcome = outcome;
  if (outcome) jpp__outcome_hold(outcome);
  *out_array = array;
  return NULL;
}

// Makes an array whose pieces have the shapes that `shape_of` sets.
static jpp_status_t* make_array(const jpp_array_layout_t* layout,
                                jpp_status_t* (*shape_of)(const void* from, size_t shard,
                                                          jpp_buffer_shape_t* out_shape),
                                const void* from, jpp_array_t** out_array) {
  jpp_array_type_t type = {.dtype = JPP_DTYPE_INVALID};
  size_t shards = (size_t)layout->num_ranks * layout->devices_per_rank;
  for (size_t i = 0; i < shards; ++i) {
    jpp_buffer_shape_t shape = {.rank = UINT32_MAX};
    JPP_RETURN_IF_ERROR(shape_of(from, i, &shape));
    if (shape.rank == UINT32_MAX) continue;  // no device
    if (shape.rank) JPP_RETURN_IF_NULL(shape.dims);
    const jpp_array_type_t piece = type_of_piece(&shape);
    if (i == 0) type = piece;
    size_t bytes = piece.ndim * sizeof(*piece.dims);
    if (piece.dtype == type.dtype && piece.ndim == type.ndim &&
        (!bytes || !memcmp(piece.dims, type.dims, bytes))) {
      continue;
    }
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "expected shards of one type and shape, but shard %zu differs from shard 0", i);
  }
  return jpp__array_promise(layout, &type, NULL, out_array);
}

static jpp_status_t* read_layout(const jpp_array_layout_t* given,
                                 jpp_array_layout_t* out_layout) {
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_array_layout_t, ranks, given, out_layout));
  const jpp_array_layout_t* layout = out_layout;
  JPP_RETURN_IF_NULL(layout->client);
  if (layout->num_ranks) JPP_RETURN_IF_NULL(layout->ranks);
  return NULL;
}

typedef struct given_buffers {
  jpp_client_t* client;
  jpp_buffer_t* const* buffers;
} given_buffers_t;

static jpp_status_t* shape_of_buffer(const void* from, size_t shard,
                                     jpp_buffer_shape_t* out_shape) {
  const given_buffers_t* given = from;
  if (!given->buffers[shard]) return NULL;
  return jpp_client_buffer_shape(given->client, given->buffers[shard], out_shape);
}

jpp_status_t* jpp_array_create(const jpp_array_layout_t* layout,
                               jpp_buffer_t* const* buffers, jpp_array_t** out_array) {
  JPP_RETURN_IF_NULL(layout, buffers, out_array);
  *out_array = NULL;
  jpp_array_layout_t full;
  JPP_RETURN_IF_ERROR(read_layout(layout, &full));
  const given_buffers_t given = {.client = full.client, .buffers = buffers};
  JPP_RETURN_IF_ERROR(make_array(&full, shape_of_buffer, &given, out_array));
  for (size_t i = 0; i < count_shards(*out_array); ++i) {
    (*out_array)->buffers[i] = buffers[i];
  }
  return NULL;
}

typedef struct given_shards {
  const jpp_host_array_t* shards;
  uint32_t devices_per_rank;
} given_shards_t;

static jpp_status_t* shape_of_host_array(const void* from, size_t shard,
                                         jpp_buffer_shape_t* out_shape) {
  const given_shards_t* given = from;
  jpp_host_array_t array;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY_AT(jpp_host_array_t, byte_strides, given->shards,
                                          shard % given->devices_per_rank, &array));
  *out_shape =
      (jpp_buffer_shape_t){.dtype = array.dtype, .rank = array.rank, .dims = array.dims};
  return NULL;
}

jpp_status_t* jpp_array_upload(const jpp_array_layout_t* layout,
                               const jpp_host_array_t* shards, const uint32_t* devices,
                               jpp_array_t** out_array) {
  JPP_RETURN_IF_NULL(layout, shards, devices, out_array);
  *out_array = NULL;
  jpp_array_layout_t full;
  JPP_RETURN_IF_ERROR(read_layout(layout, &full));
  const given_shards_t given = {.shards = shards,
                                .devices_per_rank = full.devices_per_rank};
  jpp_array_t* array = NULL;
  jpp_status_t* status = make_array(&full, shape_of_host_array, &given, &array);
  for (size_t i = 0; !status && i < count_shards(array); ++i) {
    jpp_host_array_t shard;
    status = JPP_OPTIONS_COPY_AT(jpp_host_array_t, byte_strides, shards,
                                 i % full.devices_per_rank, &shard);
    if (status) break;
    if (devices[i] == JPP_NO_DEVICE) continue;
    shard.memory = full.memory;
    status =
        jpp_client_buffer_from_host(full.client, &shard, devices[i], &array->buffers[i]);
  }
  if (status) {
    jpp_array_release(array);
    return status;
  }
  *out_array = array;
  return NULL;
}

// --- Foreign memory -------------------------------------------------------------------

// Released when the array is freed and the plugin has released each shard, whichever is
// last: a step may still run when its argument's buffers are destroyed, and a plugin may
// still copy after the step has failed.
typedef struct jpp_owner {
  atomic_size_t uses;
  void (*release)(void* user);
  void* user;
} jpp_owner_t;

static void release_owner(jpp_owner_t* owner) {
  if (!owner || atomic_fetch_sub(&owner->uses, 1) != 1) return;
  owner->release(owner->user);
  jpp_free(owner);
}

static void release_shard(void* memory, void* user) {
  (void)memory;
  release_owner(user);
}

static jpp_status_t* borrow_shard(jpp_array_t* array, const jpp_foreign_memory_t* memory,
                                  size_t shard) {
  jpp_foreign_memory_t foreign = memory[shard];
  foreign.release = release_shard;
  foreign.user = array->owner;
  atomic_fetch_add(&array->owner->uses, 1);
  jpp_status_t* status =
      jpp_client_buffer_borrow(array->layout.client, &foreign, &array->buffers[shard]);
  if (status) release_owner(array->owner);
  return status;
}

static jpp_status_t* shape_of_memory(const void* from, size_t shard,
                                     jpp_buffer_shape_t* out_shape) {
  const jpp_foreign_memory_t* memory = from;
  *out_shape = memory[shard].shape;
  return NULL;
}

jpp_status_t* jpp_array_borrow(const jpp_array_layout_t* layout,
                               const jpp_foreign_memory_t* memory,
                               void (*release)(void* user), void* user,
                               jpp_array_t** out_array) {
  JPP_RETURN_IF_NULL(layout, memory, out_array);
  if (!release) return jpp__null_error(__func__, "release", 0);
  *out_array = NULL;
  jpp_array_t* array = NULL;
  jpp_owner_t* owner = NULL;
  jpp_array_layout_t full;
  jpp_status_t* status = read_layout(layout, &full);
  if (!status) status = jpp_alloc(sizeof(*owner), (void**)&owner);
  if (!status) status = make_array(&full, shape_of_memory, memory, &array);
  if (status) {
    jpp_free(owner);
    release(user);
    return status;
  }
  *owner = (jpp_owner_t){.uses = 1, .release = release, .user = user};
  array->owner = owner;
  for (size_t i = 0; i < count_shards(array) && !status; ++i) {
    if (memory[i].device != JPP_NO_DEVICE) status = borrow_shard(array, memory, i);
  }
  if (status) {
    jpp_array_release(array);
    return status;
  }
  *out_array = array;
  return NULL;
}

// --- Holders --------------------------------------------------------------------------

void jpp_array_hold(jpp_array_t* array) {
  jpp__arrays_lock();
  ++array->holders;
  jpp__arrays_unlock();
}

// Under the lock: returns a buffer for the caller to destroy, or NULL while it is lent.
static jpp_buffer_t* give_up_buffer(jpp_array_t* array, size_t shard) {
  if (array->loans[shard]) return NULL;
  jpp_buffer_t* buffer = array->buffers[shard];
  array->buffers[shard] = NULL;
  return buffer;
}

// Frees the buffers of an array without users, except those that are still lent.
static void drop_buffers(jpp_array_t* array) {
  for (size_t i = 0; i < count_shards(array); ++i) {
    jpp__arrays_lock();
    jpp_buffer_t* buffer = give_up_buffer(array, i);
    jpp__arrays_unlock();
    jpp_client_buffer_destroy(array->layout.client, buffer);
  }
}

void jpp_array_release(jpp_array_t* array) {
  if (!array) return;
  jpp__arrays_lock();
  bool last = --array->holders == 0;
  jpp__arrays_unlock();
  if (!last) return;
  for (size_t i = 0; i < count_shards(array); ++i) {
    jpp_client_buffer_destroy(array->layout.client, array->buffers[i]);
  }
  jpp_array_release(array->origin);
  jpp__outcome_release(array->outcome);
  release_owner(array->owner);
  jpp_free(array);
}

const jpp_array_layout_t* jpp_array_layout(const jpp_array_t* array) {
  return &array->layout;
}

jpp_buffer_t** jpp__array_at(const jpp_array_t* array, uint32_t rank) {
  for (uint32_t i = 0; i < array->layout.num_ranks; ++i) {
    if (array->ranks[i] == rank) {
      return array->buffers + (size_t)i * array->layout.devices_per_rank;
    }
  }
  return NULL;
}

jpp_buffer_t* const* jpp_array_shards(const jpp_array_t* array, uint32_t rank) {
  return jpp__array_at(array, rank);
}

// --- Readers --------------------------------------------------------------------------

void jpp__array_begin_read(jpp_array_t* array) { ++array->readers; }

// Under the lock: whether the caller must free the buffers, because no user is left.
// False for buffers that a step has promised but not made.
static bool claim_useless(jpp_array_t* array) {
  const jpp_outcome_t* outcome = array->outcome;
  bool failed = outcome && outcome->failure;
  bool promised = outcome && !outcome->issued && !outcome->finished;
  if (array->dropped || array->readers || promised) return false;
  array->dropped = array->deleted || failed;
  return array->dropped;
}

void jpp__array_settle(jpp_array_t* array) {
  jpp__arrays_lock();
  bool useless = claim_useless(array);
  jpp__arrays_unlock();
  if (useless) drop_buffers(array);
}

void jpp__array_end_read(jpp_array_t* array) {
  jpp__arrays_lock();
  --array->readers;
  bool useless = claim_useless(array);
  jpp__arrays_changed();
  jpp__arrays_unlock();
  if (useless) drop_buffers(array);
}

// --- Donation -------------------------------------------------------------------------

jpp_array_t* jpp__array_root(jpp_array_t* array) {
  return array->origin ? array->origin : array;
}

// Chains of origins are finite: an array never becomes the origin of its own origin.
void jpp_array_set_origin(jpp_array_t* copy, jpp_array_t* origin) {
  jpp__arrays_lock();
  jpp_array_t* root = origin;
  while (root->origin && root != copy) root = root->origin;
  if (root != copy && !copy->origin) {
    copy->origin = root;
    ++root->holders;
  }
  jpp__arrays_unlock();
}

void jpp_array_delete(jpp_array_t* array) {
  jpp__arrays_lock();
  array->deleted = true;
  bool useless = claim_useless(array);
  jpp__arrays_unlock();
  if (useless) drop_buffers(array);
}

bool jpp_array_is_deleted(const jpp_array_t* array) {
  jpp__arrays_lock();
  bool deleted = array->deleted;
  jpp__arrays_unlock();
  return deleted;
}

const char* jpp__array_deletion_reason_of(const jpp_array_t* array) {
  if (array->lost) {
    return "was donated to a step that failed or was interrupted, and is gone; go back "
           "to a checkpoint, or to a copy made before the step";
  }
  return "was deleted or donated to a step; use what the step returned in its place";
}

const char* jpp_array_deletion_reason(const jpp_array_t* array) {
  jpp__arrays_lock();
  const char* reason = jpp__array_deletion_reason_of(array);
  jpp__arrays_unlock();
  return reason;
}

// --- Waiting --------------------------------------------------------------------------

static const char kWait[] = "the wait for an array";

// Under the lock. Waits until its step has been issued, or is finished.
static jpp_status_t* await_outcome(const jpp_array_t* array, bool finished,
                                   const jpp_interrupt_t* interrupt) {
  const jpp_outcome_t* outcome = array->outcome;
  while (outcome && !outcome->finished && (finished || !outcome->issued)) {
    if (!jpp__arrays_wait(interrupt)) {
      return jpp_status_make(JPP_CANCELLED, "%s was interrupted", kWait);
    }
  }
  return jpp__outcome_tell(array->outcome);
}

static jpp_status_t* check_alive(const jpp_array_t* array) {
  if (!array->deleted) return NULL;
  return jpp_status_make(JPP_DONATED_ERROR, "the array %s",
                         jpp__array_deletion_reason_of(array));
}

void jpp__array_await_issue(const jpp_array_t* array, const jpp_interrupt_t* interrupt) {
  const jpp_outcome_t* outcome = array->outcome;
  bool waiting = true;
  while (waiting && outcome && !outcome->issued && !outcome->finished) {
    waiting = jpp__arrays_wait(interrupt);
  }
}

// Begins to read buffers that exist.
static jpp_status_t* open_array(jpp_array_t* array, const jpp_interrupt_t* interrupt) {
  jpp_status_t* status = jpp_process_check();
  if (status) return status;
  jpp__arrays_lock();
  status = check_alive(array);
  if (!status) status = await_outcome(array, false, interrupt);
  if (!status)
    status = check_alive(array);  // the array may have been deleted in the meantime
  if (!status) jpp__array_begin_read(array);
  jpp__arrays_unlock();
  return status;
}

static jpp_status_t* await_buffer(const jpp_array_t* array, jpp_buffer_t* buffer,
                                  const jpp_interrupt_t* interrupt) {
  if (!buffer) return NULL;  // no device
  return jpp__wait_buffer(array->layout.client, buffer, kWait, interrupt);
}

// A device has reported why a buffer has no contents; the step's error is more precise,
// once the step is done. Owns `status`.
static jpp_status_t* explain(const jpp_array_t* array, jpp_status_t* status,
                             const jpp_interrupt_t* interrupt) {
  if (!status || jpp_status_code(status) == JPP_CANCELLED) return status;
  jpp__arrays_lock();
  jpp_status_t* better = await_outcome(array, true, interrupt);
  jpp__arrays_unlock();
  if (!better) return status;
  jpp_status_free(status);
  return better;
}

jpp_status_t* jpp_array_await(jpp_array_t* array, const jpp_interrupt_t* interrupt) {
  JPP_RETURN_IF_NULL(array);
  JPP_RETURN_IF_ERROR(open_array(array, interrupt));
  jpp_status_t* status = NULL;
  for (size_t i = 0; i < count_shards(array) && !status; ++i) {
    status = await_buffer(array, array->buffers[i], interrupt);
  }
  status = explain(array, status, interrupt);
  jpp__array_end_read(array);
  return status;
}

jpp_status_t* jpp_array_is_ready(jpp_array_t* array, bool* out_ready) {
  JPP_RETURN_IF_NULL(array, out_ready);
  *out_ready = false;
  JPP_RETURN_IF_ERROR(jpp_process_check());
  jpp__arrays_lock();
  const jpp_outcome_t* outcome = array->outcome;
  bool failed = outcome && outcome->failure;
  bool issued = !outcome || outcome->issued;
  jpp_status_t* status = failed ? NULL : check_alive(array);
  bool look = !status && !failed && issued;
  if (look) jpp__array_begin_read(array);
  jpp__arrays_unlock();
  *out_ready = failed;
  if (!look) return status;
  *out_ready = true;
  for (size_t i = 0; i < count_shards(array) && *out_ready && !status; ++i) {
    if (!array->buffers[i]) continue;  // no device
    status =
        jpp__wait_is_buffer_ready(array->layout.client, array->buffers[i], out_ready);
  }
  jpp__array_end_read(array);
  return status;
}

// --- Reading and taking ---------------------------------------------------------------

// Waits for one shard, so that the caller can read it.
static jpp_status_t* await_shard(const jpp_array_t* array, uint32_t rank, uint32_t device,
                                 const jpp_interrupt_t* interrupt,
                                 jpp_buffer_t*** out_shard) {
  jpp_buffer_t** buffers = jpp__array_at(array, rank);
  if (!buffers || device >= array->layout.devices_per_rank || !buffers[device]) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "no shard %u on rank %u", device, rank);
  }
  *out_shard = buffers + device;
  return await_buffer(array, buffers[device], interrupt);
}

static jpp_status_t* read_shard(const jpp_array_t* array, uint32_t rank, uint32_t device,
                                void* data, size_t size,
                                const jpp_interrupt_t* interrupt) {
  jpp_buffer_t** shard = NULL;
  JPP_RETURN_IF_ERROR(await_shard(array, rank, device, interrupt, &shard));
  return jpp_client_buffer_read(array->layout.client, *shard, data, size);
}

jpp_status_t* jpp_array_read(jpp_array_t* array, uint32_t rank, uint32_t device,
                             void* data, size_t size, const jpp_interrupt_t* interrupt) {
  JPP_RETURN_IF_NULL(array);
  if (size) JPP_RETURN_IF_NULL(data);
  JPP_RETURN_IF_ERROR(open_array(array, interrupt));
  jpp_status_t* status = read_shard(array, rank, device, data, size, interrupt);
  status = explain(array, status, interrupt);
  jpp__array_end_read(array);
  return status;
}

jpp_status_t* jpp_array_take(jpp_array_t* array, uint32_t rank, uint32_t count,
                             jpp_buffer_t** out_buffers) {
  JPP_RETURN_IF_NULL(array, out_buffers);
  JPP_RETURN_IF_ERROR(
      jpp__check_count("the buffers of a rank", array->layout.devices_per_rank, count));
  jpp__arrays_lock();
  jpp_buffer_t** shards = jpp__array_at(array, rank);
  for (uint32_t d = 0; d < array->layout.devices_per_rank; ++d) {
    out_buffers[d] = shards ? shards[d] : NULL;
    if (shards) shards[d] = NULL;
  }
  array->deleted = true;
  jpp__arrays_unlock();
  return NULL;
}

// --- Loans ----------------------------------------------------------------------------

static jpp_status_t* lend_shard(jpp_array_t* array, uint32_t rank, uint32_t device,
                                const jpp_interrupt_t* interrupt, jpp_loan_t* loan) {
  jpp_client_t* client = array->layout.client;
  jpp_buffer_t** shard = NULL;
  JPP_RETURN_IF_ERROR(await_shard(array, rank, device, interrupt, &shard));
  JPP_RETURN_IF_ERROR(jpp_client_buffer_shape(client, *shard, &loan->shape));
  JPP_RETURN_IF_ERROR(jpp_client_buffer_lend(client, *shard, &loan->memory));
  loan->shard = (uint32_t)(shard - array->buffers);
  return NULL;
}

jpp_status_t* jpp_array_lend(jpp_array_t* array, uint32_t rank, uint32_t device,
                             const jpp_interrupt_t* interrupt, jpp_loan_t* out_loan) {
  JPP_RETURN_IF_NULL(array, out_loan);
  *out_loan = (jpp_loan_t){.array = array};
  JPP_RETURN_IF_ERROR(open_array(array, interrupt));
  jpp_status_t* status = lend_shard(array, rank, device, interrupt, out_loan);
  status = explain(array, status, interrupt);
  if (!status) {
    jpp__arrays_lock();
    ++array->holders;
    ++array->loans[out_loan->shard];
    jpp__arrays_unlock();
  }
  jpp__array_end_read(array);
  return status;
}

void jpp_array_reclaim(const jpp_loan_t* loan) {
  if (jpp_process_is_forked) return;
  jpp_array_t* array = loan->array;
  jpp_client_buffer_reclaim(array->layout.client, array->buffers[loan->shard]);
  jpp__arrays_lock();
  --array->loans[loan->shard];
  jpp_buffer_t* useless = array->dropped ? give_up_buffer(array, loan->shard) : NULL;
  jpp__arrays_unlock();
  jpp_client_buffer_destroy(array->layout.client, useless);
  jpp_array_release(array);
}

bool jpp__array_is_shared(const jpp_array_t* array, uint32_t rank) {
  if (array->owner) return true;
  const jpp_buffer_t* const* first = (const jpp_buffer_t* const*)array->buffers;
  const jpp_buffer_t* const* shards =
      (const jpp_buffer_t* const*)jpp__array_at(array, rank);
  for (uint32_t d = 0; d < array->layout.devices_per_rank; ++d) {
    if (array->loans[(size_t)(shards - first) + d]) return true;
  }
  return false;
}
