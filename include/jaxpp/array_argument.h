// Argument: how a program's array becomes an argument of a step.
//
// A plan requires each argument on certain ranks, sharded in a certain way within a rank.
// A program may have it there already, on other ranks, cut in another way, in memory of
// another framework, or on the host. jpp_argument_decide() compares a description of the
// wanted array with one of the given array, and returns what to do. It touches no memory,
// so it also serves programs whose devices belong to other processes.
//
// Descriptions use blocks: a block is a range of indices along each axis of the whole
// array, [ndim][2], each start and stop. Each device has one block. The rows of an array
// that is cut along axis 0, one part for each stage, are blocks as well.
//
// jpp_argument_take() also carries out the decision: a jpp_source_t provides the
// contents. For an argument of a runtime, jpp_runtime_take() fills in what is wanted.
//
// Threads: these functions have no state. They read descriptions during the call only.
#ifndef JAXPP_ARRAY_ARGUMENT_H_
#define JAXPP_ARRAY_ARGUMENT_H_

#include "jaxpp/array.h"

// In place of a rank.
#define JPP_NO_RANK (UINT32_MAX - 1)
#define JPP_ANY_RANK UINT32_MAX

// Where the memory of an array is.
typedef enum jpp_home {
  JPP_HOME_CLIENT,   // in buffers of the client that runs the step
  JPP_HOME_FOREIGN,  // on devices, in memory of another framework
  JPP_HOME_HOST,     // in host memory
} jpp_home_t;

// What a plan requires of an argument. An argument that is a part of an array, such as
// the rows of one stage, requires blocks of that array.
typedef struct jpp_wanted {
  size_t struct_size;  // sizeof(jpp_wanted_t)
  const char* name;    // for errors
  jpp_dtype_t dtype;
  uint32_t ndim;     // at most JPP_BUFFER_MAX_RANK
  uint64_t devices;  // identifies the devices: equal ids mean equal devices on each rank
  uint32_t num_ranks;
  const uint32_t* ranks;  // [num_ranks]
  // [num_ranks] the ranks that belong to this process; NULL: all of them
  const bool* is_local;
  uint32_t devices_per_rank;  // of this process
  const int64_t* blocks;      // [devices_per_rank][ndim][2] the same on each rank
  bool donated;               // the step may write to it
  bool can_move;  // the step can copy it from a rank that holds it to one that needs it
  uint64_t least_borrowed;  // smaller arrays are copied instead of borrowed
  jpp_memory_t memory;      // where a copy is made
} jpp_wanted_t;

// One block of a given array. Its layout is final.
typedef struct jpp_given_block {
  uint32_t part;    // JPP_HOME_CLIENT: the number of the array that has it
  uint32_t rank;    // JPP_ANY_RANK: memory that all devices share; JPP_NO_RANK: on no
                    // rank's device
  uint32_t device;  // within the rank
  bool is_local;    // this process can read it
  const int64_t* bounds;  // [ndim][2]
} jpp_given_block_t;

// What a program provides.
typedef struct jpp_given {
  size_t struct_size;  // sizeof(jpp_given_t)
  jpp_home_t home;
  jpp_dtype_t dtype;  // may differ from the wanted one: converted on the host
  uint32_t ndim;
  uint64_t devices;             // as in jpp_wanted_t; 0: none of these devices
  uint64_t bytes;               // of the whole array
  const char* deletion_reason;  // text of jpp_array_deletion_reason(); NULL: not deleted
  uint32_t num_blocks;
  const jpp_given_block_t* blocks;  // [num_blocks]
} jpp_given_t;

typedef enum jpp_action {
  JPP_ACTION_USE,     // pass the array of `part` to the step, which moves it if necessary
  JPP_ACTION_BORROW,  // make an array over the memory of `blocks`: jpp_array_borrow()
  JPP_ACTION_UPLOAD,  // copy `blocks` by way of the host: jpp_argument_gather()
} jpp_action_t;

