// Array: one value on the devices of one or more pipeline ranks, the same on each rank.
// Steps take and return arrays (jaxpp/runtime.h).
//
// The results of a step are promises: jpp_runtime_call() returns them before the devices
// have computed them. Passing one to another step does not wait; reading it does. When
// the step fails, its results fail: a wait for one of them returns the step's status.
//
// Arrays are counted. The caller of a function that makes one holds it once, and each
// hold needs one jpp_array_release(), also after the array was deleted or donated. An
// array outlives the runtime, plan and executables that made it; its client must outlive
// it.
//
// A step deletes the arrays that are donated to it as soon as it is called: it frees
// their contents, and their handles remain valid. A copy that was made for a step can
// name the array that it is a copy of: donating the copy donates both.
//
// Memory may be shared with another framework: the library lends an array's memory, or
// makes an array over memory that the framework owns. A step to which such an array is
// donated writes to a copy: the framework's view never changes.
//
// Threads: any thread may call anything at any time. An array lives until its last holder
// releases it, and its buffers until the last reader is done.
#ifndef JAXPP_ARRAY_H_
#define JAXPP_ARRAY_H_

#include "jaxpp/device.h"

typedef struct jpp_array jpp_array_t;

// In place of a device: the rank has fewer devices than others.
#define JPP_NO_DEVICE UINT32_MAX

// The shards of an array, one per device: [num_ranks][devices_per_rank], flat. A rank
// with fewer devices has shards at the beginning of its row.
typedef struct jpp_array_layout {
  size_t struct_size;    // sizeof(jpp_array_layout_t)
  jpp_client_t* client;  // borrowed; outlives the array
  uint32_t num_ranks;
  uint32_t devices_per_rank;
  const uint32_t* ranks;  // [num_ranks] in any order, each rank once
  jpp_memory_t memory;    // of each device
} jpp_array_layout_t;

// Takes over the buffers; after an error they are still the caller's. A buffer is NULL
// where a rank has no device. `layout` and the list are only read during the call.
JPP_API jpp_status_t* jpp_array_create(const jpp_array_layout_t* layout,
                                       jpp_buffer_t* const* buffers,
                                       jpp_array_t** out_array) JPP_MUST_USE;
// Copies host arrays to the layout's memory on its devices: `shards` are
// [devices_per_rank], the same on each rank; `devices` are client indices or
// JPP_NO_DEVICE, [num_ranks][devices_per_rank].
JPP_API jpp_status_t* jpp_array_upload(const jpp_array_layout_t* layout,
                                       const jpp_host_array_t* shards,
                                       const uint32_t* devices,
                                       jpp_array_t** out_array) JPP_MUST_USE;
// The same over memory that another owner provides, without a copy: `memory` is
// [num_ranks][devices_per_rank], flat, and only read during the call; its `release` and
// `user` are ignored, and so is memory whose device is JPP_NO_DEVICE. The library calls
// `release` exactly once: when the last holder has released the array, all steps that
// took it are done, and the plugin no longer needs the memory. After an error it calls
// `release` before this returns or shortly afterwards; not at all if a parameter is NULL.
// Any thread may call it, possibly inside a call of the library: it must not block, nor
// call the library. Errors: as jpp_client_buffer_borrow().
JPP_API jpp_status_t* jpp_array_borrow(const jpp_array_layout_t* layout,
                                       const jpp_foreign_memory_t* memory,
                                       void (*release)(void* user),
                                       JPP_OPTIONAL void* user,
                                       jpp_array_t** out_array) JPP_MUST_USE;
JPP_API void jpp_array_hold(jpp_array_t* array);
// Gives up one hold; the last one frees the array. Takes NULL.
JPP_API void jpp_array_release(jpp_array_t* array);
// Borrowed for the lifetime of the array.
JPP_API const jpp_array_layout_t* jpp_array_layout(const jpp_array_t* array);

// --- Contents -------------------------------------------------------------------------

