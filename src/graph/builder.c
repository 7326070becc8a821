// Builds a graph call by call and checks each call immediately. The text form can express
// everything that the builder accepts, and the parser, which calls the builder, accepts
// that text.
#include <ctype.h>
#include <string.h>

#include "base/null.h"
#include "base/struct_size.h"
#include "base/vec.h"
#include "graph/graph_internal.h"

struct jpp_graph_builder {
  // Strings, types and inputs are copied to its arena immediately.
  jpp_graph_storage_t* storage;
  JPP_VEC(jpp_value_t) values;
  JPP_VEC(jpp_op_t) ops;
  JPP_VEC(jpp_loop_t) loops;
  JPP_VEC(jpp_graph_arg_t) args;
  JPP_VEC(jpp_graph_output_t) outputs;
  uint32_t open_loop;  // JPP_NONE outside a body
  bool failed;         // a call has failed
};

enum { kMostDims = 32 };

// Limits of the text form on values, ops and numbers.
static const double kLargestCost = 1e28;  // the sum of 2^32 such costs is still a float

static jpp_arena_t* builder_arena(jpp_graph_builder_t* builder) {
  return &builder->storage->arena;
}

jpp_status_t* jpp_graph_builder_create(const char* name, uint32_t ranks,
                                       jpp_graph_builder_t** out_builder) {
  JPP_RETURN_IF_NULL(out_builder);
  *out_builder = NULL;
  if (ranks > INT32_MAX) {
    return jpp_status_make(
        JPP_MESH_ERROR, "graph builder: expected fewer than 2^31 ranks, found %u", ranks);
  }
  jpp_graph_builder_t* builder = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &builder));
  builder->open_loop = JPP_NONE;
  jpp_status_t* status = JPP_ALLOC_ARRAY(1, &builder->storage);
  if (!status) {
    status = jpp__arena_strdup(builder_arena(builder), name ? name : "step",
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

// The graph as built so far.
static jpp_graph_t builder_view(const jpp_graph_builder_t* builder) {
  return (jpp_graph_t){.ranks = builder->storage->graph.ranks,
                       .num_values = (uint32_t)builder->values.count,
                       .num_ops = (uint32_t)builder->ops.count,
                       .num_loops = (uint32_t)builder->loops.count,
                       .num_args = (uint32_t)builder->args.count,
                       .num_outputs = (uint32_t)builder->outputs.count,
                       .args = builder->args.data,
                       .values = builder->values.data,
                       .ops = builder->ops.data,
                       .loops = builder->loops.data,
                       .outputs = builder->outputs.data};
}

// Returns an error if no further calls are allowed.
static jpp_status_t* check_open(const jpp_graph_builder_t* builder) {
  if (builder->storage && !builder->failed) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "graph builder: %s; after that, only destroy may be called",
                         builder->storage ? "a call has failed" : "it has finished");
}

// Records that a call failed, and returns its status.
static jpp_status_t* note(jpp_graph_builder_t* builder, jpp_status_t* status) {
  builder->failed = builder->failed || status;
  return status;
}

static jpp_status_t* check_type(const jpp_type_t* type, uint32_t value) {
  if (type->ndim) JPP_RETURN_IF_NULL(type->dims);
  if (!jpp_dtype_bits(type->dtype)) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "value %%%u: element type %d is not in dtype.h", value,
                           (int)type->dtype);
  }
  if (type->ndim > kMostDims) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "value %%%u: expected at most %d dimensions, found %u", value,
                           kMostDims, type->ndim);
  }
  for (uint32_t i = 0; i < type->ndim; ++i) {
    if (type->dims[i] >= 0 && type->dims[i] <= JPP_MOST_DIM) continue;
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "value %%%u: dimension %u is %lld; expected 0 to 2^53", value,
                           i, (long long)type->dims[i]);
  }
  if (type->shards > INT32_MAX) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "value %%%u: expected fewer than 2^31 shards, found %u", value,
                           type->shards);
  }
  if (!jpp__type_divides(type, type->shards)) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "value %%%u: expected a number of shards that divides its "
                           "elements, found %u",
                           value, type->shards);
  }
  if (!jpp_memory_name(type->memory)) {
    return jpp_status_make(JPP_GRAPH_ERROR, "value %%%u: memory %d is not in memory.h",
                           value, (int)type->memory);
  }
  if (jpp__bytes_fit(jpp_type_bytes(type))) return NULL;
  return jpp_status_make(JPP_GRAPH_ERROR,
                         "value %%%u (%s of %u dimensions) has more than 2^63 bytes",
                         value, jpp_dtype_name(type->dtype), type->ndim);
}

