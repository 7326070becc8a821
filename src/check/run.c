// Checks one RUN instruction: every argument register holds the value that the task
// expects, results go to empty registers, and a donated argument is owned by the program
// and read once. The end of the file checks conditions on all runs of a task.
#include <stdio.h>

#include "check/checker.h"

static jpp_status_t* check_task(const jpp_walk_t* w) {
  const jpp_instr_t* instr = w->instr;
  if (instr->target >= w->c->staged->num_tasks) {
    return jpp__walk_fail(w, "task %u: expected one below %u", instr->target,
                          w->c->staged->num_tasks);
  }
  const jpp_task_t* task = &w->c->staged->tasks[instr->target];
  if (task->rank != w->program->rank) {
    return jpp__walk_fail(w, "the task belongs to rank %u", task->rank);
  }
  if (instr->num_args != task->num_inputs || instr->num_results != task->num_outputs) {
    return jpp__walk_fail(w, "expected %u args and %u results, found %u and %u",
                          task->num_inputs, task->num_outputs, instr->num_args,
                          instr->num_results);
  }
  bool outside = task->loop == JPP_NONE;
  uint32_t microbatches =
      outside ? 0 : w->c->staged->graph->loops[task->loop].microbatches;
  bool known = outside ? instr->microbatch == JPP_NONE : instr->microbatch < microbatches;
  if (known) return NULL;
  return jpp__walk_fail(w,
                        outside ? "is outside the loops and has no microbatch"
                                : "expected one of %u microbatches",
                        microbatches);
}

jpp_status_t* jpp__check_count_run(const jpp_walk_t* w) {
  JPP_RETURN_IF_ERROR(check_task(w));
  uint32_t task = w->instr->target;
  uint32_t microbatch = w->instr->microbatch == JPP_NONE ? 0 : w->instr->microbatch;
  uint8_t* ran = &w->c->ran[w->c->first_run[task] + microbatch];
  if (*ran) return jpp__walk_fail(w, "has run before");
  *ran = 1;
  ++w->c->runs[task];
  return NULL;
}

// Whether the register holds the value itself, as nearly all registers do: neither a sum
// in progress nor a microbatch number.
static bool holds_value(const jpp_walk_t* w, const jpp_content_t* content,
                        uint32_t value) {
  uint8_t scope = w->c->staged->scopes[value];
  bool same = scope == JPP_SCOPE_STEP || (scope == JPP_SCOPE_MICROBATCH &&
                                          content->microbatch == w->instr->microbatch);
  return same && content->value == value && content->owner != JPP_OWNER_CONSTANT &&
         content->memory == JPP_MEMORY_DEVICE;
}

static jpp_status_t* check_args(jpp_walk_t* w) {
  char expected[JPP_CHECK_TEXT_SIZE], found[JPP_CHECK_TEXT_SIZE];
  const jpp_task_t* task = &w->c->staged->tasks[w->instr->target];
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    uint32_t reg = w->program->operands[w->instr->first_operand + i];
    uint32_t value = task->inputs[i];
    const jpp_content_t* content = &w->registers[reg];
    if (!holds_value(w, content, value) &&
        !jpp__check_serves(w->c, content, value, w->instr->microbatch)) {
      return jpp__walk_fail(
          w, "arg %u: expected %s in register %u, found %s", i,
          jpp__check_value_text(w->c, value, w->instr->microbatch, expected), reg,
          jpp__check_content_text(w->c, content, found));
    }
    if (content->memory != JPP_MEMORY_DEVICE) {
      snprintf(expected, sizeof(expected), "arg %u", i);
      return jpp__walk_check_memory(w, content, JPP_MEMORY_DEVICE, expected);
    }
    if (w->c->staged->scopes[value] == JPP_SCOPE_STATE) {
      w->c->summed[value] = content->summed;
      if (jpp__check_accumulator(w->c, value)->next != content->value) w->began = w->at;
    }
    bool again = w->reads[reg].instr == w->at;
    w->reads[reg] = (jpp_last_read_t){.instr = w->at, .twice = again};
  }
  return NULL;
}

static jpp_content_t content_of_result(const jpp_walk_t* w, uint32_t value) {
  jpp_content_t content = {.value = value, .microbatch = JPP_NONE};
  content.kind = w->c->kinds[value];
  if (w->c->staged->scopes[value] == JPP_SCOPE_MICROBATCH) {
    content.microbatch = w->instr->microbatch;
  }
  const jpp_accumulator_t* acc = jpp__check_accumulator(w->c, value);
  if (acc && value == acc->next) content.summed = w->c->summed[acc->state] + 1;
  return content;
}

static jpp_status_t* define_results(jpp_walk_t* w) {
  const jpp_task_t* task = &w->c->staged->tasks[w->instr->target];
  uint32_t first = w->instr->first_operand + w->instr->num_args;
  uint32_t first_value = w->instr->first_value + w->instr->num_args;
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    uint32_t value = w->program->operand_values[first_value + i];
    if (value != task->outputs[i]) {
      return jpp__walk_fail(w, "result %u: the list says %%%u, the task makes %%%u", i,
                            value, task->outputs[i]);
    }
    JPP_RETURN_IF_ERROR(jpp__walk_define(w, w->program->operands[first + i],
                                         content_of_result(w, value)));
  }
  return NULL;
}

