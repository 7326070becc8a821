// Verifies a schedule: its index can be built, which checks each task on its own, and its
// dry run reaches the end of every row. For a loop with sums, the tasks that add to them
// must also take their microbatches in order.
#include "base/arena.h"
#include "base/null.h"
#include "schedule/order.h"

static jpp_status_t* verify_in(const jpp_schedule_t* schedule, bool fused_as_one,
                               jpp_schedule_fault_t* out_fault, jpp_arena_t* scratch) {
  jpp_schedule_index_t index;
  jpp_status_t* status = jpp__schedule_index_create(schedule, scratch, &index);
  *out_fault = index.fault;
  if (status) return status;
  jpp_schedule_order_t order = {.index = &index, .fused_as_one = fused_as_one};
  status = jpp__schedule_order_run(&order, scratch);
  *out_fault = order.fault;
  return status;
}

jpp_status_t* jpp__schedule_verify_units(const jpp_schedule_t* schedule,
                                         bool fused_as_one,
                                         jpp_schedule_fault_t* out_fault) {
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = verify_in(schedule, fused_as_one, out_fault, &scratch);
  jpp__arena_deinit(&scratch);
  return status;
}

jpp_status_t* jpp_schedule_verify(const jpp_schedule_t* schedule) {
  JPP_RETURN_IF_NULL(schedule);
  jpp_schedule_fault_t fault;
  return jpp__schedule_verify_units(schedule, false, &fault);
}

// --- Sums -----------------------------------------------------------------------------

// Whether tasks of the kind and stage add to sums: backwards to gradients, the forward of
// the last stage to losses.
static bool may_sum(const jpp_schedule_t* schedule, const jpp_schedule_task_t* task) {
  switch (task->kind) {
    case JPP_TASK_FWD:
      return task->stage + 1 == schedule->stages;
    case JPP_TASK_BWD:
    case JPP_TASK_BWD_W:
      return true;
    default:
      return false;
  }
}

static jpp_status_t* out_of_order(const jpp_schedule_t* schedule, uint32_t rank,
                                  uint32_t entry, uint32_t due) {
  const jpp_schedule_row_t* row = &schedule->rows[rank];
  jpp_schedule_task_t expected = row->tasks[entry];
  expected.microbatch = due;
  char found[JPP_TASK_NAME_SIZE], name[JPP_TASK_NAME_SIZE];
  return jpp_status_make(
      JPP_SCHEDULE_ERROR,
      "rank %u runs %s (entry %llu) where %s is due: a loop that has a sum adds up its "
      "microbatches in order, so that the result does not depend on the schedule; list "
      "them in order",
      rank, jpp_task_name(&row->tasks[entry], found),
      (unsigned long long)jpp__row_position(row, entry), jpp_task_name(&expected, name));
}

// `next`: [slots][stages] the microbatch that must come next.
static jpp_status_t* check_row(const jpp_schedule_t* schedule, uint32_t rank,
                               uint32_t* next) {
  const jpp_schedule_row_t* row = &schedule->rows[rank];
  for (uint32_t i = 0; i < row->count; ++i) {
    const jpp_schedule_task_t* task = &row->tasks[i];
    if (!may_sum(schedule, task)) continue;
    uint32_t* due = &next[(size_t)jpp__task_slot(task) * schedule->stages + task->stage];
    if (task->microbatch != *due) return out_of_order(schedule, rank, i, *due);
    ++*due;
  }
  return NULL;
}

jpp_status_t* jpp_schedule_verify_sums(const jpp_schedule_t* schedule) {
  JPP_RETURN_IF_NULL(schedule);
  JPP_RETURN_IF_ERROR(jpp_schedule_verify(schedule));
  uint32_t* next = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY((size_t)kTaskSlots * schedule->stages, &next));
  jpp_status_t* status = NULL;
  for (uint32_t r = 0; r < schedule->ranks && !status; ++r) {
    status = check_row(schedule, r, next);
  }
  jpp_free(next);
  return status;
}
