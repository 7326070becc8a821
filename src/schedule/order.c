// Dry-runs a schedule: finds an executable order, or the deadlock. Running a task never
// disables another one, so ranks may be advanced in any order, and a worklist of ranks
// finds the result in time linear in the tasks.
#include "schedule/order.h"

static jpp_task_kind_t backward_kind(const jpp_schedule_index_t* index, uint32_t stage) {
  bool split = index->form[stage] == JPP_BACKWARD_SPLIT;
  return split ? JPP_TASK_BWD_I : JPP_TASK_BWD;
}

static void add_need(jpp_task_needs_t* needs, jpp_task_kind_t kind, uint32_t stage,
                     uint32_t microbatch) {
  needs->tasks[needs->count++] = (jpp_schedule_task_t){
      .kind = (uint8_t)kind, .stage = stage, .microbatch = microbatch};
}

jpp_task_needs_t jpp_task_needs(const jpp_schedule_index_t* index,
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

// The ranks that may be able to go on; each is in the stack at most once.
typedef struct rank_stack {
  uint32_t* ranks;
  bool* waiting;
  uint32_t count;
} rank_stack_t;

static void rank_stack_push(rank_stack_t* stack, uint32_t rank) {
  if (stack->waiting[rank]) return;
  stack->waiting[rank] = true;
  stack->ranks[stack->count++] = rank;
}

// Entries [begin, end) of a rank's row, which start together.
typedef struct unit {
  uint32_t rank;
  uint32_t begin;
  uint32_t end;
} unit_t;

static bool inside(const unit_t* unit, const jpp_schedule_index_t* index,
                   const jpp_schedule_task_t* need, uint32_t before) {
  if (index->schedule->stage_rank[need->stage] != unit->rank) return false;
  uint32_t entry = *jpp_schedule_index_entry(index, jpp_task_slot(need), need->stage,
                                             need->microbatch) -
                   1;
  return entry >= unit->begin && entry < before;
}

static uint64_t end_of(const jpp_schedule_order_t* order,
                       const jpp_schedule_task_t* task) {
  uint32_t rank = order->index->schedule->stage_rank[task->stage];
  uint32_t entry = *jpp_schedule_index_entry(order->index, jpp_task_slot(task),
                                             task->stage, task->microbatch) -
                   1;
  return order->end[rank][entry];
}

// Whether all that the unit needs from outside has run; if so, raises `start` to when it
// has.
static bool unit_ready(const jpp_schedule_order_t* order, const unit_t* unit,
                       uint64_t* start) {
  const jpp_schedule_task_t* tasks = order->index->schedule->rows[unit->rank].tasks;
  for (uint32_t i = unit->begin; i < unit->end; ++i) {
    jpp_task_needs_t needs = jpp_task_needs(order->index, &tasks[i]);
    for (uint32_t n = 0; n < needs.count; ++n) {
      const jpp_schedule_task_t* need = &needs.tasks[n];
      if (inside(unit, order->index, need, i)) continue;
      if (!jpp_schedule_order_ran(order, need)) return false;
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

// The stages beside it may have waited for these tasks.
static void wake_neighbours(const jpp_schedule_order_t* order, const unit_t* unit,
                            rank_stack_t* stack) {
  const jpp_schedule_t* schedule = order->index->schedule;
  for (uint32_t i = unit->begin; i < unit->end; ++i) {
    const jpp_schedule_task_t* task = &schedule->rows[unit->rank].tasks[i];
    jpp_task_slot_t slot = jpp_task_slot(task);
    if (slot == JPP_SLOT_FWD && task->stage + 1 < schedule->stages) {
      rank_stack_push(stack, schedule->stage_rank[task->stage + 1]);
    }
    if (slot == JPP_SLOT_BWD && task->stage > 0) {
      rank_stack_push(stack, schedule->stage_rank[task->stage - 1]);
    }
  }
}

// Runs a rank as far as it gets.
static void advance(jpp_schedule_order_t* order, uint32_t rank, rank_stack_t* stack) {
  const jpp_schedule_row_t* row = &order->index->schedule->rows[rank];
  uint32_t* done = &order->done[rank];
  while (*done < row->count) {
    uint64_t start = order->end && *done ? order->end[rank][*done - 1] : 0;
    unit_t unit = {rank, *done, *done + 1};
    if (order->fused_as_one) unit.end = jpp_row_unit_end(row, *done);
    bool idle = row->tasks[*done].kind == JPP_TASK_IDLE;
    if (!idle && !unit_ready(order, &unit, &start)) return;
    set_times(order, &unit, start);
    *done = unit.end;
    if (!idle) wake_neighbours(order, &unit, stack);
  }
}

jpp_status_t* jpp_schedule_order_run(jpp_schedule_order_t* order, jpp_arena_t* scratch) {
  const jpp_schedule_t* schedule = order->index->schedule;
  rank_stack_t stack = {0};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &order->done));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &stack.ranks));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &stack.waiting));
  for (uint32_t rank = schedule->ranks; rank-- > 0;) rank_stack_push(&stack, rank);
  while (stack.count) {
    uint32_t rank = stack.ranks[--stack.count];
    stack.waiting[rank] = false;
    advance(order, rank, &stack);
  }
  for (uint32_t rank = 0; rank < schedule->ranks; ++rank) {
    if (order->done[rank] < schedule->rows[rank].count) {
      return jpp_schedule_deadlock(order, scratch);
    }
  }
  return NULL;
}
