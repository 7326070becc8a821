// Device: one client object over a PJRT plugin.
//
// Buffers, executables and events are opaque handles of the client that made them: pass
// them to that client's calls only. The caller destroys each handle, including the handle
// of a donated buffer, and all of them before the client. A device is named by its index
// in jpp_client_info()->devices.
//
// Threads: any thread may make any call at any time, several at once, on different
// handles or the same ones; only the destroy calls need exclusive use of their handle.
// Execution and copies are asynchronous: a call returns when the work is issued, a buffer
// may be used before its contents exist, and the device orders the work on one buffer.
// Buffers and events carry a failure that occurs after the issue: a call that consumes a
// failed buffer fails with the same message. A device may also do small work inside
// the call, which then returns its failure.
//
// Forks: in a process forked after a client was made, calls fail with JPP_UNSUPPORTED and
// destroying a handle does nothing. Fork before, or start a new process.
//
// Errors: JPP_DEVICES_ERROR for an unknown device index, JPP_DONATED_ERROR for a buffer
// that was donated or deleted, JPP_INVALID_ARGUMENT for a request that the device
// refuses, JPP_EXECUTION_ERROR for a failure while it works, JPP_OUT_OF_MEMORY when its
// memory is exhausted, JPP_UNSUPPORTED for a feature that a driver or plugin lacks.
#ifndef JAXPP_DEVICE_H_
#define JAXPP_DEVICE_H_

#include <stddef.h>
#include <stdint.h>

#include "jaxpp/dtype.h"
#include "jaxpp/memory.h"
#include "jaxpp/status.h"

typedef struct jpp_client jpp_client_t;
typedef struct jpp_buffer jpp_buffer_t;  // an array in device memory, or its promise
typedef struct jpp_executable jpp_executable_t;  // a compiled and loaded program
typedef struct jpp_event jpp_event_t;  // becomes ready once, successful or failed

//===-- Client ---------------------------------------------------------------------===//

typedef enum jpp_option_type {
  JPP_OPTION_INT64 = 0,
  JPP_OPTION_STRING,
  JPP_OPTION_BOOL,
  JPP_OPTION_FLOAT,
  JPP_OPTION_INT64_LIST,
} jpp_option_type_t;

// Its layout is final.
typedef struct jpp_int64_list {
  const int64_t* values;
  size_t count;
} jpp_int64_list_t;

// A named setting of the plugin, as its documentation lists them. Its layout is final.
typedef struct jpp_client_option {
  const char* name;
  jpp_option_type_t type;
  union {
    int64_t int64_value;
    const char* string_value;
    bool bool_value;
    float float_value;
    const jpp_int64_list_t* int64_list_value;  // e.g. visible_devices of a GPU plugin
  };
} jpp_client_option_t;

// Nodes: several clients, usually one per process, that run programs over the devices of
// all of them. They exchange information through this store: each client can read what
// any of them has put. The store must separate the keys of one job's clients from all
// others.
//
// Threads: the library and the plugin's own threads call these functions, several at once
// and without a lock of this library: while the client is made, and later when a program
// that needs the other nodes runs. Its layout is final.
typedef struct jpp_key_value_store {
  // Passed to the calls; must outlive the client.
  void* user;
  // Waits at most `timeout_ms`, which may be 0, until a client has put the key. The
  // library frees the value with jpp_free(), so allocate it with jpp_alloc(); *out_value
  // stays NULL when the key does not appear in time.
  jpp_status_t* (*get)(void* user, const char* key, uint32_t timeout_ms, void** out_value,
                       size_t* out_size);
  // Puts `size` bytes, which are only read during the call. Each key is put once.
  jpp_status_t* (*put)(void* user, const char* key, const void* value, size_t size);
} jpp_key_value_store_t;

