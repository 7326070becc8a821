// Pairs the sends and receives of each channel: both ends must see the same messages in
// the same order. It also compares the plan's message count and largest message with the
// actual ones.
#include "check/checker.h"

static jpp_status_t* check_pair(const jpp_checker_t* c, uint32_t id,
                                const jpp_end_t* send, const jpp_end_t* recv) {
  if (send->value == recv->value && send->microbatch == recv->microbatch) return NULL;
  char sent[JPP_CHECK_TEXT_SIZE], expected[JPP_CHECK_TEXT_SIZE];
  const jpp_plan_channel_t* channel = &c->plan->channels[id];
  return jpp_status_make(
      JPP_PROGRAM_ERROR,
      "channel %u: rank %u, instruction %u sends %s where rank %u, instruction %u "
      "expects %s",
      id, channel->src, send->instr,
      jpp__check_value_text(c, send->value, send->microbatch, sent), channel->dst,
      recv->instr, jpp__check_value_text(c, recv->value, recv->microbatch, expected));
}

static jpp_status_t* unpaired_error(const jpp_checker_t* c, uint32_t id,
                                    const jpp_end_t* end, bool is_send) {
  char text[JPP_CHECK_TEXT_SIZE];
  const jpp_plan_channel_t* channel = &c->plan->channels[id];
  return jpp_status_make(
      JPP_PROGRAM_ERROR, "rank %u, instruction %u: %s of %s %s rank %u has no %s",
      is_send ? channel->src : channel->dst, end->instr, is_send ? "send" : "recv",
      jpp__check_value_text(c, end->value, end->microbatch, text),
      is_send ? "to" : "from", is_send ? channel->dst : channel->src,
      is_send ? "receive" : "send");
}

static jpp_status_t* check_figures(const jpp_checker_t* c, uint32_t id,
                                   uint64_t largest) {
  const jpp_plan_channel_t* channel = &c->plan->channels[id];
  uint32_t messages = c->channels[id].messages;
  if (channel->src >= c->plan->ranks || channel->dst >= c->plan->ranks ||
      channel->src == channel->dst || !channel->slots) {
    return jpp_status_make(JPP_PROGRAM_ERROR,
                           "channel %u: expected two of %u ranks and at least 1 slot, "
                           "found %u -> %u and %u",
                           id, c->plan->ranks, channel->src, channel->dst,
                           channel->slots);
  }
  if (channel->messages == messages && channel->max_bytes == largest) return NULL;
  return jpp_status_make(JPP_PROGRAM_ERROR,
                         "channel %u (%u -> %u): %u messages of at most %llu bytes; the "
                         "plan says %u of %llu",
                         id, channel->src, channel->dst, messages,
                         (unsigned long long)largest, channel->messages,
                         (unsigned long long)channel->max_bytes);
}

static jpp_status_t* check_channel(const jpp_checker_t* c, uint32_t id) {
  const jpp_channel_ends_t* ends = &c->ends[id];
  uint64_t largest = 0;
  for (size_t i = 0; i < ends->sends.count && i < ends->recvs.count; ++i) {
    JPP_RETURN_IF_ERROR(check_pair(c, id, &ends->sends.data[i], &ends->recvs.data[i]));
    uint64_t bytes = c->plan->value_bytes[ends->sends.data[i].value];
    if (bytes > largest) largest = bytes;
  }
  if (ends->sends.count > ends->recvs.count) {
    return unpaired_error(c, id, &ends->sends.data[ends->recvs.count], true);
  }
  if (ends->recvs.count > ends->sends.count) {
    return unpaired_error(c, id, &ends->recvs.data[ends->sends.count], false);
  }
  return check_figures(c, id, largest);
}

jpp_status_t* jpp__check_channels(jpp_checker_t* c) {
  for (uint32_t i = 0; i < c->plan->num_channels; ++i) {
    JPP_RETURN_IF_ERROR(check_channel(c, i));
  }
  return NULL;
}
