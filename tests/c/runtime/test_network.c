// One plan in several processes, each of which is a thread here with its client,
// transport and runtime, over the tests' network.
//
//     test_runtime_network [DRIVER [plugin]]
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/driver_under_test.h"
#include "device/test_store.h"
#include "fake/transport.h"
#include "model.h"

enum { kProcesses = 3, kSlices = 2, kOutputs = 16, kSteps = 8, kHangAt = 6 };
enum { kMostProcesses = kProcesses * kSlices };
enum { kStubDevices = 4 };  // of the library that replaces CUDA

static const uint32_t kRankProcess[kProcesses] = {0, 1, 2};

static const char kToken[] = "a token of the tests";

// The transport's.
static const char* g_driver = "fake";
// NULL: the fake device.
static const char* g_plugin;

typedef struct process {
  uint32_t index;
  const char* text;
  model_options_t options;
  jpp_transport_t* network;
  uint32_t rank_process[kProcesses];  // of a slice
  uint32_t fail_at_step;              // 0: never
  bool late;                          // the failure appears after the call
  uint32_t stop_before;  // a step that it never calls while it stays alive; 0: none
  uint32_t hang_at;      // a step at which its devices begin no work; 0: none
  atomic_uint* ended;    // processes
  pthread_t thread;
  float numbers[kOutputs];  // of its own ranks' outputs, after the last step; else -1
  jpp_status_t* status;     // the step that failed
} process_t;

static bool sends_from_devices(void) { return !strcmp(g_driver, "nccl-fake"); }

// A transport uses the memory of one device, and programs for a plugin use one device.
static uint32_t most_per_rank(void) { return sends_from_devices() || g_plugin ? 1 : 2; }

// --- Networks -------------------------------------------------------------------------

// Sends ten heartbeats in `peer_ms`; 0: the default.
static void connect_in(process_t* processes, uint32_t count, uint32_t peer_ms) {
  char address[kMostProcesses][32];
  for (uint32_t p = 0; p < count; ++p) {
    snprintf(address[p], sizeof(address[p]), "process %u", p);
    jpp_transport_options_t options = {.struct_size = sizeof(options),
                                       .driver = g_driver,
                                       .process = p,
                                       .num_processes = count,
                                       .address = address[p],
                                       .token = kToken,
                                       .token_size = sizeof(kToken),
                                       .peer_timeout_ms = peer_ms,
                                       .device = p % kStubDevices};
    ASSERT_OK(test_transport_create(&options, &processes[p].network));
  }
  for (uint32_t p = 0; p < count * count; ++p) {
    uint32_t from = p / count, to = p % count;
    const void* data = NULL;
    size_t size = 0;
    if (from == to) continue;
    jpp_transport_address(processes[to].network, &data, &size);
    ASSERT_OK(jpp_transport_connect(processes[from].network, to, data, size));
  }
}

static void connect(process_t* processes, uint32_t count, uint32_t delay, uint64_t seed) {
  connect_in(processes, count, 0);
  for (uint32_t p = 0; p < count && delay > 1; ++p) {
    jpp_transport_fake_set_delay(processes[p].network, delay, seed + p);
  }
}

static void connect_all(process_t* processes, uint32_t delay, uint64_t seed) {
  connect(processes, kProcesses, delay, seed);
}

// --- A process ------------------------------------------------------------------------

static void read_numbers(const model_t* model, jpp_array_t* const* results,
                         float* numbers) {
  for (uint32_t o = 0; o < model->graph->num_outputs; ++o) {
    bool here = jpp_array_layout(results[o])->num_ranks > 0;
    numbers[o] = here ? model_read_array(results[o]) : -1;
  }
}

// Stays alive until the others are done.
static void stand_still(const process_t* process) {
  while (atomic_load(process->ended) < kProcesses - 1) sched_yield();
}

static jpp_status_t* take_step(const process_t* process, model_t* model,
                               jpp_array_t** args, jpp_array_t** results, uint32_t step) {
  if (step == process->fail_at_step) {
    jpp_fake_failure_t failure = {.at = 5, .async = process->late};
    ASSERT_OK(jpp_fake_set_failure(model->client, failure));
  }
  if (step == process->hang_at) {
    // Earlier steps show how long a step takes.
    ASSERT_OK(jpp_runtime_await(model->runtime, NULL));
    ASSERT_OK(jpp_fake_set_held(model->client, true));
  }
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = args,
                     .num_args = model->graph->num_args,
                     .results = results,
                     .num_results = model->graph->num_outputs};
  return jpp_runtime_call(model->runtime, &call);
}

