// The graph builder: which calls it accepts, how it refuses the others, and that no call
// crashes it.
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
  return (jpp_op_desc_t){.struct_size = sizeof(jpp_op_desc_t),
                         .kind = kind,
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
  ASSERT_FAILS(jpp_graph_builder_add_output(builder, 0, "x", JPP_NONE), code, why);
  ASSERT_FAILS(jpp_graph_builder_leave_output(builder, &id, 1), code, why);
  ASSERT_FAILS(jpp_graph_builder_give_arg(builder, &id, 1), code, why);
  ASSERT_FAILS(jpp_graph_builder_finish(builder, &graph), code, why);
  assert_null(graph);
}

static void test_a_builder_is_over_when_it_has_finished(void** state) {
  (void)state;
  jpp_graph_builder_t* builder = create();
  jpp_graph_t* graph = NULL;
  ASSERT_OK(jpp_graph_builder_add_output(builder, 0, NULL, JPP_NONE));
  ASSERT_OK(jpp_graph_builder_finish(builder, &graph));
  assert_over(builder, "graph builder: it has finished");
  jpp_graph_builder_destroy(builder);
  jpp_graph_destroy(graph);
}

static void test_a_builder_is_over_when_a_call_has_failed(void** state) {
  (void)state;
  jpp_graph_builder_t* builder = create();
  ASSERT_FAILS(jpp_graph_builder_add_output(builder, 7, "x", JPP_NONE), JPP_GRAPH_ERROR,
               "output 0 is value %7");
  assert_over(builder, "graph builder: a call has failed");
  jpp_graph_builder_destroy(builder);
}

static void test_ranks_are_those_of_an_output(void** state) {
  (void)state;
  static const uint32_t kRanks[] = {0, 9};
  jpp_graph_builder_t* builder = create();
  ASSERT_FAILS(jpp_graph_builder_leave_output(builder, kRanks, 1), JPP_GRAPH_ERROR,
               "expected an output before the ranks that it is left on");
  jpp_graph_builder_destroy(builder);
  builder = create();
  ASSERT_OK(jpp_graph_builder_add_output(builder, 0, NULL, JPP_NONE));
  ASSERT_FAILS(jpp_graph_builder_leave_output(builder, kRanks, 2), JPP_GRAPH_ERROR,
               "output 0 is left on rank 9; expected one of ");
  jpp_graph_builder_destroy(builder);
}

static void test_ranks_are_those_of_an_argument(void** state) {
  (void)state;
  static const uint32_t kRanks[] = {1, 0};
  jpp_graph_builder_t* builder = NULL;
  ASSERT_OK(jpp_graph_builder_create("g", 3, &builder));
  ASSERT_FAILS(jpp_graph_builder_give_arg(builder, kRanks, 1), JPP_GRAPH_ERROR,
               "expected an argument before the ranks that it is given on");
  jpp_graph_builder_destroy(builder);
  builder = create();
  ASSERT_FAILS(jpp_graph_builder_give_arg(builder, kRanks, 2), JPP_GRAPH_ERROR,
               "argument 0 is given on rank 1, then on 0; expected each rank once");
  jpp_graph_builder_destroy(builder);
}

static void assert_op_refused(jpp_op_desc_t desc, const char* why) {
  jpp_graph_builder_t* builder = create();
  uint32_t first = 0;
  ASSERT_FAILS(jpp_graph_builder_add_op(builder, &desc, &first), JPP_GRAPH_ERROR, why);
  jpp_graph_builder_destroy(builder);
}