typedef struct jpp_pjrt_options {
  size_t struct_size;                  // sizeof(jpp_pjrt_options_t)
  const char* plugin_path;             // a shared library that exports GetPjrtApi
  const jpp_client_option_t* options;  // e.g. cpu_device_count (int64) for a CPU plugin
  uint32_t option_count;
  const jpp_key_value_store_t* store;  // needed for several nodes, else NULL
  uint32_t node_id;                    // this client's number, below `num_nodes`
  uint32_t num_nodes;                  // 0 and 1: this client is the only one
} jpp_pjrt_options_t;

// Loads the plugin and makes a client. `options` is only read during the call, except the
// store's `user`, which outlives the client. A plugin stays loaded until the process
// ends; another client made from the same file shares it. With several nodes the call
// waits for the other clients. JPP_PLUGIN_ERROR when the file is missing, is not a shared
// library or not a PJRT plugin, has an API version that this library cannot use, or
// refuses the options; JPP_UNSUPPORTED when it does not support several nodes.
JPP_API jpp_status_t* jpp_client_create_pjrt(const jpp_pjrt_options_t* options,
                                             jpp_client_t** out_client) JPP_MUST_USE;

// Destroy every buffer, executable and event, release every array, and destroy every
// runtime first. Takes NULL.
JPP_API void jpp_client_destroy(jpp_client_t* client);

// JPP_UNSUPPORTED in a process that was forked after a client was made. Every call on
// a client fails in the same way there.
JPP_API jpp_status_t* jpp_process_check(void) JPP_MUST_USE;

typedef struct jpp_device_info {
  int32_t id;  // the plugin's own id, which a device assignment names
  // E.g. "cpu", "NVIDIA H100 80GB HBM3".
  const char* kind;
  // The number of the machine's device, as the plugin counts the devices that it may use:
  // CUDA's number of the device.
  int32_t hardware_id;
} jpp_device_info_t;

// A device of this client or of another node's client.
typedef struct jpp_global_device {
  int32_t id;        // the same in all clients
  uint32_t node;     // the client that can address it
  const char* kind;  // as in jpp_device_info_t
} jpp_global_device_t;

typedef struct jpp_client_info {
  const char* driver;            // "pjrt"
  const char* platform_name;     // e.g. "cpu", "cuda"
  const char* platform_version;  // for display only
  uint32_t device_count;         // addressable devices
  const jpp_device_info_t* devices;
  // The devices of all nodes: first `devices`, in the same order, then the others by id.
  uint32_t global_device_count;
  const jpp_global_device_t* global_devices;
  uint32_t node_id;
  uint32_t memories;  // bit 1 << jpp_memory_t is set for each memory that all of
                      // `devices` have
  // The memory kinds of the first device, including those that this library does not use:
  // "device, pinned_host, unpinned_host".
  const char* memory_kinds;
  // Execution runs the program inside the call: a CPU plugin, made with the option
  // asynchronous=false. It executes programs for one device only: programs with
  // collectives that two threads execute at a time could wait for each other for ever.
  bool runs_in_call;
  // A program on one of the client's devices takes buffers of all of them. True for a
  // plugin that runs programs in the call.
  bool shares_buffers;
} jpp_client_info_t;

// Borrowed for the lifetime of the client; never NULL.
JPP_API const jpp_client_info_t* jpp_client_info(const jpp_client_t* client);

// JPP_UNSUPPORTED, with the memories that the devices have, if they lack this one;
// JPP_INVALID_ARGUMENT for an unknown memory.
JPP_API jpp_status_t* jpp_client_check_memory(const jpp_client_t* client,
                                              jpp_memory_t memory) JPP_MUST_USE;

//===-- Executables ----------------------------------------------------------------===//

typedef struct jpp_compile_request {
  size_t struct_size;  // sizeof(jpp_compile_request_t)
  const char* code;
  size_t code_size;  // bytes
  // "mlir": StableHLO as text or bytecode.
  const char* format;
  // A serialized CompileOptionsProto. NULL: a program for one device, which the execution
  // chooses.
  const void* options;
  size_t options_size;  // bytes
  // [device_count] The devices that run the program's partitions, as indices of the
  // client's global devices; the options must then have no device assignment. 0: the
  // options decide.
  const uint32_t* devices;
  uint32_t device_count;
  // Takes the place of `code` in the cache key: the program as text without source
  // locations, so that a line added above a step does not compile it again. NULL: `code`.
  const char* identity;
  size_t identity_size;  // bytes
} jpp_compile_request_t;

