// Advances each rank as far as the sent messages allow, until no rank can advance. A
// channel remembers when each of its messages was sent and received.
#include "runtime/cluster/forecast.h"

typedef struct crossing {
  double* sent;      // [messages] when each was sent
  double* received;  // [messages] when each was received
  uint32_t num_sent, num_received;
} crossing_t;

typedef struct walk {
  const jpp_plan_t* plan;
  crossing_t* crossings;  // [channels]
  uint32_t* at;           // [ranks] the next instruction
  double* now;            // [ranks]
  double** waits;         // [ranks][num_instrs]
} walk_t;

static jpp_status_t* allocate(walk_t* w, jpp_arena_t* arena) {
  const jpp_plan_t* plan = w->plan;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->num_channels, &w->crossings));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->ranks, &w->at));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->ranks, &w->now));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, plan->ranks, &w->waits));
  for (uint32_t c = 0; c < plan->num_channels; ++c) {
    crossing_t* crossing = &w->crossings[c];
    uint32_t messages = plan->channels[c].messages;
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, messages, &crossing->sent));
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, messages, &crossing->received));
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    JPP_RETURN_IF_ERROR(
        JPP_ARENA_ARRAY(arena, plan->programs[r].num_instrs, &w->waits[r]));
  }
  return NULL;
}

// A slot is free again when its message is received.
static bool find_slot(const walk_t* w, uint32_t channel, double* out_since) {
  const crossing_t* crossing = &w->crossings[channel];
  uint32_t slots = w->plan->channels[channel].slots;
  *out_since = 0;
  if (crossing->num_sent == w->plan->channels[channel].messages) return false;
  if (crossing->num_sent < slots) return true;
  if (crossing->num_received <= crossing->num_sent - slots) return false;
  *out_since = crossing->received[crossing->num_sent - slots];
  return true;
}

static bool find_message(const walk_t* w, uint32_t channel, double* out_since) {
  const crossing_t* crossing = &w->crossings[channel];
  if (crossing->num_received == crossing->num_sent) return false;
  *out_since = crossing->sent[crossing->num_received];
  return true;
}

// Waits until `since`, if that is in the future.
static void wait_until(walk_t* w, uint32_t rank, double since) {
  if (since <= w->now[rank]) return;
  w->waits[rank][w->at[rank]] = since - w->now[rank];
  w->now[rank] = since;
}

// Returns false if the time for which it waits is not known yet.
static bool take_instr(walk_t* w, uint32_t rank, const jpp_instr_t* instr) {
  double since = 0;
  crossing_t* crossing = NULL;
  switch ((jpp_instr_kind_t)instr->kind) {
    case JPP_INSTR_RUN:
      w->now[rank] += (double)w->plan->staged->tasks[instr->target].cost;
      break;
    case JPP_INSTR_SEND:
      if (!find_slot(w, instr->target, &since)) return false;
      wait_until(w, rank, since);
      crossing = &w->crossings[instr->target];
      crossing->sent[crossing->num_sent++] = w->now[rank];
      break;
    case JPP_INSTR_RECV:
      if (!find_message(w, instr->target, &since)) return false;
      wait_until(w, rank, since);
      crossing = &w->crossings[instr->target];
      crossing->received[crossing->num_received++] = w->now[rank];
      break;
    case JPP_INSTR_DELETE:
    case JPP_INSTR_MOVE:
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return true;
}

static bool follow(walk_t* w, uint32_t rank) {
  const jpp_program_t* program = &w->plan->programs[rank];
  uint32_t first = w->at[rank];
  while (w->at[rank] < program->num_instrs &&
         take_instr(w, rank, &program->instrs[w->at[rank]])) {
    ++w->at[rank];
  }
  return w->at[rank] > first;
}

jpp_status_t* jpp__forecast_make(const jpp_plan_t* plan, jpp_arena_t* arena,
                                 jpp_forecast_t* out_forecast) {
  walk_t w = {.plan = plan};
  JPP_RETURN_IF_ERROR(allocate(&w, arena));
  for (bool some = true; some;) {
    some = false;
    for (uint32_t r = 0; r < plan->ranks; ++r) some |= follow(&w, r);
  }
  *out_forecast = (jpp_forecast_t){.waits = w.waits};
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    if (w.now[r] > out_forecast->step) out_forecast->step = w.now[r];
  }
  return NULL;
}
