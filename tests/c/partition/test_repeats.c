// Repeats: what the finder reports is held against a plain comparison of blocks, and it
// finds the blocks that random graphs repeat.
#include "jaxpp/partition.h"
#include "test_util.h"

enum { kMostLayers = 5, kMostLength = 20, kMostOps = 256, kMostValues = 512 };

static uint64_t g_random = 1;

static uint32_t random_below(uint32_t bound) {
  return test_random_below(&g_random, bound);
}

// A layer: op k takes the result of op k - 1 and another value.
typedef enum source { FROM_WEIGHT, FROM_COMMON, FROM_LAYER, NUM_SOURCES } source_t;

typedef struct layers {
  uint32_t count, length;
  bool chained;      // a layer begins with the result of the one before
  bool interleaved;  // op k of all layers, then op k + 1 (independent layers only)
  uint32_t codes[kMostLength], other[kMostLength];
  source_t source[kMostLength];
  int64_t odd;  // one op of this layer has another code; -1: all layers are equal
} layers_t;

static layers_t random_layers(void) {
  layers_t layers = {.count = 2 + random_below(kMostLayers - 1), .odd = -1};
  layers.length = 8 + random_below(kMostLength - 7);
  layers.chained = random_below(2);
  layers.interleaved = !layers.chained && random_below(2);
  for (uint32_t k = 0; k < layers.length; ++k) {
    layers.codes[k] = 1 + random_below(6);
    layers.source[k] = (source_t)random_below(k ? NUM_SOURCES : FROM_LAYER);
    layers.other[k] = k ? random_below(k) : 0;
  }
  return layers;
}

typedef struct graph {
  jpp_graph_builder_t* builder;
  jpp_type_t type;
  uint32_t start, common, weights[kMostLayers], made[kMostLayers][kMostLength];
} graph_t;

static uint32_t add_op(graph_t* g, uint32_t code, uint8_t flags, uint32_t a, uint32_t b) {
  uint32_t inputs[] = {a, b}, made = 0;
  jpp_op_desc_t desc = {.struct_size = sizeof(desc),
                        .kind = JPP_OP_CALL,
                        .flags = flags,
                        .num_inputs = 2,
                        .inputs = inputs,
                        .num_outputs = 1,
                        .outputs = &g->type,
                        .name = "op",
                        .code = code};
  ASSERT_OK(jpp_graph_builder_add_op(g->builder, &desc, &made));
  return made;
}

static void add_layer_op(graph_t* g, const layers_t* layers, uint32_t layer, uint32_t k) {
  bool first = layer == 0 || !layers->chained;
  uint32_t before = first ? g->start : g->made[layer - 1][layers->length - 1];
  uint32_t others[] = {g->weights[layer], g->common, g->made[layer][layers->other[k]]};
  bool odd = layers->odd == layer && k == layers->length / 2;
  g->made[layer][k] =
      add_op(g, layers->codes[k] + (odd ? 100 : 0), 0, k ? g->made[layer][k - 1] : before,
             others[layers->source[k]]);
}

static jpp_graph_t* build(const layers_t* layers, jpp_type_t type) {
  graph_t g = {.type = type};
  jpp_graph_t* graph = NULL;
  ASSERT_OK(jpp_graph_builder_create("step", 1, &g.builder));
  ASSERT_OK(jpp_graph_builder_add_arg(g.builder, &type, false, "start", &g.start));
  ASSERT_OK(jpp_graph_builder_add_arg(g.builder, &type, false, "common", &g.common));
  for (uint32_t i = 0; i < layers->count; ++i) {
    ASSERT_OK(jpp_graph_builder_add_arg(g.builder, &type, false, "w", &g.weights[i]));
  }
  uint32_t outputs[kMostLayers + 1] = {add_op(&g, 50, 0, g.common, g.common)};
  uint32_t steps = layers->count * layers->length;
  for (uint32_t i = 0; i < steps; ++i) {
    uint32_t layer = layers->interleaved ? i % layers->count : i / layers->length;
    uint32_t k = layers->interleaved ? i / layers->count : i % layers->length;
    add_layer_op(&g, layers, layer, k);
  }
  for (uint32_t i = 0; i < layers->count; ++i) {
    outputs[i + 1] = g.made[i][layers->length - 1];
  }
  for (uint32_t i = 0; i <= layers->count; ++i) {
    ASSERT_OK(jpp_graph_builder_add_output(g.builder, outputs[i], NULL, JPP_NONE));
  }
  ASSERT_OK(jpp_graph_builder_finish(g.builder, &graph));
  jpp_graph_builder_destroy(g.builder);
  return graph;
}

