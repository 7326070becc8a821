// Actions: a schedule with its communication placed, as the CSV form lists it.
#ifndef JPP_SCHEDULE_CSV_ACTIONS_H_
#define JPP_SCHEDULE_CSV_ACTIONS_H_

#include "base/arena.h"
#include "base/str.h"
#include "base/vec.h"
#include "jaxpp/schedule.h"

typedef enum jpp_action_kind {
  JPP_ACTION_COMPUTE,  // `task` has the kind
  JPP_ACTION_SEND_F,
  JPP_ACTION_SEND_B,
  JPP_ACTION_RECV_F,
  JPP_ACTION_RECV_B,
  JPP_ACTION_WAIT_SEND_F,
  JPP_ACTION_WAIT_SEND_B,
  JPP_ACTION_UNSHARD,
  JPP_ACTION_RESHARD,
  JPP_ACTION_REDUCE_GRAD,
  JPP_ACTION_WAIT_REDUCE_GRAD,
} jpp_action_kind_t;

typedef struct jpp_action {
  uint8_t kind;
  uint8_t task;  // jpp_task_kind_t of a COMPUTE
  bool joins_next;
  uint32_t stage;
  uint32_t microbatch;
  uint32_t cell;  // number in its line, from 1
} jpp_action_t;

typedef struct jpp_action_list {
  const jpp_action_t* actions;
  uint32_t count;
  uint32_t line;  // number in the file, from 1
} jpp_action_list_t;

typedef struct jpp_actions {
  const jpp_schedule_t* schedule;  // sizes and placement
  const char* file;
  const jpp_action_list_t* lists;  // [ranks]
} jpp_actions_t;

static inline bool jpp__action_is_send(const jpp_action_t* action) {
  return action->kind == JPP_ACTION_SEND_F || action->kind == JPP_ACTION_SEND_B;
}

static inline bool jpp__action_is_recv(const jpp_action_t* action) {
  return action->kind == JPP_ACTION_RECV_F || action->kind == JPP_ACTION_RECV_B;
}

// Whether the action is a forward, or the SEND, RECV or WAIT_SEND of one.
bool jpp__action_is_forward(const jpp_action_t* action);

enum { JPP_ACTION_NAME_SIZE = 48 };
// Writes "3F1", "0SEND_F3" or "2UNSHARD"; returns `buffer`.
const char* jpp__action_name(const jpp_action_t* action,
                             char buffer[JPP_ACTION_NAME_SIZE]);

// Places the communication of a schedule; everything is allocated in `arena`.
jpp_status_t* jpp__actions_place(const jpp_schedule_t* schedule, jpp_arena_t* arena,
                                 jpp_actions_t* out_actions) JPP_MUST_USE;

// Proves the communication of a proved schedule, see jpp_schedule_from_csv(). *out_slots
// is 0 when there is none.
jpp_status_t* jpp__actions_verify(const jpp_actions_t* actions, jpp_arena_t* scratch,
                                  uint32_t* out_slots) JPP_MUST_USE;

// JPP_SCHEDULE_ERROR "FILE:LINE: cell N, ACTION: WHY".
jpp_status_t* jpp__actions_fail(const jpp_actions_t* actions, uint32_t rank,
                                const jpp_action_t* action, const char* why) JPP_MUST_USE;

// The part of jpp__actions_verify() that checks all ranks together, for lists in which
// every SEND has its RECV: that channels deliver in order and no rank waits for ever, and
// the least number of slots for which this holds.
jpp_status_t* jpp__actions_run(const jpp_actions_t* actions, jpp_arena_t* scratch,
                               uint32_t* out_slots) JPP_MUST_USE;

#endif  // JPP_SCHEDULE_CSV_ACTIONS_H_
