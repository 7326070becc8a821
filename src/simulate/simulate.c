// Simulates a schedule: the dry run of order.c with real costs, streams and transfers.
// Each task starts as early as its stream and its needs allow, which are final once it
// can run, so ranks can be advanced in any order, without an event queue.
#include "jaxpp/simulate.h"

#include "base/null.h"
#include "base/struct_size.h"
#include "schedule/channels.h"
#include "schedule/dryrun.h"
#include "schedule/order.h"
#include "simulate/offload.h"
#include "simulate/simulation.h"

// Instead of a time: the needed task has not run yet.
static const double kNotRun = -1;

typedef struct simulator {
  const jpp_simulate_options_t* options;
  const jpp_schedule_index_t* index;
  const jpp_schedule_t* schedule;
  const jpp_cost_t* costs;
  double** starts;      // [ranks][row count]
  double* free_at;      // [ranks][streams]
  uint8_t** stream_of;  // [ranks][row count]; NULL with one stream
  uint32_t streams;
  jpp_dry_run_t run;
  jpp_offload_t offload;
  // Used only if transfers take time:
  jpp_schedule_channels_t channels;
  double* channel_free;  // [channels]
  double* arrival[2];    // [stages][microbatches]
} simulator_t;

// When the result of another stage's task arrives at `rank`; kNotRun if it has not run.
static double need_time(const simulator_t* sim, jpp_task_slot_t slot, uint32_t stage,
                        uint32_t microbatch, uint32_t rank) {
  uint32_t entry = jpp__schedule_index_entry(sim->index, slot, stage, microbatch);
  uint32_t from = sim->schedule->stage_rank[stage];
  if (entry >= sim->run.done[from]) return kNotRun;
  if (from != rank && sim->arrival[0]) {
    return sim->arrival[slot][(size_t)stage * sim->schedule->microbatches + microbatch];
  }
  const jpp_cost_t* cost = &sim->costs[stage];
  double took = cost->forward;
  if (slot == JPP_SLOT_BWD) {
    bool split = sim->index->form[stage] == JPP_BACKWARD_SPLIT;
    took = split ? cost->backward : cost->backward + cost->weight;
  }
  double end = sim->starts[from][entry] + took;
  return from == rank ? end : end + sim->options->latency;
}

// When the task of the same stage that this one needs ends; kNotRun if it has not run.
// Both are in the same row, and with one stream the earlier one has ended.
static double own_time(const simulator_t* sim, uint32_t rank, uint32_t entry,
                       const jpp_schedule_task_t* task) {
  bool weight = task->kind == JPP_TASK_BWD_W;
  jpp_task_slot_t slot = weight ? JPP_SLOT_BWD : JPP_SLOT_FWD;
  uint32_t own =
      jpp__schedule_index_entry(sim->index, slot, task->stage, task->microbatch);
  if (own >= entry) return kNotRun;
  if (sim->streams == 1) return 0;
  const jpp_schedule_task_t* done = &sim->schedule->rows[rank].tasks[own];
  return sim->starts[rank][own] + jpp_task_cost(&sim->costs[done->stage], done->kind);
}

// When all needs of a task are met; kNotRun if one has not run.
static double ready_time(const simulator_t* sim, uint32_t rank, uint32_t entry,
                         const jpp_schedule_task_t* task) {
  uint32_t stage = task->stage, m = task->microbatch;
  if (task->kind == JPP_TASK_FWD) {
    return stage ? need_time(sim, JPP_SLOT_FWD, stage - 1, m, rank) : 0;
  }
  double own = own_time(sim, rank, entry, task);
  if (own == kNotRun || task->kind == JPP_TASK_BWD_W) return own;
  if (stage + 1 == sim->schedule->stages) return own;
  double after = need_time(sim, JPP_SLOT_BWD, stage + 1, m, rank);
  return after == kNotRun || after > own ? after : own;
}

static uint32_t choose_stream(const simulator_t* sim, uint32_t rank, uint32_t entry) {
  const jpp_schedule_task_t* tasks = sim->schedule->rows[rank].tasks;
  bool joined = entry && tasks[entry - 1].joins_next;
  if (sim->streams == 1 || (tasks[entry].kind != JPP_TASK_BWD_W && !joined)) return 0;
  const double* free_at = &sim->free_at[(size_t)rank * sim->streams];
  uint32_t first = 1;
  for (uint32_t s = 2; s < sim->streams; ++s) {
    if (free_at[s] < free_at[first]) first = s;
  }
  return first;
}