static jpp_staged_t* partition(const jpp_graph_t* graph) {
  jpp_staged_t* staged = NULL;
  jpp_partition_options_t options = {.struct_size = sizeof(options), .ranks = 1};
  ASSERT_OK(jpp_partition(graph, &options, &staged));
  return staged;
}

// --- A plain comparison ---------------------------------------------------------------

static void check_order(const jpp_staged_t* staged, const jpp_task_t* task,
                        const uint32_t* ops) {
  bool placed[kMostOps] = {0}, in_task[kMostOps] = {0};
  for (uint32_t i = 0; i < task->num_ops; ++i) in_task[task->ops[i]] = true;
  for (uint32_t i = 0; i < task->num_ops; ++i) {
    const jpp_op_t* op = &staged->ops[ops[i]];
    assert_true(in_task[ops[i]] && !placed[ops[i]]);
    for (uint32_t k = 0; k < op->num_inputs; ++k) {
      uint32_t producer = staged->values[op->inputs[k]].producer;
      assert_true(producer == JPP_NONE || !in_task[producer] || placed[producer]);
    }
    placed[ops[i]] = true;
  }
}

// Whether two blocks are equal up to a one-to-one renaming of their values.
static bool are_equal(const jpp_staged_t* staged, const uint32_t* a, const uint32_t* b,
                      uint32_t length) {
  uint32_t to[kMostValues], from[kMostValues];
  memset(to, 0xff, sizeof(to));
  memset(from, 0xff, sizeof(from));
  for (uint32_t i = 0; i < length; ++i) {
    const jpp_op_t *x = &staged->ops[a[i]], *y = &staged->ops[b[i]];
    if (x->code != y->code || x->flags != y->flags) return false;
    for (uint32_t k = 0; k <= x->num_inputs; ++k) {
      uint32_t u = k < x->num_inputs ? x->inputs[k] : x->first_output;
      uint32_t v = k < y->num_inputs ? y->inputs[k] : y->first_output;
      if (to[u] == JPP_NONE && from[v] == JPP_NONE) to[u] = v, from[v] = u;
      if (to[u] != v || from[v] != u) return false;
    }
  }
  return true;
}

// Checks all repeats, and returns the number of ops that they save.
static uint32_t check_repeats(const jpp_staged_t* staged) {
  uint32_t saved = 0;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    uint32_t ops[kMostOps], count = 0, end = 0;
    jpp_repeat_t repeats[kMostOps / 2];
    ASSERT_OK(jpp_staged_find_repeats(staged, t, ops, repeats, &count));
    check_order(staged, task, ops);
    for (uint32_t r = 0; r < count; ++r) {
      const jpp_repeat_t* repeat = &repeats[r];
      assert_true(repeat->first >= end && repeat->count >= 2);
      for (uint32_t k = 1; k < repeat->count; ++k) {
        const uint32_t* first = &ops[repeat->first];
        assert_true(are_equal(staged, first, first + k * repeat->length, repeat->length));
      }
      end = repeat->first + repeat->count * repeat->length;
      saved += (repeat->count - 1) * repeat->length;
    }
    assert_true(end <= task->num_ops);
  }
  return saved;
}

