// Runs all ranks of a schedule with communication together, which finds deadlocks and the
// number of slots that a channel needs.
//
// A SEND waits for a free slot of the channel and puts its message there; a RECV is only
// posted, and takes the oldest message out of its slot once there is one. A computation
// waits for its message; a pair waits for the messages of both halves and starts when
// both may. A WAIT_SEND waits until the message has left its slot.
#include "base/str.h"
#include "schedule/channels.h"
#include "schedule/csv/actions.h"
#include "schedule/dryrun.h"

enum { kLongestListing = 9 };  // longer cycles are cut

// RECVs are in the order of the SENDs, so two counts describe the state of a channel.
typedef struct runner {
  const jpp_actions_t* actions;
  const jpp_schedule_t* schedule;
  jpp_schedule_channels_t channels;
  uint32_t slots;
  uint32_t* sent;    // [channels] SENDs that ran
  uint32_t* posted;  // [channels] RECVs that ran
  // [2][stages][microbatches] the number of a message in its channel, in the sender's
  // order.
  uint32_t* number;
  jpp_dry_run_t dry;
  bool* seen;  // [ranks] used by find_cycle()
} runner_t;

// The result of one stage's forward or backward for one microbatch.
typedef struct message {
  uint32_t stage;  // of the sender
  uint32_t microbatch;
  bool forward;
} message_t;

// The message that a SEND sends, a WAIT_SEND waits for, a RECV receives or a COMPUTE
// needs.
static message_t message_of(const runner_t* run, const jpp_action_t* action) {
  bool forward = jpp__action_is_forward(action);
  bool comes = action->kind == JPP_ACTION_COMPUTE || jpp__action_is_recv(action);
  uint32_t stage = action->stage;
  if (comes) stage = jpp__schedule_next_stage(run->schedule, stage, !forward);
  return (message_t){stage, action->microbatch, forward};
}

static uint32_t sender_of(const runner_t* run, message_t message) {
  return run->schedule->stage_rank[message.stage];
}

static uint32_t receiver_of(const runner_t* run, message_t message) {
  return run->schedule->stage_rank[jpp__schedule_next_stage(run->schedule, message.stage,
                                                            message.forward)];
}

static uint32_t channel_of(const runner_t* run, message_t message) {
  return (message.forward ? run->channels.forward
                          : run->channels.backward)[message.stage];
}

static uint32_t* number_of(const runner_t* run, message_t message) {
  size_t row = message.forward ? message.stage : run->schedule->stages + message.stage;
  return &run->number[row * run->schedule->microbatches + message.microbatch];
}

// --- Running --------------------------------------------------------------------------

// Whether a computation's message has not been sent yet.
static bool lacks_message(const runner_t* run, uint32_t rank,
                          const jpp_action_t* action) {
  if (action->task == JPP_TASK_BWD_W) return false;
  message_t message = message_of(run, action);
  if (sender_of(run, message) == rank) return false;
  return run->sent[channel_of(run, message)] <= *number_of(run, message);
}

// The action that blocks the rank: its next action, or one of the pair that begins there;
// NULL if the rank can continue.
static const jpp_action_t* find_waiting(const runner_t* run, uint32_t rank) {
  const jpp_action_t* action = &run->actions->lists[rank].actions[run->dry.done[rank]];
  message_t message = message_of(run, action);
  uint32_t channel = channel_of(run, message);
  switch ((jpp_action_kind_t)action->kind) {
    case JPP_ACTION_COMPUTE:
      for (;; ++action) {
        if (lacks_message(run, rank, action)) return action;
        if (!action->joins_next) return NULL;
      }
    case JPP_ACTION_SEND_F:
    case JPP_ACTION_SEND_B: {
      uint32_t sent = run->sent[channel], posted = run->posted[channel];
      return sent >= posted && sent - posted >= run->slots ? action : NULL;
    }
    case JPP_ACTION_WAIT_SEND_F:
    case JPP_ACTION_WAIT_SEND_B:
      return run->posted[channel] <= *number_of(run, message) ? action : NULL;
    default:
      return NULL;
  }
}

