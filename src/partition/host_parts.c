// Divides a task outside the loops that uses much host memory, such as the update of an
// optimizer whose state is there, so that not all of it is in device memory at once.
//
// Ops that depend on arrays in host memory, or make such arrays, form sets: two of them
// are in one set if one uses what the other computes. With most optimizers there is a set
// for the state of each weight. A part of the task has some of these sets and the ops
// that only they use. The other ops, such as the norm of all gradients, are a part that
// runs first.
#include "partition/host_parts.h"

#include <string.h>

#include "task/ids.h"

enum {
  kFewBytes = 4096,       // on a device: too few to move on their own
  kMostParts = 8,         // a part has a share of the bytes, unless one set has more,
  kLeastBytes = 1 << 20,  // and at least these, because each part costs a call
};

// What takes the results of an op.
enum { BY_NONE = UINT32_MAX, BY_SEVERAL = UINT32_MAX - 1 };

typedef struct divider {
  const jpp_partitioner_t* p;
  const uint32_t* ops;
  uint32_t count;
  uint32_t* at;     // [all ops] position in `ops`; JPP_NONE: not in it
  uint32_t* set;    // [ops] an op of the same set, or itself; JPP_NONE: in no set
  uint64_t* bytes;  // [ops] in host memory; of a set, at its first op
  uint32_t* users;  // [ops] the set that takes its results, BY_NONE or BY_SEVERAL
} divider_t;

static uint64_t host_bytes(const divider_t* d, uint32_t id) {
  const jpp_value_t* value = &d->p->values.data[id];
  if (value->type.memory == JPP_MEMORY_DEVICE) return 0;
  uint64_t bytes = jpp_value_device_bytes(value);
  return bytes < kFewBytes ? 0 : bytes;
}

static uint64_t host_bytes_of_op(const divider_t* d, const jpp_op_t* op) {
  uint64_t bytes = 0;
  for (uint32_t k = 0; k < op->num_inputs; ++k) bytes += host_bytes(d, op->inputs[k]);
  for (uint32_t k = 0; k < op->num_outputs; ++k) {
    bytes += host_bytes(d, op->first_output + k);
  }
  return bytes;
}

// The position of the op that makes a value; JPP_NONE: no op of the task.
static uint32_t maker_of(const divider_t* d, uint32_t value) {
  uint32_t producer = d->p->values.data[value].producer;
  return producer == JPP_NONE ? JPP_NONE : d->at[producer];
}

// A set is named by its first op.
static uint32_t set_of(const divider_t* d, uint32_t at) {
  if (d->set[at] == JPP_NONE) return JPP_NONE;
  while (d->set[at] != at) at = d->set[at] = d->set[d->set[at]];
  return at;
}

static void join(const divider_t* d, uint32_t at, uint32_t other) {
  uint32_t a = set_of(d, at), b = set_of(d, other);
  uint32_t first = a < b ? a : b;
  d->set[a] = d->set[b] = first;
}

static void find_sets(const divider_t* d) {
  for (uint32_t i = 0; i < d->count; ++i) {
    const jpp_op_t* op = &d->p->ops.data[d->ops[i]];
    d->bytes[i] = host_bytes_of_op(d, op);
    if (d->bytes[i]) d->set[i] = i;
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t maker = maker_of(d, op->inputs[k]);
      if (maker == JPP_NONE || d->set[maker] == JPP_NONE) continue;
      if (d->set[i] == JPP_NONE) d->set[i] = i;
      join(d, i, maker);
    }
  }
}

// Adds ops that only one set uses to that set.
static void extend_sets(const divider_t* d) {
  for (uint32_t i = d->count; i-- > 0;) {
    if (d->set[i] == JPP_NONE && d->users[i] < BY_SEVERAL) d->set[i] = d->users[i];
    uint32_t set = set_of(d, i);
    const jpp_op_t* op = &d->p->ops.data[d->ops[i]];
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t maker = maker_of(d, op->inputs[k]);
      if (maker == JPP_NONE) continue;
      uint32_t* user = &d->users[maker];
      *user = set != JPP_NONE && (*user == BY_NONE || *user == set) ? set : BY_SEVERAL;
    }
  }
}

static void number_parts(const divider_t* d, uint32_t* parts) {
  uint64_t all = 0;
  for (uint32_t i = 0; i < d->count; ++i) {
    uint32_t set = set_of(d, i);
    all += d->bytes[i];
    if (set == JPP_NONE || set == i) continue;
    d->bytes[set] += d->bytes[i];
  }
  uint64_t most = all / kMostParts > kLeastBytes ? all / kMostParts : kLeastBytes;
  uint64_t bytes = 0;
  uint32_t part = 1;
  for (uint32_t i = 0; i < d->count; ++i) {
    uint32_t set = set_of(d, i);
    if (set != i) continue;
    if (bytes && bytes + d->bytes[i] > most) {
      bytes = 0;
      ++part;
    }
    bytes += d->bytes[i];
    parts[i] = part;
  }
  for (uint32_t i = 0; i < d->count; ++i) {
    uint32_t set = set_of(d, i);
    parts[i] = part == 1 || set == JPP_NONE ? 0 : parts[set];
  }
}

static bool can_divide(const divider_t* d) {
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < d->count; ++i) {
    const jpp_op_t* op = &d->p->ops.data[d->ops[i]];
    if (op->flags & JPP_OP_EFFECT) return false;  // effects keep their order
    bytes += host_bytes_of_op(d, op);
  }
  return bytes > kLeastBytes;
}

static jpp_status_t* divide(divider_t* d, jpp_arena_t* scratch, uint32_t* parts) {
  JPP_RETURN_IF_ERROR(jpp__ids_create(scratch, d->count, &d->set));
  JPP_RETURN_IF_ERROR(jpp__ids_create(scratch, d->count, &d->users));
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(scratch, d->count, &d->bytes));
  find_sets(d);
  extend_sets(d);
  number_parts(d, parts);
  return NULL;
}

jpp_status_t* jpp__partition_divide_for_host(jpp_partitioner_t* p, const uint32_t* ops,
                                             uint32_t count, uint32_t* positions,
                                             uint32_t* out_parts) {
  divider_t d = {.p = p, .ops = ops, .count = count, .at = positions};
  memset(out_parts, 0, count * sizeof(*out_parts));
  if (!can_divide(&d)) return NULL;
  for (uint32_t i = 0; i < count; ++i) positions[ops[i]] = i;
  jpp_status_t* status = divide(&d, &p->scratch, out_parts);
  for (uint32_t i = 0; i < count; ++i) positions[ops[i]] = JPP_NONE;
  return status;
}
