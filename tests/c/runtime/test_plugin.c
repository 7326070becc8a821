// Steps on a real plugin.
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "device/driver_under_test.h"
#include "device/ffi_handler.h"
#include "model.h"

enum { kOutputs = 16 };

// Sums x + i + 1 + w + 1 over the microbatches i, beginning with 1; %w itself is an
// output, too.
static const char kTwoStages[] =
    "graph \"plugin\" ranks 2\n"
    "arg %w f32[4] \"w\"\n"
    "arg %x f32[4] \"x\"\n"
    "arg %v f32[4] \"v\" donated\n"
    "loop microbatches 5 stages 2 schedule \"gpipe\" index %i at \"t.py:1\" {\n"
    "  %h0:f32[4] = add(%x, %i) cost 10\n"
    "  %m0:f32[4] = @mark 0 (%h0)\n"
    "  %h1:f32[4] = add(%m0, %w) cost 10\n"
    "  %m1:f32[4] = @mark 1 (%h1)\n"
    "} %L:f32[4] = add %m1\n"
    "%u:f32[4] = update(%v, %L)\n"
    "out %L\n"
    "out %L\n"
    "out %w\n"
    "out %u\n";

static void run_two_stages(bool copies) {
  model_t* model = model_create(
      kTwoStages, (model_options_t){.plugin_path = test_plugin_path(), .copies = copies});
  for (int step = 0; step < 3; ++step) {
    float numbers[kOutputs];
    model_run(model, numbers);
    // The last elements: number of the argument + 3 / 16.
    float w = 3.0f / 16, x = 1 + 3.0f / 16, v = 2 + 3.0f / 16;
    float sum = copies ? 0 : 1;
    for (int i = 0; i < 5; ++i) sum += 1 + (w + 1 + x + (float)i);
    assert_float_equal(numbers[0], sum, 0);
    assert_float_equal(numbers[1], sum, 0);
    assert_float_equal(numbers[2], w, 0);
    assert_float_equal(numbers[3], 1 + v + sum, 0);
  }
  model_destroy(model);
}

static void test_numbers_of_two_stages(void** state) {
  (void)state;
  run_two_stages(false);
}

static void test_zeros_need_no_executable(void** state) {
  (void)state;
  run_two_stages(true);
}

// Stage 0 only copies: a row of %x for each microbatch, the last one from number 4 on.
static void test_rows_need_no_executable(void** state) {
  (void)state;
  static const char kRows[] =
      "graph \"rows\" ranks 2\n"
      "arg %w f32[8] \"w\"\n"
      "arg %x f32[5,4,2] \"x\"\n"
      "loop microbatches 7 stages 2 schedule \"gpipe\" index %i {\n"
      "  %u:u32[] = convert(%i) cheap copies 0\n"
      "  %r:f32[1,4,2] = dynamic_slice(%x, %u) copies 0\n"
      "  %f:f32[8] = reshape(%r) copies 0\n"
      "  %m0:f32[8] = @mark 0 (%f)\n"
      "  %h:f32[8] = add(%m0, %w) cost 10\n"
      "  %m1:f32[8] = @mark 1 (%h)\n"
      "} %L:f32[8] = add %m1\n"
      "out %L\n";
  model_t* model = model_create(
      kRows, (model_options_t){.plugin_path = test_plugin_path(), .copies = true});
  assert_string_equal(model->staged->tasks[0].name, "fwd_0");
  assert_null(model->executables[0].executable);
  for (int step = 0; step < 3; ++step) {
    float numbers[kOutputs];
    model_run(model, numbers);
    float w = 7.0f / 16, sum = 0;
    for (int i = 0; i < 7; ++i) {
      int row = i < 4 ? i : 4;
      sum += 1 + w + 1 + (float)(8 * row + 7) / 16;
    }
    assert_float_equal(numbers[0], sum, 0);
  }
  model_destroy(model);
}

static void test_no_rows_need_no_executable(void** state) {
  (void)state;
  model_t* model = model_create(
      "graph \"empty\" ranks 1\n"
      "arg %x f32[4] \"x\"\n"
      "%r:f32[0] = slice(%x) copies 2\n"
      "out %r\n",
      (model_options_t){.plugin_path = test_plugin_path(), .copies = true});
  assert_null(model->executables[0].executable);
  model_destroy(model);
}

static void test_schedules_give_the_same_numbers(void** state) {
  (void)state;
  static const char* const kSchedules[] = {"gpipe", "1f1b"};
  float numbers[2][kOutputs];
  char* text = model_chain(4, 4, 8);
  for (int i = 0; i < 2; ++i) {
    model_options_t options = {.schedule = kSchedules[i],
                               .plugin_path = test_plugin_path()};
    model_t* model = model_create(text, options);
    jpp_runtime_set_tracing(model->runtime, i == 1);
    model_run(model, numbers[i]);
    model_run(model, numbers[i]);
    assert_memory_equal(numbers[i], numbers[0], 9 * sizeof(float));
    model_destroy(model);
  }
  free(text);
}

// --- Failures -------------------------------------------------------------------------

static _Atomic int g_calls_left;

