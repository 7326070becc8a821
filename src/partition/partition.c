// Runs the partitioner's passes in order and returns their tables as an immutable staged
// graph.
#include "base/null.h"
#include "base/struct_size.h"
#include "partition/partitioner.h"

bool jpp_rank_set_has(jpp_rank_set_t set, uint32_t rank) {
  return jpp__ranks_has(set, rank);
}

jpp_status_t* jpp__partition_add_op(jpp_partitioner_t* p, const jpp_op_t* op,
                                    uint32_t* out_op) {
  *out_op = (uint32_t)p->ops.count;
  jpp_op_t copy = *op;
  JPP_RETURN_IF_ERROR(jpp__arena_copy(
      p->arena, op->inputs, op->num_inputs * sizeof(*op->inputs), (void**)&copy.inputs));
  return JPP_VEC_PUSH(&p->ops, copy);
}

jpp_status_t* jpp__partition_add_value(jpp_partitioner_t* p, uint32_t like, uint32_t loop,
                                       uint32_t producer, uint32_t* out_value) {
  *out_value = (uint32_t)p->values.count;
  jpp_value_t value = p->values.data[like];
  value.producer = producer;
  value.loop = loop;
  value.name = NULL;
  uint32_t origin = p->origins.data[like];
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&p->origins, origin));
  return JPP_VEC_PUSH(&p->values, value);
}

jpp_status_t* jpp__partition_define(jpp_partitioner_t* p, const jpp_op_t* op,
                                    uint32_t like, uint32_t loop, uint32_t* out_op,
                                    uint32_t* out_value) {
  JPP_RETURN_IF_ERROR(jpp__partition_add_op(p, op, out_op));
  JPP_RETURN_IF_ERROR(jpp__partition_add_value(p, like, loop, *out_op, out_value));
  p->ops.data[*out_op].first_output = *out_value;
  return NULL;
}

jpp_status_t* jpp__partition_flatten(jpp_partitioner_t* p, uint32_t value,
                                     uint64_t elements, uint64_t bytes) {
  int64_t* dims = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, 1, &dims));
  dims[0] = (int64_t)elements;
  jpp_value_t* flat = &p->values.data[value];
  flat->type.ndim = 1;
  flat->type.dims = dims;
  flat->bytes = bytes;
  return NULL;
}

static jpp_status_t* check_placement(const jpp_graph_t* graph, uint32_t loop,
                                     const jpp_partition_options_t* options) {
  const jpp_loop_placement_t* placement = &options->loops[loop];
  const char* where = graph->loops[loop].where ? graph->loops[loop].where : "?";
  if (placement->stages == 0) {
    return jpp_status_make(JPP_SCHEDULE_ERROR,
                           "loop at %s: the schedule has 0 stages; expected at least 1",
                           where);
  }
  for (uint32_t s = 0; s < placement->stages; ++s) {
    if (placement->stage_rank[s] < options->ranks) continue;
    return jpp_status_make(
        JPP_MESH_ERROR, "loop at %s: stage %u runs on rank %u; expected a rank below %u",
        where, s, placement->stage_rank[s], options->ranks);
  }
  return NULL;
}

// Lists the ops outside in order; at each loop, finds its stages and reduces its results.
static jpp_status_t* split_loops(jpp_partitioner_t* p) {
  for (uint32_t id = 0; id < p->graph->num_ops; ++id) {
    const jpp_op_t* op = &p->ops.data[id];
    if (op->kind == JPP_OP_LOOP) {
      uint32_t loop = op->attr;
      JPP_RETURN_IF_ERROR(check_placement(p->graph, loop, p->options));
      JPP_RETURN_IF_ERROR(jpp__partition_assign_stages(p, loop));
      JPP_RETURN_IF_ERROR(jpp__partition_shrink_calls(p, loop));
      JPP_RETURN_IF_ERROR(jpp__partition_split_backwards(p, loop));
      JPP_RETURN_IF_ERROR(jpp__partition_note_stage_moves(p, loop));
      JPP_RETURN_IF_ERROR(jpp__partition_make_tasks(p, loop));
      JPP_RETURN_IF_ERROR(jpp__partition_reduce(p, loop));
    } else if (p->segment[id] == JPP_SEGMENT_OUTER || p->outer_copy[id]) {
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&p->outer, id));
    }
  }
  return NULL;
}

