// jaxpp plan: plans a graph, or shows the plan in a file that save() wrote. For the
// second, it compiles the tasks, because only compiled tasks show their collectives.
#include <stdio.h>
#include <string.h>

#include "cli/step.h"
#include "jaxpp/advise.h"
#include "jaxpp/view.h"

static jpp_status_t* find_part(const char* name, jpp_plan_part_t* out_part) {
  for (*out_part = 0; *out_part < JPP_PART_COUNT; ++*out_part) {
    if (!strcmp(name, jpp_plan_part_name(*out_part))) return NULL;
  }
  return jpp_status_make(
      JPP_INVALID_ARGUMENT,
      "--after: expected graph, schedule, partition, program or check, found '%s'", name);
}

// Sizes that the graph does not give must be given on the command line.
static jpp_status_t* expect_sizes(const jpp_cli_options_t* options,
                                  const jpp_graph_t* graph) {
  if (!options->ranks && !graph->ranks) {
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "%s: the graph does not give its number of ranks; pass --ranks N",
        options->words[0]);
  }
  for (uint32_t l = 0; l < graph->num_loops; ++l) {
    const jpp_loop_t* loop = &graph->loops[l];
    const char* where = loop->where ? loop->where : "?";
    if (!options->schedule && !loop->schedule) {
      return jpp_status_make(
          JPP_INVALID_ARGUMENT,
          "loop at %s names no schedule (the program that wrote the file kept its task "
          "lists); pass --schedule NAME; jaxpp schedule list prints the names",
          where);
    }
    bool in_file = options->schedule && jpp_cli_names_file(options->schedule);
    if (!options->stages && !loop->stages && !in_file) {
      return jpp_status_make(
          JPP_INVALID_ARGUMENT,
          "loop at %s does not give its number of stages; pass --stages N", where);
    }
  }
  return NULL;
}

// `costs` as in jpp_planned_summarize().
static jpp_status_t* print_part(const jpp_cli_options_t* options, jpp_plan_part_t part,
                                const jpp_planned_t* planned,
                                const jpp_plan_costs_t* costs, jpp_str_t* out) {
  char* text = NULL;
  if (options->json) {
    JPP_RETURN_IF_ERROR(jpp_planned_print_json(planned, part, &text));
  } else if (options->after) {
    JPP_RETURN_IF_ERROR(jpp_planned_print(planned, part, &text));
  } else {
    JPP_RETURN_IF_ERROR(jpp_planned_summarize(planned, costs, &text));
  }
  jpp_str_append(out, text);
  jpp_text_free(text);
  return NULL;
}

// The tables for planning, made from the flags.
typedef struct tables {
  jpp_schedule_t* schedule;    // the schedule of --schedule FILE
  jpp_loop_schedule_t* loops;  // [loops]; NULL without --schedule
} tables_t;

// Uses the same schedule for every loop. On failure, everything made so far stays in
// `tables`.
static jpp_status_t* tables_init(const jpp_cli_options_t* options,
                                 const jpp_graph_t* graph, tables_t* tables) {
  const char* name = options->schedule;
  *tables = (tables_t){0};
  if (name) JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(graph->num_loops, &tables->loops));
  if (name && jpp_cli_names_file(name)) {
    JPP_RETURN_IF_ERROR(jpp_cli_read_csv(options, name, NULL, &tables->schedule));
  }
  for (uint32_t l = 0; name && l < graph->num_loops; ++l) {
    tables->loops[l] = (jpp_loop_schedule_t){.struct_size = sizeof(jpp_loop_schedule_t),
                                             .given = tables->schedule,
                                             .built_in = name};
  }
  return NULL;
}

// The same limit applies to every rank.
static jpp_status_t* check_limit(const jpp_cli_options_t* options,
                                 const jpp_planned_t* planned) {
  uint64_t* bytes = NULL;
  if (!options->memory_limit) return NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(planned->ranks, &bytes));
  for (uint32_t r = 0; r < planned->ranks; ++r) bytes[r] = options->memory_limit;
  jpp_memory_limits_t limits = {.bytes = bytes};
  jpp_status_t* status = jpp_advise_fit(planned, &limits);
  jpp_free(bytes);
  return status;
}

static jpp_status_t* plan_and_limit(const jpp_cli_options_t* options,
                                    const tables_t* tables, jpp_plan_part_t last,
                                    const jpp_graph_t* graph,
                                    jpp_planned_t** out_planned) {
  jpp_plan_options_t planning = {.struct_size = sizeof(planning),
                                 .ranks = options->ranks,
                                 .stages = options->stages,
                                 .loops = tables->loops,
                                 .fuse_steady_state = options->fuse,
                                 .channel_slots = options->slots,
                                 .last = options->memory_limit ? JPP_PART_CHECK : last};
  JPP_RETURN_IF_ERROR(jpp_plan_graph(graph, &planning, out_planned));
  return check_limit(options, *out_planned);
}

