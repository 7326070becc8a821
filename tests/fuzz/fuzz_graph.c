// The text form of graphs, and the planner on what it lets through.
#include "cli/planned.h"
#include "fuzz.h"
#include "jaxpp/graph.h"

enum { kMany = 64 };

// Large numbers are allowed and take long: they are not what is looked for here.
static bool is_small(const jpp_graph_t* graph) {
  if (graph->ranks > kMany || graph->num_ops > 4 * kMany) return false;
  for (uint32_t i = 0; i < graph->num_loops; ++i) {
    const jpp_loop_t* loop = &graph->loops[i];
    if (loop->stages > kMany || loop->microbatches > kMany) return false;
  }
  return true;
}

static void check_round_trip(const jpp_graph_t* graph) {
  char *text = NULL, *again = NULL;
  jpp_graph_t* read = NULL;
  FUZZ_CHECK(fuzz_ok(jpp_graph_print(graph, &text)));
  FUZZ_CHECK(fuzz_ok(jpp_graph_parse(text, strlen(text), "printed", &read)));
  FUZZ_CHECK(fuzz_ok(jpp_graph_print(read, &again)));
  FUZZ_CHECK(strcmp(text, again) == 0);
  jpp_graph_destroy(read);
  jpp_text_free(text);
  jpp_text_free(again);
}

static void plan(const uint8_t* data, size_t size) {
  fuzz_file_t file = fuzz_file_open(data, size);
  jpp_plan_request_t request = {.file = file.path, .last = JPP_PART_CHECK};
  jpp_planned_t planned;
  fuzz_ok(jpp_planned_init(&request, &planned));
  jpp_planned_deinit(&planned);
  fuzz_file_close(&file);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  jpp_graph_t* graph = NULL;
  if (!fuzz_ok(jpp_graph_parse((const char*)data, size, "input", &graph))) {
    FUZZ_CHECK(!graph);
    return 0;
  }
  check_round_trip(graph);
  bool small = is_small(graph);
  jpp_graph_destroy(graph);
  if (small) plan(data, size);
  return 0;
}
