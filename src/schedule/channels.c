// Numbers the channels of a schedule, one for each pair of ranks between which it sends.
// The stages are visited by sending rank, so it is enough to remember the latest channel
// of each receiver and its sender.
#include "schedule/channels.h"

// Lists the stages of rank 0, then those of rank 1, and so on.
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

// The channel to one receiver that was numbered last.
typedef struct latest_channel {
  uint32_t sender;  // JPP_NONE: no channel yet
  uint32_t number;
} latest_channel_t;

// The channel from `sender` to the receiver of `latest`. Senders are visited one after
// another, so an existing channel is the latest one.
static uint32_t number_channel(latest_channel_t* latest, uint32_t sender,
                               uint32_t* count) {
  if (latest->sender != sender) *latest = (latest_channel_t){sender, (*count)++};
  return latest->number;
}

jpp_status_t* jpp__schedule_channels_create(const jpp_schedule_t* schedule,
                                            jpp_arena_t* scratch,
                                            jpp_schedule_channels_t* out_channels) {
  *out_channels = (jpp_schedule_channels_t){0};
  jpp_schedule_channels_t channels = {0};
  uint32_t* stages = NULL;
  latest_channel_t* latest = NULL;  // [ranks] by receiver
  JPP_RETURN_IF_ERROR(stages_by_rank(schedule, scratch, &stages));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->ranks, &latest));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->stages, &channels.forward));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, schedule->stages, &channels.backward));
  for (uint32_t r = 0; r < schedule->ranks; ++r) latest[r].sender = JPP_NONE;
  for (uint32_t i = 0; i < schedule->stages; ++i) {
    uint32_t stage = stages[i], sender = schedule->stage_rank[stage];
    uint32_t after = jpp__schedule_next_stage(schedule, stage, true);
    uint32_t before = jpp__schedule_next_stage(schedule, stage, false);
    channels.forward[stage] =
        number_channel(&latest[schedule->stage_rank[after]], sender, &channels.count);
    channels.backward[stage] =
        number_channel(&latest[schedule->stage_rank[before]], sender, &channels.count);
  }
  *out_channels = channels;
  return NULL;
}
