// Rule 5 of partition.h: decides the ranks and the phase of every op outside the loops.
//
// First each value that depends on a loop gets its "home", the ranks that can compute it
// without a transfer (homes.c). Then a backward pass gives each value the ranks that need
// it and each op the ranks that run it. An unused op runs nowhere, unless it has an
// effect.
#include <string.h>

#include "partition/placer.h"
#include "task/ids.h"

enum { kDefaultSmallBytes = 4096, kFewBytes = 64 };

static uint64_t* left_at(const jpp_placer_t* c, uint32_t value) {
  return c->left + (size_t)value * c->p->words;
}

// --- Backward: needs ------------------------------------------------------------------

static void need_by_stage_tasks(jpp_placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (size_t t = 0; t < p->tasks.count; ++t) {
    const jpp_task_t* task = &p->tasks.data[t];
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      uint32_t value = task->inputs[i];
      jpp__ranks_add(jpp__need_at(p, value), task->rank);
      if (task->loop < c->phase[value]) c->phase[value] = task->loop;
    }
  }
}

// Adds the needs of ops that run on every rank that needs their results, as far as these
// needs are known before outputs are placed.
static void need_of_unfixed(const jpp_placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (size_t i = c->order.count; i-- > 0;) {
    const jpp_op_t* op = &p->ops.data[c->order.data[i]];
    if (!op->num_outputs || jpp__is_fixed(c, op->first_output)) continue;
    if (op->flags & JPP_OP_EFFECT) continue;  // runs once
    memset(c->scratch, 0, p->words * sizeof(*c->scratch));
    for (uint32_t k = 0; k < op->num_outputs; ++k) {
      jpp__ranks_unite(c->scratch, jpp__need_at(p, op->first_output + k), p->words);
    }
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      jpp__ranks_unite(jpp__need_at(p, op->inputs[k]), c->scratch, p->words);
    }
  }
}

static bool is_unneeded(const jpp_placer_t* c, uint32_t value) {
  return jpp__ranks_first(jpp__need_at(c->p, value), c->p->words) == JPP_NONE;
}

// Adds a need of each array for the next step that depends on no loop and that nothing
// else uses, for example the moving average of a frozen weight: a rank that needs one of
// the values from which it is computed.
static jpp_status_t* need_beside_operands(const jpp_placer_t* c) {
  jpp_partitioner_t* p = c->p;
  // [values] a rank that needs it or, if none does, a value that it is computed from.
  uint32_t* near = NULL;
  JPP_RETURN_IF_ERROR(jpp__ids_create(&p->scratch, p->values.count, &near));
  for (uint32_t value = 0; value < p->values.count; ++value) {
    near[value] = jpp__ranks_first(jpp__need_at(p, value), p->words);
  }
  for (size_t i = 0; i < c->order.count; ++i) {
    const jpp_op_t* op = &p->ops.data[c->order.data[i]];
    uint32_t rank = JPP_NONE;
    for (uint32_t k = 0; k < op->num_inputs && rank == JPP_NONE; ++k) {
      if (jpp__is_array(c, op->inputs[k])) rank = near[op->inputs[k]];
    }
    for (uint32_t k = 0; k < op->num_outputs && rank != JPP_NONE; ++k) {
      uint32_t value = op->first_output + k;
      if (near[value] != JPP_NONE) continue;
      near[value] = rank;
      bool stays = c->is_next[value] && jpp__is_array(c, value) && !c->anchored[value];
      if (stays) jpp__ranks_add(jpp__need_at(p, value), rank);
    }
  }
  return NULL;
}

// A small output that depends on no loop is left on all ranks. An array that the step
// passes on unchanged, or that the next step takes, stays on the ranks that take it.
static bool is_left_on_all(const jpp_placer_t* c, uint32_t value) {
  bool passed_on = c->p->values.data[value].producer == JPP_NONE || c->is_next[value];
  bool stays = passed_on && jpp__is_array(c, value) && !is_unneeded(c, value);
  return jpp__is_small_value(c, value) && !stays;
}

