// Nodes of the fake device: clients that find each other through a key-value store and
// run programs over the devices of all. Each node runs in a thread, in place of a
// process.
#include <pthread.h>

#include "base/alloc.h"
#include "driver_under_test.h"
#include "test_store.h"

enum { kMostNodes = 5, kMostDevices = 4 };

// --- Nodes ----------------------------------------------------------------------------

typedef struct node {
  struct job* job;
  uint32_t id;
  jpp_fake_options_t options;
  jpp_client_t* client;
  jpp_status_t* status;
  uint32_t seed;
  uint32_t first;  // id of its first device
} node_t;

typedef struct job {
  test_store_t store;
  uint32_t num_nodes;
  uint32_t num_devices;  // over all nodes
  node_t nodes[kMostNodes];
} job_t;

static void job_init(job_t* job, uint32_t num_nodes) {
  *job = (job_t){.num_nodes = num_nodes};
  test_store_init(&job->store);
  for (uint32_t i = 0; i < num_nodes; ++i) {
    node_t* node = &job->nodes[i];
    node->job = job;
    node->id = i;
    node->options = (jpp_fake_options_t){.struct_size = sizeof(node->options),
                                         .device_count = 1,
                                         .node_id = i,
                                         .num_nodes = num_nodes};
  }
}

static void* create_main(void* user) {
  node_t* node = user;
  // Destroyed after the call: the client must have copied it.
  jpp_key_value_store_t store = test_store_calls(&node->job->store);
  node->options.store = &store;
  node->status = jpp_client_create_fake(&node->options, &node->client);
  memset(&store, 0, sizeof(store));
  return NULL;
}

// Runs a function for every node, each in a separate thread.
static void on_nodes(job_t* job, void* (*function)(void* node)) {
  pthread_t threads[kMostNodes];
  for (uint32_t i = 0; i < job->num_nodes; ++i) {
    assert_int_equal(pthread_create(&threads[i], NULL, function, &job->nodes[i]), 0);
  }
  for (uint32_t i = 0; i < job->num_nodes; ++i) pthread_join(threads[i], NULL);
}

static void job_start(job_t* job) {
  on_nodes(job, create_main);
  job->num_devices = 0;
  for (uint32_t i = 0; i < job->num_nodes; ++i) {
    ASSERT_OK(job->nodes[i].status);
    job->nodes[i].first = job->num_devices;
    job->num_devices += job->nodes[i].options.device_count;
  }
}

static void node_destroy(node_t* node) {
  jpp_client_destroy(node->client);
  node->client = NULL;
}

static void job_end(job_t* job) {
  for (uint32_t i = 0; i < job->num_nodes; ++i) node_destroy(&job->nodes[i]);
  test_store_deinit(&job->store);
}

// One node's part of an execution. Its functions return statuses instead of asserting,
// because they may run in a thread.
typedef struct part {
  jpp_executable_t* executable;
  uint32_t rows;
  jpp_buffer_t* args[kMostDevices];
  jpp_buffer_t* results[kMostDevices];
  jpp_event_t* events[kMostDevices];
} part_t;

// Over these devices, by id.
static jpp_status_t* part_compile(const node_t* node, const char* text,
                                  const uint32_t* ids, uint32_t count, part_t* part) {
  const jpp_client_info_t* info = jpp_client_info(node->client);
  uint32_t devices[kMostNodes * kMostDevices];
  for (uint32_t i = 0; i < count; ++i) {
    for (uint32_t k = 0; k < info->global_device_count; ++k) {
      if ((uint32_t)info->global_devices[k].id == ids[i]) devices[i] = k;
    }
  }
  jpp_compile_request_t request = {.struct_size = sizeof(request),
                                   .code = text,
                                   .code_size = strlen(text),
                                   .format = "fake",
                                   .devices = devices,
                                   .device_count = count};
  return jpp_client_compile(node->client, &request, &part->executable);
}

static bool is_own(const node_t* node, uint32_t id) {
  return id >= node->first && id < node->first + node->options.device_count;
}

