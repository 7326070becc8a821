// Finds the instructions of a rank that repeat with later microbatches, as in the steady
// state of a schedule, so that only two repetitions need to be drafted: the draft omits
// the others, and its later instructions use microbatches that are earlier by as many.
//
// Let the values that later instructions need at the end of the second repetition be
// those needed at the end of the first, of later microbatches. The omitted repetitions
// are the second one with later microbatches. So what is needed at their ends is that
// again, and their operands die where those of the second repetition die: deaths, which
// decide donations and deletions, need no other operands. jpp__repetition_prove()
// compares the two ends.
#include "program/builder.h"

uint32_t jpp__repetition_end(const jpp_repetition_t* repetition, uint32_t which) {
  return repetition->first + (which + 1) * repetition->length;
}

uint32_t jpp__drafted_count(const jpp_program_builder_t* b, uint32_t rank) {
  const jpp_repetition_t* repetition = &b->repetitions[rank];
  return (uint32_t)b->instrs[rank].count - repetition->omitted * repetition->length;
}

uint32_t jpp__drafted_index(const jpp_program_builder_t* b, uint32_t rank, uint32_t at) {
  const jpp_repetition_t* repetition = &b->repetitions[rank];
  bool before = at < jpp__repetition_end(repetition, 1);
  return before ? at : at + repetition->omitted * repetition->length;
}

bool jpp__instr_of_loop(const jpp_program_builder_t* b, const jpp_instr_draft_t* instr,
                        uint32_t loop) {
  if (instr->microbatch == JPP_NONE) return false;
  const jpp_staged_t* staged = b->staged;
  return instr->kind == JPP_INSTR_RUN ? staged->tasks[instr->target].loop == loop
                                      : staged->values[instr->value].loop == loop;
}

// --- Repetitions in a list ------------------------------------------------------------

// Whether `later` is the same instruction, `shift` microbatches later.
static bool is_repeated(const jpp_program_builder_t* b, const jpp_instr_draft_t* instr,
                        const jpp_instr_draft_t* later, const jpp_repetition_t* found) {
  return instr->kind == later->kind && instr->target == later->target &&
         instr->value == later->value &&
         later->microbatch == instr->microbatch + found->shift &&
         jpp__instr_of_loop(b, instr, found->loop) &&
         jpp__instr_of_loop(b, later, found->loop);
}

// The number of instructions from `first` on that are repeated after found->length.
static uint32_t count_repeated(const jpp_program_builder_t* b,
                               const jpp_instr_drafts_t* instrs, uint32_t first,
                               const jpp_repetition_t* found) {
  uint32_t count = 0;
  while (first + count + found->length < instrs->count &&
         is_repeated(b, &instrs->data[first + count],
                     &instrs->data[first + count + found->length], found)) {
    ++count;
  }
  return count;
}

// Returns the median RUN of the loop, or JPP_NONE if the rank runs none of its tasks.
static uint32_t middle_run(const jpp_program_builder_t* b,
                           const jpp_instr_drafts_t* instrs, uint32_t loop) {
  uint32_t runs = 0, before = 0;
  for (uint32_t i = 0; i < instrs->count; ++i) {
    const jpp_instr_draft_t* instr = &instrs->data[i];
    runs += instr->kind == JPP_INSTR_RUN && jpp__instr_of_loop(b, instr, loop);
  }
  for (uint32_t i = 0; i < instrs->count; ++i) {
    const jpp_instr_draft_t* instr = &instrs->data[i];
    if (instr->kind != JPP_INSTR_RUN || !jpp__instr_of_loop(b, instr, loop)) continue;
    if (before++ == runs / 2) return i;
  }
  return JPP_NONE;
}

// Sets the shortest repetition that includes the run at `middle` and begins there.
// Returns the number of instructions from `middle` on that are repeated; 0: no
// repetition.
static uint32_t find_length(const jpp_program_builder_t* b,
                            const jpp_instr_drafts_t* instrs, uint32_t middle,
                            jpp_repetition_t* found) {
  const jpp_instr_draft_t* run = &instrs->data[middle];
  uint64_t compared = 0;  // a bound makes the search linear in any list
  for (uint32_t i = middle + 1; i < instrs->count && compared < instrs->count; ++i) {
    const jpp_instr_draft_t* later = &instrs->data[i];
    bool again = later->kind == JPP_INSTR_RUN && later->target == run->target &&
                 later->microbatch > run->microbatch;
    if (!again) continue;
    found->length = i - middle;
    found->shift = later->microbatch - run->microbatch;
    uint32_t repeated = count_repeated(b, instrs, middle, found);
    if (repeated >= found->length) return repeated;
    compared += repeated;
  }
  return 0;
}

