// A call compares the types and shapes of its arguments with the plan's.
#include "stepper.h"

// An array of zeros on rank 0; dimensions of 0 are left out.
static jpp_array_t* upload_zeros(const model_t* model, jpp_dtype_t dtype, int64_t rows,
                                 int64_t columns) {
  enum { kMostDevices = 8 };
  static const double kZeros[64];
  const int64_t dims[] = {rows, columns};
  const uint32_t rank = 0;
  jpp_host_array_t shards[kMostDevices];
  for (uint32_t d = 0; d < kMostDevices; ++d) {
    shards[d] = (jpp_host_array_t){.struct_size = sizeof(jpp_host_array_t),
                                   .data = kZeros,
                                   .dtype = dtype,
                                   .rank = columns ? 2 : 1,
                                   .dims = dims};
  }
  jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                               .client = model->client,
                               .num_ranks = 1,
                               .devices_per_rank = model->options.devices_per_rank,
                               .ranks = &rank};
  jpp_array_t* array = NULL;
  ASSERT_OK(jpp_array_upload(&layout, shards, model->devices, &array));
  return array;
}

// Calls the step with one argument replaced.
static jpp_status_t* call_with_zeros(stepper_t* stepper, uint32_t arg, jpp_dtype_t dtype,
                                     int64_t rows, int64_t columns) {
  jpp_array_t* good = stepper->args[arg];
  stepper->args[arg] = upload_zeros(stepper->model, dtype, rows, columns);
  jpp_status_t* status = stepper_call(stepper, NULL);
  release_all(stepper->results, stepper_num_results(stepper));
  jpp_array_release(stepper->args[arg]);
  stepper->args[arg] = good;
  return status;
}

static void test_types_and_shapes_of_arguments_are_compared(void** state) {
  (void)state;
  stepper_t stepper = stepper_make(kModelOutputs, (model_options_t){0});
  ASSERT_FAILS(call_with_zeros(&stepper, 3, JPP_DTYPE_S32, 8, 4), JPP_INVALID_ARGUMENT,
               "argument x: expected f32[8,4], found s32[8,4]");
  ASSERT_FAILS(call_with_zeros(&stepper, 3, JPP_DTYPE_F32, 4, 8), JPP_INVALID_ARGUMENT,
               "argument x: expected f32[8,4], found f32[4,8]");
  ASSERT_FAILS(call_with_zeros(&stepper, 0, JPP_DTYPE_F32, 1, 4), JPP_INVALID_ARGUMENT,
               "argument w: expected f32[4], found f32[1,4]");
  ASSERT_FAILS(call_with_zeros(&stepper, 0, JPP_DTYPE_F32, 2, 0), JPP_INVALID_ARGUMENT,
               "argument w: expected f32[4], found f32[2]");
  jpp_array_t* good = stepper.args[2];
  stepper.args[2] = NULL;
  ASSERT_FAILS(stepper_call(&stepper, NULL), JPP_INVALID_ARGUMENT,
               "argument unused: expected an array, found NULL");
  stepper.args[2] = good;
  for (uint32_t a = 0; a < stepper_num_args(&stepper); ++a) {
    assert_false(jpp_array_is_deleted(stepper.args[a]));
  }
  ASSERT_OK(stepper_call(&stepper, NULL));
  // Arrays that do not exist yet are compared as well: %L is f32[4], x is not.
  good = stepper.args[3];
  stepper.args[3] = stepper.results[1];
  jpp_array_t* results[kMostArrays];
  jpp_call_t call = {.struct_size = sizeof(call),
                     .args = stepper.args,
                     .num_args = stepper_num_args(&stepper),
                     .results = results,
                     .num_results = stepper_num_results(&stepper)};
  ASSERT_FAILS(jpp_runtime_call(stepper.model->runtime, &call), JPP_INVALID_ARGUMENT,
               "argument x: expected f32[8,4], found f32[4]");
  --call.num_results;
  ASSERT_FAILS(jpp_runtime_call(stepper.model->runtime, &call), JPP_INVALID_ARGUMENT,
               "the results of a call: expected a count of");
  ++call.num_args;
  ASSERT_FAILS(jpp_runtime_call(stepper.model->runtime, &call), JPP_INVALID_ARGUMENT,
               "the arguments of a call: expected a count of");
  stepper.args[3] = good;
  stepper_end(&stepper);
}

// Each of the rank's two devices has half of x: half of its rows or of its columns.
static void test_pieces_of_a_cut_argument_are_compared(void** state) {
  (void)state;
  static const char kCut[] =
      "graph \"cut\" ranks 1\n"
      "arg %x f32[8,4]/2 \"x\"\n"
      "%y:f32[8,4]/2 = relu(%x) cost 10\n"
      "out %y\n";
  stepper_t stepper = {.model =
                           model_create(kCut, (model_options_t){.devices_per_rank = 2})};
  stepper.args[0] = upload_zeros(stepper.model, JPP_DTYPE_F32, 4, 4);
  ASSERT_OK(stepper_call(&stepper, NULL));
  release_all(stepper.results, 1);
  ASSERT_OK(call_with_zeros(&stepper, 0, JPP_DTYPE_F32, 8, 2));
  ASSERT_FAILS(call_with_zeros(&stepper, 0, JPP_DTYPE_F32, 8, 4), JPP_INVALID_ARGUMENT,
               "argument x: expected f32[8,4]/2, cut into pieces of 64 bytes a device, "
               "found f32[8,4], 128 bytes a device");
  ASSERT_FAILS(call_with_zeros(&stepper, 0, JPP_DTYPE_F32, 1, 16), JPP_INVALID_ARGUMENT,
               "found f32[1,16], 64 bytes a device");
  stepper_end(&stepper);
}

static void test_shards_of_one_array_are_alike(void** state) {
  (void)state;
  stepper_t stepper = stepper_make(kModelOutputs, (model_options_t){0});
  static const float kZeros[8];
  const int64_t dims[] = {4, 8};
  jpp_host_array_t shards[] = {{.struct_size = sizeof(*shards),
                                .data = kZeros,
                                .dtype = JPP_DTYPE_F32,
                                .rank = 1,
                                .dims = &dims[0]},
                               {.struct_size = sizeof(*shards),
                                .data = kZeros,
                                .dtype = JPP_DTYPE_F32,
                                .rank = 1,
                                .dims = &dims[1]}};
  const uint32_t rank = 0, devices[] = {0, 1};
  jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                               .client = stepper.model->client,
                               .num_ranks = 1,
                               .devices_per_rank = 2,
                               .ranks = &rank};
  jpp_array_t* array = NULL;
  ASSERT_FAILS(jpp_array_upload(&layout, shards, devices, &array), JPP_INVALID_ARGUMENT,
               "expected shards of one type and shape");
  shards[1].struct_size = 0;
  ASSERT_FAILS(jpp_array_upload(&layout, shards, devices, &array), JPP_INVALID_ARGUMENT,
               "in element 1 of a list, as in the first one, found 0");
  assert_null(array);
  stepper_end(&stepper);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_types_and_shapes_of_arguments_are_compared),
      cmocka_unit_test(test_pieces_of_a_cut_argument_are_compared),
      cmocka_unit_test(test_shards_of_one_array_are_alike),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
