// Program: the instructions of each actor.
//
// In: a staged graph, a schedule for each loop, the bytes of every value on one device.
// Out: one flat instruction list per actor. All tasks are put in one order in which they
// can run; each value is sent right after the task that makes it, at most once to each
// rank, and received right before its first use there, in the order in which it was sent.
// Channels have the slots that this order needs, so the lists cannot deadlock; check/
// proves that again from the lists alone.
//
// Operands are registers: slots that hold one value, with all its shards on the actor's
// devices.
//
// Runs and messages read and write values in device memory. A value of another memory is
// moved: out of device memory right after the sends that follow its run, and into it
// right before the first run of a rank that reads it. That copy stays until its last use;
// but a value that a forward has received leaves device memory until its backward.
//
// Threads: any thread, several at once, also on the same staged graph, which is only
// read. Any number of threads may read a finished plan; destroy it when no thread uses
// it.
#ifndef JAXPP_PROGRAM_H_
#define JAXPP_PROGRAM_H_

#include "jaxpp/partition.h"
#include "jaxpp/schedule.h"
#include "jaxpp/str.h"

typedef enum jpp_instr_kind {
  JPP_INSTR_RUN,     // args, then results, of task `target`
  JPP_INSTR_SEND,    // one arg through channel `target`; the register stays
  JPP_INSTR_RECV,    // one result through channel `target`
  JPP_INSTR_DELETE,  // deletes the args
  JPP_INSTR_MOVE,    // one arg to one result, in memory `target`; the arg stays
  JPP_INSTR_KIND_COUNT,
} jpp_instr_kind_t;

// "run", "send", "recv", "delete", "move"; lifetime static. NULL for an unknown kind.
JPP_API const char* jpp_instr_kind_name(jpp_instr_kind_t kind);

typedef struct jpp_instr {
  uint8_t kind;            // jpp_instr_kind_t
  uint32_t target;         // RUN: task id; SEND, RECV: channel id; MOVE: jpp_memory_t
  uint32_t microbatch;     // JPP_NONE outside loops
  uint32_t first_operand;  // registers: operands[first_operand ..], args before results
  uint32_t first_value;    // the values in them: operand_values[first_value ..]
  uint32_t num_args;
  uint32_t num_results;
} jpp_instr_t;

// A register that is filled before the first instruction.
typedef struct jpp_program_input {
  uint32_t reg;
  // Which argument of the step.
  uint32_t arg;
  // False: borrowed from the caller, who still owns it after the step. True: the program
  // deletes or donates it.
  bool owned;
} jpp_program_input_t;

// A register that never changes from step to step: the microbatch number, s32[].
typedef struct jpp_program_constant {
  uint32_t reg;
  uint32_t microbatch;
} jpp_program_constant_t;

// A register that the step leaves to the caller.
typedef struct jpp_program_output {
  uint32_t reg;
  uint32_t output;  // which output of the step
  bool copy;        // the caller gets a copy; the register keeps its owner
} jpp_program_output_t;

typedef struct jpp_program {
  uint32_t rank;
  uint32_t num_instrs, num_operands, num_operand_values, num_registers;
  uint32_t num_inputs, num_constants, num_outputs;
  const jpp_instr_t* instrs;
  // Programs may share parts of these two lists.
  const uint32_t* operands;        // [num_operands]
  const uint32_t* operand_values;  // [num_operand_values]
  const jpp_program_input_t* inputs;
  const jpp_program_constant_t* constants;
  const jpp_program_output_t* outputs;
  // Bytes in the memory of each device of the actor. A result that takes over a donated
  // arg's memory counts once. Receive slots are reserved for the whole step.
  uint64_t peak_bytes;      // the largest sum of live registers, receive slots included
  uint64_t reserved_bytes;  // receive slots
  // The instruction at which the peak is reached; num_instrs: after the last one, when
  // outputs are copied.
  uint32_t peak_instr;
  uint64_t peak_host_bytes;  // the largest sum in pinned host memory, for each device
} jpp_program_t;

typedef struct jpp_plan_channel {
  uint32_t src, dst;   // ranks
  uint32_t slots;      // messages that may be in flight
  uint64_t max_bytes;  // of one message, on each device
  uint32_t messages;   // per step
} jpp_plan_channel_t;

// What all runs of a task have in common.
typedef struct jpp_task_binding {
  // [task->num_inputs] the output that takes over the input's memory: the input is
  // donated, and dead after every run of the task; or JPP_NONE
  const uint32_t* donated_to;
  uint32_t runs;  // per step, on its rank
} jpp_task_binding_t;

typedef struct jpp_plan {
  const jpp_staged_t* staged;  // borrowed
  uint32_t ranks, num_channels;
  const jpp_program_t* programs;       // [ranks]
  const jpp_plan_channel_t* channels;  // [num_channels]
  const jpp_task_binding_t* bindings;  // [staged->num_tasks]
  const uint64_t* value_bytes;         // [staged->num_values] on each device
} jpp_plan_t;

