// Plan file: a planned step in one file, for processes that have neither the model's code
// nor a tracer.
//
// In: a plan, the StableHLO of its tasks, and what its front end knows about arguments
// and results. Out: a file; and from the file, in any process, the same plan and a step
// that runs. The file holds the planner's inputs, not its results: loading plans again,
// so that the plan is proved like any other, and compares the hashes of the plan with
// those in the file.
//
// A file that is damaged, truncated, of another kind or of a newer format gives an error
// that says which. Sizes in the file are compared with the file's own size before
// anything is allocated.
//
// Threads: any thread, several at once. Any number of threads may use a loaded file;
// destroy it when no thread uses it. Any thread may call a step's runtime.
#ifndef JAXPP_PLANFILE_H_
#define JAXPP_PLANFILE_H_

#include "jaxpp/plan.h"
#include "jaxpp/runtime.h"

// The newest file format that this version writes and reads.
#define JPP_PLANFILE_FORMAT 1

// The first 16 bytes of a plan file, in every format.
#define JPP_PLANFILE_MAGIC "jaxpp plan file\n"

// Its layout is final.
typedef struct jpp_planfile_bytes {
  const void* data;
  size_t size;
} jpp_planfile_bytes_t;

// How the devices of a rank divide an argument or result: each device has a box of it.
// Its layout is final.
typedef struct jpp_planfile_layout {
  const int64_t* dims;    // [ndim] of a box
  const int64_t* starts;  // [devices_per_rank][ndim] the first index of each device's box
} jpp_planfile_layout_t;

typedef struct jpp_planfile_contents {
  size_t struct_size;            // sizeof(jpp_planfile_contents_t)
  const jpp_planned_t* planned;  // complete: every part was made
  uint32_t steps_in_flight;      // as in jpp_runtime_options_t
  const char* platform;          // of the devices that the modules are for: "cpu"
  const char* format;            // of the modules, as in jpp_compile_request_t
  uint32_t devices_per_rank;     // >= 1
  // [ranks * devices_per_rank] the plugin's own ids; a rank with fewer devices has -1 in
  // the rest of its row.
  const int32_t* device_ids;
  // The axes of a rank's mesh, whose devices are in row-major order. The product of a
  // rank's sizes is the number of its devices; 0 axes: unknown.
  uint32_t num_axes;
  const char* const* axis_names;  // [num_axes]
  const uint32_t* axis_sizes;     // [ranks][num_axes]
  // A CompileOptionsProto for all modules, without a device assignment.
  jpp_planfile_bytes_t compile_options;
  uint32_t num_modules;
  const jpp_planfile_bytes_t* modules;  // StableHLO
  // [num_tasks] JPP_NONE for a task without ops.
  const uint32_t* task_modules;
  // As in jpp_runtime_options_t. A task that has them is not compiled for CPUs: the
  // runtime copies. NULL, here or for a task: it is compiled.
  const uint64_t* const* shard_dims;
  // The last arguments, which the caller of the step does not pass: dense host arrays.
  uint32_t num_constants;
  const jpp_planfile_bytes_t* constants;
  // [num_args + num_outputs], arguments first. NULL: every device has all of each.
  const jpp_planfile_layout_t* layouts;
  jpp_planfile_bytes_t front;  // for the front end, which gets it back unchanged
} jpp_planfile_contents_t;

// Writes a temporary file beside `path`, reads it back and renames it, so that at any
// time either the old or the new file exists. `contents` and the data that it points to
// are only read.
//
// JPP_INVALID_ARGUMENT: contents that are inconsistent, or a file that cannot be written
// (no such folder, disk full); the old file remains.
JPP_API jpp_status_t* jpp_planfile_save(const jpp_planfile_contents_t* contents,
                                        const char* path) JPP_MUST_USE;

typedef struct jpp_planfile {
  const char* path;          // the path of the call
  const char* maker;         // the writer: "jaxpp 0.2.0"
  jpp_plan_hashes_t hashes;  // of the plan
  jpp_planfile_contents_t contents;
} jpp_planfile_t;

// Reads a file and plans its contents. JPP_INVALID_ARGUMENT: it cannot be read;
// JPP_PARSE_ERROR: it is not a plan file, or is damaged or truncated; JPP_UNSUPPORTED:
// its format is newer, or this version of the library plans it differently. Free it with
// jpp_planfile_destroy().
JPP_API jpp_status_t* jpp_planfile_load(const char* path,
                                        jpp_planfile_t** out_file) JPP_MUST_USE;
// The same for the bytes of a file, which are copied; `path` names them in errors.
JPP_API jpp_status_t* jpp_planfile_read(const char* path, const void* bytes, size_t size,
                                        jpp_planfile_t** out_file) JPP_MUST_USE;
// Takes NULL.
JPP_API void jpp_planfile_destroy(jpp_planfile_t* file);

// --- Running it -----------------------------------------------------------------------

// The devices of the ranks as the client numbers them: those with the ids in the file or,
// if the client lacks any of them, its first devices. JPP_DEVICES_ERROR: the client has
// too few. JPP_INVALID_ARGUMENT unless `count` is ranks * devices_per_rank. A rank with
// fewer devices gets JPP_NO_DEVICE in the rest of its row.
JPP_API jpp_status_t* jpp_planfile_devices(const jpp_planfile_t* file,
                                           const jpp_client_t* client, uint32_t count,
                                           uint32_t* out_devices) JPP_MUST_USE;

// A step ready to run: its tasks compiled, its constants on the devices.
typedef struct jpp_planfile_step jpp_planfile_step_t;

// Compiles on as many threads as there are processors. File and client must outlive the
// step. `devices` as returned by jpp_planfile_devices(). JPP_UNSUPPORTED: the modules are
// for another platform; otherwise the errors of jpp_client_compile(), with the name of
// the task, and of jpp_runtime_create().
JPP_API jpp_status_t* jpp_planfile_step_create(
    const jpp_planfile_t* file, jpp_client_t* client, const uint32_t* devices,
    jpp_planfile_step_t** out_step) JPP_MUST_USE;
// Waits for the steps in flight. Takes NULL.
JPP_API void jpp_planfile_step_destroy(jpp_planfile_step_t* step);

// Borrowed for the lifetime of the step: use it to cancel, trace and await.
JPP_API jpp_runtime_t* jpp_planfile_step_runtime(const jpp_planfile_step_t* step);

// The costs of a step, with the collectives of the compiled tasks where the file names
// the axes of a rank's mesh; free with jpp_plan_costs_destroy().
JPP_API jpp_status_t* jpp_planfile_step_costs(const jpp_planfile_step_t* step,
                                              jpp_plan_costs_t** out_costs) JPP_MUST_USE;

// Uploads an argument to the ranks and devices that need it. `data` is a dense host array
// of its type, jpp_type_host_bytes(), and only read during the call. The caller holds
// the array.
JPP_API jpp_status_t* jpp_planfile_step_upload(const jpp_planfile_step_t* step,
                                               uint32_t arg, const void* data,
                                               jpp_array_t** out_array) JPP_MUST_USE;

// Waits for a result and copies all of it to a dense host array.
JPP_API jpp_status_t* jpp_planfile_step_read(const jpp_planfile_step_t* step,
                                             uint32_t output, jpp_array_t* array,
                                             void* data) JPP_MUST_USE;

// jpp_runtime_call() with the constants added: `call->args` has only the other arguments,
// [num_args - num_constants].
JPP_API jpp_status_t* jpp_planfile_step_call(jpp_planfile_step_t* step,
                                             const jpp_call_t* call) JPP_MUST_USE;

#endif  // JAXPP_PLANFILE_H_
