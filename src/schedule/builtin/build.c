// The table of built-in schedules, and jpp_schedule_build().
#include <string.h>

#include "base/null.h"
#include "base/str.h"
#include "base/struct_size.h"
#include "schedule/builtin/builder.h"
#include "schedule/schedule.h"

typedef struct built_in {
  jpp_schedule_info_t info;
  const jpp_schedule_builder_t* builder;
} built_in_t;

static const jpp_schedule_params_t kFourStages = {
    .struct_size = sizeof(kFourStages), .stages = 4, .ranks = 4, .microbatches = 8};
static const jpp_schedule_params_t kEightStages = {
    .struct_size = sizeof(kEightStages), .stages = 8, .ranks = 4, .microbatches = 8};

// Everything about a schedule outside its own file. Tests check that every row has a
// golden file, documentation and a Python class.
static const built_in_t kBuiltIns[] = {
    {.info = {.name = "gpipe",
              .class_name = "GPipe",
              .help = "all forwards, then all backwards; one stage per rank",
              .paper = "1811.06965",
              .stages_a_rank = 1,
              .example = &kFourStages},
     .builder = &jpp_schedule_gpipe},
    {.info = {.name = "1f1b",
              .class_name = "Std1F1B",
              .help = "one forward, one backward; "
                      "rank r keeps at most stages - r microbatches",
              .paper = "2006.09503",
              .stages_a_rank = 1,
              .example = &kFourStages},
     .builder = &jpp_schedule_1f1b},
    {.info = {.name = "eager-1f1b",
              .class_name = "Eager1F1B",
              .help = "1f1b with forwards issued ahead to hide transfers; "
                      "about twice the memory",
              .paper = "2211.05322",
              .stages_a_rank = 1,
              .example = &kFourStages},
     .builder = &jpp_schedule_eager_1f1b},
    {.info = {.name = "interleaved-1f1b",
              .class_name = "Interleaved1F1B",
              .help = "1f1b with several stages per rank; "
                      "smaller bubbles, more transfers",
              .paper = "2104.04473",
              .stages_a_rank = 0,
              .can_fuse = true,
              .example = &kEightStages},
     .builder = &jpp_schedule_interleaved_1f1b},
    {.info = {.name = "interleaved-gpipe",
              .class_name = "InterleavedGPipe",
              .help = "all forwards, then all backwards; several stages per rank",
              .paper = "2104.04473",
              .stages_a_rank = 0,
              .example = &kEightStages},
     .builder = &jpp_schedule_interleaved_gpipe},
    {.info = {.name = "breadth-first",
              .class_name = "BreadthFirst",
              .help = "all microbatches through a stage before the next one; fewest "
                      "weight fetches",
              .paper = "2211.05953",
              .stages_a_rank = 0,
              .example = &kEightStages},
     .builder = &jpp_schedule_breadth_first},
    {.info = {.name = "kimi-k2",
              .class_name = "KimiK2",
              .help = "interleaved-1f1b with one more forward of warmup",
              .paper = "2507.20534",
              .stages_a_rank = 0,
              .can_fuse = true,
              .example = &kEightStages},
     .builder = &jpp_schedule_kimi_k2},
    {.info = {.name = "zb-h1",
              .class_name = "ZeroBubble",
              .help = "1f1b whose weight gradients fill the bubbles; "
                      "backward in two parts",
              .paper = "2401.10241",
              .stages_a_rank = 1,
              .example = &kFourStages},
     .builder = &jpp_schedule_zb_h1},
    {.info = {.name = "zb-h2",
              .class_name = "ZeroBubbleH2",
              .help = "zb-h1 with a longer warmup; "
                      "no bubble inside a rank, twice the memory",
              .paper = "2401.10241",
              .stages_a_rank = 1,
              .example = &kFourStages},
     .builder = &jpp_schedule_zb_h2},
    {.info = {.name = "interleaved-zb",
              .class_name = "InterleavedZeroBubble",
              .help = "interleaved-1f1b whose weight gradients fill the bubbles",
              .paper = "2401.10241",
              .stages_a_rank = 0,
              .example = &kEightStages},
     .builder = &jpp_schedule_interleaved_zb},
    {.info = {.name = "zb-v",
              .class_name = "ZeroBubbleV",
              .help = "zero bubble in a V; the memory of 1f1b, the same on every rank",
              .paper = "2401.10241",
              .stages_a_rank = 2,
              .example = &kEightStages},
     .builder = &jpp_schedule_zb_v},
    {.info = {.name = "v-half",
              .class_name = "VHalf",
              .help = "zero bubble in a V with half of 1f1b's memory",
              .paper = "2405.15362",
              .stages_a_rank = 2,
              .example = &kEightStages},
     .builder = &jpp_schedule_v_half},
    {.info = {.name = "v-min",
              .class_name = "VMin",
              .help = "zero bubble in a V with a third of 1f1b's memory",
              .paper = "2405.15362",
              .stages_a_rank = 2,
              .example = &kEightStages},
     .builder = &jpp_schedule_v_min},
    {.info = {.name = "dualpipe-v",
              .class_name = "DualPipeV",
              .help = "two stages per rank in a V, forwards overlapped with backwards",
              .paper = "DeepSeek-AI 2025",
              .stages_a_rank = 2,
              .example = &kEightStages},
     .builder = &jpp_schedule_dualpipe_v},
    {.info = {.name = "v-1f1b",
              .class_name = "V1F1B",
              .help = "1f1b in a V, whole backwards; "
                      "bubbles a third smaller than 1f1b's",
              .paper = "2405.15362",
              .stages_a_rank = 2,
              .example = &kEightStages},
     .builder = &jpp_schedule_v_1f1b},
};
enum { kBuiltInCount = sizeof(kBuiltIns) / sizeof(*kBuiltIns) };

