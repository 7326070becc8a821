// jaxpp run: runs a plan file from C alone, on arguments of zeros or random numbers. As
// in training, results take the place of arguments in the next step.
#include <inttypes.h>
#include <string.h>

#include "base/json.h"
#include "cli/step.h"

enum { kDefaultSteps = 10 };

typedef struct run {
  const jpp_cli_options_t* options;
  jpp_cli_step_t opened;
  // Borrowed from `opened`.
  const jpp_planfile_t* file;
  jpp_planfile_step_t* step;
  const jpp_graph_t* graph;
  uint32_t num_args;      // without constants
  jpp_array_t** args;     // [num_args]
  jpp_array_t** results;  // [graph->num_outputs] of the last step
  uint32_t* replaced;     // [graph->num_outputs] results of replaced_by()
  uint32_t steps;
  double first_ms, step_ms;  // the last: mean of all steps but the first
} run_t;

// --- Arguments ------------------------------------------------------------------------

// A number in [0, 0.1): not negative, because an optimizer may take the root of its
// state. splitmix64, https://prng.di.unimi.it/splitmix64.c
static double next_random(uint64_t* state) {
  uint64_t z = (*state += 0x9e3779b97f4a7c15);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  z ^= z >> 31;
  return (double)(z >> 11) * 0x1p-53 * 0.1;
}

static void fill_random(uint64_t seed, jpp_dtype_t dtype, void* data, uint64_t bytes) {
  for (uint64_t i = 0; dtype == JPP_DTYPE_F64 && i < bytes / sizeof(double); ++i) {
    ((double*)data)[i] = next_random(&seed);
  }
  for (uint64_t i = 0; dtype == JPP_DTYPE_F32 && i < bytes / sizeof(float); ++i) {
    ((float*)data)[i] = (float)next_random(&seed);
  }
  for (uint64_t i = 0; dtype == JPP_DTYPE_BF16 && i < bytes / sizeof(uint16_t); ++i) {
    float number = (float)next_random(&seed);
    uint32_t bits;
    memcpy(&bits, &number, sizeof(bits));
    ((uint16_t*)data)[i] = (uint16_t)(bits >> 16);
  }
}

static jpp_status_t* upload_arg(run_t* run, uint32_t arg) {
  const jpp_type_t* type = &run->graph->values[run->graph->args[arg].value].type;
  uint64_t bytes = jpp_type_host_bytes(type);
  uint32_t seed = run->options->seed;
  void* data = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(bytes, &data));
  if (seed) fill_random((uint64_t)seed << 32 | arg, type->dtype, data, bytes);
  jpp_status_t* status = jpp_planfile_step_upload(run->step, arg, data, &run->args[arg]);
  jpp_free(data);
  return status;
}

// --- Steps ----------------------------------------------------------------------------

static bool lie_alike(const run_t* run, uint32_t arg, uint32_t output) {
  const jpp_planfile_contents_t* contents = &run->file->contents;
  uint32_t ndim = run->graph->values[run->graph->args[arg].value].type.ndim;
  if (!contents->layouts || !ndim) return true;
  const jpp_planfile_layout_t* a = &contents->layouts[arg];
  const jpp_planfile_layout_t* b = &contents->layouts[run->graph->num_args + output];
  size_t starts = (size_t)contents->devices_per_rank * ndim * sizeof(*a->starts);
  return memcmp(a->dims, b->dims, ndim * sizeof(*a->dims)) == 0 &&
         memcmp(a->starts, b->starts, starts) == 0;
}

// Copies through the host if the result is sharded differently from the argument.
static jpp_status_t* replace_arg(run_t* run, uint32_t arg, uint32_t output) {
  const jpp_type_t* type = &run->graph->values[run->graph->args[arg].value].type;
  void* data = NULL;
  jpp_array_release(run->args[arg]);
  run->args[arg] = NULL;
  if (lie_alike(run, arg, output)) {
    run->args[arg] = run->results[output];
    jpp_array_hold(run->args[arg]);
    return NULL;
  }
  JPP_RETURN_IF_ERROR(jpp_alloc(jpp_type_host_bytes(type), &data));
  jpp_status_t* status =
      jpp_planfile_step_read(run->step, output, run->results[output], data);
  if (!status) status = jpp_planfile_step_upload(run->step, arg, data, &run->args[arg]);
  jpp_free(data);
  return status;
}

// The donated argument that a result becomes in the next step; JPP_NONE: none.
static uint32_t replaced_by(const run_t* run, uint32_t output) {
  uint32_t value = run->graph->outputs[output].next;
  for (uint32_t a = 0; value != JPP_NONE && a < run->num_args; ++a) {
    const jpp_graph_arg_t* arg = &run->graph->args[a];
    if (arg->value == value) return arg->donated ? a : JPP_NONE;
  }
  return JPP_NONE;
}

