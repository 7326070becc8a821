// Proves the repetitions of an actor's instructions, as in the steady state of a
// schedule, without a visit to each.
//
// Let S be the state before a repetition that the walk has visited, and S' the state
// after it. Suppose that S' is S with the registers renamed by a bijection, and with the
// microbatches and sums of the loop later by `shift`. Suppose further that the next
// instructions are those of the repetition, renamed in the same way and as much later.
// Then each of them passes the checks that its counterpart passed, because a check
// compares contents with each other and with the instruction's microbatch, and does not
// depend on a register's name. So the state after them is S' changed in the same way
// again, and the argument continues from there: only the instructions must be compared
// further, not the states. Live bytes repeat, and so the peak is not exceeded.
//
// Three checks know more of a microbatch than its distance from others:
//
//  - a task and a microbatch must exist and run once: every RUN is still counted;
//  - an initial value serves as a sum of no microbatches: a repetition in which a sum
//    begins is not repeated;
//  - a sum is complete with the last microbatch: what needs a complete sum comes after
//    that one's RUN, which no later microbatch repeats.
//
// Microbatch numbers are in registers that never change. Those of the next repetition
// must hold numbers that are greater by `shift`.
#include <string.h>

#include "check/checker.h"

enum { kTries = 4 };  // repetitions to visit until the states are expected to agree

// --- The period -----------------------------------------------------------------------

static bool is_run_of(const jpp_walk_t* w, uint32_t at, uint32_t loop) {
  const jpp_instr_t* instr = &w->program->instrs[at];
  return instr->kind == JPP_INSTR_RUN && instr->microbatch != JPP_NONE &&
         instr->target < w->c->staged->num_tasks &&
         w->c->staged->tasks[instr->target].loop == loop;
}

// Whether instruction `at` is the one at - length again, apart from its operands.
static bool is_alike(const jpp_walk_t* w, uint32_t at) {
  const jpp_instr_t* later = &w->program->instrs[at];
  const jpp_instr_t* instr = later - w->period.length;
  bool outside = instr->microbatch == JPP_NONE;
  uint64_t microbatch = (uint64_t)instr->microbatch + (outside ? 0 : w->period.shift);
  return outside == (later->microbatch == JPP_NONE) && instr->kind == later->kind &&
         instr->target == later->target && instr->num_args == later->num_args &&
         instr->num_results == later->num_results && later->microbatch == microbatch;
}

// Returns the median RUN of the loop, or JPP_NONE if the actor runs none of its tasks.
static uint32_t middle_run(const jpp_walk_t* w, uint32_t loop) {
  uint32_t runs = 0, before = 0;
  for (uint32_t i = 0; i < w->program->num_instrs; ++i) runs += is_run_of(w, i, loop);
  for (uint32_t i = 0; i < w->program->num_instrs; ++i) {
    if (is_run_of(w, i, loop) && before++ == runs / 2) return i;
  }
  return JPP_NONE;
}

// Sets the shortest period in which the instructions from `middle` on are repeated at
// least once.
static bool find_length(jpp_walk_t* w, uint32_t middle) {
  jpp_period_t* p = &w->period;
  const jpp_instr_t* instrs = w->program->instrs;
  uint64_t compared = 0;  // a bound makes the search linear in any list
  for (uint32_t i = middle + 1;
       i < w->program->num_instrs && compared < w->program->num_instrs; ++i) {
    bool again = instrs[i].kind == JPP_INSTR_RUN &&
                 instrs[i].target == instrs[middle].target &&
                 instrs[i].microbatch != JPP_NONE &&
                 instrs[i].microbatch > instrs[middle].microbatch;
    if (!again) continue;
    p->length = i - middle;
    p->shift = instrs[i].microbatch - instrs[middle].microbatch;
    for (p->end = i; p->end < w->program->num_instrs && is_alike(w, p->end);) ++p->end;
    if (p->end - i >= p->length) return true;
    compared += p->end - i;
  }
  return false;
}

void jpp__walk_find_period(jpp_walk_t* w) {
  const jpp_graph_t* graph = w->c->staged->graph;
  jpp_period_t* p = &w->period;
  *p = (jpp_period_t){.next = JPP_NONE,
                      .before = w->c->before,
                      .next_of = w->c->next_of,
                      .previous_of = w->c->previous_of};
  if (!graph->num_loops || w->c->walks_all) return;
  for (uint32_t l = 1; l < graph->num_loops; ++l) {
    if (graph->loops[l].microbatches > graph->loops[p->loop].microbatches) p->loop = l;
  }
  uint32_t middle = middle_run(w, p->loop);
  if (middle == JPP_NONE || !find_length(w, middle)) return;
  p->next = middle;
  while (p->next && is_alike(w, p->next - 1 + p->length)) --p->next;
}