// Compiles and loads a program. Blocks; calls from several threads compile in parallel.
// The caller owns the executable. JPP_INVALID_ARGUMENT when the compiler refuses the
// program.
//
// For a program over devices of several nodes, each node calls this with the same
// request, except for its numbering of devices; the call may wait for the others.
// JPP_DEVICES_ERROR when none of the devices is the client's own.
JPP_API jpp_status_t* jpp_client_compile(jpp_client_t* client,
                                         const jpp_compile_request_t* request,
                                         jpp_executable_t** out_executable) JPP_MUST_USE;

// Compiles the request of `compiled` once more, for other devices: the two requests
// differ in nothing else. On CPUs and GPUs, the code is copied, which takes a fraction of
// the time, unless `compiled` was itself copied or loaded from a folder, the plugin
// cannot copy it, or the program runs on several nodes.
JPP_API jpp_status_t* jpp_client_compile_again(
    jpp_client_t* client, jpp_executable_t* compiled,
    const jpp_compile_request_t* request, jpp_executable_t** out_executable) JPP_MUST_USE;

typedef enum jpp_cache_outcome {
  JPP_CACHE_LOADED,       // from the folder
  JPP_CACHE_KEPT,         // compiled and stored in the folder
  JPP_CACHE_NOT_KEPT,     // compiled; the driver cannot serialize it
  JPP_CACHE_NOT_WRITTEN,  // compiled; the file could not be written (disk full, ...)
} jpp_cache_outcome_t;

enum { kJppCacheKeySize = 65 };

// The name of a program in a cache, 64 hexadecimal digits and a NUL: a SHA-256 of
// everything that determines its code: the program, its options, the number of its
// devices (and their ids, except on CPUs and GPUs), the plugin's version and file, this
// machine's processor, and XLA_FLAGS. `out_key` has room for kJppCacheKeySize bytes.
JPP_API jpp_status_t* jpp_client_cache_key(const jpp_client_t* client,
                                           const jpp_compile_request_t* request,
                                           char* out_key) JPP_MUST_USE;

// Like jpp_client_compile(), with a folder of compiled programs: loads the program that
// an earlier call, possibly in another process, stored there under `key`, or else
// compiles and stores it. `key` is part of a file's name; NULL: the key of
// jpp_client_cache_key(). A file that is damaged, names another key or is refused by the
// plugin is replaced by a new compilation, and so is anything but a regular file; any
// number of processes may use a folder. A program over devices of several nodes is always
// compiled and never stored, because its nodes compile it together.
JPP_API jpp_status_t* jpp_client_compile_cached(
    jpp_client_t* client, const jpp_compile_request_t* request, const char* folder,
    JPP_OPTIONAL const char* key, jpp_executable_t** out_executable,
    jpp_cache_outcome_t* out_outcome) JPP_MUST_USE;

// The number of results of one execution on one device. Not for the step loop: it may
// allocate.
JPP_API jpp_status_t* jpp_client_executable_result_count(
    jpp_client_t* client, jpp_executable_t* executable, uint32_t* out_count) JPP_MUST_USE;

typedef enum jpp_collective_kind {
  JPP_COLLECTIVE_ALL_REDUCE,
  JPP_COLLECTIVE_ALL_GATHER,
  JPP_COLLECTIVE_REDUCE_SCATTER,
  JPP_COLLECTIVE_ALL_TO_ALL,
  JPP_COLLECTIVE_PERMUTE,
  JPP_COLLECTIVE_BROADCAST,
  JPP_COLLECTIVE_KIND_COUNT,
} jpp_collective_kind_t;

// "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute",
// "collective-broadcast"; lifetime static. NULL for an unknown kind.
JPP_API const char* jpp_collective_kind_name(jpp_collective_kind_t kind);

