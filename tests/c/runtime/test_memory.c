// Values in pinned host memory: steps compute the same as without it, and each memory
// holds what the plan says.
#include <stdio.h>
#include <stdlib.h>

#include "golden.h"
#include "model.h"

enum { kOutputs = 16 };

// Weights of stage 0, momenta and a result live in the memory %s.
static const char kText[] =
    "graph \"momentum\" ranks 2\n"
    "arg %%w0 f32[4]%s \"w0\" donated\n"
    "arg %%w1 f32[4] \"w1\" donated\n"
    "arg %%m0 f32[4]%s \"m0\" donated\n"
    "arg %%m1 f32[4]%s \"m1\"\n"
    "arg %%x f32[8,4] \"x\"\n"
    "loop microbatches 4 stages 2 schedule \"1f1b\" index %%i at \"train.py:10\" {\n"
    "  %%xi:f32[4] = slice(%%x, %%i) cheap\n"
    "  %%h0:f32[4] = dot(%%xi, %%w0) cost 256\n"
    "  %%s0:f32[4] = @mark 0 (%%h0)\n"
    "  %%h1:f32[4] = dot(%%s0, %%w1) cost 256\n"
    "  %%s1:f32[4] = @mark 1 (%%h1)\n"
    "  %%loss:f32[] = mean(%%s1)\n"
    "  %%c1:f32[4] = mean_t(%%s1) backward\n"
    "  %%b1:f32[4] = @mark_backward 1 (%%c1) backward\n"
    "  %%g1:f32[4] = dot_t(%%s0, %%b1) backward cost 256\n"
    "  %%c0:f32[4] = dot_t(%%b1, %%w1) backward cost 256\n"
    "  %%b0:f32[4] = @mark_backward 0 (%%c0) backward\n"
    "  %%g0:f32[4] = dot_t(%%xi, %%b0) backward cost 256\n"
    "} %%L:f32[] = add %%loss, %%G0:f32[4] = add %%g0, %%G1:f32[4] = add %%g1\n"
    "%%u0:f32[4]%s, %%n0:f32[4]%s = update(%%w0, %%G0, %%m0)\n"
    "%%u1:f32[4], %%n1:f32[4]%s = update(%%w1, %%G1, %%m1)\n"
    "out %%u0 \"w0\" next %%w0\n"
    "out %%u1 \"w1\" next %%w1\n"
    "out %%n0 \"m0\" next %%m0\n"
    "out %%n1 \"m1\" next %%m1\n"
    "out %%n1 \"m1 again\" on 0, 1\n"
    "out %%m1 \"m1 before\" on 0, 1\n"
    "out %%L \"loss\"\n";

static model_t* create(const char* memory, model_options_t options) {
  char text[sizeof(kText) + 200];
  snprintf(text, sizeof(text), kText, memory, memory, memory, memory, memory, memory);
  return model_create(text, options);
}

static const model_options_t kWays[] = {
    {.portable = true},
    {.devices_per_rank = 2},
    {.devices_per_rank = 2, .odd_have_one = true},
    {.device_threads = 3, .latency_us = 50},
    {.devices_per_rank = 2, .device_threads = 3, .latency_us = 20},
    {.ranks_per_device = 2},
    {.schedule = "gpipe", .devices_per_rank = 2},
};
enum { kWayCount = sizeof(kWays) / sizeof(*kWays) };

static void test_memories_do_not_change_numbers(void** state) {
  (void)state;
  for (size_t i = 0; i < kWayCount; ++i) {
    float expected[kOutputs] = {0}, found[kOutputs] = {0};
    model_t* model = create("", kWays[i]);
    model_run(model, expected);
    assert_int_equal(model_stats(model).host_peak_bytes[0], 0);
    model_destroy(model);
    model = create("@pinned_host", kWays[i]);
    model_run(model, found);
    assert_memory_equal(found, expected, sizeof(found));
    model_run(model, found);
    assert_memory_equal(found, expected, sizeof(found));
    model_destroy(model);
  }
}