// Every device contributes an f32[2]: its id and the step.
static jpp_status_t* part_execute(const node_t* node, const uint32_t* ids, uint32_t count,
                                  uint32_t step, part_t* part) {
  jpp_buffer_t* const* args[kMostDevices];
  jpp_buffer_t** results[kMostDevices];
  part->rows = 0;
  for (uint32_t i = 0; i < count; ++i) {
    if (!is_own(node, ids[i])) continue;
    float data[2] = {(float)ids[i], (float)step};
    int64_t dims[1] = {2};
    jpp_host_array_t array = {.struct_size = sizeof(array),
                              .data = data,
                              .dtype = JPP_DTYPE_F32,
                              .rank = 1,
                              .dims = dims};
    JPP_RETURN_IF_ERROR(jpp_client_buffer_from_host(
        node->client, &array, ids[i] - node->first, &part->args[part->rows]));
    args[part->rows] = &part->args[part->rows];
    results[part->rows] = &part->results[part->rows];
    ++part->rows;
  }
  jpp_execute_t execute = {.struct_size = sizeof(execute),
                           .executable = part->executable,
                           .device_count = part->rows,
                           .arg_count = 1,
                           .result_count = 1,
                           .device = JPP_DEVICE_COMPILED,
                           .args = args,
                           .results = results,
                           .events = part->events};
  return jpp_client_execute(node->client, &execute);
}

// All devices get the same sums, which are exact.
static jpp_status_t* part_check(const node_t* node, const uint32_t* ids, uint32_t count,
                                uint32_t step, const part_t* part) {
  float sum = 0;
  for (uint32_t i = 0; i < count; ++i) sum += (float)ids[i];
  for (uint32_t row = 0; row < part->rows; ++row) {
    float data[2];
    JPP_RETURN_IF_ERROR(
        jpp_client_buffer_read(node->client, part->results[row], data, sizeof(data)));
    if (data[0] == sum && data[1] == (float)(step * count)) continue;
    return jpp_status_make(JPP_EXECUTION_ERROR, "expected %g, found %g of row %u",
                           (double)sum, (double)data[0], row);
  }
  return NULL;
}

static void part_free(const node_t* node, part_t* part) {
  for (uint32_t row = 0; row < part->rows; ++row) {
    jpp_client_buffer_destroy(node->client, part->args[row]);
    jpp_client_buffer_destroy(node->client, part->results[row]);
    jpp_client_event_destroy(node->client, part->events[row]);
  }
  jpp_client_executable_destroy(node->client, part->executable);
  *part = (part_t){0};
}

static const char kAllSum[] = "f32[2] = all_sum 0";
static const char kOther[] = "f32[2] = all_sum 0 # another program";

// --- Tests ----------------------------------------------------------------------------

static void test_devices_of_all_nodes(void** state) {
  (void)state;
  job_t job;
  job_init(&job, 3);
  for (uint32_t i = 0; i < 3; ++i) job.nodes[i].options.device_count = i + 1;
  job_start(&job);
  for (uint32_t n = 0; n < 3; ++n) {
    const jpp_client_info_t* info = jpp_client_info(job.nodes[n].client);
    assert_int_equal(info->node_id, n);
    assert_int_equal(info->device_count, n + 1);
    assert_int_equal(info->global_device_count, 6);
    bool seen[6] = {false};
    for (uint32_t i = 0; i < 6; ++i) {
      const jpp_global_device_t* device = &info->global_devices[i];
      assert_false(seen[device->id]);
      seen[device->id] = true;
      assert_int_equal(device->node, device->id == 0 ? 0 : device->id < 3 ? 1 : 2);
      assert_int_equal(i < info->device_count, device->node == n);
      if (i < info->device_count) assert_int_equal(device->id, info->devices[i].id);
      if (i > info->device_count) assert_true(device->id > device[-1].id);
    }
  }
  job_end(&job);
}

static void test_a_client_without_nodes_has_its_own_devices(void** state) {
  (void)state;
  jpp_client_t* client = test_client_create("fake");
  const jpp_client_info_t* info = jpp_client_info(client);
  assert_int_equal(info->global_device_count, info->device_count);
  for (uint32_t i = 0; i < info->device_count; ++i) {
    assert_int_equal(info->global_devices[i].id, info->devices[i].id);
    assert_int_equal(info->global_devices[i].node, 0);
  }
  jpp_client_destroy(client);
}

static uint32_t next_random(uint32_t* seed) {
  *seed = *seed * 1664525u + 1013904223u;
  return *seed >> 8;
}

