// Merges equal ops that are hoisted out of a loop, for example the casts of a weight in a
// stage's forward and again in its rematerialised backward: without this, both results
// would be kept until the loop ends.
//
// Cheap ops, which each task runs itself, only count as equal. If those of different
// stages were merged, tasks of equal stages would have them at different positions, and
// no longer share a module.
#include "base/map.h"
#include "partition/partitioner.h"

enum { kKeyFields = 4 };  // in front of the inputs: code, loop, segment, memory

typedef struct merger {
  jpp_partitioner_t* p;
  jpp_map_t ops;    // by what they compute
  uint32_t* equal;  // [graph values] the first value that is equal
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

static bool is_comparable(const jpp_partitioner_t* p, uint32_t id) {
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
  for (uint32_t i = 0; i < op->num_inputs; ++i) --p->uses[op->inputs[i]];
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    p->alias[op->first_output + i] = same->first_output + i;
    p->uses[same->first_output + i] += p->uses[op->first_output + i];
  }
}

// Compares the op with those before it.
static jpp_status_t* compare_op(merger_t* m, uint32_t id) {
  jpp_partitioner_t* p = m->p;
  const jpp_op_t* op = &p->ops.data[id];
  uint32_t* key = NULL;
  JPP_RETURN_IF_ERROR(
      JPP_ARENA_ARRAY(&p->scratch, kKeyFields + (size_t)op->num_inputs, &key));
  key[0] = op->code;
  key[1] = op->loop;
  key[2] = p->segment[id];
  key[3] = p->values.data[op->first_output].type.memory;
  for (uint32_t i = 0; i < op->num_inputs; ++i) {
    key[kKeyFields + i] = m->equal[op->inputs[i]];
  }
  uint32_t size = (uint32_t)sizeof(*key) * (kKeyFields + op->num_inputs);
  uint32_t* first = jpp__map_find(&m->ops, (const char*)key, size);
  if (!first) return jpp__map_add(&m->ops, (const char*)key, size, id, NULL);
  const jpp_op_t* same = &p->ops.data[*first];
  if (same->num_outputs != op->num_outputs) return NULL;
  for (uint32_t i = 0; i < op->num_outputs; ++i) {
    m->equal[op->first_output + i] = same->first_output + i;
  }
  if (p->segment[id] == JPP_SEGMENT_OUTER) merge_op(p, id, *first);
  return NULL;
}

static jpp_status_t* merge_all(merger_t* m) {
  jpp_partitioner_t* p = m->p;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&p->scratch, p->graph->num_values, &m->equal));
  for (uint32_t v = 0; v < p->graph->num_values; ++v) m->equal[v] = v;
  for (uint32_t id = 0; id < p->graph->num_ops; ++id) {
    JPP_RETURN_IF_ERROR(follow_aliases(p, id));
    if (is_comparable(p, id)) JPP_RETURN_IF_ERROR(compare_op(m, id));
  }
  // A mark may have passed on a value before it was merged.
  for (uint32_t v = 0; v < p->graph->num_values; ++v) p->alias[v] = p->alias[p->alias[v]];
  return NULL;
}

jpp_status_t* jpp__partition_merge_hoisted(jpp_partitioner_t* p) {
  merger_t merger = {.p = p};
  jpp_status_t* status = merge_all(&merger);
  jpp__map_deinit(&merger.ops);
  return status;
}
