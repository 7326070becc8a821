// The table of built-in schedules, and jpp_schedule_build().
#include <string.h>

#include "base/str.h"
#include "schedule/builtin/builder.h"
#include "schedule/schedule.h"

static const jpp_schedule_builder_t* const kBuilders[] = {
    &jpp_schedule_gpipe,
    &jpp_schedule_1f1b,
    &jpp_schedule_eager_1f1b,
    &jpp_schedule_interleaved_1f1b,
    &jpp_schedule_interleaved_gpipe,
    &jpp_schedule_breadth_first,
    &jpp_schedule_kimi_k2,
    &jpp_schedule_zb_h1,
    &jpp_schedule_zb_h2,
    &jpp_schedule_interleaved_zb,
    &jpp_schedule_zb_v,
    &jpp_schedule_v_half,
    &jpp_schedule_v_min,
    &jpp_schedule_dualpipe_v,
    &jpp_schedule_v_1f1b,
};
enum { kBuilderCount = sizeof(kBuilders) / sizeof(*kBuilders) };

uint32_t jpp_schedule_info_count(void) { return kBuilderCount; }

const jpp_schedule_info_t* jpp_schedule_info_at(uint32_t index) {
  return index < kBuilderCount ? &kBuilders[index]->info : NULL;
}

uint32_t jpp_row_next(const jpp_row_writer_t* writer, uint32_t stage,
                      jpp_task_kind_t kind) {
  return writer->next[(size_t)stage * kTaskKinds + kind];
}

bool jpp_row_put(jpp_row_writer_t* writer, uint32_t stage, jpp_task_kind_t kind) {
  uint32_t* next = &writer->next[(size_t)stage * kTaskKinds + kind];
  if (*next == writer->microbatches || writer->count == writer->capacity) return false;
  writer->tasks[writer->count++] = (jpp_schedule_task_t){
      .kind = (uint8_t)kind,
      .latency = jpp_task_default_latency(kind),
      .stage = stage,
      .microbatch = (*next)++,
  };
  return true;
}

void jpp_row_put_idle(jpp_row_writer_t* writer) {
  jpp_schedule_task_t* last = writer->count ? &writer->tasks[writer->count - 1] : NULL;
  if (last && last->kind == JPP_TASK_IDLE) {
    ++last->microbatch;
    return;
  }
  if (writer->count == writer->capacity) return;
  writer->tasks[writer->count++] = (jpp_schedule_task_t){.kind = JPP_TASK_IDLE};
}

void jpp_row_join(jpp_row_writer_t* writer) {
  writer->tasks[writer->count - 1].joins_next = true;
}

static jpp_status_t* unknown_name(const char* name) {
  jpp_str_t names = {0};
  for (uint32_t i = 0; i < kBuilderCount; ++i) {
    jpp_str_appendf(&names, "%s%s", i ? ", " : "", kBuilders[i]->info.name);
  }
  char* text = NULL;
  JPP_RETURN_IF_ERROR(jpp_str_finish(&names, &text));
  jpp_status_t* status =
      name ? jpp_status_make(JPP_INVALID_ARGUMENT,
                             "no schedule is named \"%s\"; the built-in ones are %s",
                             name, text)
           : jpp_status_make(JPP_INVALID_ARGUMENT,
                             "expected the name of a schedule, found none; the built-in "
                             "ones are %s",
                             text);
  jpp_free(text);
  return status;
}

static jpp_status_t* find_builder(const char* name,
                                  const jpp_schedule_builder_t** out_builder) {
  *out_builder = NULL;
  for (uint32_t i = 0; name && i < kBuilderCount; ++i) {
    const jpp_schedule_info_t* info = &kBuilders[i]->info;
    if (!strcmp(name, info->name) || !strcmp(name, info->class_name)) {
      *out_builder = kBuilders[i];
      return NULL;
    }
  }
  return unknown_name(name);
}

static jpp_status_t* write_rows(const jpp_schedule_builder_t* builder,
                                const jpp_schedule_params_t* params,
                                jpp_row_writer_t* writer, jpp_schedule_draft_t* draft) {
  for (uint32_t rank = 0; rank < params->ranks; ++rank) {
    writer->count = 0;
    builder->write_row(params, rank, writer);
    jpp_schedule_task_t* tasks = NULL;
    JPP_RETURN_IF_ERROR(jpp_arena_copy(draft->arena, writer->tasks,
                                       writer->count * sizeof(*tasks), (void**)&tasks));
    draft->rows[rank] = (jpp_schedule_row_t){tasks, (uint32_t)writer->count};
  }
  return NULL;
}

static jpp_status_t* fill_in(const jpp_schedule_builder_t* builder,
                             const jpp_schedule_params_t* params, jpp_arena_t* scratch,
                             jpp_schedule_draft_t* draft) {
  jpp_row_writer_t writer = {.capacity = builder->row_capacity(params),
                             .microbatches = params->microbatches};
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, writer.capacity, &writer.tasks));
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(scratch, (size_t)params->stages * kTaskKinds, &writer.next));
  JPP_RETURN_IF_ERROR(write_rows(builder, params, &writer, draft));
  if (!builder->weight_limit) return NULL;
  return jpp_schedule_place_weights(draft, builder->weight_limit(params), scratch);
}

static jpp_status_t* fill(const jpp_schedule_builder_t* builder,
                          const jpp_schedule_params_t* params,
                          jpp_schedule_draft_t* draft) {
  JPP_RETURN_IF_ERROR(builder->check(builder->info.name, params));
  for (uint32_t stage = 0; stage < params->stages; ++stage) {
    draft->stage_rank[stage] = builder->stage_rank(params, stage);
  }
  jpp_arena_t scratch;
  jpp_arena_init(&scratch);
  jpp_status_t* status = fill_in(builder, params, &scratch, draft);
  jpp_arena_deinit(&scratch);
  return status;
}

bool jpp_schedule_is_misfit(const jpp_status_t* status) {
  if (!status) return false;
  jpp_status_code_t code = jpp_status_code(status);
  return code == JPP_MESH_ERROR || code == JPP_MICROBATCH_ERROR ||
         code == JPP_INVALID_ARGUMENT;
}

jpp_status_t* jpp_schedule_build(const char* name, const jpp_schedule_params_t* params,
                                 jpp_schedule_t** out_schedule) {
  *out_schedule = NULL;
  const jpp_schedule_builder_t* builder = NULL;
  JPP_RETURN_IF_ERROR(find_builder(name, &builder));
  if (params->fuse_steady_state && !builder->can_fuse) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "schedule %s: fuse_steady_state is for interleaved-1f1b and "
                           "kimi-k2; leave it out",
                           builder->info.name);
  }
  jpp_schedule_draft_t draft;
  JPP_RETURN_IF_ERROR(jpp_schedule_draft_create(builder->info.name, params, &draft));
  jpp_status_t* status = fill(builder, params, &draft);
  if (status) {
    jpp_schedule_destroy(draft.schedule);
    return status;
  }
  *out_schedule = draft.schedule;
  return NULL;
}
