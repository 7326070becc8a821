// The report as text.
#include "base/str.h"
#include "check/checker.h"

const char* jpp_bytes_origin_name(jpp_bytes_origin_t origin) {
  static const char* const kNames[JPP_BYTES_ORIGIN_COUNT] = {
      [JPP_BYTES_ARGUMENTS] = "arguments",
      [JPP_BYTES_RECEIVE_SLOTS] = "receive slots",
      [JPP_BYTES_ACCUMULATORS] = "accumulators",
      [JPP_BYTES_CONSTANTS] = "constants",
      [JPP_BYTES_ACTIVATIONS] = "activations",
      [JPP_BYTES_STEP_VALUES] = "step values",
  };
  return (unsigned)origin < JPP_BYTES_ORIGIN_COUNT ? kNames[origin] : "?";
}

static void append_actor(const jpp_check_report_t* report, uint32_t rank,
                         jpp_str_t* str) {
  const jpp_check_actor_t* actor = &report->actors[rank];
  jpp_str_appendf(str, "actor %u: %u runs, %u sends, %u receives, %u deletes\n", rank,
                  actor->runs, actor->sends, actor->recvs, actor->deletes);
  jpp_str_appendf(str, "  peak %llu bytes at instruction %u:",
                  (unsigned long long)actor->peak_bytes, actor->peak_instr);
  const char* separator = "";
  for (int i = 0; i < JPP_BYTES_ORIGIN_COUNT; ++i) {
    if (!actor->bytes_at_peak[i]) continue;
    jpp_str_appendf(str, "%s %s %llu", separator,
                    jpp_bytes_origin_name((jpp_bytes_origin_t)i),
                    (unsigned long long)actor->bytes_at_peak[i]);
    separator = ",";
  }
  jpp_str_append(str, "\n");
}

jpp_status_t* jpp_check_report_print(const jpp_check_report_t* report, char** out_text) {
  jpp_str_t str = {0};
  const jpp_plan_t* plan = report->plan;
  jpp_str_append(&str, "check ");
  jpp_str_append_quoted(&str, plan->staged->graph->name);
  jpp_str_appendf(&str, ": %u actors, %u channels, proved\n", plan->ranks,
                  plan->num_channels);
  for (uint32_t r = 0; r < plan->ranks; ++r) append_actor(report, r, &str);
  for (uint32_t i = 0; i < plan->num_channels; ++i) {
    const jpp_plan_channel_t* channel = &plan->channels[i];
    const jpp_check_channel_t* found = &report->channels[i];
    jpp_str_appendf(
        &str, "channel %u: %u -> %u, %u messages, %llu bytes, %u slots, %u needed\n", i,
        channel->src, channel->dst, found->messages, (unsigned long long)found->bytes,
        channel->slots, found->slots_needed);
  }
  return jpp_str_finish(&str, out_text);
}
