// Sums up a simulation once every task has its start: work, peaks and idle time of each
// rank, and from these the bubbles and the step's time.
#include <stdlib.h>

#include "simulate/simulation.h"

static double end_of(const jpp_simulation_t* simulation, uint32_t rank, uint32_t entry) {
  const jpp_schedule_task_t* task = &simulation->schedule->rows[rank].tasks[entry];
  double cost = jpp_task_cost(&simulation->stage_costs[task->stage], task->kind);
  return simulation->starts[rank][entry] + cost;
}

static bool has_backward(const jpp_simulation_t* simulation) {
  return ((const jpp_simulation_storage_t*)simulation)->has_backward;
}

static bool frees_activation(const jpp_schedule_task_t* task, bool backward) {
  return task->kind == JPP_TASK_BWD || task->kind == JPP_TASK_BWD_W ||
         (task->kind == JPP_TASK_FWD && !backward);
}

// --- One stream: rows are ordered by time ------------------------------------------

static void sum_row(const jpp_simulation_t* simulation, uint32_t r, bool backward,
                    jpp_simulated_rank_t* rank, double* out_peak) {
  const jpp_schedule_row_t* row = &simulation->schedule->rows[r];
  uint32_t kept = 0;
  for (uint32_t i = 0; i < row->count; ++i) {
    const jpp_schedule_task_t* task = &row->tasks[i];
    if (task->kind == JPP_TASK_IDLE) continue;
    rank->work += jpp_task_cost(&simulation->stage_costs[task->stage], task->kind);
    if (task->kind == JPP_TASK_FWD && ++kept > *out_peak) {
      *out_peak = kept;
      rank->peak_entry = i;
    }
    if (frees_activation(task, backward)) --kept;
  }
}

// --- Several streams, or activations that do not stay -----------------------------------

static int compare_events(const void* left, const void* right) {
  const jpp_kept_event_t *a = left, *b = right;
  if (a->time != b->time) return a->time < b->time ? -1 : 1;
  if (a->change != b->change) return a->change < b->change ? -1 : 1;
  return (a->entry > b->entry) - (a->entry < b->entry);
}

static void add_event(double time, uint32_t entry, double change,
                      jpp_kept_event_t* events, uint32_t* count) {
  events[(*count)++] = (jpp_kept_event_t){time, entry, change};
}

// The events of a task on its rank's device.
static void add_kept(const jpp_simulation_t* simulation, uint32_t rank, uint32_t entry,
                     jpp_kept_event_t* events, uint32_t* count) {
  const jpp_schedule_task_t* task = &simulation->schedule->rows[rank].tasks[entry];
  double start = simulation->starts[rank][entry];
  bool backward = task->kind == JPP_TASK_BWD || task->kind == JPP_TASK_BWD_I;
  const double* moves = simulation->moves[rank];
  if (task->stage + 1 == simulation->schedule->stages) moves = NULL;
  bool again = simulation->activations[rank] == JPP_ACTIVATIONS_RECOMPUTED;
  double share = again ? ((const jpp_simulation_storage_t*)simulation)->input_share : 1;
  if (task->kind == JPP_TASK_FWD) {
    add_event(start, entry, share, events, count);
    if (moves) add_event(moves[entry], entry, -1, events, count);
  }
  if (backward && moves) add_event(moves[entry], entry, 1, events, count);
  if (backward && again) add_event(start, entry, 1 - share, events, count);
  if (frees_activation(task, has_backward(simulation))) {
    add_event(end_of(simulation, rank, entry), entry, -1, events, count);
  }
}

jpp_status_t* jpp__simulation_kept(const jpp_simulation_t* simulation, uint32_t rank,
                                   jpp_arena_t* scratch, jpp_kept_event_t** out_events,
                                   uint32_t* out_count) {
  const jpp_schedule_row_t* row = &simulation->schedule->rows[rank];
  *out_count = 0;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, 2 * (size_t)row->count, out_events));
  for (uint32_t i = 0; i < row->count; ++i) {
    if (row->tasks[i].kind == JPP_TASK_IDLE) continue;
    add_kept(simulation, rank, i, *out_events, out_count);
  }
  qsort(*out_events, *out_count, sizeof(**out_events), compare_events);
  return NULL;
}

// The largest sum of events up to one of them.
static double find_peak(jpp_kept_event_t* events, uint32_t count, uint32_t* out_entry) {
  double kept = 0, peak = 0;
  for (uint32_t i = 0; i < count; ++i) {
    kept += events[i].change;
    if (kept <= peak) continue;
    peak = kept;
    *out_entry = events[i].entry;
  }
  return peak;
}

