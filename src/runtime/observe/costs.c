// The costs of a plan that are known once its tasks are compiled.
#include "base/null.h"
#include "jaxpp/runtime.h"

static jpp_status_t* add_collective(jpp_plan_costs_t* costs, const jpp_plan_t* plan,
                                    uint32_t task, const jpp_collective_t* collective,
                                    uint32_t num_axes, const char* const* names,
                                    const uint32_t* sizes) {
  char* axes = NULL;
  JPP_RETURN_IF_ERROR(jpp_collective_axes(collective, num_axes, names, sizes, &axes));
  const uint64_t runs = plan->bindings[task].runs;
  jpp_collective_costs_t row = {.rank = plan->staged->tasks[task].rank,
                                .task = plan->staged->tasks[task].name,
                                .kind = jpp_collective_kind_name(collective->kind),
                                .axes = axes,
                                .times = collective->times * runs,
                                .bytes = collective->bytes * runs};
  jpp_status_t* status = NULL;
  // Without axes, the group is one device, which sends nothing.
  if (*axes) status = jpp_plan_costs_add_collective(costs, &row);
  jpp_text_free(axes);
  return status;
}

jpp_status_t* jpp_plan_costs_add_compiled(jpp_plan_costs_t* costs, const jpp_plan_t* plan,
                                          jpp_client_t* client,
                                          const jpp_task_executable_t* executables,
                                          uint32_t num_axes, const char* const* names,
                                          const uint32_t* sizes) {
  JPP_RETURN_IF_NULL(costs, plan, client, executables);
  JPP_RETURN_IF_NULL(names, sizes);
  for (uint32_t t = 0; t < plan->staged->num_tasks; ++t) {
    const uint32_t* own = sizes + (size_t)plan->staged->tasks[t].rank * num_axes;
    uint64_t devices = 1;
    for (uint32_t a = 0; a < num_axes; ++a) devices *= own[a];
    // One device has no collectives; skips reading its program.
    if (!executables[t].executable || devices == 1) continue;
    jpp_collectives_t* found = NULL;
    jpp_status_t* status =
        jpp_client_executable_collectives(client, executables[t].executable, &found);
    if (jpp_status_code(status) == JPP_UNSUPPORTED) {
      jpp_status_free(status);
      continue;
    }
    for (uint32_t c = 0; !status && c < found->count; ++c) {
      status = add_collective(costs, plan, t, &found->each[c], num_axes, names, own);
    }
    jpp_collectives_destroy(found);
    JPP_RETURN_IF_ERROR(status);
  }
  return NULL;
}

// The largest temporary memory of the rank's tasks, and the size of all their code.
static jpp_status_t* measure_tasks(const jpp_plan_t* plan, uint32_t rank,
                                   jpp_client_t* client,
                                   const jpp_task_executable_t* executables,
                                   jpp_rank_memory_t* out_memory) {
  for (uint32_t t = 0; t < plan->staged->num_tasks; ++t) {
    jpp_executable_t* executable = executables[t].executable;
    if (plan->staged->tasks[t].rank != rank || !executable) continue;
    jpp_executable_memory_t memory = {0};
    jpp_status_t* status = jpp_client_executable_memory(client, executable, &memory);
    if (jpp_status_code(status) == JPP_UNSUPPORTED) {
      jpp_status_free(status);
      continue;
    }
    JPP_RETURN_IF_ERROR(status);
    if (memory.temporary > out_memory->temporary) {
      out_memory->temporary = memory.temporary;
    }
    bool counted = false;  // tasks may share an executable
    for (uint32_t before = 0; before < t && !counted; ++before) {
      counted = plan->staged->tasks[before].rank == rank &&
                executables[before].executable == executable;
    }
    if (!counted) out_memory->code += memory.code;
  }
  return NULL;
}

static void count_ends(const jpp_plan_t* plan, uint32_t rank, jpp_rank_memory_t* memory) {
  const jpp_staged_t* staged = plan->staged;
  for (uint32_t a = 0; a < staged->graph->num_args; ++a) {
    if (!jpp_rank_set_has(staged->args[a].ranks, rank)) continue;
    uint32_t value = staged->args[a].value;
    bool host = staged->values[value].type.memory == JPP_MEMORY_PINNED_HOST;
    uint64_t bytes = plan->value_bytes[value];
    *(host ? &memory->host_arguments : &memory->arguments) += bytes;
    if (!staged->graph->args[a].donated) continue;
    *(host ? &memory->host_donated : &memory->donated) += bytes;
  }
  for (uint32_t o = 0; o < staged->graph->num_outputs; ++o) {
    if (!jpp_rank_set_has(staged->outputs[o].ranks, rank)) continue;
    uint32_t value = staged->outputs[o].value;
    bool host = staged->values[value].type.memory == JPP_MEMORY_PINNED_HOST;
    *(host ? &memory->host_results : &memory->results) += plan->value_bytes[value];
  }
}

// The part of the peak other than arguments and results that are not donated memory.
static uint64_t rest_of_peak(uint64_t peak, uint64_t arguments, uint64_t results,
                             uint64_t donated) {
  uint64_t held = arguments + (results > donated ? results - donated : 0);
  return peak > held ? peak - held : 0;
}

jpp_status_t* jpp_plan_rank_memory(const jpp_plan_t* plan, uint32_t rank,
                                   jpp_client_t* client,
                                   const jpp_task_executable_t* executables,
                                   jpp_rank_memory_t* out_memory) {
  JPP_RETURN_IF_NULL(plan, client, executables, out_memory);
  *out_memory = (jpp_rank_memory_t){0};
  if (rank >= plan->ranks) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "rank %u: expected one below %u", rank,
                           plan->ranks);
  }
  count_ends(plan, rank, out_memory);
  JPP_RETURN_IF_ERROR(measure_tasks(plan, rank, client, executables, out_memory));
  jpp_rank_memory_t* m = out_memory;
  m->peak = plan->programs[rank].peak_bytes + m->temporary;
  m->temporary = rest_of_peak(m->peak, m->arguments, m->results, m->donated);
  m->host_peak = plan->programs[rank].peak_host_bytes;
  m->host_temporary =
      rest_of_peak(m->host_peak, m->host_arguments, m->host_results, m->host_donated);
  return NULL;
}
