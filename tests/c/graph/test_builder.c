// The graph's builder: what it takes, how it refuses, and that nothing crashes it.
#include <math.h>
#include <stdio.h>

#include "jaxpp/graph.h"
#include "test_util.h"

static const jpp_type_t kScalar = {.dtype = JPP_DTYPE_F32};

static jpp_graph_builder_t* create(void) {
  jpp_graph_builder_t* builder = NULL;
  uint32_t value = 0;
  ASSERT_OK(jpp_graph_builder_create("g", 2, &builder));
  ASSERT_OK(jpp_graph_builder_add_arg(builder, &kScalar, false, "x", &value));
  return builder;
}

static jpp_op_desc_t op(jpp_op_kind_t kind) {
  static const uint32_t kInputs[] = {0};
  return (jpp_op_desc_t){.kind = kind,
                         .num_inputs = 1,
                         .inputs = kInputs,
                         .num_outputs = 1,
                         .outputs = &kScalar,
                         .name = "f"};
}

static void assert_over(jpp_graph_builder_t* builder, const char* why) {
  jpp_op_desc_t call = op(JPP_OP_CALL);
  jpp_loop_desc_t loop = {.microbatches = 1};
  jpp_loop_result_t result = {.value = 0};
  jpp_graph_t* graph = NULL;
  uint32_t id = 0;
  const jpp_status_code_t code = JPP_INVALID_ARGUMENT;
  ASSERT_FAILS(jpp_graph_builder_add_arg(builder, &kScalar, true, "y", &id), code, why);
  ASSERT_FAILS(jpp_graph_builder_add_op(builder, &call, &id), code, why);
  ASSERT_FAILS(jpp_graph_builder_begin_loop(builder, &loop, &id), code, why);
  ASSERT_FAILS(jpp_graph_builder_end_loop(builder, &result, &kScalar, 1, &id), code, why);
  ASSERT_FAILS(jpp_graph_builder_add_output(builder, 0, "x"), code, why);
  ASSERT_FAILS(jpp_graph_builder_finish(builder, &graph), code, why);
  assert_null(graph);
}

static void test_a_builder_is_over_when_it_has_finished(void** state) {
  (void)state;
  jpp_graph_builder_t* builder = create();
  jpp_graph_t* graph = NULL;
  ASSERT_OK(jpp_graph_builder_add_output(builder, 0, NULL));
  ASSERT_OK(jpp_graph_builder_finish(builder, &graph));
  assert_over(builder, "graph builder: it has finished");
  jpp_graph_builder_destroy(builder);
  jpp_graph_destroy(graph);
}

static void test_a_builder_is_over_when_a_call_has_failed(void** state) {
  (void)state;
  jpp_graph_builder_t* builder = create();
  ASSERT_FAILS(jpp_graph_builder_add_output(builder, 7, "x"), JPP_GRAPH_ERROR,
               "output 0 is value %7");
  assert_over(builder, "graph builder: a call has failed");
  jpp_graph_builder_destroy(builder);
}

static void assert_op_refused(jpp_op_desc_t desc, const char* why) {
  jpp_graph_builder_t* builder = create();
  uint32_t first = 0;
  ASSERT_FAILS(jpp_graph_builder_add_op(builder, &desc, &first), JPP_GRAPH_ERROR, why);
  jpp_graph_builder_destroy(builder);
}

static void test_only_ops_of_front_ends_are_added(void** state) {
  (void)state;
  assert_op_refused(op(JPP_OP_LOOP), "op 0 (f, ?): kind 5 is added by end_loop");
  for (int kind = JPP_OP_INIT; kind < 260; ++kind) {
    assert_op_refused(op((jpp_op_kind_t)kind), "is added by the planner only");
  }
  assert_op_refused(op((jpp_op_kind_t)-1), "is added by the planner only");
}

static void test_costs_are_numbers_that_can_be_summed(void** state) {
  (void)state;
  static const float kBad[] = {NAN, INFINITY, -1, 3e38f};
  for (size_t i = 0; i < sizeof(kBad) / sizeof(*kBad); ++i) {
    jpp_op_desc_t desc = op(JPP_OP_CALL);
    desc.cost = kBad[i];
    assert_op_refused(desc, "expected a cost of 0 to 1e+28");
  }
}

static void assert_type_refused(jpp_type_t type, const char* why) {
  jpp_op_desc_t desc = op(JPP_OP_CALL);
  desc.outputs = &type;
  assert_op_refused(desc, why);
  jpp_graph_builder_t* builder = create();
  uint32_t value = 0;
  ASSERT_FAILS(jpp_graph_builder_add_arg(builder, &type, false, "y", &value),
               JPP_GRAPH_ERROR, why);
  jpp_graph_builder_destroy(builder);
  builder = create();
  jpp_loop_desc_t loop = {.microbatches = 2};
  jpp_loop_result_t result = {.reduce = JPP_REDUCE_CUSTOM, .value = 0};
  ASSERT_OK(jpp_graph_builder_begin_loop(builder, &loop, &value));
  ASSERT_FAILS(jpp_graph_builder_end_loop(builder, &result, &type, 1, &value),
               JPP_GRAPH_ERROR, why);
  jpp_graph_builder_destroy(builder);
}

