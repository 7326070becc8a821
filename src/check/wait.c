// Proves that no actors deadlock when every send blocks until its channel has a free
// slot. Actors and channels form a Kahn network: where it stops does not depend on the
// order in which actors run, so one execution covers all orders.
#include "base/str.h"
#include "check/checker.h"

typedef struct waiting {
  jpp_checker_t* c;
  uint32_t* slots;      // [channels]
  uint32_t* under_way;  // [channels] number of messages in flight
  uint32_t* at;         // [ranks] the next instruction
  bool* queued;         // [ranks] in `ready`
  uint32_t* ready;      // [ranks] a stack
  uint32_t num_ready;
  uint32_t* seen;   // [ranks] the start of the last walk that visited it
  uint32_t* place;  // [ranks] its position in that walk
} waiting_t;

static const jpp_instr_t* instr_at(const waiting_t* w, uint32_t rank) {
  const jpp_program_t* program = &w->c->plan->programs[rank];
  return w->at[rank] < program->num_instrs ? &program->instrs[w->at[rank]] : NULL;
}

static void wake_actor(waiting_t* w, uint32_t rank) {
  if (w->queued[rank]) return;
  w->queued[rank] = true;
  w->ready[w->num_ready++] = rank;
}

// Executes an instruction, unless it has to wait.
static bool take_instr(waiting_t* w, const jpp_instr_t* instr) {
  const jpp_plan_channel_t* channels = w->c->plan->channels;
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_SEND:
      if (w->under_way[instr->target] == w->slots[instr->target]) return false;
      ++w->under_way[instr->target];
      wake_actor(w, channels[instr->target].dst);
      break;
    case JPP_INSTR_RECV:
      if (!w->under_way[instr->target]) return false;
      --w->under_way[instr->target];
      wake_actor(w, channels[instr->target].src);
      break;
    case JPP_INSTR_RUN:
    case JPP_INSTR_DELETE:
    case JPP_INSTR_MOVE:
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return true;
}

static void run_ready(waiting_t* w) {
  while (w->num_ready) {
    uint32_t rank = w->ready[--w->num_ready];
    w->queued[rank] = false;
    const jpp_instr_t* instr;
    while ((instr = instr_at(w, rank)) && take_instr(w, instr)) ++w->at[rank];
  }
}

// The rank for which a stuck rank waits.
static uint32_t waits_for(const waiting_t* w, uint32_t rank) {
  const jpp_instr_t* instr = instr_at(w, rank);
  const jpp_plan_channel_t* channel = &w->c->plan->channels[instr->target];
  return instr->kind == JPP_INSTR_SEND ? channel->dst : channel->src;
}

// A rank on the shortest cycle of waits; JPP_NONE if all have finished. Every stuck rank
// waits for exactly one other rank, which is stuck too: channels.c has proved that no
// message is missing.
static uint32_t shortest_cycle(waiting_t* w, uint32_t* out_length) {
  uint32_t best = JPP_NONE;
  *out_length = 0;
  for (uint32_t r = 0; r < w->c->plan->ranks; ++r) w->seen[r] = JPP_NONE;
  for (uint32_t r = 0; r < w->c->plan->ranks; ++r) {
    uint32_t at = r;
    uint32_t steps = 0;
    while (instr_at(w, at) && w->seen[at] == JPP_NONE) {
      w->seen[at] = r;
      w->place[at] = steps++;
      at = waits_for(w, at);
    }
    if (!instr_at(w, at) || w->seen[at] != r) continue;
    uint32_t length = steps - w->place[at];
    if (best != JPP_NONE && length >= *out_length) continue;
    best = at;
    *out_length = length;
  }
  return best;
}

static void append_wait(const waiting_t* w, uint32_t rank, jpp_str_t* str) {
  char text[JPP_CHECK_TEXT_SIZE];
  const jpp_instr_t* instr = instr_at(w, rank);
  uint32_t slots = w->slots[instr->target];
  jpp_str_appendf(str, "\n  rank %u, instruction %u: %s", rank, w->at[rank],
                  jpp__check_instr_text(w->c, &w->c->plan->programs[rank], instr, text));
  if (instr->kind == JPP_INSTR_SEND) {
    jpp_str_appendf(str, " is blocked, %u of %u slots full, and", slots, slots);
  }
  uint32_t other = waits_for(w, rank);
  jpp_str_appendf(str, " waits for rank %u, instruction %u", other, w->at[other]);
}

static jpp_status_t* cycle_error(const waiting_t* w, uint32_t rank, uint32_t length) {
  jpp_str_t str = {0};
  bool full = false;
  for (uint32_t i = 0; i < length; ++i, rank = waits_for(w, rank)) {
    full = full || instr_at(w, rank)->kind == JPP_INSTR_SEND;
    append_wait(w, rank, &str);
  }
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&str, &text));
  jpp_status_t* status = jpp_status_make(
      JPP_PROGRAM_ERROR, "%u actors wait for each other for ever:%s\n%s", length, text,
      full ? "Give the channels more slots, or receive earlier."
           : "No number of slots helps: each receives before it sends.");
  jpp_free(text);
  return status;
}

// Adds a slot to each full channel on the cycle; returns false if none is full.
static bool grow_slots(waiting_t* w, uint32_t rank, uint32_t length) {
  bool grown = false;
  for (uint32_t i = 0; i < length; ++i, rank = waits_for(w, rank)) {
    const jpp_instr_t* instr = instr_at(w, rank);
    if (instr->kind != JPP_INSTR_SEND) continue;
    ++w->slots[instr->target];
    wake_actor(w, rank);
    grown = true;
  }
  return grown;
}

static void restart_actors(waiting_t* w) {
  for (uint32_t i = 0; i < w->c->plan->num_channels; ++i) w->under_way[i] = 0;
  for (uint32_t r = 0; r < w->c->plan->ranks; ++r) {
    w->at[r] = 0;
    wake_actor(w, r);
  }
  run_ready(w);
}

static jpp_status_t* prove_slots_suffice(waiting_t* w) {
  uint32_t length = 0;
  for (uint32_t i = 0; i < w->c->plan->num_channels; ++i) {
    w->slots[i] = w->c->plan->channels[i].slots;
  }
  restart_actors(w);
  uint32_t rank = shortest_cycle(w, &length);
  return rank == JPP_NONE ? NULL : cycle_error(w, rank, length);
}

// Terminates, because no channel has to grow beyond the plan's slots, which were proved
// to suffice.
static jpp_status_t* find_slots_needed(waiting_t* w) {
  uint32_t length = 0, rank = 0;
  for (uint32_t i = 0; i < w->c->plan->num_channels; ++i) w->slots[i] = 1;
  restart_actors(w);
  while ((rank = shortest_cycle(w, &length)) != JPP_NONE) {
    if (!grow_slots(w, rank, length)) return cycle_error(w, rank, length);
    run_ready(w);
  }
  for (uint32_t i = 0; i < w->c->plan->num_channels; ++i) {
    w->c->channels[i].slots_needed = w->slots[i];
  }
  return NULL;
}

jpp_status_t* jpp__check_waiting(jpp_checker_t* c) {
  waiting_t w = {.c = c};
  uint32_t ranks = c->plan->ranks, channels = c->plan->num_channels;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, channels, &w.slots));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, channels, &w.under_way));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, ranks, &w.at));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, ranks, &w.queued));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, ranks, &w.ready));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, ranks, &w.seen));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&c->scratch, ranks, &w.place));
  JPP_RETURN_IF_ERROR(prove_slots_suffice(&w));
  return find_slots_needed(&w);
}
