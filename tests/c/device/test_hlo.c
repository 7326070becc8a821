// Reads the collectives of compiled programs and their order from modules that this file
// writes: all forms of groups, loops, mutated bytes.
#include <stdlib.h>

#include "base/protobuf.h"
#include "device/hlo.h"
#include "test_util.h"

// --- Writing protocol buffers ---------------------------------------------------------

static void put_varint(jpp_str_t* out, uint64_t value) {
  char bytes[10];
  size_t count = 0;
  for (; value > 0x7f; value >>= 7) bytes[count++] = (char)(value | 0x80);
  bytes[count++] = (char)value;
  jpp_str_append_n(out, bytes, count);
}

static void put_packed(jpp_str_t* out, uint32_t field, const uint64_t* numbers,
                       size_t count) {
  jpp_str_t inside = {0};
  for (size_t i = 0; i < count; ++i) put_varint(&inside, numbers[i]);
  jpp__protobuf_put_message(out, field, &inside);
}

// f32 with this many elements.
static void put_shape(jpp_str_t* out, uint32_t field, uint64_t elements) {
  jpp_str_t shape = {0};
  jpp__protobuf_put_number(&shape, 2, 11);
  put_packed(&shape, 3, &elements, 1);
  jpp__protobuf_put_message(out, field, &shape);
}

static void start_instruction(jpp_str_t* out, const char* opcode, uint64_t elements) {
  jpp__protobuf_put_text(out, 2, opcode);
  put_shape(out, 3, elements);
}

// A computation of one instruction.
static void put_computation(jpp_str_t* module, uint64_t id, jpp_str_t* instruction) {
  jpp_str_t computation = {0};
  jpp__protobuf_put_message(&computation, 2, instruction);
  jpp__protobuf_put_number(&computation, 5, id);
  jpp__protobuf_put_message(module, 3, &computation);
}

// A module whose entry is the instruction.
static jpp_collectives_t* list_one(jpp_str_t* instruction) {
  jpp_str_t module = {0};
  put_computation(&module, 7, instruction);
  jpp__protobuf_put_number(&module, 6, 7);
  jpp_collectives_t* found = NULL;
  ASSERT_OK(jpp__hlo_collectives(module.data, module.length, &found));
  jpp_str_deinit(&module);
  return found;
}

static void expect_members(const jpp_collectives_t* found, const uint32_t* members,
                           uint32_t count) {
  assert_int_equal(found->count, 1);
  assert_int_equal(found->each[0].num_members, count);
  for (uint32_t i = 0; i < count; ++i) {
    assert_int_equal(found->each[0].members[i], members[i]);
  }
}

static void expect_axes(const jpp_collective_t* collective, const char* expected) {
  static const char* const kNames[] = {"stage", "data", "model"};
  static const uint32_t kSizes[] = {1, 2, 4};
  char* axes = NULL;
  ASSERT_OK(jpp_collective_axes(collective, 3, kNames, kSizes, &axes));
  assert_string_equal(axes, expected);
  jpp_text_free(axes);
}

// --- Groups ---------------------------------------------------------------------------

static void test_listed_groups(void** state) {
  (void)state;
  static const uint64_t kIds[] = {4, 0};
  jpp_str_t instruction = {0}, group = {0};
  start_instruction(&instruction, "all-gather", 6);
  put_packed(&group, 1, kIds, 2);
  jpp__protobuf_put_message(&instruction, 49, &group);
  jpp_collectives_t* found = list_one(&instruction);
  expect_members(found, (uint32_t[]){0, 4}, 2);
  assert_int_equal(found->each[0].kind, JPP_COLLECTIVE_ALL_GATHER);
  assert_int_equal(found->each[0].bytes, 24);
  assert_int_equal(found->each[0].times, 1);
  expect_axes(&found->each[0], "data");
  jpp_collectives_destroy(found);
}

