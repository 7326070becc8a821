// Session: the events recorded while a profile is taken. There is one at a time, as in
// JAX.
#ifndef JPP_PROFILE_SESSION_H_
#define JPP_PROFILE_SESSION_H_

#include <stdbool.h>
#include <stdint.h>

#include "base/map.h"
#include "base/vec.h"
#include "jaxpp/runtime.h"

// The lines of a rank.
typedef enum jpp_profile_line {
  JPP_PROFILE_TASKS,
  JPP_PROFILE_WAITS,
  JPP_PROFILE_SENDS,
  JPP_PROFILE_LINE_COUNT
} jpp_profile_line_t;

typedef struct jpp_profile_event {
  uint32_t rank;
  uint32_t line;        // jpp_profile_line_t
  uint32_t name;        // index into the session's names
  uint32_t microbatch;  // JPP_NONE: outside the loops
  uint64_t step;
  int64_t start;     // nanoseconds since 1970
  int64_t duration;  // nanoseconds
} jpp_profile_event_t;

typedef struct jpp_profile_session {
  JPP_VEC(jpp_profile_event_t) events;
  JPP_VEC(const char*) names;
  jpp_map_t numbers;  // of the names
  jpp_arena_t arena;  // for the names
  // CLOCK_REALTIME minus CLOCK_MONOTONIC, nanoseconds.
  int64_t since_1970;
  // Steps dropped because memory ran out, or beyond kJppProfileMaxEvents.
  uint64_t steps_lost;
} jpp_profile_session_t;

// About the largest number that viewers can open.
enum { kJppProfileMaxEvents = 1 << 21 };

void jpp__profile_init(jpp_profile_session_t* session);
void jpp__profile_deinit(jpp_profile_session_t* session);
// Adds a step that is done.
void jpp__profile_add_step(jpp_profile_session_t* session, const jpp_trace_t* trace);

// Writes a serialized XSpace, the format in which JAX reads profiles
// (tsl/profiler/protobuf/xplane.proto): one plane with a line for each rank. Free the
// bytes with jpp_text_free().
jpp_status_t* jpp__profile_serialize(const jpp_profile_session_t* session,
                                     char** out_bytes, size_t* out_size) JPP_MUST_USE;

#endif  // JPP_PROFILE_SESSION_H_
