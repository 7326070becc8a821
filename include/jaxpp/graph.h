// Graph: a training step as the planner sees it.
//
// Flat SSA. A value has a type and a producer; an op has a name, inputs, outputs, a cost
// and a kind. The planner does not know what an op computes: it interprets only stage
// marks, sums and loops. Ids are dense, and every op comes after the ops that it uses.
// The ops of a loop's body come right before the loop's own op.
//
// A graph is immutable once it is built, and lives in one arena. The builder, which the
// parser uses too, checks each invariant as soon as a call could break it:
// JPP_GRAPH_ERROR names the op. After an error, and once it has finished, only destroy
// the builder: other calls give JPP_INVALID_ARGUMENT.
//
// Threads: a builder belongs to one thread at a time. Any number of threads may read,
// print and plan a finished graph at once; destroy it when no thread uses it.
#ifndef JAXPP_GRAPH_H_
#define JAXPP_GRAPH_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "jaxpp/dtype.h"
#include "jaxpp/memory.h"
#include "jaxpp/status.h"
#include "jaxpp/task.h"

// Its layout is final.
typedef struct jpp_type {
  jpp_dtype_t dtype;
  uint32_t ndim;
  const int64_t* dims;  // [ndim]
  // The number of equal pieces into which a rank's devices cut the array, one piece per
  // device; 0 and 1: every device holds all of it. It divides the number of elements: JAX
  // takes and returns arrays in equal pieces only.
  uint32_t shards;
  // Where the array is between tasks. Tasks read and write device memory: a value in
  // another memory is moved to device memory before a task that reads it, and out of it
  // after the task that makes it.
  jpp_memory_t memory;
} jpp_type_t;

// Elements of an array of this type, all shards together.
JPP_API uint64_t jpp_type_elements(const jpp_type_t* type);
// Bytes of a dense array of this type, all shards together.
JPP_API uint64_t jpp_type_bytes(const jpp_type_t* type);
// The same in host memory, where an element takes a byte or more.
JPP_API uint64_t jpp_type_host_bytes(const jpp_type_t* type);
// Ignores shards.
JPP_API bool jpp_type_equal(const jpp_type_t* a, const jpp_type_t* b);

typedef struct jpp_value {
  jpp_type_t type;
  uint64_t bytes;     // of the whole array, all shards together
  uint32_t producer;  // op id; JPP_NONE for arguments and loop indices
  uint32_t loop;      // the loop whose body it belongs to; JPP_NONE outside
  const char* name;   // of an argument ("params['w']"); NULL otherwise
} jpp_value_t;

// Bytes of a value on one of a rank's devices, according to its type's shards.
JPP_API uint64_t jpp_value_device_bytes(const jpp_value_t* value);

typedef enum jpp_op_kind {
  JPP_OP_CALL,           // opaque
  JPP_OP_MARK,           // ends forward stage `attr`; output k is input k
  JPP_OP_MARK_BACKWARD,  // the transpose of a mark: begins backward stage `attr`
  // a + b of one type; the planner may regroup trees of these.
  JPP_OP_ADD,
  // (a, b, ...) -> a, on the ranks of b, ...; with one input, on all ranks
  JPP_OP_PLACE,
  // Opaque; runs as a task of its own on each of `ranks`. A rank runs its tasks of this
  // kind in the order of the graph.
  JPP_OP_TASK,
  // Outputs are the results of loop `attr`.
  JPP_OP_LOOP,
  // Only the planner makes these:
  JPP_OP_INIT,        // () -> initial state of result `attr` of loop `loop`
  JPP_OP_ACCUMULATE,  // (state, value, index) -> state, of result `attr` of loop `loop`
  JPP_OP_SUM,         // (a, b, ...) -> ((a + b) + ...)
  JPP_OP_PACK,        // (a, b, ...) -> their elements, in one dimension
  JPP_OP_UNPACK,      // (packed) -> the array that begins at element `attr`
  JPP_OP_REPEAT,      // op `attr` of the graph, a call, with other operands
  JPP_OP_KIND_COUNT,
} jpp_op_kind_t;

