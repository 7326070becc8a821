// Status: the result of every call of this library that can fail.
//
// NULL means success. Anything else is an owned object with a code and a message; the
// caller frees it with jpp_status_free() or hands it up with JPP_RETURN_IF_ERROR(), which
// may put one line of context in front. An error is decided once, where it is found, and
// says what was expected, what was found and where.
//
// Threads: any thread may make a status; one status belongs to one thread at a time.
#ifndef JAXPP_STATUS_H_
#define JAXPP_STATUS_H_

#include <stdbool.h>
#include <stddef.h>

#include "jaxpp/export.h"

// The kind of an error, as a user would classify it. The Python exception carries the
// name that jpp_status_code_name() gives.
typedef enum jpp_status_code {
  JPP_OK = 0,
  JPP_INVALID_ARGUMENT,  // an argument error that no other code describes
  JPP_PARSE_ERROR,       // malformed text: file:line:column
  JPP_GRAPH_ERROR,       // the graph breaks an SSA invariant
  JPP_MARKS_ERROR,       // stage marks do not match the schedule or each other
  JPP_SCHEDULE_ERROR,    // a schedule misses, repeats or misplaces tasks, or deadlocks
  JPP_MESH_ERROR,        // schedule and mesh of different size, no such axis
  JPP_MICROBATCH_ERROR,  // microbatch axes differ or are missing
  JPP_OPERATION_ERROR,   // a loop's result tree does not match its operation
  JPP_SHARDING_ERROR,    // a spec names an unknown axis or does not divide
  JPP_PLUGIN_ERROR,      // a PJRT plugin is missing, invalid or too old
  JPP_DEVICES_ERROR,     // not enough devices
  JPP_DONATED_ERROR,     // a donated array used again
  JPP_PROGRAM_ERROR,     // a program fails its proof
  JPP_EXECUTION_ERROR,   // a device failed while a step ran
  JPP_NAN_ERROR,         // a task made a NaN or an infinity while checks were on
  JPP_OUT_OF_MEMORY,     // host or device memory, or a memory limit
  JPP_UNSUPPORTED,       // understood but not implemented
  JPP_PEER_ERROR,        // another process of the job died, left or sent nonsense
  JPP_CANCELLED,         // stopped because something else failed or the user asked
  JPP_INTERNAL_ERROR,    // a bug in this library
  JPP_STATUS_CODE_COUNT
} jpp_status_code_t;

typedef struct jpp_status jpp_status_t;

// Makes an error. Never NULL: when memory is exhausted, returns a static out-of-memory
// status.
JPP_API jpp_status_t* jpp_status_make(jpp_status_code_t code, const char* format, ...)
    JPP_PRINTF(2, 3) JPP_MUST_USE;

// Puts "context: " in front of the message. Takes and returns ownership; NULL stays NULL.
JPP_API jpp_status_t* jpp_status_annotate(jpp_status_t* status, const char* format, ...)
    JPP_PRINTF(2, 3) JPP_MUST_USE;

JPP_API jpp_status_t* jpp_status_clone(const jpp_status_t* status) JPP_MUST_USE;
JPP_API jpp_status_code_t jpp_status_code(const jpp_status_t* status);
// Borrowed until the status is freed; "ok" for NULL.
JPP_API const char* jpp_status_message(const jpp_status_t* status);
// "schedule", "out-of-memory", ...: stable, lower case, lifetime static.
JPP_API const char* jpp_status_code_name(jpp_status_code_t code);
JPP_API void jpp_status_free(jpp_status_t* status);

// Frees a text that any function of this library made. Takes NULL.
JPP_API void jpp_text_free(char* text);

#define JPP_RETURN_IF_ERROR(expr)                    \
  do {                                               \
    jpp_status_t* jpp_status_local_ = (expr);        \
    if (jpp_status_local_) return jpp_status_local_; \
  } while (0)

// The same, with a line of context: JPP_RETURN_IF_ERROR_IN(expr, "stage %u", s).
#define JPP_RETURN_IF_ERROR_IN(expr, ...)                                              \
  do {                                                                                 \
    jpp_status_t* jpp_status_local_ = (expr);                                          \
    if (jpp_status_local_) return jpp_status_annotate(jpp_status_local_, __VA_ARGS__); \
  } while (0)

// --- NULL ---
//
// A function that returns a status returns JPP_INVALID_ARGUMENT when a required pointer
// is NULL, names the parameter, and has read and written nothing. Every pointer parameter
// is required except those marked JPP_OPTIONAL, lists whose count is 0, and the `user`,
// `context` or `cookie` that it passes to a callback. The same holds for the fields of a
// struct of options or of a call, unless their comments say what NULL means there.
//
// Functions that destroy, free, release or close take NULL. All other functions that
// return no status, and those of this header, must not be given NULL.
//
// --- Structs ---
//
// Structs that tell a function what to do, such as jpp_plan_options_t, begin with their
// size, so that a library of another version knows which fields the caller has:
//
//   jpp_plan_options_t options = {.struct_size = sizeof(options), .ranks = 2};
//
// Fields that the caller's version lacks count as 0, which is the default of each field;
// a comment says what 0 means if it does not mean zero. Fields that the library lacks
// must be 0. The library returns JPP_INVALID_ARGUMENT if they are not, or if struct_size
// is not set. In a list of such structs each element carries its size. A NULL in the
// place of options, where JPP_OPTIONAL permits it, means all fields 0.
//
// A list that a function fills for the caller has a count beside it, and the function
// returns JPP_INVALID_ARGUMENT unless that is the number of elements that it writes.
//
// A struct whose comment says that its layout is final never gets another field. All
// others, such as the parts of a plan, may get fields in a version with another soname
// (version.h), for which programs are compiled again.

#endif  // JAXPP_STATUS_H_
