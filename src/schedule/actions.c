// The proof of a schedule's communication.
#include "schedule/actions.h"

// What has been done for (stage, microbatch), as bits.
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

typedef struct prover {
  const jpp_actions_t* actions;
  const jpp_schedule_t* schedule;
  uint8_t* done;  // [stages][microbatches]
  uint8_t* held;  // [stages]: 0 nothing said, 1 unsharded, 2 resharded, 3 reduced
} prover_t;

static jpp_status_t* fail(const prover_t* p, uint32_t rank, const jpp_action_t* action,
                          const char* why) {
  char name[JPP_ACTION_NAME_SIZE];
  return jpp_status_make(JPP_SCHEDULE_ERROR, "%s:%u: cell %u, %s: %s", p->actions->file,
                         p->actions->lists[rank].line, action->cell,
                         jpp_action_name(action, name), why);
}

static uint8_t* done_of(const prover_t* p, const jpp_action_t* action) {
  return &p->done[(size_t)action->stage * p->schedule->microbatches + action->microbatch];
}

// The rank at the other end; the stage's own where nothing is sent.
static uint32_t peer(const prover_t* p, const jpp_action_t* action) {
  uint32_t stage = action->stage, stages = p->schedule->stages;
  bool up = action->kind == JPP_ACTION_SEND_F || action->kind == JPP_ACTION_WAIT_SEND_F ||
            action->kind == JPP_ACTION_RECV_B;
  bool none = up ? stage + 1 == stages : !stage;
  return p->schedule->stage_rank[none ? stage : up ? stage + 1 : stage - 1];
}

static bool is_forward(const jpp_action_t* action) {
  return action->kind == JPP_ACTION_COMPUTE
             ? action->task == JPP_TASK_FWD
             : action->kind == JPP_ACTION_SEND_F || action->kind == JPP_ACTION_RECV_F ||
                   action->kind == JPP_ACTION_WAIT_SEND_F;
}

// --- Each rank by itself ---------------------------------------------------------------

static jpp_status_t* check_compute(const prover_t* p, uint32_t rank,
                                   const jpp_action_t* action) {
  uint8_t* done = done_of(p, action);
  if (p->held[action->stage] == 2) {
    return fail(p, rank, action, "the stage's weights are not here after its RESHARD");
  }
  if (p->held[action->stage] == 3) {
    return fail(p, rank, action, "the stage's gradients are reduced already");
  }
  if (action->task == JPP_TASK_BWD_W) return NULL;
  bool forward = action->task == JPP_TASK_FWD;
  jpp_action_t recv = *action;
  recv.kind = forward ? JPP_ACTION_RECV_F : JPP_ACTION_RECV_B;
  *done |= forward ? kComputedF : kComputedB;
  if (peer(p, &recv) == rank || (*done & (forward ? kReceivedF : kReceivedB)))
    return NULL;
  return fail(
      p, rank, action,
      forward ? "expected its RECV_F before it" : "expected its RECV_B before it");
}

static jpp_status_t* check_send(const prover_t* p, uint32_t rank,
                                const jpp_action_t* action) {
  bool forward = is_forward(action);
  uint8_t* done = done_of(p, action);
  if (peer(p, action) == rank) {
    return fail(p, rank, action, "there is no other rank that needs it; nothing is sent");
  }
  if (!(*done & (forward ? kComputedF : kComputedB))) {
    return fail(p, rank, action, "stands before its computation");
  }
  if (*done & (forward ? kSentF : kSentB)) return fail(p, rank, action, "is sent twice");
  *done |= forward ? kSentF : kSentB;
  return NULL;
}

static jpp_status_t* check_recv(const prover_t* p, uint32_t rank,
                                const jpp_action_t* action) {
  bool forward = is_forward(action);
  uint8_t* done = done_of(p, action);
  if (peer(p, action) == rank) {
    return fail(p, rank, action, "no other rank sends it");
  }
  if (*done & (forward ? kReceivedF : kReceivedB)) {
    return fail(p, rank, action, "is received twice");
  }
  if (*done & (forward ? kComputedF : kComputedB)) {
    return fail(p, rank, action, "stands behind the computation that needs it");
  }
  *done |= forward ? kReceivedF : kReceivedB;
  return NULL;
}

static jpp_status_t* check_wait(const prover_t* p, uint32_t rank,
                                const jpp_action_t* action) {
  bool forward = is_forward(action);
  uint8_t* done = done_of(p, action);
  if (!(*done & (forward ? kSentF : kSentB))) {
    return fail(p, rank, action, "stands before its SEND");
  }
  if (*done & (forward ? kWaitedF : kWaitedB)) {
    return fail(p, rank, action, "is waited for twice");
  }
  *done |= forward ? kWaitedF : kWaitedB;
  return NULL;
}