// --- States ---------------------------------------------------------------------------

// What a register holds `times` repetitions later.
static jpp_content_t later_content(const jpp_walk_t* w, jpp_content_t content,
                                   uint32_t times) {
  if (content.value == JPP_NONE || content.owner == JPP_OWNER_CONSTANT) return content;
  const jpp_accumulator_t* acc = jpp__check_accumulator(w->c, content.value);
  if (acc && acc->next == content.value) {
    if (acc->loop == w->period.loop) content.summed += times * w->period.shift;
  } else if (content.microbatch != JPP_NONE &&
             w->c->staged->values[content.value].loop == w->period.loop) {
    content.microbatch += times * w->period.shift;
  }
  return content;
}

static bool is_constant(const jpp_content_t* content) {
  return content->value != JPP_NONE && content->owner == JPP_OWNER_CONSTANT;
}

// Whether register `to` now holds what `from` held before the repetition, only later.
static bool is_later(const jpp_walk_t* w, uint32_t from, uint32_t to) {
  jpp_content_t expected = later_content(w, w->period.before[from], 1);
  const jpp_content_t* found = &w->registers[to];
  if (found->value != expected.value) return false;
  return found->value == JPP_NONE ||
         (found->microbatch == expected.microbatch &&
          found->microbatch >= w->period.before[from].microbatch &&
          found->summed == expected.summed && found->owner == expected.owner &&
          found->kind == expected.kind && found->memory == expected.memory);
}

// Lets `to` take the place of `from`, unless the states forbid it.
static bool pair_registers(const jpp_walk_t* w, uint32_t from, uint32_t to) {
  const jpp_period_t* p = &w->period;
  if (to >= w->program->num_registers) return false;
  const jpp_content_t *old = &p->before[from], *now = &w->registers[to];
  if (is_constant(old) || is_constant(now)) {
    return is_constant(old) && is_constant(now) &&
           now->microbatch == (uint64_t)old->microbatch + p->shift;
  }
  bool known = p->next_of[from] != JPP_NONE || p->previous_of[to] != JPP_NONE;
  if (known || !is_later(w, from, to)) return false;
  p->next_of[from] = to;
  p->previous_of[to] = from;
  return true;
}

// Pairs the registers that no repeated instruction names. What such a register holds has
// not changed, and empty ones take the place of each other in any order. Returns false
// unless all registers are then paired as the states allow.
static bool pair_rest(const jpp_walk_t* w) {
  const jpp_period_t* p = &w->period;
  uint32_t count = w->program->num_registers, free = 0;
  for (uint32_t r = 0; r < count; ++r) {
    bool holds = p->before[r].value != JPP_NONE && !is_constant(&p->before[r]);
    if (holds && p->next_of[r] == JPP_NONE && !pair_registers(w, r, r)) return false;
  }
  for (uint32_t r = 0; r < count; ++r) {
    if (p->next_of[r] != JPP_NONE || is_constant(&p->before[r])) continue;
    while (free < count &&
           (p->previous_of[free] != JPP_NONE || is_constant(&w->registers[free]))) {
      ++free;
    }
    if (free == count || !pair_registers(w, r, free)) return false;
  }
  return true;
}

// --- Instructions ---------------------------------------------------------------------

// Whether the microbatch of an instruction that was visited is one of the period's loop,
// so that a later one has the same meaning.
static bool moves_on(const jpp_walk_t* w, const jpp_instr_t* instr) {
  if (instr->kind == JPP_INSTR_DELETE) return true;
  const jpp_staged_t* staged = w->c->staged;
  if (instr->kind == JPP_INSTR_RUN) {
    return staged->tasks[instr->target].loop == w->period.loop;
  }
  uint32_t value = w->program->operand_values[instr->first_value];
  return staged->scopes[value] == JPP_SCOPE_MICROBATCH &&
         staged->values[value].loop == w->period.loop;
}

// Lets the `count` registers from operand `to` on take the places of those from operand
// `from` on, unless the states forbid it. Many instructions share their operands.
static bool pair_lists(const jpp_walk_t* w, uint32_t from, uint32_t to, uint32_t count) {
  const uint32_t* operands = w->program->operands;
  jpp_paired_lists_t* known = &w->c->paired[from % JPP_CHECK_PAIRED];
  if (known->count == count && known->from == from && known->to == to) return true;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t old = operands[from + i], now = operands[to + i];
    if (w->period.next_of[old] == now && now != JPP_NONE) continue;
    if (!pair_registers(w, old, now)) return false;
  }
  *known = (jpp_paired_lists_t){.from = from, .to = to, .count = count};
  return true;
}

