// Schedule: which stage's forward or backward each rank runs for which microbatch, and in
// which order.
//
// A schedule has one row (a list of tasks) per rank. jpp_schedule_build() makes built-in
// schedules, and jpp_schedule_from_rows() those that a user wrote. Whatever its origin, a
// schedule is immutable, and jpp_schedule_verify() proves it before anything is planned
// from it. An "entry" is a place in a row, counted from 0; a FusedTask of n tasks takes n
// entries. An idle entry represents any number of idle steps, so that waiting takes no
// memory; printed schedules count these steps one by one.
//
// Threads: any thread, several at once, also on the same schedule, which is only read;
// destroy it when no thread reads it. Callbacks run on the caller's thread.
#ifndef JAXPP_SCHEDULE_H_
#define JAXPP_SCHEDULE_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "jaxpp/export.h"
#include "jaxpp/status.h"
#include "jaxpp/task.h"

// One stage's forward or backward for one microbatch, as a schedule lists it.
// Its layout is final.
typedef struct jpp_schedule_task {
  uint8_t kind;      // jpp_task_kind_t
  bool joins_next;   // part of a FusedTask together with the next entry of the row
  uint16_t latency;  // relative units, see jpp_task_default_latency(); 0 when idle
  uint32_t stage;
  uint32_t microbatch;  // of an idle entry: the number of idle steps that it represents,
                        // minus 1
} jpp_schedule_task_t;

// 1 for a task; for an idle entry, the number of idle steps that it represents.
static inline uint64_t jpp_task_steps(const jpp_schedule_task_t* task) {
  return task->kind == JPP_TASK_IDLE ? (uint64_t)task->microbatch + 1 : 1;
}

// Its layout is final.
typedef struct jpp_schedule_row {
  const jpp_schedule_task_t* tasks;
  uint32_t count;
} jpp_schedule_row_t;

typedef struct jpp_schedule {
  const char* name;
  uint32_t stages;
  uint32_t ranks;
  uint32_t microbatches;
  const uint32_t* stage_rank;      // [stages]: the rank that runs the stage
  const jpp_schedule_row_t* rows;  // [ranks]
} jpp_schedule_t;

// The longest name is bwd_i_4294967295__4294967295.
enum { JPP_TASK_NAME_SIZE = 32 };
// Writes "fwd_2__0", "bwd_2__0", "bwd_i_2__0", "bwd_w_2__0" or "idle"; returns `buffer`.
JPP_API const char* jpp_task_name(const jpp_schedule_task_t* task,
                                  char buffer[JPP_TASK_NAME_SIZE]);

// --- Making one ---

typedef struct jpp_schedule_params {
  size_t struct_size;  // sizeof(jpp_schedule_params_t)
  uint32_t stages;
  uint32_t ranks;  // size of the mesh's pipeline axis
  uint32_t microbatches;
  // Makes each FWD and BWD of the steady state a FusedTask; only where can_fuse says so.
  bool fuse_steady_state;
} jpp_schedule_params_t;

// Builds a built-in schedule by its name ("1f1b") or its Python class ("Std1F1B"). Free
// it with jpp_schedule_destroy(). Built schedules always pass jpp_schedule_verify().
//
// JPP_INVALID_ARGUMENT: no name or an unknown one, a size of 0 or too large (stages *
// microbatches over 2^28, ranks over 2^20), fuse_steady_state for a schedule that does
// not support it. JPP_MESH_ERROR: the schedule does not support this number of stages on
// this number of ranks. JPP_MICROBATCH_ERROR: dualpipe-v with fewer microbatches than
// stages.
JPP_API jpp_status_t* jpp_schedule_build(JPP_OPTIONAL const char* name,
                                         const jpp_schedule_params_t* params,
                                         jpp_schedule_t** out_schedule) JPP_MUST_USE;

// Whether a built-in schedule supports these numbers of stages and ranks, given enough
// microbatches: NULL, or the error that jpp_schedule_build() would return.
JPP_API jpp_status_t* jpp_schedule_check(const char* name, uint32_t stages,
                                         uint32_t ranks) JPP_MUST_USE;

