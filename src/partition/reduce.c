// Creates the accumulators of a loop's results. A result whose terms several tasks
// compute gets one accumulator in each of them, and the parts are summed after the loop.
// This also applies to a result that is partial over the devices of a rank, even if it
// has only one part: the sum combines the devices' parts into one value. If linear ops,
// such as a cast, make the result of the sum of its terms, each of these tasks runs them
// on its part.
//
// A loop of one microbatch keeps nothing between runs: the task that makes a value also
// makes the initial state, and its update makes the result.
//
// A sum of zeros, such as the gradient of a frozen weight, has no accumulator: it is made
// outside the loop and depends on no rank.
//
// Small sums of a small stage are packed: a task sums all of the same dtype in one array,
// which is one argument and one result of its calls, and unpacked after the loop.
#include <stdlib.h>

#include "partition/partitioner.h"

enum { kMostPackedBytes = 4096 };  // of one sum: packing copies it in each microbatch

// A reduction of `value`, which `task` makes, to `final`.
typedef struct reduction {
  uint32_t result, task, value, final;
  uint8_t dtype;  // of `final`
} reduction_t;

typedef struct reducer {
  jpp_partitioner_t* p;
  uint32_t loop;
  jpp_add_tree_t tree;
  jpp_u32_vec_t tasks;  // of the tree's leaves
  jpp_u32_vec_t terms;
  jpp_u32_vec_t linear;   // ops between the tree's root and the result, from the result
  jpp_u32_vec_t finals;   // parts of one result
  jpp_u32_vec_t inits;    // ops that run before the loop
  jpp_u32_vec_t unpacks;  // ops that run after it
  jpp_u32_vec_t sums_after;  // and after these
  JPP_VEC(reduction_t) small;
} reducer_t;

static uint32_t task_of_value(const reducer_t* r, uint32_t value) {
  uint32_t producer = r->p->values.data[value].producer;
  if (producer == JPP_NONE || producer >= r->p->graph->num_ops) return JPP_NONE;
  return jpp__partition_task_of(r->p, producer);
}

static jpp_op_t sum_of(const jpp_u32_vec_t* terms, uint32_t loop) {
  return (jpp_op_t){.kind = JPP_OP_SUM,
                    .loop = loop,
                    .num_inputs = (uint32_t)terms->count,
                    .inputs = terms->data,
                    .num_outputs = 1,
                    .name = "sum"};
}

// The initial state of one of the loop's results.
static jpp_op_t init_of(const reducer_t* r, uint32_t result) {
  return (jpp_op_t){.kind = JPP_OP_INIT,
                    .flags = JPP_OP_CHEAP,
                    .attr = result,
                    .loop = r->loop,
                    .num_outputs = 1,
                    .name = "init"};
}

// The value of one of the loop's results.
static uint32_t output_of(const reducer_t* r, uint32_t result) {
  uint32_t loop_op = r->p->graph->loops[r->loop].op;
  return r->p->ops.data[loop_op].first_output + result;
}

// Adds an op that makes its output, a value that is already there.
static jpp_status_t* add_maker(jpp_partitioner_t* p, const jpp_op_t* op,
                               uint32_t* out_op) {
  JPP_RETURN_IF_ERROR(jpp__partition_add_op(p, op, out_op));
  p->values.data[op->first_output].producer = *out_op;
  return NULL;
}

static jpp_status_t* add_to_task(reducer_t* r, uint32_t op, uint32_t task) {
  return JPP_VEC_PUSH(&r->p->made, (jpp_partition_made_t){.op = op, .task = task});
}