// The collectives of one kind over the same groups of partitions. Its layout is final.
typedef struct jpp_collective {
  uint8_t kind;    // jpp_collective_kind_t
  uint64_t times;  // in one execution; a collective in a loop counts once per iteration,
                   // if their number is known, and one in a branch as if the branch ran
  uint64_t bytes;  // of the results on one device, in one execution
  uint32_t num_members;
  const uint32_t* members;  // [num_members] the partitions of the first group, ascending
} jpp_collective_t;

typedef struct jpp_collectives {
  uint32_t count;
  const jpp_collective_t* each;  // [count] in the order of the program
} jpp_collectives_t;

// The mesh axes that a collective spans, joined by commas: "data,model". `names` and
// `sizes` describe the axes; partitions are numbered along the last axis first. Free the
// text with jpp_text_free(). JPP_INVALID_ARGUMENT for a member that the mesh does not
// have.
JPP_API jpp_status_t* jpp_collective_axes(const jpp_collective_t* collective,
                                          uint32_t num_axes, const char* const* names,
                                          const uint32_t* sizes,
                                          char** out_axes) JPP_MUST_USE;

// The collectives of the compiled program. Free the list with jpp_collectives_destroy().
// JPP_UNSUPPORTED if the plugin does not give access to its programs.
JPP_API jpp_status_t* jpp_client_executable_collectives(
    jpp_client_t* client, jpp_executable_t* executable,
    jpp_collectives_t** out_collectives) JPP_MUST_USE;
// Takes NULL.
JPP_API void jpp_collectives_destroy(jpp_collectives_t* collectives);

// Memory of one device during one execution, in bytes. Its layout is final.
typedef struct jpp_executable_memory {
  uint64_t arguments, results;
  uint64_t donated;    // counted among the results, which take over this memory
  uint64_t temporary;  // besides arguments and results
  uint64_t code;
} jpp_executable_memory_t;

// JPP_UNSUPPORTED if the plugin does not report it.
JPP_API jpp_status_t* jpp_client_executable_memory(
    jpp_client_t* client, jpp_executable_t* executable,
    jpp_executable_memory_t* out_memory) JPP_MUST_USE;

// Executions that were already issued still finish. Takes NULL.
JPP_API void jpp_client_executable_destroy(jpp_client_t* client,
                                           jpp_executable_t* executable);

// In place of a device: those that were named when the program was compiled.
#define JPP_DEVICE_COMPILED (-1)

// One execution. The caller owns all arrays; they are used during the call only.
typedef struct jpp_execute {
  size_t struct_size;  // sizeof(jpp_execute_t)
  jpp_executable_t* executable;
  uint32_t device_count;             // rows of `args`, `results` and `events`
  uint32_t arg_count;                // columns of `args`
  uint32_t result_count;             // columns of `results`: the executable's count
  int32_t device;                    // index for a portable executable (device_count is
                                     // 1 then), or JPP_DEVICE_COMPILED
  jpp_buffer_t* const* const* args;  // [device_count][arg_count]
  jpp_buffer_t** const* results;     // [device_count][result_count]: the caller owns
                                     // the buffers; all NULL after an error
  jpp_event_t** events;              // [device_count], ready when that device is done;
                                     // owned by the caller; NULL: do not ask
} jpp_execute_t;

// Issues one execution. The step loop calls this: it adds no allocation, lock or copy to
// what the plugin does. The program may donate arguments: the call deletes such a buffer,
// and the caller still destroys its handle. The caller owns results and events.
//
// Each node executes its own part of a program over several nodes: one row for each
// partition on its own devices, in the order of the partitions. Nodes must execute the
// programs that they share in the same order.
JPP_API jpp_status_t* jpp_client_execute(jpp_client_t* client,
                                         const jpp_execute_t* execute) JPP_MUST_USE;

// Compiles and runs a small matrix product on the first device. The plugin for CPUs
// generates its kernels at the first product, which takes 30 ms; after this call, the
// first step does not wait for them. Blocks: call it in a thread while the step is
// traced. Does nothing on other platforms. Errors: those of jpp_client_compile() and
// jpp_client_execute().
JPP_API jpp_status_t* jpp_client_warm_up(jpp_client_t* client) JPP_MUST_USE;