// Its layout is final.
typedef struct jpp_decision {
  jpp_action_t action;
  uint32_t part;       // JPP_ACTION_USE
  uint32_t num_ranks;  // JPP_ACTION_BORROW: the ranks that will hold the array
  uint32_t* ranks;     // [num_ranks]
  uint32_t num_blocks;
  // [num_blocks] numbers of given blocks. JPP_ACTION_BORROW:
  // [num_ranks][devices_per_rank]; JPP_ACTION_UPLOAD: the blocks that are needed
  uint32_t* blocks;
} jpp_decision_t;

// The rules, in order:
// - A deleted array is refused.
// - An array of the client is used if it has the wanted blocks on the same devices of a
//   rank. It may be on other ranks if the step can move it, and in any memory.
// - Foreign memory is borrowed if it is device memory and device memory is wanted, the
//   step does not write to it, it has the wanted type and at least least_borrowed bytes,
//   and each local rank has the wanted blocks. If the step can move the array, one local
//   rank is enough.
// - Everything else is uploaded from local blocks.
//   Errors: JPP_DONATED_ERROR, JPP_MESH_ERROR if this process lacks a part that its ranks
//   need, JPP_INVALID_ARGUMENT for blocks that no array has. Free the lists of the
//   decision with jpp_decision_free().
JPP_API jpp_status_t* jpp_argument_decide(const jpp_wanted_t* wanted,
                                          const jpp_given_t* given,
                                          jpp_decision_t* out_decision) JPP_MUST_USE;
// Frees the lists of a decision, not the struct. Takes NULL.
JPP_API void jpp_decision_free(jpp_decision_t* decision);

// A block in host memory, of the wanted type. Its layout is final.
typedef struct jpp_host_block {
  const void* data;             // the block's first element
  const int64_t* bounds;        // [ndim][2]
  const int64_t* byte_strides;  // [ndim]
} jpp_host_block_t;

// Copies one device's wanted block out of host blocks into `data`, dense with the last
// dimension fastest; `size` is its bytes. JPP_MESH_ERROR if the blocks do not cover it.
JPP_API jpp_status_t* jpp_argument_gather(const jpp_wanted_t* wanted, uint32_t device,
                                          const jpp_host_block_t* blocks,
                                          uint32_t num_blocks, void* data,
                                          size_t size) JPP_MUST_USE;
// The contents of a given array. jpp_argument_take() calls these functions on its own
// thread, without a lock. It returns their errors; but if `lend` returns JPP_UNSUPPORTED
// or JPP_INVALID_ARGUMENT, it copies.
typedef struct jpp_source {
  size_t struct_size;  // sizeof(jpp_source_t)
  const jpp_given_t* given;
  void* user;
  // The array of a part, borrowed. NULL unless the home is JPP_HOME_CLIENT.
  jpp_status_t* (*part)(void* user, uint32_t part, jpp_array_t** out_array);
  // Lends the device memory of given blocks: sets `memory` and `shape` of each element of
  // out_memory[num_blocks], and the function that releases all of it, as
  // jpp_array_borrow() takes them. After an error there is nothing to release. NULL:
  // foreign memory is always copied.
  jpp_status_t* (*lend)(void* user, const uint32_t* blocks, uint32_t num_blocks,
                        jpp_foreign_memory_t* out_memory,
                        void (**out_release)(void* owner), void** out_owner);
  // A block in host memory, of the wanted type, valid until the call returns: sets `data`
  // and, for memory that is not dense with the last dimension fastest, `byte_strides`.
  jpp_status_t* (*read)(void* user, uint32_t block, jpp_host_block_t* out_block);
} jpp_source_t;

// Decides about an array, as jpp_argument_decide() does, and makes the argument on the
// local ranks: the given array itself, one over the lent memory, or a copy. For a copy, a
// block that contains all that a device needs is read in place. `devices` are client
// indices of every rank of the plan, [num_devices], which is [ranks][devices_per_rank].
// The caller holds *out_array. Errors: those of jpp_argument_decide(), of the source and
// of jpp_array_upload(); JPP_INVALID_ARGUMENT for a rank without devices.
JPP_API jpp_status_t* jpp_argument_take(const jpp_wanted_t* wanted,
                                        const jpp_source_t* source, jpp_client_t* client,
                                        const uint32_t* devices, uint32_t num_devices,
                                        jpp_array_t** out_array) JPP_MUST_USE;

#endif  // JAXPP_ARRAY_ARGUMENT_H_