static void test_tasks_have_a_rank_outside_loops(void** state) {
  (void)state;
  jpp_op_desc_t task = op(JPP_OP_TASK);
  static const uint32_t kRanks[] = {0, 40};
  assert_op_refused(task, "a @task runs on no rank");
  task.num_ranks = 2;
  task.ranks = kRanks;
  assert_op_refused(task, "op 0 is run on rank 40; expected one of 2 ranks");
  jpp_graph_builder_t* builder = create();
  uint32_t id = 0;
  jpp_loop_desc_t loop = {.microbatches = 1};
  ASSERT_OK(jpp_graph_builder_begin_loop(builder, &loop, &id));
  task.num_ranks = 1;
  ASSERT_FAILS(jpp_graph_builder_add_op(builder, &task, &id), JPP_GRAPH_ERROR,
               "a @task belongs outside loops");
  jpp_graph_builder_destroy(builder);
}

static void test_only_ops_of_front_ends_are_added(void** state) {
  (void)state;
  assert_op_refused(op(JPP_OP_LOOP), "op 0 (f, ?): kind 6 is added by end_loop");
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
  assert_type_refused((jpp_type_t){.dtype = JPP_DTYPE_INVALID},
                      "element type 0 is not in dtype.h");
  assert_type_refused((jpp_type_t){.dtype = (jpp_dtype_t)99},
                      "element type 99 is not in dtype.h");
  assert_type_refused((jpp_type_t){JPP_DTYPE_F32, 33, dims}, "at most 32 dimensions");
  assert_type_refused((jpp_type_t){.dtype = JPP_DTYPE_F32, .memory = JPP_MEMORY_COUNT},
                      "memory 2 is not in memory.h");
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

static void test_marks_and_flags_and_shards_are_in_range(void** state) {
  (void)state;
  jpp_op_desc_t desc = op(JPP_OP_MARK);
  desc.attr = 1u << 31;
  assert_op_refused(desc, "found flags 0 and stage 2147483648");
  desc = op(JPP_OP_CALL);
  desc.flags = 128;
  assert_op_refused(desc, "found flags 128 and stage 0");
  assert_type_refused((jpp_type_t){.dtype = JPP_DTYPE_F32, .shards = 1u << 31},
                      "fewer than 2^31 shards");
  int64_t dims[] = {6, 10};
  jpp_type_t type = {JPP_DTYPE_F32, 2, dims};
  static const uint32_t kUneven[] = {7, 8, 9, 120};
  for (size_t i = 0; i < sizeof(kUneven) / sizeof(*kUneven); ++i) {
    type.shards = kUneven[i];
    assert_type_refused(type, "a number of shards that divides its elements");
  }
  jpp_graph_builder_t* builder = NULL;
  uint32_t value = 0;
  ASSERT_OK(jpp_graph_builder_create("g", 1, &builder));
  static const uint32_t kEven[] = {0, 1, 4, 15, 60};
  for (size_t i = 0; i < sizeof(kEven) / sizeof(*kEven); ++i) {
    type.shards = kEven[i];
    ASSERT_OK(jpp_graph_builder_add_arg(builder, &type, false, NULL, &value));
  }
  dims[1] = 0;
  type.shards = 7;
  ASSERT_OK(jpp_graph_builder_add_arg(builder, &type, false, NULL, &value));
  jpp_graph_builder_destroy(builder);
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
               JPP_GRAPH_ERROR, "loop 0, result 0: 4 is not a kind of reduction");
  jpp_graph_builder_destroy(builder);
  ASSERT_FAILS(jpp_graph_builder_create("g", 1u << 31, &builder), JPP_MESH_ERROR,
               "fewer than 2^31 ranks");
}

// The text form can write and read back the largest type that the builder accepts.
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

// --- Random calls ---

static uint64_t g_random;

static uint32_t random_below(uint32_t bound) {
  return test_random_below(&g_random, bound);
}

// Mostly a small number, sometimes one at the edge of the range.
static uint32_t random_u32(void) {
  static const uint32_t kEdges[] = {INT32_MAX, 1u << 31, UINT32_MAX, 0};
  return random_below(60) ? random_below(4) : kEdges[random_below(4)];
}

static const char* random_name(void) {
  static const char* const kNames[] = {"dot",  "a b",   "=",       "",
                                       "x\ny", "\"q\\", "caf\xc3", NULL};
  return random_below(2) ? "f" : kNames[random_below(8)];
}

