// Finds each value's sites, the ranks that make it or take it, and numbers its instances
// there. Sites are stored in one array by value, which a first pass sizes and a second
// one fills.
#include "program/builder.h"

static void note_site(jpp_program_builder_t* b, uint32_t* used, uint32_t value,
                      uint32_t rank, bool makes) {
  jpp_site_t* sites = b->sites + b->first_site[value];
  for (uint32_t i = 0; i < used[value]; ++i) {
    if (sites[i].rank != rank) continue;
    sites[i].makes |= makes;
    sites[i].takes |= !makes;
    return;
  }
  sites[used[value]++] = (jpp_site_t){.rank = rank, .makes = makes, .takes = !makes};
}

// Without `used`, makes room for a site; with it, notes the site.
static void visit(jpp_program_builder_t* b, uint32_t* used, uint32_t value, uint32_t rank,
                  bool makes) {
  if (used) {
    note_site(b, used, value, rank, makes);
  } else {
    ++b->first_site[value + 1];
  }
}

static void visit_ranks(jpp_program_builder_t* b, uint32_t* used,
                        const jpp_staged_value_t* at, bool makes) {
  for (uint32_t r = 0; r < b->staged->ranks; ++r) {
    if (jpp_rank_set_has(at->ranks, r)) visit(b, used, at->value, r, makes);
  }
}

static void visit_task(jpp_program_builder_t* b, uint32_t* used, const jpp_task_t* task) {
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    visit(b, used, task->inputs[i], task->rank, false);
  }
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    visit(b, used, task->outputs[i], task->rank, true);
  }
}

static void visit_all(jpp_program_builder_t* b, uint32_t* used) {
  const jpp_staged_t* staged = b->staged;
  for (uint32_t i = 0; i < staged->graph->num_args; ++i) {
    visit_ranks(b, used, &staged->args[i], true);
  }
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    visit_task(b, used, &staged->tasks[t]);
  }
  // What an accumulator ends as is made by its task's rank when the loop ends.
  for (uint32_t i = 0; i < staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &staged->accumulators[i];
    visit(b, used, acc->final, staged->tasks[acc->task].rank, true);
  }
  for (uint32_t i = 0; i < staged->graph->num_outputs; ++i) {
    visit_ranks(b, used, &staged->outputs[i], false);
  }
}

static uint32_t instances_at_a_site(const jpp_program_builder_t* b, uint32_t value) {
  if (b->staged->scopes[value] != JPP_SCOPE_MICROBATCH) return 1;
  return b->staged->graph->loops[b->staged->values[value].loop].microbatches;
}

static jpp_status_t* number_instances(jpp_program_builder_t* b, const uint32_t* used) {
  uint64_t count = 0;
  for (uint32_t v = 0; v < b->staged->num_values; ++v) {
    uint32_t here = instances_at_a_site(b, v);
    for (uint32_t i = 0; i < used[v]; ++i, count += here) {
      b->sites[b->first_site[v] + i].first_instance = count;
    }
  }
  return JPP_ARENA_ARRAY(&b->scratch, count, &b->instances);
}

jpp_status_t* jpp_program_find_sites(jpp_program_builder_t* b) {
  uint32_t values = b->staged->num_values;
  uint32_t* used = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, values + 1, &b->first_site));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, values, &used));
  visit_all(b, NULL);
  for (uint32_t v = 0; v < values; ++v) b->first_site[v + 1] += b->first_site[v];
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, b->first_site[values], &b->sites));
  visit_all(b, used);
  return number_instances(b, used);
}

uint32_t jpp_program_source(const jpp_program_builder_t* b, uint32_t value) {
  uint32_t source = JPP_NONE;
  for (uint32_t i = b->first_site[value]; i < b->first_site[value + 1]; ++i) {
    if (b->sites[i].makes && b->sites[i].rank < source) source = b->sites[i].rank;
  }
  return source;
}

jpp_instance_t* jpp_program_instance(const jpp_program_builder_t* b, uint32_t rank,
                                     uint32_t value, uint32_t microbatch) {
  bool every = b->staged->scopes[value] == JPP_SCOPE_MICROBATCH;
  for (uint32_t i = b->first_site[value]; i < b->first_site[value + 1]; ++i) {
    const jpp_site_t* site = &b->sites[i];
    if (!site->makes && !site->takes) return NULL;
    if (site->rank != rank) continue;
    return &b->instances[site->first_instance + (every ? microbatch : 0)];
  }
  return NULL;
}