static jpp_status_t* builder_add_value(jpp_graph_builder_t* builder,
                                       const jpp_type_t* type, uint32_t producer,
                                       const char* name) {
  uint32_t id = (uint32_t)builder->values.count;
  if (builder->values.count >= JPP_NONE) {
    return jpp_status_make(JPP_UNSUPPORTED, "a graph holds up to 2^32 - 1 values");
  }
  JPP_RETURN_IF_ERROR(check_type(type, id));
  jpp_value_t value = {.type = *type, .producer = producer, .loop = builder->open_loop};
  value.bytes = jpp_type_bytes(type);
  JPP_RETURN_IF_ERROR(jpp__arena_copy(builder_arena(builder), type->dims,
                                      type->ndim * sizeof(*type->dims),
                                      (void**)&value.type.dims));
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(builder_arena(builder), name, &value.name));
  return JPP_VEC_PUSH(&builder->values, value);
}

static jpp_status_t* add_arg(jpp_graph_builder_t* builder, const jpp_type_t* type,
                             bool donated, const char* name, uint32_t* out_value) {
  JPP_RETURN_IF_ERROR(check_open(builder));
  *out_value = (uint32_t)builder->values.count;
  if (builder->open_loop != JPP_NONE) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "argument %%%u is inside a loop; arguments belong to the step",
                           *out_value);
  }
  JPP_RETURN_IF_ERROR(builder_add_value(builder, type, JPP_NONE, name));
  return JPP_VEC_PUSH(&builder->args,
                      (jpp_graph_arg_t){.value = *out_value, .donated = donated});
}

jpp_status_t* jpp_graph_builder_add_arg(jpp_graph_builder_t* builder,
                                        const jpp_type_t* type, bool donated,
                                        const char* name, uint32_t* out_value) {
  JPP_RETURN_IF_NULL(builder, type, out_value);
  return note(builder, add_arg(builder, type, donated, name, out_value));
}

// Copies the ranks of an argument or an output.
static jpp_status_t* copy_ranks(jpp_graph_builder_t* builder, const uint32_t* ranks,
                                uint32_t count, const uint32_t** out_ranks) {
  return jpp__arena_copy(builder_arena(builder), ranks, count * sizeof(*ranks),
                         (void**)out_ranks);
}

static jpp_status_t* give_arg(jpp_graph_builder_t* builder, const uint32_t* ranks,
                              uint32_t num_ranks) {
  JPP_RETURN_IF_ERROR(check_open(builder));
  if (!builder->args.count) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "expected an argument before the ranks that it is given on");
  }
  jpp_graph_arg_t* arg = &builder->args.data[builder->args.count - 1];
  arg->num_ranks = num_ranks;
  JPP_RETURN_IF_ERROR(copy_ranks(builder, ranks, num_ranks, &arg->ranks));
  jpp_graph_t view = builder_view(builder);
  return jpp__graph_verify_arg(&view, view.num_args - 1);
}

jpp_status_t* jpp_graph_builder_give_arg(jpp_graph_builder_t* builder,
                                         const uint32_t* ranks, uint32_t num_ranks) {
  JPP_RETURN_IF_NULL(builder);
  if (num_ranks) JPP_RETURN_IF_NULL(ranks);
  return note(builder, give_arg(builder, ranks, num_ranks));
}