// An output of the step is left on the ranks of its users; without users it is left on
// its home, on all ranks if it is small and depends on no loop, or else on one rank.
static void need_as_output(jpp_placer_t* c, uint32_t value) {
  uint64_t* need = jpp__need_at(c->p, value);
  uint32_t words = c->p->words;
  jpp__ranks_unite(need, left_at(c, value), words);
  if (!c->is_output[value]) return;
  if (jpp__is_fixed(c, value)) {
    jpp__ranks_unite(need, jpp__home_at(c, value), words);
  } else if (!c->anchored[value] && is_left_on_all(c, value)) {
    jpp__all_ranks(c, need);
  } else if (jpp__ranks_first(need, words) == JPP_NONE) {
    jpp__ranks_add(
        need, c->anchored[value] ? jpp__ranks_first(jpp__home_at(c, value), words) : 0);
  }
}

// An op with an effect runs once: on the first rank that needs its results or, if none
// does, where its operands are. A task that the user wrote runs on the user's ranks.
static void run_once(const jpp_placer_t* c, const jpp_op_t* op, uint64_t* run) {
  if (op->kind == JPP_OP_TASK) {
    memset(run, 0, c->p->words * sizeof(*run));
    jpp__ranks_add_all(run, op->ranks, op->num_ranks);
    return;
  }
  uint32_t rank = jpp__ranks_first(run, c->p->words);
  if (rank == JPP_NONE) {
    jpp__placer_home_of_operands(c, op);
    rank = jpp__ranks_first(c->scratch, c->p->words);
  }
  memset(run, 0, c->p->words * sizeof(*run));
  jpp__ranks_add(run, rank);
}

// An op runs on those ranks of its home that need it. If there are none, the first rank
// of its home runs it and sends the result.
static void choose_ranks(jpp_placer_t* c, uint32_t id) {
  jpp_partitioner_t* p = c->p;
  const jpp_op_t* op = &p->ops.data[id];
  uint64_t* run = jpp__run_at(p, id);
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    uint32_t value = op->first_output + i;
    need_as_output(c, value);
    jpp__ranks_unite(run, jpp__need_at(p, value), p->words);
  }
  if (op->flags & JPP_OP_EFFECT) {
    run_once(c, op, run);
    return;
  }
  if (!op->num_outputs || jpp__ranks_first(run, p->words) == JPP_NONE) return;
  if (!jpp__is_fixed(c, op->first_output)) return;
  const uint64_t* home = jpp__home_at(c, op->first_output);
  jpp__ranks_intersect(run, home, p->words);
  if (jpp__ranks_first(run, p->words) == JPP_NONE) {
    jpp__ranks_add(run, jpp__ranks_first(home, p->words));
  }
}

static void choose_phase(jpp_placer_t* c, uint32_t id) {
  const jpp_op_t* op = &c->p->ops.data[id];
  if (!op->num_outputs) return;
  bool anchored = c->anchored[op->first_output];
  if (anchored && !c->floats[op->first_output]) return;
  uint32_t phase = c->p->graph->num_loops;
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    uint32_t first = c->phase[op->first_output + i];
    if (first < phase) phase = first;
    uint64_t bytes = c->p->values.data[op->first_output + i].bytes;
    if (bytes > kFewBytes && !anchored) c->p->arrays[id] = true;
  }
  c->p->phase[id] = phase;
}

// Bytes of the op's operands that must be sent to `rank`; 0 for sums, which are
// regrouped, and for ops that the user placed.
static uint64_t bytes_moved(const jpp_placer_t* c, const jpp_op_t* op, uint32_t rank) {
  if (op->kind != JPP_OP_CALL) return 0;
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    uint32_t value = op->inputs[i];
    bool here = !jpp__is_fixed(c, value) || jpp__ranks_has(jpp__home_at(c, value), rank);
    if (!here) bytes += c->p->values.data[value].bytes;
  }
  return bytes;
}

