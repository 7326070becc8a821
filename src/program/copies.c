// Tasks that only copy, and need no module: zeros, rows of a batch, rows of stacked
// weights, casts.
#include "base/bytes.h"
#include "jaxpp/program.h"

// On one thread, casts of this many bytes take a few milliseconds, less than the
// compilation of a module.
static const uint64_t kMostCastBytes = 16 << 20;

typedef struct reader {
  const jpp_staged_t* staged;
  const jpp_task_t* task;
} reader_t;

// The op of the task that makes the value; NULL if the task takes it.
static const jpp_op_t* producer_in_task(const reader_t* r, uint32_t value) {
  uint32_t producer = r->staged->values[value].producer;
  for (uint32_t i = 0; i < r->task->num_ops; ++i) {
    if (r->task->ops[i] == producer) return &r->staged->ops[producer];
  }
  return NULL;
}

static uint32_t position_of_input(const jpp_task_t* task, uint32_t value) {
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    if (task->inputs[i] == value) return i;
  }
  return JPP_NONE;
}

static const jpp_type_t* type_of(const reader_t* r, uint32_t value) {
  return &r->staged->values[value].type;
}

// Whether the value is the microbatch's number, converted or not.
static bool is_microbatch(const reader_t* r, uint32_t value) {
  for (const jpp_op_t* op; (op = producer_in_task(r, value)); value = op->inputs[0]) {
    if (!(op->flags & JPP_OP_COPY)) return false;
    jpp_dtype_t dtype = type_of(r, op->first_output)->dtype;
    if (dtype != JPP_DTYPE_S32 && dtype != JPP_DTYPE_U32) return false;
  }
  const jpp_graph_t* graph = r->staged->graph;
  return r->task->loop != JPP_NONE && graph->loops[r->task->loop].index == value;
}

// Devices pack elements that are smaller than a byte.
static bool can_convert(jpp_dtype_t from, jpp_dtype_t to) {
  if (from == to) return jpp_dtype_device_bytes(from, 8) == jpp_dtype_bits(from);
  return (from == JPP_DTYPE_F32 && to == JPP_DTYPE_BF16) ||
         (from == JPP_DTYPE_BF16 && to == JPP_DTYPE_F32);
}

// Adds the position of the op's output in its input. False if it is not known.
static bool add_rows(const reader_t* r, const jpp_op_t* op, jpp_copy_t* copy) {
  const jpp_type_t* from = type_of(r, op->inputs[0]);
  uint64_t all = jpp_type_elements(from);
  uint64_t left = all - jpp_type_elements(type_of(r, op->first_output));
  uint64_t row = from->ndim ? all / (uint64_t)from->dims[0] : 0;
  copy->first += op->attr * row;
  if (op->num_inputs == 1) return true;
  if (!row || copy->row || op->attr || !is_microbatch(r, op->inputs[1])) return false;
  copy->row = row;
  copy->last = left / row;
  return true;
}

static bool copies_rows(const jpp_copy_t* copy, const jpp_type_t* argument) {
  uint64_t rows = argument->ndim ? (uint64_t)argument->dims[0] : 1;
  uint64_t row = jpp_type_elements(argument) / rows;
  return copy->first % row == 0 && copy->row % row == 0;
}

// Follows the copies of the task from a result to an argument of the step.
static bool follow(const reader_t* r, uint32_t value, jpp_copy_t* copy) {
  jpp_dtype_t dtype = type_of(r, value)->dtype;
  uint32_t casts = 0;
  for (const jpp_op_t* op; (op = producer_in_task(r, value)); value = op->inputs[0]) {
    if (!(op->flags & JPP_OP_COPY) || !add_rows(r, op, copy)) return false;
    casts += type_of(r, op->inputs[0])->dtype != type_of(r, value)->dtype;
  }
  const jpp_value_t* source = &r->staged->values[value];
  copy->input = position_of_input(r->task, value);
  copy->by_rows = copies_rows(copy, &source->type);
  bool is_argument = source->producer == JPP_NONE && source->loop == JPP_NONE;
  return is_argument && casts <= 1 && can_convert(source->type.dtype, dtype);
}

static bool find_copy(const reader_t* r, uint32_t value, jpp_copy_t* out_copy) {
  const jpp_op_t* op = producer_in_task(r, value);
  *out_copy = (jpp_copy_t){.input = JPP_NONE};
  return op && (op->kind == JPP_OP_INIT || follow(r, value, out_copy));
}

static uint64_t cast_bytes(const reader_t* r, uint32_t value, const jpp_copy_t* copy) {
  const jpp_type_t* type = type_of(r, value);
  if (copy->input == JPP_NONE) return 0;
  bool casts = type_of(r, r->task->inputs[copy->input])->dtype != type->dtype;
  return casts ? jpp_type_bytes(type) : 0;
}

static bool is_zeros(const jpp_staged_t* staged, const jpp_op_t* op) {
  if (op->kind != JPP_OP_INIT) return false;
  return staged->graph->loops[op->loop].results[op->attr].reduce == JPP_REDUCE_ADD;
}

static bool has_only_copies(const reader_t* r) {
  for (uint32_t i = 0; i < r->task->num_ops; ++i) {
    const jpp_op_t* op = &r->staged->ops[r->task->ops[i]];
    if (!(op->flags & JPP_OP_COPY) && !is_zeros(r->staged, op)) return false;
  }
  return r->task->num_ops != 0;
}

static bool donates(const jpp_plan_t* plan, uint32_t task) {
  for (uint32_t i = 0; i < plan->staged->tasks[task].num_inputs; ++i) {
    if (plan->bindings[task].donated_to[i] != JPP_NONE) return true;
  }
  return false;
}

bool jpp_plan_task_copies(const jpp_plan_t* plan, uint32_t task, jpp_copy_t* out_copies) {
  const reader_t r = {.staged = plan->staged, .task = &plan->staged->tasks[task]};
  uint64_t cast = 0;
  if (!has_only_copies(&r) || donates(plan, task)) return false;
  for (uint32_t i = 0; i < r.task->num_outputs; ++i) {
    jpp_copy_t copy;
    if (!find_copy(&r, r.task->outputs[i], &copy)) return false;
    cast = jpp__bytes_add(cast, cast_bytes(&r, r.task->outputs[i], &copy));
    if (out_copies) out_copies[i] = copy;
  }
  return cast <= kMostCastBytes;
}