// Copies an op's name as one word of the text form; other characters become '_'.
static jpp_status_t* copy_op_name(jpp_arena_t* arena, const char* name,
                                  const char** out_name) {
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(arena, name && *name ? name : "op", out_name));
  for (char* at = (char*)*out_name; *at; ++at) {
    if (!isalnum((unsigned char)*at) && !strchr("_.-+", *at)) *at = '_';
  }
  return NULL;
}

// Adds an op of any kind.
static jpp_status_t* add_op(jpp_graph_builder_t* builder, const jpp_op_desc_t* desc,
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
      .code = desc->code,
      .num_ranks = desc->num_ranks,
  };
  jpp_arena_t* arena = builder_arena(builder);
  JPP_RETURN_IF_ERROR(jpp__arena_copy(
      arena, desc->inputs, desc->num_inputs * sizeof(*desc->inputs), (void**)&op.inputs));
  JPP_RETURN_IF_ERROR(copy_op_name(arena, desc->name, &op.name));
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(arena, desc->where, &op.where));
  JPP_RETURN_IF_ERROR(copy_ranks(builder, desc->ranks, desc->num_ranks, &op.ranks));
  uint32_t id = (uint32_t)builder->ops.count;
  for (uint32_t i = 0; i < desc->num_outputs; ++i) {
    JPP_RETURN_IF_ERROR(builder_add_value(builder, &desc->outputs[i], id, NULL));
  }
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&builder->ops, op));
  jpp_graph_t view = builder_view(builder);
  return jpp__graph_verify_op(&view, id);
}

static jpp_status_t* add_front_op(jpp_graph_builder_t* builder, const jpp_op_desc_t* desc,
                                  uint32_t* out_first_output) {
  JPP_RETURN_IF_ERROR(check_open(builder));
  const char* where = desc->where ? desc->where : "?";
  if ((uint32_t)desc->kind > JPP_OP_TASK) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "op %zu (%s, %s): kind %d is added by %s; expected a call, a "
                           "mark, an @add, a @place or a @task",
                           builder->ops.count, desc->name ? desc->name : "op", where,
                           (int)desc->kind,
                           desc->kind == JPP_OP_LOOP ? "end_loop" : "the planner only");
  }
  if (!(desc->cost >= 0 && (double)desc->cost <= kLargestCost)) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "op %zu (%s, %s): expected a cost of 0 to %g, found %g",
                           builder->ops.count, desc->name ? desc->name : "op", where,
                           kLargestCost, (double)desc->cost);
  }
  bool mark = desc->kind == JPP_OP_MARK || desc->kind == JPP_OP_MARK_BACKWARD;
  if (desc->flags & ~JPP_OP_FLAGS || (mark && desc->attr > INT32_MAX)) {
    return jpp_status_make(
        JPP_GRAPH_ERROR,
        "op %zu (%s, %s): expected flags of jpp_op_t and a stage below "
        "2^31, found flags %u and stage %u",
        builder->ops.count, desc->name ? desc->name : "op", where, desc->flags,
        desc->attr);
  }
  return add_op(builder, desc, out_first_output);
}

jpp_status_t* jpp_graph_builder_add_op(jpp_graph_builder_t* builder,
                                       const jpp_op_desc_t* desc,
                                       uint32_t* out_first_output) {
  JPP_RETURN_IF_NULL(builder, desc, out_first_output);
  jpp_op_desc_t full;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_op_desc_t, where, desc, &full));
  desc = &full;
  if (desc->num_inputs) JPP_RETURN_IF_NULL(desc->inputs);
  if (desc->num_outputs) JPP_RETURN_IF_NULL(desc->outputs);
  if (desc->num_ranks) JPP_RETURN_IF_NULL(desc->ranks);
  return note(builder, add_front_op(builder, desc, out_first_output));
}

