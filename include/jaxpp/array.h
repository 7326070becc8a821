// Array: one value on the devices of one or more pipeline ranks, the same on each. Steps
// take arrays and give arrays (jaxpp/runtime.h).
//
// The results of a step are promises: jpp_runtime_call() gives them before the devices
// have made them. Passing one on to another step does not wait; reading it does. When the
// step fails, its results fail: whoever waits for one gets the step's status.
//
// A step deletes the arrays that are donated to it as soon as it is called. A copy that
// was made of an array for a step can stand for it: donating the copy donates both.
//
// Memory may be shared with another framework: an array's is lent, or an array is made
// over what is the other's. A step to which such an array is donated makes a copy for
// itself and writes there: what the other one sees never changes.
//
// Threads: any thread may call anything at any time; an array lives until the last holder
// releases it, and its buffers until the last reader is done.
#ifndef JAXPP_ARRAY_H_
#define JAXPP_ARRAY_H_

#include "jaxpp/device.h"

typedef struct jpp_array jpp_array_t;

// The shards of an array, one a device: [num_ranks][devices_per_rank], flat.
typedef struct jpp_array_layout {
  jpp_client_t* client;  // borrowed; outlives the array
  uint32_t num_ranks;
  uint32_t devices_per_rank;
  const uint32_t* ranks;  // [num_ranks] ascending or not, each once
} jpp_array_layout_t;

// Takes over the buffers; `layout` and the list are only read during the call. The caller
// holds the array once.
JPP_API jpp_status_t* jpp_array_create(const jpp_array_layout_t* layout,
                                       jpp_buffer_t* const* buffers,
                                       jpp_array_t** out_array) JPP_MUST_USE;
// Copies to devices of the layout's client: `shards` are [devices_per_rank], the same on
// each rank; `devices` are client indices, [num_ranks][devices_per_rank].
JPP_API jpp_status_t* jpp_array_upload(const jpp_array_layout_t* layout,
                                       const jpp_host_array_t* shards,
                                       const uint32_t* devices,
                                       jpp_array_t** out_array) JPP_MUST_USE;
// The same over memory that somebody else owns, of which nothing is copied: `memory` is
// [num_ranks][devices_per_rank], flat, and only read during the call; its `release` and
// `user` are not looked at. `release` is called once, when nobody holds the array, all
// steps that took it are done and so is the plugin; after an error, before this returns
// or soon. Any thread, maybe inside a call of the library: must not block, nor call it.
// Errors: as jpp_client_buffer_borrow().
JPP_API jpp_status_t* jpp_array_borrow(const jpp_array_layout_t* layout,
                                       const jpp_foreign_memory_t* memory,
                                       void (*release)(void* user),
                                       JPP_OPTIONAL void* user,
                                       jpp_array_t** out_array) JPP_MUST_USE;
JPP_API void jpp_array_hold(jpp_array_t* array);
// Frees the array if nobody else holds it. NULL is fine.
JPP_API void jpp_array_release(jpp_array_t* array);
// Borrowed for the lifetime of the array.
JPP_API jpp_array_layout_t jpp_array_layout(const jpp_array_t* array);

// --- Contents -------------------------------------------------------------------------

// Until the contents are there. The status of the step that was to make them, if that
// failed; JPP_DONATED_ERROR for a deleted array; JPP_CANCELLED if interrupted
// (`interrupt` may be NULL), which leaves the array and the step as they are.
JPP_API jpp_status_t* jpp_array_await(
    jpp_array_t* array, JPP_OPTIONAL const jpp_interrupt_t* interrupt) JPP_MUST_USE;
// Whether jpp_array_await() would return at once.
JPP_API jpp_status_t* jpp_array_is_ready(jpp_array_t* array,
                                         bool* out_ready) JPP_MUST_USE;
// Waits and copies one shard to the host, dense with the last dimension fastest; `size`
// is its bytes. JPP_INVALID_ARGUMENT if the array has no such shard.
JPP_API jpp_status_t* jpp_array_read(
    jpp_array_t* array, uint32_t rank, uint32_t device, void* data, size_t size,
    JPP_OPTIONAL const jpp_interrupt_t* interrupt) JPP_MUST_USE;
// The buffers on a rank, [devices_per_rank], NULL if the array is not there. For a look
// after jpp_array_await(), while nobody deletes or donates the array.
JPP_API jpp_buffer_t* const* jpp_array_shards(const jpp_array_t* array, uint32_t rank);
// Hands the buffers on a rank to the caller, who owns them then, and leaves the array
// deleted; those of other ranks can still be taken. Likewise after jpp_array_await(), and
// while nothing of the array is lent.
// `out_buffers` has room for [devices_per_rank]; NULL: none there.
JPP_API void jpp_array_take(jpp_array_t* array, uint32_t rank,
                            jpp_buffer_t** out_buffers);

// --- Loans ----------------------------------------------------------------------------

// A shard that somebody outside looks at where it is. The memory stays and does not
// change until jpp_array_reclaim(), whatever becomes of the array.
typedef struct jpp_loan {
  jpp_array_t* array;  // held
  uint32_t shard;      // of [num_ranks][devices_per_rank]
  void* memory;        // on the shard's device, dense with the last dimension fastest
  jpp_buffer_shape_t shape;  // for as long as the loan
} jpp_loan_t;

// Waits and lends one shard, to as many as ask. The errors of jpp_array_read(), and
// JPP_UNSUPPORTED where the memory can not be shared: read it then.
JPP_API jpp_status_t* jpp_array_lend(jpp_array_t* array, uint32_t rank, uint32_t device,
                                     JPP_OPTIONAL const jpp_interrupt_t* interrupt,
                                     jpp_loan_t* out_loan) JPP_MUST_USE;
// Nobody looks any more; in a process forked since, nothing.
JPP_API void jpp_array_reclaim(const jpp_loan_t* loan);

// --- Donation -------------------------------------------------------------------------

// A step to which `copy` is donated deletes what `origin` stands for as well. Without
// effect if `copy` stands for another already or that would close a circle.
JPP_API void jpp_array_stand_for(jpp_array_t* copy, jpp_array_t* origin);
// Frees the device memory as soon as no reader needs it.
JPP_API void jpp_array_delete(jpp_array_t* array);
// Deleted, or donated to a step.
JPP_API bool jpp_array_is_deleted(const jpp_array_t* array);
// Why a deleted array can not be used and what to do, to stand after "an array that ";
// lifetime static.
JPP_API const char* jpp_array_fate(const jpp_array_t* array);

#endif  // JAXPP_ARRAY_H_
