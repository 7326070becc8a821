// Gives one rank's drafted instructions their operands: virtual registers, a new one for
// each definition.
#include <stdio.h>
#include <string.h>

#include "program/builder.h"
#include "task/ids.h"

typedef struct drafter {
  jpp_program_builder_t* b;
  jpp_rank_draft_t* draft;
  uint32_t rank;
  uint32_t at;  // the current drafted instruction
  // Microbatches that the draft omits before it; its own is earlier by as many.
  uint32_t omitted;
} drafter_t;

uint32_t jpp__instr_num_args(const jpp_program_builder_t* b,
                             const jpp_instr_draft_t* instr) {
  if (instr->kind == JPP_INSTR_RUN) return b->staged->tasks[instr->target].num_inputs;
  return instr->kind == JPP_INSTR_SEND || instr->kind == JPP_INSTR_MOVE;
}

uint32_t jpp__instr_num_results(const jpp_program_builder_t* b,
                                const jpp_instr_draft_t* instr) {
  if (instr->kind == JPP_INSTR_RUN) return b->staged->tasks[instr->target].num_outputs;
  return instr->kind == JPP_INSTR_RECV || instr->kind == JPP_INSTR_MOVE;
}

// --- Definitions ----------------------------------------------------------------------

static jpp_status_t* find_place(const drafter_t* d, uint32_t value, jpp_memory_t memory,
                                jpp_place_t* out_place) {
  const jpp_site_t* site = jpp__program_site(d->b, d->rank, value);
  if (!site) {
    return jpp_status_make(JPP_INTERNAL_ERROR, "rank %u has no site of value %%%u",
                           d->rank, value);
  }
  bool copy = jpp__program_moves(d->b, value) && memory == JPP_MEMORY_DEVICE;
  uint64_t before = copy ? jpp__program_instances(d->b, value) : 0;
  *out_place = (jpp_place_t){.first = site->first_instance + before,
                             .value = value,
                             .every = jpp__value_of_microbatch(d->b, value),
                             .memory = memory};
  return NULL;
}

static uint32_t* definition_at(const drafter_t* d, const jpp_place_t* place,
                               uint32_t microbatch) {
  return &d->b->definitions[place->first + (place->every ? microbatch : 0)];
}

static jpp_status_t* define_at(const drafter_t* d, const jpp_place_t* place,
                               uint32_t microbatch, uint32_t* out_virtual) {
  *out_virtual = (uint32_t)d->draft->virtuals.count;
  *definition_at(d, place, microbatch) = *out_virtual;
  jpp_virtual_t made = {.instance = place->first + (place->every ? microbatch : 0),
                        .value = place->value,
                        .last_use = JPP_NONE,
                        .memory = place->memory};
  return JPP_VEC_PUSH(&d->draft->virtuals, made);
}

// The virtual register of a value with one instance per step, in the value's own memory;
// JPP_NONE if the rank does not have it.
static uint32_t find_register(const drafter_t* d, uint32_t value) {
  const jpp_site_t* site = jpp__program_site(d->b, d->rank, value);
  return site ? d->b->definitions[site->first_instance] : JPP_NONE;
}

static jpp_status_t* define_args(const drafter_t* d) {
  const jpp_graph_t* graph = d->b->staged->graph;
  for (uint32_t a = 0; a < graph->num_args; ++a) {
    if (!jpp_rank_set_has(d->b->staged->args[a].ranks, d->rank)) continue;
    uint32_t id = 0;
    jpp_place_t place = {0};
    uint32_t value = graph->args[a].value;
    JPP_RETURN_IF_ERROR(
        find_place(d, value, d->b->staged->values[value].type.memory, &place));
    JPP_RETURN_IF_ERROR(define_at(d, &place, JPP_NONE, &id));
    d->draft->virtuals.data[id].borrowed = !graph->args[a].donated;
    jpp_program_input_t input = {.reg = id, .arg = a, .owned = graph->args[a].donated};
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&d->draft->inputs, input));
  }
  return NULL;
}

