// Plan file: a planned step that travels, in one file, to processes that have neither the
// model's code nor a tracer.
//
// In: a plan, the StableHLO of its tasks and what its front end says of arguments and
// results. Out: a file; and from the file, in any process, the same plan and a step that
// runs. The file holds what the planner was given, not what it made: reading plans again,
// so that what was read is proved as everything else is, and compares the hashes of the
// plan with those in the file.
//
// A file that is damaged, cut off, of another kind or of a newer format is an error that
// says which. Sizes in it are compared with the file's own before anything is allocated.
//
// Threads: any thread, several at once. A file that was read may be used by any number of
// threads; destroy it when none does. A step's runtime may be called by any thread.
#ifndef JAXPP_PLANFILE_H_
#define JAXPP_PLANFILE_H_

#include "jaxpp/plan.h"
#include "jaxpp/runtime.h"

// The newest form of file that this version writes and reads.
#define JPP_PLANFILE_FORMAT 1

// Its layout is final.
typedef struct jpp_planfile_bytes {
  const void* data;
  size_t size;
} jpp_planfile_bytes_t;

// How the devices of a rank share an argument or result: each device has a box of it.
// Its layout is final.
typedef struct jpp_planfile_layout {
  const int64_t* dims;    // [ndim] of a box
  const int64_t* starts;  // [devices_per_rank][ndim] where the devices' boxes begin
} jpp_planfile_layout_t;

typedef struct jpp_planfile_contents {
  size_t struct_size;            // sizeof(jpp_planfile_contents_t)
  const jpp_planned_t* planned;  // all parts of it
  uint32_t channel_slots;        // that it was planned with
  uint32_t steps_in_flight;      // as in jpp_runtime_options_t
  const char* platform;          // of the devices that the modules are for: "cpu"
  const char* format;            // of the modules, as in jpp_compile_request_t
  uint32_t devices_per_rank;     // >= 1
  const int32_t* device_ids;     // [ranks * devices_per_rank] the plugin's own ids
  // The axes of a rank's mesh, whose devices are in row-major order. The product of the
  // sizes is devices_per_rank; 0 axes: unknown.
  uint32_t num_axes;
  const char* const* axis_names;  // [num_axes]
  const uint32_t* axis_sizes;     // [num_axes]
  // A CompileOptionsProto for all modules, without a device assignment.
  jpp_planfile_bytes_t compile_options;
  uint32_t num_modules;
  const jpp_planfile_bytes_t* modules;  // StableHLO
  const uint32_t* task_modules;         // [num_tasks] JPP_NONE for a task without ops
  // The last arguments, which the caller of the step does not pass: dense host arrays.
  uint32_t num_constants;
  const jpp_planfile_bytes_t* constants;
  // [num_args + num_outputs], arguments first. NULL: every device has all of each.
  const jpp_planfile_layout_t* layouts;
  jpp_planfile_bytes_t front;  // for the front end, which gets it back as it is
} jpp_planfile_contents_t;

// Writes a file beside `path`, reads it back and renames it: at any time there is the old
// file or the new one. `contents` and what it points to are only read.
//
// JPP_INVALID_ARGUMENT: contents that do not fit together, or the file cannot be written
// (no such folder, disk full); the old file is left as it is.
JPP_API jpp_status_t* jpp_planfile_save(const jpp_planfile_contents_t* contents,
                                        const char* path) JPP_MUST_USE;

typedef struct jpp_planfile {
  const char* path;          // as it was given
  const char* maker;         // "jaxpp 0.2.0": who wrote it
  jpp_plan_hashes_t hashes;  // of the plan
  jpp_planfile_contents_t contents;
} jpp_planfile_t;

// Reads a file and plans what is in it. JPP_INVALID_ARGUMENT: it cannot be read;
// JPP_PARSE_ERROR: it is no plan file, is damaged or cut off; JPP_UNSUPPORTED: its format
// is newer, or this version of the library makes another plan of it. Free it with
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
// if the client lacks one of them, its first ones. JPP_DEVICES_ERROR: the client has too
// few. JPP_INVALID_ARGUMENT unless `count` is ranks * devices_per_rank.
JPP_API jpp_status_t* jpp_planfile_devices(const jpp_planfile_t* file,
                                           const jpp_client_t* client, uint32_t count,
                                           uint32_t* out_devices) JPP_MUST_USE;

// A step ready to run: its tasks compiled, its constants on the devices.
typedef struct jpp_planfile_step jpp_planfile_step_t;

// Compiles on as many threads as there are processors. File and client must outlive the
// step. `devices` as jpp_planfile_devices() gives them. JPP_UNSUPPORTED: the modules are
// for another platform; otherwise the errors of jpp_client_compile(), with the name of
// the task, and of jpp_runtime_create().
JPP_API jpp_status_t* jpp_planfile_step_create(
    const jpp_planfile_t* file, jpp_client_t* client, const uint32_t* devices,
    jpp_planfile_step_t** out_step) JPP_MUST_USE;
// Waits for the steps under way. Takes NULL.
JPP_API void jpp_planfile_step_destroy(jpp_planfile_step_t* step);

// Borrowed for the lifetime of the step: to cancel, trace and await.
JPP_API jpp_runtime_t* jpp_planfile_step_runtime(const jpp_planfile_step_t* step);

// The costs of a step, with the collectives of the compiled tasks where the file names
// the axes of a rank's mesh; free with jpp_plan_costs_destroy().
JPP_API jpp_status_t* jpp_planfile_step_costs(const jpp_planfile_step_t* step,
                                              jpp_plan_costs_t** out_costs) JPP_MUST_USE;

// Bytes of a dense host array of the type, in which small types take a byte an element.
JPP_API uint64_t jpp_planfile_host_bytes(const jpp_type_t* type);

// Brings an argument to the ranks and devices that need it. `data` is a dense host array
// of its type, jpp_planfile_host_bytes(), and only read during the call. The caller holds
// the array.
JPP_API jpp_status_t* jpp_planfile_step_upload(const jpp_planfile_step_t* step,
                                               uint32_t arg, const void* data,
                                               jpp_array_t** out_array) JPP_MUST_USE;

// The other way: waits for a result and copies all of it to a dense host array.
JPP_API jpp_status_t* jpp_planfile_step_read(const jpp_planfile_step_t* step,
                                             uint32_t output, jpp_array_t* array,
                                             void* data) JPP_MUST_USE;

// jpp_runtime_call() with the constants added: `call->args` has the other arguments,
// [num_args - num_constants].
JPP_API jpp_status_t* jpp_planfile_step_call(jpp_planfile_step_t* step,
                                             const jpp_call_t* call) JPP_MUST_USE;

#endif  // JAXPP_PLANFILE_H_
