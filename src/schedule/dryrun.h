// The skeleton of a dry run. Each rank runs its list in order until it has to wait, and
// wakes the ranks that may be waiting for its results:
//
//   for (uint32_t rank; (rank = jpp__dry_run_take(&run)) != JPP_NONE;) {
//     // Run what can run from run.done[rank] on, and wake others.
//   }
//
// At the end, a rank whose list is not done is stuck for ever. This requires that no
// action of a rank can block another rank's action: then the outcome does not depend on
// the order in which ranks are taken.
#ifndef JPP_SCHEDULE_DRYRUN_H_
#define JPP_SCHEDULE_DRYRUN_H_

#include "base/arena.h"
#include "jaxpp/task.h"

typedef struct jpp_dry_run {
  uint32_t ranks;
  // [ranks] entries of the rank's list that have run.
  uint32_t* done;
  // A stack of ranks to visit, each at most once.
  uint32_t* worklist;  // [ranks]
  bool* listed;        // [ranks]
  uint32_t num_listed;
} jpp_dry_run_t;

// Allocates in `scratch`. Initially, no entry has run and all ranks are listed.
jpp_status_t* jpp__dry_run_create(uint32_t ranks, jpp_arena_t* scratch,
                                  jpp_dry_run_t* out_run) JPP_MUST_USE;
void jpp__dry_run_restart(jpp_dry_run_t* run);

static inline void jpp__dry_run_wake(jpp_dry_run_t* run, uint32_t rank) {
  if (run->listed[rank]) return;
  run->listed[rank] = true;
  run->worklist[run->num_listed++] = rank;
}

// Takes a rank off the worklist; JPP_NONE when it is empty.
static inline uint32_t jpp__dry_run_take(jpp_dry_run_t* run) {
  if (!run->num_listed) return JPP_NONE;
  uint32_t rank = run->worklist[--run->num_listed];
  run->listed[rank] = false;
  return rank;
}

#endif  // JPP_SCHEDULE_DRYRUN_H_
