// A debugging mode that stops at the first NaN or infinity: it awaits every run and reads
// its floating-point results. The first run with a NaN is its origin, unless the step's
// arguments had one; of the run's results, the one whose op comes first is reported.
#include "runtime/step/nans.h"

#include <stdio.h>

#include "base/alloc.h"
#include "base/finite.h"
#include "runtime/step/state.h"

void jpp_runtime_set_checks(jpp_runtime_t* runtime, bool nans, bool infs) {
  unsigned what = (nans ? JPP_FIND_NANS : 0) | (infs ? JPP_FIND_INFS : 0);
  atomic_store(&runtime->checks_wanted, what);
}

// The index of the task's op that makes the value; num_ops if the task only passes the
// value on.
static uint32_t maker_of(const jpp_staged_t* staged, const jpp_task_t* task,
                         uint32_t value) {
  uint32_t i = 0;
  for (; i < task->num_ops; ++i) {
    const jpp_op_t* op = &staged->ops[task->ops[i]];
    if (value - op->first_output < op->num_outputs) break;
  }
  return i;
}

// An element of an array of `count`.
typedef struct element {
  uint32_t value;
  size_t number, count;
} element_t;

// Of a state that sums several values in one array: the element of one of these.
static element_t unpack_element(const jpp_staged_t* staged, element_t of) {
  const jpp_op_t* sum = &staged->ops[staged->values[of.value].producer];
  bool packed = jpp_staged_is_packed(staged, of.value);
  if (!packed || sum->kind != JPP_OP_ACCUMULATE) return of;
  const jpp_op_t* pack = &staged->ops[staged->values[sum->inputs[1]].producer];
  for (uint32_t i = 0; i < pack->num_inputs; ++i) {
    of.value = pack->inputs[i];
    of.count = (size_t)jpp_type_elements(&staged->values[of.value].type);
    if (of.number < of.count) break;
    of.number -= of.count;
  }
  return of;
}

// The op itself or, if the planner made it (sums over microbatches), the latest op that
// the user wrote and on which it depends.
static const jpp_op_t* written_op(const jpp_staged_t* staged, const jpp_task_t* task,
                                  uint32_t maker) {
  const jpp_op_t* op = &staged->ops[task->ops[maker]];
  while (!op->where) {
    uint32_t last = JPP_NONE;
    for (uint32_t i = 0; i < op->num_inputs; ++i) {
      uint32_t at = maker_of(staged, task, op->inputs[i]);
      if (at < maker && (last == JPP_NONE || at > last)) last = at;
    }
    if (last == JPP_NONE) break;
    maker = last;
    op = &staged->ops[task->ops[maker]];
  }
  return op;
}

// ", made by log at model.py:12".
static void describe_maker(const jpp_staged_t* staged, const jpp_task_t* task,
                           uint32_t maker, char* text, size_t size) {
  text[0] = 0;
  if (maker == task->num_ops) return;
  const jpp_op_t* op = written_op(staged, task, maker);
  snprintf(text, size, ", made by %s%s%s", op->name ? op->name : "an operation",
           op->where ? " at " : "", op->where ? op->where : "");
}

typedef struct result_ref {
  const jpp_actor_t* actor;
  const jpp_actor_instr_t* instr;
  uint32_t result, device;
  jpp_buffer_shape_t shape;
  uint32_t value, maker;  // the op that makes it, from maker_of()
} result_ref_t;

static const jpp_task_t* task_of(const result_ref_t* ref) {
  uint32_t task = ref->actor->program->instrs[ref->instr->source].target;
  return &ref->actor->runtime->plan->staged->tasks[task];
}

static size_t element_bytes(const result_ref_t* ref) {
  return jpp_dtype_bits(ref->shape.dtype) / 8;
}

static size_t count_elements(const result_ref_t* ref) {
  size_t count = 1;
  for (uint32_t i = 0; i < ref->shape.rank; ++i) count *= (size_t)ref->shape.dims[i];
  return count;
}

static jpp_status_t* check_elements(const result_ref_t* ref, char* data) {
  const jpp_runtime_t* runtime = ref->actor->runtime;
  jpp_dtype_t dtype = ref->shape.dtype;
  size_t count = count_elements(ref), width = element_bytes(ref);
  JPP_RETURN_IF_ERROR(jpp_client_buffer_read(
      runtime->client, ref->actor->results[ref->device][ref->result], data,
      count * width));
  size_t found = jpp__find_nonfinite(dtype, data, count, runtime->step->checks);
  if (found == count) return NULL;
  bool is_nan = jpp__find_nonfinite(dtype, data + found * width, 1, JPP_FIND_NANS) == 0;
  const jpp_staged_t* staged = runtime->plan->staged;
  element_t element = unpack_element(staged, (element_t){ref->value, found, count});
  char maker[256];
  describe_maker(staged, task_of(ref), maker_of(staged, task_of(ref), element.value),
                 maker, sizeof(maker));
  return jpp_status_make(JPP_NAN_ERROR,
                         "expected numbers, found %s: element %zu of %zu of %%%u (%s)%s",
                         is_nan ? "a NaN" : "an infinity", element.number, element.count,
                         element.value, jpp_dtype_name(dtype), maker);
}

static jpp_status_t* check_result(result_ref_t* ref) {
  jpp_buffer_t* buffer = ref->actor->results[ref->device][ref->result];
  char* data = NULL;
  JPP_RETURN_IF_ERROR(
      jpp_client_buffer_shape(ref->actor->runtime->client, buffer, &ref->shape));
  if (!jpp__dtype_is_floating(ref->shape.dtype)) return NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(count_elements(ref) * element_bytes(ref), (void**)&data));
  jpp_status_t* status = check_elements(ref, data);
  jpp_free(data);
  return status;
}

jpp_status_t* jpp__nans_check(const jpp_actor_t* actor, const jpp_actor_instr_t* instr) {
  jpp_status_t* first = NULL;
  uint32_t first_maker = 0;
  uint32_t devices = actor->num_devices;
  for (uint32_t i = 0; i < instr->num_results * devices; ++i) {
    result_ref_t ref = {
        .actor = actor, .instr = instr, .result = i / devices, .device = i % devices};
    ref.value = task_of(&ref)->outputs[ref.result];
    ref.maker = maker_of(actor->runtime->plan->staged, task_of(&ref), ref.value);
    if (first && ref.maker >= first_maker) continue;
    jpp_status_t* status = check_result(&ref);
    if (!status) continue;
    jpp_status_free(first);
    first = status;
    first_maker = ref.maker;
  }
  return first;
}
