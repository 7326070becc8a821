// Prints a staged graph as text, for golden tests and `jaxpp plan --after partition`.
#include "graph/print.h"

#include "base/null.h"
#include "base/str.h"
#include "partition/notes.h"
#include "partition/partitioner.h"

static void append_values(jpp_str_t* str, const char* label, const jpp_staged_t* staged,
                          const uint32_t* values, uint32_t count) {
  if (!count) return;
  jpp_str_appendf(str, "  %s", label);
  for (uint32_t i = 0; i < count; ++i) {
    jpp_str_appendf(str, " %%%u:", values[i]);
    jpp__type_append(str, &staged->values[values[i]].type);
  }
  jpp_str_append(str, "\n");
}

static void append_ranks(jpp_str_t* str, const jpp_staged_t* staged,
                         jpp_rank_set_t ranks) {
  const char* separator = "";
  jpp_str_append(str, "{");
  for (uint32_t r = 0; r < staged->ranks; ++r) {
    if (!jpp_rank_set_has(ranks, r)) continue;
    jpp_str_appendf(str, "%s%u", separator, r);
    separator = ",";
  }
  jpp_str_append(str, "}");
}

static void append_task(jpp_str_t* str, const jpp_staged_t* staged,
                        const jpp_task_t* task) {
  jpp_str_appendf(str, "task %s rank %u", task->name, task->rank);
  const jpp_task_t* first = &staged->tasks[task->repeats];
  if (first != task) jpp_str_appendf(str, " repeats %s", first->name);
  if (task->next_part != JPP_NONE) {
    jpp_str_appendf(str, " then %s", staged->tasks[task->next_part].name);
  }
  if (task->cost > 0) jpp_str_appendf(str, " cost %g", (double)task->cost);
  jpp_str_append(str, "\n");
  append_values(str, "in ", staged, task->inputs, task->num_inputs);
  append_values(str, "out", staged, task->outputs, task->num_outputs);
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    jpp_str_append(str, "    ");
    jpp__op_append(str, staged->values, &staged->ops[task->ops[i]]);
  }
}

static bool hands_out(const jpp_task_t* task, uint32_t value) {
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    if (task->outputs[i] == value) return true;
  }
  return false;
}

// The origin of an output's copies: a task that one or several ranks run.
static void append_makers(jpp_str_t* str, const jpp_staged_t* staged, uint32_t value) {
  const jpp_task_t* first = NULL;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    if (!hands_out(task, value)) continue;
    jpp_str_appendf(str, first ? ",%u" : " made on {%u", task->rank);
    if (!first) first = task;
  }
  if (first) jpp_str_appendf(str, "} by %s", first->name);
}

static uint32_t count_ranks(const jpp_staged_t* staged, jpp_rank_set_t ranks) {
  uint32_t count = 0;
  for (uint32_t r = 0; r < staged->ranks; ++r) count += jpp_rank_set_has(ranks, r);
  return count;
}

static void append_ends(jpp_str_t* str, const jpp_staged_t* staged) {
  for (uint32_t i = 0; i < staged->graph->num_args; ++i) {
    jpp_str_appendf(str, "arg %%%u on ", staged->args[i].value);
    append_ranks(str, staged, staged->args[i].ranks);
    jpp_str_append(str, "\n");
  }
  for (uint32_t i = 0; i < staged->graph->num_outputs; ++i) {
    jpp_str_appendf(str, "out %%%u on ", staged->outputs[i].value);
    append_ranks(str, staged, staged->outputs[i].ranks);
    if (count_ranks(staged, staged->outputs[i].ranks) > 1) {
      append_makers(str, staged, staged->outputs[i].value);
    }
    jpp_str_append(str, "\n");
  }
}

jpp_status_t* jpp_staged_print(const jpp_staged_t* staged, char** out_text) {
  JPP_RETURN_IF_NULL(staged, out_text);
  jpp_str_t str = {0};
  jpp_str_append(&str, "staged ");
  jpp__str_append_quoted(&str, staged->graph->name);
  jpp_str_appendf(&str, " ranks %u\n", staged->ranks);
  for (uint32_t i = 0; i < staged->num_tasks; ++i) {
    append_task(&str, staged, &staged->tasks[i]);
  }
  for (uint32_t i = 0; i < staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &staged->accumulators[i];
    jpp_str_appendf(
        &str, "accumulator loop %u result %u task %s: %%%u -> (%%%u -> %%%u) -> %%%u\n",
        acc->loop, acc->result, staged->tasks[acc->task].name, acc->init, acc->state,
        acc->next, acc->final);
  }
  append_ends(&str, staged);
  for (uint32_t i = 0; i < staged->num_notes; ++i) {
    jpp_str_append(&str, "note ");
    jpp__note_append(&str, staged, &staged->notes[i]);
    jpp_str_append(&str, "\n");
  }
  return jpp_str_finish(&str, out_text);
}
