// How a graph is stored: the public struct first, then its arena.
#ifndef JPP_GRAPH_GRAPH_INTERNAL_H_
#define JPP_GRAPH_GRAPH_INTERNAL_H_

#include "base/arena.h"
#include "jaxpp/graph.h"

// The largest dimension: the text form reads numbers as doubles.
#define JPP_MOST_DIM ((int64_t)1 << 53)

// Whether the type's dimensions can be cut into that many equal pieces.
bool jpp__type_divides(const jpp_type_t* type, uint64_t shards);

typedef struct jpp_graph_storage {
  jpp_graph_t graph;
  jpp_arena_t arena;
} jpp_graph_storage_t;

// Checks every op: uses after definitions, types of marks and sums, results of loops in
// range. It checks against the ops up to this one. JPP_GRAPH_ERROR names the op.
// Whether a type is divided over devices.
bool jpp__graph_has_shards(const jpp_graph_t* graph);
jpp_status_t* jpp__graph_verify_op(const jpp_graph_t* graph, uint32_t id) JPP_MUST_USE;
jpp_status_t* jpp__graph_verify_arg(const jpp_graph_t* graph,
                                    uint32_t index) JPP_MUST_USE;
jpp_status_t* jpp__graph_verify_output(const jpp_graph_t* graph,
                                       uint32_t index) JPP_MUST_USE;

#endif  // JPP_GRAPH_GRAPH_INTERNAL_H_
