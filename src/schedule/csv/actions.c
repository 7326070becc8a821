// Proves a schedule's communication, first part: each rank's list on its own, then that
// every message has both ends. actions_run.c then runs all ranks together.
#include "schedule/csv/actions.h"

#include <stdio.h>

#include "schedule/channels.h"

// What has run for (stage, microbatch), as bits.
enum {
  kComputedF = 1 << 0,
  kComputedB = 1 << 1,
  kSentF = 1 << 2,
  kSentB = 1 << 3,
  kReceivedF = 1 << 4,
  kReceivedB = 1 << 5,
  kWaitedF = 1 << 6,
  kWaitedB = 1 << 7,
};

// The state of a stage's weights after the actions so far.
typedef enum weights_state {
  WEIGHTS_UNSAID,  // no such action yet: the weights are assumed to be there
  WEIGHTS_UNSHARDED,
  WEIGHTS_RESHARDED,
  WEIGHTS_REDUCED,  // the gradients were reduced
} weights_state_t;

typedef struct prover {
  const jpp_actions_t* actions;
  const jpp_schedule_t* schedule;
  uint8_t* done;     // [stages][microbatches]
  uint8_t* weights;  // [stages]: weights_state_t
} prover_t;

jpp_status_t* jpp__actions_fail(const jpp_actions_t* actions, uint32_t rank,
                                const jpp_action_t* action, const char* why) {
  char name[JPP_ACTION_NAME_SIZE];
  return jpp_status_make(JPP_SCHEDULE_ERROR, "%s:%u: cell %u, %s: %s", actions->file,
                         actions->lists[rank].line, action->cell,
                         jpp__action_name(action, name), why);
}

static jpp_status_t* action_error(const prover_t* p, uint32_t rank,
                                  const jpp_action_t* action, const char* why) {
  return jpp__actions_fail(p->actions, rank, action, why);
}

static uint8_t* done_of(const prover_t* p, const jpp_action_t* action) {
  return &p->done[(size_t)action->stage * p->schedule->microbatches + action->microbatch];
}

bool jpp__action_is_forward(const jpp_action_t* action) {
  return action->kind == JPP_ACTION_COMPUTE
             ? action->task == JPP_TASK_FWD
             : action->kind == JPP_ACTION_SEND_F || action->kind == JPP_ACTION_RECV_F ||
                   action->kind == JPP_ACTION_WAIT_SEND_F;
}

// The rank that needs the result of the action's stage; the stage's own rank if no other
// does.
static uint32_t receiver_of(const prover_t* p, const jpp_action_t* action) {
  bool forward = jpp__action_is_forward(action);
  return p->schedule
      ->stage_rank[jpp__schedule_next_stage(p->schedule, action->stage, forward)];
}

// The rank that makes the input of the action's stage; the stage's own rank if no other
// does.
static uint32_t sender_of(const prover_t* p, const jpp_action_t* action) {
  bool forward = jpp__action_is_forward(action);
  return p->schedule
      ->stage_rank[jpp__schedule_next_stage(p->schedule, action->stage, !forward)];
}

// --- Each rank on its own ------------------------------------------------------------

static jpp_status_t* check_compute(const prover_t* p, uint32_t rank,
                                   const jpp_action_t* action) {
  uint8_t* done = done_of(p, action);
  if (p->weights[action->stage] == WEIGHTS_RESHARDED) {
    return action_error(p, rank, action,
                        "the stage's weights are not here after its RESHARD");
  }
  if (p->weights[action->stage] == WEIGHTS_REDUCED) {
    return action_error(p, rank, action, "the stage's gradients are reduced already");
  }
  if (action->task == JPP_TASK_BWD_W) return NULL;
  bool forward = action->task == JPP_TASK_FWD;
  *done |= forward ? kComputedF : kComputedB;
  if (sender_of(p, action) == rank || (*done & (forward ? kReceivedF : kReceivedB))) {
    return NULL;
  }
  return action_error(
      p, rank, action,
      forward ? "expected its RECV_F before it" : "expected its RECV_B before it");
}

static jpp_status_t* check_send(const prover_t* p, uint32_t rank,
                                const jpp_action_t* action) {
  bool forward = jpp__action_is_forward(action);
  uint8_t* done = done_of(p, action);
  if (receiver_of(p, action) == rank) {
    return action_error(p, rank, action,
                        "there is no other rank that needs it; nothing is sent");
  }
  if (!(*done & (forward ? kComputedF : kComputedB))) {
    return action_error(p, rank, action, "is before its computation");
  }
  if (*done & (forward ? kSentF : kSentB))
    return action_error(p, rank, action, "is sent twice");
  *done |= forward ? kSentF : kSentB;
  return NULL;
}

static jpp_status_t* check_recv(const prover_t* p, uint32_t rank,
                                const jpp_action_t* action) {
  bool forward = jpp__action_is_forward(action);
  uint8_t* done = done_of(p, action);
  if (sender_of(p, action) == rank) {
    return action_error(p, rank, action, "no other rank sends it");
  }
  if (*done & (forward ? kReceivedF : kReceivedB)) {
    return action_error(p, rank, action, "is received twice");
  }
  if (*done & (forward ? kComputedF : kComputedB)) {
    return action_error(p, rank, action, "is after the computation that needs it");
  }
  *done |= forward ? kReceivedF : kReceivedB;
  return NULL;
}

