// JAX's profiler gets the steps, through the calls that JAX makes.
#include <stdlib.h>

#include "model.h"
#include "profile/plugin.h"

enum { kOutputs = 16 };

static const jpp_profiler_api_t* profiler_api(void) {
  const PJRT_Api* api = jpp_profile_plugin();
  const PJRT_Extension_Base* base = api->extension_start;
  assert_int_equal(base->type, PJRT_Extension_Type_Profiler);
  assert_null(base->next);
  return ((const jpp_profiler_extension_t*)base)->api;
}

static jpp_profiler_call_t begin_profile(void) {
  jpp_profiler_create_t create = {.struct_size = sizeof(create)};
  ASSERT_OK(profiler_api()->create(&create));
  jpp_profiler_call_t call = {.struct_size = sizeof(call), .profiler = create.profiler};
  ASSERT_OK(profiler_api()->start(&call));
  return call;
}

static jpp_profiler_collect_t end_profile(jpp_profiler_call_t call) {
  ASSERT_OK(profiler_api()->stop(&call));
  jpp_profiler_collect_t collect = {.struct_size = sizeof(collect),
                                    .profiler = call.profiler};
  ASSERT_OK(profiler_api()->collect_data(&collect));
  return collect;
}

static size_t count(const jpp_profiler_collect_t* data, const char* text) {
  size_t found = 0, length = strlen(text);
  for (size_t i = 0; i + length <= data->size; ++i) {
    found += memcmp(data->buffer + i, text, length) == 0;
  }
  return found;
}

static void test_steps_while_it_is_started_are_in_a_profile(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  model_t* model = model_create(text, (model_options_t){.device_threads = 2});
  float numbers[kOutputs];
  model_run(model, numbers);
  jpp_profiler_call_t call = begin_profile();
  model_run(model, numbers);
  model_run(model, numbers);
  jpp_profiler_collect_t data = end_profile(call);
  model_run(model, numbers);
  // Each name is stored once, however often it is used.
  static const char* const kNames[] = {"fwd_0", "bwd_2", "rank 2: sends", "microbatch",
                                       "pipeline (jaxpp)"};
  for (size_t i = 0; i < sizeof(kNames) / sizeof(*kNames); ++i) {
    assert_true(count(&data, kNames[i]) > 0);
  }
  // The second call has room for the data, and ends the collection.
  uint8_t* copy = malloc(data.size);
  jpp_profiler_collect_t again = data;
  again.buffer = copy;
  ASSERT_OK(profiler_api()->collect_data(&again));
  assert_memory_equal(copy, data.buffer, data.size);
  free(copy);
  ASSERT_OK(profiler_api()->destroy(&call));
  model_destroy(model);
  free(text);
}

static void test_a_profile_without_steps_is_empty(void** state) {
  (void)state;
  jpp_profiler_call_t call = begin_profile();
  assert_int_equal(end_profile(call).size, 0);
  ASSERT_OK(profiler_api()->destroy(&call));
}

static void test_a_profiler_is_destroyed_while_it_is_started(void** state) {
  (void)state;
  jpp_profiler_call_t call = begin_profile();
  ASSERT_OK(profiler_api()->destroy(&call));
  char* text = model_chain(2, 2, 2);
  model_t* model = model_create(text, (model_options_t){0});
  float numbers[kOutputs];
  model_run(model, numbers);
  assert_null(jpp_runtime_last_trace(model->runtime));
  model_destroy(model);
  free(text);
}

static void test_errors_are_told_as_jax_asks(void** state) {
  (void)state;
  jpp_status_t* error = jpp_status_make(JPP_OUT_OF_MEMORY, "no memory");
  jpp_profiler_message_t message = {.struct_size = sizeof(message), .error = error};
  profiler_api()->error_message(&message);
  assert_int_equal(message.message_size, strlen("no memory"));
  jpp_profiler_code_t code = {.struct_size = sizeof(code), .error = error};
  ASSERT_OK(profiler_api()->error_get_code(&code));
  assert_int_equal(code.code, 8);
  jpp_profiler_forget_t forget = {.struct_size = sizeof(forget), .error = error};
  profiler_api()->error_destroy(&forget);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_steps_while_it_is_started_are_in_a_profile),
      cmocka_unit_test(test_a_profile_without_steps_is_empty),
      cmocka_unit_test(test_a_profiler_is_destroyed_while_it_is_started),
      cmocka_unit_test(test_errors_are_told_as_jax_asks),
  };
  return cmocka_run_group_tests_name("profile", tests, NULL, NULL);
}
