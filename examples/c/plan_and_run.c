// Plans a training step, proves the plan, and trains with it on a PJRT plugin for CPUs.
//
//   plan_and_run regression.jpp 1f1b /path/to/pjrt_c_api_cpu_plugin.so
//
// The library decides what each rank does and when; what an op computes is known to the
// caller alone, here to stablehlo.c.
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

static jpp_graph_t* read_graph(const char* path) {
  static char text[1 << 16];
  FILE* file = fopen(path, "r");
  size_t length = file ? fread(text, 1, sizeof(text), file) : 0;
  if (!length || length == sizeof(text)) {
    check(
        jpp_status_make(JPP_INVALID_ARGUMENT, "%s: can not read it, or too long", path));
  }
  fclose(file);
  jpp_graph_t* graph = NULL;
  check(jpp_graph_parse(text, length, path, &graph));
  return graph;
}

// What the plan, which is proved, will cost.
static void report(const jpp_planned_t* planned) {
  for (uint32_t r = 0; r < planned->ranks; ++r) {
    printf("rank %" PRIu32 ": peak %" PRIu64 " bytes\n", r,
           planned->report->actors[r].peak_bytes);
  }
  jpp_simulate_options_t options = {.struct_size = sizeof(options),
                                    .rank_cost = {1, 1, 1}};
  jpp_simulation_t* simulation = NULL;
  check(jpp_schedule_simulate(planned->schedules[0], &options, &simulation));
  printf("bubble: %g of %g\n", simulation->bubble_global, simulation->makespan);
  jpp_simulation_destroy(simulation);
}

// An argument with the numbers of this example: y = 2 x, and both weights begin with 1.
static jpp_buffer_t* upload(jpp_client_t* client, const jpp_value_t* value,
                            uint32_t rank) {
  size_t count = value->bytes / sizeof(float);
  float* data = (float*)malloc(count * sizeof(*data));
  for (size_t i = 0; data && i < count; ++i) {
    float x = (float)(i % 5) * 0.25f;
    data[i] = *value->name == 'x' ? x : *value->name == 'y' ? 2 * x : 1;
    if (!strcmp(value->name, "lr")) data[i] = 0.125f;
  }
  jpp_host_array_t array = {.data = data,
                            .dtype = JPP_DTYPE_F32,
                            .rank = value->type.ndim,
                            .dims = value->type.dims};
  jpp_buffer_t* buffer = NULL;
  check(jpp_client_buffer_from_host(client, &array, rank, &buffer));
  free(data);
  return buffer;
}

// An output that is named as an argument is that argument of the next step: a new weight
// comes in the place of the old one, which the step took. Others are printed, as sums.
static void take_outputs(jpp_client_t* client, const jpp_plan_t* plan, uint32_t rank,
                         jpp_buffer_t** inputs, jpp_buffer_t** outputs) {
  const jpp_graph_t* graph = plan->staged->graph;
  const jpp_program_t* program = &plan->programs[rank];
  for (uint32_t o = 0; o < program->num_outputs; ++o) {
    const char* name = graph->outputs[program->outputs[o].output].name;
    uint32_t i = 0;
    for (; i < program->num_inputs; ++i) {
      uint32_t value = graph->args[program->inputs[i].arg].value;
      if (!strcmp(graph->values[value].name, name)) break;
    }
    if (i < program->num_inputs) {
      inputs[i] = outputs[o];
      continue;
    }
    float data[8] = {0}, sum = 0;
    check(jpp_client_buffer_read(client, outputs[o], data, sizeof(data)));
    for (size_t k = 0; k < 8; ++k) sum += data[k];
    printf("%s %.5f\n", name, (double)sum);
    jpp_client_buffer_destroy(client, outputs[o]);
  }
}

static void train(jpp_client_t* client, const jpp_plan_t* plan, jpp_runtime_t* runtime) {
  const jpp_graph_t* graph = plan->staged->graph;
  jpp_buffer_t **inputs[kMaxRanks], **outputs[kMaxRanks];  // as the programs list them
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    inputs[r] = (jpp_buffer_t**)calloc(program->num_inputs, sizeof(*inputs[r]));
    outputs[r] = (jpp_buffer_t**)calloc(program->num_outputs, sizeof(*outputs[r]));
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      uint32_t value = graph->args[program->inputs[i].arg].value;
      inputs[r][i] = upload(client, &graph->values[value], r);
    }
  }
  jpp_step_io_t io = {.inputs = (jpp_buffer_t* const* const*)inputs, .outputs = outputs};
  for (int step = 0; step < kSteps; ++step) {
    check(jpp_runtime_step(runtime, &io));
    printf("step %d: ", step);
    for (uint32_t r = 0; r < plan->ranks; ++r) {
      take_outputs(client, plan, r, inputs[r], outputs[r]);
    }
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    for (uint32_t i = 0; i < plan->programs[r].num_inputs; ++i) {
      jpp_client_buffer_destroy(client, inputs[r][i]);
    }
    free(inputs[r]);
    free(outputs[r]);
  }
}

// Rank r runs on device r.
static void run(const jpp_plan_t* plan, const char* plugin) {
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
  for (uint32_t t = 0; t < tasks; ++t) {
    if (!plan->staged->tasks[t].num_ops) continue;
    char* code = task_code(plan, t);
    if (!code) check(jpp_status_make(JPP_OUT_OF_MEMORY, "no memory for a task's code"));
    jpp_compile_request_t request = {
        .code = code, .code_size = strlen(code), .format = "mlir"};
    check(jpp_client_compile(client, &request, &executables[t].executable));
    executables[t].portable = true;
    free(code);
  }
  static const uint32_t kDevices[kMaxRanks] = {0, 1, 2, 3, 4, 5, 6, 7};
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
  if (argc < 4) {
    fprintf(stderr, "usage: plan_and_run GRAPH SCHEDULE PLUGIN\n");
    return 2;
  }
  jpp_graph_t* graph = read_graph(argv[1]);
  if (graph->num_loops != 1 || graph->ranks > kMaxRanks) {
    check(jpp_status_make(JPP_UNSUPPORTED, "this example takes one loop and 8 ranks"));
  }
  jpp_loop_schedule_t loop = {.built_in = argv[2]};
  jpp_plan_options_t options = {.struct_size = sizeof(options), .loops = &loop};
  jpp_planned_t* planned = NULL;
  check(jpp_plan_graph(graph, &options, &planned));
  report(planned);
  run(planned->plan, argv[3]);
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
  return 0;
}
