// The CPython extension jaxpp._core: thin objects over the C library, on the limited API.
//
// Every type owns one C object and keeps alive everything that the object borrows. Calls
// that compile, run or wait release the GIL. The extension checks types, lengths and
// ranges; the library checks everything else.
//
// Types that refer to arbitrary objects (a Callback to its function) take part in garbage
// collection; the others refer to each other in one direction only and are in no cycle.
#ifndef JPP_PYTHON_CORE_H_
#define JPP_PYTHON_CORE_H_

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>  // Py_T_PYSSIZET since Python 3.12

#include "jaxpp/alloc.h"
#include "jaxpp/array.h"
#include "jaxpp/array_argument.h"
#include "jaxpp/device.h"
#include "jaxpp/graph.h"
#include "jaxpp/plan.h"
#include "jaxpp/program.h"
#include "jaxpp/runtime.h"
#include "jaxpp/schedule.h"
#include "jaxpp/simulate.h"

// Makes the exception to raise for a code: a JaxppError, of the subclass for the code;
// also a TypeError if `wrong_type` and the code is one for bad arguments. NULL if it
// raised.
PyObject* jpp_py_make_error(jpp_status_code_t code, PyObject* message, bool wrong_type);
// Raises jaxpp.JaxppError with the status's code and message; frees the status. Returns
// NULL, so that a method can return the call.
PyObject* jpp_py_raise(jpp_status_t* status);
// The same for a status that may be NULL; returns false if it raised.
bool jpp_py_check(jpp_status_t* status);
// A str of text in any encoding; bytes that are not UTF-8 are escaped.
PyObject* jpp_py_text(const char* text);
// Makes `text` a str and frees it.
PyObject* jpp_py_take_text(char* text);

// A str as UTF-8, for the library; what UTF-8 or a C string cannot hold is escaped.
typedef struct jpp_py_utf8 {
  const char* text;  // NULL for None
  PyObject* owner;   // keeps an escaped text alive, else NULL
} jpp_py_utf8_t;
// For PyArg_ParseTuple's "O&", with a jpp_py_utf8_t. The text lives as long as the
// argument; release it, except after a failure of PyArg_ParseTuple.
int jpp_py_utf8_converter(PyObject* str_or_none, void* out_utf8);
int jpp_py_str_converter(PyObject* str, void* out_utf8);  // The same, but refuses None.
void jpp_py_utf8_release(jpp_py_utf8_t* utf8);
// For "O&", with a jpp_memory_t: "device" or "pinned_host".
int jpp_py_memory_converter(PyObject* str, void* out_memory);

// Returns false, with a TypeError, if a constructor was given keyword arguments.
bool jpp_py_refuse_keywords(PyObject* kwargs);

// For PyArg_ParseTuple's "O&", with a uint32_t or a uint64_t: accepts a whole number that
// fits, raises ValueError if it does not fit and TypeError for anything else. (Its "I"
// and "K" drop bits instead.)
int jpp_py_u32_converter(PyObject* number, void* out_u32);
int jpp_py_u64_converter(PyObject* number, void* out_u64);

// Copies a sequence of whole numbers into a jpp_alloc()ed array. Returns false if it
// raised.
bool jpp_py_to_u32s(PyObject* sequence, uint32_t** out_values, uint32_t* out_count);
// The same for `count` larger numbers; None gives NULL. `what` names it in messages.
bool jpp_py_to_u64s(PyObject* sequence, const char* what, uint32_t count,
                    uint64_t** out_values);
// A tuple of names and a sequence of as many sizes for each rank into jpp_alloc()ed
// tables. The names belong to the tuple. False if it raised; the caller frees the tables
// in any case.
bool jpp_py_to_axes(PyObject* names, PyObject* sizes, uint32_t ranks,
                    const char*** out_names, uint32_t** out_sizes, uint32_t* out_count);
// The dims of a task's results on each device, one result after the other.
uint32_t jpp_py_count_dims(const jpp_staged_t* staged, uint32_t task);
// Copies the dims of each task, or NULL for None, into a jpp_alloc()ed table. False if it
// raised; the caller calls jpp_py_free_shard_dims() in any case.
bool jpp_py_to_shard_dims(const jpp_staged_t* staged, PyObject* sequence,
                          uint64_t*** out_table);
void jpp_py_free_shard_dims(const jpp_staged_t* staged, uint64_t** table);
// Raises ValueError unless they are equal.
bool jpp_py_check_count(const char* what, uint64_t expected, uint64_t found);
// Copies `count` Schedules into a jpp_alloc()ed table. Returns a tuple that keeps them
// alive; NULL if it raised.
PyObject* jpp_py_read_schedules(PyObject* sequence, uint32_t count,
                                const jpp_schedule_t*** out_table);