// The chain's new weights replace the old ones.
static void train(process_t* process, model_t* model) {
  uint32_t num_args = model->graph->num_args, weights = num_args - 1;
  uint32_t num_results = model->graph->num_outputs;
  jpp_array_t *args[kOutputs], *results[kOutputs];
  for (uint32_t a = 0; a < num_args; ++a) {
    args[a] = model_array(model, a, process->index, (float)a, 1.0f / 16);
  }
  for (uint32_t step = 1; step <= kSteps && !process->status; ++step) {
    if (step == process->stop_before) {
      stand_still(process);
      break;
    }
    process->status = take_step(process, model, args, results, step);
    if (process->status) break;
    if (step == kSteps) {
      process->status = jpp_runtime_await(model->runtime, NULL);
      if (!process->status) read_numbers(model, results, process->numbers);
    }
    for (uint32_t o = 0; o < num_results; ++o) {
      if (o < weights) {
        jpp_array_release(args[o]);
        args[o] = results[o];
      } else {
        jpp_array_release(results[o]);
      }
    }
  }
  if (!process->status) process->status = jpp_runtime_await(model->runtime, NULL);
  if (process->ended && !process->stop_before) atomic_fetch_add(process->ended, 1);
  if (process->hang_at) {
    assert_true(jpp_runtime_has_given_up(model->runtime));
    ASSERT_OK(jpp_fake_set_held(model->client, false));
  }
  for (uint32_t a = 0; a < num_args; ++a) jpp_array_release(args[a]);
}

static void* run_process(void* user) {
  process_t* process = user;
  model_t* model = model_plan(process->text, process->options);
  // Another process may fail in its first step before this one has a runtime.
  process->status = model_try_create_runtime(model);
  if (!process->status) train(process, model);
  model_destroy(model);
  return NULL;
}

static void start(process_t* process, uint32_t index, const char* text,
                  model_options_t options) {
  process->index = index;
  process->text = text;
  process->options = options;
  process->options.steps_in_flight = 3;
  process->options.network = process->network;
  assert_int_equal(pthread_create(&process->thread, NULL, run_process, process), 0);
}

static void start_all(process_t* processes, const char* text, model_options_t options) {
  options.rank_process = kRankProcess;
  for (uint32_t p = 0; p < kProcesses; ++p) {
    options.process = p;
    start(&processes[p], p, text, options);
  }
}

static void join_all(process_t* processes) {
  for (uint32_t p = 0; p < kProcesses; ++p) pthread_join(processes[p].thread, NULL);
}

static void run_all(process_t* processes, const char* text, model_options_t options) {
  start_all(processes, text, options);
  join_all(processes);
}

// --- Alike ----------------------------------------------------------------------------

// Runs the same training in one process.
static void train_alone(const char* text, model_options_t options, float* numbers) {
  process_t process = {.index = 0};
  model_t* model = model_create(text, options);
  train(&process, model);
  ASSERT_OK(process.status);
  memcpy(numbers, process.numbers, sizeof(process.numbers));
  model_destroy(model);
}

static void test_processes_train_as_one(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  static const model_options_t kSizes[] = {
      {.devices_per_rank = 1},
      {.devices_per_rank = 2},
      {.devices_per_rank = 2, .odd_have_one = true},
  };
  for (size_t i = 0; i < sizeof(kSizes) / sizeof(*kSizes); ++i) {
    if (kSizes[i].devices_per_rank > most_per_rank()) continue;
    model_options_t options = {.device_threads = g_plugin ? 0 : 2,
                               .latency_us = g_plugin ? 0 : 20,
                               .devices_per_rank = kSizes[i].devices_per_rank,
                               .odd_have_one = kSizes[i].odd_have_one,
                               .plugin_path = g_plugin};
    float expected[kOutputs];
    train_alone(text, options, expected);
    for (uint32_t delay = 1; delay < 12; delay += 5) {
      process_t processes[kProcesses] = {0};
      connect_all(processes, delay, delay);
      run_all(processes, text, options);
      for (uint32_t o = 0; o < 7; ++o) {
        uint32_t seen = 0;
        for (uint32_t p = 0; p < kProcesses; ++p) {
          ASSERT_OK(processes[p].status);
          if (processes[p].numbers[o] == -1) continue;
          assert_float_equal(processes[p].numbers[o], expected[o], 0);
          ++seen;
        }
        assert_true(seen > 0);
      }
    }
  }
  free(text);
}

