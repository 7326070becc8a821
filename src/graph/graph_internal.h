// How a graph is stored: the public struct first, its arena behind it.
#ifndef JPP_GRAPH_GRAPH_INTERNAL_H_
#define JPP_GRAPH_GRAPH_INTERNAL_H_

#include "base/arena.h"
#include "jaxpp/graph.h"

typedef struct jpp_graph_storage {
  jpp_graph_t graph;
  jpp_arena_t arena;
} jpp_graph_storage_t;

// Checks what holds for every graph: uses after definitions, loops closed, types of marks
// and sums, indices in range. JPP_GRAPH_ERROR names the op.
jpp_status_t* jpp_graph_verify(const jpp_graph_t* graph);

#endif  // JPP_GRAPH_GRAPH_INTERNAL_H_