static jpp_status_t* check_weights(const prover_t* p, uint32_t rank,
                                   const jpp_action_t* action) {
  uint8_t* held = &p->held[action->stage];
  switch ((jpp_action_kind_t)action->kind) {
    case JPP_ACTION_UNSHARD:
      if (*held == 1) return fail(p, rank, action, "the weights are here already");
      *held = 1;
      return NULL;
    case JPP_ACTION_RESHARD:
      if (*held != 1 && *held != 3) {
        return fail(p, rank, action, "expected an UNSHARD before it");
      }
      if (*held == 1) *held = 2;
      return NULL;
    case JPP_ACTION_REDUCE_GRAD:
      if (*held == 3) return fail(p, rank, action, "is reduced twice");
      *held = 3;
      return NULL;
    default:
      return *held == 3 ? NULL : fail(p, rank, action, "stands before its REDUCE_GRAD");
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

// A computation whose SEND never came.
static jpp_status_t* check_sent(const prover_t* p, uint32_t rank) {
  const jpp_action_list_t* list = &p->actions->lists[rank];
  for (uint32_t i = 0; i < list->count; ++i) {
    const jpp_action_t* action = &list->actions[i];
    if (action->kind != JPP_ACTION_COMPUTE || action->task == JPP_TASK_BWD_W) continue;
    bool forward = is_forward(action);
    jpp_action_t send = *action;
    send.kind = forward ? JPP_ACTION_SEND_F : JPP_ACTION_SEND_B;
    if (peer(p, &send) == rank || (*done_of(p, action) & (forward ? kSentF : kSentB))) {
      continue;
    }
    return fail(p, rank, action,
                forward ? "its SEND_F is missing" : "its SEND_B is missing");
  }
  return NULL;
}

// --- Channels
// ---------------------------------------------------------------------------

// All ranks at once, with a number of slots a channel. RECVs are in the order of the
// SENDs, so the counts of both are all there is to know of a channel.
typedef struct channels {
  const prover_t* prover;
  uint32_t slots;
  uint32_t* sent;     // [sender][receiver]
  uint32_t* posted;   // [sender][receiver]
  uint32_t* number;   // [2][stages][microbatches]: of a RECV on its channel
  uint32_t* next;     // [ranks]: action
  uint32_t* stack;    // ranks that may be able to go on
  uint8_t* on_stack;  // [ranks]
  uint32_t num_stack;
} channels_t;

static uint32_t* at_channel(const channels_t* c, uint32_t* counts, uint32_t sender,
                            uint32_t receiver) {
  return &counts[(size_t)sender * c->prover->schedule->ranks + receiver];
}

static uint32_t* number_of(const channels_t* c, const jpp_action_t* action) {
  const jpp_schedule_t* schedule = c->prover->schedule;
  size_t row = is_forward(action) ? action->stage : schedule->stages + action->stage;
  return &c->number[row * schedule->microbatches + action->microbatch];
}

static void push(channels_t* c, uint32_t rank) {
  if (c->on_stack[rank]) return;
  c->on_stack[rank] = 1;
  c->stack[c->num_stack++] = rank;
}

// Whether the action can be taken now; if so, takes it.
static bool take(channels_t* c, uint32_t rank, const jpp_action_t* action) {
  if (jpp_action_is_send(action)) {
    uint32_t to = peer(c->prover, action);
    uint32_t* sent = at_channel(c, c->sent, rank, to);
    uint32_t posted = *at_channel(c, c->posted, rank, to);
    if (*sent >= posted && *sent - posted >= c->slots) return false;
    ++*sent;
    push(c, to);
  } else if (jpp_action_is_recv(action)) {
    uint32_t from = peer(c->prover, action);
    ++*at_channel(c, c->posted, from, rank);
    push(c, from);
  } else if (action->kind == JPP_ACTION_COMPUTE && action->task != JPP_TASK_BWD_W) {
    jpp_action_t recv = *action;
    recv.kind = is_forward(action) ? JPP_ACTION_RECV_F : JPP_ACTION_RECV_B;
    uint32_t from = peer(c->prover, &recv);
    return from == rank || *at_channel(c, c->sent, from, rank) > *number_of(c, &recv);
  }
  return true;
}

static void clear(channels_t* c) {
  uint32_t ranks = c->prover->schedule->ranks;
  for (size_t i = 0; i < (size_t)ranks * ranks; ++i) c->sent[i] = c->posted[i] = 0;
  for (uint32_t r = 0; r < ranks; ++r) c->next[r] = 0;
}

// Whether every rank gets to its end with so many slots.
static bool runs_with(channels_t* c, uint32_t slots) {
  uint32_t ranks = c->prover->schedule->ranks;
  c->slots = slots;
  clear(c);
  for (uint32_t r = ranks; r-- > 0;) push(c, r);
  while (c->num_stack) {
    uint32_t r = c->stack[--c->num_stack];
    const jpp_action_list_t* list = &c->prover->actions->lists[r];
    c->on_stack[r] = 0;
    while (c->next[r] < list->count && take(c, r, &list->actions[c->next[r]])) {
      ++c->next[r];
    }
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    if (c->next[r] < c->prover->actions->lists[r].count) return false;
  }
  return true;
}

// With slots for all messages nothing waits but computations, and those are proved.
static uint32_t least_slots(channels_t* c) {
  uint32_t too_few = 0, enough = 1;
  while (!runs_with(c, enough) && enough < UINT32_MAX / 2) {
    too_few = enough;
    enough *= 2;
  }
  while (enough - too_few > 1) {
    uint32_t middle = too_few + (enough - too_few) / 2;
    *(runs_with(c, middle) ? &enough : &too_few) = middle;
  }
  return enough;
}

// Numbers RECVs by channel, then asks every SEND for the same number.
static jpp_status_t* check_order(channels_t* c) {
  const prover_t* p = c->prover;
  for (uint32_t pass = 0; pass < 2; ++pass) {
    for (uint32_t r = 0; r < p->schedule->ranks; ++r) {
      const jpp_action_list_t* list = &p->actions->lists[r];
      for (uint32_t i = 0; i < list->count; ++i) {
        const jpp_action_t* action = &list->actions[i];
        if (pass == 0 && jpp_action_is_recv(action)) {
          *number_of(c, action) = (*at_channel(c, c->posted, peer(p, action), r))++;
        }
        if (pass == 0 || !jpp_action_is_send(action)) continue;
        jpp_action_t recv = *action;
        recv.stage += action->kind == JPP_ACTION_SEND_F ? 1 : -1;
        if (*number_of(c, &recv) == (*at_channel(c, c->sent, r, peer(p, action)))++) {
          continue;
        }
        return fail(
            p, r, action,
            "a channel delivers in order, and the receiver's RECVs are in another "
            "order than these SENDs");
      }
    }
  }
  return NULL;
}

static jpp_status_t* check_channels(const prover_t* p, jpp_arena_t* scratch,
                                    uint32_t* out_slots) {
  size_t ranks = p->schedule->ranks;
  size_t pairs = (size_t)p->schedule->stages * p->schedule->microbatches;
  if (ranks > 8192) {
    return jpp_status_make(JPP_UNSUPPORTED,
                           "communication of more than 8192 ranks is not proved, found "
                           "%zu",
                           ranks);
  }
  channels_t c = {.prover = p};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks * ranks, &c.sent));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks * ranks, &c.posted));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, 2 * pairs, &c.number));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &c.next));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &c.stack));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &c.on_stack));
  JPP_RETURN_IF_ERROR(check_order(&c));
  *out_slots = least_slots(&c);
  return NULL;
}

static bool has_communication(const jpp_actions_t* actions) {
  for (uint32_t r = 0; r < actions->schedule->ranks; ++r) {
    const jpp_action_list_t* list = &actions->lists[r];
    for (uint32_t i = 0; i < list->count; ++i) {
      if (jpp_action_is_send(&list->actions[i])) return true;
      if (jpp_action_is_recv(&list->actions[i])) return true;
    }
  }
  return false;
}

jpp_status_t* jpp_actions_verify(const jpp_actions_t* actions, jpp_arena_t* scratch,
                                 uint32_t* out_slots) {
  *out_slots = 0;
  const jpp_schedule_t* schedule = actions->schedule;
  prover_t p = {.actions = actions, .schedule = schedule};
  size_t pairs = (size_t)schedule->stages * schedule->microbatches;
  if (!has_communication(actions)) return NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, pairs, &p.done));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->stages, &p.held));
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    const jpp_action_list_t* list = &actions->lists[r];
    for (uint32_t i = 0; i < list->count; ++i) {
      JPP_RETURN_IF_ERROR(check_action(&p, r, &list->actions[i]));
    }
  }
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    JPP_RETURN_IF_ERROR(check_sent(&p, r));
  }
  return check_channels(&p, scratch, out_slots);
}