static void test_results_are_in_the_memory_of_their_type(void** state) {
  (void)state;
  model_t* model = create("@pinned_host", (model_options_t){0});
  model_give(model);
  jpp_call_t call = model_wrap(model);
  ASSERT_OK(jpp_runtime_call(model->runtime, &call));
  for (uint32_t o = 0; o < model->graph->num_outputs; ++o) {
    const jpp_type_t* type = &model->graph->values[model->graph->outputs[o].value].type;
    assert_int_equal(jpp_array_layout(call.results[o])->memory, type->memory);
  }
  ASSERT_OK(jpp_runtime_await(model->runtime, NULL));
  model_unwrap(model, &call);
  model_take_back(model);
  model_destroy(model);
}

// Each result becomes an argument of the next step, as in a training loop.
static void run_steps(model_t* model, uint32_t steps, jpp_call_t* call) {
  const jpp_graph_t* graph = model->graph;
  jpp_array_t** args = (jpp_array_t**)call->args;
  for (uint32_t s = 0; s < steps; ++s) {
    ASSERT_OK(jpp_runtime_call(model->runtime, call));
    for (uint32_t o = 0; o < graph->num_outputs; ++o) {
      uint32_t next = graph->outputs[o].next;
      for (uint32_t a = 0; a < graph->num_args && next != JPP_NONE; ++a) {
        if (graph->args[a].value != next) continue;
        jpp_array_release(args[a]);
        args[a] = call->results[o];
        call->results[o] = NULL;
      }
      jpp_array_release(call->results[o]);
      call->results[o] = NULL;
    }
  }
  ASSERT_OK(jpp_runtime_await(model->runtime, NULL));
}

static void test_accounts_of_both_memories_are_as_planned(void** state) {
  (void)state;
  for (uint32_t threads = 0; threads < 3; threads += 2) {
    model_options_t options = {.device_threads = threads, .steps_in_flight = 1};
    model_t* model = create("@pinned_host", options);
    model_give(model);
    jpp_call_t call = model_wrap(model);
    jpp_runtime_set_tracing(model->runtime, true);
    run_steps(model, 5, &call);
    jpp_fake_stats_t stats = model_stats(model);
    const jpp_trace_t* trace = jpp_runtime_last_trace(model->runtime);
    for (uint32_t r = 0; r < 2; ++r) {
      const jpp_program_t* program = &model->plan->programs[r];
      uint32_t device = model->devices[r];
      assert_int_equal(trace->peak_live_bytes[r], program->peak_bytes);
      // The plan leaves out copies for outputs that another output or an argument already
      // holds.
      uint64_t copies = 0, host_copies = 0;
      for (uint32_t i = 0; i < program->num_outputs; ++i) {
        uint32_t value = model->staged->outputs[program->outputs[i].output].value;
        bool host = model->staged->values[value].type.memory != JPP_MEMORY_DEVICE;
        if (!program->outputs[i].copy) continue;
        *(host ? &host_copies : &copies) += model->plan->value_bytes[value];
      }
      assert_true(stats.host_peak_bytes[device] >= program->peak_host_bytes);
      assert_true(stats.host_peak_bytes[device] <=
                  program->peak_host_bytes + host_copies);
      assert_true(stats.device_peak_bytes[device] <= program->peak_bytes + copies);
    }
    // Only the arguments of the next step are left on the host.
    assert_int_equal(stats.host_live_bytes[model->devices[0]], 32 + 16);
    assert_int_equal(stats.host_live_bytes[model->devices[1]], 16);
    for (uint32_t a = 0; a < model->graph->num_args; ++a) {
      jpp_array_release(call.args[a]);
    }
    free((void*)call.args);
    free((void*)call.results);
    model_destroy(model);
  }
}