// Activations take room on the host from the start of a move there to the end of the one
// back.
static jpp_status_t* find_host_peak(const jpp_simulation_t* simulation, uint32_t r,
                                    double move, jpp_arena_t* scratch, double* out_peak) {
  const jpp_schedule_row_t* row = &simulation->schedule->rows[r];
  jpp_kept_event_t* events = NULL;
  uint32_t count = 0, entry = 0;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, row->count, &events));
  for (uint32_t i = 0; i < row->count; ++i) {
    const jpp_schedule_task_t* task = &row->tasks[i];
    if (task->kind == JPP_TASK_IDLE || task->kind == JPP_TASK_BWD_W) continue;
    if (task->stage + 1 == simulation->schedule->stages) continue;
    bool out = task->kind == JPP_TASK_FWD;
    double time = simulation->moves[r][i];
    add_event(out ? time - move : time + move, i, out ? 1 : -1, events, &count);
  }
  qsort(events, count, sizeof(*events), compare_events);
  *out_peak = find_peak(events, count, &entry);
  return NULL;
}

typedef struct span {
  double start, end;
} span_t;

static int compare_spans(const void* left, const void* right) {
  const span_t *a = left, *b = right;
  return (a->start > b->start) - (a->start < b->start);
}

// The time during which at least one stream runs.
static jpp_status_t* sum_busy(const jpp_simulation_t* simulation, uint32_t r,
                              jpp_arena_t* scratch, double* out_busy) {
  const jpp_schedule_row_t* row = &simulation->schedule->rows[r];
  span_t* spans = NULL;
  uint32_t count = 0;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, row->count, &spans));
  for (uint32_t i = 0; i < row->count; ++i) {
    if (row->tasks[i].kind == JPP_TASK_IDLE) continue;
    spans[count++] = (span_t){simulation->starts[r][i], end_of(simulation, r, i)};
  }
  qsort(spans, count, sizeof(*spans), compare_spans);
  double until = 0;
  for (uint32_t i = 0; i < count; ++i) {
    double from = spans[i].start > until ? spans[i].start : until;
    if (spans[i].end <= from) continue;
    *out_busy += spans[i].end - from;
    until = spans[i].end;
  }
  return NULL;
}

// --- All ------------------------------------------------------------------------------

static void find_ends(const jpp_simulation_t* simulation, uint32_t r,
                      jpp_simulated_rank_t* rank, uint64_t* tasks) {
  const jpp_schedule_row_t* row = &simulation->schedule->rows[r];
  bool begun = false;
  for (uint32_t i = 0; i < row->count; ++i) {
    if (row->tasks[i].kind == JPP_TASK_IDLE) continue;
    ++*tasks;
    double start = simulation->starts[r][i], end = end_of(simulation, r, i);
    if (!begun || start < rank->begin) rank->begin = start;
    if (end > rank->end) rank->end = end;
    begun = true;
  }
}

static jpp_status_t* sum_rank(jpp_simulation_t* simulation, uint32_t r, uint32_t stages,
                              bool backward, jpp_arena_t* scratch,
                              jpp_simulated_rank_t* rank) {
  double peak = 0;
  find_ends(simulation, r, rank, &simulation->tasks);
  if (simulation->streams == 1) {
    sum_row(simulation, r, backward, rank, &peak);
  } else {
    JPP_RETURN_IF_ERROR(sum_busy(simulation, r, scratch, &rank->work));
  }
  if (simulation->streams > 1 || simulation->activations[r] != JPP_ACTIVATIONS_KEPT) {
    jpp_kept_event_t* events = NULL;
    uint32_t count = 0;
    JPP_RETURN_IF_ERROR(jpp__simulation_kept(simulation, r, scratch, &events, &count));
    peak = find_peak(events, count, &rank->peak_entry);
  }
  rank->peak = stages ? peak / stages : 0;
  return NULL;
}

jpp_status_t* jpp__simulation_sum(jpp_simulation_storage_t* storage,
                                  const jpp_simulate_options_t* options,
                                  const uint32_t* stages_of, double move,
                                  jpp_arena_t* scratch) {
  jpp_simulation_t* out = &storage->simulation;
  uint32_t count = out->schedule->ranks;
  jpp_simulated_rank_t* ranks = NULL;
  double* host_peaks = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&storage->arena, count, &ranks));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&storage->arena, count, &host_peaks));
  bool backward = has_backward(out);
  for (uint32_t r = 0; r < count; ++r) {
    JPP_RETURN_IF_ERROR(sum_rank(out, r, stages_of[r], backward, scratch, &ranks[r]));
    if (!out->moves[r]) continue;
    JPP_RETURN_IF_ERROR(find_host_peak(out, r, move, scratch, &host_peaks[r]));
    host_peaks[r] /= stages_of[r];
  }
  out->ranks = ranks;
  out->host_peaks = host_peaks;
  double most = 0, all = 0, longest = 0;
  for (uint32_t r = 0; r < out->schedule->ranks; ++r) {
    const jpp_simulated_rank_t* rank = &out->ranks[r];
    double waits = rank->end - rank->begin - rank->work;
    if (rank->end > out->makespan) out->makespan = rank->end;
    if (rank->work > most) most = rank->work;
    if (waits > out->bubble_span) out->bubble_span = waits;
    if (rank->end - rank->begin > longest) longest = rank->end - rank->begin;
    all += rank->work;
  }
  out->bubble_global = out->makespan - most;
  double capacity = out->makespan * out->schedule->ranks;
  out->utilisation = capacity > 0 ? all / capacity : 1;
  out->step = (options->optimizer_free ? longest : out->makespan) + options->optimizer;
  return NULL;
}
