// Plans a training step, proves the plan, and trains with it on a PJRT plugin for CPUs.
//
//   plan_and_run GRAPH SCHEDULE [PLUGIN]
//
//   plan_and_run regression.jpp 1f1b /path/to/pjrt_c_api_cpu_plugin.so
//
// Without PLUGIN the variable JPP_PLUGIN names it. The library decides what each rank
// does and when; what an op computes is known to the caller alone, here to stablehlo.c.
#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <jaxpp/jaxpp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stablehlo.h"

enum { kMaxRanks = 8, kSteps = 20 };

// A program that can go on after an error would look at jpp_status_code().
static void check(jpp_status_t* status) {
  if (!status) return;
  fprintf(stderr, "plan_and_run: %s\n", jpp_status_message(status));
  exit(1);
}

static char* read_file(const char* path, size_t* out_length) {
  char* text = NULL;
  size_t capacity = 0;
  FILE* file = fopen(path, "r");
  // Up to the first NUL, which a text does not have: all of the file.
  ssize_t length = file ? getdelim(&text, &capacity, '\0', file) : -1;
  if (length < 0) check(jpp_status_make(JPP_INVALID_ARGUMENT, "can not read %s", path));
  fclose(file);
  *out_length = (size_t)length;
  return text;
}

// --- The plan -------------------------------------------------------------------------

// What the plan, which is proved, will cost.
static void report(const jpp_planned_t* planned) {
  for (uint32_t r = 0; r < planned->ranks; ++r) {
    printf("rank %" PRIu32 ": peak %" PRIu64 " bytes\n", r,
           planned->report->actors[r].peak_bytes);
  }
  jpp_simulate_options_t options = {
      .struct_size = sizeof(options),
      .rank_cost = {.forward = 1, .backward = 1, .weight = 1}};
  jpp_simulation_t* simulation = NULL;
  check(jpp_schedule_simulate(planned->schedules[0], &options, &simulation));
  printf("bubble: %g of %g\n", simulation->bubble_global, simulation->makespan);
  jpp_simulation_destroy(simulation);
}

static jpp_task_executable_t compile_task(jpp_client_t* client, const jpp_plan_t* plan,
                                          uint32_t id) {
  // A CompileOptionsProto: executable_build_options (3) {num_replicas (4): 1,
  // num_partitions (5): 1}, compile_portable_executable (4): true.
  static const char kOptions[] = "\x1a\x04\x20\x01\x28\x01\x20\x01";
  jpp_task_executable_t compiled = {.executable = NULL, .portable = true};
  if (!plan->staged->tasks[id].num_ops) return compiled;
  char* code = NULL;
  size_t size = 0;
  FILE* out = open_memstream(&code, &size);
  if (!out) check(jpp_status_make(JPP_OUT_OF_MEMORY, "no memory for a task's code"));
  write_task(out, plan, id);
  fclose(out);
  jpp_compile_request_t request = {.code = code,
                                   .code_size = size,
                                   .format = "mlir",
                                   .options = kOptions,
                                   .options_size = sizeof(kOptions) - 1};
  check(jpp_client_compile(client, &request, &compiled.executable));
  free(code);
  return compiled;
}

// --- Training -------------------------------------------------------------------------

// What argument `name` holds: y = 2 x, and both weights begin with 1.
static float number(const char* name, size_t i) {
  if (strcmp(name, "lr") == 0) return 0.125f;
  if (*name == 'w') return 1;
  return (float)(i % 5) * (*name == 'y' ? 0.5f : 0.25f);
}

static jpp_buffer_t* upload(jpp_client_t* client, const jpp_graph_t* graph, uint32_t arg,
                            uint32_t device) {
  const jpp_value_t* value = &graph->values[graph->args[arg].value];
  size_t count = value->bytes / sizeof(float);
  float* data = (float*)calloc(count, sizeof(*data));
  for (size_t i = 0; i < count; ++i) data[i] = number(value->name, i);
  jpp_host_array_t array = {.data = data,
                            .dtype = JPP_DTYPE_F32,
                            .rank = value->type.ndim,
                            .dims = value->type.dims};
  jpp_buffer_t* buffer = NULL;
  check(jpp_client_buffer_from_host(client, &array, device, &buffer));
  free(data);
  return buffer;
}

static float sum_of(jpp_client_t* client, jpp_buffer_t* buffer) {
  float data[8], sum = 0;
  check(jpp_client_buffer_read(client, buffer, data, sizeof(data)));
  for (size_t i = 0; i < 8; ++i) sum += data[i];
  return sum;
}