static uint32_t saved_of(const layers_t* layers, jpp_type_t type) {
  jpp_graph_t* graph = build(layers, type);
  jpp_staged_t* staged = partition(graph);
  uint32_t saved = check_repeats(staged);
  jpp_staged_destroy(staged);
  jpp_graph_destroy(graph);
  return saved;
}

static const int64_t kDims[] = {4};
static const jpp_type_t kType = {.dtype = JPP_DTYPE_F32, .ndim = 1, .dims = kDims};

static void test_layers_are_found(void** state) {
  (void)state;
  for (uint32_t n = 0; n < 2000; ++n) {
    layers_t layers = random_layers();
    uint32_t saved = saved_of(&layers, kType);
    if (saved < (layers.count - 1) * layers.length) {
      fail_msg("graph %u: saves %u ops of %u layers of %u", n, saved, layers.count,
               layers.length);
    }
  }
}

// One layer is like no other: what is found is still equal.
static void test_a_layer_that_differs(void** state) {
  (void)state;
  for (uint32_t n = 0; n < 2000; ++n) {
    layers_t layers = random_layers();
    layers.odd = random_below(layers.count);
    uint32_t saved = saved_of(&layers, kType);
    assert_true(saved < (layers.count - 1) * layers.length + kMostLength);
  }
}

// --- What is not a repeat -------------------------------------------------------------

enum { kLength = 8 };

typedef struct pair_options {
  uint8_t flags;      // of the ops
  uint32_t code;      // of the ops
  bool other_type;    // the second block takes and makes values of another type
  bool same_operand;  // the second block takes one value where the first takes two
} pair_options_t;

// Two blocks of kLength ops each. Op k takes the one before, and for the first two ops
// two different weights.
static uint32_t saved_of_pair(pair_options_t options) {
  static const int64_t kOther[] = {5};
  jpp_graph_t* graph = NULL;
  graph_t g = {.type = kType};
  ASSERT_OK(jpp_graph_builder_create("step", 1, &g.builder));
  uint32_t args[2][3];
  for (uint32_t block = 0; block < 2; ++block) {
    if (block && options.other_type) g.type.dims = kOther;
    for (uint32_t i = 0; i < 3; ++i) {
      ASSERT_OK(
          jpp_graph_builder_add_arg(g.builder, &g.type, false, "arg", &args[block][i]));
    }
  }
  g.type = kType;
  for (uint32_t block = 0; block < 2; ++block) {
    if (block && options.other_type) g.type.dims = kOther;
    uint32_t value = args[block][0];
    for (uint32_t k = 0; k < kLength; ++k) {
      uint32_t which = block && options.same_operand ? 1 : 1 + k % 2;
      uint32_t code = options.code ? options.code + k : 0;
      value = add_op(&g, code, options.flags, value, args[block][which]);
    }
    ASSERT_OK(jpp_graph_builder_add_output(g.builder, value, NULL, JPP_NONE));
  }
  ASSERT_OK(jpp_graph_builder_finish(g.builder, &graph));
  jpp_graph_builder_destroy(g.builder);
  jpp_staged_t* staged = partition(graph);
  uint32_t saved = check_repeats(staged);
  jpp_staged_destroy(staged);
  jpp_graph_destroy(graph);
  return saved;
}

static void test_what_differs_is_no_repeat(void** state) {
  (void)state;
  assert_int_equal(saved_of_pair((pair_options_t){.code = 1}), kLength);
  assert_int_equal(saved_of_pair((pair_options_t){.code = 0}), 0);
  assert_int_equal(saved_of_pair((pair_options_t){.code = 1, .flags = JPP_OP_EFFECT}), 0);
  assert_int_equal(saved_of_pair((pair_options_t){.code = 1, .other_type = true}), 0);
  assert_int_equal(saved_of_pair((pair_options_t){.code = 1, .same_operand = true}), 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_layers_are_found),
      cmocka_unit_test(test_a_layer_that_differs),
      cmocka_unit_test(test_what_differs_is_no_repeat),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