static void test_pairs(void** state) {
  (void)state;
  jpp_str_t instruction = {0}, pair = {0};
  start_instruction(&instruction, "collective-permute", 1);
  jpp__protobuf_put_number(&pair, 1, 1);
  jpp__protobuf_put_number(&pair, 2, 2);
  jpp__protobuf_put_message(&instruction, 52, &pair);
  jpp_collectives_t* found = list_one(&instruction);
  expect_members(found, (uint32_t[]){1, 2}, 2);
  expect_axes(&found->each[0], "model");
  jpp_collectives_destroy(found);
}

static void test_all_partitions(void** state) {
  (void)state;
  jpp_str_t instruction = {0};
  start_instruction(&instruction, "all-reduce", 1);
  jpp_collectives_t* found = list_one(&instruction);
  expect_members(found, NULL, 0);
  expect_axes(&found->each[0], "data,model");
  jpp_collectives_destroy(found);
}

static int compare_u32(const void* a, const void* b) {
  uint32_t left = *(const uint32_t*)a, right = *(const uint32_t*)b;
  return (left > right) - (left < right);
}

enum { kMostAxes = 3 };

// A random mesh and a choice of its axes. An iota list permutes the chosen axes to the
// end, where they vary fastest; a list of mesh axes names them.
typedef struct groups {
  uint64_t sizes[kMostAxes], order[kMostAxes];
  uint32_t chosen;  // the last ones in `order`
  uint32_t members[64], count;
} groups_t;

static groups_t random_groups(void) {
  groups_t g = {.chosen = 1 + (uint32_t)rand() % kMostAxes, .count = 1};
  uint64_t strides[kMostAxes], stride = 1;
  for (uint32_t a = kMostAxes; a-- > 0; stride *= g.sizes[a]) {
    g.sizes[a] = 1 + (uint64_t)rand() % 4;
    strides[a] = stride;
    g.order[a] = a;
  }
  for (uint32_t a = kMostAxes; a-- > 1;) {
    uint32_t b = (uint32_t)rand() % (a + 1);
    uint64_t swapped = g.order[a];
    g.order[a] = g.order[b];
    g.order[b] = swapped;
  }
  for (uint32_t k = kMostAxes - g.chosen; k < kMostAxes; ++k) {
    uint64_t axis = g.order[k];
    uint32_t before = g.count;
    for (uint64_t at = 1; at < g.sizes[axis]; ++at) {
      for (uint32_t i = 0; i < before; ++i) {
        g.members[g.count++] = g.members[i] + (uint32_t)(at * strides[axis]);
      }
    }
  }
  qsort(g.members, g.count, sizeof(*g.members), compare_u32);
  return g;
}

static void put_iota(jpp_str_t* out, uint32_t field, const groups_t* g) {
  jpp_str_t list = {0};
  jpp__protobuf_put_number(&list, 1, g->sizes[0] * g->sizes[1] * g->sizes[2] / g->count);
  jpp__protobuf_put_number(&list, 2, g->count);
  put_packed(&list, 3, g->sizes, kMostAxes);
  put_packed(&list, 4, g->order, kMostAxes);
  jpp__protobuf_put_message(out, field, &list);
}

static void put_mesh_axes(jpp_str_t* out, const groups_t* g) {
  jpp_str_t list = {0}, mesh = {0};
  for (uint32_t a = 0; a < kMostAxes; ++a) {
    jpp_str_t axis = {0};
    jpp__protobuf_put_text(&axis, 1, "axis");
    jpp__protobuf_put_number(&axis, 2, g->sizes[a]);
    jpp__protobuf_put_message(&mesh, 1, &axis);
  }
  jpp__protobuf_put_message(&list, 1, &mesh);
  for (uint32_t k = kMostAxes - g->chosen; k < kMostAxes; ++k) {
    jpp_str_t ref = {0};
    jpp__protobuf_put_number(&ref, 1, g->order[k]);
    jpp__protobuf_put_message(&list, 2, &ref);
  }
  jpp__protobuf_put_message(out, 93, &list);
}

