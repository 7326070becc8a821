// The functions that write the rows of a built-in schedule. Its name, class, help, paper
// and sizes are a row of the table in build.c.
#ifndef JPP_SCHEDULE_BUILTIN_BUILDER_H_
#define JPP_SCHEDULE_BUILTIN_BUILDER_H_

#include "jaxpp/schedule.h"
#include "schedule/schedule.h"

// Writes one rank's row. The (stage, kind) counters hand out microbatches 0, 1, 2, ...; a
// stage is on one rank, so all rows of a schedule share the counters.
typedef struct jpp_row_writer {
  jpp_schedule_task_t* tasks;  // [capacity]
  uint64_t count;
  uint64_t capacity;
  uint32_t* next;  // [stages][kStageTaskKinds]: the next microbatch
  uint32_t microbatches;
} jpp_row_writer_t;

enum { kStageTaskKinds = JPP_TASK_BWD_W + 1 };

// The microbatch that jpp__row_put() would hand out; `microbatches` once they are used
// up.
uint32_t jpp__row_next(const jpp_row_writer_t* writer, uint32_t stage,
                       jpp_task_kind_t kind);
// Appends the next microbatch of (stage, kind); returns false, and appends nothing, once
// they are used up.
bool jpp__row_put(jpp_row_writer_t* writer, uint32_t stage, jpp_task_kind_t kind);
// Appends an idle step, which takes no time and only shows where the rank waits.
// Consecutive idle steps share an entry.
void jpp__row_put_idle(jpp_row_writer_t* writer);
// Makes the last entry and the next one parts of a FusedTask.
void jpp__row_join(jpp_row_writer_t* writer);

typedef struct jpp_schedule_builder {
  // Whether the schedule supports this combination of stages, ranks and microbatches; all
  // are at least 1.
  jpp_status_t* (*check)(const char* name, const jpp_schedule_params_t* params);
  uint32_t (*stage_rank)(const jpp_schedule_params_t* params, uint32_t stage);
  // An upper bound on the entries of any row.
  uint64_t (*row_capacity)(const jpp_schedule_params_t* params);
  void (*write_row)(const jpp_schedule_params_t* params, uint32_t rank,
                    jpp_row_writer_t* writer);
  // If not NULL, rows hold FWD and BWD_I, and jpp__schedule_place_weights() inserts the
  // BWD_W under this limit of stage activations per rank.
  uint32_t (*weight_limit)(const jpp_schedule_params_t* params);
} jpp_schedule_builder_t;

// Inserts the weight gradients into rows of FWD and BWD_I (weights.c): a rank runs one
// when it would wait, or when it keeps `limit` stage activations and a forward is next.
// If rows need more than the limit, it is raised. All tasks are assumed to cost the same.
jpp_status_t* jpp__schedule_place_weights(jpp_schedule_draft_t* draft, uint32_t limit,
                                          jpp_arena_t* scratch) JPP_MUST_USE;

// For schedules with stages in a V, down the ranks and up again, two stages per rank.
jpp_status_t* jpp__schedule_check_v(const char* name,
                                    const jpp_schedule_params_t* params) JPP_MUST_USE;
uint32_t jpp__schedule_v_rank(const jpp_schedule_params_t* params, uint32_t stage);

// stepwise.c: one stage per rank, rows written by time step, with idle steps.
extern const jpp_schedule_builder_t jpp_schedule_gpipe;
extern const jpp_schedule_builder_t jpp_schedule_1f1b;
extern const jpp_schedule_builder_t jpp_schedule_eager_1f1b;
extern const jpp_schedule_builder_t jpp_schedule_zb_h1;
extern const jpp_schedule_builder_t jpp_schedule_zb_h2;
// interleaved.c: stage s on rank s mod ranks.
extern const jpp_schedule_builder_t jpp_schedule_interleaved_gpipe;
extern const jpp_schedule_builder_t jpp_schedule_interleaved_1f1b;
extern const jpp_schedule_builder_t jpp_schedule_breadth_first;
extern const jpp_schedule_builder_t jpp_schedule_kimi_k2;
extern const jpp_schedule_builder_t jpp_schedule_interleaved_zb;
// dualpipe.c: stages folded in a V over the ranks.
extern const jpp_schedule_builder_t jpp_schedule_dualpipe_v;
// v_shape.c: the same placement.
extern const jpp_schedule_builder_t jpp_schedule_zb_v;
extern const jpp_schedule_builder_t jpp_schedule_v_half;
extern const jpp_schedule_builder_t jpp_schedule_v_min;
extern const jpp_schedule_builder_t jpp_schedule_v_1f1b;

#endif  // JPP_SCHEDULE_BUILTIN_BUILDER_H_
