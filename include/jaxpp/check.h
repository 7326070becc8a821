// Check: proves a plan from its instruction lists alone.
//
// The proof knows the staged graph and reads the programs as a runtime would; it shares
// no code with the parts that built them. It proves for every actor:
//
//  - every register holds, at each use, the value and microbatch that the task expects:
//    defined before, not deleted or donated since, never overwritten while it is live;
//    sums take their microbatches in order;
//  - only outputs, borrowed inputs and constants are left at the end; borrowed
//    inputs and constants are neither deleted nor donated;
//  - every task runs once for each of its microbatches, as its binding says;
//  - runs and sends read device memory, and outputs are left in the memory of their type;
//  - the peaks in bytes, on devices and in pinned host memory, equal the plan's;
//  - a value that several ranks hold is made by one task and sent, or made by tasks that
//    run the same module on the same inputs: its copies are bitwise equal;
//
// and for every channel that both ends see the same values in the same order; and that no
// actors wait for each other for ever if sends block while all slots are full.
//
// Threads: any thread, several at once, also on the same plan, which is only read.
#ifndef JAXPP_CHECK_H_
#define JAXPP_CHECK_H_

#include "jaxpp/program.h"

// What live bytes consist of. An argument's kind depends on how the loops use it:
//
//  - read by a stage as it is, or through work that needs no loop (a cast, a transpose):
//    weights, and the results of that work are weights too;
//  - read only through cheap ops of the microbatch number (a slice, a folded key): batch;
//  - not read by any loop: optimizer state. Without a loop all arguments are weights.
//
// A result that takes over an argument's donated memory keeps the argument's kind. An
// executable's temporary memory belongs to the device and does not count.
typedef enum jpp_bytes_kind {
  JPP_BYTES_WEIGHTS,
  JPP_BYTES_GRADIENTS,  // sums of a loop with a backward pass, losses among them
  JPP_BYTES_OPTIMIZER_STATE,
  JPP_BYTES_ACTIVATIONS,    // values of one microbatch
  JPP_BYTES_RECEIVE_SLOTS,  // reserved for the whole step
  JPP_BYTES_BATCH,
  JPP_BYTES_LOOP_RESULTS,  // accumulators other than gradients
  JPP_BYTES_STEP_VALUES,   // all others: results of tasks outside the loops
  JPP_BYTES_CONSTANTS,     // microbatch numbers
  JPP_BYTES_KIND_COUNT,
} jpp_bytes_kind_t;

// "weights", "optimizer state", ...; lifetime static.
JPP_API const char* jpp_bytes_kind_name(jpp_bytes_kind_t kind);

typedef struct jpp_check_actor {
  uint32_t runs, sends, recvs, deletes, moves;  // instructions
  uint64_t peak_bytes;                          // on each device of the rank
  uint32_t peak_instr;                          // where it is first reached
  uint64_t bytes_at_peak[JPP_BYTES_KIND_COUNT];
  // What each further step in flight adds on a device: its batch, and its results that do
  // not take over an argument's memory.
  uint64_t next_step_bytes;
  uint64_t peak_host_bytes;  // in pinned host memory, for each device
} jpp_check_actor_t;

typedef struct jpp_check_channel {
  uint32_t messages;
  // Sent in one step, from each device.
  uint64_t bytes;
  // The plan cannot deadlock if each channel has at least this many slots. Computed by
  // the method of T. M. Parks, "Bounded Scheduling of Process Networks", 1995: each
  // channel begins with one slot, and the full channels in a cycle of waiting actors get
  // one more.
  uint32_t slots_needed;
} jpp_check_channel_t;

typedef struct jpp_check_report {
  const jpp_plan_t* plan;               // borrowed: must outlive the report
  const jpp_check_actor_t* actors;      // [plan->ranks]
  const jpp_check_channel_t* channels;  // [plan->num_channels]
} jpp_check_report_t;

// JPP_PROGRAM_ERROR names rank, instruction, value, what was expected and what was found.
// Time and memory are linear in the instructions. Free the report with
// jpp_check_report_destroy().
JPP_API jpp_status_t* jpp_check_plan(const jpp_plan_t* plan,
                                     jpp_check_report_t** out_report) JPP_MUST_USE;
// Takes NULL.
JPP_API void jpp_check_report_destroy(jpp_check_report_t* report);
// Text; free with jpp_text_free().
JPP_API jpp_status_t* jpp_check_report_print(const jpp_check_report_t* report,
                                             char** out_text) JPP_MUST_USE;

// What is live on each device of an actor at one point of its program.
typedef struct jpp_memory_point {
  uint64_t bytes[JPP_BYTES_KIND_COUNT];
  uint64_t host_bytes;  // in pinned host memory, for each device
} jpp_memory_point_t;

// Walks one actor of a proved plan. Point 0 is before the first instruction; point i + 1
// is after instruction i, when its donated args are gone, and the last one has the copies
// of outputs too: program->num_instrs + 1 points in all. JPP_INVALID_ARGUMENT for an
// unknown rank, and unless `count`, the length of `out_points`, is that number.
JPP_API jpp_status_t* jpp_check_memory_curve(const jpp_plan_t* plan, uint32_t rank,
                                             uint32_t count,
                                             jpp_memory_point_t* out_points) JPP_MUST_USE;

// How much of their devices' memory ranks may use. Its layout is final.
typedef struct jpp_memory_limits {
  // [ranks] on each device of the rank.
  const uint64_t* bytes;
  // [ranks] Ranks with the same number share their devices: their peaks add up, and the
  // limit of the first such rank applies. NULL: each rank has its own.
  const uint32_t* devices;
} jpp_memory_limits_t;

// JPP_OUT_OF_MEMORY if the device memory of a rank, or of ranks that share devices
// together, peaks above its limit. The message names the rank that exceeds its limit by
// most, by how much, the instruction, and the kinds of bytes.
JPP_API jpp_status_t* jpp_check_memory_limit(
    const jpp_check_report_t* report, const jpp_memory_limits_t* limits) JPP_MUST_USE;

// The same for the peaks in pinned host memory, with limits for each device of the rank.
JPP_API jpp_status_t* jpp_check_host_limit(
    const jpp_check_report_t* report, const jpp_memory_limits_t* limits) JPP_MUST_USE;

// How many steps, at most `wanted` and at least 1, can be in flight within the limits;
// NULL: no limits.
JPP_API uint32_t jpp_check_steps_in_flight(const jpp_check_report_t* report,
                                           const jpp_memory_limits_t* limits,
                                           uint32_t wanted);

#endif  // JAXPP_CHECK_H_