static jpp_status_t* begin_loop(jpp_graph_builder_t* builder, const jpp_loop_desc_t* desc,
                                uint32_t* out_index) {
  JPP_RETURN_IF_ERROR(check_open(builder));
  *out_index = (uint32_t)builder->values.count;
  if (builder->open_loop != JPP_NONE) {
    return jpp_status_make(
        JPP_UNSUPPORTED,
        "loop at %s is inside another microbatch loop; put one after the other",
        desc->where ? desc->where : "?");
  }
  if (desc->microbatches == 0) {
    return jpp_status_make(JPP_MICROBATCH_ERROR,
                           "loop at %s has 0 microbatches; expected at least 1",
                           desc->where ? desc->where : "?");
  }
  if (desc->microbatches > INT32_MAX || desc->stages > INT32_MAX) {
    return jpp_status_make(JPP_MICROBATCH_ERROR,
                           "loop at %s has %u microbatches and %u stages; expected fewer "
                           "than 2^31 of each",
                           desc->where ? desc->where : "?", desc->microbatches,
                           desc->stages);
  }
  jpp_loop_t loop = {
      .op = JPP_NONE,
      .microbatches = desc->microbatches,
      .index = *out_index,
      .first_op = (uint32_t)builder->ops.count,
      .stages = desc->stages,
  };
  jpp_arena_t* arena = builder_arena(builder);
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(arena, desc->schedule, &loop.schedule));
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(arena, desc->where, &loop.where));
  builder->open_loop = (uint32_t)builder->loops.count;
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&builder->loops, loop));
  jpp_type_t index_type = {.dtype = JPP_DTYPE_S32};
  return builder_add_value(builder, &index_type, JPP_NONE, NULL);
}

jpp_status_t* jpp_graph_builder_begin_loop(jpp_graph_builder_t* builder,
                                           const jpp_loop_desc_t* desc,
                                           uint32_t* out_index) {
  JPP_RETURN_IF_NULL(builder, desc, out_index);
  return note(builder, begin_loop(builder, desc, out_index));
}

static jpp_status_t* end_loop(jpp_graph_builder_t* builder,
                              const jpp_loop_result_t* results, const jpp_type_t* types,
                              uint32_t num_results, uint32_t* out_first_output) {
  *out_first_output = (uint32_t)builder->values.count;
  JPP_RETURN_IF_ERROR(check_open(builder));
  if (builder->open_loop == JPP_NONE) {
    return jpp_status_make(JPP_GRAPH_ERROR, "end of a loop that never began");
  }
  for (uint32_t i = 0; i < num_results; ++i) {
    if (results[i].reduce < JPP_REDUCE_KIND_COUNT) continue;
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "loop %u, result %u: %u is not a kind of reduction; expected "
                           "add, max, concat or custom",
                           builder->open_loop, i, results[i].reduce);
  }
  uint32_t id = builder->open_loop;
  builder->open_loop = JPP_NONE;
  jpp_loop_t* loop = &builder->loops.data[id];
  loop->op = (uint32_t)builder->ops.count;
  loop->num_results = num_results;
  JPP_RETURN_IF_ERROR(jpp__arena_copy(builder_arena(builder), results,
                                      num_results * sizeof(*results),
                                      (void**)&loop->results));
  jpp_op_desc_t desc = {
      .struct_size = sizeof(desc),
      .kind = JPP_OP_LOOP,
      .attr = id,
      .num_outputs = num_results,
      .outputs = types,
      .name = "loop",
      .where = loop->where,
  };
  return add_op(builder, &desc, out_first_output);
}