// "call", "mark", "mark_backward", "add", ...; lifetime static. NULL for an unknown kind.
JPP_API const char* jpp_op_kind_name(jpp_op_kind_t kind);

enum {
  JPP_OP_CHEAP = 1,  // may be recomputed wherever it is needed
  // Written by autodiff, not by the user.
  JPP_OP_BACKWARD = 2,
  // Has a visible effect (a callback): runs once per microbatch, or outside a loop once
  // per step, whether its results are used or not.
  JPP_OP_EFFECT = 4,
  // A call that only copies: its output has consecutive elements of the first input, in
  // their order, converted to the output's dtype. They begin in row `attr` of the input.
  // A second input, an s32[] or u32[], is added to `attr`; the sum is clamped to the rows
  // from which on the output fits.
  JPP_OP_COPY = 8,
  // All elements of its outputs are zero, such as the gradient of a frozen weight.
  JPP_OP_ZEROS = 16,
  // Runs a body of ops that the graph does not show, as a scan or a cond does.
  JPP_OP_BODY = 32,
  // A call that is linear, up to rounding, in each input that depends on the microbatch
  // if the others are fixed: f(a + b) is f(a) + f(b).
  JPP_OP_LINEAR = 64,
  JPP_OP_FLAGS = 127,  // all of these
};

typedef struct jpp_op {
  uint8_t kind;   // jpp_op_kind_t
  uint8_t flags;  // a sum of JPP_OP_CHEAP, JPP_OP_BACKWARD, ..., JPP_OP_LINEAR
  uint32_t attr;  // mark: stage; loop: loop id; init and accumulate: result index;
                  // unpack: an element; repeat: an op; JPP_OP_COPY: a row
  uint32_t loop;  // the loop whose body it belongs to; JPP_NONE outside
  uint32_t num_inputs;
  const uint32_t* inputs;
  uint32_t first_output;  // outputs are first_output .. + num_outputs - 1
  uint32_t num_outputs;
  float cost;        // relative; floating-point operations if the front end knows them
  const char* name;  // "dot_general"
  // The user's "file.py:12"; NULL when unknown.
  const char* where;
  // Ops of a graph with the same nonzero code compute the same from operands of the same
  // types.
  uint32_t code;
  // JPP_OP_TASK: the ranks that run it, ascending; at least one.
  uint32_t num_ranks;
  const uint32_t* ranks;
} jpp_op_t;

// How one result of a loop is reduced over the microbatches.
typedef enum jpp_reduce_kind {
  JPP_REDUCE_ADD,
  JPP_REDUCE_MAX,
  JPP_REDUCE_CONCAT,
  JPP_REDUCE_CUSTOM,  // known to the front end; state and value types may differ
  JPP_REDUCE_KIND_COUNT,
} jpp_reduce_kind_t;

// "add", "max", "concat", "custom"; lifetime static. NULL for an unknown kind.
JPP_API const char* jpp_reduce_kind_name(jpp_reduce_kind_t kind);

// Its layout is final.
typedef struct jpp_loop_result {
  uint8_t reduce;  // jpp_reduce_kind_t
  // JPP_REDUCE_ADD: in the loop, each device of a rank sums its own part of the value;
  // the parts are added once, after the loop.
  bool partial;
  uint32_t value;  // a value of the body, or from outside the loop
} jpp_loop_result_t;

typedef struct jpp_loop {
  uint32_t op;            // its JPP_OP_LOOP
  uint32_t microbatches;  // >= 1
  uint32_t index;         // value id: the microbatch number, s32[]
  uint32_t first_op;      // body: ops first_op .. op - 1
  uint32_t num_results;
  const jpp_loop_result_t* results;  // result k becomes output k of `op`
  uint32_t stages;                   // of the schedule; 0 when the text does not give it
  const char* schedule;  // "1f1b"; NULL when the front end holds the task lists
  const char* where;
} jpp_loop_t;