// Sends the result of a task; returns how long the stream is busy sending.
static double send_result(simulator_t* sim, uint32_t rank,
                          const jpp_schedule_task_t* task, double end) {
  if (task->kind == JPP_TASK_BWD_W) return 0;
  bool forward = task->kind == JPP_TASK_FWD;
  uint32_t next = jpp__schedule_next_stage(sim->schedule, task->stage, forward);
  uint32_t to = sim->schedule->stage_rank[next];
  if (to == rank) return 0;
  jpp__dry_run_wake(&sim->run, to);
  if (!sim->arrival[0]) return 0;
  const uint32_t* channels = forward ? sim->channels.forward : sim->channels.backward;
  double* channel_free = &sim->channel_free[channels[task->stage]];
  double sent = (end > *channel_free ? end : *channel_free) + sim->options->transfer;
  *channel_free = sent;
  size_t at = (size_t)task->stage * sim->schedule->microbatches + task->microbatch;
  sim->arrival[!forward][at] = sent + sim->options->latency;
  return sim->options->no_overlap ? sent - end : 0;
}

// Returns false if a need of the task has not run yet, or if it never has room.
static bool start_task(simulator_t* sim, uint32_t rank, uint32_t entry) {
  const jpp_schedule_task_t* task = &sim->schedule->rows[rank].tasks[entry];
  double* free_at = &sim->free_at[(size_t)rank * sim->streams];
  double start = *free_at;
  if (task->kind != JPP_TASK_IDLE) {
    double ready = ready_time(sim, rank, entry, task);
    if (ready == kNotRun) return false;
    bool offloads = sim->offload.moves[rank];
    double room = 0;
    if (offloads && !jpp__offload_start(&sim->offload, rank, entry, &room)) return false;
    if (room > ready) ready = room;
    uint32_t stream = choose_stream(sim, rank, entry);
    start = free_at[stream] > ready ? free_at[stream] : ready;
    double end = start + jpp_task_cost(&sim->costs[task->stage], task->kind);
    free_at[stream] = end + send_result(sim, rank, task, end);
    if (offloads) jpp__offload_end(&sim->offload, rank, entry, end);
    if (sim->stream_of) sim->stream_of[rank][entry] = (uint8_t)stream;
  }
  sim->starts[rank][entry] = start;
  return true;
}

// Gives every task its start. If the schedule deadlocks, a second dry run without times
// produces the error.
static jpp_status_t* simulate_tasks(simulator_t* sim, jpp_arena_t* scratch) {
  for (uint32_t rank; (rank = jpp__dry_run_take(&sim->run)) != JPP_NONE;) {
    uint32_t count = sim->schedule->rows[rank].count;
    uint32_t* done = &sim->run.done[rank];
    while (*done < count && start_task(sim, rank, *done)) ++*done;
  }
  if (sim->offload.full) return jpp__offload_refuse(&sim->offload);
  for (uint32_t r = 0; r < sim->schedule->ranks; ++r) {
    if (sim->run.done[r] == sim->schedule->rows[r].count) continue;
    jpp_schedule_order_t order = {.index = sim->index};
    return jpp__schedule_order_run(&order, scratch);
  }
  return NULL;
}

// --- Setting up -----------------------------------------------------------------------

static jpp_status_t* prepare_streams(simulator_t* sim, jpp_arena_t* arena,
                                     jpp_arena_t* scratch) {
  const jpp_schedule_t* schedule = sim->schedule;
  size_t streams = (size_t)schedule->ranks * sim->streams;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, streams, &sim->free_at));
  if (sim->streams == 1) return NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, schedule->ranks, &sim->stream_of));
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    JPP_RETURN_IF_ERROR(
        JPP_ARENA_ARRAY(arena, schedule->rows[r].count, &sim->stream_of[r]));
  }
  return NULL;
}

static jpp_status_t* prepare_simulator(simulator_t* sim, jpp_arena_t* arena,
                                       jpp_arena_t* scratch) {
  const jpp_schedule_t* schedule = sim->schedule;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, schedule->ranks, &sim->starts));
  for (uint32_t r = 0; r < schedule->ranks; ++r) {
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, schedule->rows[r].count, &sim->starts[r]));
  }
  JPP_RETURN_IF_ERROR(jpp__dry_run_create(schedule->ranks, scratch, &sim->run));
  JPP_RETURN_IF_ERROR(prepare_streams(sim, arena, scratch));
  if (!(sim->options->transfer > 0)) return NULL;
  size_t pairs = (size_t)sim->schedule->stages * sim->schedule->microbatches;
  for (uint32_t way = 0; way < 2; ++way) {
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, pairs, &sim->arrival[way]));
  }
  jpp_schedule_channels_t* channels = &sim->channels;
  JPP_RETURN_IF_ERROR(jpp__schedule_channels_create(sim->schedule, scratch, channels));
  return JPP_ARENA_ARRAY(scratch, channels->count, &sim->channel_free);
}

enum { kMostStreams = 64 };

bool jpp__simulation_takes(double time) {
  return time == 0 || (time >= JPP_SHORTEST_TIME && time <= JPP_LONGEST_TIME);
}

jpp_status_t* jpp__simulation_check_costs(const jpp_cost_t* costs, uint32_t stages) {
  for (uint32_t s = 0; s < stages; ++s) {
    const jpp_cost_t* cost = &costs[s];
    if (jpp__simulation_takes(cost->forward) && jpp__simulation_takes(cost->backward) &&
        jpp__simulation_takes(cost->weight)) {
      continue;
    }
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "stage %u: costs are numbers of at least 0, and of %g to %g "
                           "where they are not 0, found %g,%g,%g",
                           s, JPP_SHORTEST_TIME, JPP_LONGEST_TIME, cost->forward,
                           cost->backward, cost->weight);
  }
  return NULL;
}

