// Writes each op of a task as a line of StableHLO; %vN is the plan's value N.
#define _POSIX_C_SOURCE 200809L
#include "stablehlo.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void write_type(FILE* out, const jpp_type_t* type) {
  fprintf(out, "tensor<");
  for (uint32_t i = 0; i < type->ndim; ++i) fprintf(out, "%" PRId64 "x", type->dims[i]);
  fprintf(out, type->dtype == JPP_DTYPE_S32 ? "i32>" : "f32>");
}

static void write_op(FILE* out, const jpp_staged_t* staged, const jpp_op_t* op) {
  const jpp_type_t* result = &staged->values[op->first_output].type;
  const uint32_t* inputs = op->inputs;
  bool call = op->kind == JPP_OP_CALL;
  fprintf(out, "  %%v%" PRIu32 " = stablehlo.", op->first_output);
  if (op->kind == JPP_OP_INIT) {  // a sum begins with zeros
    fprintf(out, "constant dense<0.0> : ");
  } else if (call && strcmp(op->name, "dynamic_slice") == 0) {  // row inputs[1]
    fprintf(out, "dynamic_slice %%v%" PRIu32 ", %%v%" PRIu32 ", %%zero, sizes = [1, ",
            inputs[0], inputs[1]);
    fprintf(out, "%" PRId64 "] : (", result->dims[1]);
    write_type(out, &staged->values[inputs[0]].type);
    fprintf(out, ", tensor<i32>, tensor<i32>) -> ");
  } else if (call || op->kind == JPP_OP_ACCUMULATE) {  // state + value
    fprintf(out, "%s %%v%" PRIu32 ", %%v%" PRIu32 " : ", call ? op->name : "add",
            inputs[0], inputs[1]);
  } else {
    fprintf(out, "unknown_to_this_example : ");  // the plugin's compiler names it
  }
  write_type(out, result);
  fprintf(out, "\n");
}

static void write_task(FILE* out, const jpp_plan_t* plan, uint32_t id) {
  const jpp_staged_t* staged = plan->staged;
  const jpp_task_t* task = &staged->tasks[id];
  fprintf(out, "module { func.func public @main(");
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    uint32_t donated_to = plan->bindings[id].donated_to[i];
    fprintf(out, "%s%%v%" PRIu32 ": ", i ? ", " : "", task->inputs[i]);
    write_type(out, &staged->values[task->inputs[i]].type);
    if (donated_to == JPP_NONE) continue;
    fprintf(out, " {tf.aliasing_output = %" PRIu32 " : i32}", donated_to);
  }
  fprintf(out, ") -> (");
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    fprintf(out, "%s", i ? ", " : "");
    write_type(out, &staged->values[task->outputs[i]].type);
  }
  fprintf(out, ") {\n  %%zero = stablehlo.constant dense<0> : tensor<i32>\n");
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    write_op(out, staged, &staged->ops[task->ops[i]]);
  }
  fprintf(out, "  return ");
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    fprintf(out, "%s%%v%" PRIu32, i ? ", " : "", task->outputs[i]);
  }
  for (uint32_t i = 0; i < task->num_outputs; ++i) {
    fprintf(out, i ? ", " : " : ");
    write_type(out, &staged->values[task->outputs[i]].type);
  }
  fprintf(out, "\n} }\n");
}

char* task_code(const jpp_plan_t* plan, uint32_t task) {
  char* code = NULL;
  size_t size = 0;
  FILE* out = open_memstream(&code, &size);
  if (!out) return NULL;
  write_task(out, plan, task);
  if (!fclose(out)) return code;
  free(code);
  return NULL;
}
