// Simulates the device memory and the host links of ranks that offload. A task's room,
// and the move that brings its activations back, depend only on tasks before it in the
// list. Both are therefore known when the task is, even if they happen long before it.
#include "simulate/offload.h"

#include "base/str.h"
#include "simulate/simulation.h"

const char* jpp_activations_name(jpp_activations_t activations) {
  static const char* const kNames[] = {"kept", "offloaded", "recomputed"};
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_ACTIVATIONS_COUNT,
                 "a name each");
  return (unsigned)activations < JPP_ACTIVATIONS_COUNT ? kNames[activations] : NULL;
}

// --- Setting up -----------------------------------------------------------------------

jpp_status_t* jpp__simulation_check_host(uint64_t activation_bytes, uint64_t input_bytes,
                                         double bandwidth) {
  uint64_t bytes = activation_bytes ? activation_bytes : 1;
  if (input_bytes > bytes) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "a stage's input is one of its activations: expected at most %llu bytes, found "
        "%llu",
        (unsigned long long)bytes, (unsigned long long)input_bytes);
  }
  if (!jpp__simulation_takes(bandwidth) ||
      (bandwidth > 0 && !jpp__simulation_takes((double)bytes / bandwidth))) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "host bandwidth: expected a number of at least 0, and of %g to "
        "%g if it is not 0, found %g",
        JPP_SHORTEST_TIME, JPP_LONGEST_TIME, bandwidth);
  }
  return NULL;
}

static jpp_status_t* prepare_rank(jpp_offload_t* o, uint32_t r, jpp_arena_t* arena,
                                  jpp_arena_t* scratch) {
  uint32_t count = o->index->schedule->rows[r].count;
  uint32_t places = o->limit < count ? o->limit : count;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, count, &o->moves[r]));
  return JPP_ARENA_ARRAY(scratch, places, &o->ranks[r].freed);
}

jpp_status_t* jpp__offload_create(const jpp_schedule_index_t* index,
                                  const jpp_simulate_options_t* options,
                                  jpp_arena_t* arena, jpp_arena_t* scratch,
                                  jpp_offload_t* out_offload) {
  uint32_t ranks = index->schedule->ranks, *peaks = NULL;
  uint64_t bytes = options->activation_bytes ? options->activation_bytes : 1;
  uint64_t most = options->memory_limit ? options->memory_limit / bytes : UINT32_MAX;
  *out_offload = (jpp_offload_t){.index = index};
  if ((unsigned)options->activations >= JPP_ACTIVATIONS_COUNT) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "unknown kind of activations %u",
                           (unsigned)options->activations);
  }
  JPP_RETURN_IF_ERROR(jpp__simulation_check_host(
      options->activation_bytes, options->input_bytes, options->host_bandwidth));
  if (options->host_bandwidth > 0) {
    out_offload->move = (double)bytes / options->host_bandwidth;
  }
  out_offload->limit = most < UINT32_MAX ? (uint32_t)most : UINT32_MAX;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, ranks, &out_offload->activations));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, ranks, &out_offload->moves));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &out_offload->ranks));
  if (options->activations == JPP_ACTIVATIONS_KEPT || !index->has_backward) return NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &peaks));
  JPP_RETURN_IF_ERROR(jpp_schedule_peak_microbatches(index->schedule, ranks, peaks));
  for (uint32_t r = 0; r < ranks; ++r) {
    if (options->memory_limit && peaks[r] <= most) continue;
    out_offload->activations[r] = options->activations;
    if (options->activations != JPP_ACTIVATIONS_OFFLOADED) continue;
    JPP_RETURN_IF_ERROR(prepare_rank(out_offload, r, arena, scratch));
  }
  return NULL;
}

// --- Room and moves -------------------------------------------------------------------

// Reserves room for the activations of one stage and microbatch: the place that is free
// first, but no earlier than the tasks before have theirs.
static bool reserve_place(jpp_offload_t* o, jpp_offload_rank_t* rank) {
  if (rank->reservations < o->limit) {
    ++rank->reservations;
    return true;
  }
  if (!rank->num_freed) return false;
  uint32_t first = 0;
  for (uint32_t i = 1; i < rank->num_freed; ++i) {
    if (rank->freed[i] < rank->freed[first]) first = i;
  }
  if (rank->freed[first] > rank->reserved) rank->reserved = rank->freed[first];
  rank->freed[first] = rank->freed[--rank->num_freed];
  return true;
}

static void free_place(jpp_offload_rank_t* rank, double time) {
  rank->freed[rank->num_freed++] = time;
}

static bool stage_moves(const jpp_offload_t* o, uint32_t stage) {
  return stage + 1 < o->index->schedule->stages;
}

bool jpp__offload_start(jpp_offload_t* o, uint32_t r, uint32_t entry, double* out_ready) {
  jpp_offload_rank_t* rank = &o->ranks[r];
  const jpp_schedule_task_t* task = &o->index->schedule->rows[r].tasks[entry];
  bool forward = task->kind == JPP_TASK_FWD;
  *out_ready = 0;
  if (task->kind == JPP_TASK_BWD_W || (!forward && !stage_moves(o, task->stage))) {
    return true;
  }
  if (!reserve_place(o, rank)) {
    o->full = true;
    o->full_rank = r;
    o->full_entry = entry;
    return false;
  }
  *out_ready = rank->reserved;
  if (forward) return true;
  uint32_t made =
      jpp__schedule_index_entry(o->index, JPP_SLOT_FWD, task->stage, task->microbatch);
  double back = rank->reserved > rank->back_free ? rank->reserved : rank->back_free;
  if (o->moves[r][made] > back) back = o->moves[r][made];
  o->moves[r][entry] = back;
  *out_ready = rank->back_free = back + o->move;
  return true;
}

void jpp__offload_end(jpp_offload_t* o, uint32_t r, uint32_t entry, double end) {
  jpp_offload_rank_t* rank = &o->ranks[r];
  const jpp_schedule_task_t* task = &o->index->schedule->rows[r].tasks[entry];
  if (task->kind == JPP_TASK_FWD && stage_moves(o, task->stage)) {
    rank->out_free = (end > rank->out_free ? end : rank->out_free) + o->move;
    o->moves[r][entry] = rank->out_free;
    free_place(rank, rank->out_free);
  }
  if (task->kind == JPP_TASK_BWD || task->kind == JPP_TASK_BWD_W) {
    free_place(rank, end);
  }
}

jpp_status_t* jpp__offload_refuse(const jpp_offload_t* o) {
  char name[JPP_TASK_NAME_SIZE];
  const jpp_schedule_t* schedule = o->index->schedule;
  return jpp_status_make(
      JPP_SCHEDULE_ERROR,
      "schedule %s: rank %u: %s has no room beside the activations of earlier tasks: the "
      "limit holds %u stage activation%s",
      schedule->name, o->full_rank,
      jpp_task_name(&schedule->rows[o->full_rank].tasks[o->full_entry], name), o->limit,
      jpp__plural(o->limit));
}