static jpp_status_t* check_wait(const prover_t* p, uint32_t rank,
                                const jpp_action_t* action) {
  bool forward = jpp__action_is_forward(action);
  uint8_t* done = done_of(p, action);
  if (!(*done & (forward ? kSentF : kSentB))) {
    return action_error(p, rank, action, "is before its SEND");
  }
  if (*done & (forward ? kWaitedF : kWaitedB)) {
    return action_error(p, rank, action, "is waited for twice");
  }
  *done |= forward ? kWaitedF : kWaitedB;
  return NULL;
}

static jpp_status_t* check_weights(const prover_t* p, uint32_t rank,
                                   const jpp_action_t* action) {
  uint8_t* state = &p->weights[action->stage];
  switch ((jpp_action_kind_t)action->kind) {
    case JPP_ACTION_UNSHARD:
      if (*state == WEIGHTS_UNSHARDED)
        return action_error(p, rank, action, "the weights are here already");
      *state = WEIGHTS_UNSHARDED;
      return NULL;
    case JPP_ACTION_RESHARD:
      if (*state != WEIGHTS_UNSHARDED && *state != WEIGHTS_REDUCED) {
        return action_error(p, rank, action, "expected an UNSHARD before it");
      }
      if (*state == WEIGHTS_UNSHARDED) *state = WEIGHTS_RESHARDED;
      return NULL;
    case JPP_ACTION_REDUCE_GRAD:
      if (*state == WEIGHTS_REDUCED)
        return action_error(p, rank, action, "is reduced twice");
      *state = WEIGHTS_REDUCED;
      return NULL;
    default:
      return *state == WEIGHTS_REDUCED
                 ? NULL
                 : action_error(p, rank, action, "is before its REDUCE_GRAD");
  }
}

static jpp_status_t* check_action(const prover_t* p, uint32_t rank,
                                  const jpp_action_t* action) {
  switch ((jpp_action_kind_t)action->kind) {
    case JPP_ACTION_COMPUTE:
      return check_compute(p, rank, action);
    case JPP_ACTION_SEND_F:
    case JPP_ACTION_SEND_B:
      return check_send(p, rank, action);
    case JPP_ACTION_RECV_F:
    case JPP_ACTION_RECV_B:
      return check_recv(p, rank, action);
    case JPP_ACTION_WAIT_SEND_F:
    case JPP_ACTION_WAIT_SEND_B:
      return check_wait(p, rank, action);
    default:
      return check_weights(p, rank, action);
  }
}

// --- Both ends of each message --------------------------------------------------------

// Every RECV has a SEND.
static jpp_status_t* check_is_sent(const prover_t* p, uint32_t rank,
                                   const jpp_action_t* action) {
  bool forward = jpp__action_is_forward(action);
  jpp_action_t send = *action;
  send.kind = forward ? JPP_ACTION_SEND_F : JPP_ACTION_SEND_B;
  send.stage = jpp__schedule_next_stage(p->schedule, action->stage, !forward);
  if (*done_of(p, &send) & (forward ? kSentF : kSentB)) return NULL;
  char name[JPP_ACTION_NAME_SIZE], why[128];
  snprintf(why, sizeof(why), "no rank sends it; expected %s on rank %u (line %u)",
           jpp__action_name(&send, name), p->schedule->stage_rank[send.stage],
           p->actions->lists[p->schedule->stage_rank[send.stage]].line);
  return action_error(p, rank, action, why);
}

static jpp_status_t* check_ends(const prover_t* p, uint32_t rank,
                                const jpp_action_t* action) {
  if (action->kind == JPP_ACTION_COMPUTE) {
    // A computation whose result another rank needs has its SEND.
    if (action->task == JPP_TASK_BWD_W || receiver_of(p, action) == rank) return NULL;
    bool forward = jpp__action_is_forward(action);
    if (*done_of(p, action) & (forward ? kSentF : kSentB)) return NULL;
    return action_error(p, rank, action,
                        forward ? "its SEND_F is missing" : "its SEND_B is missing");
  }
  return jpp__action_is_recv(action) ? check_is_sent(p, rank, action) : NULL;
}

static jpp_status_t* check_lists(const prover_t* p,
                                 jpp_status_t* (*check)(const prover_t*, uint32_t,
                                                        const jpp_action_t*)) {
  for (uint32_t r = 0; r < p->schedule->ranks; ++r) {
    const jpp_action_list_t* list = &p->actions->lists[r];
    for (uint32_t i = 0; i < list->count; ++i) {
      JPP_RETURN_IF_ERROR(check(p, r, &list->actions[i]));
    }
  }
  return NULL;
}

static bool has_communication(const jpp_actions_t* actions) {
  for (uint32_t r = 0; r < actions->schedule->ranks; ++r) {
    const jpp_action_list_t* list = &actions->lists[r];
    for (uint32_t i = 0; i < list->count; ++i) {
      if (jpp__action_is_send(&list->actions[i])) return true;
      if (jpp__action_is_recv(&list->actions[i])) return true;
    }
  }
  return false;
}

jpp_status_t* jpp__actions_verify(const jpp_actions_t* actions, jpp_arena_t* scratch,
                                  uint32_t* out_slots) {
  *out_slots = 0;
  const jpp_schedule_t* schedule = actions->schedule;
  prover_t p = {.actions = actions, .schedule = schedule};
  size_t pairs = (size_t)schedule->stages * schedule->microbatches;
  if (!has_communication(actions)) return NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, pairs, &p.done));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->stages, &p.weights));
  JPP_RETURN_IF_ERROR(check_lists(&p, check_action));
  JPP_RETURN_IF_ERROR(check_lists(&p, check_ends));
  return jpp__actions_run(actions, scratch, out_slots);
}