static jpp_status_t* fill_scopes(jpp_partitioner_t* p, const uint8_t** out_scopes) {
  uint8_t* scopes = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, p->values.count, &scopes));
  for (size_t v = 0; v < p->values.count; ++v) {
    uint32_t producer = p->values.data[v].producer;
    bool leaves = producer != JPP_NONE && producer < p->graph->num_ops &&
                  (p->segment[producer] == JPP_SEGMENT_OUTER || p->outer_copy[producer]);
    bool body = p->values.data[v].loop != JPP_NONE && !leaves;
    scopes[v] = body ? JPP_SCOPE_MICROBATCH : JPP_SCOPE_STEP;
  }
  for (size_t i = 0; i < p->accumulators.count; ++i) {
    scopes[p->accumulators.data[i].state] = JPP_SCOPE_STATE;
    scopes[p->accumulators.data[i].next] = JPP_SCOPE_STATE;
  }
  *out_scopes = scopes;
  return NULL;
}

// The ranks of an argument or output: those that the user gave, or else all that need the
// value.
static jpp_status_t* find_ranks(jpp_partitioner_t* p, uint32_t value,
                                const uint32_t* ranks, uint32_t count,
                                jpp_rank_set_t* out_set) {
  *out_set = jpp__need_at(p, value);
  if (!count) return NULL;
  uint64_t* set = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, p->words, &set));
  jpp__ranks_add_all(set, ranks, count);
  *out_set = set;
  return NULL;
}

static jpp_status_t* fill_ends(jpp_partitioner_t* p, jpp_staged_t* staged) {
  jpp_staged_value_t *args = NULL, *outputs = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, p->graph->num_args, &args));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, p->graph->num_outputs, &outputs));
  for (uint32_t i = 0; i < p->graph->num_args; ++i) {
    const jpp_graph_arg_t* arg = &p->graph->args[i];
    args[i].value = arg->value;
    JPP_RETURN_IF_ERROR(
        find_ranks(p, arg->value, arg->ranks, arg->num_ranks, &args[i].ranks));
  }
  for (uint32_t i = 0; i < p->graph->num_outputs; ++i) {
    const jpp_graph_output_t* output = &p->graph->outputs[i];
    outputs[i].value = p->alias[output->value];
    JPP_RETURN_IF_ERROR(find_ranks(p, outputs[i].value, output->ranks, output->num_ranks,
                                   &outputs[i].ranks));
  }
  staged->args = args;
  staged->outputs = outputs;
  return NULL;
}

static jpp_status_t* fill_staged(jpp_partitioner_t* p, jpp_staged_t* staged) {
  staged->graph = p->graph;
  staged->ranks = p->options->ranks;
  staged->loops = p->loops;
  staged->num_values = (uint32_t)p->values.count;
  staged->num_ops = (uint32_t)p->ops.count;
  staged->num_tasks = (uint32_t)p->tasks.count;
  staged->num_accumulators = (uint32_t)p->accumulators.count;
  staged->num_notes = (uint32_t)p->notes.count;
  JPP_RETURN_IF_ERROR(fill_scopes(p, &staged->scopes));
  JPP_RETURN_IF_ERROR(fill_ends(p, staged));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&p->values, p->arena, &staged->values));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&p->origins, p->arena, &staged->origins));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&p->ops, p->arena, &staged->ops));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&p->tasks, p->arena, &staged->tasks));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&p->notes, p->arena, &staged->notes));
  return JPP_VEC_TO_ARENA(&p->accumulators, p->arena, &staged->accumulators);
}

static jpp_status_t* run_passes(jpp_partitioner_t* p, jpp_staged_t* staged) {
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, p->graph->num_loops, &p->loops));
  JPP_RETURN_IF_ERROR(jpp__partition_resolve_marks(p));
  JPP_RETURN_IF_ERROR(jpp__partition_classify(p));
  JPP_RETURN_IF_ERROR(jpp__partition_merge_hoisted(p));
  jpp__partition_find_outer_copies(p);
  JPP_RETURN_IF_ERROR(split_loops(p));
  JPP_RETURN_IF_ERROR(jpp__partition_fill_tasks(p));
  JPP_RETURN_IF_ERROR(jpp__partition_share_stages(p));
  JPP_RETURN_IF_ERROR(jpp__partition_place(p));
  JPP_RETURN_IF_ERROR(jpp__partition_make_outer_tasks(p));
  JPP_RETURN_IF_ERROR(jpp__partition_pack_scalars(p));
  JPP_RETURN_IF_ERROR(jpp__partition_share_outer(p));
  JPP_RETURN_IF_ERROR(jpp__partition_find_outputs(p));
  return fill_staged(p, staged);
}