uint32_t jpp_schedule_info_count(void) { return kBuiltInCount; }

const jpp_schedule_info_t* jpp_schedule_info_at(uint32_t index) {
  return index < kBuiltInCount ? &kBuiltIns[index].info : NULL;
}

uint32_t jpp__row_next(const jpp_row_writer_t* writer, uint32_t stage,
                       jpp_task_kind_t kind) {
  return writer->next[(size_t)stage * kStageTaskKinds + kind];
}

bool jpp__row_put(jpp_row_writer_t* writer, uint32_t stage, jpp_task_kind_t kind) {
  uint32_t* next = &writer->next[(size_t)stage * kStageTaskKinds + kind];
  if (*next == writer->microbatches || writer->count == writer->capacity) return false;
  writer->tasks[writer->count++] = (jpp_schedule_task_t){
      .kind = (uint8_t)kind,
      .latency = jpp_task_default_latency(kind),
      .stage = stage,
      .microbatch = (*next)++,
  };
  return true;
}

void jpp__row_put_idle(jpp_row_writer_t* writer) {
  jpp_schedule_task_t* last = writer->count ? &writer->tasks[writer->count - 1] : NULL;
  if (last && last->kind == JPP_TASK_IDLE) {
    ++last->microbatch;
    return;
  }
  if (writer->count == writer->capacity) return;
  writer->tasks[writer->count++] = (jpp_schedule_task_t){.kind = JPP_TASK_IDLE};
}

void jpp__row_join(jpp_row_writer_t* writer) {
  writer->tasks[writer->count - 1].joins_next = true;
}

// Joins the names of the schedules, or with `fusing` of those that can fuse, as "a,
// b<last>c".
static jpp_status_t* join_names(bool fusing, const char* last, char** out_text) {
  *out_text = NULL;
  jpp_str_t str = {0};
  uint32_t left = 0, count = 0;
  for (uint32_t i = 0; i < kBuiltInCount; ++i) {
    left += !fusing || kBuiltIns[i].info.can_fuse;
  }
  for (uint32_t i = 0; i < kBuiltInCount; ++i) {
    const jpp_schedule_info_t* info = &kBuiltIns[i].info;
    if (fusing && !info->can_fuse) continue;
    const char* separator = left == 1 ? last : ", ";
    jpp_str_appendf(&str, "%s%s", count++ ? separator : "", info->name);
    --left;
  }
  return jpp_str_finish(&str, out_text);
}

