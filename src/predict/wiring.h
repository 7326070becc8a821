// Wiring: what each instruction of a plan waits for, and what follows it, resolved once.
//
// Runs and messages of a step are numbered over all ranks; a move is a message of a rank
// to itself. A run waits for the messages among its arguments; its other arguments were
// made by earlier runs of its rank, which its device executes before it. A message waits
// for what made its value: a run, another message, or nothing.
#ifndef JPP_PREDICT_WIRING_H_
#define JPP_PREDICT_WIRING_H_

#include "base/arena.h"
#include "jaxpp/predict.h"

typedef struct jpp_wired_instr {
  uint8_t kind;         // jpp_instr_kind_t
  uint32_t number;      // of its run, message or move
  uint32_t first_need;  // of a run, in `needs`
  uint32_t num_needs;
} jpp_wired_instr_t;

typedef struct jpp_wired_message {
  uint32_t channel;  // JPP_NONE: a move
  uint32_t rank;     // that receives it
  size_t link;       // sender * ranks + rank; moves of a rank have links of their own
  uint32_t source;   // number of what makes its value; JPP_NONE: it exists
  uint32_t next_of_same;  // the next message of the same source; JPP_NONE: the last
  double bytes;
} jpp_wired_message_t;

typedef struct jpp_wired_run {
  uint32_t rank, task, microbatch;
} jpp_wired_run_t;

typedef struct jpp_wiring {
  const jpp_plan_t* plan;
  uint32_t num_runs;
  uint32_t num_messages;  // and moves, which have the last numbers
  size_t num_links;
  jpp_wired_instr_t** instrs;     // [ranks][num_instrs of the rank's program]
  uint32_t* needs;                // numbers of messages
  jpp_wired_run_t* runs;          // [num_runs]
  jpp_wired_message_t* messages;  // [num_messages]
  // [num_runs + num_messages] the first message that each source makes, runs first;
  // JPP_NONE. A source is a number in this list.
  uint32_t* first_made;
} jpp_wiring_t;

jpp_status_t* jpp__wiring_create(const jpp_plan_t* plan, jpp_arena_t* arena,
                                 jpp_wiring_t* out_wiring) JPP_MUST_USE;

#endif  // JPP_PREDICT_WIRING_H_