static void test_random_groups(void** state) {
  (void)state;
  srand(1);
  for (int turn = 0; turn < 3000; ++turn) {
    groups_t g = random_groups();
    jpp_str_t instruction = {0}, devices = {0};
    start_instruction(&instruction, "all-reduce-start", 2);
    if (turn % 3 == 0) put_iota(&instruction, 92, &g);
    if (turn % 3 == 1) put_mesh_axes(&instruction, &g);
    if (turn % 3 == 2) {
      put_iota(&devices, 2, &g);
      jpp__protobuf_put_message(&instruction, 87, &devices);
    }
    jpp_collectives_t* found = list_one(&instruction);
    expect_members(found, g.members, g.count);
    jpp_collectives_destroy(found);
  }
}

// The middle 2 of an axis of 8 = 2 x 2 x 2.
static void test_part_of_an_axis(void** state) {
  (void)state;
  jpp_str_t instruction = {0}, list = {0}, mesh = {0}, axis = {0}, ref = {0}, part = {0};
  start_instruction(&instruction, "reduce-scatter", 1);
  jpp__protobuf_put_number(&axis, 2, 8);
  jpp__protobuf_put_message(&mesh, 1, &axis);
  jpp__protobuf_put_message(&list, 1, &mesh);
  jpp__protobuf_put_number(&part, 1, 2);
  jpp__protobuf_put_number(&part, 2, 2);
  jpp__protobuf_put_message(&ref, 2, &part);
  jpp__protobuf_put_message(&list, 2, &ref);
  jpp__protobuf_put_message(&instruction, 93, &list);
  jpp_collectives_t* found = list_one(&instruction);
  expect_members(found, (uint32_t[]){0, 2}, 2);
  jpp_collectives_destroy(found);
}

static void test_members_outside_of_the_mesh(void** state) {
  (void)state;
  static const char* const kNames[] = {"data"};
  static const uint32_t kSizes[] = {2}, kMembers[] = {0, 2};
  jpp_collective_t collective = {.num_members = 2, .members = kMembers};
  char* axes = NULL;
  ASSERT_FAILS(jpp_collective_axes(&collective, 1, kNames, kSizes, &axes),
               JPP_INVALID_ARGUMENT, "expected one below 2");
}

// --- Modules --------------------------------------------------------------------------

// Two all-reduces; one of them is in a loop of three iterations, in a call.
static jpp_str_t module_with_loop(void) {
  static const uint64_t kBody[] = {1}, kLoop[] = {2};
  jpp_str_t module = {0}, reduce = {0}, loop = {0}, call = {0}, entry = {0};
  start_instruction(&reduce, "all-reduce", 4);
  put_computation(&module, 1, &reduce);
  start_instruction(&loop, "while", 1);
  put_packed(&loop, 38, kBody, 1);
  jpp__protobuf_put_text(&loop, 43, "{\"known_trip_count\":{\"n\":\"3\"},\"x\":1}");
  put_computation(&module, 2, &loop);
  start_instruction(&call, "call", 1);
  put_packed(&call, 38, kLoop, 1);
  jpp__protobuf_put_message(&entry, 2, &call);
  start_instruction(&reduce, "all-reduce", 1);
  jpp__protobuf_put_message(&entry, 2, &reduce);
  jpp__protobuf_put_number(&entry, 5, 9);
  jpp__protobuf_put_message(&module, 3, &entry);
  jpp__protobuf_put_number(&module, 6, 9);
  return module;
}

static void test_loops_count_each_turn(void** state) {
  (void)state;
  jpp_str_t module = module_with_loop();
  jpp_collectives_t* found = NULL;
  ASSERT_OK(jpp__hlo_collectives(module.data, module.length, &found));
  assert_int_equal(found->count, 1);
  assert_int_equal(found->each[0].times, 4);
  assert_int_equal(found->each[0].bytes, 3 * 16 + 4);
  jpp_collectives_destroy(found);
  jpp_str_deinit(&module);
}