static jpp_status_t* check_simulate_options(const jpp_simulate_options_t* options) {
  if (options->streams > kMostStreams) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected at most %d streams a rank, found %u", kMostStreams,
                           options->streams);
  }
  if (jpp__simulation_takes(options->latency) &&
      jpp__simulation_takes(options->transfer) &&
      jpp__simulation_takes(options->optimizer)) {
    return NULL;
  }
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "latency, transfer and optimizer are numbers of at least 0, and "
                         "of %g to %g where they are not 0, found %g, %g and %g",
                         JPP_SHORTEST_TIME, JPP_LONGEST_TIME, options->latency,
                         options->transfer, options->optimizer);
}

static jpp_status_t* fill_costs(const jpp_schedule_t* schedule,
                                const jpp_simulate_options_t* options, jpp_arena_t* arena,
                                const uint32_t* stages_of, jpp_cost_t** out_costs) {
  jpp_cost_t* costs = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, schedule->stages, &costs));
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    if (options->stage_costs) {
      costs[s] = options->stage_costs[s];
      continue;
    }
    double share = stages_of[schedule->stage_rank[s]];
    const jpp_cost_t* whole = &options->rank_cost;
    costs[s] = (jpp_cost_t){whole->forward / share, whole->backward / share,
                            whole->weight / share};
  }
  *out_costs = costs;
  JPP_RETURN_IF_ERROR(check_simulate_options(options));
  return jpp__simulation_check_costs(costs, schedule->stages);
}

// A backward begins with the forward that it runs again.
static void add_recomputation(const jpp_schedule_t* schedule,
                              const jpp_activations_t* activations, jpp_cost_t* costs) {
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    if (activations[schedule->stage_rank[s]] != JPP_ACTIVATIONS_RECOMPUTED) continue;
    costs[s].backward += costs[s].forward;
  }
}

static jpp_status_t* simulate_into(const jpp_schedule_t* schedule,
                                   const jpp_simulate_options_t* options,
                                   jpp_arena_t* scratch,
                                   jpp_simulation_storage_t* storage) {
  jpp_simulation_t* out = &storage->simulation;
  uint32_t* stages_of = NULL;
  jpp_cost_t* costs = NULL;
  jpp_schedule_index_t index;
  JPP_RETURN_IF_ERROR(jpp__schedule_index_create(schedule, scratch, &index));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &stages_of));
  for (uint32_t s = 0; s < schedule->stages; ++s) ++stages_of[schedule->stage_rank[s]];
  out->schedule = schedule;
  storage->has_backward = index.has_backward;
  uint64_t bytes = options->activation_bytes ? options->activation_bytes : 1;
  storage->input_share = (double)options->input_bytes / (double)bytes;
  JPP_RETURN_IF_ERROR(fill_costs(schedule, options, &storage->arena, stages_of, &costs));
  simulator_t sim = {.options = options,
                     .index = &index,
                     .schedule = schedule,
                     .costs = costs,
                     .streams = options->streams ? options->streams : 1};
  JPP_RETURN_IF_ERROR(
      jpp__offload_create(&index, options, &storage->arena, scratch, &sim.offload));
  add_recomputation(schedule, sim.offload.activations, costs);
  JPP_RETURN_IF_ERROR(prepare_simulator(&sim, &storage->arena, scratch));
  JPP_RETURN_IF_ERROR(simulate_tasks(&sim, scratch));
  out->stage_costs = costs;
  out->activations = sim.offload.activations;
  out->moves = (const double* const*)sim.offload.moves;
  out->starts = (const double* const*)sim.starts;
  out->streams = sim.streams;
  out->stream_of = (const uint8_t* const*)sim.stream_of;
  return jpp__simulation_sum(storage, options, stages_of, sim.offload.move, scratch);
}

jpp_status_t* jpp_schedule_simulate(const jpp_schedule_t* schedule,
                                    const jpp_simulate_options_t* options,
                                    jpp_simulation_t** out_simulation) {
  JPP_RETURN_IF_NULL(schedule, options, out_simulation);
  *out_simulation = NULL;
  jpp_simulate_options_t full;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_simulate_options_t, host_bandwidth, options, &full));
  jpp_simulation_storage_t* storage = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = simulate_into(schedule, &full, &scratch, storage);
  jpp__arena_deinit(&scratch);
  if (status) {
    jpp_simulation_destroy(&storage->simulation);
    return status;
  }
  *out_simulation = &storage->simulation;
  return NULL;
}

void jpp_simulation_destroy(jpp_simulation_t* simulation) {
  if (!simulation) return;
  jpp_simulation_storage_t* storage = (jpp_simulation_storage_t*)simulation;
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage);
}