typedef struct jpp_graph_arg {
  uint32_t value;
  // The step may reuse or free its memory.
  bool donated;
  // The ranks on which the caller passes it, ascending; other ranks get it from the first
  // of them. None: all ranks that need it.
  uint32_t num_ranks;
  const uint32_t* ranks;
} jpp_graph_arg_t;

typedef struct jpp_graph_output {
  uint32_t value;
  // "[0].params['w']"; may be NULL.
  const char* name;
  // The argument of the next step, of the same type, that this output becomes; JPP_NONE:
  // none. Without `ranks`, the output is left wherever that argument must be passed.
  uint32_t next;
  // The ranks on which it is left, ascending; none: the ranks that make it.
  uint32_t num_ranks;
  const uint32_t* ranks;
} jpp_graph_output_t;

typedef struct jpp_graph {
  const char* name;
  uint32_t ranks;  // pipeline ranks; 0 when the text does not give it
  uint32_t num_values, num_ops, num_loops, num_args, num_outputs;
  const jpp_value_t* values;
  const jpp_op_t* ops;
  const jpp_loop_t* loops;
  const jpp_graph_arg_t* args;
  const jpp_graph_output_t* outputs;
  bool sharded;  // its ops may move data between the devices of a rank
} jpp_graph_t;

JPP_API void jpp_graph_destroy(jpp_graph_t* graph);

// --- Builder --------------------------------------------------------------------------

typedef struct jpp_graph_builder jpp_graph_builder_t;

JPP_API jpp_status_t* jpp_graph_builder_create(
    JPP_OPTIONAL const char* name, uint32_t ranks,
    jpp_graph_builder_t** out_builder) JPP_MUST_USE;
JPP_API void jpp_graph_builder_destroy(jpp_graph_builder_t* builder);

JPP_API jpp_status_t* jpp_graph_builder_add_arg(jpp_graph_builder_t* builder,
                                                const jpp_type_t* type, bool donated,
                                                JPP_OPTIONAL const char* name,
                                                uint32_t* out_value) JPP_MUST_USE;
// The argument that was added last is passed on these ranks, ascending, and no others.
JPP_API jpp_status_t* jpp_graph_builder_give_arg(jpp_graph_builder_t* builder,
                                                 const uint32_t* ranks,
                                                 uint32_t num_ranks) JPP_MUST_USE;

typedef struct jpp_op_desc {
  size_t struct_size;  // sizeof(jpp_op_desc_t)
  jpp_op_kind_t kind;  // JPP_OP_CALL, _MARK, _MARK_BACKWARD, _ADD, _PLACE or _TASK
  uint8_t flags;
  uint32_t attr;
  uint32_t num_inputs;
  const uint32_t* inputs;
  uint32_t num_outputs;
  const jpp_type_t* outputs;
  float cost;
  const char* name;  // letters, digits, "_.-+"; any other byte becomes '_'
  const char* where;
  uint32_t code;          // as in jpp_op_t
  const uint32_t* ranks;  // [num_ranks] of JPP_OP_TASK
  uint32_t num_ranks;
} jpp_op_desc_t;

// Outputs get consecutive ids, beginning with *out_first_output. Strings and types are
// copied.
JPP_API jpp_status_t* jpp_graph_builder_add_op(jpp_graph_builder_t* builder,
                                               const jpp_op_desc_t* desc,
                                               uint32_t* out_first_output) JPP_MUST_USE;

typedef struct jpp_loop_desc {
  uint32_t microbatches;
  uint32_t stages;       // 0: unknown
  const char* schedule;  // may be NULL
  const char* where;
} jpp_loop_desc_t;

// Ops added from here to end_loop() are the body. Loops do not nest.
JPP_API jpp_status_t* jpp_graph_builder_begin_loop(jpp_graph_builder_t* builder,
                                                   const jpp_loop_desc_t* desc,
                                                   uint32_t* out_index) JPP_MUST_USE;