static jpp_status_t* unknown_name(const char* name) {
  char* text = NULL;
  JPP_RETURN_IF_ERROR(join_names(false, ", ", &text));
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

static jpp_status_t* check_fuse(const jpp_schedule_info_t* info, bool fuse) {
  if (!fuse || info->can_fuse) return NULL;
  char* text = NULL;
  JPP_RETURN_IF_ERROR(join_names(true, " and ", &text));
  jpp_status_t* status = jpp_status_make(
      JPP_INVALID_ARGUMENT, "schedule %s: fuse_steady_state is for %s; leave it out",
      info->name, text);
  jpp_free(text);
  return status;
}

static const built_in_t* find_built_in(const char* name) {
  for (uint32_t i = 0; name && i < kBuiltInCount; ++i) {
    const jpp_schedule_info_t* info = &kBuiltIns[i].info;
    if (!strcmp(name, info->name) || !strcmp(name, info->class_name)) {
      return &kBuiltIns[i];
    }
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
      JPP_ARENA_ARRAY(scratch, (size_t)params->stages * kStageTaskKinds, &writer.next));
  for (uint32_t rank = 0; rank < params->ranks; ++rank) {
    writer.count = 0;
    builder->write_row(params, rank, &writer);
    jpp_schedule_task_t* tasks = NULL;
    JPP_RETURN_IF_ERROR(jpp__arena_copy(draft->arena, writer.tasks,
                                        writer.count * sizeof(*tasks), (void**)&tasks));
    draft->rows[rank] = (jpp_schedule_row_t){tasks, (uint32_t)writer.count};
  }
  if (!builder->weight_limit) return NULL;
  return jpp__schedule_place_weights(draft, builder->weight_limit(params), scratch);
}

static jpp_status_t* fill(const built_in_t* built_in, const jpp_schedule_params_t* params,
                          jpp_schedule_draft_t* draft) {
  const jpp_schedule_builder_t* builder = built_in->builder;
  JPP_RETURN_IF_ERROR(builder->check(built_in->info.name, params));
  for (uint32_t stage = 0; stage < params->stages; ++stage) {
    draft->stage_rank[stage] = builder->stage_rank(params, stage);
  }
  jpp_arena_t scratch;
  jpp__arena_init(&scratch);
  jpp_status_t* status = fill_in(builder, params, &scratch, draft);
  jpp__arena_deinit(&scratch);
  return status;
}

jpp_status_t* jpp_schedule_check(const char* name, uint32_t stages, uint32_t ranks) {
  JPP_RETURN_IF_NULL(name);
  const built_in_t* built_in = find_built_in(name);
  if (!built_in) return unknown_name(name);
  // No schedule needs more microbatches than it has stages.
  jpp_schedule_params_t params = {.struct_size = sizeof(params),
                                  .stages = stages,
                                  .ranks = ranks,
                                  .microbatches = stages};
  return built_in->builder->check(built_in->info.name, &params);
}

bool jpp_schedule_is_misfit(const jpp_status_t* status) {
  if (!status) return false;
  jpp_status_code_t code = jpp_status_code(status);
  return code == JPP_MESH_ERROR || code == JPP_MICROBATCH_ERROR ||
         code == JPP_INVALID_ARGUMENT;
}

jpp_status_t* jpp_schedule_build(const char* name, const jpp_schedule_params_t* params,
                                 jpp_schedule_t** out_schedule) {
  JPP_RETURN_IF_NULL(params, out_schedule);
  *out_schedule = NULL;
  jpp_schedule_params_t full;
  JPP_RETURN_IF_ERROR(
      JPP_OPTIONS_COPY(jpp_schedule_params_t, fuse_steady_state, params, &full));
  params = &full;
  const built_in_t* built_in = find_built_in(name);
  if (!built_in) return unknown_name(name);
  JPP_RETURN_IF_ERROR(check_fuse(&built_in->info, params->fuse_steady_state));
  jpp_schedule_draft_t draft;
  JPP_RETURN_IF_ERROR(jpp__schedule_draft_create(built_in->info.name, params, &draft));
  jpp_status_t* status = fill(built_in, params, &draft);
  if (status) {
    jpp_schedule_destroy(draft.schedule);
    return status;
  }
  *out_schedule = draft.schedule;
  return NULL;
}