static jpp_status_t* place_backward(jpp_placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (size_t i = c->order.count; i-- > 0;) {
    uint32_t id = c->order.data[i];
    const jpp_op_t* op = &p->ops.data[id];
    if (op->kind == JPP_OP_LOOP) continue;
    choose_ranks(c, id);
    if (jpp__ranks_first(jpp__run_at(p, id), p->words) == JPP_NONE) continue;
    choose_phase(c, id);
    uint32_t rank = jpp__ranks_first(jpp__run_at(p, id), p->words);
    JPP_RETURN_IF_ERROR(jpp__partition_note_moves(p, id, rank, bytes_moved(c, op, rank)));
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t value = op->inputs[k];
      jpp__ranks_unite(jpp__need_at(p, value), jpp__run_at(p, id), p->words);
      bool is_made_late = !c->anchored[value] || c->floats[value];
      if (is_made_late && p->phase[id] < c->phase[value]) c->phase[value] = p->phase[id];
    }
  }
  return NULL;
}

// Adds the needs of outputs that no op outside the loops makes: arguments and loop
// results.
static void need_of_plain_outputs(jpp_placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    uint32_t value = p->alias[p->graph->outputs[i].value];
    uint32_t producer = p->values.data[value].producer;
    bool plain = producer == JPP_NONE || jpp__ends_loop(p, producer);
    if (plain) need_as_output(c, value);
  }
}

// An output that becomes an argument of the next step is sent to the ranks that need that
// argument, for example weights that stages share when only one of their ranks updates
// them.
static void need_as_next_args(jpp_placer_t* c) {
  jpp_partitioner_t* p = c->p;
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    const jpp_graph_output_t* output = &p->graph->outputs[i];
    if (output->next == JPP_NONE || output->num_ranks) continue;
    jpp__ranks_unite(jpp__need_at(p, p->alias[output->value]),
                     jpp__need_at(p, output->next), p->words);
  }
}

// Regrouping a tree of sums adds at most one value for each of its inner sums.
static jpp_status_t* allocate_tables(jpp_placer_t* c) {
  jpp_partitioner_t* p = c->p;
  size_t values = p->values.count + p->outer.count;
  size_t ops = p->ops.count + p->outer.count;
  p->words = (p->options->ranks + 63) / 64;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, values * p->words, &p->need));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, ops * p->words, &p->run));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, ops, &p->phase));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, ops, &p->arrays));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values * p->words, &c->home));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->anchored));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->everywhere));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->floats));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->weight));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->is_output));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->is_next));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values * p->words, &c->left));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, values, &c->phase));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, p->words, &c->scratch));
  for (size_t i = 0; i < values; ++i) c->phase[i] = p->graph->num_loops;
  return NULL;
}

static void note_outputs(const jpp_placer_t* c) {
  const jpp_partitioner_t* p = c->p;
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    const jpp_graph_output_t* output = &p->graph->outputs[i];
    uint32_t value = p->alias[output->value];
    if (!output->num_ranks) {
      c->is_output[value] = true;
      c->is_next[value] |= output->next != JPP_NONE;
    }
    jpp__ranks_add_all(left_at(c, value), output->ranks, output->num_ranks);
  }
}

static jpp_status_t* place_all(jpp_placer_t* c) {
  jpp_partitioner_t* p = c->p;
  JPP_RETURN_IF_ERROR(allocate_tables(c));
  note_outputs(c);
  need_by_stage_tasks(c);
  JPP_RETURN_IF_ERROR(jpp__placer_find_homes(c));
  // Ops run on the ranks that need their results in the next step: first, those whose
  // loops need them, for example weights; then, those that update these.
  for (int i = 0; i < 2; ++i) {
    need_of_unfixed(c);
    need_as_next_args(c);
  }
  JPP_RETURN_IF_ERROR(need_beside_operands(c));
  JPP_RETURN_IF_ERROR(place_backward(c));
  need_of_plain_outputs(c);
  need_as_next_args(c);
  jpp_u32_vec_t replaced = p->outer;
  p->outer = c->order;
  c->order = replaced;
  return NULL;
}

jpp_status_t* jpp__partition_place(jpp_partitioner_t* p) {
  jpp_placer_t placer = {.p = p, .small_bytes = p->options->small_bytes};
  if (!placer.small_bytes) placer.small_bytes = kDefaultSmallBytes;
  jpp_status_t* status = place_all(&placer);
  jpp_vec_deinit(&placer.order);
  return status;
}
