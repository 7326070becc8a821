// Describes the ranks' instructions for the flight recorder.
#include "runtime/observe/recorder.h"

#include <stdio.h>
#include <string.h>

#include "jaxpp/option.h"
#include "runtime/step/failure.h"
#include "runtime/step/state.h"

jpp_flight_instr_t jpp__recorder_instr(const jpp_plan_t* plan,
                                       const jpp_program_t* program,
                                       const jpp_instr_t* instr) {
  bool sends = instr->kind == JPP_INSTR_SEND;
  if (!sends && instr->kind != JPP_INSTR_RECV) {
    return (jpp_flight_instr_t){.kind = JPP_FLIGHT_LOCAL};
  }
  const jpp_plan_channel_t* channel = &plan->channels[instr->target];
  return (jpp_flight_instr_t){.kind = sends ? JPP_FLIGHT_SEND : JPP_FLIGHT_RECV,
                              .peer = sends ? channel->dst : channel->src,
                              .channel = instr->target,
                              .slots = channel->slots,
                              .tag = jpp__plan_message_tag(plan, program, instr)};
}

static jpp_status_t* describe_rank(const jpp_actor_t* actor, jpp_arena_t* arena,
                                   jpp_str_t* texts, jpp_flight_rank_t* rank) {
  jpp_flight_instr_t* instrs = NULL;
  char text[kJppPlaceSize];
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, actor->num_instrs, &instrs));
  for (uint32_t i = 0; i < actor->num_instrs; ++i) {
    uint32_t source = actor->instrs[i].source;
    instrs[i] = jpp__recorder_instr(actor->runtime->plan, actor->program,
                                    &actor->program->instrs[source]);
    instrs[i].text = texts->length;
    jpp__failure_describe(actor, source, text);
    const char* behind_rank = jpp__failure_behind_rank(text);
    jpp_str_append_n(texts, behind_rank, strlen(behind_rank) + 1);
  }
  *rank = (jpp_flight_rank_t){
      .rank = actor->program->rank, .num_instrs = actor->num_instrs, .instrs = instrs};
  return NULL;
}

static jpp_status_t* record(jpp_runtime_t* runtime, const char* folder,
                            jpp_arena_t* arena, jpp_str_t* texts) {
  jpp_flight_rank_t* ranks = NULL;
  uint32_t count = 0;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(arena, runtime->plan->ranks, &ranks));
  for (uint32_t r = 0; r < runtime->plan->ranks; ++r) {
    if (!jpp__runtime_has_rank(runtime, r)) continue;
    JPP_RETURN_IF_ERROR(
        describe_rank(&runtime->actors[r], arena, texts, &ranks[count++]));
  }
  size_t size = texts->length;
  char* all = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(texts, &all));
  jpp_status_t* status = jpp__flight_open(folder, runtime->process, ranks, count, all,
                                          size, &runtime->flight);
  jpp_free(all);
  JPP_RETURN_IF_ERROR(status);
  for (uint32_t r = 0, row = 0; r < runtime->plan->ranks; ++r) {
    if (!jpp__runtime_has_rank(runtime, r)) continue;
    runtime->actors[r].flight = &runtime->flight.rows[row++];
  }
  return NULL;
}

void jpp__recorder_open(jpp_runtime_t* runtime) {
  const char* folder = jpp_option_get(JPP_OPTION_FLIGHT);
  if (!folder) return;
  jpp_arena_t arena;
  jpp_str_t texts = {0};
  jpp__arena_init(&arena);
  jpp_status_t* status = record(runtime, folder, &arena, &texts);
  jpp_str_deinit(&texts);
  jpp__arena_deinit(&arena);
  if (status) {
    fprintf(stderr, "jaxpp: warning: %s; nothing is recorded\n",
            jpp_status_message(status));
  }
  jpp_status_free(status);
}
