// Event-driven list scheduling: a rank is examined when one of its own tasks ends and
// when a result that it may need arrives, and then starts the most urgent task that can
// run.
#include "search/greedy.h"

// Wake-up event: re-examine this rank at this time, because a task of its own ends then
// or a result that it may need arrives.
typedef struct wake {
  uint64_t time;
  uint32_t rank;
} wake_t;

typedef struct rank_state {
  uint64_t busy_until;
  uint32_t kept;
  uint32_t pending;  // weight gradients that can run
  uint32_t num_stages;
  const uint32_t* stages;  // in pipeline order
  jpp_schedule_task_t* tasks;
  uint32_t count;
} rank_state_t;

typedef struct greedy {
  const jpp_greedy_options_t* options;
  const jpp_schedule_t* schedule;
  uint64_t* forward_end;   // [stages][microbatches]; 0: not started
  uint64_t* backward_end;  // of the input gradients
  uint32_t* next[3];       // [stages] of forwards, backwards and weight gradients
  rank_state_t* ranks;
  wake_t* heap;
  size_t num_wakes;
} greedy_t;

enum { FORWARD, BACKWARD, WEIGHT };

static bool wakes_first(wake_t a, wake_t b) {
  return a.time < b.time || (a.time == b.time && a.rank < b.rank);
}

static void push_wake(greedy_t* g, uint64_t time, uint32_t rank) {
  size_t hole = g->num_wakes++;
  wake_t wake = {time, rank};
  while (hole && wakes_first(wake, g->heap[(hole - 1) / 2])) {
    g->heap[hole] = g->heap[(hole - 1) / 2];
    hole = (hole - 1) / 2;
  }
  g->heap[hole] = wake;
}

static wake_t pop_wake(greedy_t* g) {
  wake_t first = g->heap[0], last = g->heap[--g->num_wakes];
  size_t hole = 0;
  for (size_t child = 1; child < g->num_wakes; child = 2 * hole + 1) {
    if (child + 1 < g->num_wakes && wakes_first(g->heap[child + 1], g->heap[child])) {
      ++child;
    }
    if (!wakes_first(g->heap[child], last)) break;
    g->heap[hole] = g->heap[child];
    hole = child;
  }
  g->heap[hole] = last;
  return first;
}

static bool has_arrived(const greedy_t* g, const uint64_t* ends, uint32_t from,
                        uint32_t to, uint32_t microbatch, uint64_t now) {
  uint64_t end = ends[(size_t)from * g->schedule->microbatches + microbatch];
  bool local = g->schedule->stage_rank[from] == g->schedule->stage_rank[to];
  return end && end + (local ? 0 : g->options->link) <= now;
}

static bool can_start(const greedy_t* g, const rank_state_t* rank, uint32_t turn,
                      uint32_t what, uint64_t now) {
  uint32_t stage = rank->stages[turn], m = g->next[what][stage];
  if (m == g->schedule->microbatches) return false;
  if (what == WEIGHT) return has_arrived(g, g->backward_end, stage, stage, m, now);
  if (what == FORWARD) {
    uint32_t limit = g->options->limits[g->schedule->stage_rank[stage]];
    if (rank->kept + rank->num_stages - turn > limit) return false;
    return !stage || has_arrived(g, g->forward_end, stage - 1, stage, m, now);
  }
  if (g->options->split && rank->pending >= g->options->most_pending) return false;
  if (!has_arrived(g, g->forward_end, stage, stage, m, now)) return false;
  return stage + 1 == g->schedule->stages ||
         has_arrived(g, g->backward_end, stage + 1, stage, m, now);
}

// The most urgent task that can start: backwards of later stages, then forwards of later
// stages, then weight gradients; options reverse this order. Returns false if none can
// start.
static bool pick_task(const greedy_t* g, const rank_state_t* rank, uint64_t now,
                      uint32_t* out_turn, uint32_t* out_what) {
  bool forward_first = g->options->forward_first;
  const uint32_t order[] = {forward_first ? FORWARD : BACKWARD,
                            forward_first ? BACKWARD : FORWARD, WEIGHT};
  for (uint32_t i = 0; i < (g->options->split ? 3u : 2u); ++i) {
    for (uint32_t k = 0; k < rank->num_stages; ++k) {
      bool ascending = order[i] == FORWARD && g->options->early_first;
      *out_what = order[i];
      *out_turn = ascending ? k : rank->num_stages - 1 - k;
      if (can_start(g, rank, *out_turn, *out_what, now)) return true;
    }
  }
  return false;
}

