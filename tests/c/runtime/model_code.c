// Writes the programs of tasks.
#include "base/str.h"
#include "model.h"

static const jpp_type_t* type_of(const model_t* model, uint32_t value) {
  return &model->staged->values[value].type;
}

// --- Fake -----------------------------------------------------------------------------

static void fake_result(jpp_str_t* text, const model_t* model, const jpp_task_t* task,
                        uint32_t result) {
  const jpp_type_t* type = type_of(model, task->outputs[result]);
  jpp_str_append(text, "f32[");
  for (uint32_t i = 0; i < type->ndim; ++i) {
    jpp_str_appendf(text, "%s%lld", i ? "," : "", (long long)type->dims[i]);
  }
  jpp_str_append(text, model->options.collective ? "] = all_hash" : "] = hash");
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    jpp_str_appendf(text, " %u", (result + i) % task->num_inputs);
  }
  jpp_str_append(text, "\n");
}

static void fake_donations(jpp_str_t* text, const model_t* model, uint32_t task) {
  const uint32_t* donated_to = model->plan->bindings[task].donated_to;
  for (uint32_t i = 0, count = 0; i < model->staged->tasks[task].num_inputs; ++i) {
    if (donated_to[i] == JPP_NONE) continue;
    jpp_str_appendf(text, "%s%u", count++ ? " " : "donate ", i);
  }
  jpp_str_append(text, "\n");
}

char* model_fake_code(const model_t* model, uint32_t id) {
  const jpp_task_t* task = &model->staged->tasks[id];
  uint32_t per_rank = model->options.devices_per_rank;
  jpp_str_t text = {0};
  if (task->num_inputs) jpp_str_appendf(&text, "args %u\n", task->num_inputs);
  jpp_str_append(&text, "devices");
  for (uint32_t s = 0; s < model->options.slices; ++s) {
    const uint32_t* rank_process = model->options.rank_process;
    uint32_t node = model_node_of(model, s, rank_process ? rank_process[task->rank] : 0);
    uint32_t first = node * jpp_client_info(model->client)->device_count;
    for (uint32_t d = 0; d < per_rank; ++d) {
      uint32_t device = model->devices[task->rank * per_rank + d];
      if (device == JPP_NO_DEVICE) continue;
      jpp_str_appendf(&text, " %u", first + device);
    }
  }
  jpp_str_append(&text, "\n");
  fake_donations(&text, model, id);
  for (uint32_t k = 0; k < task->num_outputs; ++k) fake_result(&text, model, task, k);
  char* code = NULL;
  ASSERT_OK(jpp_str_finish(&text, &code));
  return code;
}

// --- MLIR -----------------------------------------------------------------------------

static void mlir_type(jpp_str_t* text, const jpp_type_t* type) {
  jpp_str_append(text, "tensor<");
  for (uint32_t i = 0; i < type->ndim; ++i) {
    jpp_str_appendf(text, "%lldx", (long long)type->dims[i]);
  }
  jpp_str_append(text, type->dtype == JPP_DTYPE_S32 ? "i32>" : "f32>");
}

static void mlir_signature(jpp_str_t* text, const model_t* model, uint32_t id) {
  const jpp_task_t* task = &model->staged->tasks[id];
  const uint32_t* donated_to = model->plan->bindings[id].donated_to;
  jpp_str_append(text, "module @task { func.func public @main(");
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    jpp_str_appendf(text, "%s%%a%u: ", i ? ", " : "", i);
    mlir_type(text, type_of(model, task->inputs[i]));
    if (donated_to[i] == JPP_NONE) continue;
    jpp_str_appendf(text, " {tf.aliasing_output = %u : i32}", donated_to[i]);
  }
  jpp_str_append(text, ") -> (");
  for (uint32_t k = 0; k < task->num_outputs; ++k) {
    if (k) jpp_str_append(text, ", ");
    mlir_type(text, type_of(model, task->outputs[k]));
  }
  jpp_str_append(text, ") {\n");
}

// Converts the argument to an array of the result's type; returns false if it has another
// type.
static bool mlir_term(jpp_str_t* text, const jpp_type_t* type, const jpp_type_t* result,
                      uint32_t k, uint32_t arg) {
  if (jpp_type_equal(type, result)) {
    jpp_str_appendf(text, "  %%t%u_%u = stablehlo.reshape %%a%u : (", k, arg, arg);
    mlir_type(text, type);
  } else if (type->dtype == JPP_DTYPE_S32) {
    jpp_str_appendf(text,
                    "  %%f%u_%u = stablehlo.convert %%a%u : (tensor<i32>) -> "
                    "tensor<f32>\n",
                    k, arg, arg);
    jpp_str_appendf(text,
                    "  %%t%u_%u = stablehlo.broadcast_in_dim %%f%u_%u, dims = [] : "
                    "(tensor<f32>",
                    k, arg, k, arg);
  } else {
    return false;
  }
  jpp_str_append(text, ") -> ");
  mlir_type(text, result);
  jpp_str_append(text, "\n");
  return true;
}

static void mlir_result(jpp_str_t* text, const model_t* model, const jpp_task_t* task,
                        uint32_t k) {
  const jpp_type_t* result = type_of(model, task->outputs[k]);
  jpp_str_appendf(text, "  %%s%u_0 = stablehlo.constant dense<%u.0> : ", k, k + 1);
  mlir_type(text, result);
  jpp_str_append(text, "\n");
  uint32_t sums = 0;
  for (uint32_t i = 0; i < task->num_inputs; ++i) {
    if (!mlir_term(text, type_of(model, task->inputs[i]), result, k, i)) continue;
    jpp_str_appendf(text, "  %%s%u_%u = stablehlo.add %%s%u_%u, %%t%u_%u : ", k, sums + 1,
                    k, sums, k, i);
    mlir_type(text, result);
    jpp_str_append(text, "\n");
    ++sums;
  }
  bool call = !k && model->options.custom_call &&
              strcmp(task->name, model->options.custom_call_task) == 0;
  jpp_str_appendf(text, "  %%r%u = stablehlo.%s%s%s%%s%u_%u%s : (", k,
                  call ? "custom_call @" : "reshape ",
                  call ? model->options.custom_call : "", call ? "(" : "", k, sums,
                  call ? ") {api_version = 4 : i32, backend_config = {}}" : "");
  mlir_type(text, result);
  jpp_str_append(text, ") -> ");
  mlir_type(text, result);
  jpp_str_append(text, "\n");
}

char* model_mlir_code(const model_t* model, uint32_t id) {
  const jpp_task_t* task = &model->staged->tasks[id];
  jpp_str_t text = {0};
  mlir_signature(&text, model, id);
  for (uint32_t k = 0; k < task->num_outputs; ++k) mlir_result(&text, model, task, k);
  jpp_str_append(&text, "  return");
  for (uint32_t k = 0; k < task->num_outputs; ++k) {
    jpp_str_appendf(&text, "%s%%r%u", k ? ", " : " ", k);
  }
  for (uint32_t k = 0; k < task->num_outputs; ++k) {
    jpp_str_append(&text, k ? ", " : " : ");
    mlir_type(&text, type_of(model, task->outputs[k]));
  }
  jpp_str_append(&text, "\n} }\n");
  char* code = NULL;
  ASSERT_OK(jpp_str_finish(&text, &code));
  return code;
}
