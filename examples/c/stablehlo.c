// Writes each op of a task as a line of StableHLO; %vN is the plan's value N.
#include "stablehlo.h"

#include <inttypes.h>
#include <string.h>

static void append_type(jpp_str_t* out, const jpp_type_t* type) {
  jpp_str_append(out, "tensor<");
  for (uint32_t i = 0; i < type->ndim; ++i) {
    jpp_str_appendf(out, "%" PRId64 "x", type->dims[i]);
  }
  jpp_str_append(out, type->dtype == JPP_DTYPE_S32 ? "i32>" : "f32>");
}

static void append_op(jpp_str_t* out, const jpp_staged_t* staged, const jpp_op_t* op) {
  const jpp_type_t* result = &staged->values[op->first_output].type;
  const uint32_t* inputs = op->inputs;
  bool call = op->kind == JPP_OP_CALL;
  jpp_str_appendf(out, "  %%v%" PRIu32 " = stablehlo.", op->first_output);
  if (op->kind == JPP_OP_INIT) {  // a sum begins with zeros
    jpp_str_append(out, "constant dense<0.0> : ");
  } else if (call && strcmp(op->name, "dynamic_slice") == 0) {  // row inputs[1]
    jpp_str_appendf(out,
                    "dynamic_slice %%v%" PRIu32 ", %%v%" PRIu32 ", %%zero, sizes = [1, ",
                    inputs[0], inputs[1]);
    jpp_str_appendf(out, "%" PRId64 "] : (", result->dims[1]);
    append_type(out, &staged->values[inputs[0]].type);
    jpp_str_append(out, ", tensor<i32>, tensor<i32>) -> ");
  } else if (call || op->kind == JPP_OP_ACCUMULATE) {  // state + value
    jpp_str_appendf(out, "%s %%v%" PRIu32 ", %%v%" PRIu32 " : ", call ? op->name : "add",
                    inputs[0], inputs[1]);
  } else {
    jpp_str_append(out,
                   "unknown_to_this_example : ");  // the plugin's compiler will report it
  }
  append_type(out, result);
  jpp_str_append(out, "\n");
}

static void append_task(jpp_str_t* out, const jpp_plan_t* plan, uint32_t id) {
  const jpp_staged_t* staged = plan->staged;
  const jpp_task_t* task = &staged->tasks[id];
  jpp_str_append(out, "module { func.func public @main(");
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    uint32_t donated_to = plan->bindings[id].donated_to[i];
    jpp_str_appendf(out, "%s%%v%" PRIu32 ": ", i ? ", " : "", task->inputs[i]);
    append_type(out, &staged->values[task->inputs[i]].type);
    if (donated_to == JPP_NONE) continue;
    jpp_str_appendf(out, " {tf.aliasing_output = %" PRIu32 " : i32}", donated_to);
  }
  jpp_str_append(out, ") -> (");
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    jpp_str_appendf(out, "%s", i ? ", " : "");
    append_type(out, &staged->values[task->outputs[i]].type);
  }
  jpp_str_appendf(out, ") {\n  %%zero = stablehlo.constant dense<0> : tensor<i32>\n");
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    append_op(out, staged, &staged->ops[task->ops[i]]);
  }
  jpp_str_append(out, "  return ");
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    jpp_str_appendf(out, "%s%%v%" PRIu32, i ? ", " : "", task->outputs[i]);
  }
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    jpp_str_append(out, i ? ", " : " : ");
    append_type(out, &staged->values[task->outputs[i]].type);
  }
  jpp_str_append(out, "\n} }\n");
}

jpp_status_t* task_code(const jpp_plan_t* plan, uint32_t task, char** out_code) {
  jpp_str_t code = {0};
  append_task(&code, plan, task);
  return jpp_str_finish(&code, out_code);
}