// Whether jpp_schedule_build() failed because this schedule does not support the sizes,
// while another one might. False for NULL and for JPP_OUT_OF_MEMORY.
JPP_API bool jpp_schedule_is_misfit(const jpp_status_t* status);

// A row of the table of built-in schedules; lifetime static.
typedef struct jpp_schedule_info {
  const char* name;        // "interleaved-1f1b"
  const char* class_name;  // "Interleaved1F1B"
  const char* help;        // one line
  const char* paper;       // "2104.04473" of arXiv, or author and year
  uint32_t stages_a_rank;  // 0: any
  // Supports fuse_steady_state.
  bool can_fuse;
  // Sizes that it supports, those of the figures in the docs.
  const jpp_schedule_params_t* example;
} jpp_schedule_info_t;

JPP_API uint32_t jpp_schedule_info_count(void);
// NULL when `index` is past the end.
JPP_API const jpp_schedule_info_t* jpp_schedule_info_at(uint32_t index);

// A schedule that a user wrote.
typedef struct jpp_schedule_rows {
  const char* name;  // NULL: "user"
  uint32_t stages;
  uint32_t ranks;
  uint32_t microbatches;
  const jpp_schedule_row_t* rows;  // [ranks]
  const uint32_t* stage_rank;  // [stages]; NULL: the lowest rank with a task of the stage
} jpp_schedule_rows_t;

// Copies everything. A latency of 0 becomes the default of its kind, and the latency of
// an idle entry 0. Only sizes and placement are checked here; call jpp_schedule_verify()
// next. JPP_INVALID_ARGUMENT for a size of 0 or too large, JPP_SCHEDULE_ERROR for a stage
// that no row names.
JPP_API jpp_status_t* jpp_schedule_from_rows(const jpp_schedule_rows_t* rows,
                                             jpp_schedule_t** out_schedule) JPP_MUST_USE;

// Writes the next entry of a rank's row and returns true, or returns false at its end.
// Called from the caller's thread, rank after rank; may not block.
typedef bool (*jpp_schedule_next_t)(void* context, uint32_t rank,
                                    jpp_schedule_task_t* out_task);

// A schedule whose rows a callback makes. In all other respects like
// jpp_schedule_from_rows(); the rows of `rows` are not read. JPP_INVALID_ARGUMENT for a
// row that does not end.
JPP_API jpp_status_t* jpp_schedule_from_callback(
    const jpp_schedule_rows_t* rows, jpp_schedule_next_t next, JPP_OPTIONAL void* context,
    jpp_schedule_t** out_schedule) JPP_MUST_USE;

// One microbatch after the other, each forward through all stages and back, stage s on
// rank s mod ranks; nothing overlaps. With `split_backward`, the weight gradients follow
// all input gradients of the microbatch. `fuse_steady_state` is not read. It needs no
// proof. JPP_INVALID_ARGUMENT for a size of 0 or too large.
JPP_API jpp_status_t* jpp_schedule_one_pass(const jpp_schedule_params_t* params,
                                            bool split_backward,
                                            jpp_schedule_t** out_schedule) JPP_MUST_USE;

// Takes NULL.
JPP_API void jpp_schedule_destroy(jpp_schedule_t* schedule);

// --- Proving it ---

// NULL, or a JPP_SCHEDULE_ERROR that tells the user what to change. Proves that
//   - every task names a stage and microbatch that exist, and is on the stage's rank;
//   - each stage has, once per microbatch, FWD and either BWD or both BWD_I and BWD_W
//     (the same for all its microbatches); or no rank has any backward (forward-only);
//   - if each rank runs its row in order, and each task starts once the tasks it needs
//     have ended, all tasks run. FWD(s,m) needs FWD(s-1,m); BWD(s,m) and BWD_I(s,m) need
//     FWD(s,m) and the BWD or BWD_I(s+1,m); BWD_W(s,m) needs BWD_I(s,m). Otherwise the
//     message is the shortest cycle of needs and orders among the tasks that never start.
// Here the tasks of a FusedTask run one after the other; jpp_schedule_timeline() can run
// them as one. Time and memory are linear in the number of tasks.
JPP_API jpp_status_t* jpp_schedule_verify(const jpp_schedule_t* schedule) JPP_MUST_USE;

