// The sequential schedule: microbatch after microbatch, each forward through all stages
// and then back. Its uses are a single pass through a model, and measuring each stage
// alone.
#include "base/null.h"
#include "base/struct_size.h"
#include "jaxpp/schedule.h"

typedef struct one_pass {
  uint32_t stages, ranks, microbatches;
  bool split_backward;
  uint32_t rank;      // the rank whose row is being written; JPP_NONE before the first
  uint32_t position;  // position in that row
} one_pass_t;

static jpp_task_kind_t backward_kind(const one_pass_t* pass, uint32_t which) {
  if (!pass->split_backward) return JPP_TASK_BWD;
  return which == 0 ? JPP_TASK_BWD_I : JPP_TASK_BWD_W;
}

// For each microbatch, a rank runs the forwards of its stages in ascending order, then
// each kind of backward of the same stages in descending order.
static bool write_next(void* context, uint32_t rank, jpp_schedule_task_t* out_task) {
  one_pass_t* pass = context;
  if (rank >= pass->stages) return false;
  if (rank != pass->rank) {
    pass->rank = rank;
    pass->position = 0;
  }
  uint32_t own = (pass->stages - rank - 1) / pass->ranks + 1;
  uint32_t sweeps = pass->split_backward ? 3 : 2;
  uint32_t sweep = pass->position / own % sweeps;
  uint32_t microbatch = pass->position / own / sweeps;
  uint32_t index = pass->position % own;
  if (microbatch == pass->microbatches) return false;
  ++pass->position;
  *out_task = (jpp_schedule_task_t){
      .kind = sweep ? backward_kind(pass, sweep - 1) : JPP_TASK_FWD,
      .stage = rank + (sweep ? own - 1 - index : index) * pass->ranks,
      .microbatch = microbatch};
  return true;
}

jpp_status_t* jpp_schedule_one_pass(const jpp_schedule_params_t* params,
                                    bool split_backward, jpp_schedule_t** out_schedule) {
  JPP_RETURN_IF_NULL(params, out_schedule);
  *out_schedule = NULL;
  jpp_schedule_params_t full;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_schedule_params_t, fuse_steady_state, params, &full));
  params = &full;
  one_pass_t pass = {.stages = params->stages,
                     .ranks = params->ranks,
                     .microbatches = params->microbatches,
                     .split_backward = split_backward,
                     .rank = JPP_NONE};
  jpp_schedule_rows_t rows = {.name = "OnePass",
                              .stages = params->stages,
                              .ranks = params->ranks,
                              .microbatches = params->microbatches};
  return jpp_schedule_from_callback(&rows, write_next, &pass, out_schedule);
}
