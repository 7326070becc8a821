// Numbers the channels of a schedule, one for each pair of ranks between which it sends.
// Going through the stages by sending rank, it is enough to remember, for each receiver,
// its latest channel and whose that is.
#include "schedule/channels.h"

// The stages of rank 0, then those of rank 1, and so on.
static jpp_status_t* stages_by_rank(const jpp_schedule_t* schedule, jpp_arena_t* scratch,
                                    uint32_t** out_stages) {
  uint32_t* at = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, (size_t)schedule->ranks + 1, &at));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->stages, out_stages));
  for (uint32_t s = 0; s < schedule->stages; ++s) ++at[schedule->stage_rank[s] + 1];
  for (uint32_t r = 0; r < schedule->ranks; ++r) at[r + 1] += at[r];
  for (uint32_t s = 0; s < schedule->stages; ++s) {
    (*out_stages)[at[schedule->stage_rank[s]]++] = s;
  }
  return NULL;
}

// The newest channel to a receiver, of whichever sender.
typedef struct newest {
  uint32_t channel;
  uint32_t sender;  // JPP_NONE: there is none yet
} newest_t;

jpp_status_t* jpp_schedule_channels_create(const jpp_schedule_t* schedule,
                                           jpp_arena_t* scratch,
                                           jpp_schedule_channels_t* out_channels) {
  *out_channels = (jpp_schedule_channels_t){0};
  jpp_schedule_channels_t channels = {0};
  uint32_t* stages = NULL;
  newest_t* newest = NULL;
  uint32_t count = schedule->stages;
  JPP_RETURN_IF_ERROR(stages_by_rank(schedule, scratch, &stages));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &newest));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, count, &channels.forward));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, count, &channels.backward));
  for (uint32_t r = 0; r < schedule->ranks; ++r) newest[r].sender = JPP_NONE;
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t stage = stages[i], sender = schedule->stage_rank[stage];
    for (uint32_t way = 0; way < 2; ++way) {
      bool forward = way == 0;
      uint32_t to = jpp_schedule_next_stage(schedule, stage, forward);
      newest_t* known = &newest[schedule->stage_rank[to]];
      if (known->sender != sender) *known = (newest_t){channels.count++, sender};
      (forward ? channels.forward : channels.backward)[stage] = known->channel;
    }
  }
  *out_channels = channels;
  return NULL;
}
