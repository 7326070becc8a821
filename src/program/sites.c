// Which ranks make a value and which take it in, and how many instances it has there.
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

static void for_each_given(jpp_program_builder_t* b, uint32_t* used, uint32_t* count) {
  for (uint32_t a = 0; a < b->staged->graph->num_args; ++a) {
    const jpp_staged_value_t* arg = &b->staged->args[a];
    for (uint32_t r = 0; r < b->staged->ranks; ++r) {
      if (!jpp_rank_set_has(arg->ranks, r)) continue;
      if (count) ++count[b->staged->graph->args[a].value];
      if (used) note_site(b, used, b->staged->graph->args[a].value, r, true);
    }
  }
}

// What an accumulator ends as is made by its task's rank when the loop ends.
static void for_each_end(jpp_program_builder_t* b, uint32_t* used, uint32_t* count) {
  for (uint32_t i = 0; i < b->staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &b->staged->accumulators[i];
    uint32_t rank = b->staged->tasks[acc->task].rank;
    if (count) ++count[acc->final];
    if (used) note_site(b, used, acc->final, rank, true);
  }
  for (uint32_t i = 0; i < b->staged->graph->num_outputs; ++i) {
    const jpp_staged_value_t* output = &b->staged->outputs[i];
    for (uint32_t r = 0; r < b->staged->ranks; ++r) {
      if (!jpp_rank_set_has(output->ranks, r)) continue;
      if (count) ++count[output->value];
      if (used) note_site(b, used, output->value, r, false);
    }
  }
}

static void for_each_task(jpp_program_builder_t* b, uint32_t* used, uint32_t* count) {
  for (uint32_t t = 0; t < b->staged->num_tasks; ++t) {
    const jpp_task_t* task = &b->staged->tasks[t];
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      if (count) ++count[task->inputs[i]];
      if (used) note_site(b, used, task->inputs[i], task->rank, false);
    }
    for (uint32_t i = 0; i < task->num_outputs; ++i) {
      if (count) ++count[task->outputs[i]];
      if (used) note_site(b, used, task->outputs[i], task->rank, true);
    }
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
  for_each_given(b, NULL, b->first_site + 1);
  for_each_task(b, NULL, b->first_site + 1);
  for_each_end(b, NULL, b->first_site + 1);
  for (uint32_t v = 0; v < values; ++v) b->first_site[v + 1] += b->first_site[v];
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, b->first_site[values], &b->sites));
  for_each_given(b, used, NULL);
  for_each_task(b, used, NULL);
  for_each_end(b, used, NULL);
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
