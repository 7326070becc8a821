// Finds each value's sites, the ranks that make or take it, and numbers its instances
// there. Sites are grouped by value with a counting sort.
#include "program/builder.h"

// An occurrence of a value: `rank` makes it or takes it.
typedef struct occurrence {
  uint32_t value, rank;
  bool makes;
  bool leaves;  // the rank leaves it as an output
} occurrence_t;
typedef JPP_VEC(occurrence_t) occurrence_vec_t;

static jpp_status_t* add_occurrence(occurrence_vec_t* occurrences, uint32_t value,
                                    uint32_t rank, bool makes) {
  occurrence_t occurrence = {.value = value, .rank = rank, .makes = makes};
  return JPP_VEC_PUSH(occurrences, occurrence);
}

// Adds the sites of an argument, which is made where the caller passes it, or of an
// output.
static jpp_status_t* add_occurrences(const jpp_staged_t* staged,
                                     const jpp_staged_value_t* at, bool argument,
                                     occurrence_vec_t* occurrences) {
  for (uint32_t r = 0; r < staged->ranks; ++r) {
    if (!jpp_rank_set_has(at->ranks, r)) continue;
    occurrence_t occurrence = {
        .value = at->value, .rank = r, .makes = argument, .leaves = !argument};
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(occurrences, occurrence));
  }
  return NULL;
}

static jpp_status_t* list_occurrences(const jpp_staged_t* staged,
                                      occurrence_vec_t* occurrences) {
  for (uint32_t i = 0; i < staged->graph->num_args; ++i) {
    JPP_RETURN_IF_ERROR(add_occurrences(staged, &staged->args[i], true, occurrences));
  }
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      JPP_RETURN_IF_ERROR(
          add_occurrence(occurrences, task->inputs[i], task->rank, false));
    }
    for (uint32_t i = 0; i < task->num_outputs; ++i) {
      JPP_RETURN_IF_ERROR(
          add_occurrence(occurrences, task->outputs[i], task->rank, true));
    }
  }
  // The rank of an accumulator's task makes its final value at the end of the loop.
  for (uint32_t i = 0; i < staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &staged->accumulators[i];
    JPP_RETURN_IF_ERROR(
        add_occurrence(occurrences, acc->final, staged->tasks[acc->task].rank, true));
  }
  for (uint32_t i = 0; i < staged->graph->num_outputs; ++i) {
    JPP_RETURN_IF_ERROR(add_occurrences(staged, &staged->outputs[i], false, occurrences));
  }
  return NULL;
}

// Merges an occurrence into the value's site on that rank, which is created if this is
// the first one.
static void note_site(jpp_program_builder_t* b, const occurrence_t* occurrence,
                      uint32_t* used) {
  jpp_site_t* sites = b->sites + b->first_site[occurrence->value];
  uint32_t at = 0;
  while (at < *used && sites[at].rank != occurrence->rank) ++at;
  if (at == *used) sites[(*used)++].rank = occurrence->rank;
  sites[at].makes |= occurrence->makes;
  sites[at].takes |= !occurrence->makes;
  sites[at].leaves |= occurrence->leaves;
}

// Groups occurrences by value. Room is allocated for one site per occurrence; if several
// occurrences are on one rank, some of it stays unused.
static jpp_status_t* group_sites(jpp_program_builder_t* b,
                                 const occurrence_vec_t* occurrences, uint32_t* used) {
  uint32_t values = b->staged->num_values;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, values + 1, &b->first_site));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, occurrences->count, &b->sites));
  for (size_t i = 0; i < occurrences->count; ++i) {
    ++b->first_site[occurrences->data[i].value + 1];
  }
  for (uint32_t v = 0; v < values; ++v) b->first_site[v + 1] += b->first_site[v];
  for (size_t i = 0; i < occurrences->count; ++i) {
    note_site(b, &occurrences->data[i], &used[occurrences->data[i].value]);
  }
  return NULL;
}

bool jpp__value_of_microbatch(const jpp_program_builder_t* b, uint32_t value) {
  return b->staged->scopes[value] == JPP_SCOPE_MICROBATCH;
}

bool jpp__program_moves(const jpp_program_builder_t* b, uint32_t value) {
  return b->staged->values[value].type.memory != JPP_MEMORY_DEVICE;
}

uint32_t jpp__program_instances(const jpp_program_builder_t* b, uint32_t value) {
  if (!jpp__value_of_microbatch(b, value)) return 1;
  return b->staged->graph->loops[b->staged->values[value].loop].microbatches;
}

jpp_site_t* jpp__program_site(const jpp_program_builder_t* b, uint32_t rank,
                              uint32_t value) {
  for (uint32_t i = b->first_site[value]; i < b->first_site[value + 1]; ++i) {
    jpp_site_t* site = &b->sites[i];
    if (!site->makes && !site->takes) return NULL;
    if (site->rank == rank) return site;
  }
  return NULL;
}

static void share_instances(const jpp_program_builder_t* b) {
  for (uint32_t i = 0; i < b->staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &b->staged->accumulators[i];
    uint32_t rank = b->staged->tasks[acc->task].rank;
    const jpp_site_t* state = jpp__program_site(b, rank, acc->state);
    if (!state) continue;
    jpp__program_site(b, rank, acc->next)->first_instance = state->first_instance;
    jpp__program_site(b, rank, acc->final)->first_instance = state->first_instance;
  }
}

static jpp_status_t* number_instances(jpp_program_builder_t* b, const uint32_t* used) {
  uint64_t* count = NULL;  // [ranks]
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, b->staged->ranks, &count));
  for (uint32_t v = 0; v < b->staged->num_values; ++v) {
    uint32_t here = jpp__program_instances(b, v);
    bool moves = jpp__program_moves(b, v);
    for (uint32_t i = 0; i < used[v]; ++i) {
      jpp_site_t* site = &b->sites[b->first_site[v] + i];
      site->first_instance = count[site->rank];
      site->first_arrival = b->num_arrivals;
      site->first_copy = b->num_copies;
      count[site->rank] += moves ? 2 * here : here;
      if (moves) b->num_copies += here;
      if (!site->makes) b->num_arrivals += here;
    }
  }
  for (uint32_t r = 0; r < b->staged->ranks; ++r) {
    if (count[r] > b->most_instances) b->most_instances = count[r];
  }
  share_instances(b);
  return NULL;
}

jpp_status_t* jpp__program_find_sites(jpp_program_builder_t* b) {
  uint32_t* used = NULL;  // [values] number of sites of the value so far
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, b->staged->num_values, &used));
  occurrence_vec_t occurrences = {0};
  jpp_status_t* status = list_occurrences(b->staged, &occurrences);
  if (!status) status = group_sites(b, &occurrences, used);
  jpp_vec_deinit(&occurrences);
  return status ? status : number_instances(b, used);
}

uint32_t jpp__program_source(const jpp_program_builder_t* b, uint32_t value) {
  uint32_t source = JPP_NONE;
  for (uint32_t i = b->first_site[value]; i < b->first_site[value + 1]; ++i) {
    if (b->sites[i].makes && b->sites[i].rank < source) source = b->sites[i].rank;
  }
  return source;
}