static bool is_loop_index(const jpp_program_builder_t* b, uint32_t value) {
  uint32_t loop = b->staged->values[value].loop;
  return loop != JPP_NONE && b->staged->graph->loops[loop].index == value;
}

// The microbatch numbers that the rank uses, omitted ones included, in the order of their
// first use.
static jpp_status_t* define_constants(const drafter_t* d) {
  const jpp_staged_t* staged = d->b->staged;
  const jpp_instr_drafts_t* instrs = &d->b->instrs[d->rank];
  memset(d->b->constants, 0xff,
         d->b->first_constant[staged->graph->num_loops] * sizeof(*d->b->constants));
  for (size_t i = 0; i < instrs->count; ++i) {
    const jpp_instr_draft_t* run = &instrs->data[i];
    if (run->kind != JPP_INSTR_RUN || !d->b->takes_index[run->target]) continue;
    uint32_t loop = staged->tasks[run->target].loop;
    uint32_t* at = &d->b->constants[d->b->first_constant[loop] + run->microbatch];
    if (*at != JPP_NONE) continue;
    *at = (uint32_t)d->draft->virtuals.count;
    jpp_place_t place = {0};
    JPP_RETURN_IF_ERROR(
        find_place(d, staged->graph->loops[loop].index, JPP_MEMORY_DEVICE, &place));
    jpp_virtual_t made = {.instance = place.first + run->microbatch,
                          .value = place.value,
                          .last_use = JPP_NONE,
                          .memory = place.memory,
                          .constant = true};
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&d->draft->virtuals, made));
    jpp_program_constant_t constant = {.reg = *at, .microbatch = run->microbatch};
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&d->draft->constants, constant));
  }
  return NULL;
}

// --- Operands -------------------------------------------------------------------------

static jpp_status_t* missing_input(const jpp_program_builder_t* b, const jpp_task_t* task,
                                   uint32_t microbatch, uint32_t value) {
  uint32_t op = b->staged->values[value].producer;
  const char* where = op == JPP_NONE ? NULL : b->staged->ops[op].where;
  const char* name = op == JPP_NONE ? "argument" : b->staged->ops[op].name;
  char of_microbatch[32] = "";
  if (microbatch != JPP_NONE) {
    snprintf(of_microbatch, sizeof(of_microbatch), " of microbatch %u", microbatch);
  }
  return jpp_status_make(
      JPP_SCHEDULE_ERROR,
      "%s%s uses value %%%u (%s at %s) before any task has made it; the "
      "schedule was proved, so this is a bug of the planner",
      task->name, of_microbatch, value, name, where ? where : "?");
}

// An input that neither a task nor a message made: the microbatch number, or a state in
// the first microbatch.
static jpp_status_t* find_given(const drafter_t* d, const jpp_instr_draft_t* run,
                                const jpp_place_t* place, uint32_t* out_virtual) {
  uint32_t init = d->b->init_of[place->value];
  *out_virtual = init == JPP_NONE ? JPP_NONE : find_register(d, init);
  if (*out_virtual != JPP_NONE) return NULL;
  if (!is_loop_index(d->b, place->value) || !d->b->takes_index[run->target]) {
    const jpp_task_t* task = &d->b->staged->tasks[run->target];
    return missing_input(d->b, task, run->microbatch, place->value);
  }
  uint32_t first = d->b->first_constant[d->b->staged->values[place->value].loop];
  *out_virtual = d->b->constants[first + run->microbatch + d->omitted];
  return NULL;
}

static jpp_status_t* find_places(const drafter_t* d, const jpp_task_t* task,
                                 const jpp_place_t** out_places) {
  jpp_place_t* places = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(
      &d->b->scratch, (size_t)task->num_inputs + task->num_outputs, &places));
  *out_places = places;
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    JPP_RETURN_IF_ERROR(find_place(d, task->inputs[i], JPP_MEMORY_DEVICE, places++));
  }
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    JPP_RETURN_IF_ERROR(find_place(d, task->outputs[i], JPP_MEMORY_DEVICE, places++));
  }
  return NULL;
}