// --- Ranks that span nodes ------------------------------------------------------------

// Each rank has devices in several processes. The processes with the devices at the same
// positions of each rank form a slice: they send each other their shards, and all slices
// execute the tasks together. `per_slice`: a process for each rank, or one process for
// all.
static void run_slices(process_t* processes, uint32_t per_slice, const char* text,
                       model_options_t options) {
  test_store_t store;
  test_store_init(&store);
  jpp_key_value_store_t calls = test_store_calls(&store);
  options.collective = true;
  options.slices = kSlices;
  options.processes = per_slice;
  options.store = &calls;
  if (per_slice > 1) connect(processes, kSlices * per_slice, 5, 1);
  for (uint32_t p = 0; p < kSlices * per_slice; ++p) {
    uint32_t first = p / per_slice * per_slice;
    for (uint32_t r = 0; r < kProcesses; ++r) processes[p].rank_process[r] = first + r;
    options.slice = p / per_slice;
    options.process = p;
    options.rank_process = per_slice > 1 ? processes[p].rank_process : NULL;
    start(&processes[p], p % per_slice, text, options);
  }
  for (uint32_t p = 0; p < kSlices * per_slice; ++p) {
    pthread_join(processes[p].thread, NULL);
  }
  test_store_deinit(&store);
}

// The outputs of a process equal those of the training in one process.
static uint32_t check_numbers(const process_t* process, const float* expected) {
  uint32_t seen = 0;
  ASSERT_OK(process->status);
  for (uint32_t o = 0; o < 7; ++o) {
    if (process->numbers[o] == -1) continue;
    assert_float_equal(process->numbers[o], expected[o], 0);
    ++seen;
  }
  return seen;
}

static void test_ranks_that_span_nodes_train_as_one(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  for (uint32_t at = 0; at < 8; ++at) {
    uint32_t per_rank = 1 + at % most_per_rank(), per_slice = at & 4 ? 1 : kProcesses;
    model_options_t options = {.device_threads = at & 2,
                               .devices_per_rank = per_rank * kSlices,
                               .collective = true};
    float expected[kOutputs], plain[kOutputs];
    train_alone(text, options, expected);
    options.collective = false;
    train_alone(text, options, plain);
    assert_float_not_equal(plain[0], expected[0], 0);
    options.devices_per_rank = per_rank;
    process_t processes[kMostProcesses] = {0};
    run_slices(processes, per_slice, text, options);
    for (uint32_t s = 0; s < kSlices; ++s) {
      uint32_t seen = 0;
      for (uint32_t p = 0; p < per_slice; ++p) {
        seen += check_numbers(&processes[s * per_slice + p], expected);
      }
      assert_true(seen >= 7);
    }
  }
  free(text);
}

// A process may notice that another one is gone before it learns why.
static void test_a_failure_of_a_node_is_everybodys(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  for (uint32_t at = 0; at < kMostProcesses; ++at) {
    process_t processes[kMostProcesses] = {0};
    processes[at].fail_at_step = 2;
    processes[at].late = at % 2;
    run_slices(processes, kProcesses, text, (model_options_t){.device_threads = 1});
    for (uint32_t p = 0; p < kMostProcesses; ++p) {
      assert_non_null(processes[p].status);
      const char* message = jpp_status_message(processes[p].status);
      bool told = strstr(message, "injected failure") ||
                  strstr(message, "has destroyed its client");
      if (!told) fail_msg("process %u: %s", p, message);
      jpp_status_free(processes[p].status);
    }
  }
  free(text);
}

// --- Failures -------------------------------------------------------------------------

static void test_a_failure_is_everybodys(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  for (uint32_t at = 0; at < 6; ++at) {
    process_t processes[kProcesses] = {0};
    processes[at % kProcesses].fail_at_step = 2 + at;
    processes[at % kProcesses].late = at >= 3;
    connect_all(processes, 1 + at, at);
    run_all(processes, text, (model_options_t){.device_threads = 1});
    for (uint32_t p = 0; p < kProcesses; ++p) {
      assert_non_null(processes[p].status);
      const char* message = jpp_status_message(processes[p].status);
      if (!strstr(message, "injected failure") || !strstr(message, ", instruction ")) {
        fail_msg("process %u: %s", p, message);
      }
      jpp_status_free(processes[p].status);
    }
  }
  free(text);
}