static void test_mutated_bytes(void** state) {
  (void)state;
  srand(2);
  for (int turn = 0; turn < 20000; ++turn) {
    jpp_str_t module = module_with_loop();
    size_t size = turn % 2 ? (size_t)rand() % module.length : module.length;
    for (int k = 0; k < 1 + turn % 4; ++k) {
      module.data[(size_t)rand() % module.length] = (char)rand();
    }
    jpp_collectives_t* found = NULL;
    jpp_status_t* status = jpp__hlo_collectives(module.data, size, &found);
    assert_true((status == NULL) == (found != NULL));
    jpp_status_free(status);
    jpp_collectives_destroy(found);
    bool ordered = false;
    status = jpp__hlo_orders_collectives(module.data, size, &ordered);
    assert_false(status && ordered);
    jpp_status_free(status);
    jpp_str_deinit(&module);
  }
}

static void test_module_in_a_config(void** state) {
  (void)state;
  jpp_str_t module = module_with_loop(), whole = {0};
  size_t expected = module.length;
  jpp__protobuf_put_message(&whole, 1, &module);
  size_t size = whole.length;
  ASSERT_OK(jpp__hlo_without_config(whole.data, &size));
  assert_int_equal(size, expected);
  jpp_collectives_t* found = NULL;
  ASSERT_OK(jpp__hlo_collectives(whole.data, size, &found));
  assert_int_equal(found->each[0].times, 4);
  jpp_collectives_destroy(found);
  jpp_str_deinit(&whole);
}

// --- The order of collectives ---------------------------------------------------------

enum { kMostOps = 8 };

typedef struct op {
  const char* opcode;
  uint32_t operands;  // bit k: instruction k is one
  uint64_t called;    // kReduces or kCounts; 0: no computation
} op_t;

enum { kReduces = 1, kCounts = 2, kEntry = 3 };

static void put_op(jpp_str_t* computation, const op_t* op, uint64_t id) {
  uint64_t operands[kMostOps];
  size_t count = 0;
  for (uint64_t k = 0; k < kMostOps; ++k) {
    if (op->operands >> k & 1) operands[count++] = 100 + k;
  }
  jpp_str_t instruction = {0};
  start_instruction(&instruction, op->opcode, 1);
  jpp__protobuf_put_number(&instruction, 35, id);
  put_packed(&instruction, 36, operands, count);
  if (op->called) put_packed(&instruction, 38, &op->called, 1);
  jpp__protobuf_put_message(computation, 2, &instruction);
}

// Returns a module whose entry has the instructions before the first one without an
// opcode. The computation kReduces has a collective; kCounts has none.
static jpp_str_t module_of(const op_t* ops) {
  jpp_str_t module = {0}, inner = {0}, entry = {0};
  start_instruction(&inner, "all-reduce", 1);
  put_computation(&module, kReduces, &inner);
  start_instruction(&inner, "add", 1);
  put_computation(&module, kCounts, &inner);
  for (uint64_t i = 0; i < kMostOps && ops[i].opcode; ++i)
    put_op(&entry, &ops[i], 100 + i);
  jpp__protobuf_put_number(&entry, 5, kEntry);
  jpp__protobuf_put_message(&module, 3, &entry);
  jpp__protobuf_put_number(&module, 6, kEntry);
  return module;
}

// Frees the module.
static bool is_ordered(jpp_str_t module) {
  bool ordered = false;
  ASSERT_OK(jpp__hlo_orders_collectives(module.data, module.length, &ordered));
  jpp_str_deinit(&module);
  return ordered;
}