// Replaces the arguments that the last step took: by its results if the plan says so,
// otherwise by the same numbers again.
static jpp_status_t* replace_args(run_t* run) {
  for (uint32_t o = 0; o < run->graph->num_outputs; ++o) {
    if (run->replaced[o] == JPP_NONE || !run->results[o]) continue;
    JPP_RETURN_IF_ERROR(replace_arg(run, run->replaced[o], o));
  }
  for (uint32_t a = 0; a < run->num_args; ++a) {
    if (run->args[a] && !jpp_array_is_deleted(run->args[a])) continue;
    jpp_array_release(run->args[a]);
    run->args[a] = NULL;
    JPP_RETURN_IF_ERROR(upload_arg(run, a));
  }
  return NULL;
}

static void drop_results(run_t* run) {
  for (uint32_t o = 0; run->results && o < run->graph->num_outputs; ++o) {
    jpp_array_release(run->results[o]);
    run->results[o] = NULL;
  }
}

static jpp_status_t* call_step(run_t* run) {
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = run->args,
                     .num_args = run->num_args,
                     .results = run->results,
                     .num_results = run->graph->num_outputs};
  JPP_RETURN_IF_ERROR(replace_args(run));
  drop_results(run);
  return jpp_planfile_step_call(run->step, &call);
}

static jpp_status_t* run_steps(run_t* run) {
  jpp_runtime_t* runtime = jpp_planfile_step_runtime(run->step);
  double begin = jpp_cli_now_ms();
  JPP_RETURN_IF_ERROR(call_step(run));
  JPP_RETURN_IF_ERROR(jpp_runtime_await(runtime, NULL));
  run->first_ms = jpp_cli_now_ms() - begin;
  begin = jpp_cli_now_ms();
  for (uint32_t i = 1; i < run->steps; ++i) JPP_RETURN_IF_ERROR(call_step(run));
  JPP_RETURN_IF_ERROR(jpp_runtime_await(runtime, NULL));
  if (run->steps > 1) run->step_ms = (jpp_cli_now_ms() - begin) / (run->steps - 1);
  return NULL;
}

static jpp_status_t* prepare_arrays(run_t* run) {
  uint32_t outputs = run->graph->num_outputs;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(run->num_args, &run->args));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(outputs, &run->results));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(outputs, &run->replaced));
  for (uint32_t o = 0; o < outputs; ++o) run->replaced[o] = replaced_by(run, o);
  return NULL;
}

// --- Printing -------------------------------------------------------------------------

static void append_type(const jpp_type_t* type, jpp_str_t* out) {
  jpp_str_appendf(out, "%s[", jpp_dtype_name(type->dtype));
  for (uint32_t i = 0; i < type->ndim; ++i) {
    jpp_str_appendf(out, "%s%" PRId64, i ? "," : "", type->dims[i]);
  }
  jpp_str_append(out, "]");
}

// Returns false for types without a numeric value here.
static bool number_of(jpp_dtype_t dtype, const void* data, double* out_number) {
  switch (dtype) {
    case JPP_DTYPE_F64:
      *out_number = *(const double*)data;
      return true;
    case JPP_DTYPE_F32:
      *out_number = (double)*(const float*)data;
      return true;
    case JPP_DTYPE_S32:
      *out_number = *(const int32_t*)data;
      return true;
    case JPP_DTYPE_U32:
      *out_number = *(const uint32_t*)data;
      return true;
    case JPP_DTYPE_BOOL:
      *out_number = *(const uint8_t*)data;
      return true;
    case JPP_DTYPE_BF16: {
      uint32_t bits = (uint32_t) * (const uint16_t*)data << 16;
      float number;
      memcpy(&number, &bits, sizeof(number));
      *out_number = (double)number;
      return true;
    }
    default:
      return false;
  }
}

// *out_known: the result is a scalar whose value was read.
static jpp_status_t* read_scalar(const run_t* run, uint32_t output, double* out_number,
                                 bool* out_known) {
  const jpp_type_t* type = &run->graph->values[run->graph->outputs[output].value].type;
  uint64_t data[2] = {0};  // room for the largest type
  *out_known = false;
  if (type->ndim) return NULL;
  JPP_RETURN_IF_ERROR(
      jpp_planfile_step_read(run->step, output, run->results[output], data));
  *out_known = number_of(type->dtype, data, out_number);
  return NULL;
}

static jpp_status_t* print_results(const run_t* run, jpp_str_t* out) {
  for (uint32_t o = 0; o < run->graph->num_outputs; ++o) {
    const jpp_graph_output_t* output = &run->graph->outputs[o];
    double number = 0;
    bool known = false;
    JPP_RETURN_IF_ERROR(read_scalar(run, o, &number, &known));
    jpp_str_appendf(out, "%s: ", output->name ? output->name : "?");
    append_type(&run->graph->values[output->value].type, out);
    if (known) jpp_str_appendf(out, " = %.9g", number);
    jpp_str_append(out, "\n");
  }
  return NULL;
}

