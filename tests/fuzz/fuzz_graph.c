// The text form of graphs, and the planner on every graph that parses.
#include "fuzz.h"
#include "jaxpp/plan.h"

enum { kMany = 64 };

// Large graphs are valid but slow to plan; this target does not look for slowness.
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

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  jpp_graph_t* graph = NULL;
  if (!fuzz_ok(jpp_graph_parse((const char*)data, size, "input", &graph))) {
    FUZZ_CHECK(!graph);
    return 0;
  }
  check_round_trip(graph);
  jpp_planned_t* planned = NULL;
  if (is_small(graph)) fuzz_ok(jpp_plan_graph(graph, NULL, &planned));
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
  return 0;
}
