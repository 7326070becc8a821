// Plans a training step, proves the plan, and trains with it on a PJRT plugin for CPUs.
//
//   plan_and_run regression.jpp 1f1b /path/to/pjrt_c_api_cpu_plugin.so
//
// The library decides what each rank does and when; only the caller, here stablehlo.c,
// knows what an op computes.
#include <inttypes.h>
#include <jaxpp/jaxpp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stablehlo.h"

enum {
  kMost = 8,
  kMostDims = 4,
  kSteps = 20
};  // kMost: limit on arguments and on results

// A program that can continue after an error would check jpp_status_code().
static void check(jpp_status_t* status) {
  if (!status) return;
  fprintf(stderr, "plan_and_run: %s\n", jpp_status_message(status));
  exit(1);
}

// Prints the costs of the plan, which is already proved.
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

// jpp_runtime_take() calls it when it copies an array; here an array is a single block.
static jpp_status_t* read_block(void* data, uint32_t block, jpp_host_block_t* out_block) {
  (void)block;
  out_block->data = data;
  return NULL;
}

// Makes an argument with the numbers of this example: y = 2 x, and both weights begin as
// 1. The runtime copies it from the host to the ranks that need it.
static jpp_array_t* take(jpp_runtime_t* runtime, const jpp_graph_t* graph, uint32_t arg) {
  const jpp_value_t* value = &graph->values[graph->args[arg].value];
  float data[4 * 8];
  int64_t bounds[2 * kMostDims] = {0};
  for (int i = 0; i < 4 * 8; ++i) {
    float x = (float)(i % 5) * 0.25f;
    data[i] = *value->name == 'x' ? x : *value->name == 'y' ? 2 * x : 1;
    if (!strcmp(value->name, "lr")) data[i] = 0.125f;
  }
  for (uint32_t i = 0; i < value->type.ndim; ++i) {
    bounds[2 * i + 1] = value->type.dims[i];
  }
  jpp_given_block_t whole = {.rank = JPP_ANY_RANK, .is_local = true, .bounds = bounds};
  jpp_given_t given = {.struct_size = sizeof(given),
                       .home = JPP_HOME_HOST,
                       .dtype = JPP_DTYPE_F32,
                       .ndim = value->type.ndim,
                       .num_blocks = 1,
                       .blocks = &whole};
  jpp_source_t source = {
      .struct_size = sizeof(source), .given = &given, .user = data, .read = read_block};
  jpp_array_t* array = NULL;
  check(jpp_runtime_take(runtime, arg, NULL, &source, &array));
  return array;
}

// The results are promises: only printing one waits for its step.
static void train(const jpp_graph_t* graph, jpp_runtime_t* runtime) {
  jpp_array_t *args[kMost], *results[kMost];
  for (uint32_t a = 0; a < graph->num_args; ++a) {
    args[a] = take(runtime, graph, a);
  }
  for (int step = 0; step < kSteps; ++step) {
    jpp_call_t call = {.struct_size = sizeof(call),
                       .args = args,
                       .num_args = graph->num_args,
                       .results = results,
                       .num_results = graph->num_outputs};
    check(jpp_runtime_call(runtime, &call));
    for (uint32_t o = 0; o < graph->num_outputs; ++o) {
      if (graph->args[o].donated) {  // results are in the order of the arguments
        jpp_array_release(args[o]);
        args[o] = results[o];
        continue;
      }
      float data[8], sum = 0;
      uint32_t rank = jpp_array_layout(results[o])->ranks[0];
      check(jpp_array_read(results[o], rank, 0, data, sizeof(data), NULL));
      for (int k = 0; k < 8; ++k) sum += data[k];
      printf("step %d: %s %.5f\n", step, graph->outputs[o].name, (double)sum);
      jpp_array_release(results[o]);
    }
  }
  for (uint32_t a = 0; a < graph->num_args; ++a) jpp_array_release(args[a]);
}

// A task without ops needs no executable.
static jpp_executable_t* compile(jpp_client_t* client, const jpp_plan_t* plan,
                                 uint32_t task) {
  char* code = NULL;
  if (!plan->staged->tasks[task].num_ops) return NULL;
  check(task_code(plan, task, &code));
  jpp_compile_request_t request = {.struct_size = sizeof(request),
                                   .code = code,
                                   .code_size = strlen(code),
                                   .format = "mlir"};
  jpp_executable_t* executable = NULL;
  check(jpp_client_compile(client, &request, &executable));
  jpp_text_free(code);
  return executable;
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
  jpp_task_executable_t* executables = NULL;
  check(JPP_ALLOC_ARRAY(plan->staged->num_tasks, &executables));
  for (uint32_t t = 0; t < plan->staged->num_tasks; ++t) {
    executables[t].executable = compile(client, plan, t);
    executables[t].portable = true;
  }
  jpp_runtime_options_t options = {.struct_size = sizeof(options),
                                   .client = client,
                                   .plan = plan,
                                   .devices_per_rank = 1,
                                   .executables = executables};
  jpp_runtime_t* runtime = NULL;
  check(jpp_runtime_create(&options, &runtime));
  train(plan->staged->graph, runtime);
  jpp_runtime_destroy(runtime);
  for (uint32_t t = 0; t < plan->staged->num_tasks; ++t) {
    jpp_client_executable_destroy(client, executables[t].executable);
  }
  jpp_free(executables);
  jpp_client_destroy(client);
}

int main(int argc, char** argv) {
  if (argc < 4) {
    fprintf(stderr, "usage: plan_and_run GRAPH SCHEDULE PLUGIN\n");
    return 2;
  }
  jpp_graph_t* graph = NULL;
  check(jpp_graph_read(argv[1], &graph));
  if (graph->num_loops != 1 || graph->num_args > kMost ||
      graph->num_outputs > graph->num_args) {
    check(jpp_status_make(JPP_UNSUPPORTED, "this example takes smaller graphs"));
  }
  jpp_loop_schedule_t loop = {.struct_size = sizeof(loop), .built_in = argv[2]};
  jpp_plan_options_t options = {.struct_size = sizeof(options), .loops = &loop};
  jpp_planned_t* planned = NULL;
  check(jpp_plan_graph(graph, &options, &planned));
  report(planned);
  run(planned->plan, argv[3]);
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
  return 0;
}
