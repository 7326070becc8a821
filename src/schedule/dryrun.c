// The worklist of a dry run, allocated once and reset for each run.
#include "schedule/dryrun.h"

jpp_status_t* jpp__dry_run_create(uint32_t ranks, jpp_arena_t* scratch,
                                  jpp_dry_run_t* out_run) {
  *out_run = (jpp_dry_run_t){.ranks = ranks};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &out_run->done));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &out_run->worklist));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, ranks, &out_run->listed));
  jpp__dry_run_restart(out_run);
  return NULL;
}

void jpp__dry_run_restart(jpp_dry_run_t* run) {
  for (uint32_t r = run->ranks; r-- > 0;) {
    run->done[r] = 0;
    jpp__dry_run_wake(run, r);
  }
}
