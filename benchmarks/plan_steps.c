// Times the steps of a plan file in two ways, alternately: with the runtime, and with the
// bare loop (bare.h) and the same plugin. benchmarks/steps.py runs it.
//
//   bench_plan FILE PLUGIN TURNS
//
// Prints the number of client calls of a step, then a line per turn: the microseconds of
// the runtime and of the bare loop. It supports ranks of one CPU device each, and steps
// whose results replace their donated arguments.
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "benchmarks/bare.h"
#include "jaxpp/alloc.h"
#include "jaxpp/planfile.h"

typedef struct bench {
  jpp_planfile_t* file;
  const jpp_planfile_contents_t* contents;
  const jpp_graph_t* graph;
  jpp_client_t* client;
  uint32_t* devices;                   // [ranks]
  jpp_planfile_step_t* step;           // its runtime is the first way
  jpp_executable_t** modules;          // [num_modules] for the bare loop
  jpp_task_executable_t* executables;  // [num_tasks]
  jpp_bare_t* bare;                    // the bare loop is the second way
} bench_t;

// The state of one of the two ways.
typedef struct state {
  jpp_array_t** args;     // [num_args]
  jpp_array_t** results;  // [num_outputs]
} state_t;

static void check(jpp_status_t* status) {
  if (!status) return;
  fprintf(stderr, "bench_plan: %s\n", jpp_status_message(status));
  exit(1);
}

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

// --- The two ways ---------------------------------------------------------------------

static void open_step(bench_t* bench, const char* plugin) {
  uint32_t ranks = bench->contents->planned->ranks;
  const jpp_client_option_t client_options[] = {
      {.name = "cpu_device_count", .type = JPP_OPTION_INT64, .int64_value = ranks},
      {.name = "asynchronous", .type = JPP_OPTION_BOOL, .bool_value = false}};
  jpp_pjrt_options_t options = {.struct_size = sizeof(options),
                                .plugin_path = plugin,
                                .options = client_options,
                                .option_count = 2};
  check(jpp_client_create_pjrt(&options, &bench->client));
  check(JPP_ALLOC_ARRAY(ranks, &bench->devices));
  check(jpp_planfile_devices(bench->file, bench->client, ranks, bench->devices));
  check(
      jpp_planfile_step_create(bench->file, bench->client, bench->devices, &bench->step));
}

static void open_bare(bench_t* bench) {
  const jpp_planfile_contents_t* contents = bench->contents;
  uint32_t tasks = contents->planned->staged->num_tasks;
  check(JPP_ALLOC_ARRAY(contents->num_modules, &bench->modules));
  check(JPP_ALLOC_ARRAY(tasks, &bench->executables));
  for (uint32_t m = 0; m < contents->num_modules; ++m) {
    jpp_compile_request_t request = {.struct_size = sizeof(request),
                                     .code = contents->modules[m].data,
                                     .code_size = contents->modules[m].size,
                                     .format = contents->format,
                                     .options = contents->compile_options.data,
                                     .options_size = contents->compile_options.size};
    check(jpp_client_compile(bench->client, &request, &bench->modules[m]));
  }
  for (uint32_t t = 0; t < tasks; ++t) {
    uint32_t module = contents->task_modules[t];
    if (module == JPP_NONE) continue;
    bench->executables[t] =
        (jpp_task_executable_t){.executable = bench->modules[module], .portable = true};
  }
  jpp_runtime_options_t options = {.struct_size = sizeof(options),
                                   .client = bench->client,
                                   .plan = contents->planned->plan,
                                   .devices_per_rank = contents->devices_per_rank,
                                   .devices = bench->devices,
                                   .executables = bench->executables};
  check(jpp_bare_create(&options, &bench->bare));
}

static void call_runtime(const bench_t* bench, state_t* state) {
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = state->args,
                     .num_args = bench->graph->num_args - bench->contents->num_constants,
                     .results = state->results,
                     .num_results = bench->graph->num_outputs};
  check(jpp_planfile_step_call(bench->step, &call));
  check(jpp_runtime_await(jpp_planfile_step_runtime(bench->step), NULL));
}