// In a loop of several microbatches, `init` makes the state before the loop, an update op
// turns the state into the next one in each microbatch, and the state after the last
// microbatch is `final`, which all of these are like.
static jpp_status_t* add_reduction(reducer_t* r, const reduction_t* of) {
  jpp_partitioner_t* p = r->p;
  const jpp_loop_t* loop = &p->graph->loops[r->loop];
  uint32_t result = of->result, task = of->task, like = of->final;
  jpp_accumulator_t acc = {
      .loop = r->loop, .result = result, .task = task, .final = of->final};
  jpp_op_t init = init_of(r, result);
  // The sum after the loop takes partial values as accumulators.
  bool once = loop->microbatches == 1 && !loop->results[result].partial;
  uint32_t init_op = 0, update_op = 0;
  JPP_RETURN_IF_ERROR(jpp__partition_define(p, &init, like, once ? r->loop : JPP_NONE,
                                            &init_op, &acc.init));
  if (!once) {
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&r->inits, init_op));
    JPP_RETURN_IF_ERROR(jpp__partition_add_value(p, like, r->loop, JPP_NONE, &acc.state));
  }
  // A concatenation stores each microbatch at its own index, and a custom reduction may
  // do so.
  uint8_t reduce = loop->results[result].reduce;
  bool takes_index = reduce != JPP_REDUCE_ADD && reduce != JPP_REDUCE_MAX;
  uint32_t inputs[] = {once ? acc.init : acc.state, of->value, loop->index};
  jpp_op_t update = {.kind = JPP_OP_ACCUMULATE,
                     .attr = result,
                     .loop = r->loop,
                     .num_inputs = takes_index ? 3 : 2,
                     .inputs = inputs,
                     .num_outputs = 1,
                     .name = "accumulate"};
  if (!once) {
    JPP_RETURN_IF_ERROR(
        jpp__partition_define(p, &update, like, r->loop, &update_op, &acc.next));
    JPP_RETURN_IF_ERROR(add_to_task(r, update_op, task));
    return JPP_VEC_PUSH(&p->accumulators, acc);
  }
  update.first_output = of->final;
  JPP_RETURN_IF_ERROR(add_maker(p, &update, &update_op));
  JPP_RETURN_IF_ERROR(add_to_task(r, init_op, task));
  return add_to_task(r, update_op, task);
}

// --- Small sums -----------------------------------------------------------------------

static bool is_small_sum(const reducer_t* r, const reduction_t* of) {
  const jpp_partitioner_t* p = r->p;
  const jpp_loop_t* loop = &p->graph->loops[r->loop];
  const jpp_value_t* value = &p->values.data[of->value];
  if (!p->small_stages || !p->small_stages[p->tasks.data[of->task].stage]) return false;
  if (p->graph->sharded || loop->results[of->result].reduce != JPP_REDUCE_ADD) {
    return false;
  }
  return value->bytes <= kMostPackedBytes && value->type.memory == JPP_MEMORY_DEVICE &&
         jpp_type_equal(&value->type, &p->values.data[of->final].type);
}

// Small sums wait until all are known.
static jpp_status_t* reduce_value(reducer_t* r, uint32_t result, uint32_t task,
                                  uint32_t value, uint32_t final) {
  uint8_t dtype = (uint8_t)r->p->values.data[final].type.dtype;
  reduction_t of = {result, task, value, final, dtype};
  return is_small_sum(r, &of) ? JPP_VEC_PUSH(&r->small, of) : add_reduction(r, &of);
}

static jpp_status_t* unpack(reducer_t* r, uint32_t packed, uint32_t element,
                            uint32_t out) {
  jpp_partitioner_t* p = r->p;
  jpp_op_t op = {.kind = JPP_OP_UNPACK,
                 .attr = element,
                 .loop = JPP_NONE,
                 .num_inputs = 1,
                 .inputs = &packed,
                 .first_output = out,
                 .num_outputs = 1,
                 .name = "unpack"};
  uint32_t id = 0;
  JPP_RETURN_IF_ERROR(add_maker(p, &op, &id));
  return JPP_VEC_PUSH(&r->unpacks, id);
}

