#include <string.h>

#include "base/vec.h"
#include "graph/graph_internal.h"

struct jpp_graph_builder {
  jpp_graph_storage_t* storage;  // strings, types and inputs go to its arena at once
  JPP_VEC(jpp_value_t) values;
  JPP_VEC(jpp_op_t) ops;
  JPP_VEC(jpp_loop_t) loops;
  JPP_VEC(jpp_graph_arg_t) args;
  JPP_VEC(jpp_graph_output_t) outputs;
  uint32_t open_loop;  // JPP_NONE outside a body
};

static jpp_arena_t* builder_arena(jpp_graph_builder_t* builder) {
  return &builder->storage->arena;
}

jpp_status_t* jpp_graph_builder_create(const char* name, uint32_t ranks,
                                       jpp_graph_builder_t** out_builder) {
  *out_builder = NULL;
  jpp_graph_builder_t* builder = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &builder));
  builder->open_loop = JPP_NONE;
  jpp_status_t* status = JPP_ALLOC_ARRAY(1, &builder->storage);
  if (!status) {
    status = jpp_arena_strdup(builder_arena(builder), name ? name : "step",
                              &builder->storage->graph.name);
  }
  if (status) {
    jpp_graph_builder_destroy(builder);
    return status;
  }
  builder->storage->graph.ranks = ranks;
  *out_builder = builder;
  return NULL;
}

void jpp_graph_builder_destroy(jpp_graph_builder_t* builder) {
  if (!builder) return;
  if (builder->storage) jpp_graph_destroy(&builder->storage->graph);
  jpp_vec_deinit(&builder->values);
  jpp_vec_deinit(&builder->ops);
  jpp_vec_deinit(&builder->loops);
  jpp_vec_deinit(&builder->args);
  jpp_vec_deinit(&builder->outputs);
  jpp_free(builder);
}

// What has been added so far, for a look at it.
static jpp_graph_t builder_view(const jpp_graph_builder_t* builder) {
  return (jpp_graph_t){.num_values = (uint32_t)builder->values.count,
                       .num_ops = (uint32_t)builder->ops.count,
                       .num_loops = (uint32_t)builder->loops.count,
                       .num_outputs = (uint32_t)builder->outputs.count,
                       .values = builder->values.data,
                       .ops = builder->ops.data,
                       .loops = builder->loops.data,
                       .outputs = builder->outputs.data};
}

static jpp_status_t* builder_add_value(jpp_graph_builder_t* builder,
                                       const jpp_type_t* type, uint32_t producer,
                                       const char* name) {
  jpp_value_t value = {.type = *type, .producer = producer, .loop = builder->open_loop};
  value.bytes = jpp_type_bytes(type);
  JPP_RETURN_IF_ERROR(jpp_arena_copy(builder_arena(builder), type->dims,
                                     type->ndim * sizeof(*type->dims),
                                     (void**)&value.type.dims));
  JPP_RETURN_IF_ERROR(jpp_arena_strdup(builder_arena(builder), name, &value.name));
  return JPP_VEC_PUSH(&builder->values, value);
}

jpp_status_t* jpp_graph_builder_add_arg(jpp_graph_builder_t* builder,
                                        const jpp_type_t* type, bool donated,
                                        const char* name, uint32_t* out_value) {
  *out_value = (uint32_t)builder->values.count;
  if (builder->open_loop != JPP_NONE) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "argument %%%u stands inside a loop; arguments "
                           "belong to the step",
                           *out_value);
  }
  JPP_RETURN_IF_ERROR(builder_add_value(builder, type, JPP_NONE, name));
  return JPP_VEC_PUSH(&builder->args,
                      (jpp_graph_arg_t){.value = *out_value, .donated = donated});
}

jpp_status_t* jpp_graph_builder_add_op(jpp_graph_builder_t* builder,
                                       const jpp_op_desc_t* desc,
                                       uint32_t* out_first_output) {
  *out_first_output = (uint32_t)builder->values.count;
  jpp_op_t op = {
      .kind = (uint8_t)desc->kind,
      .flags = desc->flags,
      .attr = desc->attr,
      .loop = builder->open_loop,
      .num_inputs = desc->num_inputs,
      .first_output = *out_first_output,
      .num_outputs = desc->num_outputs,
      .cost = desc->cost,
  };
  jpp_arena_t* arena = builder_arena(builder);
  JPP_RETURN_IF_ERROR(jpp_arena_copy(
      arena, desc->inputs, desc->num_inputs * sizeof(*desc->inputs), (void**)&op.inputs));
  JPP_RETURN_IF_ERROR(jpp_arena_strdup(arena, desc->name ? desc->name : "op", &op.name));
  JPP_RETURN_IF_ERROR(jpp_arena_strdup(arena, desc->where, &op.where));
  uint32_t id = (uint32_t)builder->ops.count;
  for (uint32_t i = 0; i < desc->num_outputs; ++i) {
    JPP_RETURN_IF_ERROR(builder_add_value(builder, &desc->outputs[i], id, NULL));
  }
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&builder->ops, op));
  jpp_graph_t view = builder_view(builder);
  return jpp_graph_verify_op(&view, id);
}