// Whether instruction `at` is the one at - length again, renamed as those before it.
static bool is_renamed(const jpp_walk_t* w, uint32_t at) {
  const jpp_program_t* program = w->program;
  const jpp_instr_t* later = &program->instrs[at];
  const jpp_instr_t* instr = later - w->period.length;
  uint32_t count = instr->num_args + instr->num_results;
  if ((uint64_t)later->first_operand + count > program->num_operands ||
      (uint64_t)later->first_value + count > program->num_operand_values) {
    return false;
  }
  const uint32_t* values = program->operand_values;
  bool same = !count || instr->first_value == later->first_value ||
              !memcmp(values + instr->first_value, values + later->first_value,
                      count * sizeof(*values));
  if (!same || !moves_on(w, instr)) return false;
  return pair_lists(w, instr->first_operand, later->first_operand, count);
}

// Counts an instruction that is proved.
static jpp_status_t* count_instr(jpp_walk_t* w) {
  if (w->c->curve) {
    w->c->curve[w->at + 1] = w->c->curve[w->at + 1 - w->period.length];
  }
  ++w->c->repeated;
  switch ((jpp_instr_kind_t)w->instr->kind) {
    case JPP_INSTR_RUN:
      ++w->actor->runs;
      return jpp__check_count_run(w);
    case JPP_INSTR_SEND:
    case JPP_INSTR_RECV:
      return jpp__walk_count_transfer(w,
                                      w->program->operand_values[w->instr->first_value]);
    case JPP_INSTR_DELETE:
      ++w->actor->deletes;
      break;
    case JPP_INSTR_MOVE:
      ++w->actor->moves;
      break;
    case JPP_INSTR_KIND_COUNT:
      break;
  }
  return NULL;
}

// --- The walk -------------------------------------------------------------------------

// Changes the state to the one `times` repetitions later: contents move along the cycles
// of the renaming.
static void advance_registers(jpp_walk_t* w, uint32_t times) {
  jpp_period_t* p = &w->period;
  uint32_t count = w->program->num_registers;
  uint32_t* cycle = p->previous_of;  // not needed any more
  memcpy(p->before, w->registers, count * sizeof(*p->before));
  for (uint32_t first = 0; first < count; ++first) {
    uint32_t length = 0;
    for (uint32_t r = first; p->next_of[r] != JPP_NONE;) {
      cycle[length++] = r;
      uint32_t next = p->next_of[r];
      p->next_of[r] = JPP_NONE;
      r = next;
    }
    for (uint32_t i = 0; i < length; ++i) {
      uint32_t to = cycle[(i + (uint64_t)times) % length];
      w->registers[to] = later_content(w, p->before[cycle[i]], times);
    }
  }
}

static jpp_status_t* skip_repetitions(jpp_walk_t* w, uint32_t times) {
  uint32_t end = w->at + times * w->period.length;
  for (; w->at < end; ++w->at) {
    w->instr = &w->program->instrs[w->at];
    JPP_RETURN_IF_ERROR(count_instr(w));
  }
  advance_registers(w, times);
  return NULL;
}

// The number of complete repetitions from here on that are proved.
static uint32_t count_proved(const jpp_walk_t* w) {
  const jpp_period_t* p = &w->period;
  uint32_t registers = w->program->num_registers, at = w->at;
  bool began = w->began != JPP_NONE && w->began >= w->at - p->length;
  if (began || memcmp(p->live_before, w->live, sizeof(w->live)) != 0) return 0;
  memset(p->next_of, 0xff, registers * sizeof(*p->next_of));
  memset(p->previous_of, 0xff, registers * sizeof(*p->previous_of));
  memset(w->c->paired, 0, JPP_CHECK_PAIRED * sizeof(*w->c->paired));
  while (at < p->end && is_renamed(w, at)) ++at;
  uint32_t times = p->length ? (at - w->at) / p->length : 0;
  return times && pair_rest(w) ? times : 0;
}

jpp_status_t* jpp__walk_repeat(jpp_walk_t* w) {
  jpp_period_t* p = &w->period;
  if (p->tries) {
    uint32_t times = count_proved(w);
    p->next = JPP_NONE;
    if (times) return skip_repetitions(w, times);
  }
  if (p->tries++ == kTries) return NULL;
  memcpy(p->before, w->registers, w->program->num_registers * sizeof(*p->before));
  memcpy(p->live_before, w->live, sizeof(w->live));
  p->next = w->at + p->length;
  return NULL;
}