// Copies [(forward, input gradient, weight gradient)] into `costs`. Returns false if it
// raised.
bool jpp_py_read_costs(PyObject* list, uint32_t stages, jpp_cost_t* costs);
// jpp_search_options_t.poll, for a thread that has released the GIL: a signal handler
// that raises (Ctrl-C) ends the search.
jpp_status_t* jpp_py_poll(void* context);
// jpp_py_check() after a search; an exception of a signal handler takes precedence.
bool jpp_py_check_search(jpp_status_t* status);
// A SearchResult, which takes ownership of the schedule.
PyObject* jpp_py_found_to_record(jpp_search_result_t* result);
// Makes a Schedule that owns `schedule`; destroys it and returns NULL if it raised.
PyObject* jpp_py_wrap_schedule(jpp_schedule_t* schedule);
// A list of ints.
PyObject* jpp_py_from_u32s(const uint32_t* values, uint32_t count);
// None for JPP_NONE.
PyObject* jpp_py_none_or_u32(uint32_t number);
// A list of the objects that `make` returns for 0 .. count - 1; NULL if `make` returned
// NULL.
PyObject* jpp_py_make_list(uint64_t count,
                           PyObject* (*make)(const void* context, uint64_t index),
                           const void* context);

// tp_alloc of a heap type, without arguments.
void* jpp_py_new(PyTypeObject* type);
// Frees the memory of a heap type's object and drops the reference to its type.
void jpp_py_free(PyObject* self);

// --- Records --------------------------------------------------------------------------

// Values that methods return instead of tuples, so that callers read fields by name:
// PyStructSequence types, described in records.c.
typedef enum jpp_py_record {
  JPP_PY_STAGED_TASK,
  JPP_PY_STAGED_OP,
  JPP_PY_PLACED_VALUE,
  JPP_PY_RANK_SUMMARY,
  JPP_PY_SEARCH_RESULT,
  JPP_PY_DEVICE_INFO,
  JPP_PY_GLOBAL_DEVICE,
  JPP_PY_CLIENT_INFO,
  JPP_PY_COMPILED,
  JPP_PY_PLANFILE_CONTENTS,
  JPP_PY_SCHEDULE_INFO,
  JPP_PY_SCHEDULE_SIZES,
  JPP_PY_SCHEDULE_TASK,
  JPP_PY_STAGE_COSTS,
  JPP_PY_TASK_RUN,
  JPP_PY_DECISION,
  JPP_PY_JOB_PART,
  JPP_PY_RECORD_COUNT
} jpp_py_record_t;

// Makes the types and adds them to the module. Returns false if it raised.
bool jpp_py_add_records(PyObject* module);
// Makes a record with these fields, as many as its type has; takes over the references.
// Returns NULL if one of them is NULL, because its call has raised.
PyObject* jpp_py_make_record(jpp_py_record_t record, PyObject* const* fields);
#define JPP_PY_RECORD(record, ...) jpp_py_make_record(record, (PyObject*[]){__VA_ARGS__})
// Adds the library's enums and limits to the module, as ints. Returns false if it raised.
bool jpp_py_add_constants(PyObject* module);

// --- Types ----------------------------------------------------------------------------

// The types, made once when the module is loaded.
typedef struct jpp_py_types {
  PyObject* error;        // JaxppError
  PyObject* value_error;  // JaxppValueError
  PyObject* type_error;   // JaxppTypeError
  PyObject* nan_error;    // NanError
  PyTypeObject *graph, *schedule, *staged, *plan, *client, *executable, *value, *runtime;
  PyTypeObject *network, *callback, *planfile, *store, *params, *wanted, *given;
} jpp_py_types_t;
extern jpp_py_types_t jpp_py_types;

extern PyType_Spec jpp_py_graph_spec, jpp_py_schedule_spec, jpp_py_staged_spec,
    jpp_py_params_spec, jpp_py_plan_spec, jpp_py_client_spec, jpp_py_executable_spec,
    jpp_py_value_spec, jpp_py_network_spec, jpp_py_runtime_spec, jpp_py_callback_spec,
    jpp_py_planfile_spec, jpp_py_store_spec, jpp_py_wanted_spec, jpp_py_given_spec;

// runtime.c: called when the interpreter is about to exit. Does not return to a thread
// that still runs: it stops the thread, as Python does when such a thread takes the GIL.
void jpp_py_stop_late_thread(void);
// Module functions of job.c, in addition to those of module.c.
extern PyMethodDef jpp_py_job_methods[];
// Whether the user has seen the reason why this process's job failed.
extern bool jpp_py_job_told;
PyObject* jpp_py_runtimes_close(PyObject* module, PyObject* unused);

// callback.c: the attribute of a custom call that holds a Callback's address, and module
// functions.
extern const char jpp_py_callback_attribute[];
PyObject* jpp_py_callback_handler(PyObject* module, PyObject* args);
PyObject* jpp_py_cut_stages(PyObject* module, PyObject* args);
PyObject* jpp_py_join_traces(PyObject* module, PyObject* args);
PyObject* jpp_py_draw_traces(PyObject* module, PyObject* args);
PyObject* jpp_py_callbacks_close(PyObject* module, PyObject* unused);

