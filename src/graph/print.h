// Parts of the graph's text form that later printers use too.
#ifndef JPP_GRAPH_PRINT_H_
#define JPP_GRAPH_PRINT_H_

#include "base/str.h"
#include "jaxpp/graph.h"

// Appends "f32[4,8]".
void jpp__type_append(jpp_str_t* str, const jpp_type_t* type);
// Appends "%3:f32[8] = dot(%1, %2) cost 4\n".
void jpp__op_append(jpp_str_t* str, const jpp_value_t* values, const jpp_op_t* op);

#endif  // JPP_GRAPH_PRINT_H_
