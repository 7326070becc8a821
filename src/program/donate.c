// Decides which task inputs are donated, and which output takes over the memory of each:
// an input can be donated if it dies in every run of the task, and an output prefers the
// nearest input from which it is computed.
#include <string.h>

#include "program/builder.h"
#include "task/ids.h"

typedef struct donor {
  jpp_program_builder_t* b;
  bool** dies;          // [tasks][inputs] dead after every run seen so far
  uint32_t* input_at;   // [values] index among the inputs of the current task
  jpp_u32_vec_t queue;  // values whose producers are to be searched
} donor_t;

// The number of values that the search from an output visits: enough for an optimizer's
// update.
enum { kSearchOps = 24 };

static void find_deaths_on(donor_t* d, uint32_t rank) {
  const jpp_instr_drafts_t* instrs = &d->b->instrs[rank];
  const uint32_t* operands = d->b->draft.operands.data;
  for (uint32_t at = 0; at < jpp__drafted_count(d->b, rank); ++at) {
    const jpp_instr_draft_t* instr = &instrs->data[jpp__drafted_index(d->b, rank, at)];
    uint32_t num_args = jpp__instr_num_args(d->b, instr);
    for (uint32_t i = 0; instr->kind == JPP_INSTR_RUN && i < num_args; ++i) {
      const jpp_virtual_t* v = &d->b->draft.virtuals.data[operands[i]];
      bool kept = v->borrowed || v->constant || v->output;
      if (v->last_use != at || kept) d->dies[instr->target][i] = false;
    }
    operands += num_args + jpp__instr_num_results(d->b, instr);
  }
}

static jpp_status_t* find_deaths(donor_t* d) {
  for (uint32_t r = 0; r < d->b->staged->ranks; ++r) {
    JPP_RETURN_IF_ERROR(jpp__program_draft(d->b, r));
    find_deaths_on(d, r);
  }
  return NULL;
}

// Tasks that repeat each other share a module, which has one set of donated inputs: those
// that die on every rank.
static void agree_on_deaths(const donor_t* d) {
  const jpp_staged_t* staged = d->b->staged;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      if (!d->dies[t][i]) d->dies[task->repeats][i] = false;
    }
  }
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    if (task->repeats == t) continue;
    memcpy(d->dies[t], d->dies[task->repeats], task->num_inputs * sizeof(**d->dies));
  }
}

// A task that shares its pattern's module donates no input that the pattern keeps.
static void agree_with_patterns(const donor_t* d) {
  const jpp_staged_t* staged = d->b->staged;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    uint32_t pattern = staged->tasks[t].pattern;
    for (uint32_t i = 0; pattern != JPP_NONE && i < staged->tasks[t].num_inputs; ++i) {
      if (!d->dies[pattern][i]) d->dies[t][i] = false;
    }
  }
}

// Whether an output can take over an input: both are in device memory when the task runs.
static bool can_take_over(const donor_t* d, uint32_t input, uint32_t output) {
  jpp_type_t from = d->b->staged->values[input].type;
  jpp_type_t to = d->b->staged->values[output].type;
  from.memory = to.memory = JPP_MEMORY_DEVICE;
  return jpp_type_equal(&from, &to) &&
         d->b->value_bytes[input] == d->b->value_bytes[output];
}

// The nearest free input of the output's type among those from which the output is
// computed: overwriting it needs no copy.
static jpp_status_t* nearest_input(donor_t* d, const bool* free, uint32_t output,
                                   uint32_t* out_input) {
  *out_input = JPP_NONE;
  d->queue.count = 0;
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&d->queue, output));
  for (size_t at = 0; at < d->queue.count && at < kSearchOps; ++at) {
    uint32_t value = d->queue.data[at];
    uint32_t position = d->input_at[value];
    if (position != JPP_NONE) {
      if (!free[position] || !can_take_over(d, value, output)) continue;
      *out_input = position;
      return NULL;
    }
    uint32_t producer = d->b->staged->values[value].producer;
    if (producer == JPP_NONE) continue;
    const jpp_op_t* op = &d->b->staged->ops[producer];
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&d->queue, op->inputs[i]));
    }
  }
  return NULL;
}

static void donate_input(donor_t* d, uint32_t task, uint32_t input, uint32_t output,
                         bool* taken) {
  ((uint32_t*)d->b->bindings[task].donated_to)[input] = output;
  d->dies[task][input] = false;
  taken[output] = true;
}

static jpp_status_t* match_nearest(donor_t* d, uint32_t id, bool* taken) {
  const jpp_task_t* task = &d->b->staged->tasks[id];
  for (uint32_t k = 0; k < task->num_outputs; ++k) {
    uint32_t input = JPP_NONE;
    JPP_RETURN_IF_ERROR(nearest_input(d, d->dies[id], task->outputs[k], &input));
    if (input != JPP_NONE) donate_input(d, id, input, k, taken);
  }
  return NULL;
}

// First fit for the remaining inputs and outputs; few remain after match_nearest().
static jpp_status_t* match_first_fit(donor_t* d, uint32_t id, bool* taken) {
  const jpp_task_t* task = &d->b->staged->tasks[id];
  d->queue.count = 0;
  for (uint32_t k = 0; k < task->num_outputs; ++k) {
    if (!taken[k]) JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&d->queue, k));
  }
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    for (size_t at = 0; at < d->queue.count && d->dies[id][i]; ++at) {
      uint32_t output = d->queue.data[at];
      if (taken[output] || !can_take_over(d, task->inputs[i], task->outputs[output])) {
        continue;
      }
      donate_input(d, id, i, output, taken);
    }
  }
  return NULL;
}

static jpp_status_t* match_task(donor_t* d, uint32_t id) {
  const jpp_task_t* task = &d->b->staged->tasks[id];
  bool* taken = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&d->b->scratch, task->num_outputs, &taken));
  for (uint32_t i = 0; i < task->num_inputs; ++i) d->input_at[task->inputs[i]] = i;
  jpp_status_t* status = match_nearest(d, id, taken);
  if (!status) status = match_first_fit(d, id, taken);
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    d->input_at[task->inputs[i]] = JPP_NONE;
  }
  return status;
}

jpp_status_t* jpp__program_donate(jpp_program_builder_t* b) {
  donor_t donor = {.b = b};
  const jpp_staged_t* staged = b->staged;
  jpp_arena_t* scratch = &b->scratch;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, staged->num_tasks, &donor.dies));
  JPP_RETURN_IF_ERROR(jpp__ids_create(scratch, staged->num_values, &donor.input_at));
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    uint32_t* donated_to = NULL;
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, task->num_inputs, &donor.dies[t]));
    JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(b->arena, task->num_inputs, &donated_to));
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      donor.dies[t][i] = b->bindings[t].runs > 0;
      donated_to[i] = JPP_NONE;
    }
    b->bindings[t].donated_to = donated_to;
  }
  JPP_RETURN_IF_ERROR(find_deaths(&donor));
  agree_on_deaths(&donor);
  agree_with_patterns(&donor);
  jpp_status_t* status = NULL;
  for (uint32_t t = 0; t < b->staged->num_tasks && !status; ++t) {
    status = match_task(&donor, t);
  }
  jpp_vec_deinit(&donor.queue);
  return status;
}
