// The costs of a step that are known before it runs: tasks, operations, memory, messages.
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/null.h"
#include "base/str.h"
#include "jaxpp/program.h"

// Counts tasks of a rank in `rank` and bytes of its messages in `links`, by channel.
static void count_program(const jpp_plan_t* plan, const jpp_program_t* program,
                          jpp_rank_costs_t* rank, jpp_link_costs_t* links) {
  rank->peak_bytes = program->peak_bytes;
  for (uint32_t i = 0; i < program->num_instrs; ++i) {
    const jpp_instr_t* instr = &program->instrs[i];
    if (instr->kind == JPP_INSTR_RUN) {
      ++rank->tasks;
      rank->flops += plan->staged->tasks[instr->target].cost;
    } else if (instr->kind == JPP_INSTR_SEND) {
      uint32_t value = program->operand_values[instr->first_operand];
      links[instr->target].bytes += plan->value_bytes[value];
    }
  }
}

static int compare_links(const void* a, const void* b) {
  const jpp_link_costs_t *left = a, *right = b;
  if (left->src != right->src) return left->src < right->src ? -1 : 1;
  return (left->dst > right->dst) - (left->dst < right->dst);
}

// Two ranks can have several channels. Returns the number of links that remain.
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

jpp_status_t* jpp_plan_costs(const jpp_plan_t* plan, jpp_plan_costs_t** out_costs) {
  JPP_RETURN_IF_NULL(plan, out_costs);
  *out_costs = NULL;
  jpp_plan_costs_t* costs = NULL;
  jpp_rank_costs_t* ranks = NULL;
  jpp_link_costs_t* links = NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(1, &costs);
  if (!status) status = JPP_ALLOC_ARRAY(plan->ranks, &ranks);
  if (!status) status = JPP_ALLOC_ARRAY(plan->num_channels, &links);
  if (status) {
    jpp_free(ranks);
    jpp_free(costs);
    return status;
  }
  for (uint32_t c = 0; c < plan->num_channels; ++c) {
    const jpp_plan_channel_t* channel = &plan->channels[c];
    links[c] = (jpp_link_costs_t){
        .src = channel->src, .dst = channel->dst, .messages = channel->messages};
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    count_program(plan, &plan->programs[r], &ranks[r], links);
  }
  *costs = (jpp_plan_costs_t){.num_ranks = plan->ranks,
                              .num_links = merge_links(links, plan->num_channels),
                              .ranks = ranks,
                              .links = links};
  *out_costs = costs;
  return NULL;
}

void jpp_plan_costs_destroy(jpp_plan_costs_t* costs) {
  if (!costs) return;
  jpp_free((void*)costs->ranks);
  jpp_free((void*)costs->links);
  jpp_free(costs);
}

jpp_status_t* jpp_plan_costs_print(const jpp_plan_costs_t* costs, char** out_text) {
  JPP_RETURN_IF_NULL(costs, out_text);
  jpp_str_t str = {0};
  jpp_str_append(&str, "rank   tasks      FLOPs   peak bytes\n");
  for (uint32_t r = 0; r < costs->num_ranks; ++r) {
    const jpp_rank_costs_t* rank = &costs->ranks[r];
    jpp_str_appendf(&str, "%4u %7u %10.3g %12llu\n", r, rank->tasks, rank->flops,
                    (unsigned long long)rank->peak_bytes);
  }
  if (costs->num_links) jpp_str_append(&str, "\n    link  messages        bytes\n");
  for (uint32_t l = 0; l < costs->num_links; ++l) {
    const jpp_link_costs_t* link = &costs->links[l];
    char ends[32];
    snprintf(ends, sizeof(ends), "%u -> %u", link->src, link->dst);
    jpp_str_appendf(&str, "%8s %9llu %12llu\n", ends, (unsigned long long)link->messages,
                    (unsigned long long)link->bytes);
  }
  return jpp_str_finish(&str, out_text);
}
