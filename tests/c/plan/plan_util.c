// Reads the graph texts of tests/golden/graphs, or any other text, and plans them through
// the public function.
#include "plan_util.h"

#include <stdio.h>

#include "golden.h"

const char* const kGraphs[] = {
    "aux",         "casts",     "clip",        "left",        "rows",     "place",
    "tasks",       "dropout",   "effects",     "empty_stage", "forward",  "frozen",
    "interleaved", "layers",    "mlp2",        "mlp4",        "no_stage", "once",
    "one_stage",   "partial",   "passthrough", "shared3",     "skip",     "tied",
    "rolled",      "tied_cast", "tied_scaled", "two_loops",   "unmarked", "host",
    "host_update", "weighted",  "lora",        "penalty",     "relu",     "no_loss",
    NULL,
};

char* graph_text(const char* name) {
  char path[1024];
  snprintf(path, sizeof(path), "%s/graphs/%s.jpp", GOLDEN_DIR, name);
  char* text = golden_read(path);
  if (!text) fail_msg("cannot read %s", path);
  return text;
}

char* graph_text_of(const char* name, uint32_t microbatches) {
  static const char kLoop[] = "\nloop microbatches ";
  char *read = graph_text(name), *text = NULL;
  const char *at = read, *found = NULL;
  jpp_str_t str = {0};
  while ((found = strstr(at, kLoop))) {
    jpp_str_appendf(&str, "%.*s%s%u", (int)(found - at), at, kLoop, microbatches);
    at = found + strlen(kLoop);
    at += strspn(at, "0123456789");
  }
  jpp_str_append(&str, at);
  free(read);
  ASSERT_OK(jpp_str_finish(&str, &text));
  return text;
}

static jpp_status_t* plan_with(planned_t* planned, const jpp_plan_options_t* options) {
  JPP_RETURN_IF_ERROR(jpp_plan_graph(planned->graph, options, &planned->made));
  planned->ranks = planned->made->ranks;
  planned->schedules = planned->made->schedules;
  planned->staged = planned->made->staged;
  planned->plan = planned->made->plan;
  planned->report = planned->made->report;
  return NULL;
}

static jpp_status_t* count_4_kib(void* context, const jpp_staged_t* staged,
                                 uint64_t* out_bytes) {
  (void)context;
  for (uint32_t v = 0; v < staged->num_values; ++v) out_bytes[v] = 4096;
  return NULL;
}

const bool kAllRanks[8] = {true, true, true, true, true, true, true, true};

jpp_status_t* plan_scheduled(planned_t* planned, uint32_t slots) {
  jpp_loop_schedule_t loops[PLAN_MAX_LOOPS] = {0};
  for (uint32_t i = 0; i < planned->graph->num_loops; ++i) {
    loops[i] =
        (jpp_loop_schedule_t){.struct_size = sizeof(*loops), .given = planned->given[i]};
  }
  jpp_plan_options_t options = {.struct_size = sizeof(options),
                                .ranks = planned->ranks,
                                .loops = loops,
                                .offload = planned->offload ? kAllRanks : NULL,
                                .measure = planned->offload ? count_4_kib : NULL,
                                .channel_slots = slots};
  return plan_with(planned, &options);
}

jpp_status_t* plan_text(const char* text, const plan_options_t* options,
                        planned_t* out_planned) {
  static const plan_options_t kDefaults = {0};
  if (!options) options = &kDefaults;
  *out_planned = (planned_t){0};
  JPP_RETURN_IF_ERROR(jpp_graph_parse(text, strlen(text), "test", &out_planned->graph));
  jpp_loop_schedule_t loops[PLAN_MAX_LOOPS] = {0};
  for (uint32_t i = 0; i < out_planned->graph->num_loops; ++i) {
    loops[i] = (jpp_loop_schedule_t){.struct_size = sizeof(*loops),
                                     .built_in = options->schedule};
  }
  jpp_plan_options_t planning = {.struct_size = sizeof(planning),
                                 .ranks = options->ranks,
                                 .stages = options->stages,
                                 .loops = loops,
                                 .channel_slots = options->slots};
  return plan_with(out_planned, &planning);
}

jpp_status_t* plan_file(const char* name, const plan_options_t* options,
                        planned_t* out_planned) {
  bool long_loops = options && options->microbatches;
  char* text = long_loops ? graph_text_of(name, options->microbatches) : graph_text(name);
  jpp_status_t* status = plan_text(text, options, out_planned);
  free(text);
  return status;
}

void plan_free(planned_t* planned) {
  jpp_planned_destroy(planned->made);
  for (uint32_t i = 0; i < PLAN_MAX_LOOPS; ++i) {
    jpp_schedule_destroy(planned->given[i]);
  }
  jpp_graph_destroy(planned->graph);
  *planned = (planned_t){0};
}
