// Writes a schedule as CSV, and places its communication: each SEND right after the task
// that makes a result, each RECV right before the task that needs it, in the order of the
// sender's list.
#include "base/null.h"
#include "jaxpp/schedule_csv.h"
#include "schedule/channels.h"
#include "schedule/csv/actions.h"
#include "schedule/index.h"

// --- Placing ---------------------------------------------------------------------------

typedef JPP_VEC(jpp_action_t) action_vec_t;

// The messages that a rank receives from another one, in the order of the sender's list.
typedef struct inbox {
  uint32_t sender;
  action_vec_t messages;  // the RECVs
  size_t posted;          // number of these that are in the rank's list already
} inbox_t;

typedef JPP_VEC(inbox_t) inbox_vec_t;

// The current rank.
typedef struct placer {
  const jpp_schedule_t* schedule;
  uint32_t rank;
  inbox_vec_t inboxes;
  uint8_t* received[2];  // [stages][microbatches] whether the RECV of the forward, or
                         // backward, is placed
  action_vec_t actions;
  uint32_t cells;  // cells of the rank's line so far
} placer_t;

static jpp_status_t* list_messages(const placer_t* placer, inbox_t* inbox) {
  const jpp_schedule_row_t* row = &placer->schedule->rows[inbox->sender];
  for (uint32_t i = 0; i < row->count; ++i) {
    const jpp_schedule_task_t* task = &row->tasks[i];
    if (task->kind == JPP_TASK_IDLE || task->kind == JPP_TASK_BWD_W) continue;
    bool forward = task->kind == JPP_TASK_FWD;
    uint32_t stage = jpp__schedule_next_stage(placer->schedule, task->stage, forward);
    if (placer->schedule->stage_rank[stage] != placer->rank) continue;
    jpp_action_t recv = {.kind = forward ? JPP_ACTION_RECV_F : JPP_ACTION_RECV_B,
                         .stage = stage,
                         .microbatch = task->microbatch};
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&inbox->messages, recv));
  }
  return NULL;
}

static jpp_status_t* find_inbox(placer_t* placer, uint32_t sender, inbox_t** out_inbox) {
  for (size_t i = 0; i < placer->inboxes.count; ++i) {
    *out_inbox = &placer->inboxes.data[i];
    if ((*out_inbox)->sender == sender) return NULL;
  }
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&placer->inboxes, (inbox_t){.sender = sender}));
  *out_inbox = &placer->inboxes.data[placer->inboxes.count - 1];
  return list_messages(placer, *out_inbox);
}

static jpp_status_t* place_action(placer_t* placer, jpp_action_t action) {
  action.cell = placer->cells + 1;
  if (!action.joins_next) ++placer->cells;
  return JPP_VEC_PUSH(&placer->actions, action);
}

// Places the RECVs of a channel up to the one that the task needs, unless it is placed
// already.
static jpp_status_t* place_receives(placer_t* placer, const jpp_schedule_task_t* task) {
  const jpp_schedule_t* schedule = placer->schedule;
  bool forward = task->kind == JPP_TASK_FWD;
  if (task->kind == JPP_TASK_BWD_W) return NULL;
  uint32_t from = jpp__schedule_next_stage(schedule, task->stage, !forward);
  uint32_t sender = schedule->stage_rank[from];
  if (sender == placer->rank) return NULL;
  inbox_t* inbox = NULL;
  JPP_RETURN_IF_ERROR(find_inbox(placer, sender, &inbox));
  size_t microbatches = schedule->microbatches;
  while (!placer->received[!forward][task->stage * microbatches + task->microbatch]) {
    jpp_action_t recv = inbox->messages.data[inbox->posted++];
    bool backward = recv.kind == JPP_ACTION_RECV_B;
    placer->received[backward][recv.stage * microbatches + recv.microbatch] = 1;
    JPP_RETURN_IF_ERROR(place_action(placer, recv));
  }
  return NULL;
}

static jpp_status_t* place_send(placer_t* placer, const jpp_schedule_task_t* task) {
  if (task->kind == JPP_TASK_BWD_W) return NULL;
  bool forward = task->kind == JPP_TASK_FWD;
  uint32_t stage = jpp__schedule_next_stage(placer->schedule, task->stage, forward);
  if (placer->schedule->stage_rank[stage] == placer->rank) return NULL;
  jpp_action_t send = {.kind = forward ? JPP_ACTION_SEND_F : JPP_ACTION_SEND_B,
                       .stage = task->stage,
                       .microbatch = task->microbatch};
  return place_action(placer, send);
}

