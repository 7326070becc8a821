// A step read from a file runs like the step that was saved, on the fake device.
#include <stdio.h>
#include <stdlib.h>

#include "planfile_util.h"
#include "runtime/model.h"

enum { kMostArrays = 32 };

// Saves the model's plan with the programs of its tasks and reads it again.
static jpp_planfile_t* save_and_read(const model_t* model) {
  made_contents_t made = contents_of(model->planned, model->options.devices_per_rank);
  jpp_planfile_contents_t contents = made.contents;
  uint32_t tasks = model->staged->num_tasks;
  jpp_planfile_bytes_t* modules = calloc(tasks, sizeof(*modules));
  for (uint32_t t = 0; t < tasks; ++t) {
    bool has_ops = model->staged->tasks[t].num_ops != 0;
    bool is_compiled = has_ops && !(model->options.copies && made.shard_dims[t]);
    made.task_modules[t] = has_ops ? t : JPP_NONE;
    char* code = is_compiled ? model_fake_code(model, t) : strdup("not a program");
    modules[t] = (jpp_planfile_bytes_t){code, strlen(code)};
  }
  contents.num_modules = tasks;
  contents.modules = modules;
  if (!model->options.copies) contents.shard_dims = NULL;
  contents.layouts = NULL;  // every device has the whole of each array, as in the model
  size_t size = 0;
  unsigned char* bytes = contents_bytes(&contents, &size);
  jpp_planfile_t* file = NULL;
  ASSERT_OK(jpp_planfile_read("model", bytes, size, &file));
  free(bytes);
  for (uint32_t t = 0; t < tasks; ++t) free((void*)modules[t].data);
  free(modules);
  contents_free(&made);
  return file;
}

static void fill(float* data, const jpp_type_t* type, uint32_t arg) {
  uint64_t count = jpp_type_bytes(type) / sizeof(float);
  for (uint64_t i = 0; i < count; ++i) data[i] = (float)arg + (float)i / 16;
}

static float last_number(const jpp_planfile_step_t* step, uint32_t output,
                         jpp_array_t* array, const jpp_type_t* type) {
  float data[64];
  ASSERT_OK(jpp_planfile_step_read(step, output, array, data));
  return data[jpp_type_bytes(type) / sizeof(float) - 1];
}

// Gives the step's constant the bytes of the model's last argument.
static void run_step(const jpp_planfile_t* file, jpp_client_t* client, float* numbers) {
  const jpp_graph_t* graph = file->contents.planned->graph;
  uint32_t args = graph->num_args - file->contents.num_constants, devices[64];
  jpp_array_t *given[kMostArrays] = {0}, *results[kMostArrays] = {0};
  jpp_planfile_step_t* step = NULL;
  ASSERT_OK(jpp_planfile_devices(
      file, client, file->contents.planned->ranks * file->contents.devices_per_rank,
      devices));
  ASSERT_OK(jpp_planfile_step_create(file, client, devices, &step));
  for (uint32_t a = 0; a < args; ++a) {
    const jpp_type_t* type = &graph->values[graph->args[a].value].type;
    float data[64];
    fill(data, type, a);
    ASSERT_OK(jpp_planfile_step_upload(step, a, data, &given[a]));
  }
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = given,
                     .num_args = args,
                     .results = results,
                     .num_results = graph->num_outputs};
  ASSERT_OK(jpp_planfile_step_call(step, &call));
  for (uint32_t o = 0; o < graph->num_outputs; ++o) {
    const jpp_type_t* type = &graph->values[graph->outputs[o].value].type;
    numbers[o] = last_number(step, o, results[o], type);
  }
  for (uint32_t i = 0; i < kMostArrays; ++i) {
    jpp_array_release(given[i]);
    jpp_array_release(results[i]);
  }
  jpp_planfile_step_destroy(step);
}

static void run_both(const char* text, bool copies) {
  model_t* model =
      model_create(text, (model_options_t){.copies = copies, .portable = true});
  float expected[kMostArrays], found[kMostArrays];
  model_run(model, expected);
  jpp_planfile_t* file = save_and_read(model);
  // The array that contents_of() made a constant is an argument here.
  file->contents.num_constants = 0;
  run_step(file, model->client, found);
  for (uint32_t o = 0; o < model->graph->num_outputs; ++o) {
    assert_float_equal(found[o], expected[o], 0);
  }
  jpp_planfile_destroy(file);
  model_expect_clean(model);
  model_destroy(model);
}

