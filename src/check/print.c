// Prints a check report as text: the instruction counts and peak of each actor, and the
// traffic and needed slots of each channel.
#include "base/null.h"
#include "base/str.h"
#include "check/checker.h"

const char* jpp_bytes_kind_name(jpp_bytes_kind_t kind) {
  static const char* const kNames[] = {
      [JPP_BYTES_WEIGHTS] = "weights",
      [JPP_BYTES_GRADIENTS] = "gradients",
      [JPP_BYTES_OPTIMIZER_STATE] = "optimizer state",
      [JPP_BYTES_ACTIVATIONS] = "activations",
      [JPP_BYTES_RECEIVE_SLOTS] = "receive slots",
      [JPP_BYTES_BATCH] = "batch",
      [JPP_BYTES_LOOP_RESULTS] = "loop results",
      [JPP_BYTES_STEP_VALUES] = "step values",
      [JPP_BYTES_CONSTANTS] = "constants",
  };
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_BYTES_KIND_COUNT,
                 "a name a kind");
  return (unsigned)kind < JPP_BYTES_KIND_COUNT ? kNames[kind] : "?";
}

void jpp__check_append_kinds(const uint64_t bytes[JPP_BYTES_KIND_COUNT], jpp_str_t* str) {
  const char* separator = "";
  for (int i = 0; i < JPP_BYTES_KIND_COUNT; ++i) {
    if (!bytes[i]) continue;
    jpp_str_appendf(str, "%s%s %llu", separator, jpp_bytes_kind_name((jpp_bytes_kind_t)i),
                    (unsigned long long)bytes[i]);
    separator = ", ";
  }
}

static void append_actor(const jpp_check_report_t* report, uint32_t rank,
                         jpp_str_t* str) {
  const jpp_check_actor_t* actor = &report->actors[rank];
  jpp_str_appendf(str, "actor %u: %u runs, %u sends, %u receives, %u deletes", rank,
                  actor->runs, actor->sends, actor->recvs, actor->deletes);
  if (actor->moves) jpp_str_appendf(str, ", %u moves", actor->moves);
  jpp_str_append(str, "\n");
  jpp_str_appendf(str, "  peak %llu bytes at instruction %u:",
                  (unsigned long long)actor->peak_bytes, actor->peak_instr);
  if (actor->peak_bytes) jpp_str_append(str, " ");
  jpp__check_append_kinds(actor->bytes_at_peak, str);
  if (actor->peak_host_bytes) {
    jpp_str_appendf(str, "\n  peak %llu bytes in pinned_host",
                    (unsigned long long)actor->peak_host_bytes);
  }
  jpp_str_appendf(str, "\n  each further step in flight: %llu bytes\n",
                  (unsigned long long)actor->next_step_bytes);
}

jpp_status_t* jpp_check_report_print(const jpp_check_report_t* report, char** out_text) {
  JPP_RETURN_IF_NULL(report, out_text);
  jpp_str_t str = {0};
  const jpp_plan_t* plan = report->plan;
  jpp_str_append(&str, "check ");
  jpp__str_append_quoted(&str, plan->staged->graph->name);
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
