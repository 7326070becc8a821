// Builds every actor's instruction list by the passes that builder.h lists.
#include "base/null.h"
#include "base/struct_size.h"
#include "program/builder.h"

const char* jpp_instr_kind_name(jpp_instr_kind_t kind) {
  static const char* const kNames[] = {
      [JPP_INSTR_RUN] = "run",       [JPP_INSTR_SEND] = "send", [JPP_INSTR_RECV] = "recv",
      [JPP_INSTR_DELETE] = "delete", [JPP_INSTR_MOVE] = "move",
  };
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_INSTR_KIND_COUNT,
                 "a name a kind");
  return (unsigned)kind < JPP_INSTR_KIND_COUNT ? kNames[kind] : NULL;
}

static jpp_status_t* build_programs(jpp_program_builder_t* b, jpp_plan_t* plan) {
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(b->staged->ranks, &b->instrs));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(b->arena, b->staged->num_tasks, &b->bindings));
  uint32_t values = b->staged->num_values;
  uint64_t* bytes = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(b->arena, values, &bytes));
  for (uint32_t v = 0; v < values; ++v) {
    bytes[v] = b->options->value_bytes ? b->options->value_bytes[v]
                                       : jpp_value_device_bytes(&b->staged->values[v]);
  }
  b->value_bytes = bytes;
  JPP_RETURN_IF_ERROR(jpp__program_order(b));
  JPP_RETURN_IF_ERROR(jpp__program_find_sites(b));
  JPP_RETURN_IF_ERROR(jpp__program_emit(b));
  JPP_RETURN_IF_ERROR(jpp__program_find_repetitions(b));
  JPP_RETURN_IF_ERROR(jpp__program_donate(b));
  return jpp__program_finish(b, plan);
}

static void builder_deinit(jpp_program_builder_t* b) {
  for (uint32_t r = 0; b->instrs && r < b->staged->ranks; ++r) {
    jpp_vec_deinit(&b->instrs[r]);
  }
  jpp_free(b->instrs);
  jpp_vec_deinit(&b->draft.operands);
  jpp_vec_deinit(&b->draft.virtuals);
  jpp_vec_deinit(&b->draft.inputs);
  jpp_vec_deinit(&b->draft.constants);
  jpp_vec_deinit(&b->draft.outputs);
  jpp_vec_deinit(&b->draft.successors);
  jpp_vec_deinit(&b->events);
  for (size_t i = 0; i < b->channels.count; ++i) {
    jpp_vec_deinit(&b->channels.data[i].messages);
  }
  jpp_vec_deinit(&b->channels);
  jpp__arena_deinit(&b->scratch);
}

jpp_status_t* jpp__program_build(const jpp_staged_t* staged,
                                 const jpp_program_options_t* options, bool drafts_all,
                                 jpp_plan_t** out_plan) {
  *out_plan = NULL;
  jpp_plan_storage_t* storage = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  jpp_program_builder_t builder = {.staged = staged,
                                   .options = options,
                                   .arena = &storage->arena,
                                   .drafts_all = drafts_all};
  jpp_status_t* status = build_programs(&builder, &storage->plan);
  builder_deinit(&builder);
  if (status) {
    jpp_plan_destroy(&storage->plan);
    return status;
  }
  jpp__program_log(&storage->plan, options);
  *out_plan = &storage->plan;
  return NULL;
}

jpp_status_t* jpp_program_build(const jpp_staged_t* staged,
                                const jpp_program_options_t* options,
                                jpp_plan_t** out_plan) {
  JPP_RETURN_IF_NULL(staged, options, out_plan);
  *out_plan = NULL;
  jpp_program_options_t full;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_program_options_t, channel_slots, options, &full));
  if (staged->graph->num_loops) JPP_RETURN_IF_NULL(full.schedules);
  return jpp__program_build(staged, &full, false, out_plan);
}

void jpp_plan_destroy(jpp_plan_t* plan) {
  if (!plan) return;
  jpp_plan_storage_t* storage = (jpp_plan_storage_t*)plan;
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage);
}
