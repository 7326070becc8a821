// Greedy: list scheduling under a memory limit. A rank that is free runs at once the most
// urgent of the tasks that can start.
//
// A forward of the c-th of a rank's v stages (in the order of the pipeline) starts only
// if it leaves room for one activation of each of the v - 1 - c later ones. Each stage
// takes its microbatches in order, so the oldest unfinished microbatch always finds room:
// no limit of at least v activations deadlocks.
#ifndef JPP_SEARCH_GREEDY_H_
#define JPP_SEARCH_GREEDY_H_

#include "schedule/schedule.h"

// What a stage's tasks of one microbatch take, in ticks; all at least 1.
typedef struct jpp_greedy_cost {
  uint32_t forward;
  uint32_t backward;  // of the inputs; with whole backwards: of both
  uint32_t weight;
} jpp_greedy_cost_t;

typedef struct jpp_greedy_options {
  const jpp_greedy_cost_t* costs;  // [stages]
  const uint32_t* limits;          // [ranks]: stage activations, at least one a stage
  bool split;                      // backwards in two parts
  bool forward_first;              // prefer forwards to backwards
  bool early_first;                // among forwards prefer the rank's earlier stages
  uint32_t link;                   // ticks from a task's end to a use on another rank
} jpp_greedy_options_t;

// Fills the draft's rows; its placement and sizes are set. O(tasks * (v + log ranks)).
jpp_status_t* jpp__schedule_greedy(const jpp_greedy_options_t* options,
                                   jpp_arena_t* scratch,
                                   jpp_schedule_draft_t* draft) JPP_MUST_USE;

#endif  // JPP_SEARCH_GREEDY_H_
