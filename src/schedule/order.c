// Dry-runs a schedule: finds an executable order, or the deadlock. Running a task never
// blocks another one, so ranks can be advanced in any order, and a worklist of ranks
// finds the result in time linear in the tasks.
#include "schedule/order.h"

#include "schedule/channels.h"
#include "schedule/dryrun.h"

static jpp_task_kind_t backward_kind(const jpp_schedule_index_t* index, uint32_t stage) {
  bool split = index->form[stage] == JPP_BACKWARD_SPLIT;
  return split ? JPP_TASK_BWD_I : JPP_TASK_BWD;
}

static void add_need(jpp_task_needs_t* needs, jpp_task_kind_t kind, uint32_t stage,
                     uint32_t microbatch) {
  needs->tasks[needs->count++] = (jpp_schedule_task_t){
      .kind = (uint8_t)kind, .stage = stage, .microbatch = microbatch};
}

jpp_task_needs_t jpp__task_needs(const jpp_schedule_index_t* index,
                                 const jpp_schedule_task_t* task) {
  jpp_task_needs_t needs = {0};
  uint32_t stage = task->stage;
  switch (task->kind) {
    case JPP_TASK_FWD:
      if (stage > 0) add_need(&needs, JPP_TASK_FWD, stage - 1, task->microbatch);
      break;
    case JPP_TASK_BWD:
    case JPP_TASK_BWD_I:
      add_need(&needs, JPP_TASK_FWD, stage, task->microbatch);
      if (stage + 1 < index->schedule->stages) {
        add_need(&needs, backward_kind(index, stage + 1), stage + 1, task->microbatch);
      }
      break;
    case JPP_TASK_BWD_W:
      add_need(&needs, JPP_TASK_BWD_I, stage, task->microbatch);
      break;
    default:
      break;
  }
  return needs;
}

// Entries [begin, end) of a rank's row, which start together.
typedef struct unit {
  uint32_t rank;
  uint32_t begin;
  uint32_t end;
} unit_t;

// Whether one of the unit's own tasks, before entry `before`, makes what another of its
// tasks needs.
static bool is_inside(const unit_t* unit, const jpp_schedule_index_t* index,
                      const jpp_schedule_task_t* need, uint32_t before) {
  if (index->schedule->stage_rank[need->stage] != unit->rank) return false;
  uint32_t entry = jpp__schedule_index_entry_of(index, need);
  return entry >= unit->begin && entry < before;
}

static uint64_t end_of(const jpp_schedule_order_t* order,
                       const jpp_schedule_task_t* task) {
  uint32_t rank = order->index->schedule->stage_rank[task->stage];
  return order->end[rank][jpp__schedule_index_entry_of(order->index, task)];
}

// Whether all tasks outside the unit that it needs have run; if so, raises `start` to the
// time when they end.
static bool unit_ready(const jpp_schedule_order_t* order, const unit_t* unit,
                       uint64_t* start) {
  const jpp_schedule_task_t* tasks = order->index->schedule->rows[unit->rank].tasks;
  for (uint32_t i = unit->begin; i < unit->end; ++i) {
    jpp_task_needs_t needs = jpp__task_needs(order->index, &tasks[i]);
    for (uint32_t n = 0; n < needs.count; ++n) {
      const jpp_schedule_task_t* need = &needs.tasks[n];
      if (is_inside(unit, order->index, need, i)) continue;
      if (!jpp__schedule_order_ran(order, need)) return false;
      if (order->end && end_of(order, need) > *start) *start = end_of(order, need);
    }
  }
  return true;
}

static void set_times(jpp_schedule_order_t* order, const unit_t* unit, uint64_t start) {
  if (!order->start) return;
  const jpp_schedule_task_t* tasks = order->index->schedule->rows[unit->rank].tasks;
  uint64_t end = start;
  for (uint32_t i = unit->begin; i < unit->end; ++i) end += tasks[i].latency;
  for (uint32_t i = unit->begin; i < unit->end; ++i) {
    order->start[unit->rank][i] = start;
    order->end[unit->rank][i] = end;
  }
}

// Wakes the ranks that may be waiting for the unit's results.
static void wake_receivers(const jpp_schedule_order_t* order, const unit_t* unit,
                           jpp_dry_run_t* run) {
  const jpp_schedule_t* schedule = order->index->schedule;
  for (uint32_t i = unit->begin; i < unit->end; ++i) {
    const jpp_schedule_task_t* task = &schedule->rows[unit->rank].tasks[i];
    if (task->kind == JPP_TASK_BWD_W) continue;
    bool forward = task->kind == JPP_TASK_FWD;
    uint32_t next = jpp__schedule_next_stage(schedule, task->stage, forward);
    uint32_t receiver = schedule->stage_rank[next];
    if (receiver != unit->rank) jpp__dry_run_wake(run, receiver);
  }
}

// Runs a rank until it has to wait.
static void advance_rank(jpp_schedule_order_t* order, uint32_t rank, jpp_dry_run_t* run) {
  const jpp_schedule_row_t* row = &order->index->schedule->rows[rank];
  uint32_t* done = &run->done[rank];
  while (*done < row->count) {
    uint64_t start = order->end && *done ? order->end[rank][*done - 1] : 0;
    unit_t unit = {rank, *done, *done + 1};
    if (order->fused_as_one) unit.end = jpp__row_unit_end(row, *done);
    bool idle = row->tasks[*done].kind == JPP_TASK_IDLE;
    if (!idle && !unit_ready(order, &unit, &start)) return;
    set_times(order, &unit, start);
    *done = unit.end;
    if (!idle) wake_receivers(order, &unit, run);
  }
}

jpp_status_t* jpp__schedule_order_run(jpp_schedule_order_t* order, jpp_arena_t* scratch) {
  const jpp_schedule_t* schedule = order->index->schedule;
  jpp_dry_run_t run;
  JPP_RETURN_IF_ERROR(jpp__dry_run_create(schedule->ranks, scratch, &run));
  order->done = run.done;
  for (uint32_t rank; (rank = jpp__dry_run_take(&run)) != JPP_NONE;) {
    advance_rank(order, rank, &run);
  }
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    if (order->done[rank] < schedule->rows[rank].count) {
      return jpp__schedule_deadlock(order, scratch);
    }
  }
  return NULL;
}
