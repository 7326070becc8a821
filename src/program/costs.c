// The costs of a step that are known before it runs: tasks, operations, memory, messages.
#include <stdio.h>
#include <stdlib.h>

#include "base/null.h"
#include "base/str.h"
#include "base/vec.h"
#include "jaxpp/program.h"

// Adds the tasks of a program to `rank`, and the bytes of its messages to `links`, by
// channel.
static void count_program(const jpp_plan_t* plan, const jpp_program_t* program,
                          jpp_rank_costs_t* rank, jpp_link_costs_t* links) {
  rank->peak_bytes = program->peak_bytes;
  rank->peak_host_bytes = program->peak_host_bytes;
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* instr = &program->instrs[i];
    if (instr->kind == JPP_INSTR_RUN) {
      const jpp_task_t* task = &plan->staged->tasks[instr->target];
      rank->tasks += task->num_ops != 0;  // others are skipped
      rank->flops += task->cost;
    } else if (instr->kind == JPP_INSTR_SEND) {
      uint32_t value = program->operand_values[instr->first_value];
      links[instr->target].bytes += plan->value_bytes[value];
    }
  }
}

static int compare_links(const void* a, const void* b) {
  const jpp_link_costs_t *left = a, *right = b;
  if (left->src != right->src) return left->src < right->src ? -1 : 1;
  return (left->dst > right->dst) - (left->dst < right->dst);
}

// Merges the channels between the same two ranks. Returns the number of links that
// remain.
static uint32_t merge_links(jpp_link_costs_t* links, uint32_t count) {
  uint32_t merged = 0;
  qsort(links, count, sizeof(*links), compare_links);
  for (uint32_t i = 0; i < count; ++i) {
    if (merged && compare_links(&links[merged - 1], &links[i]) == 0) {
      links[merged - 1].messages += links[i].messages;
      links[merged - 1].bytes += links[i].bytes;
    } else {
      links[merged++] = links[i];
    }
  }
  return merged;
}

typedef struct costs_storage {
  jpp_plan_costs_t costs;  // first member: the caller's struct
  jpp_arena_t arena;
  JPP_VEC(jpp_collective_costs_t) collectives;
} costs_storage_t;

static jpp_status_t* count_plan(const jpp_plan_t* plan, costs_storage_t* storage) {
  jpp_rank_costs_t* ranks = NULL;
  jpp_link_costs_t* links = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&storage->arena, plan->ranks, &ranks));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&storage->arena, plan->num_channels, &links));
  for (uint32_t c = 0; c < plan->num_channels; ++c) {
    const jpp_plan_channel_t* channel = &plan->channels[c];
    links[c] = (jpp_link_costs_t){
        .src = channel->src, .dst = channel->dst, .messages = channel->messages};
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    count_program(plan, &plan->programs[r], &ranks[r], links);
  }
  storage->costs = (jpp_plan_costs_t){.num_ranks = plan->ranks,
                                      .num_links = merge_links(links, plan->num_channels),
                                      .ranks = ranks,
                                      .links = links};
  return NULL;
}

jpp_status_t* jpp_plan_costs(const jpp_plan_t* plan, jpp_plan_costs_t** out_costs) {
  JPP_RETURN_IF_NULL(plan, out_costs);
  *out_costs = NULL;
  costs_storage_t* storage = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  jpp__arena_init(&storage->arena);
  jpp_status_t* status = count_plan(plan, storage);
  if (status) {
    jpp_plan_costs_destroy(&storage->costs);
    return status;
  }
  *out_costs = &storage->costs;
  return NULL;
}

jpp_status_t* jpp_plan_costs_add_collective(jpp_plan_costs_t* costs,
                                            const jpp_collective_costs_t* collective) {
  JPP_RETURN_IF_NULL(costs, collective);
  JPP_RETURN_IF_NULL(collective->task, collective->kind, collective->axes);
  if (collective->rank >= costs->num_ranks) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "rank %u: expected one below %u",
                           collective->rank, costs->num_ranks);
  }
  costs_storage_t* storage = (costs_storage_t*)costs;
  jpp_arena_t* arena = &storage->arena;
  jpp_collective_costs_t row = *collective;
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(arena, collective->task, &row.task));
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(arena, collective->kind, &row.kind));
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(arena, collective->axes, &row.axes));
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&storage->collectives, row));
  jpp_collective_costs_t* rows = storage->collectives.data;
  size_t at = storage->collectives.count - 1;
  for (; at > 0 && rows[at - 1].rank > row.rank; --at) rows[at] = rows[at - 1];
  rows[at] = row;
  costs->collectives = rows;
  costs->num_collectives = (uint32_t)storage->collectives.count;
  return NULL;
}

void jpp_plan_costs_destroy(jpp_plan_costs_t* costs) {
  if (!costs) return;
  costs_storage_t* storage = (costs_storage_t*)costs;
  jpp_vec_deinit(&storage->collectives);
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage);
}

static void append_collectives(jpp_str_t* str, const jpp_plan_costs_t* costs) {
  if (!costs->num_collectives) return;
  jpp_str_append(str,
                 "\nrank task                 collective           axes            times"
                 "        bytes\n");
  for (uint32_t c = 0; c < costs->num_collectives; ++c) {
    const jpp_collective_costs_t* row = &costs->collectives[c];
    jpp_str_appendf(str, "%4u %-20s %-20s %-12s %8llu %12llu\n", row->rank, row->task,
                    row->kind, row->axes, (unsigned long long)row->times,
                    (unsigned long long)row->bytes);
  }
}

jpp_status_t* jpp_plan_costs_print(const jpp_plan_costs_t* costs, char** out_text) {
  JPP_RETURN_IF_NULL(costs, out_text);
  jpp_str_t str = {0};
  bool host = false;
  for (uint32_t r = 0; r < costs->num_ranks; ++r) {
    host = host || costs->ranks[r].peak_host_bytes;
  }
  jpp_str_append(&str, "rank   tasks      FLOPs   peak bytes");
  jpp_str_append(&str, host ? "  pinned_host\n" : "\n");
  for (uint32_t r = 0; r < costs->num_ranks; ++r) {
    const jpp_rank_costs_t* rank = &costs->ranks[r];
    jpp_str_appendf(&str, "%4u %7u %10.3g %12llu", r, rank->tasks, rank->flops,
                    (unsigned long long)rank->peak_bytes);
    if (host) {
      jpp_str_appendf(&str, " %12llu", (unsigned long long)rank->peak_host_bytes);
    }
    jpp_str_append(&str, "\n");
  }
  if (costs->num_links) jpp_str_append(&str, "\n    link  messages        bytes\n");
  for (uint32_t l = 0; l < costs->num_links; ++l) {
    const jpp_link_costs_t* link = &costs->links[l];
    char ends[32];
    snprintf(ends, sizeof(ends), "%u -> %u", link->src, link->dst);
    jpp_str_appendf(&str, "%8s %9llu %12llu\n", ends, (unsigned long long)link->messages,
                    (unsigned long long)link->bytes);
  }
  append_collectives(&str, costs);
  return jpp_str_finish(&str, out_text);
}
