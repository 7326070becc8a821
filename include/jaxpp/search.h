// Search: a schedule for stages with different costs, under a memory limit.
//
// Tries every built-in schedule of these sizes, then list schedules (greedy.h) over stage
// placements, limits and priorities, and improves the best one until the time is up. The
// result is proved and simulated, and never longer than the best built-in schedule that
// fits.
//
// If the sizes that this takes are known, ranks on which a schedule's activations exceed
// the limit can leave theirs on the host or recompute them (simulate.h): every schedule
// is tried both ways, and the shortest one that fits wins.
//
// Threads: any thread, several searches at once. A search runs on its caller's thread and
// calls back on it.
#ifndef JAXPP_SEARCH_H_
#define JAXPP_SEARCH_H_

#include "jaxpp/simulate.h"

typedef struct jpp_search_progress {
  double seconds;   // since the start
  uint64_t tried;   // schedules tried
  double makespan;  // of the best schedule so far
  double bound;     // a lower bound of every schedule's makespan
} jpp_search_progress_t;

typedef struct jpp_search_options {
  size_t struct_size;  // sizeof(jpp_search_options_t)
  uint32_t stages, ranks, microbatches;
  const jpp_cost_t* costs;  // [stages]
  double latency;  // from the end of a task to the use of its result on another rank
  uint64_t memory_limit;      // for the activations of a rank, bytes; 0: none
  uint64_t activation_bytes;  // of one stage and microbatch; 0: 1
  double seconds;             // time limit, at least 0
  uint64_t seed;
  // Only schedules with whole backwards.
  bool whole_backwards;
  // Until `accept` accepts one, tries only schedules that do not depend on the costs: the
  // built-in ones, and those with the smallest limits under which a schedule can run,
  // which do little at once.
  bool smallest;
  // May be NULL. Decides whether a schedule that would be the best so far is acceptable,
  // in addition to memory_limit or instead of it. Called on the caller's thread; its
  // error ends the search.
  jpp_status_t* (*accept)(void* context, const jpp_schedule_t* schedule,
                          bool* out_accept);
  // May be NULL. Called about once a second on the caller's thread; may not block.
  void (*progress)(void* context, const jpp_search_progress_t* progress);
  // May be NULL. Called many times a second on the caller's thread, between two
  // schedules; its error ends the search.
  jpp_status_t* (*poll)(void* context);
  void* context;  // of all three callbacks
  // As in jpp_simulate_options_t. With 0, activations are not recomputed or, for the
  // bandwidth, not offloaded.
  uint64_t input_bytes;
  double host_bandwidth;
} jpp_search_options_t;

typedef struct jpp_search_result {
  jpp_schedule_t* schedule;  // owned, jpp_schedule_destroy()
  double makespan;
  const char* built_in;      // the best built-in schedule that fits; NULL: none fits
  double built_in_makespan;  // 0: none
  // The maximum of: all work divided by the ranks; a stage's work after the forwards
  // before it; a microbatch's path through all stages and back.
  double bound;
  uint64_t tried;
  // Of the ranks that would keep more than the limit; kept if there are none.
  jpp_activations_t activations;
  // From jpp_advise_search(): whether it fits only if ranks over their limits offload.
  bool offloads;
  // The shortest makespans found if all ranks keep their activations, and if those which
  // cannot offload or recompute them; 0: none fits, or not tried. `accept` is not asked.
  double makespans[JPP_ACTIVATIONS_COUNT];
} jpp_search_result_t;

// JPP_INVALID_ARGUMENT for sizes of 0, for invalid costs, latency, seconds or bandwidth,
// and for input_bytes above activation_bytes.
// JPP_OUT_OF_MEMORY if the limit does not even hold one microbatch at a time, or `accept`
// accepted no schedule.
JPP_API jpp_status_t* jpp_schedule_search(const jpp_search_options_t* options,
                                          jpp_search_result_t* out_result) JPP_MUST_USE;

#endif  // JAXPP_SEARCH_H_
