// Compares claims with a model: which of some random arguments a step may take, and which
// arrays it deletes.
#include "array/claim.h"
#include "test_util.h"

enum { kArrays = 5, kMostArgs = 6, kRounds = 20000 };

static const char* const kNames[kMostArgs] = {"a", "b", "c", "d", "e", "f"};

typedef struct scene {
  jpp_array_t* arrays[kArrays];
  uint32_t root[kArrays];  // the root in the model
  bool deleted[kArrays];
  uint32_t given[kMostArgs];  // kArrays: no array
  bool donated[kMostArgs];
  uint32_t count;
} scene_t;

static scene_t make_scene(uint64_t* seed) {
  scene_t scene = {.count = test_random_below(seed, kMostArgs + 1)};
  for (uint32_t i = 0; i < kArrays; ++i) {
    ASSERT_OK(jpp_array_create_elsewhere(&scene.arrays[i]));
    scene.root[i] = i;
    if (i && test_random_below(seed, 3) == 0) {
      uint32_t origin = test_random_below(seed, i);
      jpp_array_set_origin(scene.arrays[i], scene.arrays[origin]);
      scene.root[i] = scene.root[origin];
    }
    scene.deleted[i] = test_random_below(seed, 6) == 0;
    if (scene.deleted[i]) jpp_array_delete(scene.arrays[i]);
  }
  for (uint32_t a = 0; a < scene.count; ++a) {
    scene.given[a] = test_random_below(seed, kArrays + 1);
    scene.donated[a] = test_random_below(seed, 2);
  }
  return scene;
}

// True if the step may take its arguments: all are alive, and a donated one is passed
// once.
static bool may_take(const scene_t* scene) {
  for (uint32_t a = 0; a < scene->count; ++a) {
    if (scene->given[a] == kArrays) continue;
    uint32_t root = scene->root[scene->given[a]];
    if (scene->deleted[scene->given[a]] || scene->deleted[root]) return false;
    for (uint32_t b = 0; b < scene->count; ++b) {
      if (b == a || scene->given[b] == kArrays) continue;
      if (scene->donated[a] && scene->root[scene->given[b]] == root) return false;
    }
  }
  return true;
}

static void delete_donated(scene_t* scene) {
  for (uint32_t a = 0; a < scene->count; ++a) {
    if (!scene->donated[a] || scene->given[a] == kArrays) continue;
    scene->deleted[scene->given[a]] = scene->deleted[scene->root[scene->given[a]]] = true;
  }
}

static void test_random_claims(void** state) {
  (void)state;
  uint64_t seed = 23;
  for (int round = 0; round < kRounds; ++round) {
    scene_t scene = make_scene(&seed);
    jpp_array_t* given[kMostArgs] = {0};
    for (uint32_t a = 0; a < scene.count; ++a) {
      if (scene.given[a] < kArrays) given[a] = scene.arrays[scene.given[a]];
    }
    const jpp_params_t params = {.struct_size = sizeof(params),
                                 .names = kNames,
                                 .donated = scene.donated,
                                 .count = scene.count};
    jpp_status_t* status = jpp_arrays_claim(&params, given, NULL);
    assert_int_equal(may_take(&scene), status == NULL);
    if (status) {
      assert_int_equal(jpp_status_code(status), JPP_DONATED_ERROR);
    } else {
      delete_donated(&scene);
      ASSERT_OK(jpp_arrays_lose(&params, given));
    }
    jpp_status_free(status);
    for (uint32_t i = 0; i < kArrays; ++i) {
      assert_int_equal(jpp_array_is_deleted(scene.arrays[i]), scene.deleted[i]);
      jpp_array_release(scene.arrays[i]);
    }
  }
}

static void test_refusals_name_the_arguments(void** state) {
  (void)state;
  jpp_array_t* array = NULL;
  ASSERT_OK(jpp_array_create_elsewhere(&array));
  jpp_array_t* const twice[] = {array, NULL, array};
  const bool donated[] = {false, true, true};
  const jpp_params_t params = {
      .struct_size = sizeof(params), .names = kNames, .donated = donated, .count = 3};
  ASSERT_FAILS(jpp_arrays_claim(&params, twice, NULL), JPP_DONATED_ERROR,
               "arguments a and c are the same array, which the second donates");
  jpp_array_t* const once[] = {NULL, NULL, array};
  ASSERT_OK(jpp_arrays_claim(&params, once, NULL));
  ASSERT_FAILS(jpp_arrays_claim(&params, once, NULL), JPP_DONATED_ERROR,
               "argument c: expected an array, found one that was deleted or donated");
  ASSERT_OK(jpp_arrays_lose(&params, once));
  ASSERT_FAILS(jpp_arrays_claim(&params, once, NULL), JPP_DONATED_ERROR,
               "argument c: expected an array, found one that was donated to a step that "
               "failed");
  ASSERT_FAILS(jpp_array_await(array, NULL), JPP_DONATED_ERROR, "a step that failed");
  jpp_array_release(array);
}

// This process has nothing to read or lend.
static void test_arrays_elsewhere_have_no_contents(void** state) {
  (void)state;
  jpp_array_t* array = NULL;
  float number = 0;
  bool ready = false;
  jpp_loan_t loan;
  ASSERT_OK(jpp_array_create_elsewhere(&array));
  ASSERT_OK(jpp_array_await(array, NULL));
  ASSERT_OK(jpp_array_is_ready(array, &ready));
  assert_true(ready);
  ASSERT_FAILS(jpp_array_read(array, 0, 0, &number, sizeof(number), NULL),
               JPP_INVALID_ARGUMENT, "no shard 0 on rank 0");
  ASSERT_FAILS(jpp_array_lend(array, 0, 0, NULL, &loan), JPP_INVALID_ARGUMENT,
               "no shard");
  assert_null(jpp_array_shards(array, 0));
  jpp_array_release(array);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_random_claims),
      cmocka_unit_test(test_refusals_name_the_arguments),
      cmocka_unit_test(test_arrays_elsewhere_have_no_contents),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