static jpp_status_t* plan_and_print(const jpp_cli_options_t* options,
                                    const jpp_graph_t* graph, jpp_str_t* out) {
  jpp_plan_part_t part = JPP_PART_COUNT;
  if (options->after) JPP_RETURN_IF_ERROR(find_part(options->after, &part));
  if (part == JPP_PART_GRAPH && !options->memory_limit) {
    return print_part(options, part, &(jpp_planned_t){.graph = graph}, NULL, out);
  }
  JPP_RETURN_IF_ERROR(expect_sizes(options, graph));
  tables_t tables;  // must outlive the plan, which borrows its schedule
  jpp_planned_t* planned = NULL;
  jpp_plan_part_t last = part == JPP_PART_COUNT ? JPP_PART_CHECK : part;
  jpp_status_t* status = tables_init(options, graph, &tables);
  if (!status) status = plan_and_limit(options, &tables, last, graph, &planned);
  if (!status) status = print_part(options, part, planned, NULL, out);
  jpp_planned_destroy(planned);
  jpp_schedule_destroy(tables.schedule);
  jpp_free(tables.loops);
  return status;
}

// --- A plan that save() wrote ---------------------------------------------------------

static bool is_planfile(const char* name) {
  char head[sizeof(JPP_PLANFILE_MAGIC) - 1];
  FILE* stream = strcmp(name, "-") ? fopen(name, "rb") : NULL;
  if (!stream) return false;
  bool same = fread(head, sizeof(head), 1, stream) == 1 &&
              memcmp(head, JPP_PLANFILE_MAGIC, sizeof(head)) == 0;
  fclose(stream);
  return same;
}

static jpp_status_t* refuse_changes(const jpp_cli_options_t* options) {
  const struct {
    bool given;
    const char* flag;
  } changes[] = {{options->schedule, "--schedule"},
                 {options->stages, "--stages"},
                 {options->ranks, "--ranks"},
                 {options->slots, "--slots"},
                 {options->fuse, "--fuse"}};
  for (size_t i = 0; i < sizeof(changes) / sizeof(*changes); ++i) {
    if (!changes[i].given) continue;
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "%s: %s changes a plan, but this file has a finished one; "
                           "expected a graph, such as JPP_DUMP=FOLDER writes",
                           options->words[0], changes[i].flag);
  }
  return NULL;
}

// Replaces the object in `out` with one that has the collectives as well.
static jpp_status_t* add_collectives(const jpp_plan_costs_t* costs, jpp_str_t* out) {
  json_t* all = json_loadb(out->data, out->length, 0, NULL);
  if (json_object_set_new(all, "collectives", jpp_cli_collectives_json(costs))) {
    json_decref(all);
    all = NULL;
  }
  jpp_str_deinit(out);
  jpp__json_take(all, JSON_INDENT(1), out);
  jpp_str_append(out, "\n");
  return NULL;
}

// One part, for which nothing is compiled.
static jpp_status_t* print_saved_part(const jpp_cli_options_t* options, jpp_str_t* out) {
  jpp_plan_part_t part = JPP_PART_COUNT;
  jpp_planfile_t* file = NULL;
  JPP_RETURN_IF_ERROR(find_part(options->after, &part));
  JPP_RETURN_IF_ERROR(jpp_planfile_load(options->words[0], &file));
  jpp_status_t* status = check_limit(options, file->contents.planned);
  if (!status) status = print_part(options, part, file->contents.planned, NULL, out);
  jpp_planfile_destroy(file);
  return status;
}

static jpp_status_t* print_saved(const jpp_cli_options_t* options, jpp_str_t* out) {
  jpp_cli_step_t step = {0};
  JPP_RETURN_IF_ERROR(refuse_changes(options));
  if (options->after) return print_saved_part(options, out);
  jpp_status_t* status = jpp_cli_step_open(options, &step);
  if (!status) status = check_limit(options, step.file->contents.planned);
  if (!status) {
    status =
        print_part(options, JPP_PART_COUNT, step.file->contents.planned, step.costs, out);
  }
  if (!status && options->json) status = add_collectives(step.costs, out);
  jpp_cli_step_close(&step);
  return status;
}

jpp_status_t* jpp_cli_plan(const jpp_cli_options_t* options, jpp_str_t* out) {
  if (is_planfile(options->words[0])) return print_saved(options, out);
  jpp_graph_t* graph = NULL;
  jpp_status_t* status = jpp_graph_read(options->words[0], &graph);
  if (!status) status = plan_and_print(options, graph, out);
  jpp_graph_destroy(graph);
  return status;
}