static float* ffi_copy_argument(const XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Buffer* source = frame->args.args[0];
  const XLA_FFI_Buffer* result = frame->rets.rets[0];
  return memcpy(result->data, source->data, 4 * sizeof(float));
}

static XLA_FFI_Error* ffi_fail_once(XLA_FFI_CallFrame* frame) {
  if (ffi_answer_metadata(frame)) return NULL;
  ffi_copy_argument(frame);
  if (atomic_fetch_sub(&g_calls_left, 1) != 1) return NULL;
  return ffi_fail(frame, "out of luck", XLA_FFI_Error_Code_INTERNAL);
}

static void test_a_failure_is_named_and_the_next_step_works(void** state) {
  (void)state;
  char* text = model_chain(3, 3, 4);
  model_options_t options = {.plugin_path = test_plugin_path(),
                             .custom_call = "jpp_fail_once",
                             .custom_call_task = "bwd_1"};
  jpp_custom_call_t call = {
      .name = "jpp_fail_once", .platform = "Host", .handler = (void*)ffi_fail_once};
  model_t* model = model_plan(text, options);
  ASSERT_OK(jpp_client_register_custom_call(model->client, &call));
  model_compile(model);
  ASSERT_OK(model_try_create_runtime(model));
  float before[kOutputs], after[kOutputs];
  model_run(model, before);
  for (int microbatch = 0; microbatch < 4; ++microbatch) {
    char place[64];
    snprintf(place, sizeof(place), ", bwd_1 of microbatch %d: ", microbatch);
    atomic_store(&g_calls_left, microbatch + 1);
    model_give(model);
    jpp_status_t* status = model_step(model);
    assert_non_null(status);
    assert_int_equal(jpp_status_code(status), JPP_EXECUTION_ERROR);
    const char* message = jpp_status_message(status);
    if (!strstr(message, place) || !strstr(message, "out of luck"))
      fail_msg("%s", message);
    assert_non_null(strstr(message, ": rank 1, instruction "));
    jpp_status_free(status);
    model_take_back(model);
    model_run(model, after);
    assert_memory_equal(after, before, model->graph->num_outputs * sizeof(float));
  }
  model_destroy(model);
  free(text);
}

static _Atomic uint32_t g_bits;

// Writes `g_bits` as the first element in the call to which `g_calls_left` counts down.
static XLA_FFI_Error* ffi_spoil_once(XLA_FFI_CallFrame* frame) {
  if (ffi_answer_metadata(frame)) return NULL;
  float* result = ffi_copy_argument(frame);
  if (atomic_fetch_sub(&g_calls_left, 1) != 1) return NULL;
  uint32_t bits = atomic_load(&g_bits);
  memcpy(result, &bits, sizeof(bits));
  return NULL;
}

typedef struct spoiled {
  uint32_t bits;
  bool nans, infs;    // what the step checks
  const char* found;  // NULL: the step succeeds
} spoiled_t;

static void test_results_that_are_no_numbers_are_named(void** state) {
  (void)state;
  static const spoiled_t kCases[] = {
      {0x7fc00000, true, false, "found a NaN: element 0 of 4 of %"},
      {0xffc00001, true, true, "found a NaN"},
      {0xff800000, false, true, "found an infinity: element 0 of 4 of %"},
      {0x7f800000, true, false, NULL},
      {0x7fc00000, false, true, NULL},
      {0x7fc00000, false, false, NULL},
  };
  char* text = model_chain(3, 3, 4);
  model_options_t options = {.plugin_path = test_plugin_path(),
                             .custom_call = "jpp_spoil_once",
                             .custom_call_task = "fwd_1"};
  jpp_custom_call_t call = {
      .name = "jpp_spoil_once", .platform = "Host", .handler = (void*)ffi_spoil_once};
  model_t* model = model_plan(text, options);
  ASSERT_OK(jpp_client_register_custom_call(model->client, &call));
  model_compile(model);
  ASSERT_OK(model_try_create_runtime(model));
  for (size_t i = 0; i < sizeof(kCases) / sizeof(kCases[0]); ++i) {
    atomic_store(&g_calls_left, 3);
    atomic_store(&g_bits, kCases[i].bits);
    jpp_runtime_set_checks(model->runtime, kCases[i].nans, kCases[i].infs);
    model_give(model);
    jpp_status_t* status = model_step(model);
    if (kCases[i].found) {
      assert_int_equal(jpp_status_code(status), JPP_NAN_ERROR);
      assert_non_null(strstr(jpp_status_message(status), ", fwd_1 of microbatch 2: "));
      assert_non_null(strstr(jpp_status_message(status), kCases[i].found));
    } else {
      assert_null(status);
    }
    jpp_status_free(status);
    model_take_back(model);
  }
  model_destroy(model);
  free(text);
}

int main(void) {
  if (test_skip_without_plugin()) return 0;
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_numbers_of_two_stages),
      cmocka_unit_test(test_zeros_need_no_executable),
      cmocka_unit_test(test_rows_need_no_executable),
      cmocka_unit_test(test_no_rows_need_no_executable),
      cmocka_unit_test(test_schedules_give_the_same_numbers),
      cmocka_unit_test(test_a_failure_is_named_and_the_next_step_works),
      cmocka_unit_test(test_results_that_are_no_numbers_are_named),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
