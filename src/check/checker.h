// The checker's working state, passed from pass to pass:
//
//   kinds.c     classifies the bytes of each value
//   actor.c     walks each actor's list: registers, bytes, and the outputs at the end
//   run.c       one RUN of that walk
//   repeat.c    the repetitions that this walk need not visit
//   copies.c    proves that all copies of a value have the same bits
//   channels.c  pairs the sends and receives of each channel, which actor.c collected
//   wait.c      runs all actors with blocking sends, and finds cycles and slots
//   limit.c     compares the peaks with a limit
#ifndef JPP_CHECK_CHECKER_H_
#define JPP_CHECK_CHECKER_H_

#include "base/str.h"
#include "base/vec.h"
#include "jaxpp/check.h"

typedef struct jpp_check_storage {
  jpp_check_report_t report;
  jpp_arena_t arena;
} jpp_check_storage_t;

// The contents of a register.
typedef struct jpp_content {
  uint32_t value;       // JPP_NONE: empty
  uint32_t microbatch;  // JPP_NONE: the value has one instance per step
  uint32_t summed;      // of an accumulator: number of microbatches in the sum
  uint8_t owner;        // jpp_owner_t
  uint8_t kind;         // jpp_bytes_kind_t
  uint8_t memory;       // jpp_memory_t
} jpp_content_t;

typedef enum jpp_owner {
  JPP_OWNER_PROGRAM,   // the program must delete, donate or return it
  JPP_OWNER_CALLER,    // a borrowed input
  JPP_OWNER_CONSTANT,  // the same in every step
} jpp_owner_t;

// One end of a message.
typedef struct jpp_end {
  uint32_t instr;
  uint32_t value;
  uint32_t microbatch;
} jpp_end_t;

typedef struct jpp_channel_ends {
  JPP_VEC(jpp_end_t) sends;
  JPP_VEC(jpp_end_t) recvs;
} jpp_channel_ends_t;

// The last RUN that read a register.
typedef struct jpp_last_read {
  uint32_t instr;  // JPP_NONE: no RUN has read it
  bool twice;      // as two of its args
} jpp_last_read_t;

// Operands that were found to be others after a renaming of registers.
typedef struct jpp_paired_lists {
  uint32_t from, to;  // the first operand of each list
  uint32_t count;
} jpp_paired_lists_t;

// A prime, because the lists of successive runs are at equal distances.
enum { JPP_CHECK_PAIRED = 4093 };

typedef struct jpp_checker {
  const jpp_plan_t* plan;
  const jpp_staged_t* staged;
  jpp_arena_t scratch;
  jpp_check_actor_t* actors;      // those of the report
  jpp_check_channel_t* channels;  // those of the report
  jpp_channel_ends_t* ends;       // [channels]
  uint8_t* kinds;                 // [values] jpp_bytes_kind_t
  // Of the current actor; NULL: not wanted.
  jpp_memory_point_t* curve;
  // [values] the accumulator whose init, state, next or final it is.
  uint32_t* accumulator_of;
  uint64_t* first_run;  // [tasks] index of its first flag in `ran`
  uint8_t* ran;         // a flag for each task and microbatch
  uint32_t* runs;       // [tasks]
  uint32_t* summed;     // [values] of a state: `summed` when the last RUN read it
  // Of the current actor, [num_registers]; they have room for any actor's.
  jpp_content_t* registers;
  jpp_last_read_t* reads;
  jpp_content_t* before;
  uint32_t *next_of, *previous_of;
  jpp_paired_lists_t* paired;  // [JPP_CHECK_PAIRED] by `from`, the one found last
  bool* handed_out;            // as an output that is not a copy
  bool walks_all;              // visits repetitions too
  uint64_t repeated;           // number of instructions that the walks did not visit
} jpp_checker_t;

