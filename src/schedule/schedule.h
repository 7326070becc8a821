// Declarations that the files of the schedule layer share: schedules and timelines are
// stored with the public struct first and its arena after it.
#ifndef JPP_SCHEDULE_SCHEDULE_H_
#define JPP_SCHEDULE_SCHEDULE_H_

#include "base/arena.h"
#include "jaxpp/schedule.h"

typedef struct jpp_schedule_storage {
  jpp_schedule_t schedule;
  jpp_arena_t arena;  // holds everything except the struct itself
} jpp_schedule_storage_t;

typedef struct jpp_timeline_storage {
  jpp_schedule_timeline_t timeline;
  jpp_arena_t arena;
} jpp_timeline_storage_t;

// Half-built: name, sizes, and room for rows and stage_rank, all in the schedule's arena.
typedef struct jpp_schedule_draft {
  jpp_schedule_t* schedule;
  jpp_arena_t* arena;        // of the schedule
  jpp_schedule_row_t* rows;  // [ranks]
  uint32_t* stage_rank;      // [stages]
} jpp_schedule_draft_t;

// Checks the sizes and allocates. On failure there is nothing to free.
jpp_status_t* jpp__schedule_draft_create(const char* name,
                                         const jpp_schedule_params_t* params,
                                         jpp_schedule_draft_t* out_draft) JPP_MUST_USE;

#endif  // JPP_SCHEDULE_SCHEDULE_H_