// Draws some of all devices in random order; every node draws the same from one seed.
static uint32_t draw_devices(const job_t* job, uint32_t* seed, uint32_t* ids) {
  uint32_t count = job->num_devices;
  for (uint32_t i = 0; i < count; ++i) ids[i] = i;
  for (uint32_t i = count; i-- > 1;) {
    uint32_t k = next_random(seed) % (i + 1), other = ids[k];
    ids[k] = ids[i];
    ids[i] = other;
  }
  return 1 + next_random(seed) % count;
}

enum { kSteps = 12 };

// Issues all executions and checks the results once they are done.
static void* train_main(void* user) {
  node_t* node = user;
  part_t parts[kSteps] = {0};
  uint32_t ids[kSteps][kMostNodes * kMostDevices], counts[kSteps];
  for (uint32_t step = 0; step < kSteps && !node->status; ++step) {
    bool takes_part = false;
    counts[step] = draw_devices(node->job, &node->seed, ids[step]);
    for (uint32_t i = 0; i < counts[step]; ++i) takes_part |= is_own(node, ids[step][i]);
    if (!takes_part) continue;
    node->status = part_compile(node, kAllSum, ids[step], counts[step], &parts[step]);
    if (node->status) break;
    node->status = part_execute(node, ids[step], counts[step], step, &parts[step]);
  }
  for (uint32_t step = 0; step < kSteps && !node->status; ++step) {
    node->status = part_check(node, ids[step], counts[step], step, &parts[step]);
  }
  for (uint32_t step = 0; step < kSteps; ++step) part_free(node, &parts[step]);
  return NULL;
}

static void test_sums_over_random_nodes(void** state) {
  (void)state;
  uint32_t seed = 1;
  for (uint32_t round = 0; round < 40; ++round) {
    job_t job;
    job_init(&job, 1 + next_random(&seed) % kMostNodes);
    for (uint32_t i = 0; i < job.num_nodes; ++i) {
      jpp_fake_options_t* options = &job.nodes[i].options;
      options->device_count = 1 + next_random(&seed) % kMostDevices;
      options->threads = next_random(&seed) % 4;
      options->latency_us = next_random(&seed) % 200;
      job.nodes[i].seed = round;
    }
    job_start(&job);
    on_nodes(&job, train_main);
    for (uint32_t i = 0; i < job.num_nodes; ++i) {
      ASSERT_OK(job.nodes[i].status);
      jpp_fake_stats_t stats;
      ASSERT_OK(jpp_fake_stats(job.nodes[i].client, &stats));
      assert_int_equal(stats.live_buffers + stats.live_events + stats.live_executables,
                       0);
      assert_int_equal(stats.live_bytes + stats.misuses, 0);
    }
    job_end(&job);
  }
}

static const uint32_t kBoth[2] = {0, 1};

static void start_two(job_t* job, uint32_t threads) {
  job_init(job, 2);
  for (uint32_t i = 0; i < 2; ++i) job->nodes[i].options.threads = threads;
  job_start(job);
}

static bool is_ready(const node_t* node, jpp_event_t* event) {
  bool ready = false;
  ASSERT_OK(jpp_client_event_is_ready(node->client, event, &ready));
  return ready;
}

// A program that depends on a collective waits with it, also without workers.
static void test_nothing_is_done_before_all_nodes_execute(void** state) {
  (void)state;
  job_t job;
  part_t parts[2] = {0}, local = {0};
  start_two(&job, 0);
  for (uint32_t i = 0; i < 2; ++i) {
    ASSERT_OK(part_compile(&job.nodes[i], kAllSum, kBoth, 2, &parts[i]));
  }
  node_t* node = &job.nodes[0];
  ASSERT_OK(part_execute(node, kBoth, 2, 7, &parts[0]));
  assert_false(is_ready(node, parts[0].events[0]));
  ASSERT_OK(part_compile(node, "f32[2] = scale 0 2", kBoth, 1, &local));
  test_call_t call = {.executable = local.executable,
                      .device = JPP_DEVICE_COMPILED,
                      .arg_count = 1,
                      .result_count = 1,
                      .args = {parts[0].results[0]},
                      .want_event = true};
  ASSERT_OK(test_call(node->client, &call));
  assert_false(is_ready(node, call.event));
  ASSERT_OK(part_execute(&job.nodes[1], kBoth, 2, 7, &parts[1]));
  assert_true(is_ready(node, parts[0].events[0]));
  float data[2];
  ASSERT_OK(jpp_client_buffer_read(node->client, call.results[0], data, sizeof(data)));
  assert_float_equal(data[0], 2, 0);
  assert_float_equal(data[1], 28, 0);
  jpp_client_buffer_destroy(node->client, call.results[0]);
  jpp_client_event_destroy(node->client, call.event);
  part_free(node, &local);
  for (uint32_t i = 0; i < 2; ++i) part_free(&job.nodes[i], &parts[i]);
  job_end(&job);
}