// Instructions of an actor that repeat: one repetition is `length` instructions, and the
// next has the same with microbatches of `loop` that are later by `shift`.
typedef struct jpp_period {
  uint32_t next;  // the instruction at which to look again; JPP_NONE: nowhere
  uint32_t tries;
  uint32_t length, shift, loop;
  uint32_t end;  // the first instruction that is not as the one before by `length`
  jpp_content_t* before;  // [num_registers] at next - length
  uint64_t live_before[JPP_MEMORY_COUNT];
  uint32_t* next_of;      // [num_registers] the register in its place; JPP_NONE: unknown
  uint32_t* previous_of;  // [num_registers] the inverse
} jpp_period_t;

// One actor's walk.
typedef struct jpp_walk {
  jpp_checker_t* c;
  const jpp_program_t* program;
  jpp_check_actor_t* actor;
  jpp_content_t* registers;  // [num_registers]
  jpp_last_read_t* reads;    // [num_registers]
  uint32_t at;               // the current instruction
  const jpp_instr_t* instr;
  uint64_t live[JPP_MEMORY_COUNT];         // bytes
  uint64_t live_of[JPP_BYTES_KIND_COUNT];  // in device memory
  uint32_t began;  // the last RUN that began a sum with its initial value; JPP_NONE: none
  jpp_period_t period;
} jpp_walk_t;

// The same as jpp_check_plan() and jpp_check_memory_curve(). `walks_all`: repetitions are
// visited too, which takes longer and gives the same results. *out_repeated: the number
// of instructions that were not visited, because they repeat others.
jpp_status_t* jpp__check_plan(const jpp_plan_t* plan, bool walks_all,
                              uint64_t* out_repeated,
                              jpp_check_report_t** out_report) JPP_MUST_USE;
jpp_status_t* jpp__check_memory_curve(const jpp_plan_t* plan, uint32_t rank,
                                      bool walks_all,
                                      jpp_memory_point_t* out_points) JPP_MUST_USE;
// Fills c->kinds; c->accumulator_of is already set.
jpp_status_t* jpp__check_kinds(jpp_checker_t* c) JPP_MUST_USE;
jpp_status_t* jpp__check_actor(jpp_checker_t* c, uint32_t rank) JPP_MUST_USE;
jpp_status_t* jpp__check_run(jpp_walk_t* w) JPP_MUST_USE;
// The conditions of a RUN that do not depend on its operands.
jpp_status_t* jpp__check_count_run(const jpp_walk_t* w) JPP_MUST_USE;
// Counts the current SEND or RECV, and records its end of the message.
jpp_status_t* jpp__walk_count_transfer(jpp_walk_t* w, uint32_t value) JPP_MUST_USE;
// repeat.c: finds the period of the actor's list.
void jpp__walk_find_period(jpp_walk_t* w);
// Called at period.next: moves the walk past all repetitions that are proved.
jpp_status_t* jpp__walk_repeat(jpp_walk_t* w) JPP_MUST_USE;
// Checks all runs of a task: its bindings before any actor is walked, its counts after
// the last one.
jpp_status_t* jpp__check_bindings(const jpp_checker_t* c) JPP_MUST_USE;
jpp_status_t* jpp__check_run_counts(const jpp_checker_t* c) JPP_MUST_USE;
jpp_status_t* jpp__check_copies(jpp_checker_t* c) JPP_MUST_USE;
jpp_status_t* jpp__check_channels(jpp_checker_t* c) JPP_MUST_USE;
// Proves that the plan's slots suffice, then finds how many are needed.
jpp_status_t* jpp__check_waiting(jpp_checker_t* c) JPP_MUST_USE;

// --- Shared by passes -----------------------------------------------------------------

// Fills an empty register with an instance of `value`; JPP_PROGRAM_ERROR if it is not
// empty.
jpp_status_t* jpp__walk_define(jpp_walk_t* w, uint32_t reg, jpp_content_t content);
// Empties a register that the program owns.
void jpp__walk_drop(jpp_walk_t* w, uint32_t reg);
// JPP_PROGRAM_ERROR unless the content is in that memory; the message begins with `what`.
jpp_status_t* jpp__walk_check_memory(const jpp_walk_t* w, const jpp_content_t* content,
                                     jpp_memory_t memory, const char* what) JPP_MUST_USE;
