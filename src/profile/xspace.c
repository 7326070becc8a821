// Writes a session as a protocol buffer of type XSpace. A nested message is first written
// to a text of its own, because its length precedes it.
#include <stdio.h>

#include "base/protobuf.h"
#include "profile/session.h"

// Field numbers of tsl/profiler/protobuf/xplane.proto.
enum {
  kSpacePlanes = 1,
  kSpaceWarnings = 3,
  kPlaneId = 1,
  kPlaneName = 2,
  kPlaneLines = 3,
  kPlaneEventMetadata = 4,
  kPlaneStatMetadata = 5,
  kLineId = 1,
  kLineName = 2,
  kLineTimestampNs = 3,
  kLineEvents = 4,
  kEventMetadataId = 1,
  kEventOffsetPs = 2,
  kEventDurationPs = 3,
  kEventStats = 4,
  kStatMetadataId = 1,
  kStatUint64 = 3,
  kMetadataId = 1,  // in the metadata of an event and of a stat
  kMetadataName = 2,
  kEntryKey = 1,  // of a map
  kEntryValue = 2,
};

// Names of stats.
enum { kMicrobatch = 1, kStep = 2 };

// Appends an entry of a map from numbers to names; the value repeats the number.
static void append_metadata(jpp_str_t* plane, uint32_t field, uint64_t id,
                            const char* name) {
  jpp_str_t metadata = {0}, entry = {0};
  jpp__protobuf_put_number(&metadata, kMetadataId, id);
  jpp__protobuf_put_text(&metadata, kMetadataName, name);
  jpp__protobuf_put_number(&entry, kEntryKey, id);
  jpp__protobuf_put_message(&entry, kEntryValue, &metadata);
  jpp__protobuf_put_message(plane, field, &entry);
}

static void append_stat(jpp_str_t* event, uint64_t name, uint64_t value) {
  jpp_str_t stat = {0};
  jpp__protobuf_put_number(&stat, kStatMetadataId, name);
  jpp__protobuf_put_number(&stat, kStatUint64, value);
  jpp__protobuf_put_message(event, kEventStats, &stat);
}

// Numbers of names begin with 1; 0 means no name.
static void append_event(jpp_str_t* line, const jpp_profile_event_t* event,
                         int64_t start) {
  jpp_str_t text = {0};
  jpp__protobuf_put_number(&text, kEventMetadataId, event->name + 1);
  jpp__protobuf_put_number(&text, kEventOffsetPs,
                           (uint64_t)(event->start - start) * 1000);
  jpp__protobuf_put_number(&text, kEventDurationPs, (uint64_t)event->duration * 1000);
  if (event->microbatch != JPP_NONE) append_stat(&text, kMicrobatch, event->microbatch);
  append_stat(&text, kStep, event->step);
  jpp__protobuf_put_message(line, kLineEvents, &text);
}

// A line without events is omitted.
static void append_line(const jpp_profile_session_t* session, uint32_t rank,
                        jpp_profile_line_t which, int64_t start, jpp_str_t* plane) {
  static const char* const kNames[] = {"", ": waits", ": sends"};
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_PROFILE_LINE_COUNT,
                 "a name a line");
  jpp_str_t line = {0};
  char name[32];
  snprintf(name, sizeof(name), "rank %u%s", rank, kNames[which]);
  jpp__protobuf_put_number(&line, kLineId, rank * JPP_PROFILE_LINE_COUNT + which + 1);
  jpp__protobuf_put_text(&line, kLineName, name);
  jpp__protobuf_put_number(&line, kLineTimestampNs, (uint64_t)start);
  bool any = false;
  for (size_t i = 0; i < session->events.count; ++i) {
    const jpp_profile_event_t* event = &session->events.data[i];
    if (event->rank != rank || event->line != which) continue;
    append_event(&line, event, start);
    any = true;
  }
  if (any) jpp__protobuf_put_message(plane, kPlaneLines, &line);
  jpp_str_deinit(&line);
}

static void append_lines(const jpp_profile_session_t* session, jpp_str_t* plane) {
  uint32_t ranks = 0;
  int64_t start = INT64_MAX;
  for (size_t i = 0; i < session->events.count; ++i) {
    const jpp_profile_event_t* event = &session->events.data[i];
    if (event->rank >= ranks) ranks = event->rank + 1;
    if (event->start < start) start = event->start;
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    for (int which = 0; which < JPP_PROFILE_LINE_COUNT; ++which) {
      append_line(session, r, (jpp_profile_line_t)which, start, plane);
    }
  }
}

// Viewers show planes with this prefix unchanged.
static const char kPlane[] = "/device:CUSTOM:pipeline (jaxpp)";

jpp_status_t* jpp__profile_serialize(const jpp_profile_session_t* session,
                                     char** out_bytes, size_t* out_size) {
  jpp_str_t space = {0};
  if (session->events.count) {
    jpp_str_t plane = {0};
    jpp__protobuf_put_number(&plane, kPlaneId, 1);
    jpp__protobuf_put_text(&plane, kPlaneName, kPlane);
    append_lines(session, &plane);
    for (size_t i = 0; i < session->names.count; ++i) {
      append_metadata(&plane, kPlaneEventMetadata, i + 1, session->names.data[i]);
    }
    append_metadata(&plane, kPlaneStatMetadata, kMicrobatch, "microbatch");
    append_metadata(&plane, kPlaneStatMetadata, kStep, "step");
    jpp__protobuf_put_message(&space, kSpacePlanes, &plane);
  }
  if (session->steps_lost) {
    jpp_str_t warning = {0};
    jpp_str_appendf(&warning,
                    "%llu pipeline steps are missing from the profile: it has reached "
                    "its limit of events (%zu recorded), or host memory ran out",
                    (unsigned long long)session->steps_lost, session->events.count);
    jpp__protobuf_put_message(&space, kSpaceWarnings, &warning);
  }
  *out_size = space.length;
  return jpp_str_finish(&space, out_bytes);
}