// Places the RECVs of tasks that run together, the tasks, and their SENDs.
static jpp_status_t* place_unit(placer_t* placer, uint32_t begin, uint32_t end) {
  const jpp_schedule_task_t* tasks = placer->schedule->rows[placer->rank].tasks;
  for (uint32_t i = begin; i < end; ++i) {
    JPP_RETURN_IF_ERROR(place_receives(placer, &tasks[i]));
  }
  for (uint32_t i = begin; i < end; ++i) {
    jpp_action_t action = {.kind = JPP_ACTION_COMPUTE,
                           .task = tasks[i].kind,
                           .joins_next = i + 1 < end,
                           .stage = tasks[i].stage,
                           .microbatch = tasks[i].microbatch};
    JPP_RETURN_IF_ERROR(place_action(placer, action));
  }
  for (uint32_t i = begin; i < end; ++i) {
    JPP_RETURN_IF_ERROR(place_send(placer, &tasks[i]));
  }
  return NULL;
}

// The number of entries from `at` on that are written as a pair: a forward and a backward
// of another microbatch or stage, whole or in its two parts; otherwise 1.
static uint32_t pair_size(const jpp_schedule_row_t* row, uint32_t at) {
  const jpp_schedule_task_t* first = &row->tasks[at];
  if (!first->joins_next || at + 1 >= row->count || first->kind != JPP_TASK_FWD) return 1;
  const jpp_schedule_task_t* second = first + 1;
  if (first->stage == second->stage && first->microbatch == second->microbatch) return 1;
  if (second->kind == JPP_TASK_BWD) return 2;
  bool whole = second->kind == JPP_TASK_BWD_I && second->joins_next &&
               at + 2 < row->count && second[1].kind == JPP_TASK_BWD_W &&
               second[1].stage == second->stage &&
               second[1].microbatch == second->microbatch;
  return whole ? 3 : 1;
}

static jpp_status_t* place_row(placer_t* placer) {
  const jpp_schedule_row_t* row = &placer->schedule->rows[placer->rank];
  for (uint32_t i = 0; i < row->count;) {
    uint32_t end = i + pair_size(row, i);
    if (row->tasks[i].kind != JPP_TASK_IDLE) {
      JPP_RETURN_IF_ERROR(place_unit(placer, i, end));
    }
    i = end;
  }
  return NULL;
}

static jpp_status_t* place_rank(placer_t* placer, jpp_arena_t* arena,
                                jpp_action_list_t* list) {
  jpp_status_t* status = place_row(placer);
  jpp_action_t* actions = NULL;
  if (!status) status = JPP_VEC_TO_ARENA(&placer->actions, arena, &actions);
  *list = (jpp_action_list_t){actions, (uint32_t)placer->actions.count, placer->rank + 1};
  placer->cells = 0;
  for (size_t i = 0; i < placer->inboxes.count; ++i) {
    jpp_vec_deinit(&placer->inboxes.data[i].messages);
  }
  jpp_vec_deinit(&placer->inboxes);
  jpp_vec_deinit(&placer->actions);
  return status;
}

jpp_status_t* jpp__actions_place(const jpp_schedule_t* schedule, jpp_arena_t* arena,
                                 jpp_actions_t* out_actions) {
  placer_t placer = {.schedule = schedule};
  jpp_action_list_t* lists = NULL;
  size_t pairs = (size_t)schedule->stages * schedule->microbatches;
  *out_actions = (jpp_actions_t){.schedule = schedule, .file = schedule->name};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, schedule->ranks, &lists));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, pairs, &placer.received[0]));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, pairs, &placer.received[1]));
  for (; placer.rank < schedule->ranks; ++placer.rank) {
    JPP_RETURN_IF_ERROR(place_rank(&placer, arena, &lists[placer.rank]));
  }
  out_actions->lists = lists;
  return NULL;
}

static jpp_status_t* place_and_verify(const jpp_schedule_t* schedule,
                                      jpp_arena_t* scratch, jpp_actions_t* out_actions,
                                      uint32_t* out_slots) {
  JPP_RETURN_IF_ERROR(jpp_schedule_verify(schedule));
  JPP_RETURN_IF_ERROR(jpp__actions_place(schedule, scratch, out_actions));
  return jpp__actions_verify(out_actions, scratch, out_slots);
}