// Reduces small sums of one task as one value.
static jpp_status_t* reduce_packed(reducer_t* r, const reduction_t* sums, size_t count) {
  jpp_partitioner_t* p = r->p;
  uint64_t elements = 0, bytes = 0;
  r->terms.count = 0;
  for (size_t i = 0; i < count; ++i) {
    elements += jpp_type_elements(&p->values.data[sums[i].value].type);
    bytes += p->values.data[sums[i].value].bytes;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&r->terms, sums[i].value));
  }
  jpp_op_t pack = {.kind = JPP_OP_PACK,
                   .loop = r->loop,
                   .num_inputs = (uint32_t)count,
                   .inputs = r->terms.data,
                   .num_outputs = 1,
                   .name = "pack"};
  reduction_t packed = sums[0];
  uint32_t op = 0, loop_op = p->graph->loops[r->loop].op;
  JPP_RETURN_IF_ERROR(
      jpp__partition_define(p, &pack, sums[0].value, r->loop, &op, &packed.value));
  JPP_RETURN_IF_ERROR(jpp__partition_flatten(p, packed.value, elements, bytes));
  JPP_RETURN_IF_ERROR(add_to_task(r, op, packed.task));
  JPP_RETURN_IF_ERROR(
      jpp__partition_add_value(p, packed.value, JPP_NONE, loop_op, &packed.final));
  JPP_RETURN_IF_ERROR(add_reduction(r, &packed));
  for (size_t i = 0, element = 0; i < count; ++i) {
    JPP_RETURN_IF_ERROR(unpack(r, packed.final, (uint32_t)element, sums[i].final));
    element += jpp_type_elements(&p->values.data[sums[i].final].type);
  }
  return NULL;
}

// By task and dtype; of the same, in the order of the results.
static int compare_sums(const void* a, const void* b) {
  const reduction_t *x = a, *y = b;
  if (x->task != y->task) return x->task < y->task ? -1 : 1;
  if (x->dtype != y->dtype) return x->dtype < y->dtype ? -1 : 1;
  return x->result < y->result ? -1 : x->result > y->result;
}

static jpp_status_t* reduce_small(reducer_t* r) {
  const reduction_t* sums = r->small.data;
  size_t count = r->small.count;
  if (count) qsort(r->small.data, count, sizeof(*sums), compare_sums);
  for (size_t first = 0, end = 0; first < count; first = end) {
    while (end < count && sums[end].task == sums[first].task &&
           sums[end].dtype == sums[first].dtype) {
      ++end;
    }
    JPP_RETURN_IF_ERROR(end - first > 1 ? reduce_packed(r, sums + first, end - first)
                                        : add_reduction(r, &sums[first]));
  }
  return NULL;
}

// --- Results --------------------------------------------------------------------------

// The input of a body's op that a stage makes; JPP_NONE if it is not the only one.
static uint32_t only_stage_input(const reducer_t* r, const jpp_op_t* op) {
  const jpp_loop_t* loop = &r->p->graph->loops[r->loop];
  uint32_t found = JPP_NONE;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    if (jpp__producer_in_stage(r->p, loop, op->inputs[i]) == JPP_NONE) continue;
    if (found != JPP_NONE) return JPP_NONE;
    found = i;
  }
  return found;
}

// Runs the linear ops between the tree's root and the result on a part of the root.
static jpp_status_t* apply_linear(reducer_t* r, uint32_t task, uint32_t* value) {
  jpp_partitioner_t* p = r->p;
  for (size_t i = r->linear.count; i-- > 0;) {
    uint32_t source = r->linear.data[i], id = 0;
    jpp_op_t op = p->ops.data[source];
    uint32_t like = op.first_output, replaced = only_stage_input(r, &op);
    r->terms.count = 0;
    for (uint32_t k = 0; k < op.num_inputs; ++k) {
      uint32_t input = k == replaced ? *value : op.inputs[k];
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&r->terms, input));
    }
    op.kind = JPP_OP_REPEAT;
    op.attr = source;
    op.flags &= JPP_OP_BACKWARD;
    op.inputs = r->terms.data;
    JPP_RETURN_IF_ERROR(jpp__partition_define(p, &op, like, r->loop, &id, value));
    JPP_RETURN_IF_ERROR(add_to_task(r, id, task));
  }
  return NULL;
}