typedef struct step {
  jpp_buffer_t** inputs[kMaxRanks];  // as the programs list them
  jpp_buffer_t** outputs[kMaxRanks];
} step_t;

// New weights become the next step's arguments, in the places of the old ones, which the
// step took. Gives the sum of the loss.
static float take_outputs(jpp_client_t* client, const jpp_plan_t* plan, step_t* step) {
  const jpp_graph_t* graph = plan->staged->graph;
  float loss = 0;
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    for (uint32_t o = 0; o < program->num_outputs; ++o) {
      const char* name = graph->outputs[program->outputs[o].output].name;
      jpp_buffer_t* buffer = step->outputs[r][o];
      if (strcmp(name, "loss") == 0) {
        loss += sum_of(client, buffer);
        jpp_client_buffer_destroy(client, buffer);
      }
      for (uint32_t i = 0; i < program->num_inputs; ++i) {
        uint32_t value = graph->args[program->inputs[i].arg].value;
        if (strcmp(graph->values[value].name, name) == 0) step->inputs[r][i] = buffer;
      }
    }
  }
  return loss;
}

static void train(jpp_client_t* client, const jpp_plan_t* plan, jpp_runtime_t* runtime) {
  step_t step;
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    size_t places = program->num_inputs + program->num_outputs;
    step.inputs[r] = (jpp_buffer_t**)calloc(places, sizeof(*step.inputs[r]));
    step.outputs[r] = step.inputs[r] + program->num_inputs;
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      step.inputs[r][i] = upload(client, plan->staged->graph, program->inputs[i].arg, r);
    }
  }
  jpp_step_io_t io = {.inputs = (jpp_buffer_t* const* const*)step.inputs,
                      .outputs = step.outputs};
  for (int i = 0; i < kSteps; ++i) {
    check(jpp_runtime_step(runtime, &io));
    printf("step %d: loss %.5f\n", i, (double)take_outputs(client, plan, &step));
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    for (uint32_t i = 0; i < plan->programs[r].num_inputs; ++i) {
      jpp_client_buffer_destroy(client, step.inputs[r][i]);
    }
    free(step.inputs[r]);
  }
}

// Rank r runs on device r.
static void run(const jpp_plan_t* plan, const char* plugin) {
  static const uint32_t kDevices[kMaxRanks] = {0, 1, 2, 3, 4, 5, 6, 7};
  jpp_client_option_t option = {
      .name = "cpu_device_count", .type = JPP_OPTION_INT64, .int64_value = plan->ranks};
  jpp_pjrt_options_t pjrt = {.struct_size = sizeof(pjrt),
                             .plugin_path = plugin,
                             .options = &option,
                             .option_count = 1};
  jpp_client_t* client = NULL;
  check(jpp_client_create_pjrt(&pjrt, &client));
  uint32_t tasks = plan->staged->num_tasks;
  jpp_task_executable_t* executables =
      (jpp_task_executable_t*)calloc(tasks, sizeof(*executables));
  for (uint32_t t = 0; t < tasks; ++t) executables[t] = compile_task(client, plan, t);
  jpp_runtime_options_t options = {.client = client,
                                   .plan = plan,
                                   .devices_per_rank = 1,
                                   .devices = kDevices,
                                   .executables = executables};
  jpp_runtime_t* runtime = NULL;
  check(jpp_runtime_create(&options, &runtime));
  train(client, plan, runtime);
  jpp_runtime_destroy(runtime);
  for (uint32_t t = 0; t < tasks; ++t) {
    jpp_client_executable_destroy(client, executables[t].executable);
  }
  free(executables);
  jpp_client_destroy(client);
}

int main(int argc, char** argv) {
  const char* plugin = argc > 3 ? argv[3] : getenv("JPP_PLUGIN");
  if (argc < 3 || !plugin) {
    fprintf(stderr, "usage: plan_and_run GRAPH SCHEDULE [PLUGIN]\n");
    return 2;
  }
  size_t length = 0;
  char* text = read_file(argv[1], &length);
  jpp_graph_t* graph = NULL;
  check(jpp_graph_parse(text, length, argv[1], &graph));
  free(text);
  if (graph->num_loops != 1 || graph->ranks > kMaxRanks) {
    check(jpp_status_make(JPP_UNSUPPORTED, "this example takes one loop and 8 ranks"));
  }
  jpp_loop_schedule_t loop = {.built_in = argv[2]};
  jpp_plan_options_t options = {.struct_size = sizeof(options), .loops = &loop};
  jpp_planned_t* planned = NULL;
  check(jpp_plan_graph(graph, &options, &planned));
  report(planned);
  run(planned->plan, plugin);
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
  return 0;
}