static void test_nodes_must_execute_the_same_programs(void** state) {
  (void)state;
  for (uint32_t threads = 0; threads < 3; ++threads) {
    job_t job;
    part_t parts[2] = {0}, again[2] = {0};
    start_two(&job, threads);
    for (uint32_t i = 0; i < 2; ++i) {
      node_t* node = &job.nodes[i];
      ASSERT_OK(part_compile(node, i ? kOther : kAllSum, kBoth, 2, &parts[i]));
      ASSERT_OK(part_execute(node, kBoth, 2, 1, &parts[i]));
    }
    for (uint32_t i = 0; i < 2; ++i) {
      ASSERT_FAILS(
          jpp_client_event_await(job.nodes[i].client, parts[i].events[0]),
          JPP_EXECUTION_ERROR,
          "execution 0 over 2 devices is of one program on node 0 and of another "
          "one on node 1");
    }
    // The next executions are of one program, and succeed.
    for (uint32_t i = 0; i < 2; ++i) {
      ASSERT_OK(part_compile(&job.nodes[i], kAllSum, kBoth, 2, &again[i]));
      ASSERT_OK(part_execute(&job.nodes[i], kBoth, 2, 2, &again[i]));
    }
    for (uint32_t i = 0; i < 2; ++i) {
      ASSERT_OK(part_check(&job.nodes[i], kBoth, 2, 2, &again[i]));
      part_free(&job.nodes[i], &parts[i]);
      part_free(&job.nodes[i], &again[i]);
    }
    job_end(&job);
  }
}

static void test_a_failure_on_one_node_is_one_on_all(void** state) {
  (void)state;
  for (uint32_t first = 0; first < 2; ++first) {
    job_t job;
    part_t parts[2] = {0};
    start_two(&job, 1);
    for (uint32_t i = 0; i < 2; ++i) {
      ASSERT_OK(part_compile(&job.nodes[i], kAllSum, kBoth, 2, &parts[i]));
    }
    // The second counted call from now, which follows the upload.
    jpp_fake_failure_t failure = {.at = 2, .async = true};
    ASSERT_OK(jpp_fake_set_failure(job.nodes[1].client, failure));
    for (uint32_t i = 0; i < 2; ++i) {
      uint32_t n = i ^ first;
      ASSERT_OK(part_execute(&job.nodes[n], kBoth, 2, 1, &parts[n]));
    }
    for (uint32_t i = 0; i < 2; ++i) {
      ASSERT_FAILS(jpp_client_event_await(job.nodes[i].client, parts[i].events[0]),
                   JPP_EXECUTION_ERROR, "device 1 of node 1: execute: injected failure");
      part_free(&job.nodes[i], &parts[i]);
    }
    job_end(&job);
  }
}

static void test_a_node_that_leaves_fails_the_others(void** state) {
  (void)state;
  for (uint32_t threads = 0; threads < 3; ++threads) {
    job_t job;
    part_t early = {0}, late = {0};
    start_two(&job, threads);
    node_t* node = &job.nodes[0];
    ASSERT_OK(part_compile(node, kAllSum, kBoth, 2, &early));
    ASSERT_OK(part_compile(node, kAllSum, kBoth, 2, &late));
    ASSERT_OK(part_execute(node, kBoth, 2, 1, &early));
    node_destroy(&job.nodes[1]);
    ASSERT_FAILS(jpp_client_event_await(node->client, early.events[0]), JPP_PEER_ERROR,
                 "node 1 has destroyed its client");
    ASSERT_OK(part_execute(node, kBoth, 2, 2, &late));
    ASSERT_FAILS(jpp_client_event_await(node->client, late.events[0]), JPP_PEER_ERROR,
                 "node 1, whose device 1 takes part, has destroyed its client");
    part_free(node, &early);
    part_free(node, &late);
    job_end(&job);
  }
}