static void test_a_loaded_step_computes_the_same(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  run_both(text, false);
  run_both(kModelOutputs, false);
  free(text);
}

static void test_what_only_copies_is_not_compiled(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  run_both(text, true);
  run_both(kModelOutputs, true);
  free(text);
}

static void test_constants_are_uploaded(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 3);
  model_t* model = model_create(text, (model_options_t){.portable = true});
  jpp_planfile_t* file = save_and_read(model);
  float first[kMostArrays], second[kMostArrays];
  assert_int_equal(file->contents.num_constants, 1);
  run_step(file, model->client, first);
  float* constant = (float*)(uintptr_t)file->contents.constants[0].data;
  memset(constant, 0, file->contents.constants[0].size);
  run_step(file, model->client, second);
  assert_true(first[model->graph->num_outputs - 1] !=
              second[model->graph->num_outputs - 1]);
  jpp_planfile_destroy(file);
  model_destroy(model);
  free(text);
}

static void test_ranks_that_share_devices_need_no_more(void** state) {
  (void)state;
  char* text = model_chain(4, 4, 3);
  model_t* model = model_create(text, (model_options_t){.portable = true});
  jpp_planfile_t* file = save_and_read(model);
  float apart[kMostArrays], shared[kMostArrays];
  run_step(file, model->client, apart);
  int32_t* ids = (int32_t*)(uintptr_t)file->contents.device_ids;
  memcpy(ids, (int32_t[]){70, 70, 20, 70}, 4 * sizeof(*ids));
  jpp_fake_options_t options = {.struct_size = sizeof(options), .device_count = 2};
  jpp_client_t* small = NULL;
  ASSERT_OK(jpp_client_create_fake(&options, &small));
  uint32_t devices[4];
  ASSERT_OK(jpp_planfile_devices(file, small, 4, devices));
  assert_memory_equal(devices, ((uint32_t[]){0, 0, 1, 0}), sizeof(devices));
  run_step(file, model->client, shared);
  for (uint32_t o = 0; o < model->graph->num_outputs; ++o) {
    assert_float_equal(shared[o], apart[o], 0);
  }
  jpp_client_destroy(small);
  jpp_planfile_destroy(file);
  model_destroy(model);
  free(text);
}

static void test_refusals(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 3);
  model_t* model = model_create(text, (model_options_t){.portable = true});
  jpp_planfile_t* file = save_and_read(model);
  jpp_planfile_step_t* step = NULL;
  uint32_t devices[] = {0, 1};
  jpp_fake_options_t options = {.struct_size = sizeof(options), .device_count = 1};
  jpp_client_t* small = NULL;
  ASSERT_OK(jpp_client_create_fake(&options, &small));
  ASSERT_FAILS(jpp_planfile_devices(file, small, 1, devices), JPP_INVALID_ARGUMENT,
               "the devices of the ranks: expected a count of 2, found 1");
  ASSERT_FAILS(jpp_planfile_devices(file, small, 2, devices), JPP_DEVICES_ERROR,
               "expected 2 devices, 2 ranks of at most 1, found 1 on "
               "platform cpu");
  jpp_client_destroy(small);
  file->contents.platform = "cuda";
  ASSERT_FAILS(jpp_planfile_step_create(file, model->client, devices, &step),
               JPP_UNSUPPORTED, "lowered for platform cuda");
  file->contents.platform = "cpu";
  ASSERT_OK(jpp_fake_set_failure(model->client, (jpp_fake_failure_t){.at = 2}));
  ASSERT_FAILS(jpp_planfile_step_create(file, model->client, devices, &step),
               JPP_EXECUTION_ERROR, "rank ");
  assert_null(step);
  ASSERT_OK(jpp_planfile_step_create(file, model->client, devices, &step));
  jpp_array_t* array = NULL;
  ASSERT_FAILS(jpp_planfile_step_upload(step, 99, "", &array), JPP_INVALID_ARGUMENT,
               "expected the number of an argument, below 3, found 99");
  jpp_planfile_step_destroy(step);
  jpp_planfile_destroy(file);
  model_destroy(model);
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_loaded_step_computes_the_same),
      cmocka_unit_test(test_what_only_copies_is_not_compiled),
      cmocka_unit_test(test_constants_are_uploaded),
      cmocka_unit_test(test_ranks_that_share_devices_need_no_more),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests_name("planfile_step", tests, NULL, NULL);
}
