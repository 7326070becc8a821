// Channels: a number for each pair of ranks between which a schedule sends.
#ifndef JPP_SCHEDULE_CHANNELS_H_
#define JPP_SCHEDULE_CHANNELS_H_

#include "base/arena.h"
#include "jaxpp/schedule.h"

// Results sent from one rank to another share a channel, whatever their stages. A result
// that stays on its rank has a number too, but nothing is sent through that channel.
typedef struct jpp_schedule_channels {
  uint32_t* forward;   // [stages] of the stage's forward, to the next stage
  uint32_t* backward;  // [stages] of its backward, to the previous stage
  uint32_t count;      // at most 2 * stages
} jpp_schedule_channels_t;

// Allocates in `scratch`; time and memory are linear in stages and ranks.
jpp_status_t* jpp__schedule_channels_create(
    const jpp_schedule_t* schedule, jpp_arena_t* scratch,
    jpp_schedule_channels_t* out_channels) JPP_MUST_USE;

// The stage that needs the result of a stage's forward (or backward); the stage itself
// if none does.
static inline uint32_t jpp__schedule_next_stage(const jpp_schedule_t* schedule,
                                                uint32_t stage, bool forward) {
  if (forward) return stage + 1 < schedule->stages ? stage + 1 : stage;
  return stage ? stage - 1 : stage;
}

#endif  // JPP_SCHEDULE_CHANNELS_H_