static jpp_status_t* draft_run(const drafter_t* d, const jpp_instr_draft_t* run) {
  const jpp_task_t* task = &d->b->staged->tasks[run->target];
  const jpp_place_t** places = &d->b->places[run->target];
  if (!*places) JPP_RETURN_IF_ERROR(find_places(d, task, places));
  jpp_u32_vec_t* operands = &d->draft->operands;
  uint32_t inputs = task->num_inputs, count = inputs + task->num_outputs;
  JPP_RETURN_IF_ERROR(JPP_VEC_RESERVE(operands, count));
  uint32_t* ids = operands->data + operands->count;
  operands->count += count;
  for (uint32_t i = 0; i < inputs; ++i) {
    ids[i] = *definition_at(d, &(*places)[i], run->microbatch);
    if (ids[i] == JPP_NONE) {
      JPP_RETURN_IF_ERROR(find_given(d, run, &(*places)[i], &ids[i]));
    }
    d->draft->virtuals.data[ids[i]].last_use = d->at;
  }
  for (uint32_t i = inputs; i < count; ++i) {
    JPP_RETURN_IF_ERROR(define_at(d, &(*places)[i], run->microbatch, &ids[i]));
  }
  return NULL;
}

// Adds the operand of a SEND or MOVE.
static jpp_status_t* draft_arg(const drafter_t* d, const jpp_instr_draft_t* instr,
                               jpp_memory_t memory) {
  jpp_place_t place = {0};
  JPP_RETURN_IF_ERROR(find_place(d, instr->value, memory, &place));
  uint32_t id = *definition_at(d, &place, instr->microbatch);
  if (id == JPP_NONE) {
    return jpp_status_make(JPP_INTERNAL_ERROR,
                           "rank %u sends or moves value %%%u before a task produces it",
                           d->rank, instr->value);
  }
  d->draft->virtuals.data[id].last_use = d->at;
  return JPP_VEC_PUSH(&d->draft->operands, id);
}

// Adds the result of a RECV or MOVE.
static jpp_status_t* draft_result(const drafter_t* d, const jpp_instr_draft_t* instr,
                                  jpp_memory_t memory) {
  jpp_place_t place = {0};
  uint32_t id = 0;
  JPP_RETURN_IF_ERROR(find_place(d, instr->value, memory, &place));
  JPP_RETURN_IF_ERROR(define_at(d, &place, instr->microbatch, &id));
  return JPP_VEC_PUSH(&d->draft->operands, id);
}

static jpp_status_t* draft_operands(const drafter_t* d, const jpp_instr_draft_t* instr) {
  if (instr->kind == JPP_INSTR_RUN) return draft_run(d, instr);
  if (instr->kind == JPP_INSTR_SEND) return draft_arg(d, instr, JPP_MEMORY_DEVICE);
  if (instr->kind == JPP_INSTR_RECV) return draft_result(d, instr, JPP_MEMORY_DEVICE);
  jpp_memory_t to = (jpp_memory_t)instr->target, from = JPP_MEMORY_DEVICE;
  if (to == from) from = d->b->staged->values[instr->value].type.memory;
  JPP_RETURN_IF_ERROR(draft_arg(d, instr, from));
  return draft_result(d, instr, to);
}

static jpp_status_t* draft_instr(drafter_t* d) {
  const jpp_program_builder_t* b = d->b;
  const jpp_repetition_t* repetition = &b->repetitions[d->rank];
  jpp_instr_draft_t instr =
      b->instrs[d->rank].data[jpp__drafted_index(b, d->rank, d->at)];
  for (uint32_t i = 0; i < 2; ++i) {
    if (d->at != jpp__repetition_end(repetition, i)) continue;
    d->draft->made[i] = (uint32_t)d->draft->virtuals.count;
  }
  bool after = d->at >= jpp__repetition_end(repetition, 1) &&
               jpp__instr_of_loop(b, &instr, repetition->loop);
  d->omitted = after ? repetition->omitted * repetition->shift : 0;
  if (after) instr.microbatch -= d->omitted;
  return draft_operands(d, &instr);
}