// Its own part still waits for the other nodes.
static void test_a_node_may_leave_in_the_middle(void** state) {
  (void)state;
  for (uint32_t threads = 0; threads < 3; ++threads) {
    job_t job;
    part_t part = {0};
    start_two(&job, threads);
    ASSERT_OK(part_compile(&job.nodes[0], kAllSum, kBoth, 2, &part));
    ASSERT_OK(part_execute(&job.nodes[0], kBoth, 2, 1, &part));
    job_end(&job);
  }
}

static void test_programs_without_an_own_device_are_refused(void** state) {
  (void)state;
  job_t job;
  part_t part = {0};
  start_two(&job, 0);
  ASSERT_FAILS(part_compile(&job.nodes[0], kAllSum, &kBoth[1], 1, &part),
               JPP_DEVICES_ERROR,
               "expected a program with a partition on one of the 1 devices of node 0");
  const char text[] = "devices 1\nf32[2] = copy 0";
  jpp_compile_request_t request = {.struct_size = sizeof(request),
                                   .code = text,
                                   .code_size = strlen(text),
                                   .format = "fake"};
  ASSERT_FAILS(jpp_client_compile(job.nodes[0].client, &request, &part.executable),
               JPP_DEVICES_ERROR, "devices of node 0, found none");
  uint32_t beyond = 2;
  request.devices = &beyond;
  request.device_count = 1;
  ASSERT_FAILS(jpp_client_compile(job.nodes[0].client, &request, &part.executable),
               JPP_DEVICES_ERROR, "expected a device index below 2, the devices of all");
  const uint32_t twice[2] = {0, 0};
  ASSERT_FAILS(part_compile(&job.nodes[0], kAllSum, twice, 2, &part), JPP_DEVICES_ERROR,
               "names device 0 twice");
  job_end(&job);
}

static void test_a_collective_runs_where_it_was_compiled_for(void** state) {
  (void)state;
  job_t job;
  part_t part = {0};
  start_two(&job, 0);
  ASSERT_OK(part_compile(&job.nodes[0], kAllSum, kBoth, 1, &part));
  test_call_t call = {.executable = part.executable, .arg_count = 1, .result_count = 1};
  ASSERT_FAILS(test_call(job.nodes[0].client, &call), JPP_INVALID_ARGUMENT,
               "on the devices that it was compiled for, found device 0");
  part_free(&job.nodes[0], &part);
  job_end(&job);
}

static void test_a_program_over_nodes_is_in_no_cache(void** state) {
  (void)state;
  job_t job;
  jpp_executable_t* executable = NULL;
  jpp_cache_outcome_t outcome;
  start_two(&job, 0);
  jpp_compile_request_t request = {.struct_size = sizeof(request),
                                   .code = kAllSum,
                                   .code_size = strlen(kAllSum),
                                   .format = "fake",
                                   .devices = kBoth,
                                   .device_count = 2};
  ASSERT_OK(jpp_client_compile_cached(job.nodes[0].client, &request, "/nowhere", NULL,
                                      &executable, &outcome));
  assert_int_equal(outcome, JPP_CACHE_NOT_KEPT);
  jpp_client_executable_destroy(job.nodes[0].client, executable);
  job_end(&job);
}

// Every node reports the mistake, or a node that did not come; none waits for ever.
static void test_faults_of_the_store(void** state) {
  (void)state;
  static const struct {
    test_fault_t fault;
    const char *key, *value, *text;
    uint32_t node;  // the node whose text it is
  } kFaults[] = {
      {TEST_FAULT_GET, "fake/devices/1", NULL,
       "node 0 waited for node 1: the store is gone", 0},
      {TEST_FAULT_GET, "fake/job", NULL, "node 2 waited for node 0: the store is gone",
       2},
      {TEST_FAULT_PUT, "fake/job", NULL, "the store is full", 0},
      {TEST_FAULT_PUT, "fake/devices/2", NULL, "the store is full", 2},
      {TEST_FAULT_SILENT, "fake/job", NULL, "node 1 waited 300 ms for node 0 of 3", 1},
      {TEST_FAULT_SILENT, "fake/devices/2", NULL, "node 1 waited 300 ms for node 2 of 3",
       1},
      {TEST_FAULT_VALUE, "fake/devices/1", "", "found 0 bytes that are something else",
       0},
      {TEST_FAULT_VALUE, "fake/devices/1", "x",
       "expected fake/devices/1 of node 1 to be a", 2},
      {TEST_FAULT_VALUE, "fake/devices/1", "0", "a number from 1 to 64, found 1 bytes",
       0},
      {TEST_FAULT_VALUE, "fake/devices/1", "65", "a number from 1 to 64", 0},
      {TEST_FAULT_VALUE, "fake/devices/1", "99999999999999999999999", "from 1 to 64", 0},
      {TEST_FAULT_VALUE, "fake/job", "-1", "expected fake/job of node 0", 1},
      {TEST_FAULT_VALUE, "fake/job", "987654321", "a client of this process that has as",
       1},
  };
  for (size_t i = 0; i < sizeof(kFaults) / sizeof(kFaults[0]); ++i) {
    job_t job;
    job_init(&job, 3);
    for (uint32_t n = 0; n < 3; ++n) job.nodes[n].options.node_timeout_ms = 300;
    job.store.fault = kFaults[i].fault;
    job.store.key = kFaults[i].key;
    job.store.value = kFaults[i].value;
    on_nodes(&job, create_main);
    jpp_status_t* said = job.nodes[kFaults[i].node].status;
    job.nodes[kFaults[i].node].status = NULL;
    ASSERT_FAILS(said, JPP_PEER_ERROR, kFaults[i].text);
    assert_null(job.nodes[kFaults[i].node].client);
    for (uint32_t n = 0; n < 3; ++n) jpp_status_free(job.nodes[n].status);
    job_end(&job);
  }
}