// A result in an argument's memory has the argument's kind: updated weights are weights.
static void hand_kind_on(jpp_walk_t* w, const jpp_content_t* arg, uint32_t output) {
  uint32_t first = w->instr->first_operand + w->instr->num_args;
  jpp_content_t* result = &w->registers[w->program->operands[first + output]];
  bool argument =
      arg->kind == JPP_BYTES_WEIGHTS || arg->kind == JPP_BYTES_OPTIMIZER_STATE;
  if (!argument || result->kind != JPP_BYTES_STEP_VALUES) return;
  uint64_t bytes = w->c->plan->value_bytes[result->value];
  w->live_of[result->kind] -= bytes;
  w->live_of[arg->kind] += bytes;
  result->kind = arg->kind;
}

static jpp_status_t* donate_arg(jpp_walk_t* w, uint32_t index, uint32_t output) {
  char text[JPP_CHECK_TEXT_SIZE];
  uint32_t reg = w->program->operands[w->instr->first_operand + index];
  const jpp_content_t* content = &w->registers[reg];
  if (content->owner != JPP_OWNER_PROGRAM) {
    return jpp__walk_fail(w, "donates %s, which the program does not own",
                          jpp__check_content_text(w->c, content, text));
  }
  if (w->reads[reg].twice) {
    return jpp__walk_fail(w, "donates register %u as arg %u and reads it as another", reg,
                          index);
  }
  hand_kind_on(w, content, output);
  jpp__walk_drop(w, reg);
  return NULL;
}

jpp_status_t* jpp__check_run(jpp_walk_t* w) {
  JPP_RETURN_IF_ERROR(jpp__check_count_run(w));
  JPP_RETURN_IF_ERROR(check_args(w));
  JPP_RETURN_IF_ERROR(define_results(w));
  const uint32_t* donated_to = w->c->plan->bindings[w->instr->target].donated_to;
  for (uint32_t i = 0; i < w->instr->num_args; ++i) {
    if (donated_to[i] == JPP_NONE) continue;
    JPP_RETURN_IF_ERROR(donate_arg(w, i, donated_to[i]));
  }
  return NULL;
}

// --- All runs of a task ---------------------------------------------------------------

// A result of the same type and size takes over a donated arg's memory, both are in
// device memory while the task runs, and no result takes over two args. `taken` has room
// for the task's outputs.
static jpp_status_t* check_donation(const jpp_checker_t* c, const jpp_task_t* task,
                                    uint32_t input, uint32_t output, bool* taken) {
  if (output >= task->num_outputs) {
    return jpp_status_make(JPP_PROGRAM_ERROR,
                           "task %s: arg %u is donated to result %u; there are %u",
                           task->name, input, output, task->num_outputs);
  }
  uint32_t from = task->inputs[input], to = task->outputs[output];
  const jpp_value_t* values = c->staged->values;
  const uint64_t* bytes = c->plan->value_bytes;
  jpp_type_t arg = values[from].type, made = values[to].type;
  arg.memory = made.memory = JPP_MEMORY_DEVICE;
  bool alike = jpp_type_equal(&arg, &made) && bytes[from] == bytes[to];
  if (alike && !taken[output]) {
    taken[output] = true;
    return NULL;
  }
  char text[JPP_CHECK_TEXT_SIZE], result[JPP_CHECK_TEXT_SIZE];
  return jpp_status_make(
      JPP_PROGRAM_ERROR, "task %s: arg %u, %s, is donated to result %u, %s, which %s",
      task->name, input, jpp__check_value_text(c, from, JPP_NONE, text), output,
      jpp__check_value_text(c, to, JPP_NONE, result),
      alike ? "takes over another's memory" : "differs in type");
}

static jpp_status_t* check_binding(const jpp_checker_t* c, uint32_t id, bool* taken) {
  const jpp_task_t* task = &c->staged->tasks[id];
  const uint32_t* donated_to = c->plan->bindings[id].donated_to;
  jpp_status_t* status = NULL;
  for (uint32_t i = 0; i < task->num_inputs && !status; ++i) {
    if (donated_to[i] == JPP_NONE) continue;
    status = check_donation(c, task, i, donated_to[i], taken);
  }
  for (uint32_t i = 0; i < task->num_outputs; ++i) taken[i] = false;
  return status;
}

jpp_status_t* jpp__check_bindings(const jpp_checker_t* c) {
  bool* taken = NULL;
  uint32_t most = 0;
  for (uint32_t t = 0; t < c->staged->num_tasks; ++t) {
    if (c->staged->tasks[t].num_outputs > most) most = c->staged->tasks[t].num_outputs;
  }
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(most, &taken));
  jpp_status_t* status = NULL;
  for (uint32_t t = 0; t < c->staged->num_tasks && !status; ++t) {
    status = check_binding(c, t, taken);
  }
  jpp_free(taken);
  return status;
}

jpp_status_t* jpp__check_run_counts(const jpp_checker_t* c) {
  for (uint32_t t = 0; t < c->staged->num_tasks; ++t) {
    const jpp_task_t* task = &c->staged->tasks[t];
    bool outside = task->loop == JPP_NONE;
    uint32_t due = outside ? 1 : c->staged->graph->loops[task->loop].microbatches;
    if (c->runs[t] == due && c->plan->bindings[t].runs == due) continue;
    return jpp_status_make(
        JPP_PROGRAM_ERROR,
        "rank %u: task %s runs %u times, its binding says %u, expected %u: once for each "
        "microbatch",
        task->rank, task->name, c->runs[t], c->plan->bindings[t].runs, due);
  }
  return NULL;
}
