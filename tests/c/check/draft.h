// A copy of a plan for tests to damage.
#ifndef TESTS_C_DRAFT_H_
#define TESTS_C_DRAFT_H_

#include <stdlib.h>
#include <string.h>

#include "jaxpp/program.h"

enum { DRAFT_ROOM = 256 };  // for more operands

// A plan whose arrays are writable.
typedef struct draft {
  jpp_plan_t plan;
  jpp_program_t* programs;
  jpp_plan_channel_t* channels;
  jpp_task_binding_t* bindings;
} draft_t;

static inline void* copy_of(const void* data, size_t size, size_t room) {
  void* copy = calloc(1, size + room);
  if (size) memcpy(copy, data, size);
  return copy;
}
#define COPY(array, count, extra) \
  copy_of((array), (count) * sizeof(*(array)), (extra) * sizeof(*(array)))

static inline draft_t draft_create(const jpp_plan_t* plan) {
  draft_t d = {.plan = *plan};
  d.plan.programs = d.programs = COPY(plan->programs, plan->ranks, 0);
  d.plan.channels = d.channels = COPY(plan->channels, plan->num_channels, 1);
  d.plan.bindings = d.bindings = COPY(plan->bindings, plan->staged->num_tasks, 0);
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    jpp_program_t* p = &d.programs[r];
    p->instrs = COPY(p->instrs, p->num_instrs, 1);
    p->operands = COPY(p->operands, p->num_operands, DRAFT_ROOM);
    p->operand_values = COPY(p->operand_values, p->num_operand_values, DRAFT_ROOM);
    p->inputs = COPY(p->inputs, p->num_inputs, 0);
    p->constants = COPY(p->constants, p->num_constants, 0);
    p->outputs = COPY(p->outputs, p->num_outputs, 0);
  }
  for (uint32_t t = 0; t < plan->staged->num_tasks; ++t) {
    d.bindings[t].donated_to =
        COPY(plan->bindings[t].donated_to, plan->staged->tasks[t].num_inputs, 0);
  }
  return d;
}

static inline void draft_free(draft_t* d) {
  for (uint32_t r = 0; r < d->plan.ranks; ++r) {
    free((void*)d->programs[r].instrs);
    free((void*)d->programs[r].operands);
    free((void*)d->programs[r].operand_values);
    free((void*)d->programs[r].inputs);
    free((void*)d->programs[r].constants);
    free((void*)d->programs[r].outputs);
  }
  for (uint32_t t = 0; t < d->plan.staged->num_tasks; ++t) {
    free((void*)d->bindings[t].donated_to);
  }
  free(d->programs);
  free(d->channels);
  free(d->bindings);
}

#endif  // TESTS_C_DRAFT_H_
