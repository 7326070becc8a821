// Greedy: list scheduling under a memory limit. A free rank immediately runs the most
// urgent task that can start.
//
// A forward of the c-th of a rank's v stages (in pipeline order) starts only if it leaves
// room for one activation of each of the v - 1 - c later stages. Each stage takes its
// microbatches in order, so the oldest unfinished microbatch always has room: no limit of
// at least v activations deadlocks.
#ifndef JPP_SEARCH_GREEDY_H_
#define JPP_SEARCH_GREEDY_H_

#include "schedule/schedule.h"

// The costs of a stage's tasks for one microbatch, in ticks; all at least 1.
typedef struct jpp_greedy_cost {
  uint32_t forward;
  uint32_t backward;  // of the input gradients; with whole backwards, of both
  uint32_t weight;
} jpp_greedy_cost_t;

typedef struct jpp_greedy_options {
  const jpp_greedy_cost_t* costs;  // [stages]
  const uint32_t* limits;  // [ranks] limits on stage activations, at least one per stage
  bool split;              // backwards are split
  // The largest number of weight gradients that a rank puts off, at least 1: activations
  // that wait for them stay on the device.
  uint32_t most_pending;
  bool forward_first;  // prefer forwards to backwards
  bool early_first;    // among forwards prefer the rank's earlier stages
  uint32_t link;  // ticks from the end of a task to the use of its result on another rank
} jpp_greedy_options_t;

// Fills in the draft's rows; its placement and sizes are already set. O(tasks * (v + log
// ranks)).
jpp_status_t* jpp__schedule_greedy(const jpp_greedy_options_t* options,
                                   jpp_arena_t* scratch,
                                   jpp_schedule_draft_t* draft) JPP_MUST_USE;

#endif  // JPP_SEARCH_GREEDY_H_