jpp_status_t* jpp_schedule_slots(const jpp_schedule_t* schedule, uint32_t* out_slots) {
  JPP_RETURN_IF_NULL(schedule, out_slots);
  *out_slots = 0;
  jpp_arena_t scratch;
  jpp_actions_t actions;
  jpp__arena_init(&scratch);
  jpp_status_t* status = place_and_verify(schedule, &scratch, &actions, out_slots);
  jpp__arena_deinit(&scratch);
  return status;
}

// --- Writing ---------------------------------------------------------------------------

static jpp_action_t task_action(const jpp_schedule_task_t* task) {
  return (jpp_action_t){.kind = JPP_ACTION_COMPUTE,
                        .task = task->kind,
                        .stage = task->stage,
                        .microbatch = task->microbatch};
}

// In a pair, a split backward is written as a whole one.
static void append_pair(jpp_action_t forward, jpp_action_t backward, jpp_str_t* str) {
  char first[JPP_ACTION_NAME_SIZE], second[JPP_ACTION_NAME_SIZE];
  backward.task = JPP_TASK_BWD;
  jpp_str_appendf(str, "(%s;%s)OVERLAP_F_B", jpp__action_name(&forward, first),
                  jpp__action_name(&backward, second));
}

static void append_action(jpp_action_t action, jpp_str_t* str) {
  char name[JPP_ACTION_NAME_SIZE];
  jpp_str_append(str, jpp__action_name(&action, name));
}

// An idle rank has two empty cells, because an empty line would not be a row.
static void end_row(size_t first, jpp_str_t* str) {
  if (str->length == first) jpp_str_append(str, ",");
  jpp_str_append(str, "\r\n");
}

static void append_tasks(const jpp_schedule_row_t* row, jpp_str_t* str) {
  size_t first = str->length;
  for (uint32_t i = 0; i < row->count;) {
    if (i) jpp_str_append(str, ",");
    uint32_t size = pair_size(row, i);
    if (size > 1) {
      append_pair(task_action(&row->tasks[i]), task_action(&row->tasks[i + 1]), str);
    } else if (row->tasks[i].kind != JPP_TASK_IDLE) {
      append_action(task_action(&row->tasks[i]), str);
    } else {
      // Each idle step is an empty cell: n of them have n - 1 commas between them.
      for (uint64_t step = 1; step < jpp_task_steps(&row->tasks[i]); ++step) {
        jpp_str_append(str, ",");
      }
    }
    i += size;
  }
  end_row(first, str);
}

static void append_actions(const jpp_action_list_t* list, jpp_str_t* str) {
  size_t first = str->length;
  for (uint32_t i = 0; i < list->count; ++i) {
    if (i) jpp_str_append(str, ",");
    const jpp_action_t* action = &list->actions[i];
    if (action->joins_next) {
      append_pair(action[0], action[1], str);
      while (list->actions[i].joins_next) ++i;
    } else {
      append_action(*action, str);
    }
  }
  end_row(first, str);
}

static bool has_pairs(const jpp_schedule_t* schedule) {
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    for (uint32_t i = 0; i < schedule->rows[r].count; ++i) {
      if (pair_size(&schedule->rows[r], i) > 1) return true;
    }
  }
  return false;
}

// The text is proved as a reader would prove it: if the tasks of a pair must run one
// after the other, no list with the pair can run.
static jpp_status_t* append_rows(const jpp_schedule_t* schedule, bool communication,
                                 jpp_arena_t* scratch, jpp_str_t* str) {
  jpp_actions_t actions;
  uint32_t slots = 0;
  if (communication || has_pairs(schedule)) {
    JPP_RETURN_IF_ERROR(place_and_verify(schedule, scratch, &actions, &slots));
  }
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    if (communication) {
      append_actions(&actions.lists[r], str);
    } else {
      append_tasks(&schedule->rows[r], str);
    }
  }
  return NULL;
}

jpp_status_t* jpp_schedule_print_csv(const jpp_schedule_t* schedule, bool communication,
                                     char** out_text) {
  JPP_RETURN_IF_NULL(schedule, out_text);
  *out_text = NULL;
  jpp_str_t str = {0};
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = append_rows(schedule, communication, &scratch, &str);
  jpp__arena_deinit(&scratch);
  if (!status) return jpp_str_finish(&str, out_text);
  jpp_str_deinit(&str);
  return status;
}