static const int64_t kTwo[] = {2};

static jpp_type_t random_type(void) {
  static int64_t dims[33];
  static const int64_t kEdges[] = {0, -1, (int64_t)1 << 53, INT64_MAX};
  if (random_below(4)) return (jpp_type_t){JPP_DTYPE_F32, 1, kTwo};
  for (uint32_t i = 0; i < 33; ++i) {
    dims[i] = random_below(200) ? 1 + random_below(2) : kEdges[random_below(4)];
  }
  bool odd = random_below(40) == 0;
  return (jpp_type_t){
      .dtype = (jpp_dtype_t)(odd ? random_below(40) : JPP_DTYPE_F32),
      .ndim = odd ? random_below(35) : random_below(2),
      .dims = dims,
      .shards = random_below(8)   ? 0
                : random_below(8) ? 1
                                  : random_u32() & 3,
  };
}

typedef struct random_graph {
  jpp_graph_builder_t* builder;
  uint32_t values;  // number of values after the last call
  bool in_loop;
  bool late_args;  // has an argument after an op; the text prints arguments first
  bool has_op;
} random_graph_t;

static float random_cost(void) {
  static const float kCosts[] = {0, 1, 1e28f, 1e-45f, 0.1f, -1, NAN};
  return random_below(60) ? kCosts[random_below(5)] : kCosts[random_below(7)];
}

static uint32_t random_value(const random_graph_t* g) {
  return random_below(60) && g->values ? random_below(g->values) : random_u32();
}

static jpp_status_t* random_op(random_graph_t* g, uint32_t* out_id) {
  static const uint32_t kRanks[] = {0, 1};
  uint32_t inputs[3];
  jpp_type_t outputs[3];
  bool mark = random_below(3) == 0;
  for (uint32_t i = 0; i < 3; ++i) {
    inputs[i] = random_value(g);
    outputs[i] = mark ? (jpp_type_t){JPP_DTYPE_F32, 1, kTwo} : random_type();
  }
  uint32_t count = random_below(3);
  jpp_op_desc_t desc = {
      .struct_size = sizeof(desc),
      .kind = mark ? (jpp_op_kind_t)random_below(random_below(9) ? 6 : 10) : JPP_OP_CALL,
      .flags = (uint8_t)(random_below(90) ? random_below(8) : random_below(256)),
      .attr = random_u32(),
      .num_inputs = !g->values ? 0
                    : mark     ? count
                               : random_below(4),
      .inputs = inputs,
      .num_outputs = mark && random_below(2) ? 1 : count,
      .outputs = outputs,
      .cost = random_cost(),
      .name = random_name(),
      .where = random_name(),
      .num_ranks = mark ? random_below(3) : 0,
      .ranks = kRanks,
  };
  g->has_op = true;
  return jpp_graph_builder_add_op(g->builder, &desc, out_id);
}

static jpp_status_t* random_end(random_graph_t* g, uint32_t* out_id) {
  jpp_loop_result_t results[2];
  jpp_type_t types[2];
  for (uint32_t i = 0; i < 2; ++i) {
    results[i] =
        (jpp_loop_result_t){.reduce = (uint8_t)random_below(random_below(30) ? 4 : 6),
                            .value = random_value(g)};
    types[i] = (jpp_type_t){JPP_DTYPE_F32, 1, kTwo};
  }
  g->in_loop = false;
  return jpp_graph_builder_end_loop(g->builder, results, types, random_below(3), out_id);
}

