// Inserts weight gradients where ranks would wait, which turns an order of forwards and
// input gradients into a zero-bubble schedule (Qi et al. 2023, arXiv 2401.10241).
//
// All tasks take one step here, as in the papers' figures. Each step, a rank runs the
// next forward or input gradient of its row if its inputs exist and, for a forward, there
// is room; else the oldest pending weight gradient; else it waits. A rank without room
// has run its weight gradients already, so a limit that the row itself fits never blocks
// it.
#include "schedule/builtin/builder.h"

typedef struct rank_state {
  const jpp_schedule_row_t* row;
  uint32_t next;         // next entry of the row
  uint32_t next_weight;  // no BWD_I before this entry lacks its BWD_W
  uint32_t kept;         // number of stage activations
  jpp_schedule_task_t* tasks;
  uint32_t count;
} rank_state_t;

typedef struct filler {
  const jpp_schedule_t* schedule;
  uint32_t limit;
  uint32_t step;      // current step, from 1
  uint32_t* forward;  // [stages][microbatches]: the step at which it ran; 0: not yet
  uint32_t* input;
  rank_state_t* ranks;
} filler_t;

static bool has_run(const filler_t* filler, const uint32_t* steps, uint32_t stage,
                    uint32_t microbatch) {
  uint32_t at = steps[(size_t)stage * filler->schedule->microbatches + microbatch];
  return at && at < filler->step;
}

static bool is_ready(const filler_t* filler, const jpp_schedule_task_t* task) {
  if (task->kind == JPP_TASK_FWD) {
    return !task->stage ||
           has_run(filler, filler->forward, task->stage - 1, task->microbatch);
  }
  if (!has_run(filler, filler->forward, task->stage, task->microbatch)) return false;
  return task->stage + 1 == filler->schedule->stages ||
         has_run(filler, filler->input, task->stage + 1, task->microbatch);
}

static void run_next(filler_t* filler, rank_state_t* rank) {
  const jpp_schedule_task_t* task = &rank->row->tasks[rank->next++];
  bool forward = task->kind == JPP_TASK_FWD;
  uint32_t* steps = forward ? filler->forward : filler->input;
  steps[(size_t)task->stage * filler->schedule->microbatches + task->microbatch] =
      filler->step;
  if (forward) ++rank->kept;
  rank->tasks[rank->count++] = *task;
}

static bool run_weight(rank_state_t* rank) {
  while (rank->next_weight < rank->next &&
         rank->row->tasks[rank->next_weight].kind != JPP_TASK_BWD_I) {
    ++rank->next_weight;
  }
  if (rank->next_weight == rank->next) return false;
  jpp_schedule_task_t weight = rank->row->tasks[rank->next_weight++];
  weight.kind = JPP_TASK_BWD_W;
  weight.latency = jpp_task_default_latency(JPP_TASK_BWD_W);
  rank->tasks[rank->count++] = weight;
  --rank->kept;
  return true;
}

// Runs the rank's next task; returns whether it ran one.
static bool step_rank(filler_t* filler, rank_state_t* rank) {
  if (rank->next < rank->row->count) {
    const jpp_schedule_task_t* task = &rank->row->tasks[rank->next];
    bool room = task->kind != JPP_TASK_FWD || rank->kept < filler->limit;
    if (room && is_ready(filler, task)) {
      run_next(filler, rank);
      return true;
    }
  }
  return run_weight(rank);
}

// The peak activations of a row if its weight gradients directly follow their input
// gradients.
static uint32_t row_need(const jpp_schedule_row_t* row) {
  uint32_t kept = 0, need = 0;
  for (uint32_t i = 0; i < row->count; ++i) {
    kept += row->tasks[i].kind == JPP_TASK_FWD ? 1 : -1;
    if (kept > need) need = kept;
  }
  return need;
}

static jpp_status_t* prepare_rows(filler_t* filler, jpp_arena_t* scratch) {
  const jpp_schedule_t* schedule = filler->schedule;
  size_t pairs = (size_t)schedule->stages * schedule->microbatches;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, pairs, &filler->forward));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, pairs, &filler->input));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &filler->ranks));
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    rank_state_t* rank = &filler->ranks[r];
    rank->row = &schedule->rows[r];
    size_t capacity = (size_t)rank->row->count / 2 * 3;
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, capacity, &rank->tasks));
    uint32_t need = row_need(rank->row);
    if (need > filler->limit) filler->limit = need;
  }
  return NULL;
}

jpp_status_t* jpp__schedule_place_weights(jpp_schedule_draft_t* draft, uint32_t limit,
                                          jpp_arena_t* scratch) {
  filler_t filler = {.schedule = draft->schedule, .limit = limit};
  JPP_RETURN_IF_ERROR(prepare_rows(&filler, scratch));
  for (bool more = true; more;) {
    more = false;
    ++filler.step;
    for (uint32_t r = 0; r < draft->schedule->ranks; ++r) {
      more |= step_rank(&filler, &filler.ranks[r]);
    }
  }
  for (uint32_t r = 0; r < draft->schedule->ranks; ++r) {
    rank_state_t* rank = &filler.ranks[r];
    if (rank->next < rank->row->count) {
      return jpp_status_make(JPP_INTERNAL_ERROR, "schedule %s stops on rank %u, entry %u",
                             draft->schedule->name, r, rank->next);
    }
    jpp_schedule_task_t* tasks = NULL;
    JPP_RETURN_IF_ERROR(jpp__arena_copy(draft->arena, rank->tasks,
                                        rank->count * sizeof(*tasks), (void**)&tasks));
    draft->rows[r] = (jpp_schedule_row_t){tasks, rank->count};
  }
  return NULL;
}