// The sum of the leaves that `task` makes, as one value in that task, in the form of the
// result.
static jpp_status_t* add_part(reducer_t* r, uint32_t task, uint32_t* out_value) {
  r->terms.count = 0;
  for (size_t i = 0; i < r->tree.leaves.count; ++i) {
    if (r->tasks.data[i] != task) continue;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&r->terms, r->tree.leaves.data[i]));
  }
  uint32_t first = r->terms.data[0];
  *out_value = first;
  if (r->terms.count > 1) {
    uint32_t op = 0;
    jpp_op_t sum = sum_of(&r->terms, r->loop);
    JPP_RETURN_IF_ERROR(
        jpp__partition_define(r->p, &sum, first, r->loop, &op, out_value));
    JPP_RETURN_IF_ERROR(add_to_task(r, op, task));
  }
  return apply_linear(r, task, out_value);
}

static bool seen_before(const jpp_u32_vec_t* vec, size_t index) {
  for (size_t i = 0; i < index; ++i) {
    if (vec->data[i] == vec->data[index]) return true;
  }
  return false;
}

// Creates an accumulator in each task that makes terms, and their sum after the loop in
// the order of the terms.
static jpp_status_t* add_split_result(reducer_t* r, uint32_t result) {
  jpp_partitioner_t* p = r->p;
  uint32_t loop_op = p->graph->loops[r->loop].op, output = output_of(r, result);
  r->finals.count = 0;
  for (size_t i = 0; i < r->tasks.count; ++i) {
    if (seen_before(&r->tasks, i)) continue;
    uint32_t value = 0, final = 0;
    JPP_RETURN_IF_ERROR(add_part(r, r->tasks.data[i], &value));
    JPP_RETURN_IF_ERROR(jpp__partition_add_value(p, output, JPP_NONE, loop_op, &final));
    JPP_RETURN_IF_ERROR(reduce_value(r, result, r->tasks.data[i], value, final));
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&r->finals, final));
  }
  for (size_t i = 0; i < r->tree.adds.count; ++i) {
    p->segment[r->tree.adds.data[i]] = JPP_SEGMENT_ALIAS;
  }
  for (size_t i = 0; i < r->linear.count; ++i) {
    p->segment[r->linear.data[i]] = JPP_SEGMENT_ALIAS;
  }
  uint32_t sum = 0;
  jpp_op_t op = sum_of(&r->finals, JPP_NONE);
  op.first_output = output;
  JPP_RETURN_IF_ERROR(add_maker(p, &op, &sum));
  return JPP_VEC_PUSH(&r->sums_after, sum);
}

// Finds the linear ops that make `value`, such as the casts and scales of a gradient, of
// values that nothing else uses. Returns the value that the first of them takes.
static jpp_status_t* find_linear(reducer_t* r, uint32_t value, uint32_t* out_root) {
  const jpp_partitioner_t* p = r->p;
  r->linear.count = 0;
  for (*out_root = value;;) {
    uint32_t id = jpp__producer_in_body(p, &p->graph->loops[r->loop], *out_root);
    if (id == JPP_NONE) return NULL;
    const jpp_op_t* op = &p->ops.data[id];
    uint32_t i = op->flags & JPP_OP_LINEAR ? only_stage_input(r, op) : JPP_NONE;
    if (i == JPP_NONE || p->uses[op->inputs[i]] != 1) return NULL;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&r->linear, id));
    *out_root = op->inputs[i];
  }
}