// --- The whole draft ------------------------------------------------------------------

static jpp_status_t* take_outputs(const drafter_t* d) {
  for (uint32_t i = 0; i < d->b->staged->graph->num_outputs; ++i) {
    const jpp_staged_value_t* output = &d->b->staged->outputs[i];
    if (!jpp_rank_set_has(output->ranks, d->rank)) continue;
    uint32_t found = find_register(d, output->value);
    if (found == JPP_NONE) {
      return jpp_status_make(JPP_INTERNAL_ERROR, "output %u is not on rank %u", i,
                             d->rank);
    }
    jpp_virtual_t* left = &d->draft->virtuals.data[found];
    jpp_program_output_t taken = {
        .reg = found, .output = i, .copy = left->borrowed || left->output};
    left->output = true;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&d->draft->outputs, taken));
  }
  return NULL;
}

// Allocates the tables that all ranks share.
static jpp_status_t* make_tables(jpp_program_builder_t* b) {
  const jpp_staged_t* staged = b->staged;
  JPP_RETURN_IF_ERROR(jpp__ids_create(&b->scratch, b->most_instances, &b->definitions));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, staged->num_tasks, &b->places));
  JPP_RETURN_IF_ERROR(jpp__ids_create(&b->scratch, staged->num_values, &b->init_of));
  for (uint32_t i = 0; i < staged->num_accumulators; ++i) {
    b->init_of[staged->accumulators[i].state] = staged->accumulators[i].init;
  }
  uint32_t loops = staged->graph->num_loops;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, loops + 1, &b->first_constant));
  for (uint32_t l = 0; l < loops; ++l) {
    b->first_constant[l + 1] =
        b->first_constant[l] + staged->graph->loops[l].microbatches;
  }
  JPP_RETURN_IF_ERROR(
      jpp__ids_create(&b->scratch, b->first_constant[loops], &b->constants));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&b->scratch, staged->num_tasks, &b->takes_index));
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      bool number = task->loop != JPP_NONE && is_loop_index(b, task->inputs[i]);
      if (number) b->takes_index[t] = true;
    }
  }
  return NULL;
}

static jpp_status_t* draft_rank(drafter_t* d) {
  jpp_rank_draft_t* draft = d->draft;
  draft->operands.count = draft->virtuals.count = draft->inputs.count = 0;
  draft->constants.count = draft->outputs.count = 0;
  JPP_RETURN_IF_ERROR(define_args(d));
  JPP_RETURN_IF_ERROR(define_constants(d));
  for (; d->at < jpp__drafted_count(d->b, d->rank); ++d->at) {
    JPP_RETURN_IF_ERROR(draft_instr(d));
  }
  return take_outputs(d);
}

jpp_status_t* jpp__program_draft(jpp_program_builder_t* b, uint32_t rank) {
  drafter_t drafter = {.b = b, .draft = &b->draft, .rank = rank};
  if (!b->definitions) JPP_RETURN_IF_ERROR(make_tables(b));
  jpp_status_t* status = draft_rank(&drafter);
  for (size_t i = 0; i < b->draft.virtuals.count; ++i) {
    b->definitions[b->draft.virtuals.data[i].instance] = JPP_NONE;
  }
  bool omits = b->repetitions[rank].omitted > 0, same = false;
  if (!omits || jpp_status_code(status) == JPP_OUT_OF_MEMORY) return status;
  if (!status) JPP_RETURN_IF_ERROR(jpp__repetition_prove(b, rank, &same));
  if (same) return NULL;
  // Drafts everything instead; an error then has the microbatch in which it occurs.
  jpp_status_free(status);
  b->repetitions[rank].omitted = 0;
  return jpp__program_draft(b, rank);
}