static void call_bare(const bench_t* bench, state_t* state) {
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = state->args,
                     .num_args = bench->graph->num_args,
                     .results = state->results,
                     .num_results = bench->graph->num_outputs};
  check(jpp_bare_call(bench->bare, &call));
}

// --- Arguments ------------------------------------------------------------------------

// Zeros for the arguments, and the constants of the file.
static void open_state(const bench_t* bench, state_t* state) {
  uint32_t num_args = bench->graph->num_args;
  uint32_t first_constant = num_args - bench->contents->num_constants;
  check(JPP_ALLOC_ARRAY(num_args, &state->args));
  check(JPP_ALLOC_ARRAY(bench->graph->num_outputs, &state->results));
  for (uint32_t a = 0; a < num_args; ++a) {
    const jpp_type_t* type = &bench->graph->values[bench->graph->args[a].value].type;
    void* zeros = NULL;
    check(jpp_alloc(jpp_type_host_bytes(type), &zeros));
    const void* data =
        a < first_constant ? zeros : bench->contents->constants[a - first_constant].data;
    check(jpp_planfile_step_upload(bench->step, a, data, &state->args[a]));
    jpp_free(zeros);
  }
}

// Replaces donated arguments with the last step's results.
static void replace_args(const bench_t* bench, state_t* state) {
  for (uint32_t o = 0; o < bench->graph->num_outputs; ++o) {
    uint32_t next = bench->graph->outputs[o].next, arg = 0;
    while (arg < bench->graph->num_args && bench->graph->args[arg].value != next) ++arg;
    if (next != JPP_NONE && arg < bench->graph->num_args) {
      jpp_array_release(state->args[arg]);
      state->args[arg] = state->results[o];
    } else {
      jpp_array_release(state->results[o]);
    }
    state->results[o] = NULL;
  }
}

static double time_step(const bench_t* bench, state_t* state,
                        void (*call)(const bench_t* bench, state_t* state)) {
  double begin = now_us();
  call(bench, state);
  double time = now_us() - begin;
  replace_args(bench, state);
  return time;
}

static void close_state(const bench_t* bench, state_t* state) {
  for (uint32_t a = 0; a < bench->graph->num_args; ++a) jpp_array_release(state->args[a]);
  jpp_free(state->args);
  jpp_free(state->results);
}

static void close_bench(bench_t* bench) {
  jpp_bare_destroy(bench->bare);
  for (uint32_t m = 0; m < bench->contents->num_modules; ++m) {
    jpp_client_executable_destroy(bench->client, bench->modules[m]);
  }
  jpp_planfile_step_destroy(bench->step);
  jpp_client_destroy(bench->client);
  jpp_planfile_destroy(bench->file);
  jpp_free(bench->modules);
  jpp_free(bench->executables);
  jpp_free(bench->devices);
}

int main(int argc, char** argv) {
  bench_t bench = {0};
  state_t runtime = {0}, bare = {0};
  if (argc != 4) {
    fprintf(stderr, "bench_plan FILE PLUGIN TURNS\n");
    return 2;
  }
  setenv("TF_CPP_MIN_LOG_LEVEL", "2", 0);
  check(jpp_planfile_load(argv[1], &bench.file));
  bench.contents = &bench.file->contents;
  bench.graph = bench.contents->planned->graph;
  open_step(&bench, argv[2]);
  open_bare(&bench);
  open_state(&bench, &runtime);
  open_state(&bench, &bare);
  printf("%" PRIu64 "\n", jpp_bare_instructions(bench.bare));
  time_step(&bench, &runtime, call_runtime);
  time_step(&bench, &bare, call_bare);
  for (int turn = 0; turn < atoi(argv[3]); ++turn) {
    double ours = time_step(&bench, &runtime, call_runtime);
    printf("%.1f %.1f\n", ours, time_step(&bench, &bare, call_bare));
  }
  close_state(&bench, &runtime);
  close_state(&bench, &bare);
  close_bench(&bench);
  return 0;
}