static void test_order_of_collectives(void** state) {
  (void)state;
  static const struct {
    bool ordered;
    op_t ops[kMostOps];
  } kCases[] = {
      {true, {{"parameter"}}},
      {true, {{"all-gather"}, {"all-gather"}}},
      {true, {{"all-gather"}, {"while", 1 << 0, kReduces}}},
      {true, {{"all-gather"}, {"add", 1 << 0}, {"while", 1 << 1, kReduces}}},
      {true, {{"while", 0, kReduces}, {"add", 1 << 0}, {"all-reduce", 1 << 1}}},
      {true, {{"all-gather"}, {"while", 0, kCounts}}},
      {true, {{"all-gather"}, {"fusion", 0, kReduces}}},
      {true, {{"while", 0, kReduces}, {"while", 0, kCounts}}},
      {false, {{"all-gather"}, {"while", 0, kReduces}}},
      {false, {{"while", 0, kReduces}, {"all-gather"}}},
      {false, {{"while", 0, kReduces}, {"while", 0, kReduces}}},
      {false, {{"call", 0, kReduces}, {"all-to-all"}, {"add", 1 << 0 | 1 << 1}}},
      {false, {{"conditional", 0, kReduces}, {"collective-permute"}}},
  };
  for (size_t i = 0; i < sizeof(kCases) / sizeof(*kCases); ++i) {
    assert_int_equal(is_ordered(module_of(kCases[i].ops)), kCases[i].ordered);
  }
}

// Compares each result with one that follows all paths between the instructions.
static void test_random_orders(void** state) {
  (void)state;
  static const op_t kKinds[] = {{"add"}, {"all-reduce"}, {"while", 0, kReduces}};
  srand(3);
  uint32_t counts[2] = {0};
  for (int turn = 0; turn < 20000; ++turn) {
    op_t ops[kMostOps];
    uint32_t before[kMostOps] = {0};  // bit k: the instruction depends on k
    bool expected = true;
    for (uint32_t i = 0; i < kMostOps; ++i) {
      ops[i] = kKinds[rand() % 3];
      ops[i].operands = (uint32_t)(rand() & rand()) & ((1U << i) - 1);
      for (uint32_t k = 0; k < i; ++k) {
        if (ops[i].operands >> k & 1) before[i] |= before[k] | 1U << k;
      }
      for (uint32_t k = 0; k < i; ++k) {
        bool communicate = strcmp(ops[i].opcode, "add") && strcmp(ops[k].opcode, "add");
        bool loops = ops[i].called || ops[k].called;
        if (communicate && loops && !(before[i] >> k & 1)) expected = false;
      }
    }
    assert_int_equal(is_ordered(module_of(ops)), expected);
    ++counts[expected];
  }
  assert_true(counts[0] > 1000 && counts[1] > 1000);
}

// The collectives are in a computation that the entry calls.
static void test_order_in_a_called_computation(void** state) {
  (void)state;
  op_t ops[kMostOps] = {{"all-gather"}, {"while", 0, kReduces}};
  static const uint64_t kCalled[] = {kEntry};
  for (int fed = 0; fed < 2; ++fed) {
    ops[1].operands = (uint32_t)fed;
    jpp_str_t module = module_of(ops), call = {0};
    start_instruction(&call, "call", 1);
    put_packed(&call, 38, kCalled, 1);
    put_computation(&module, 9, &call);
    jpp__protobuf_put_number(&module, 6, 9);
    assert_int_equal(is_ordered(module), fed);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_listed_groups),
      cmocka_unit_test(test_pairs),
      cmocka_unit_test(test_all_partitions),
      cmocka_unit_test(test_random_groups),
      cmocka_unit_test(test_part_of_an_axis),
      cmocka_unit_test(test_members_outside_of_the_mesh),
      cmocka_unit_test(test_loops_count_each_turn),
      cmocka_unit_test(test_order_of_collectives),
      cmocka_unit_test(test_random_orders),
      cmocka_unit_test(test_order_in_a_called_computation),
      cmocka_unit_test(test_mutated_bytes),
      cmocka_unit_test(test_module_in_a_config),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