// Wakes the rank that may be waiting for the task's result when it arrives: the rank of
// the next stage for a forward, of the previous stage for a backward.
static void wake_receiver(greedy_t* g, uint32_t stage, uint32_t what, uint64_t end) {
  const uint32_t* stage_rank = g->schedule->stage_rank;
  if (what == FORWARD && stage + 1 < g->schedule->stages) {
    push_wake(g, end + g->options->link, stage_rank[stage + 1]);
  }
  if (what == BACKWARD && stage) {
    push_wake(g, end + g->options->link, stage_rank[stage - 1]);
  }
}

static void start_task(greedy_t* g, uint32_t r, uint32_t stage, uint32_t what,
                       uint64_t now) {
  static const jpp_task_kind_t kKinds[] = {JPP_TASK_FWD, JPP_TASK_BWD, JPP_TASK_BWD_W};
  const jpp_greedy_cost_t* cost = &g->options->costs[stage];
  const uint32_t costs[] = {cost->forward, cost->backward, cost->weight};
  rank_state_t* rank = &g->ranks[r];
  uint32_t m = g->next[what][stage]++;
  uint64_t end = now + costs[what];
  size_t at = (size_t)stage * g->schedule->microbatches + m;
  jpp_task_kind_t kind = kKinds[what];
  if (kind == JPP_TASK_BWD && g->options->split) kind = JPP_TASK_BWD_I;
  rank->tasks[rank->count++] =
      (jpp_schedule_task_t){.kind = (uint8_t)kind,
                            .latency = jpp_task_default_latency(kind),
                            .stage = stage,
                            .microbatch = m};
  rank->busy_until = end;
  if (what == FORWARD) {
    g->forward_end[at] = end;
    ++rank->kept;
  } else if (what == BACKWARD) {
    g->backward_end[at] = end;
  }
  if (kind == JPP_TASK_BWD_I) ++rank->pending;
  if (kind == JPP_TASK_BWD_W) --rank->pending;
  if (kind == JPP_TASK_BWD || kind == JPP_TASK_BWD_W) --rank->kept;
  push_wake(g, end, r);
  wake_receiver(g, stage, what, end);
}

// Lists the stages of each rank in pipeline order, all in one array.
static jpp_status_t* list_stages(greedy_t* g, jpp_arena_t* scratch) {
  const jpp_schedule_t* schedule = g->schedule;
  uint32_t* stages = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->stages, &stages));
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    ++g->ranks[schedule->stage_rank[s]].num_stages;
  }
  uint32_t* at = stages;
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    g->ranks[r].stages = at;
    at += g->ranks[r].num_stages;
    g->ranks[r].num_stages = 0;
  }
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    rank_state_t* rank = &g->ranks[schedule->stage_rank[s]];
    stages[rank->stages - stages + rank->num_stages++] = s;
  }
  return NULL;
}

static jpp_status_t* prepare_greedy(greedy_t* g, jpp_arena_t* scratch,
                                    jpp_schedule_draft_t* draft) {
  const jpp_schedule_t* schedule = g->schedule;
  size_t pairs = (size_t)schedule->stages * schedule->microbatches;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, pairs, &g->forward_end));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, pairs, &g->backward_end));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &g->ranks));
  for (uint32_t i = 0; i < 3; ++i) {
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->stages, &g->next[i]));
  }
  JPP_RETURN_IF_ERROR(list_stages(g, scratch));
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    size_t capacity = (g->options->split ? (size_t)3 : 2) * g->ranks[r].num_stages *
                      schedule->microbatches;
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(draft->arena, capacity, &g->ranks[r].tasks));
  }
  // One wakeup for each rank at the start, and at most two for each of up to three tasks
  // per stage and microbatch.
  return JPP_ARENA_ARRAY(scratch, 6 * pairs + schedule->ranks, &g->heap);
}

jpp_status_t* jpp__schedule_greedy(const jpp_greedy_options_t* options,
                                   jpp_arena_t* scratch, jpp_schedule_draft_t* draft) {
  greedy_t g = {.options = options, .schedule = draft->schedule};
  JPP_RETURN_IF_ERROR(prepare_greedy(&g, scratch, draft));
  for (uint32_t r = 0; r < draft->schedule->ranks; ++r) push_wake(&g, 0, r);
  while (g.num_wakes) {
    wake_t wake = pop_wake(&g);
    rank_state_t* rank = &g.ranks[wake.rank];
    uint32_t turn, what;
    if (rank->busy_until > wake.time) continue;
    if (!pick_task(&g, rank, wake.time, &turn, &what)) continue;
    start_task(&g, wake.rank, rank->stages[turn], what, wake.time);
  }
  for (uint32_t r = 0; r < draft->schedule->ranks; ++r) {
    draft->rows[r] = (jpp_schedule_row_t){g.ranks[r].tasks, g.ranks[r].count};
  }
  return NULL;
}
