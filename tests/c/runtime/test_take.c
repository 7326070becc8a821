// Arguments that the runtime makes from arrays on the host, in other memory and on other
// ranks: a step computes the same from them as from uploaded ones.
#include "runtime/model.h"

enum { kMostArrays = 16, kMostNumbers = 64, kMostRank = 4 };

// An argument of the program, filled with its number.
typedef struct have {
  float numbers[kMostNumbers];
  jpp_array_t* array;  // on rank 1; or NULL
  bool refuses;        // to lend
  jpp_buffer_shape_t shape;
  _Atomic uint32_t lent, released;
} have_t;

static jpp_status_t* give_array(void* user, uint32_t part, jpp_array_t** out_array) {
  assert_int_equal(part, 0);
  *out_array = ((have_t*)user)->array;
  return NULL;
}

static void count_release(void* user) { ++((have_t*)user)->released; }

static jpp_status_t* lend(void* user, const uint32_t* blocks, uint32_t num_blocks,
                          jpp_foreign_memory_t* out_memory,
                          void (**out_release)(void* owner), void** out_owner) {
  (void)blocks;
  have_t* have = user;
  if (have->refuses) return jpp_status_make(JPP_UNSUPPORTED, "not lent");
  for (uint32_t b = 0; b < num_blocks; ++b) {
    out_memory[b].memory = have->numbers;
    out_memory[b].shape = have->shape;
  }
  ++have->lent;
  *out_release = count_release;
  *out_owner = have;
  return NULL;
}

static jpp_status_t* read_numbers(void* user, uint32_t block,
                                  jpp_host_block_t* out_block) {
  assert_int_equal(block, 0);
  out_block->data = ((have_t*)user)->numbers;
  return NULL;
}

static jpp_array_t* take(const model_t* model, uint32_t arg, jpp_home_t home,
                         have_t* have) {
  const jpp_type_t* type = &model->staged->values[model->graph->args[arg].value].type;
  int64_t bounds[kMostRank * 2] = {0};
  assert_true(type->ndim <= kMostRank);
  for (uint32_t i = 0; i < type->ndim; ++i) bounds[2 * i + 1] = type->dims[i];
  for (int i = 0; i < kMostNumbers; ++i) have->numbers[i] = (float)arg;
  have->shape = (jpp_buffer_shape_t){
      .dtype = JPP_DTYPE_F32, .rank = type->ndim, .dims = type->dims};
  have->array =
      home == JPP_HOME_CLIENT ? model_array(model, arg, 1, (float)arg, 0) : NULL;
  const jpp_given_block_t block = {.rank = home == JPP_HOME_CLIENT ? 1 : JPP_ANY_RANK,
                                   .is_local = true,
                                   .bounds = bounds};
  const jpp_given_t given = {.struct_size = sizeof(given),
                             .home = home,
                             .dtype = JPP_DTYPE_F32,
                             .ndim = type->ndim,
                             .devices = home == JPP_HOME_CLIENT,
                             .bytes = jpp_type_bytes(type),
                             .num_blocks = 1,
                             .blocks = &block};
  const jpp_source_t source = {.struct_size = sizeof(source),
                               .given = &given,
                               .user = have,
                               .part = give_array,
                               .lend = lend,
                               .read = read_numbers};
  jpp_array_t* array = NULL;
  ASSERT_OK(jpp_runtime_take(model->runtime, arg, NULL, &source, &array));
  assert_int_equal(array == have->array, home == JPP_HOME_CLIENT);
  bool borrows =
      home == JPP_HOME_FOREIGN && !model->graph->args[arg].donated && !have->refuses;
  assert_int_equal(have->lent, borrows);
  return array;
}

static void release_all(jpp_array_t** arrays, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) jpp_array_release(arrays[i]);
}

// Calls a step on the arguments, releases them and reads its results.
static void call(const model_t* model, jpp_array_t** args, float* numbers) {
  jpp_array_t* results[kMostArrays];
  uint32_t num_args = model->graph->num_args, num_results = model->graph->num_outputs;
  const jpp_call_t call = {.struct_size = sizeof(call),
                           .args = args,
                           .num_args = num_args,
                           .results = results,
                           .num_results = num_results};
  ASSERT_OK(jpp_runtime_call(model->runtime, &call));
  release_all(args, num_args);
  for (uint32_t o = 0; o < num_results; ++o) numbers[o] = model_read_array(results[o]);
  ASSERT_OK(jpp_runtime_await(model->runtime, NULL));
  release_all(results, num_results);
}

static void test_each_home(void** state) {
  (void)state;
  static const struct {
    jpp_home_t home;
    bool refuses;
  } kHomes[] = {{.home = JPP_HOME_HOST},
                {.home = JPP_HOME_FOREIGN},
                {.home = JPP_HOME_FOREIGN, .refuses = true},
                {.home = JPP_HOME_CLIENT}};
  char* text = model_chain(2, 2, 2);
  model_t* model = model_create(text, (model_options_t){.device_threads = 2});
  uint32_t num_args = model->graph->num_args, num_results = model->graph->num_outputs;
  assert_true(num_args <= kMostArrays && num_results <= kMostArrays);
  jpp_array_t* args[kMostArrays];
  float expected[kMostArrays], found[kMostArrays];
  for (uint32_t a = 0; a < num_args; ++a) {
    args[a] = model_array(model, a, 0, (float)a, 0);
  }
  call(model, args, expected);
  for (size_t k = 0; k < sizeof(kHomes) / sizeof(*kHomes); ++k) {
    have_t have[kMostArrays] = {0};
    for (uint32_t a = 0; a < num_args; ++a) {
      have[a].refuses = kHomes[k].refuses;
      args[a] = take(model, a, kHomes[k].home, &have[a]);
    }
    call(model, args, found);
    assert_memory_equal(found, expected, num_results * sizeof(*found));
    for (uint32_t a = 0; a < num_args; ++a) {
      assert_int_equal(have[a].released, have[a].lent);
      jpp_array_release(have[a].array);
    }
  }
  model_expect_clean(model);
  model_destroy(model);
  free(text);
}

static void test_refusals(void** state) {
  (void)state;
  char* text = model_chain(2, 2, 2);
  model_t* model = model_create(text, (model_options_t){0});
  const jpp_given_t nothing = {.struct_size = sizeof(nothing), .home = JPP_HOME_HOST};
  const jpp_source_t source = {.struct_size = sizeof(source), .given = &nothing};
  jpp_array_t* array = NULL;
  ASSERT_FAILS(jpp_runtime_take(model->runtime, 99, NULL, &source, &array),
               JPP_INVALID_ARGUMENT, "expected the number of an argument, below");
  ASSERT_FAILS(jpp_runtime_take(model->runtime, 0, NULL, &source, &array),
               JPP_INVALID_ARGUMENT, "expected 1 dimensions, found 0");
  assert_null(array);
  model_destroy(model);
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_each_home),
      cmocka_unit_test(test_refusals),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
