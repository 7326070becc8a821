// Check: proves a plan from its instruction lists alone.
//
// The proof knows the staged graph and reads the programs as a runtime would; it shares
// no code with what built them. What it proves of every actor:
//
//  - every register holds, at each use, the very value and microbatch that the task asks
//    for: defined before, not deleted or donated since, never overwritten while it is
//    live; sums take their microbatches in order;
//  - nothing is left over at the end but outputs, borrowed inputs and constants; borrowed
//    inputs and constants are neither deleted nor donated;
//  - every task runs once for each of its microbatches, as its binding says;
//  - the peak in bytes is the one that the plan states;
//
// and of every channel: both ends see the same values in the same order, and no actors
// wait for each other for ever when sends block with all slots full.
#ifndef JAXPP_CHECK_H_
#define JAXPP_CHECK_H_

#include "jaxpp/program.h"

// What live bytes are made of.
typedef enum jpp_bytes_origin {
  JPP_BYTES_ARGUMENTS,      // the step's arguments
  JPP_BYTES_RECEIVE_SLOTS,  // reserved for the whole step
  JPP_BYTES_ACCUMULATORS,
  JPP_BYTES_CONSTANTS,    // microbatch numbers
  JPP_BYTES_ACTIVATIONS,  // values of one microbatch
  JPP_BYTES_STEP_VALUES,  // all others: what tasks outside the loops make
  JPP_BYTES_ORIGIN_COUNT,
} jpp_bytes_origin_t;

// "arguments", "receive slots", ...; lifetime static.
JPP_API const char* jpp_bytes_origin_name(jpp_bytes_origin_t origin);

typedef struct jpp_check_actor {
  uint32_t runs, sends, recvs, deletes;  // instructions
  uint64_t peak_bytes;                   // on each device of the actor
  uint32_t peak_instr;                   // where it is first reached
  uint64_t bytes_at_peak[JPP_BYTES_ORIGIN_COUNT];
} jpp_check_actor_t;

typedef struct jpp_check_channel {
  uint32_t messages;
  uint64_t bytes;  // sent in one step, from each device
  // Slots that are enough when every channel has as many as its own field says. Found as
  // in T. M. Parks, "Bounded Scheduling of Process Networks", 1995: all begin with one,
  // and those that a cycle of waiting actors finds full grow.
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

#endif  // JAXPP_CHECK_H_