typedef struct jpp_py_graph {
  PyObject ob_base;
  jpp_graph_builder_t* builder;  // NULL once finished
  jpp_graph_t* graph;            // NULL until finished
} jpp_py_graph_t;

typedef struct jpp_py_schedule {
  PyObject ob_base;
  jpp_schedule_t* schedule;
} jpp_py_schedule_t;

// The partitioned graph of a Plan. It exists before the Plan does, because the callback
// that measures values receives it.
typedef struct jpp_py_staged {
  PyObject ob_base;
  const jpp_staged_t* staged;  // NULL: planning failed
  PyObject* plan;              // the Plan that owns it; NULL until the Plan exists
} jpp_py_staged_t;

PyObject* jpp_py_staged_new(const jpp_staged_t* staged);

typedef struct jpp_py_plan {
  PyObject ob_base;
  const jpp_planned_t* planned;
  const jpp_plan_t* plan;  // of the plan
  PyObject* graph;
  PyObject* schedules;  // a tuple, [loops]
  PyObject* file;       // the PlanFile that owns `planned`; NULL: the Plan owns it
} jpp_py_plan_t;

// A list of (rank, task, kind, axes, times, bytes).
PyObject* jpp_py_from_collective_costs(const jpp_plan_costs_t* costs);
// The Plan of a PlanFile, which it keeps alive.
PyObject* jpp_py_plan_of_file(PyObject* file, const jpp_planned_t* planned);
// planfile.c: the method Plan.save.
PyObject* jpp_py_plan_save(PyObject* plan, PyObject* args);
PyObject* jpp_py_plan_predict(PyObject* plan, PyObject* args);

typedef struct jpp_py_store {
  PyObject ob_base;
  PyObject *get, *put;  // NULL once they are no longer used
} jpp_py_store_t;

// The functions of a KeyValueStore for the library. Keep it alive while they are in use.
jpp_key_value_store_t jpp_py_store_calls(PyObject* store);
// A module function.
PyObject* jpp_py_stores_close(PyObject* module, PyObject* unused);

typedef struct jpp_py_client {
  PyObject ob_base;
  jpp_client_t* client;
  PyObject* store;  // a KeyValueStore, or NULL
} jpp_py_client_t;

typedef struct jpp_py_executable {
  PyObject ob_base;
  jpp_executable_t* executable;
  PyObject* client;
  PyObject* kept;  // any object: kept alive because the code contains its address
  PyObject* weak_references;
} jpp_py_executable_t;

typedef struct jpp_py_network {
  PyObject ob_base;
  jpp_transport_t* transport;                  // NULL once a Runtime has taken it over
  uint32_t process;                            // this process
  uint32_t stall_timeout_ms, step_timeout_ms;  // for its Runtime
} jpp_py_network_t;

// An array on the devices of some ranks.
typedef struct jpp_py_value {
  PyObject ob_base;
  PyObject* client;
  jpp_array_t* array;  // held
} jpp_py_value_t;

// Takes over `array`, which is released if this raises.
PyObject* jpp_py_value_wrap(PyObject* client, jpp_array_t* array);
// Returns false, with an IndexError, if the array has no such shard.
bool jpp_py_value_check_shard(const jpp_array_t* array, uint32_t rank, uint32_t device);

// dlpack.c: the method Value.lend.
PyObject* jpp_py_value_lend(PyObject* object, PyObject* args);
// The memory of a tuple of `count` DLPack capsules, which *out_owner holds, in the form
// of jpp_source_t.lend. JPP_UNSUPPORTED for memory that cannot be borrowed; NULL with an
// exception for an object that is not a capsule.
jpp_status_t* jpp_py_capsules_lend(PyObject* capsules, jpp_dtype_t dtype, uint32_t count,
                                   jpp_foreign_memory_t* out_memory,
                                   void (**out_release)(void* owner), void** out_owner);
// Drops references that threads without the GIL have queued.
void jpp_py_dropped_collect(void);
// From now on such references are never dropped, because the interpreter is about to
// exit.
void jpp_py_dropped_close(void);

// --- Waiting --------------------------------------------------------------------------

// A wait without the GIL. Ctrl-C and other signals: Python's handlers run in between, as
// they would between two lines; one that raises ends the wait.
typedef struct jpp_py_wait {
  jpp_interrupt_t interrupt;  // passed to the call that waits
  PyThreadState* state;
  bool raised;
} jpp_py_wait_t;

// Releases the GIL. Do not move `wait`.
void jpp_py_wait_begin(jpp_py_wait_t* wait);
// Takes the GIL, and raises a signal handler's exception, or else the status; returns
// false if it raised. Owns `status`.
bool jpp_py_wait_end(jpp_py_wait_t* wait, jpp_status_t* status);

#endif  // JPP_PYTHON_CORE_H_