// Makes one random call and updates g->values.
static jpp_status_t* random_call(random_graph_t* g) {
  jpp_type_t type = random_type();
  jpp_loop_desc_t loop = {.microbatches = 1 + random_u32(),
                          .stages = random_u32(),
                          .schedule = random_name(),
                          .where = random_name()};
  uint32_t id = g->values, choice = random_below(10);
  const uint32_t ranks[] = {random_below(3), random_below(4)};
  bool wrong = random_below(200) == 0;  // make a call that is not allowed here
  jpp_status_t* status = NULL;
  if (choice == 0 && g->in_loop != wrong) {
    status = random_end(g, &id);
  } else if (choice == 0) {
    status = jpp_graph_builder_begin_loop(g->builder, &loop, &id);
    g->in_loop = true;
  } else if (choice < 4 && g->in_loop == wrong) {
    status =
        jpp_graph_builder_add_arg(g->builder, &type, choice == 1, random_name(), &id);
    g->late_args = g->late_args || g->has_op;
  } else if (choice == 4 && random_below(4) == 0) {
    return random_below(2)
               ? jpp_graph_builder_leave_output(g->builder, ranks, random_below(3))
               : jpp_graph_builder_give_arg(g->builder, ranks, random_below(3));
  } else if (choice == 4) {
    return jpp_graph_builder_add_output(g->builder, random_value(g), random_name(),
                                        random_below(4) ? JPP_NONE : random_value(g));
  } else {
    status = random_op(g, &id);
  }
  g->has_op = g->has_op || choice == 0;
  g->values = id + (status ? 0 : 1);
  return status;
}

static char* read_back(const char* text) {
  jpp_graph_t* graph = NULL;
  char* again = NULL;
  jpp_status_t* status = jpp_graph_parse(text, strlen(text), "text", &graph);
  if (status) fail_msg("%s, of the text\n%s", jpp_status_message(status), text);
  ASSERT_OK(jpp_graph_print(graph, &again));
  jpp_graph_destroy(graph);
  return again;
}

// The parser accepts every graph that the builder made, and printing the parsed graph
// gives the same text. If arguments were added after ops, ids change once, because the
// text lists arguments first.
static void test_what_random_calls_make_is_read_back(void** state) {
  (void)state;
  uint32_t made = 0, refused = 0, looped = 0;
  for (uint32_t seed = 0; seed < 30000; ++seed) {
    g_random = seed;
    random_graph_t g = {0};
    jpp_graph_t* graph = NULL;
    jpp_status_t* status =
        jpp_graph_builder_create(random_name(), random_u32(), &g.builder);
    for (uint32_t calls = random_below(12); !status && calls > 0; --calls) {
      status = random_call(&g);
    }
    if (!status) status = jpp_graph_builder_finish(g.builder, &graph);
    ++*(status ? &refused : &made);
    if (!status) {
      char* text = NULL;
      ASSERT_OK(jpp_graph_print(graph, &text));
      looped += graph->num_loops > 0;
      char* again = read_back(text);
      char* third = read_back(again);
      assert_string_equal(third, again);
      if (!g.late_args) assert_string_equal(again, text);
      jpp_text_free(text);
      jpp_text_free(again);
      jpp_text_free(third);
    } else if (g.builder) {
      assert_over(g.builder, "graph builder: a call has failed");
    }
    jpp_status_free(status);
    jpp_graph_builder_destroy(g.builder);
    jpp_graph_destroy(graph);
  }
  assert_true(made > 3000 && refused > 3000 && looped > 300);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_builder_is_over_when_it_has_finished),
      cmocka_unit_test(test_a_builder_is_over_when_a_call_has_failed),
      cmocka_unit_test(test_ranks_are_those_of_an_output),
      cmocka_unit_test(test_ranks_are_those_of_an_argument),
      cmocka_unit_test(test_tasks_have_a_rank_outside_loops),
      cmocka_unit_test(test_only_ops_of_front_ends_are_added),
      cmocka_unit_test(test_costs_are_numbers_that_can_be_summed),
      cmocka_unit_test(test_types_have_dimensions_and_bytes),
      cmocka_unit_test(test_marks_and_flags_and_shards_are_in_range),
      cmocka_unit_test(test_what_random_calls_make_is_read_back),
      cmocka_unit_test(test_loops_have_microbatches_and_reductions),
      cmocka_unit_test(test_the_largest_of_all_is_read_back),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