//===-- Buffers --------------------------------------------------------------------===//

#define JPP_BUFFER_MAX_RANK 16

// An array in host memory.
typedef struct jpp_host_array {
  size_t struct_size;  // sizeof(jpp_host_array_t)
  const void* data;
  jpp_dtype_t dtype;            // 4-bit types take one byte an element
  uint32_t rank;                // at most JPP_BUFFER_MAX_RANK
  const int64_t* dims;          // elements
  const int64_t* byte_strides;  // may be negative; NULL: dense, last dimension fastest
  jpp_memory_t memory;          // the device's memory that receives the copy
} jpp_host_array_t;

// Copies the array to a memory of a device; `array` and its data are only read during the
// call.
JPP_API jpp_status_t* jpp_client_buffer_from_host(jpp_client_t* client,
                                                  const jpp_host_array_t* array,
                                                  uint32_t device,
                                                  jpp_buffer_t** out_buffer) JPP_MUST_USE;

// Starts a copy into `data`, dense with the last dimension fastest. `data` must stay
// valid until the event is ready; `size` is its size in bytes, at least that of the
// array.
JPP_API jpp_status_t* jpp_client_buffer_to_host(jpp_client_t* client,
                                                jpp_buffer_t* buffer, void* data,
                                                size_t size,
                                                jpp_event_t** out_event) JPP_MUST_USE;

// The same, and waits for it. A plugin may hand the copy to another thread, which costs
// tens of microseconds: read a small value on the CPU with jpp_client_buffer_lend()
// instead.
JPP_API jpp_status_t* jpp_client_buffer_read(jpp_client_t* client, jpp_buffer_t* buffer,
                                             void* data, size_t size) JPP_MUST_USE;

// Starts a copy to the device memory of a device. The source may be destroyed at once,
// and may be in any memory.
JPP_API jpp_status_t* jpp_client_buffer_copy_to_device(
    jpp_client_t* client, jpp_buffer_t* buffer, uint32_t device,
    jpp_buffer_t** out_buffer) JPP_MUST_USE;

// Starts a copy to any memory of a device. JPP_UNSUPPORTED if the device lacks it.
// Programs take buffers in device memory only.
JPP_API jpp_status_t* jpp_client_buffer_copy_to_memory(
    jpp_client_t* client, jpp_buffer_t* buffer, uint32_t device, jpp_memory_t memory,
    jpp_buffer_t** out_buffer) JPP_MUST_USE;

// Work that was already issued on the buffer still finishes. Takes NULL.
JPP_API void jpp_client_buffer_destroy(jpp_client_t* client, jpp_buffer_t* buffer);

// Becomes ready when the contents are, or fails with the error that prevented them.
JPP_API jpp_status_t* jpp_client_buffer_ready_event(jpp_client_t* client,
                                                    jpp_buffer_t* buffer,
                                                    jpp_event_t** out_event) JPP_MUST_USE;

// Its layout is final.
typedef struct jpp_buffer_shape {
  jpp_dtype_t dtype;  // JPP_DTYPE_INVALID for a type this library does not know
  uint32_t rank;
  const int64_t* dims;  // borrowed for the lifetime of the buffer
} jpp_buffer_shape_t;

JPP_API jpp_status_t* jpp_client_buffer_shape(jpp_client_t* client, jpp_buffer_t* buffer,
                                              jpp_buffer_shape_t* out_shape) JPP_MUST_USE;

// Lends the contents to another reader, such as another framework: *out_pointer is their
// address in the device's memory. They stay there, dense with the last dimension fastest,
// until jpp_client_buffer_reclaim() has been called once for each loan. Until then the
// buffer may be neither destroyed nor donated, and it holds data only once it is ready.
// JPP_UNSUPPORTED for contents in another layout, or for a plugin without loans.
JPP_API jpp_status_t* jpp_client_buffer_lend(jpp_client_t* client, jpp_buffer_t* buffer,
                                             void** out_pointer) JPP_MUST_USE;