jpp_status_t* jpp_graph_builder_end_loop(jpp_graph_builder_t* builder,
                                         const jpp_loop_result_t* results,
                                         const jpp_type_t* types, uint32_t num_results,
                                         uint32_t* out_first_output) {
  JPP_RETURN_IF_NULL(builder, out_first_output);
  if (num_results) JPP_RETURN_IF_NULL(results, types);
  return note(builder, end_loop(builder, results, types, num_results, out_first_output));
}

static jpp_status_t* add_output(jpp_graph_builder_t* builder, uint32_t value,
                                const char* name, uint32_t next) {
  JPP_RETURN_IF_ERROR(check_open(builder));
  jpp_graph_output_t output = {.value = value, .next = next};
  JPP_RETURN_IF_ERROR(jpp__arena_strdup(builder_arena(builder), name, &output.name));
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&builder->outputs, output));
  jpp_graph_t view = builder_view(builder);
  return jpp__graph_verify_output(&view, view.num_outputs - 1);
}

jpp_status_t* jpp_graph_builder_add_output(jpp_graph_builder_t* builder, uint32_t value,
                                           const char* name, uint32_t next) {
  JPP_RETURN_IF_NULL(builder);
  return note(builder, add_output(builder, value, name, next));
}

static jpp_status_t* leave_output(jpp_graph_builder_t* builder, const uint32_t* ranks,
                                  uint32_t num_ranks) {
  JPP_RETURN_IF_ERROR(check_open(builder));
  if (!builder->outputs.count) {
    return jpp_status_make(JPP_GRAPH_ERROR,
                           "expected an output before the ranks that it is left on");
  }
  jpp_graph_output_t* output = &builder->outputs.data[builder->outputs.count - 1];
  output->num_ranks = num_ranks;
  JPP_RETURN_IF_ERROR(copy_ranks(builder, ranks, num_ranks, &output->ranks));
  jpp_graph_t view = builder_view(builder);
  return jpp__graph_verify_output(&view, view.num_outputs - 1);
}

jpp_status_t* jpp_graph_builder_leave_output(jpp_graph_builder_t* builder,
                                             const uint32_t* ranks, uint32_t num_ranks) {
  JPP_RETURN_IF_NULL(builder);
  if (num_ranks) JPP_RETURN_IF_NULL(ranks);
  return note(builder, leave_output(builder, ranks, num_ranks));
}

jpp_status_t* jpp_graph_set_partial(jpp_graph_t* graph, uint32_t loop,
                                    const bool* partial) {
  JPP_RETURN_IF_NULL(graph, partial);
  if (loop >= graph->num_loops) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "loop %u: expected one below %u", loop,
                           graph->num_loops);
  }
  for (uint32_t i = 0; i < graph->loops[loop].num_results; ++i) {
    // The builder's own copy, in the arena.
    jpp_loop_result_t* result = (jpp_loop_result_t*)&graph->loops[loop].results[i];
    result->partial = partial[i];
  }
  return jpp__graph_verify_op(graph, graph->loops[loop].op);
}

bool jpp__graph_has_shards(const jpp_graph_t* graph) {
  for (uint32_t v = 0; v < graph->num_values; ++v) {
    if (graph->values[v].type.shards > 1) return true;
  }
  return false;
}

jpp_status_t* jpp_graph_set_sharded(jpp_graph_t* graph) {
  JPP_RETURN_IF_NULL(graph);
  graph->sharded = true;
  return NULL;
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
  JPP_RETURN_IF_NULL(builder, out_graph);
  *out_graph = NULL;
  JPP_RETURN_IF_ERROR(check_open(builder));
  if (builder->open_loop != JPP_NONE) {
    return note(builder, jpp_status_make(JPP_GRAPH_ERROR, "loop %u is never closed",
                                         builder->open_loop));
  }
  JPP_RETURN_IF_ERROR(note(builder, builder_move_arrays(builder)));
  *out_graph = &builder->storage->graph;
  (*out_graph)->sharded = jpp__graph_has_shards(*out_graph);
  builder->storage = NULL;
  return NULL;
}