static void test_a_process_that_stands_still_is_named(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  atomic_uint ended = 0;
  process_t processes[kProcesses] = {0};
  for (uint32_t p = 0; p < kProcesses; ++p) processes[p].ended = &ended;
  processes[1].stop_before = 3;
  connect_all(processes, 1, 0);
  run_all(processes, text,
          (model_options_t){.device_threads = 1, .stall_timeout_ms = 600});
  assert_null(processes[1].status);  // it did not ask
  for (uint32_t p = 0; p < kProcesses; p += 2) {
    assert_non_null(processes[p].status);
    assert_int_equal(jpp_status_code(processes[p].status), JPP_PEER_ERROR);
    const char* message = jpp_status_message(processes[p].status);
    if (!strstr(message, "other processes have sent nothing for 0.6 s") ||
        !strstr(message, "(in process 1)")) {
      fail_msg("process %u: %s", p, message);
    }
    jpp_status_free(processes[p].status);
  }
  free(text);
}

// The devices of one process hang in a step that all of them have called. The first
// process whose wait reaches the limit names the process and the task, and all others get
// that message.
static void test_a_device_that_hangs_is_named(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  for (uint32_t at = 0; at < kProcesses; ++at) {
    process_t processes[kProcesses] = {0};
    char expected[128];
    processes[at].hang_at = kHangAt;
    connect_in(processes, kProcesses, 1000);
    run_all(processes, text,
            (model_options_t){.device_threads = 1, .step_timeout_ms = 300});
    snprintf(expected, sizeof(expected),
             "rank %u, whose devices have not finished step %d: instruction", at,
             kHangAt);
    for (uint32_t p = 0; p < kProcesses; ++p) {
      assert_non_null(processes[p].status);
      assert_int_equal(jpp_status_code(processes[p].status), JPP_PEER_ERROR);
      const char* message = jpp_status_message(processes[p].status);
      if (!strstr(message, "(the longest of JPP_STEP_TIMEOUT, 0.3 s; a step, ") ||
          !strstr(message, expected)) {
        fail_msg("process %u, %u hangs: %s", p, at, message);
      }
      jpp_status_free(processes[p].status);
    }
  }
  free(text);
}

static void test_a_transport_knows_one_device(void** state) {
  (void)state;
  static const uint32_t kTwoAndOne[kProcesses] = {0, 0, 1};
  process_t processes[2] = {0};
  char* text = model_chain(3, 3, 4);
  connect_in(processes, 2, 100);
  model_t* model = model_plan(text, (model_options_t){.rank_process = kTwoAndOne,
                                                      .network = processes[0].network});
  ASSERT_FAILS(model_try_create_runtime(model), JPP_UNSUPPORTED,
               "expected one device in each process, as messages between devices "
               "require, found devices ");
  model_destroy(model);
  jpp_transport_destroy(processes[1].network);
  free(text);
}

static void test_a_network_is_needed(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  model_t* model = model_plan(text, (model_options_t){.rank_process = kRankProcess});
  ASSERT_FAILS(model_try_create_runtime(model), JPP_INVALID_ARGUMENT,
               "expected a network of bytes");
  model_destroy(model);
  free(text);
}

int main(int argc, char** argv) {
  if (argc > 1) g_driver = argv[1];
  if (argc > 2) {
    if (test_skip_without_plugin()) return 0;
    g_plugin = test_plugin_path();
  }
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_processes_train_as_one),
      cmocka_unit_test(test_ranks_that_span_nodes_train_as_one),
      cmocka_unit_test(test_a_failure_of_a_node_is_everybodys),
      cmocka_unit_test(test_a_failure_is_everybodys),
      cmocka_unit_test(test_a_process_that_stands_still_is_named),
      cmocka_unit_test(test_a_device_that_hangs_is_named),
      cmocka_unit_test(test_a_network_is_needed),
      cmocka_unit_test(test_a_transport_knows_one_device),
  };
  // The last one uses device memory; all but the first run on the fake device.
  size_t count = sizeof(tests) / sizeof(*tests) - !sends_from_devices();
  if (g_plugin) count = 1;
  return _cmocka_run_group_tests("tests", tests, count, NULL, NULL);
}
