// Proves that all copies of a value have the same bits: one task makes it, or tasks that
// are the same module over the same inputs. actor.c and channels.c prove that every
// register holds the value that the program names; so, by induction over the order in
// which values are made, all registers with a value hold the same bits.
#include <string.h>

#include "check/checker.h"
#include "task/ids.h"

static bool same_ids(const uint32_t* a, const uint32_t* b, uint32_t count) {
  return !count || memcmp(a, b, count * sizeof(*a)) == 0;
}

// Whether both tasks lower to the same module and take the same values.
static bool same_module(const jpp_checker_t* c, uint32_t a, uint32_t b) {
  const jpp_task_t *x = &c->staged->tasks[a], *y = &c->staged->tasks[b];
  return x->loop == JPP_NONE && y->loop == JPP_NONE && x->num_ops == y->num_ops &&
         x->num_inputs == y->num_inputs && x->num_outputs == y->num_outputs &&
         same_ids(x->ops, y->ops, x->num_ops) &&
         same_ids(x->inputs, y->inputs, x->num_inputs) &&
         same_ids(x->outputs, y->outputs, x->num_outputs) &&
         same_ids(c->plan->bindings[a].donated_to, c->plan->bindings[b].donated_to,
                  x->num_inputs);
}

static jpp_status_t* check_makers(const jpp_checker_t* c, uint32_t value, uint32_t first,
                                  uint32_t second) {
  const jpp_task_t* tasks = c->staged->tasks;
  char text[JPP_CHECK_TEXT_SIZE];
  if (tasks[second].repeats == first && same_module(c, first, second)) return NULL;
  return jpp_status_make(JPP_PROGRAM_ERROR,
                         "%s is made by %s on rank %u and by %s on rank %u, which are "
                         "not the same task: their "
                         "results may differ in the last digit; expected one task that "
                         "sends the value, or the "
                         "same ops, inputs, outputs and donations on both",
                         jpp__check_value_text(c, value, JPP_NONE, text),
                         tasks[first].name, tasks[first].rank, tasks[second].name,
                         tasks[second].rank);
}

jpp_status_t* jpp__check_copies(jpp_checker_t* c) {
  const jpp_staged_t* staged = c->staged;
  uint32_t* maker = NULL;  // [values] the first task that makes it
  JPP_RETURN_IF_ERROR(jpp__ids_create(&c->scratch, staged->num_values, &maker));
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    for (uint32_t i = 0; i < task->num_outputs; ++i) {
      uint32_t value = task->outputs[i];
      if (maker[value] == JPP_NONE) {
        maker[value] = t;
      } else {
        JPP_RETURN_IF_ERROR(check_makers(c, value, maker[value], t));
      }
    }
  }
  return NULL;
}
