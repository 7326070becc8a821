// Order: dry-runs a schedule. If some rank never reaches the end of its row, the schedule
// deadlocks.
#ifndef JPP_SCHEDULE_ORDER_H_
#define JPP_SCHEDULE_ORDER_H_

#include "schedule/index.h"

// The tasks that must run before a task: at most two.
typedef struct jpp__task_needs {
  jpp_schedule_task_t tasks[2];  // only kind, stage and microbatch are set
  uint32_t count;
} jpp_task_needs_t;

jpp_task_needs_t jpp__task_needs(const jpp_schedule_index_t* index,
                                 const jpp_schedule_task_t* task);

typedef struct jpp_schedule_order {
  const jpp_schedule_index_t* index;
  bool fused_as_one;
  // [ranks]: entries of the row that have run.
  const uint32_t* done;
  // When each entry starts and ends, [ranks][row count]; both NULL when not wanted.
  uint64_t** start;
  uint64_t** end;
  jpp_schedule_fault_t fault;  // set by a deadlock
} jpp_schedule_order_t;

// Whether a task has run.
static inline bool jpp__schedule_order_ran(const jpp_schedule_order_t* order,
                                           const jpp_schedule_task_t* task) {
  uint32_t rank = order->index->schedule->stage_rank[task->stage];
  return jpp__schedule_index_entry_of(order->index, task) < order->done[rank];
}

// Runs all rows, O(tasks). `order` holds the index, fused_as_one and, if times are
// wanted, start and end; `done` is allocated here, in `scratch`. A deadlock is a
// JPP_SCHEDULE_ERROR.
jpp_status_t* jpp__schedule_order_run(jpp_schedule_order_t* order,
                                      jpp_arena_t* scratch) JPP_MUST_USE;

// jpp_schedule_verify(), which runs the tasks of a FusedTask one after another; or the
// same with each FusedTask as one task, which starts when all of its tasks may start.
// *out_fault describes an error.
jpp_status_t* jpp__schedule_verify_units(const jpp_schedule_t* schedule,
                                         bool fused_as_one,
                                         jpp_schedule_fault_t* out_fault) JPP_MUST_USE;

// The error for an order that stopped early: the shortest cycle of needs and row orders
// among all tasks that never start. If finding that would take too long, it is the
// shortest one found within a limit.
jpp_status_t* jpp__schedule_deadlock(jpp_schedule_order_t* order,
                                     jpp_arena_t* scratch) JPP_MUST_USE;

#endif  // JPP_SCHEDULE_ORDER_H_
