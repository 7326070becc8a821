// Simulation: when every task of a schedule runs, and what that costs in time and memory.
//
// Each rank runs its list in order, one task at a time; a task starts when its rank is
// free and the results that it needs are there. A result from another rank is there
// `latency` after its channel has carried it; a channel (sender, receiver) carries one
// message at a time, in the order of the sender's list, for `transfer` each. Times have
// the unit of the costs.
//
// With several streams a rank runs that many tasks at once, and none slows another: the
// result is an upper bound on the gain from overlapping. Stream 0 takes forwards, whole
// backwards and input gradients; the others take weight gradients and the later members
// of FusedTasks (the second of a pair that overlaps), each on the stream that is free
// first, the lowest of these. Tasks of one stream run in the order of the list; a task
// waits for its stream and for what it needs, on its own rank too, but not for tasks
// before it in the list that run on other streams.
//
// Activations can wait for their backward on the host. A rank then has a link to the host
// and one back, and each carries the activations of one stage and microbatch at a time:
// out in the order of the list's forwards, as soon as each has ended; back in the order
// of its backwards, as soon as the device has room. Room is given out in the order of the
// list, to a forward for what it makes and to a backward for what comes back; a forward
// waits for room, a backward until its activations are back. The backward of the last
// stage follows its forward at once, so its activations stay, as in plans that offload
// (plan.h). Or they can be recomputed: a stage keeps its input only, and its forward runs
// again as part of its backward.
//
// Threads: any thread, several at once, also on the same schedule or simulation, which
// are only read; destroy a simulation when no thread reads it.
#ifndef JAXPP_SIMULATE_H_
#define JAXPP_SIMULATE_H_

#include "jaxpp/schedule.h"

// Where the activations of a stage and microbatch are between forward and backward.
typedef enum jpp_activations {
  JPP_ACTIVATIONS_KEPT,        // on the device
  JPP_ACTIVATIONS_OFFLOADED,   // on the host
  JPP_ACTIVATIONS_RECOMPUTED,  // nowhere, except for the stage's input
  JPP_ACTIVATIONS_COUNT,
} jpp_activations_t;

// "kept", "offloaded", "recomputed"; lifetime static. NULL for an unknown value.
JPP_API const char* jpp_activations_name(jpp_activations_t activations);

typedef struct jpp_simulate_options {
  size_t struct_size;             // sizeof(jpp_simulate_options_t)
  const jpp_cost_t* stage_costs;  // [stages]; NULL: rank_cost shared by a rank's stages
  jpp_cost_t rank_cost;           // of all stages of a rank together
  double latency;
  double transfer;   // bytes / bandwidth
  bool no_overlap;   // a rank (its stream) idles while it sends
  uint32_t streams;  // per rank, up to 64; 0: 1
  double optimizer;
  // Ranks update when their own gradients are ready, instead of all together; the next
  // step follows at once (post-validation, arXiv 2401.10241, section 4).
  bool optimizer_free;
  // Of the ranks that would keep more than the limit; all others keep theirs. Schedules
  // without backwards keep nothing.
  jpp_activations_t activations;
  uint64_t memory_limit;      // for the activations of a rank, bytes; 0: none, and
                              // `activations` is for all ranks
  uint64_t activation_bytes;  // of one stage and microbatch; 0: 1
  uint64_t input_bytes;       // of these, a stage's input
  double host_bandwidth;      // bytes per unit of time, each way; 0: moves take no time
} jpp_simulate_options_t;

typedef struct jpp_simulated_rank {
  double work;   // the time of its tasks; with several streams, the time during which at
                 // least one runs
  double begin;  // of its first task
  double end;    // of its last task
  // Largest number of microbatches whose activations it keeps on its device; a stage of a
  // rank with v stages counts 1 / v, and a BWD or BWD_W frees its activations. With
  // forwards only: 1 / v. Activations on their way to the host or back count as well;
  // recomputed ones count as the share of the stage's input until the backward starts.
  double peak;
  // Entry of the row: the task for which the peak is first reached.
  uint32_t peak_entry;
} jpp_simulated_rank_t;

typedef struct jpp_simulation {
  const jpp_schedule_t* schedule;     // borrowed
  const jpp_cost_t* stage_costs;      // [stages] with what is run again
  const jpp_simulated_rank_t* ranks;  // [ranks]
  const double* const* starts;        // [ranks][row count]; idle entries: the one before
  uint32_t streams;
  const uint8_t* const* stream_of;  // [ranks][row count]; NULL with one stream
  uint64_t tasks;
  double makespan;       // end of the last task
  double bubble_global;  // makespan minus the work of the busiest rank
  double bubble_span;    // the longest wait of a rank between its first and last task
  double utilisation;    // all work / (ranks * makespan)
  double step;  // time from step to step: makespan + optimizer or, with optimizer_free,
                // the longest time of a rank from begin to end + optimizer
  const jpp_activations_t* activations;  // [ranks]
  // [ranks] as `peak`, of what is on the host, or on its way there or back.
  const double* host_peaks;
  // [ranks][row count]; NULL for a rank that does not offload. When the activations of a
  // forward have arrived on the host, and when those of a BWD or BWD_I begin to come
  // back. The last stage's do not move.
  const double* const* moves;
} jpp_simulation_t;

// Fails as jpp_schedule_verify() does; JPP_INVALID_ARGUMENT for an invalid time, for
// input_bytes above activation_bytes and for too many streams; JPP_SCHEDULE_ERROR if
// a rank that offloads has no room for a task before its own later tasks make some. Time
// is linear in the tasks (with several streams, times their number, plus a sort); memory
// is 8 bytes per task besides the index.
JPP_API jpp_status_t* jpp_schedule_simulate(
    const jpp_schedule_t* schedule, const jpp_simulate_options_t* options,
    jpp_simulation_t** out_simulation) JPP_MUST_USE;
// The same stages as one SPMD program, in the form that `vmap` and a shift over a stage
// axis produce. All ranks run in lockstep: a turn takes as long as the slowest stage, and
// each stage passes a microbatch on at the end of the turn; if a rank has several stages,
// microbatches go round. While the pipeline fills and drains, ranks compute results that
// are not used. The backward pass is the loop's transpose, so all forwards come first.
typedef struct jpp_spmd_simulation {
  uint64_t turns;         // forward; the same number back
  double forward_turn;    // the time of one, including the transfer
  double backward_turn;   // including recomputation; 0 without backwards
  double makespan;        // turns * (forward_turn + backward_turn)
  double lost;            // part of the makespan: turns in which a rank's work is wasted
  double rematerialised;  // part of the makespan: recomputation
  double utilisation;     // all work of the schedule's tasks / (ranks * makespan)
  double peak;            // microbatches whose activations a rank keeps, one per turn; a
                          // rematerialised stage keeps only its inputs
} jpp_spmd_simulation_t;

// Uses the simulation's stages, ranks, microbatches and costs; `transfer` follows each
// turn. With `rematerialise`, a stage keeps only its input, and runs again for its
// backward. JPP_INVALID_ARGUMENT unless the simulation keeps all activations, every rank
// has the same number of stages and, if that is more than one, the number of microbatches
// is a multiple of the ranks.
JPP_API jpp_status_t* jpp_simulate_spmd(const jpp_simulation_t* simulation,
                                        double transfer, bool rematerialise,
                                        jpp_spmd_simulation_t* out_spmd) JPP_MUST_USE;

// Takes NULL.
JPP_API void jpp_simulation_destroy(jpp_simulation_t* simulation);

#endif  // JAXPP_SIMULATE_H_
