// Search: a schedule for stages with different costs, under a memory limit.
//
// Tries every built-in schedule of these sizes, then list schedules (greedy.h) over stage
// placements, limits and priorities, and improves the best one until the time is over.
// The result is proved and simulated, and never longer than the best built-in schedule
// that fits.
//
// Threads: any thread, several searches at once. A search stays on its caller's thread,
// and calls back on it.
#ifndef JAXPP_SEARCH_H_
#define JAXPP_SEARCH_H_

#include "jaxpp/simulate.h"

typedef struct jpp_search_progress {
  double seconds;   // since the start
  uint64_t tried;   // schedules
  double makespan;  // of the best so far
  double bound;     // no schedule is shorter
} jpp_search_progress_t;

typedef struct jpp_search_options {
  size_t struct_size;  // sizeof(jpp_search_options_t)
  uint32_t stages, ranks, microbatches;
  const jpp_cost_t* costs;    // [stages]
  double latency;             // from a task's end to a use on another rank
  uint64_t memory_limit;      // of a rank's activations, bytes; 0: none
  uint64_t activation_bytes;  // of one stage and microbatch; 0: 1
  double seconds;             // to search for, at least 0
  uint64_t seed;
  bool whole_backwards;  // no schedules with backwards in two parts
  // May be NULL. Says whether a schedule that would be the best so far is acceptable:
  // beside memory_limit, or in its place. From the caller's thread; its error ends the
  // search.
  jpp_status_t* (*accept)(void* context, const jpp_schedule_t* schedule,
                          bool* out_accept);
  // May be NULL. Called about once a second from the caller's thread; may not block.
  void (*progress)(void* context, const jpp_search_progress_t* progress);
  // May be NULL. Called many times a second from the caller's thread, between two
  // schedules; its error ends the search.
  jpp_status_t* (*poll)(void* context);
  void* context;  // of all three
} jpp_search_options_t;

typedef struct jpp_search_result {
  jpp_schedule_t* schedule;  // owned, jpp_schedule_destroy()
  double makespan;
  const char* built_in;      // the best built-in one that fits; NULL: none does
  double built_in_makespan;  // 0: none
  // The longest of: all work / ranks; a stage's work behind the forwards before it; a
  // microbatch's way through all stages and back.
  double bound;
  uint64_t tried;
} jpp_search_result_t;

// JPP_INVALID_ARGUMENT for sizes of 0, and for invalid costs, latency or seconds.
// JPP_OUT_OF_MEMORY when not even one microbatch at a time fits on the ranks, or nothing
// was acceptable.
JPP_API jpp_status_t* jpp_schedule_search(const jpp_search_options_t* options,
                                          jpp_search_result_t* out_result) JPP_MUST_USE;

#endif  // JAXPP_SEARCH_H_