// Waits until the contents exist. Returns the status of the step that makes them, if it
// failed; JPP_DONATED_ERROR for a deleted array; JPP_CANCELLED if interrupted, which
// leaves the array and the step as they are.
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
// The buffers on a rank, [devices_per_rank]; NULL if the array is not on the rank. Valid
// after jpp_array_await(), until the array is deleted, donated or released.
JPP_API jpp_buffer_t* const* jpp_array_shards(const jpp_array_t* array, uint32_t rank);
// Hands the buffers on a rank to the caller, who then owns them, and marks the array as
// deleted; the buffers of other ranks can still be taken. Call jpp_array_await() first,
// and not while a shard is lent.
// They are NULL if the array is not on the rank. JPP_INVALID_ARGUMENT unless `count` is
// devices_per_rank.
JPP_API jpp_status_t* jpp_array_take(jpp_array_t* array, uint32_t rank, uint32_t count,
                                     jpp_buffer_t** out_buffers) JPP_MUST_USE;

// --- Loans ----------------------------------------------------------------------------

// A shard that another framework reads in place. The memory remains unchanged until
// jpp_array_reclaim(), even if the array is deleted, donated or released.
// Its layout is final.
typedef struct jpp_loan {
  jpp_array_t* array;  // held
  uint32_t shard;      // of [num_ranks][devices_per_rank]
  void* memory;        // on the shard's device, dense with the last dimension fastest
  jpp_buffer_shape_t shape;  // valid until the loan ends
} jpp_loan_t;

// Waits and lends one shard, any number of times; each loan needs one
// jpp_array_reclaim(). The errors of jpp_array_read(), and JPP_UNSUPPORTED where the
// memory cannot be shared: read it then.
JPP_API jpp_status_t* jpp_array_lend(jpp_array_t* array, uint32_t rank, uint32_t device,
                                     JPP_OPTIONAL const jpp_interrupt_t* interrupt,
                                     jpp_loan_t* out_loan) JPP_MUST_USE;
// Ends the loan and releases the array. Does nothing in a process that was forked after
// the loan began.
JPP_API void jpp_array_reclaim(const jpp_loan_t* loan);

// --- Donation -------------------------------------------------------------------------

// Makes `copy` a copy of `origin`: a step to which the copy is donated deletes both.
// Does nothing if the copy already has an origin, or if that would close a cycle.
JPP_API void jpp_array_set_origin(jpp_array_t* copy, jpp_array_t* origin);
// Frees the device memory as soon as no reader needs it.
JPP_API void jpp_array_delete(jpp_array_t* array);
// Deleted, or donated to a step.
JPP_API bool jpp_array_is_deleted(const jpp_array_t* array);
// Why a deleted array cannot be used and what to do, as a text that continues "an array
// that "; lifetime static.
JPP_API const char* jpp_array_deletion_reason(const jpp_array_t* array);

// --- Steps of other processes ---------------------------------------------------------
//
// A program may have steps run by other processes and keep only the state of their
// arrays: whether each is deleted, and what it is a copy of. These functions apply the
// rules of jpp_runtime_call() to such arrays.

// The arguments of a step.
typedef struct jpp_params {
  size_t struct_size;        // sizeof(jpp_params_t)
  const char* const* names;  // [count] for errors
  const bool* donated;       // [count]
  uint32_t count;
} jpp_params_t;

// An array that other processes hold: it has a state, and no contents in this process.
JPP_API jpp_status_t* jpp_array_create_elsewhere(jpp_array_t** out_array) JPP_MUST_USE;
// Deletes the arrays that a step's arguments donate, with their origins: all of them or,
// after an error, none. `arrays` are [params->count]; NULL is an argument without an
// array. JPP_DONATED_ERROR for an array that is deleted, or that is donated and given
// twice; JPP_CANCELLED if the wait for other readers was interrupted.
JPP_API jpp_status_t* jpp_arrays_claim(
    const jpp_params_t* params, jpp_array_t* const* arrays,
    JPP_OPTIONAL const jpp_interrupt_t* interrupt) JPP_MUST_USE;
// Notes that the step which claimed the arrays has failed, for
// jpp_array_deletion_reason() to say.
JPP_API jpp_status_t* jpp_arrays_lose(const jpp_params_t* params,
                                      jpp_array_t* const* arrays) JPP_MUST_USE;

#endif  // JAXPP_ARRAY_H_