// Passes every argument in device memory, on the rank that needs it or on the other one.
static void run_on_arrays(model_t* model, uint32_t shift, float* numbers) {
  jpp_array_t *args[5], *results[kOutputs] = {0};
  for (uint32_t a = 0; a < 5; ++a) {
    uint32_t rank = ((a == 1 || a == 3) + shift) % 2;
    args[a] = model_array(model, a, rank, (float)a, 1.0F / 16);
    assert_int_equal(jpp_array_layout(args[a])->memory, JPP_MEMORY_DEVICE);
  }
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = args,
                     .num_args = 5,
                     .num_results = model->graph->num_outputs,
                     .results = results};
  ASSERT_OK(jpp_runtime_call(model->runtime, &call));
  for (uint32_t o = 0; o < model->graph->num_outputs; ++o) {
    numbers[o] = model_read_array(results[o]);
    jpp_array_release(results[o]);
  }
  ASSERT_OK(jpp_runtime_await(model->runtime, NULL));
  for (uint32_t a = 0; a < 5; ++a) {
    assert_int_equal(jpp_array_is_deleted(args[a]), model->graph->args[a].donated);
    jpp_array_release(args[a]);
  }
}

static void test_arguments_come_in_any_memory(void** state) {
  (void)state;
  float expected[kOutputs] = {0}, found[kOutputs] = {0};
  model_t* plain = create("", (model_options_t){0});
  run_on_arrays(plain, 0, expected);
  model_destroy(plain);
  model_t* model = create("@pinned_host", (model_options_t){0});
  for (uint32_t shift = 0; shift < 2; ++shift) {
    run_on_arrays(model, shift, found);
    assert_memory_equal(found, expected, sizeof(found));
    model_expect_clean(model);
  }
  model_destroy(model);
}

// An activation waits for its backward in pinned host memory.
static void test_activations_are_moved(void** state) {
  (void)state;
  char path[1024];
  snprintf(path, sizeof(path), "%s/graphs/host.jpp", GOLDEN_DIR);
  char* text = golden_read(path);
  for (size_t i = 0; i < kWayCount; ++i) {
    float first[kOutputs] = {0}, second[kOutputs] = {0};
    model_t* model = model_create(text, kWays[i]);
    model_run(model, first);
    model_run(model, second);
    assert_memory_equal(first, second, sizeof(first));
    model_expect_clean(model);
    model_destroy(model);
  }
  free(text);
}

// Whichever call fails, the step fails, nothing leaks and the next step works.
static void test_a_move_that_fails_fails_the_step(void** state) {
  (void)state;
  model_t* model = create("@pinned_host", (model_options_t){.devices_per_rank = 2});
  float expected[kOutputs] = {0}, found[kOutputs] = {0};
  model_run(model, expected);
  uint32_t moves = 0;
  for (uint64_t at = 1; at < 200; ++at) {
    for (int async = 0; async < 2; ++async) {
      model_give(model);
      jpp_fake_failure_t failure = {.at = at, .async = async};
      ASSERT_OK(jpp_fake_set_failure(model->client, failure));
      jpp_status_t* status = model_step(model);
      ASSERT_OK(jpp_fake_set_failure(model->client, (jpp_fake_failure_t){0}));
      moves += status && strstr(jpp_status_message(status), ", move of %");
      jpp_status_free(status);
      model_take_back(model);
    }
  }
  assert_true(moves > 0);
  model_run(model, found);
  assert_memory_equal(found, expected, sizeof(found));
  model_expect_clean(model);
  model_destroy(model);
}

static void test_devices_without_the_memory_are_refused(void** state) {
  (void)state;
  char text[sizeof(kText) + 200];
  const char* memory = "@pinned_host";
  snprintf(text, sizeof(text), kText, memory, memory, memory, memory, memory, memory);
  model_t* model = model_plan(text, (model_options_t){.device_memory_only = true});
  ASSERT_FAILS(model_try_create_runtime(model), JPP_UNSUPPORTED,
               "value %0 (w0): expected devices of platform cpu with the memory "
               "pinned_host, found devices with device");
  model_destroy(model);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_memories_do_not_change_numbers),
      cmocka_unit_test(test_results_are_in_the_memory_of_their_type),
      cmocka_unit_test(test_accounts_of_both_memories_are_as_planned),
      cmocka_unit_test(test_arguments_come_in_any_memory),
      cmocka_unit_test(test_activations_are_moved),
      cmocka_unit_test(test_a_move_that_fails_fails_the_step),
      cmocka_unit_test(test_devices_without_the_memory_are_refused),
  };
  return cmocka_run_group_tests_name("runtime_memory", tests, NULL, NULL);
}