// Runs the rank's next action, which is not blocked.
static void take_next(runner_t* run, uint32_t rank) {
  const jpp_action_t* action = &run->actions->lists[rank].actions[run->dry.done[rank]];
  message_t message = message_of(run, action);
  if (jpp__action_is_send(action)) {
    ++run->sent[channel_of(run, message)];
    jpp__dry_run_wake(&run->dry, receiver_of(run, message));
  } else if (jpp__action_is_recv(action)) {
    ++run->posted[channel_of(run, message)];
    jpp__dry_run_wake(&run->dry, sender_of(run, message));
  }
  while (action->joins_next) {
    ++action;
    ++run->dry.done[rank];
  }
  ++run->dry.done[rank];
}

static bool is_done(const runner_t* run, uint32_t rank) {
  return run->dry.done[rank] == run->actions->lists[rank].count;
}

// Runs all ranks as far as possible. Returns a rank that is not done; JPP_NONE when all
// are.
static uint32_t run_with(runner_t* run, uint32_t slots) {
  uint32_t ranks = run->schedule->ranks;
  run->slots = slots;
  for (uint32_t i = 0; i < run->channels.count; ++i) run->sent[i] = run->posted[i] = 0;
  jpp__dry_run_restart(&run->dry);
  for (uint32_t r; (r = jpp__dry_run_take(&run->dry)) != JPP_NONE;) {
    while (!is_done(run, r) && !find_waiting(run, r)) take_next(run, r);
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    if (!is_done(run, r)) return r;
  }
  return JPP_NONE;
}

// --- Ranks that wait for each other ---------------------------------------------------

// The action of the other rank that ends a wait: the SEND of the message, or its RECV.
static const jpp_action_t* find_end(const runner_t* run, uint32_t rank, message_t message,
                                    bool send) {
  const jpp_action_list_t* list = &run->actions->lists[rank];
  for (uint32_t i = run->dry.done[rank]; i < list->count; ++i) {
    const jpp_action_t* action = &list->actions[i];
    bool kind = send ? jpp__action_is_send(action) : jpp__action_is_recv(action);
    if (!kind || action->microbatch != message.microbatch) continue;
    message_t found = message_of(run, action);
    if (found.stage == message.stage && found.forward == message.forward) return action;
  }
  return NULL;
}

// The rank that `rank` waits for. With a slot for every message no SEND waits, so a rank
// waits for a message, or for its own message to leave.
static uint32_t waits_for(const runner_t* run, uint32_t rank) {
  const jpp_action_t* action = find_waiting(run, rank);
  message_t message = message_of(run, action);
  bool computes = action->kind == JPP_ACTION_COMPUTE;
  return computes ? sender_of(run, message) : receiver_of(run, message);
}

static void append_wait(const runner_t* run, uint32_t rank, jpp_str_t* str) {
  const jpp_action_t* action = find_waiting(run, rank);
  bool computes = action->kind == JPP_ACTION_COMPUTE;
  uint32_t other = waits_for(run, rank);
  const jpp_action_t* need = find_end(run, other, message_of(run, action), computes);
  char name[JPP_ACTION_NAME_SIZE], needed[JPP_ACTION_NAME_SIZE];
  jpp_str_appendf(str, "\n  rank %u (line %u) stops at cell %u, %s", rank,
                  run->actions->lists[rank].line, action->cell,
                  jpp__action_name(action, name));
  if (!need) return;
  jpp_str_appendf(str, ": it needs %s of rank %u (line %u, cell %u)",
                  jpp__action_name(need, needed), other, run->actions->lists[other].line,
                  need->cell);
}

// Follows the waits from a blocked rank to the first rank on a cycle.
static uint32_t find_cycle(runner_t* run, uint32_t rank, uint32_t* out_length) {
  while (!run->seen[rank]) {
    run->seen[rank] = true;
    rank = waits_for(run, rank);
  }
  *out_length = 1;
  for (uint32_t r = waits_for(run, rank); r != rank; r = waits_for(run, r)) {
    ++*out_length;
  }
  return rank;
}

