// Which rank of a job waits for which.
//
// A rank at a transfer waits for the rank at the other end if that rank has not reached
// its side of the transfer, or if its device has not computed the value. The chain of
// waits ends at a rank that waits for no other: this rank is the cause, or the closest
// known rank to it.
#ifndef JPP_FLIGHT_WAITS_H_
#define JPP_FLIGHT_WAITS_H_

#include "base/str.h"
#include "flight/format.h"

// The progress of a rank. Ranks are numbered by their index in an array.
typedef struct jpp_flight_place {
  bool known;   // false: the rest is not set
  bool silent;  // its process gives no sign of life
  uint32_t num_instrs;
  const jpp_flight_instr_t* instrs;
  uint64_t step;  // from 1; 0: none yet
  // The next instruction; num_instrs: all are issued.
  uint32_t at;
  // The first SEND that was issued and whose message has not left; step 0: none known.
  uint64_t unsent_step;
  uint32_t unsent;
} jpp_flight_place_t;

typedef struct jpp_flight_job {
  const jpp_flight_place_t* places;  // [count] by rank
  size_t count;
} jpp_flight_job_t;

// The instruction that the rank has reached; NULL: it has issued all instructions.
const jpp_flight_instr_t* jpp__flight_next_instr(const jpp_flight_place_t* place);
// Whether the sender, including its device, has done its part of a receive of this step.
bool jpp__flight_has_sent(const jpp_flight_place_t* sender,
                          const jpp_flight_instr_t* receive, uint64_t step);
// Whether all slots of the channel hold messages that the receiver has not taken.
bool jpp__flight_is_full(const jpp_flight_place_t* sender,
                         const jpp_flight_place_t* receiver,
                         const jpp_flight_instr_t* send);
// The rank for which this one waits; NULL: none known.
const jpp_flight_place_t* jpp__flight_waits_for(const jpp_flight_job_t* job,
                                                const jpp_flight_place_t* place);
// The last rank of the chain of waits that begins at this one; NULL: the chain is a
// cycle.
const jpp_flight_place_t* jpp__flight_follow(const jpp_flight_job_t* job,
                                             const jpp_flight_place_t* place);
// Appends "rank 0 waits for rank 1, that for rank 2", and returns the end of the chain as
// above.
const jpp_flight_place_t* jpp__flight_append_way(const jpp_flight_job_t* job,
                                                 const jpp_flight_place_t* place,
                                                 jpp_str_t* out);

#endif  // JPP_FLIGHT_WAITS_H_
