// Describes what the plan of a runtime requires of an argument.
#include <stdio.h>

#include "base/alloc.h"
#include "base/null.h"
#include "runtime/step/state.h"

// The lists of a jpp_wanted_t.
typedef struct wanted_lists {
  uint32_t* ranks;  // [ranks of the plan]
  bool* is_local;   // [ranks of the plan]
  int64_t* blocks;  // [devices_per_rank][ndim][2]
  char name[256];
} wanted_lists_t;

static jpp_status_t* list_wanted(const jpp_runtime_t* runtime, uint32_t arg,
                                 wanted_lists_t* lists, jpp_wanted_t* wanted) {
  const jpp_staged_t* staged = runtime->plan->staged;
  const jpp_staged_value_t* placed = &staged->args[arg];
  const jpp_type_t* type = &staged->values[placed->value].type;
  uint32_t ranks = runtime->plan->ranks, per_rank = runtime->devices_per_rank;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(ranks, &lists->ranks));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(ranks, &lists->is_local));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY((size_t)per_rank * type->ndim * 2, &lists->blocks));
  for (uint32_t i = 0; i < per_rank * type->ndim; ++i) {
    lists->blocks[2 * i + 1] = type->dims[i % type->ndim];
  }
  snprintf(lists->name, sizeof(lists->name), "argument %s", runtime->params.names[arg]);
  *wanted = (jpp_wanted_t){.struct_size = sizeof(*wanted),
                           .name = lists->name,
                           .dtype = type->dtype,
                           .ndim = type->ndim,
                           .devices = 1,
                           .ranks = lists->ranks,
                           .is_local = lists->is_local,
                           .devices_per_rank = per_rank,
                           .blocks = lists->blocks,
                           .donated = runtime->params.donated[arg],
                           .can_move = true,
                           .memory = type->memory};
  for (uint32_t r = 0; r < ranks; ++r) {
    if (!jpp_rank_set_has(placed->ranks, r)) continue;
    lists->is_local[wanted->num_ranks] = jpp__runtime_has_rank(runtime, r);
    lists->ranks[wanted->num_ranks++] = r;
  }
  return NULL;
}

jpp_status_t* jpp_runtime_take(jpp_runtime_t* runtime, uint32_t arg,
                               const int64_t* blocks, const jpp_source_t* source,
                               jpp_array_t** out_array) {
  JPP_RETURN_IF_NULL(runtime, source, out_array);
  *out_array = NULL;
  if (arg >= runtime->params.count) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected the number of an argument, below %u, found %u",
                           runtime->params.count, arg);
  }
  wanted_lists_t lists = {0};
  jpp_wanted_t wanted = {0};
  jpp_status_t* status = list_wanted(runtime, arg, &lists, &wanted);
  if (!status) {
    if (blocks) wanted.blocks = blocks;
    status =
        jpp_argument_take(&wanted, source, runtime->client, runtime->actors[0].devices,
                          runtime->plan->ranks * runtime->devices_per_rank, out_array);
  }
  if (wanted.num_ranks) {
    status = jpp_plan_explain_memory(runtime->plan, lists.ranks[0], status);
  }
  jpp_free(lists.ranks);
  jpp_free(lists.is_local);
  jpp_free(lists.blocks);
  return status;
}