static jpp_status_t* deadlock_error(runner_t* run, uint32_t stuck) {
  uint32_t length = 0, rank = find_cycle(run, stuck, &length);
  jpp_str_t str = {0};
  jpp_str_appendf(&str, "%u ranks wait for each other, however many slots a channel has",
                  length);
  for (uint32_t i = 0; i < length && i < kLongestListing; ++i) {
    append_wait(run, rank, &str);
    rank = waits_for(run, rank);
  }
  if (length > kLongestListing) {
    jpp_str_appendf(&str, "\n  ... and so on over %u more ranks",
                    length - kLongestListing);
    while (length-- > kLongestListing) rank = waits_for(run, rank);
  }
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status =
      jpp__actions_fail(run->actions, rank, find_waiting(run, rank), text);
  jpp_free(text);
  return status;
}

// --- Slots ----------------------------------------------------------------------------

// With slots for all messages of a channel no SEND waits, so more slots are never needed.
// Ranks that can run with some number of slots can run with more, so binary search finds
// the least number.
static jpp_status_t* find_least_slots(runner_t* run, uint32_t most, uint32_t* out_slots) {
  uint32_t stuck = run_with(run, most);
  if (stuck != JPP_NONE) return deadlock_error(run, stuck);
  uint32_t too_few = 0, enough = 1;
  while (enough < most && run_with(run, enough) != JPP_NONE) {
    too_few = enough;
    enough = enough > most / 2 ? most : 2 * enough;
  }
  while (enough - too_few > 1) {
    uint32_t middle = too_few + (enough - too_few) / 2;
    *(run_with(run, middle) == JPP_NONE ? &enough : &too_few) = middle;
  }
  *out_slots = enough;
  return NULL;
}

// Checks that the n-th SEND of every channel sends message n. `out_most`: the number of
// messages of the busiest channel, at least 1.
static jpp_status_t* check_send_order(runner_t* run, uint32_t* out_most) {
  *out_most = 1;
  for (uint32_t r = 0; r < run->schedule->ranks; ++r) {
    const jpp_action_list_t* list = &run->actions->lists[r];
    for (uint32_t i = 0; i < list->count; ++i) {
      const jpp_action_t* action = &list->actions[i];
      if (!jpp__action_is_send(action)) continue;
      message_t message = message_of(run, action);
      uint32_t* sent = &run->sent[channel_of(run, message)];
      if (*number_of(run, message) != *sent) {
        return jpp__actions_fail(run->actions, r, action,
                                 "a channel delivers in order, and the receiver's RECVs "
                                 "are in another order than these SENDs");
      }
      ++*sent;
      if (*sent > *out_most) *out_most = *sent;
    }
  }
  return NULL;
}

jpp_status_t* jpp__actions_run(const jpp_actions_t* actions, jpp_arena_t* scratch,
                               uint32_t* out_slots) {
  *out_slots = 0;
  const jpp_schedule_t* schedule = actions->schedule;
  runner_t run = {.actions = actions, .schedule = schedule};
  size_t pairs = (size_t)schedule->stages * schedule->microbatches;
  uint32_t most = 0;  // number of messages of the busiest channel
  JPP_RETURN_IF_ERROR(jpp__schedule_channels_create(schedule, scratch, &run.channels));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, run.channels.count, &run.sent));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, run.channels.count, &run.posted));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, 2 * pairs, &run.number));
  JPP_RETURN_IF_ERROR(jpp__dry_run_create(schedule->ranks, scratch, &run.dry));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &run.seen));
  // The messages of each channel are numbered in the order in which the receiver's RECVs
  // take them out.
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    const jpp_action_list_t* list = &actions->lists[r];
    for (uint32_t i = 0; i < list->count; ++i) {
      if (!jpp__action_is_recv(&list->actions[i])) continue;
      message_t message = message_of(&run, &list->actions[i]);
      *number_of(&run, message) = run.posted[channel_of(&run, message)]++;
    }
  }
  JPP_RETURN_IF_ERROR(check_send_order(&run, &most));
  return find_least_slots(&run, most, out_slots);
}
