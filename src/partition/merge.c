// Merges equal ops that belong to no stage, for example the casts of a weight in a
// stage's forward and again in its rematerialised backward: without this, both results
// would be kept until the loop ends.
#include <string.h>

#include "base/map.h"
#include "partition/partitioner.h"

enum { kKeyFields = 4 };  // in front of the inputs: code, loop, segment, memory

typedef struct merger {
  jpp_partitioner_t* p;
  jpp_map_t ops;  // by what they compute
} merger_t;

// Lets an op use the values with which its operands have been merged.
static jpp_status_t* follow_aliases(jpp_partitioner_t* p, uint32_t id) {
  jpp_op_t* op = &p->ops.data[id];
  bool found = false;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    found = found || p->alias[op->inputs[i]] != op->inputs[i];
  }
  if (!found) return NULL;
  uint32_t* inputs = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(p->arena, op->num_inputs, &inputs));
  for (uint32_t i = 0; i < op->num_inputs; ++i) inputs[i] = p->alias[op->inputs[i]];
  op->inputs = inputs;
  return NULL;
}

static bool can_merge(const jpp_partitioner_t* p, uint32_t id) {
  const jpp_op_t* op = &p->ops.data[id];
  uint32_t segment = p->segment[id];
  bool outside = segment == JPP_SEGMENT_OUTER || segment == JPP_SEGMENT_CLONE;
  return outside && op->loop != JPP_NONE && op->kind == JPP_OP_CALL && op->code &&
         op->num_inputs && op->num_outputs &&
         !(op->flags & (JPP_OP_EFFECT | JPP_OP_ZEROS));
}

static void merge_op(jpp_partitioner_t* p, uint32_t id, uint32_t first) {
  const jpp_op_t *op = &p->ops.data[id], *same = &p->ops.data[first];
  p->segment[id] = JPP_SEGMENT_ALIAS;
  p->outer_copy[first] = p->outer_copy[first] || p->outer_copy[id];
  p->outer_copy[id] = false;
  for (uint32_t i = 0; i < op->num_inputs; ++i) --p->uses[op->inputs[i]];
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    p->alias[op->first_output + i] = same->first_output + i;
    p->uses[same->first_output + i] += p->uses[op->first_output + i];
  }
}

static jpp_status_t* merge_or_add(merger_t* m, uint32_t id) {
  jpp_partitioner_t* p = m->p;
  const jpp_op_t* op = &p->ops.data[id];
  uint32_t* key = NULL;
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&p->scratch, kKeyFields + (size_t)op->num_inputs, &key));
  key[0] = op->code;
  key[1] = op->loop;
  key[2] = p->segment[id];
  key[3] = p->values.data[op->first_output].type.memory;
  memcpy(key + kKeyFields, op->inputs, op->num_inputs * sizeof(*key));
  uint32_t size = (uint32_t)sizeof(*key) * (kKeyFields + op->num_inputs);
  uint32_t* first = jpp__map_find(&m->ops, (const char*)key, size);
  if (!first) return jpp__map_add(&m->ops, (const char*)key, size, id, NULL);
  if (p->ops.data[*first].num_outputs == op->num_outputs) merge_op(p, id, *first);
  return NULL;
}

static jpp_status_t* merge_all(merger_t* m) {
  jpp_partitioner_t* p = m->p;
  for (uint32_t id = 0; id < p->graph->num_ops; ++id) {
    JPP_RETURN_IF_ERROR(follow_aliases(p, id));
    if (can_merge(p, id)) JPP_RETURN_IF_ERROR(merge_or_add(m, id));
  }
  // A mark may have passed on a value before it was merged.
  for (uint32_t v = 0; v < p->graph->num_values; ++v) p->alias[v] = p->alias[p->alias[v]];
  return NULL;
}

jpp_status_t* jpp__partition_merge_outside(jpp_partitioner_t* p) {
  merger_t merger = {.p = p};
  jpp_status_t* status = merge_all(&merger);
  jpp__map_deinit(&merger.ops);
  return status;
}
