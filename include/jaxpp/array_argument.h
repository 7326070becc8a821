// Argument: how the array that a program has becomes an argument of a step.
//
// A plan wants each argument on certain ranks, sharded in a certain way within a rank. A
// program may have it there already, on other ranks, cut in another way, in memory of
// another framework, or on the host. jpp_argument_decide() compares a description of what
// is wanted with one of what is given, and answers what to do. It looks at no memory, so
// it serves programs whose devices belong to other processes as well.
//
// Descriptions use blocks: a block is a range of indices along each axis of the whole
// array, [ndim][2], each start and stop. A device has one block. The rows of an array
// that is cut along axis 0, one part for each stage, are blocks as well.
//
// jpp_argument_take() carries the decision out as well: a jpp_source_t gives it the
// contents. For an argument of a runtime, jpp_runtime_take() knows what is wanted.
//
// Threads: these functions have no state. Descriptions are read during a call only.
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

// What a plan wants. An argument that is a part of an array, such as the rows of one
// stage, wants blocks of that array.
typedef struct jpp_wanted {
  size_t struct_size;  // sizeof(jpp_wanted_t)
  const char* name;    // for errors
  jpp_dtype_t dtype;
  uint32_t ndim;     // at most JPP_BUFFER_MAX_RANK
  uint64_t devices;  // an id: equal ids, equal devices on each rank
  uint32_t num_ranks;
  const uint32_t* ranks;      // [num_ranks]
  const bool* is_local;       // [num_ranks] of this process; NULL: all are
  uint32_t devices_per_rank;  // of this process
  const int64_t* blocks;      // [devices_per_rank][ndim][2], the same on each rank
  bool donated;               // the step may write to it
  bool can_move;  // the step copies it from a rank that has it to one that needs it
  uint64_t least_borrowed;  // fewer bytes are copied rather than borrowed
  jpp_memory_t memory;      // of the devices: where a copy is made
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

// What a program has.
typedef struct jpp_given {
  size_t struct_size;  // sizeof(jpp_given_t)
  jpp_home_t home;
  jpp_dtype_t dtype;  // another one than wanted is converted on the host
  uint32_t ndim;
  uint64_t devices;             // as in jpp_wanted_t; 0: none of them
  uint64_t bytes;               // of the whole array
  const char* deletion_reason;  // as jpp_array_deletion_reason(); NULL: not deleted
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
  uint32_t num_ranks;  // JPP_ACTION_BORROW: the ranks on which the array then is
  uint32_t* ranks;     // [num_ranks]
  uint32_t num_blocks;
  uint32_t* blocks;  // [num_blocks] of the given ones. JPP_ACTION_BORROW: [num_ranks]
                     // [devices_per_rank]; JPP_ACTION_UPLOAD: those that are needed
} jpp_decision_t;

// The rules, in order:
// - A deleted array is refused.
// - An array of the client is used if it has the wanted blocks on the same devices of a
//   rank. It may be on other ranks if the step can move it, and in any memory.
// - Foreign memory, which is device memory, is borrowed if that is wanted and the step
//   does not write to it, the type is the wanted one, it has least_borrowed bytes or
//   more, and each local rank has the wanted blocks. If the step can move the array, one
//   local rank is enough.
// - Everything else is uploaded from local blocks.
// Errors: JPP_DONATED_ERROR, JPP_MESH_ERROR if this process lacks a part that its ranks
// need, JPP_INVALID_ARGUMENT for blocks that no array has. Lists of the decision are for
// jpp_decision_free().
JPP_API jpp_status_t* jpp_argument_decide(const jpp_wanted_t* wanted,
                                          const jpp_given_t* given,
                                          jpp_decision_t* out_decision) JPP_MUST_USE;
// Frees the lists of a decision, not the struct. Takes NULL.
JPP_API void jpp_decision_free(jpp_decision_t* decision);

// A block in host memory, of the wanted type. Its layout is final.
typedef struct jpp_host_block {
  const void* data;             // of the block's first element
  const int64_t* bounds;        // [ndim][2]
  const int64_t* byte_strides;  // [ndim]
} jpp_host_block_t;

// Copies one device's wanted block out of host blocks into `data`, dense with the last
// dimension fastest; `size` is its bytes. JPP_MESH_ERROR if the blocks do not cover it.
JPP_API jpp_status_t* jpp_argument_gather(const jpp_wanted_t* wanted, uint32_t device,
                                          const jpp_host_block_t* blocks,
                                          uint32_t num_blocks, void* data,
                                          size_t size) JPP_MUST_USE;
// The contents of a given array. jpp_argument_take() calls these functions during the
// call, on its thread, without a lock. It returns their errors; after JPP_UNSUPPORTED or
// JPP_INVALID_ARGUMENT of `lend`, it copies instead.
typedef struct jpp_source {
  size_t struct_size;  // sizeof(jpp_source_t)
  const jpp_given_t* given;
  void* user;
  // The array of a part, borrowed. NULL unless the home is JPP_HOME_CLIENT.
  jpp_status_t* (*part)(void* user, uint32_t part, jpp_array_t** out_array);
  // The device memory of given blocks: sets `memory` and `shape` of each element of
  // out_memory[num_blocks], and what releases all of it, as jpp_array_borrow() does.
  // After an error there is nothing to release. NULL: such memory is copied.
  jpp_status_t* (*lend)(void* user, const uint32_t* blocks, uint32_t num_blocks,
                        jpp_foreign_memory_t* out_memory,
                        void (**out_release)(void* owner), void** out_owner);
  // A block in host memory, of the wanted type, valid until the call returns: sets `data`
  // and, for memory that is not dense with the last dimension fastest, `byte_strides`.
  jpp_status_t* (*read)(void* user, uint32_t block, jpp_host_block_t* out_block);
} jpp_source_t;

// Decides about an array, as jpp_argument_decide() does, and makes the argument on the
// local ranks: the given array itself, one over the lent memory, or a copy. A copy reads
// a block in place if it contains what a device wants. `devices` are client indices of
// every rank of the plan, [num_devices], which is [ranks][devices_per_rank]. The caller
// holds the array. Errors: those of the decision, of the source and of
// jpp_array_upload(); JPP_INVALID_ARGUMENT for a rank without devices.
JPP_API jpp_status_t* jpp_argument_take(const jpp_wanted_t* wanted,
                                        const jpp_source_t* source, jpp_client_t* client,
                                        const uint32_t* devices, uint32_t num_devices,
                                        jpp_array_t** out_array) JPP_MUST_USE;

#endif  // JAXPP_ARRAY_ARGUMENT_H_
