// Measures what a step costs on top of its client calls. Not a test: `meson test
// --benchmark`.
//
//   bench_step [stages [microbatches [steps]]]
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "benchmarks/bare.h"
#include "device/driver_under_test.h"
#include "model.h"

typedef enum way { WAY_BARE, WAY_RUNTIME, WAY_TRACED, WAY_COUNT } way_t;

static double now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static jpp_bare_t* create_bare(const model_t* model) {
  jpp_runtime_options_t options = {.struct_size = sizeof(options),
                                   .client = model->client,
                                   .plan = model->plan,
                                   .devices_per_rank = 1,
                                   .devices = model->devices,
                                   .executables = model->executables};
  jpp_bare_t* bare = NULL;
  ASSERT_OK(jpp_bare_create(&options, &bare));
  return bare;
}

static jpp_status_t* run(model_t* model, const jpp_call_t* call) {
  JPP_RETURN_IF_ERROR(jpp_runtime_call(model->runtime, call));
  return jpp_runtime_await(model->runtime, NULL);
}

static double time_step(model_t* model, jpp_bare_t* bare, way_t way) {
  model_give(model);
  jpp_call_t call = model_wrap(model);
  jpp_runtime_set_tracing(model->runtime, way == WAY_TRACED);
  double begin = now_us();
  ASSERT_OK(way == WAY_BARE ? jpp_bare_call(bare, &call) : run(model, &call));
  double time = now_us() - begin;
  model_unwrap(model, &call);
  model_take_back(model);
  return time;
}

static int compare_times(const void* a, const void* b) {
  double x = *(const double*)a, y = *(const double*)b;
  return x < y ? -1 : x > y;
}

// The variants take turns, so that a loaded machine slows all of them equally.
static void compare(model_t* model, const char* name, uint32_t steps) {
  static const char* const kNames[] = {"bare", "runtime", "runtime, traced"};
  jpp_bare_t* bare = create_bare(model);
  double* times = calloc((size_t)steps * WAY_COUNT, sizeof(*times));
  for (uint32_t i = 0; i < steps; ++i) {
    for (int way = 0; way < WAY_COUNT; ++way) {
      times[(size_t)way * steps + i] = time_step(model, bare, (way_t)way);
    }
  }
  double instructions = (double)jpp_bare_instructions(bare);
  printf("%s: %.0f runs, sends and deletions\n", name, instructions);
  for (int way = 0; way < WAY_COUNT; ++way) {
    qsort(times + (size_t)way * steps, steps, sizeof(*times), compare_times);
    double median = times[(size_t)way * steps + steps / 2];
    printf("  %-16s %9.1f us a step, best %9.1f, %6.2f us an instruction\n", kNames[way],
           median, times[(size_t)way * steps], median / instructions);
  }
  jpp_bare_destroy(bare);
  free(times);
}

static uint32_t number(int argc, char** argv, int at, uint32_t otherwise) {
  return argc > at ? (uint32_t)strtoul(argv[at], NULL, 10) : otherwise;
}

int main(int argc, char** argv) {
  uint32_t stages = number(argc, argv, 1, 4), microbatches = number(argc, argv, 2, 32);
  uint32_t steps = number(argc, argv, 3, 200);
  model_options_t options = {.portable = true};
  char* text = model_chain(stages, stages, microbatches);
  model_t* model = model_create(text, options);
  // The fake keeps dead handles, which slows its steps down, so there are few of them.
  compare(model, "fake", steps < 20 ? steps : 20);
  model_destroy(model);
  options.plugin_path = test_plugin_path();
  if (options.plugin_path) {
    model = model_create(text, options);
    compare(model, "plugin", steps);
    model_destroy(model);
  }
  free(text);
  return 0;
}