typedef struct jpp_program_options {
  size_t struct_size;  // sizeof(jpp_program_options_t)
  // [graph->num_loops] verified.
  const jpp_schedule_t* const* schedules;
  // [staged->num_values] bytes of each value on one device; NULL: according to the types'
  // shards.
  const uint64_t* value_bytes;
  uint32_t channel_slots;  // minimum for each channel; 0: 2
} jpp_program_options_t;

// The staged graph is borrowed and must outlive the plan; the schedules need not.
JPP_API jpp_status_t* jpp_program_build(const jpp_staged_t* staged,
                                        const jpp_program_options_t* options,
                                        jpp_plan_t** out_plan) JPP_MUST_USE;
JPP_API void jpp_plan_destroy(jpp_plan_t* plan);

// How a task makes an array from an argument of the step, or as zeros: the array has
// consecutive elements of the argument, converted to its dtype. In microbatch i, they
// begin at element first + min(i, last) * row. Its layout is final.
typedef struct jpp_copy {
  uint32_t input;  // the argument's position among the task's inputs; JPP_NONE: zeros
  uint64_t first;
  uint64_t row;   // elements; 0: the same in every microbatch
  uint64_t last;  // a microbatch
  bool by_rows;   // `first` and `row` are whole rows along the argument's first dimension
} jpp_copy_t;

// Whether a task makes nothing but such arrays, so that it needs no module on a rank of
// one device; out_copies[task->num_outputs] says how. Only f32 and bf16 are converted to
// each other, and no more than 16 MiB of results: XLA's threads are faster beyond.
JPP_API bool jpp_plan_task_copies(const jpp_plan_t* plan, uint32_t task,
                                  JPP_OPTIONAL jpp_copy_t* out_copies);

// A rank's part of one step. Its layout is final.
typedef struct jpp_rank_costs {
  uint32_t tasks;            // runs of tasks with ops
  double flops;              // the sum of the ops' costs
  uint64_t peak_bytes;       // on each of the rank's devices
  uint64_t peak_host_bytes;  // in pinned host memory, for each of the rank's devices
} jpp_rank_costs_t;

// The messages that one rank sends to another in one step. Its layout is final.
typedef struct jpp_link_costs {
  uint32_t src, dst;  // ranks
  uint64_t messages;
  uint64_t bytes;  // on each device
} jpp_link_costs_t;

// The collectives of one kind that a task runs over the same axes of its rank's devices.
// Its layout is final.
typedef struct jpp_collective_costs {
  uint32_t rank;
  const char* task;  // its name
  const char* kind;  // "all-reduce"
  const char* axes;  // "data,model"
  uint64_t times;    // per step
  uint64_t bytes;    // of the results on each device, per step
} jpp_collective_costs_t;

typedef struct jpp_plan_costs {
  uint32_t num_ranks, num_links, num_collectives;
  const jpp_rank_costs_t* ranks;              // [num_ranks]
  const jpp_link_costs_t* links;              // [num_links] by src, then by dst
  const jpp_collective_costs_t* collectives;  // [num_collectives] by rank
} jpp_plan_costs_t;

// Computes the costs of a step; the caller frees them with jpp_plan_costs_destroy().
JPP_API jpp_status_t* jpp_plan_costs(const jpp_plan_t* plan,
                                     jpp_plan_costs_t** out_costs) JPP_MUST_USE;
// Adds a row behind those of its rank and copies its texts. A plan alone has no rows:
// only compiled tasks show their collectives. JPP_INVALID_ARGUMENT: no such rank.
JPP_API jpp_status_t* jpp_plan_costs_add_collective(
    jpp_plan_costs_t* costs, const jpp_collective_costs_t* collective) JPP_MUST_USE;
// Takes NULL.
JPP_API void jpp_plan_costs_destroy(jpp_plan_costs_t* costs);
// Tables of the ranks, the links and the collectives, with a column for pinned host
// memory if any rank uses it; free with jpp_text_free().
JPP_API jpp_status_t* jpp_plan_costs_print(const jpp_plan_costs_t* costs,
                                           char** out_text) JPP_MUST_USE;

typedef void (*jpp_append_sharding_t)(void* user, uint32_t value, jpp_str_t* str);

// Text; free with jpp_text_free().
JPP_API jpp_status_t* jpp_plan_print(const jpp_plan_t* plan,
                                     char** out_text) JPP_MUST_USE;
// All actors' instructions in one order in which they can run, in the style of a jaxpr:
// `task[... task_name=fwd_0 ...]`, `transfer[...]`, `delete[...]`. Free as above.
// `schedules` [loops] are those of the plan, and give the latencies of its tasks; NULL:
// each task has the latency of its kind. `append_sharding` appends to one line how a
// transferred value is laid out on each rank; NULL: layouts are not shown.
JPP_API jpp_status_t* jpp_plan_print_jaxpr(
    const jpp_plan_t* plan, JPP_OPTIONAL const jpp_schedule_t* const* schedules,
    JPP_OPTIONAL jpp_append_sharding_t append_sharding, JPP_OPTIONAL void* user,
    char** out_text) JPP_MUST_USE;

#endif  // JAXPP_PROGRAM_H_