// `types` are the results' types after the reduction.
JPP_API jpp_status_t* jpp_graph_builder_end_loop(jpp_graph_builder_t* builder,
                                                 const jpp_loop_result_t* results,
                                                 const jpp_type_t* types,
                                                 uint32_t num_results,
                                                 uint32_t* out_first_output) JPP_MUST_USE;
// `next` is the value of an argument, or JPP_NONE.
JPP_API jpp_status_t* jpp_graph_builder_add_output(jpp_graph_builder_t* builder,
                                                   uint32_t value,
                                                   JPP_OPTIONAL const char* name,
                                                   uint32_t next) JPP_MUST_USE;
// The output that was added last is left on these ranks, ascending, and no others. They
// compute a value that depends on no loop; other values are sent to them.
JPP_API jpp_status_t* jpp_graph_builder_leave_output(jpp_graph_builder_t* builder,
                                                     const uint32_t* ranks,
                                                     uint32_t num_ranks) JPP_MUST_USE;

// Hands the graph to the caller. The builder is empty afterwards.
JPP_API jpp_status_t* jpp_graph_builder_finish(jpp_graph_builder_t* builder,
                                               jpp_graph_t** out_graph) JPP_MUST_USE;

// Sets which results of a loop are partial, [num_results] of the loop. Call it before the
// graph is planned. JPP_GRAPH_ERROR if one is not reduced by JPP_REDUCE_ADD.
JPP_API jpp_status_t* jpp_graph_set_partial(jpp_graph_t* graph, uint32_t loop,
                                            const bool* partial) JPP_MUST_USE;

// Sets `sharded`, also if no type has shards yet. Call it before the graph is planned.
JPP_API jpp_status_t* jpp_graph_set_sharded(jpp_graph_t* graph) JPP_MUST_USE;

// --- Text form ------------------------------------------------------------------------
//
//   graph "step" ranks 2
//   arg %0 f32[32,4] "params['w']" donated
//   arg %8 f32[4] "bias" on 1
//   %1:f32[4,32] = transpose(%0) code 1 cost 32 at "model.py:3"
//   loop microbatches 4 stages 2 schedule "1f1b" index %2 {
//     %3:f32[8,4] = slice(%1, %2) cheap copies 0
//     %4:f32[8,4] = @mark 0 (%3)
//     %5:f32[8,4] = @add(%4, %4) backward
//     = print(%5) effect
//   } %6:f32[8,4] = add %5, %7:f32[32,4] = concat %4
//   %9:f32[4] = @task 1 update(%8) cost 4
//   out %7 "[0]['w']" next %0
//   out %6 "[1]" on 0, 1
//
// f32[8,4]/2 is cut into 2 shards, f32[8,4]@pinned_host is in that memory. `#` begins a
// comment. Names behind % are letters, digits, '_' and '.'.

// The caller frees *out_text with jpp_text_free().
JPP_API jpp_status_t* jpp_graph_print(const jpp_graph_t* graph,
                                      char** out_text) JPP_MUST_USE;
// The same with the shards that follow from `device_bytes`, [graph->num_values] bytes of
// each value on one device, 0 if unknown. It assumes equal pieces; for types smaller than
// a byte, the bytes may not determine the shards.
JPP_API jpp_status_t* jpp_graph_print_sharded(const jpp_graph_t* graph,
                                              const uint64_t* device_bytes,
                                              char** out_text) JPP_MUST_USE;
// `file` names the text in errors ("file:line:column: ...", JPP_PARSE_ERROR).
JPP_API jpp_status_t* jpp_graph_parse(const char* text, size_t length, const char* file,
                                      jpp_graph_t** out_graph) JPP_MUST_USE;
// The same from a file ("-": standard input). JPP_INVALID_ARGUMENT if it cannot be read.
JPP_API jpp_status_t* jpp_graph_read(const char* file,
                                     jpp_graph_t** out_graph) JPP_MUST_USE;

#endif  // JAXPP_GRAPH_H_
