// Index: finds each task in a schedule. Building one checks everything about the rows
// except their order.
#ifndef JPP_SCHEDULE_INDEX_H_
#define JPP_SCHEDULE_INDEX_H_

#include "base/arena.h"
#include "jaxpp/schedule.h"

// BWD and BWD_I satisfy the same needs, so they share a slot.
typedef enum jpp__task_slot {
  JPP_SLOT_FWD,
  JPP_SLOT_BWD,
  JPP_SLOT_BWD_W
} jpp_task_slot_t;
enum { kTaskSlots = JPP_SLOT_BWD_W + 1 };

typedef enum jpp_backward_form {
  JPP_BACKWARD_NONE,
  JPP_BACKWARD_WHOLE,  // BWD
  JPP_BACKWARD_SPLIT,  // BWD_I and BWD_W
} jpp_backward_form_t;

// What is wrong with a schedule, for callers that do not read the message.
typedef struct jpp_schedule_fault {
  uint32_t rank;   // the first rank in the message; 0 if it names none
  uint32_t cycle;  // deadlock: the number of ranks that wait for each other; otherwise 0
} jpp_schedule_fault_t;

typedef struct jpp_schedule_index {
  const jpp_schedule_t* schedule;
  uint32_t* entry_plus_one;  // [kTaskSlots][stages][microbatches]: see below
  uint8_t* form;             // [stages]: jpp_backward_form_t
  bool has_backward;
  jpp_schedule_fault_t fault;  // set on failure too
} jpp_schedule_index_t;

// JPP_SCHEDULE_ERROR: a task out of range, misplaced, repeated or missing. Everything is
// allocated in `scratch`.
jpp_status_t* jpp__schedule_index_create(const jpp_schedule_t* schedule,
                                         jpp_arena_t* scratch,
                                         jpp_schedule_index_t* out_index) JPP_MUST_USE;

static inline jpp_task_slot_t jpp__task_slot(const jpp_schedule_task_t* task) {
  switch (task->kind) {
    case JPP_TASK_BWD:
    case JPP_TASK_BWD_I:
      return JPP_SLOT_BWD;
    case JPP_TASK_BWD_W:
      return JPP_SLOT_BWD_W;
    default:
      return JPP_SLOT_FWD;
  }
}

// Entries are stored with 1 added, so that the zeroed memory of the index (four bytes per
// task) means that no task is there; 0 - 1 is JPP_NONE. Only these two functions depend
// on this.
static inline uint32_t* jpp__schedule_index_at(const jpp_schedule_index_t* index,
                                               jpp_task_slot_t slot, uint32_t stage,
                                               uint32_t microbatch) {
  const jpp_schedule_t* schedule = index->schedule;
  size_t row = (size_t)slot * schedule->stages + stage;
  return &index->entry_plus_one[row * schedule->microbatches + microbatch];
}

// A task's entry in the row of its rank; JPP_NONE if it is absent.
static inline uint32_t jpp__schedule_index_entry(const jpp_schedule_index_t* index,
                                                 jpp_task_slot_t slot, uint32_t stage,
                                                 uint32_t microbatch) {
  return *jpp__schedule_index_at(index, slot, stage, microbatch) - 1;
}

static inline void jpp__schedule_index_set_entry(const jpp_schedule_index_t* index,
                                                 const jpp_schedule_task_t* task,
                                                 uint32_t entry) {
  *jpp__schedule_index_at(index, jpp__task_slot(task), task->stage, task->microbatch) =
      entry + 1;
}

static inline uint32_t jpp__schedule_index_entry_of(const jpp_schedule_index_t* index,
                                                    const jpp_schedule_task_t* task) {
  return jpp__schedule_index_entry(index, jpp__task_slot(task), task->stage,
                                   task->microbatch);
}

// The number of an entry if every idle step counts as one entry, as in printed schedules.
uint64_t jpp__row_position(const jpp_schedule_row_t* row, uint32_t entry);

// One past the last entry of the FusedTask that begins at `entry`; entry + 1 if none
// begins there.
static inline uint32_t jpp__row_unit_end(const jpp_schedule_row_t* row, uint32_t entry) {
  while (row->tasks[entry].joins_next && entry + 1 < row->count) ++entry;
  return entry + 1;
}

#endif  // JPP_SCHEDULE_INDEX_H_
