// Makes the schedules of a trial: a step whose loops have no schedule yet runs under them
// so that its stages can be measured. A search needs costs, and costs need a run.
#include "base/alloc.h"
#include "base/null.h"
#include "jaxpp/advise.h"

static uint32_t count_marks(const jpp_graph_t* graph, const jpp_loop_t* loop) {
  uint32_t marks = 0;
  for (uint32_t op = loop->first_op; op < loop->op; ++op) {
    marks += graph->ops[op].kind == JPP_OP_MARK;
  }
  return marks;
}

// The stages run one after the other, so that no other task competes with a running one.
static jpp_status_t* make_placeholder(const jpp_graph_t* graph, uint32_t loop,
                                      uint32_t ranks, jpp_schedule_t** out_schedule) {
  const jpp_loop_t* of = &graph->loops[loop];
  jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                  .stages = count_marks(graph, of),
                                  .ranks = ranks,
                                  .microbatches = of->microbatches};
  if (params.stages) return jpp_schedule_one_pass(&params, true, out_schedule);
  return jpp_status_make(
      JPP_MARKS_ERROR,
      "loop at %s: Auto: expected a stage mark at the end of each stage "
      "(mark_stage_end), found none",
      of->where ? of->where : "?");
}

jpp_status_t* jpp_advise_placeholders(const jpp_graph_t* graph, uint32_t ranks,
                                      const jpp_schedule_t* const* given, uint32_t loops,
                                      jpp_schedule_t** out_made) {
  JPP_RETURN_IF_NULL(graph, out_made);
  JPP_RETURN_IF_ERROR(
      jpp__check_count("the schedules of the loops", graph->num_loops, loops));
  for (uint32_t l = 0; l < loops; ++l) out_made[l] = NULL;
  for (uint32_t l = 0; l < loops; ++l) {
    if (given && given[l]) continue;
    jpp_status_t* status = make_placeholder(graph, l, ranks, &out_made[l]);
    if (!status) continue;
    for (uint32_t made = 0; made < l; ++made) {
      jpp_schedule_destroy(out_made[made]);
      out_made[made] = NULL;
    }
    return status;
  }
  return NULL;
}