static jpp_status_t* print_text(const run_t* run, jpp_str_t* out) {
  const jpp_planfile_contents_t* contents = &run->file->contents;
  const jpp_planned_t* planned = contents->planned;
  bool differ = false;
  for (uint32_t r = 0; r < planned->ranks; ++r) {
    differ |= contents->device_ids[(size_t)(r + 1) * contents->devices_per_rank - 1] < 0;
  }
  jpp_str_appendf(out, "%s, written by %s: %u ranks of %s%u %s devices\n",
                  planned->graph->name, run->file->maker, planned->ranks,
                  differ ? "at most " : "", contents->devices_per_rank,
                  contents->platform);
  jpp_str_appendf(out, "compiled %u modules in %.0f ms\n", contents->num_modules,
                  run->opened.compile_ms);
  jpp_str_appendf(out, "first step %.3f ms", run->first_ms);
  if (run->steps > 1) {
    jpp_str_appendf(out, ", %u more %.3f ms each", run->steps - 1, run->step_ms);
  }
  jpp_str_append(out, "\n");
  char* costs = NULL;
  JPP_RETURN_IF_ERROR(jpp_plan_costs_print(run->opened.costs, &costs));
  jpp_str_appendf(out, "\n%s\n", costs);
  jpp_text_free(costs);
  return print_results(run, out);
}

static jpp_status_t* results_to_json(const run_t* run, json_t** out_list) {
  *out_list = json_array();
  for (uint32_t o = 0; o < run->graph->num_outputs; ++o) {
    const jpp_graph_output_t* output = &run->graph->outputs[o];
    const jpp_type_t* type = &run->graph->values[output->value].type;
    json_t* shape = json_array();
    double number = 0;
    bool known = false;
    for (uint32_t i = 0; i < type->ndim; ++i) {
      jpp__json_append(&shape, json_integer(type->dims[i]));
    }
    jpp_status_t* status = read_scalar(run, o, &number, &known);
    json_t* value = known && number - number == 0 ? json_real(number) : json_null();
    jpp__json_append(
        out_list,
        json_pack("{so ss so so}", "name", jpp__json_text(output->name), "dtype",
                  jpp_dtype_name(type->dtype), "shape", shape, "value", value));
    JPP_RETURN_IF_ERROR(status);
  }
  return NULL;
}

static jpp_status_t* print_json(const run_t* run, jpp_str_t* out) {
  const jpp_planfile_contents_t* contents = &run->file->contents;
  const jpp_planned_t* planned = contents->planned;
  json_t *peaks = json_array(), *host_peaks = json_array(), *results = NULL;
  jpp_status_t* status = results_to_json(run, &results);
  for (uint32_t r = 0; r < planned->ranks; ++r) {
    json_int_t peak = (json_int_t)planned->report->actors[r].peak_bytes;
    jpp__json_append(&peaks, json_integer(peak));
    json_int_t host_peak = (json_int_t)planned->report->actors[r].peak_host_bytes;
    jpp__json_append(&host_peaks, json_integer(host_peak));
  }
  json_t* all = json_pack("{so so so sI sI sI sf sI sf sf so so so so}",               //
                          "name", jpp__json_text(planned->graph->name),                //
                          "maker", jpp__json_text(run->file->maker),                   //
                          "platform", jpp__json_text(contents->platform),              //
                          "ranks", (json_int_t)planned->ranks,                         //
                          "devices_per_rank", (json_int_t)contents->devices_per_rank,  //
                          "modules", (json_int_t)contents->num_modules,                //
                          "compile_ms", run->opened.compile_ms,                        //
                          "steps", (json_int_t)run->steps,                             //
                          "first_step_ms", run->first_ms,                              //
                          "step_ms", run->step_ms,                                     //
                          "peak_bytes", peaks, "peak_host_bytes", host_peaks,          //
                          "collectives", jpp_cli_collectives_json(run->opened.costs),  //
                          "results", results);
  if (status) {
    json_decref(all);
    return status;
  }
  jpp__json_take(all, JSON_INDENT(1) | JSON_REAL_PRECISION(9), out);
  jpp_str_append(out, "\n");
  return NULL;
}

// --- All ------------------------------------------------------------------------------

static jpp_status_t* run_file(run_t* run, jpp_str_t* out) {
  JPP_RETURN_IF_ERROR(jpp_cli_step_open(run->options, &run->opened));
  run->file = run->opened.file;
  run->step = run->opened.step;
  run->graph = run->file->contents.planned->graph;
  run->num_args = run->graph->num_args - run->file->contents.num_constants;
  JPP_RETURN_IF_ERROR(prepare_arrays(run));
  JPP_RETURN_IF_ERROR(run_steps(run));
  return run->options->json ? print_json(run, out) : print_text(run, out);
}

jpp_status_t* jpp_cli_run(const jpp_cli_options_t* options, jpp_str_t* out) {
  run_t run = {.options = options,
               .steps = options->steps ? options->steps : kDefaultSteps};
  jpp_status_t* status = run_file(&run, out);
  drop_results(&run);
  for (uint32_t a = 0; run.args && a < run.num_args; ++a) {
    jpp_array_release(run.args[a]);
  }
  jpp_free(run.args);
  jpp_free(run.results);
  jpp_free(run.replaced);
  jpp_cli_step_close(&run.opened);
  return status;
}
