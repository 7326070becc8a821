// Collects trees of additions whose inner sums have no other user, which the planner may
// therefore regroup.
#include "partition/partitioner.h"

// The addition that makes `value`, if it is in the same body as the tree's root, or
// outside all bodies like the root; else JPP_NONE.
static uint32_t add_beside(const jpp_partitioner_t* p, uint32_t value, uint32_t loop) {
  uint32_t id = p->values.data[value].producer;
  if (id == JPP_NONE || id >= p->graph->num_ops) return JPP_NONE;
  const jpp_op_t* op = &p->ops.data[id];
  if (op->kind != JPP_OP_ADD) return JPP_NONE;
  bool beside = loop == JPP_NONE
                    ? p->segment[id] == JPP_SEGMENT_OUTER
                    : op->loop == loop && jpp__segment_is_stage(p->segment[id]);
  return beside ? id : JPP_NONE;
}

jpp_status_t* jpp__add_tree_collect(const jpp_partitioner_t* p, uint32_t root_value,
                                    uint32_t loop, jpp_add_tree_t* tree) {
  tree->leaves.count = tree->adds.count = tree->stack.count = 0;
  JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&tree->stack, root_value));
  while (tree->stack.count) {
    uint32_t value = tree->stack.data[--tree->stack.count];
    uint32_t op = add_beside(p, value, loop);
    if (op == JPP_NONE || (value != root_value && p->uses[value] != 1)) {
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&tree->leaves, value));
      continue;
    }
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&tree->adds, op));
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&tree->stack, p->ops.data[op].inputs[1]));
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&tree->stack, p->ops.data[op].inputs[0]));
  }
  return NULL;
}

void jpp__add_tree_deinit(jpp_add_tree_t* tree) {
  jpp_vec_deinit(&tree->leaves);
  jpp_vec_deinit(&tree->adds);
  jpp_vec_deinit(&tree->stack);
}