static void test_types_have_dimensions_and_bytes(void** state) {
  (void)state;
  int64_t dims[33] = {0};
  assert_type_refused((jpp_type_t){.dtype = JPP_DTYPE_INVALID}, "element type 0 is none");
  assert_type_refused((jpp_type_t){.dtype = (jpp_dtype_t)99}, "element type 99 is none");
  assert_type_refused((jpp_type_t){JPP_DTYPE_F32, 33, dims}, "at most 32 dimensions");
  static const int64_t kBad[] = {-1, INT64_MIN, INT64_MAX, ((int64_t)1 << 53) + 1};
  for (size_t i = 0; i < sizeof(kBad) / sizeof(*kBad); ++i) {
    dims[1] = kBad[i];
    assert_type_refused((jpp_type_t){JPP_DTYPE_F32, 2, dims}, "dimension 1 is");
  }
  int64_t large[] = {(int64_t)1 << 53, 1 << 10, 1};
  assert_type_refused((jpp_type_t){JPP_DTYPE_U8, 2, large}, "more than 2^63 bytes");
  large[1] = 1 << 8;
  assert_type_refused((jpp_type_t){JPP_DTYPE_F32, 2, large}, "more than 2^63 bytes");
  large[2] = 0;
  jpp_type_t empty = {JPP_DTYPE_F32, 3, large};
  assert_int_equal(jpp_type_bytes(&empty), 0);
}

static void test_loops_have_microbatches_and_reductions(void** state) {
  (void)state;
  static const jpp_loop_desc_t kBad[] = {
      {.microbatches = 0}, {.microbatches = 1u << 31}, {.microbatches = 1, .stages = -1}};
  uint32_t id = 0;
  for (size_t i = 0; i < sizeof(kBad) / sizeof(*kBad); ++i) {
    jpp_graph_builder_t* builder = create();
    ASSERT_FAILS(jpp_graph_builder_begin_loop(builder, &kBad[i], &id),
                 JPP_MICROBATCH_ERROR, "expected");
    jpp_graph_builder_destroy(builder);
  }
  jpp_graph_builder_t* builder = create();
  jpp_loop_desc_t loop = {.microbatches = 2};
  jpp_loop_result_t result = {.reduce = 4, .value = 0};
  ASSERT_OK(jpp_graph_builder_begin_loop(builder, &loop, &id));
  ASSERT_FAILS(jpp_graph_builder_end_loop(builder, &result, &kScalar, 1, &id),
               JPP_GRAPH_ERROR, "loop 0, result 0: 4 is no kind of reduction");
  jpp_graph_builder_destroy(builder);
  ASSERT_FAILS(jpp_graph_builder_create("g", 1u << 31, &builder), JPP_MESH_ERROR,
               "fewer than 2^31 ranks");
}

// What the builder takes, the text form writes and reads back.
static void test_the_largest_of_all_is_read_back(void** state) {
  (void)state;
  int64_t dims[32] = {(int64_t)1 << 53, 1 << 9};
  for (uint32_t i = 2; i < 32; ++i) dims[i] = 1;
  jpp_type_t type = {JPP_DTYPE_U8, 32, dims};
  jpp_graph_builder_t* builder = create();
  jpp_graph_t *graph = NULL, *again = NULL;
  jpp_op_desc_t desc = op(JPP_OP_CALL);
  uint32_t first = 0;
  desc.outputs = &type;
  desc.cost = 9.99e27f;
  desc.where = "caf\xe9.py:3";
  ASSERT_OK(jpp_graph_builder_add_op(builder, &desc, &first));
  ASSERT_OK(jpp_graph_builder_finish(builder, &graph));
  char *text = NULL, *twice = NULL;
  ASSERT_OK(jpp_graph_print(graph, &text));
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "text", &again));
  ASSERT_OK(jpp_graph_print(again, &twice));
  assert_string_equal(twice, text);
  assert_true(jpp_type_equal(&again->values[first].type, &type));
  jpp_text_free(text);
  jpp_text_free(twice);
  jpp_graph_destroy(graph);
  jpp_graph_destroy(again);
  jpp_graph_builder_destroy(builder);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_builder_is_over_when_it_has_finished),
      cmocka_unit_test(test_a_builder_is_over_when_a_call_has_failed),
      cmocka_unit_test(test_only_ops_of_front_ends_are_added),
      cmocka_unit_test(test_costs_are_numbers_that_can_be_summed),
      cmocka_unit_test(test_types_have_dimensions_and_bytes),
      cmocka_unit_test(test_loops_have_microbatches_and_reductions),
      cmocka_unit_test(test_the_largest_of_all_is_read_back),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