static void test_options_of_nodes_are_checked(void** state) {
  (void)state;
  jpp_key_value_store_t store = test_store_calls(NULL);
  jpp_client_t* client = NULL;
  jpp_fake_options_t options = {
      .struct_size = sizeof(options), .device_count = 1, .num_nodes = 2};
  ASSERT_FAILS(jpp_client_create_fake(&options, &client), JPP_INVALID_ARGUMENT,
               "fake: expected a store for 2 nodes, found NULL");
  options.store = &store;
  options.node_id = 2;
  ASSERT_FAILS(jpp_client_create_fake(&options, &client), JPP_INVALID_ARGUMENT,
               "found node 2 of 2");
  options.num_nodes = JPP_FAKE_MAX_NODES + 1;
  ASSERT_FAILS(jpp_client_create_fake(&options, &client), JPP_INVALID_ARGUMENT,
               "expected at most 64 nodes");
}

// The n-th allocation of a node fails; the store already has the others' keys.
static void test_failed_allocation_anywhere_leaks_nothing(void** state) {
  (void)state;
  for (int64_t n = 0;; ++n) {
    job_t job;
    part_t part = {0};
    job_init(&job, 1);
    job.nodes[0].options.device_count = 2;
    create_main(&job.nodes[0]);
    ASSERT_OK(job.nodes[0].status);
    jpp__alloc_fail_after(n);
    jpp_status_t* status = part_compile(&job.nodes[0], kAllSum, kBoth, 2, &part);
    if (!status) status = part_execute(&job.nodes[0], kBoth, 2, 1, &part);
    jpp__alloc_fail_after(-1);
    if (!status) ASSERT_OK(part_check(&job.nodes[0], kBoth, 2, 1, &part));
    bool done = !status;
    if (status) ASSERT_FAILS(status, JPP_OUT_OF_MEMORY, "host memory");
    part_free(&job.nodes[0], &part);
    job_end(&job);
    if (done) break;
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_devices_of_all_nodes),
      cmocka_unit_test(test_a_client_without_nodes_has_its_own_devices),
      cmocka_unit_test(test_sums_over_random_nodes),
      cmocka_unit_test(test_nothing_is_done_before_all_nodes_execute),
      cmocka_unit_test(test_nodes_must_execute_the_same_programs),
      cmocka_unit_test(test_a_failure_on_one_node_is_one_on_all),
      cmocka_unit_test(test_a_node_that_leaves_fails_the_others),
      cmocka_unit_test(test_a_node_may_leave_in_the_middle),
      cmocka_unit_test(test_programs_without_an_own_device_are_refused),
      cmocka_unit_test(test_a_collective_runs_where_it_was_compiled_for),
      cmocka_unit_test(test_a_program_over_nodes_is_in_no_cache),
      cmocka_unit_test(test_faults_of_the_store),
      cmocka_unit_test(test_options_of_nodes_are_checked),
      cmocka_unit_test(test_failed_allocation_anywhere_leaks_nothing),
  };
  return cmocka_run_group_tests_name("nodes of the fake device", tests, NULL, NULL);
}