jpp_status_t* jpp_graph_builder_begin_loop(jpp_graph_builder_t* builder,
                                           const jpp_loop_desc_t* desc,
                                           uint32_t* out_index) {
  *out_index = (uint32_t)builder->values.count;
  if (builder->open_loop != JPP_NONE) {
    return jpp_status_make(JPP_UNSUPPORTED,
                           "loop at %s stands inside another microbatch loop; "
                           "put one after the other",
                           desc->where ? desc->where : "?");
  }
  if (desc->microbatches == 0) {
    return jpp_status_make(JPP_MICROBATCH_ERROR,
                           "loop at %s has 0 microbatches; expected at least 1",
                           desc->where ? desc->where : "?");
  }
  jpp_loop_t loop = {
      .op = JPP_NONE,
      .microbatches = desc->microbatches,
      .index = *out_index,
      .first_op = (uint32_t)builder->ops.count,
      .stages = desc->stages,
  };
  jpp_arena_t* arena = builder_arena(builder);
  JPP_RETURN_IF_ERROR(jpp_arena_strdup(arena, desc->schedule, &loop.schedule));
  JPP_RETURN_IF_ERROR(jpp_arena_strdup(arena, desc->where, &loop.where));
  builder->open_loop = (uint32_t)builder->loops.count;
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&builder->loops, loop));
  jpp_type_t index_type = {.dtype = JPP_DTYPE_S32};
  return builder_add_value(builder, &index_type, JPP_NONE, NULL);
}

jpp_status_t* jpp_graph_builder_end_loop(jpp_graph_builder_t* builder,
                                         const jpp_loop_result_t* results,
                                         const jpp_type_t* types, uint32_t num_results,
                                         uint32_t* out_first_output) {
  *out_first_output = (uint32_t)builder->values.count;
  if (builder->open_loop == JPP_NONE) {
    return jpp_status_make(JPP_GRAPH_ERROR, "a loop ends that never began");
  }
  uint32_t id = builder->open_loop;
  builder->open_loop = JPP_NONE;
  jpp_loop_t* loop = &builder->loops.data[id];
  loop->op = (uint32_t)builder->ops.count;
  loop->num_results = num_results;
  JPP_RETURN_IF_ERROR(jpp_arena_copy(builder_arena(builder), results,
                                     num_results * sizeof(*results),
                                     (void**)&loop->results));
  jpp_op_desc_t desc = {
      .kind = JPP_OP_LOOP,
      .attr = id,
      .num_outputs = num_results,
      .outputs = types,
      .name = "loop",
      .where = loop->where,
  };
  return jpp_graph_builder_add_op(builder, &desc, out_first_output);
}

jpp_status_t* jpp_graph_builder_add_output(jpp_graph_builder_t* builder, uint32_t value,
                                           const char* name) {
  jpp_graph_output_t output = {.value = value};
  JPP_RETURN_IF_ERROR(jpp_arena_strdup(builder_arena(builder), name, &output.name));
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&builder->outputs, output));
  jpp_graph_t view = builder_view(builder);
  return jpp_graph_verify_output(&view, view.num_outputs - 1);
}

// The vecs' storage moves into the arena, so that the graph is one artefact.
static jpp_status_t* builder_move_arrays(jpp_graph_builder_t* builder) {
  jpp_graph_t* graph = &builder->storage->graph;
  jpp_arena_t* arena = builder_arena(builder);
  graph->num_values = (uint32_t)builder->values.count;
  graph->num_ops = (uint32_t)builder->ops.count;
  graph->num_loops = (uint32_t)builder->loops.count;
  graph->num_args = (uint32_t)builder->args.count;
  graph->num_outputs = (uint32_t)builder->outputs.count;
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&builder->values, arena, &graph->values));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&builder->ops, arena, &graph->ops));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&builder->loops, arena, &graph->loops));
  JPP_RETURN_IF_ERROR(JPP_VEC_TO_ARENA(&builder->args, arena, &graph->args));
  return JPP_VEC_TO_ARENA(&builder->outputs, arena, &graph->outputs);
}

jpp_status_t* jpp_graph_builder_finish(jpp_graph_builder_t* builder,
                                       jpp_graph_t** out_graph) {
  *out_graph = NULL;
  if (!builder->storage) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "the builder has already finished");
  }
  if (builder->open_loop != JPP_NONE) {
    return jpp_status_make(JPP_GRAPH_ERROR, "loop %u is never closed",
                           builder->open_loop);
  }
  JPP_RETURN_IF_ERROR(builder_move_arrays(builder));
  *out_graph = &builder->storage->graph;
  builder->storage = NULL;
  return NULL;
}