// The same for a loop with sums over its microbatches. The planner takes sums in the
// order of the microbatches, so that a step's result does not depend on its schedule.
// Therefore this also proves that the backwards of each stage (its BWD_W if they are
// split), which sum gradients, and the forwards of the last stage, which sum losses, run
// in that order. Only the planner knows of other sums, such as an auxiliary loss in an
// earlier stage.
JPP_API jpp_status_t* jpp_schedule_verify_sums(const jpp_schedule_t* schedule)
    JPP_MUST_USE;

// --- Reading it ---

// When one entry of a row runs, in latency units from the start of the loop.
typedef struct jpp_schedule_slot {
  uint32_t rank;
  uint32_t index;  // entry in the rank's row
  uint64_t start;
  uint64_t end;
} jpp_schedule_slot_t;

typedef struct jpp_schedule_timeline {
  const jpp_schedule_slot_t* slots;  // [count], by start, then rank, then index
  uint64_t count;                    // all entries but the idle ones
  uint64_t length;                   // when the last task ends
} jpp_schedule_timeline_t;

typedef struct jpp_schedule_timeline_options {
  // sizeof(jpp_schedule_timeline_options_t)
  size_t struct_size;
  // A FusedTask runs as one program: it starts when all external needs of its tasks are
  // met, and its tasks share its start and end. Otherwise they run one by one.
  bool fused_as_one;
} jpp_schedule_timeline_options_t;

// When all tasks run if each takes its latency and starts as early as its rank and the
// tasks that it needs allow; messages and idle entries take no time. A task follows all
// tasks that it needs and the tasks before it in its row, so a single thread can unroll
// the schedule in this order. Deterministic; O(tasks * log ranks). `options` may be NULL.
// Fails as jpp_schedule_verify() does, and with fused_as_one also if fused tasks wait for
// each other.
JPP_API jpp_status_t* jpp_schedule_timeline(
    const jpp_schedule_t* schedule,
    JPP_OPTIONAL const jpp_schedule_timeline_options_t* options,
    jpp_schedule_timeline_t** out_timeline) JPP_MUST_USE;
// Takes NULL.
JPP_API void jpp_schedule_timeline_destroy(jpp_schedule_timeline_t* timeline);

// For each rank, the largest number of (stage, microbatch) pairs whose forward has run
// and whose backward has not; BWD and BWD_W end a pair. A forward-only schedule keeps
// nothing, and counts 1. JPP_INVALID_ARGUMENT unless `count`, the length of `out_peaks`,
// is the number of ranks.
JPP_API jpp_status_t* jpp_schedule_peak_microbatches(const jpp_schedule_t* schedule,
                                                     uint32_t count,
                                                     uint32_t* out_peaks) JPP_MUST_USE;

// Whether its backwards have two parts, BWD_I and BWD_W.
JPP_API bool jpp_schedule_splits_backward(const jpp_schedule_t* schedule);
// How to partition the loop that the schedule is for; borrows the schedule's stage_rank.
JPP_API jpp_loop_placement_t jpp_schedule_placement(const jpp_schedule_t* schedule);

// JPP_OUT_OF_MEMORY if a rank keeps more than `limit` bytes of activations at once, when
// a stage keeps `activation_bytes` per microbatch: names the rank, the forward, the
// excess, and a built-in schedule of these sizes that fits.
JPP_API jpp_status_t* jpp_schedule_check_memory(const jpp_schedule_t* schedule,
                                                uint64_t activation_bytes,
                                                uint64_t limit) JPP_MUST_USE;

// The texts below are freed with jpp_text_free().

// A header line, then a line per rank: "rank 3: . FusedTask(fwd_3__1, bwd_3__1)", "." for
// idle.
JPP_API jpp_status_t* jpp_schedule_print(const jpp_schedule_t* schedule,
                                         char** out_text) JPP_MUST_USE;

#endif  // JAXPP_SCHEDULE_H_