// Whether a register with this content may be read as `value` of this microbatch.
bool jpp__check_serves(const jpp_checker_t* c, const jpp_content_t* content,
                       uint32_t value, uint32_t microbatch);
// The accumulator whose `next` this is, and whose sum is complete; otherwise NULL.
const jpp_accumulator_t* jpp__check_complete(const jpp_checker_t* c,
                                             const jpp_content_t* content);
// The accumulator whose init, state, next or final a value is; NULL for others.
const jpp_accumulator_t* jpp__check_accumulator(const jpp_checker_t* c, uint32_t value);
// Whether the value is the microbatch number of some loop.
bool jpp__check_is_index(const jpp_checker_t* c, uint32_t value);

// Iterates over the first rank on each group of devices: begin with JPP_NONE, and stop at
// JPP_NONE.
uint32_t jpp__limits_next_first(const jpp_memory_limits_t* limits, uint32_t ranks,
                                uint32_t first);
// The rank after `rank` on the same devices; JPP_NONE past the last.
uint32_t jpp__limits_next_sharer(const jpp_memory_limits_t* limits, uint32_t ranks,
                                 uint32_t rank);

// The sum of the peaks of `first` and of the ranks on the same devices.
uint64_t jpp__limits_peak(const jpp_memory_limits_t* limits, const jpp_plan_t* plan,
                          uint32_t first);

// Ranks that exceed a limit.
typedef struct jpp_excess {
  uint32_t first;    // the first of the ranks that share the devices
  uint32_t largest;  // the one of these ranks with the highest peak
  uint32_t sharers;  // number of these ranks
  uint64_t peak;     // bytes on each device: the sum of their peaks
  uint32_t others;   // number of other groups with a smaller excess
} jpp_excess_t;

// The largest excess. Returns false if no limit is exceeded.
bool jpp__check_find_excess(const jpp_check_report_t* report,
                            const jpp_memory_limits_t* limits, jpp_excess_t* out_excess);

// Appends the message of jpp_check_memory_limit(). Returns false, and appends nothing, if
// no limit is exceeded.
bool jpp__check_append_excess(const jpp_check_report_t* report,
                              const jpp_memory_limits_t* limits, jpp_str_t* str);

// limit.c: computes the bytes that a further step in flight adds on the rank; c->kinds is
// set.
void jpp__check_next_step(const jpp_checker_t* c, uint32_t rank);
// Appends "weights 256, activations 64", without the kinds that have no bytes.
void jpp__check_append_kinds(const uint64_t bytes[JPP_BYTES_KIND_COUNT], jpp_str_t* str);

enum { JPP_CHECK_TEXT_SIZE = 256 };
// Writes "%9 (f32[2,8], microbatch 3)"; returns `buffer`.
const char* jpp__check_value_text(const jpp_checker_t* c, uint32_t value,
                                  uint32_t microbatch, char buffer[JPP_CHECK_TEXT_SIZE]);
// The same, or "nothing".
const char* jpp__check_content_text(const jpp_checker_t* c, const jpp_content_t* content,
                                    char buffer[JPP_CHECK_TEXT_SIZE]);
// Writes "run of fwd_0, microbatch 2" or "recv of %9 (...) from rank 1"; returns
// `buffer`.
const char* jpp__check_instr_text(const jpp_checker_t* c, const jpp_program_t* program,
                                  const jpp_instr_t* instr,
                                  char buffer[JPP_CHECK_TEXT_SIZE]);
// JPP_PROGRAM_ERROR "rank 0, instruction 12: INSTR: MESSAGE".
jpp_status_t* jpp__walk_fail(const jpp_walk_t* w, const char* format, ...)
    JPP_PRINTF(2, 3) JPP_MUST_USE;

#endif  // JPP_CHECK_CHECKER_H_