// Whether the microbatches after the repetitions are late enough to become earlier.
static bool can_omit(const jpp_program_builder_t* b, const jpp_instr_drafts_t* instrs,
                     const jpp_repetition_t* found) {
  uint64_t skipped = (uint64_t)found->omitted * found->shift;
  size_t end = jpp__repetition_end(found, 1) + (size_t)found->omitted * found->length;
  for (size_t i = end; i < instrs->count; ++i) {
    const jpp_instr_draft_t* instr = &instrs->data[i];
    if (jpp__instr_of_loop(b, instr, found->loop) && instr->microbatch < skipped) {
      return false;
    }
  }
  return true;
}

// The last repetition is drafted with what follows it: values that nothing after the loop
// needs die there.
static void find_repetition(jpp_program_builder_t* b, uint32_t rank, uint32_t loop) {
  const jpp_instr_drafts_t* instrs = &b->instrs[rank];
  jpp_repetition_t found = {.loop = loop};
  uint32_t middle = middle_run(b, instrs, loop);
  if (middle == JPP_NONE) return;
  uint32_t repeated = find_length(b, instrs, middle, &found);
  if (!repeated) return;
  for (found.first = middle;
       found.first && is_repeated(b, &instrs->data[found.first - 1],
                                  &instrs->data[found.first - 1 + found.length], &found);
       --found.first) {
  }
  uint32_t times = (middle + repeated - found.first) / found.length + 1;
  if (times <= 3) return;
  found.omitted = times - 3;
  if (can_omit(b, instrs, &found)) b->repetitions[rank] = found;
}

jpp_status_t* jpp__program_find_repetitions(jpp_program_builder_t* b) {
  const jpp_graph_t* graph = b->staged->graph;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, b->staged->ranks, &b->repetitions));
  uint32_t longest = 0;  // of several loops
  for (uint32_t l = 1; l < graph->num_loops; ++l) {
    if (graph->loops[l].microbatches > graph->loops[longest].microbatches) longest = l;
  }
  for (uint32_t r = 0; graph->num_loops && !b->drafts_all && r < b->staged->ranks; ++r) {
    find_repetition(b, r, longest);
  }
  return NULL;
}

// --- The ends of the two repetitions --------------------------------------------------

static bool is_needed(const jpp_virtual_t* v, uint32_t end) {
  return !v->constant && (v->output || (v->last_use != JPP_NONE && v->last_use >= end));
}

// Where the same value of the next repetition's microbatch is defined.
static uint64_t next_instance(const jpp_program_builder_t* b, const jpp_virtual_t* v,
                              const jpp_repetition_t* repetition) {
  bool moves_on = jpp__value_of_microbatch(b, v->value) &&
                  b->staged->values[v->value].loop == repetition->loop;
  return v->instance + (moves_on ? repetition->shift : 0);
}

// Finds what takes the place of each virtual register that is needed at the end of the
// first repetition. Returns false if nothing does.
static jpp_status_t* find_successors(jpp_program_builder_t* b,
                                     const jpp_repetition_t* repetition, bool* out_all) {
  jpp_rank_draft_t* draft = &b->draft;
  uint32_t end = jpp__repetition_end(repetition, 0);
  *out_all = false;
  for (uint32_t id = 0; id < draft->made[0]; ++id) {
    const jpp_virtual_t* v = &draft->virtuals.data[id];
    if (!is_needed(v, end)) continue;
    uint64_t instance = next_instance(b, v, repetition);
    if (instance >= b->most_instances || b->definitions[instance] == JPP_NONE) {
      return NULL;
    }
    jpp_successor_t pair = {.from = id, .to = b->definitions[instance]};
    b->definitions[instance] = JPP_NONE;  // succeeds no other
    const jpp_virtual_t* to = &draft->virtuals.data[pair.to];
    if (to->value != v->value || to->memory != v->memory || to->output != v->output) {
      return NULL;
    }
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&draft->successors, pair));
  }
  *out_all = true;
  return NULL;
}

jpp_status_t* jpp__repetition_prove(jpp_program_builder_t* b, uint32_t rank,
                                    bool* out_same) {
  const jpp_repetition_t* repetition = &b->repetitions[rank];
  jpp_rank_draft_t* draft = &b->draft;
  uint32_t end = jpp__repetition_end(repetition, 1), needed = 0, instances = 0;
  *out_same = false;
  draft->successors.count = 0;
  for (uint32_t id = 0; id < draft->made[1]; ++id) {
    const jpp_virtual_t* v = &draft->virtuals.data[id];
    if (!is_needed(v, end)) continue;
    ++needed;
    instances += b->definitions[v->instance] == JPP_NONE;
    b->definitions[v->instance] = id;
  }
  bool all = false;
  jpp_status_t* status = find_successors(b, repetition, &all);
  for (uint32_t id = 0; id < draft->made[1]; ++id) {
    b->definitions[draft->virtuals.data[id].instance] = JPP_NONE;
  }
  *out_same = all && needed == instances && draft->successors.count == needed;
  return status;
}
