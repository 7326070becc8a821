// Logs the result of planning: schedules, ranks, channels and donations.
#include "base/log.h"

#include "program/builder.h"

static void log_loops(const jpp_staged_t* staged, const jpp_program_options_t* options) {
  for (uint32_t l = 0; l < staged->graph->num_loops; ++l) {
    const jpp_schedule_t* schedule = options->schedules[l];
    const char* where = staged->graph->loops[l].where;
    JPP_LOG(JPP_LOG_INFO, "loop at %s: schedule %s, %u stages, %u ranks, %u microbatches",
            where ? where : "?", schedule->name, schedule->stages, schedule->ranks,
            schedule->microbatches);
    for (uint32_t s = 0; s < schedule->stages; ++s) {
      JPP_LOG(JPP_LOG_DEBUG, "stage %u runs on rank %u", s, schedule->stage_rank[s]);
    }
  }
}

static void log_ranks(const jpp_plan_t* plan) {
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    JPP_LOG(JPP_LOG_INFO,
            "rank %u: %u instructions, at most %llu bytes on each device, %llu of them "
            "receive slots, and %llu in pinned_host",
            r, program->num_instrs, (unsigned long long)program->peak_bytes,
            (unsigned long long)program->reserved_bytes,
            (unsigned long long)program->peak_host_bytes);
  }
  for (uint32_t c = 0; c < plan->num_channels; ++c) {
    const jpp_plan_channel_t* channel = &plan->channels[c];
    JPP_LOG(JPP_LOG_DEBUG,
            "channel from rank %u to %u: %u slots of %llu bytes, %u messages",
            channel->src, channel->dst, channel->slots,
            (unsigned long long)channel->max_bytes, channel->messages);
  }
}

static void log_tasks(const jpp_plan_t* plan) {
  for (uint32_t t = 0; t < plan->staged->num_tasks; ++t) {
    const jpp_task_t* task = &plan->staged->tasks[t];
    uint32_t donated = 0;
    for (uint32_t i = 0; i < task->num_inputs; ++i) {
      donated += plan->bindings[t].donated_to[i] != JPP_NONE;
    }
    JPP_LOG(JPP_LOG_DEBUG, "task %s on rank %u: %u of %u inputs donated, %u runs",
            task->name, task->rank, donated, task->num_inputs, plan->bindings[t].runs);
  }
}

void jpp__program_log(const jpp_plan_t* plan, const jpp_program_options_t* options) {
  if (!jpp__log_enabled(JPP_LOG_INFO)) return;
  log_loops(plan->staged, options);
  log_ranks(plan);
  if (jpp__log_enabled(JPP_LOG_DEBUG)) log_tasks(plan);
}