// The terms of a loop's result and their tasks. For a sum whose terms several tasks make:
// the leaves of the additions that make `value` or, if linear ops make it, their operand.
// Otherwise: `value` alone.
static jpp_status_t* find_terms(reducer_t* r, uint32_t value, bool is_sum) {
  uint32_t task = task_of_value(r, value);
  if (task == JPP_NONE) task = r->p->loops[r->loop].forward[0];
  r->tasks.count = 0;
  bool split = false;
  if (is_sum && r->p->uses[value] == 1) {
    uint32_t root = value;
    JPP_RETURN_IF_ERROR(find_linear(r, value, &root));
    JPP_RETURN_IF_ERROR(jpp__add_tree_collect(r->p, root, r->loop, &r->tree));
    for (size_t i = 0; i < r->tree.leaves.count; ++i) {
      uint32_t of_leaf = task_of_value(r, r->tree.leaves.data[i]);
      // A term from outside the loop is added in the task of the sum.
      if (of_leaf == JPP_NONE) of_leaf = task;
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&r->tasks, of_leaf));
      split = split || of_leaf != r->tasks.data[0];
    }
  }
  if (split) return NULL;
  r->tree.adds.count = r->tree.leaves.count = r->tasks.count = r->linear.count = 0;
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&r->tree.leaves, value));
  return JPP_VEC_PUSH(&r->tasks, task);
}

static bool is_zeros(const jpp_partitioner_t* p, uint32_t value) {
  uint32_t producer = p->values.data[value].producer;
  return producer != JPP_NONE && p->ops.data[producer].flags & JPP_OP_ZEROS;
}

// Makes the result, a sum of zeros, outside the loop, on each rank that needs it.
static jpp_status_t* add_zeros(reducer_t* r, uint32_t result) {
  jpp_op_t init = init_of(r, result);
  uint32_t op = 0;
  init.first_output = output_of(r, result);
  JPP_RETURN_IF_ERROR(add_maker(r->p, &init, &op));
  return JPP_VEC_PUSH(&r->inits, op);
}

static jpp_status_t* reduce_result(reducer_t* r, uint32_t result) {
  const jpp_loop_t* loop = &r->p->graph->loops[r->loop];
  uint32_t value = r->p->alias[loop->results[result].value];
  bool is_sum = loop->results[result].reduce == JPP_REDUCE_ADD;
  if (is_sum && is_zeros(r->p, value)) return add_zeros(r, result);
  JPP_RETURN_IF_ERROR(find_terms(r, value, is_sum));
  if (r->tree.leaves.count > 1 || loop->results[result].partial) {
    return add_split_result(r, result);
  }
  return reduce_value(r, result, r->tasks.data[0], value, output_of(r, result));
}

static jpp_status_t* append_all(jpp_u32_vec_t* to, const jpp_u32_vec_t* from) {
  for (size_t i = 0; i < from->count; ++i) {
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(to, from->data[i]));
  }
  return NULL;
}

static jpp_status_t* reduce_all(reducer_t* r) {
  const jpp_loop_t* loop = &r->p->graph->loops[r->loop];
  for (uint32_t i = 0; i < loop->num_results; ++i) {
    uint32_t output = output_of(r, i);
    if (r->p->alias[output] != output) continue;  // of an equal result
    JPP_RETURN_IF_ERROR_IN(reduce_result(r, i), "result %u of loop at %s", i,
                           loop->where ? loop->where : "?");
  }
  JPP_RETURN_IF_ERROR(reduce_small(r));
  JPP_RETURN_IF_ERROR(append_all(&r->p->outer, &r->inits));
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&r->p->outer, loop->op));
  JPP_RETURN_IF_ERROR(append_all(&r->p->outer, &r->unpacks));
  return append_all(&r->p->outer, &r->sums_after);
}

jpp_status_t* jpp__partition_reduce(jpp_partitioner_t* p, uint32_t loop) {
  reducer_t reducer = {.p = p, .loop = loop};
  jpp_status_t* status = reduce_all(&reducer);
  jpp__add_tree_deinit(&reducer.tree);
  jpp_vec_deinit(&reducer.tasks);
  jpp_vec_deinit(&reducer.terms);
  jpp_vec_deinit(&reducer.linear);
  jpp_vec_deinit(&reducer.finals);
  jpp_vec_deinit(&reducer.inits);
  jpp_vec_deinit(&reducer.unpacks);
  jpp_vec_deinit(&reducer.sums_after);
  jpp_vec_deinit(&reducer.small);
  return status;
}