// The graph may have been built before the number of ranks was known, so its ranks are
// checked here.
static jpp_status_t* check_ranks(const jpp_graph_t* graph, uint32_t ranks) {
  for (uint32_t i = 0; i < graph->num_args; ++i) {
    const jpp_graph_arg_t* arg = &graph->args[i];
    uint32_t last = arg->num_ranks ? arg->ranks[arg->num_ranks - 1] : 0;
    if (last < ranks) continue;
    return jpp_status_make(
        JPP_MESH_ERROR, "argument %u (%s) is given on rank %u; expected one of %u ranks",
        i, graph->values[arg->value].name ? graph->values[arg->value].name : "unnamed",
        last, ranks);
  }
  for (uint32_t i = 0; i < graph->num_ops; ++i) {
    const jpp_op_t* op = &graph->ops[i];
    uint32_t last = op->num_ranks ? op->ranks[op->num_ranks - 1] : 0;
    if (last < ranks) continue;
    return jpp_status_make(JPP_MESH_ERROR,
                           "task %s (%s) runs on rank %u; expected one of %u ranks",
                           op->name, op->where ? op->where : "?", last, ranks);
  }
  for (uint32_t i = 0; i < graph->num_outputs; ++i) {
    const jpp_graph_output_t* output = &graph->outputs[i];
    uint32_t last = output->num_ranks ? output->ranks[output->num_ranks - 1] : 0;
    if (last < ranks) continue;
    return jpp_status_make(
        JPP_MESH_ERROR, "output %u (%s) is left on rank %u; expected one of %u ranks", i,
        output->name ? output->name : "without a name", last, ranks);
  }
  return NULL;
}

jpp_status_t* jpp_partition(const jpp_graph_t* graph,
                            const jpp_partition_options_t* options,
                            jpp_staged_t** out_staged) {
  JPP_RETURN_IF_NULL(graph, options, out_staged);
  *out_staged = NULL;
  jpp_partition_options_t full;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_partition_options_t, small_bytes, options, &full));
  if (graph->num_loops) JPP_RETURN_IF_NULL(full.loops);
  if (full.ranks == 0) {
    return jpp_status_make(JPP_MESH_ERROR, "0 pipeline ranks; expected at least 1");
  }
  JPP_RETURN_IF_ERROR(check_ranks(graph, full.ranks));
  jpp_staged_storage_t* storage = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  jpp_partitioner_t partitioner = {
      .graph = graph, .options = &full, .arena = &storage->arena};
  jpp_status_t* status = run_passes(&partitioner, &storage->staged);
  jpp_vec_deinit(&partitioner.values);
  jpp_vec_deinit(&partitioner.origins);
  jpp_vec_deinit(&partitioner.notes);
  jpp_vec_deinit(&partitioner.ops);
  jpp_vec_deinit(&partitioner.tasks);
  jpp_vec_deinit(&partitioner.made);
  jpp_vec_deinit(&partitioner.accumulators);
  jpp_vec_deinit(&partitioner.outer);
  jpp__arena_deinit(&partitioner.scratch);
  if (status) {
    jpp_staged_destroy(&storage->staged);
    return status;
  }
  *out_staged = &storage->staged;
  return NULL;
}

void jpp_staged_destroy(jpp_staged_t* staged) {
  if (!staged) return;
  jpp_staged_storage_t* storage = (jpp_staged_storage_t*)staged;
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage);
}

bool jpp_staged_is_packed(const jpp_staged_t* staged, uint32_t value) {
  uint32_t origin = staged->origins[value];
  return !jpp_type_equal(&staged->values[value].type, &staged->values[origin].type);
}

static double cost_of_parts(const jpp_staged_t* staged, uint32_t task) {
  double cost = 0;
  for (; task != JPP_NONE; task = staged->tasks[task].next_part) {
    cost += (double)staged->tasks[task].cost;
  }
  return cost;
}

jpp_cost_t jpp_staged_stage_cost(const jpp_staged_t* staged, uint32_t loop,
                                 uint32_t stage) {
  const jpp_staged_loop_t* at = &staged->loops[loop];
  jpp_cost_t cost = {.forward = cost_of_parts(staged, at->forward[stage])};
  if (at->has_backward) cost.backward = cost_of_parts(staged, at->backward[stage]);
  if (at->split_backward) cost.weight = cost_of_parts(staged, at->weight[stage]);
  return cost;
}