JPP_API void jpp_client_buffer_reclaim(jpp_client_t* client, jpp_buffer_t* buffer);

// Device memory of another owner, which leaves it unchanged until `release`. It contains
// an array of `shape`, dense with the last dimension fastest. Its layout is final.
typedef struct jpp_foreign_memory {
  void* memory;
  jpp_buffer_shape_t shape;
  uint32_t device;
  // The plugin no longer needs the memory. Any thread, possibly inside a call on this
  // client: must not block, nor call the client.
  void (*release)(void* memory, void* user);
  void* user;
} jpp_foreign_memory_t;

// Makes a buffer over such memory, without a copy. It must not be donated. `foreign` is
// only read during the call. The plugin calls `release` once, after the buffer is
// destroyed; after an error it is not called. JPP_INVALID_ARGUMENT or JPP_UNSUPPORTED for
// memory that the plugin cannot use, for example because of its alignment: copy it then.
// A plugin may call `release` before work that it has issued on the memory is done: also
// wait for everything that uses the buffer.
JPP_API jpp_status_t* jpp_client_buffer_borrow(jpp_client_t* client,
                                               const jpp_foreign_memory_t* foreign,
                                               jpp_buffer_t** out_buffer) JPP_MUST_USE;

//===-- Events ---------------------------------------------------------------------===//

// Blocks until the event is ready and returns its status.
JPP_API jpp_status_t* jpp_client_event_await(jpp_client_t* client,
                                             jpp_event_t* event) JPP_MUST_USE;

// Called again and again while a call waits; returning true ends the wait, but not the
// work that the call waits for. No lock of this library is held meanwhile. Its layout is
// final.
typedef struct jpp_interrupt {
  bool (*requested)(void* user);
  void* user;
  uint32_t period_us;  // time between two calls; 0: 50000
} jpp_interrupt_t;

// Whether jpp_client_event_await() would return at once.
JPP_API jpp_status_t* jpp_client_event_is_ready(jpp_client_t* client, jpp_event_t* event,
                                                bool* out_ready) JPP_MUST_USE;

// Any thread, possibly inside jpp_client_event_on_ready() itself; no lock of this library
// is held; must not block. Owns `status`: NULL, or the reason why the event failed.
typedef void (*jpp_event_callback_t)(void* user, jpp_status_t* status);

// A registration, in the caller's memory so that waiting allocates nothing here. The
// caller leaves it untouched until the callback is entered, which may free or reuse it.
// Its layout is final.
typedef struct jpp_event_waiter {
  jpp_event_callback_t callback;
  void* user;
  const void* driver_data;        // the driver's
  struct jpp_event_waiter* next;  // the driver's
} jpp_event_waiter_t;

// Calls waiter->callback exactly once when the event is ready, even if the event handle
// is destroyed before. If this returns an error, the callback is not called.
JPP_API jpp_status_t* jpp_client_event_on_ready(jpp_client_t* client, jpp_event_t* event,
                                                jpp_event_waiter_t* waiter) JPP_MUST_USE;

// Does not wait. Takes NULL.
JPP_API void jpp_client_event_destroy(jpp_client_t* client, jpp_event_t* event);

//===-- Custom calls ---------------------------------------------------------------===//

typedef struct jpp_custom_call {
  const char* name;      // the custom_call's target name
  const char* platform;  // "Host" for the CPU, "CUDA", "ROCM"
  void* handler;         // an XLA_FFI_Handler*; lives as long as the process
  uint32_t traits;       // XLA_FFI_Handler_TraitsBits, usually 0
} jpp_custom_call_t;

// Registers a typed FFI handler for all clients of this plugin, until the process ends.
// JPP_UNSUPPORTED when the plugin has no FFI extension, or one of an older layout.
JPP_API jpp_status_t* jpp_client_register_custom_call(
    jpp_client_t* client, const jpp_custom_call_t* custom_call) JPP_MUST_USE;

#endif  // JAXPP_DEVICE_H_
