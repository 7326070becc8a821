// The graph's text form: graphs survive printing and parsing, and malformed text is
// refused.
#include <stdlib.h>

#include "golden.h"
#include "plan_util.h"

static char* print_of(const char* text) {
  jpp_graph_t* graph = NULL;
  char* printed = NULL;
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &graph));
  ASSERT_OK(jpp_graph_print(graph, &printed));
  jpp_graph_destroy(graph);
  return printed;
}

static void test_print_parse_print_is_stable(void** state) {
  (void)state;
  for (uint32_t i = 0; kGraphs[i]; ++i) {
    char* text = graph_text(kGraphs[i]);
    char* once = print_of(text);
    char* twice = print_of(once);
    assert_string_equal(once, twice);
    free(text);
    jpp_text_free(once);
    jpp_text_free(twice);
  }
}

static void test_printed_graphs_are_as_their_golden_files(void** state) {
  (void)state;
  static const char* const kNames[] = {"tied", "tied_cast", "tied_scaled", "aux",
                                       "two_loops"};
  for (size_t i = 0; i < sizeof(kNames) / sizeof(*kNames); ++i) {
    char* text = graph_text(kNames[i]);
    char* printed = print_of(text);
    char name[64];
    snprintf(name, sizeof(name), "graph/%s.txt", kNames[i]);
    assert_golden(name, printed);
    free(text);
    jpp_text_free(printed);
  }
}

// A loop without results ends at its brace, even if the next line begins with a value.
static void test_a_loop_may_have_no_results(void** state) {
  (void)state;
  const char* text =
      "graph \"g\"\n"
      "arg %0 f32[4]\n"
      "loop microbatches 2 index %1 {\n"
      "}\n"
      "%2:f32[4] = f(%0)\n";
  char* printed = print_of(text);
  assert_string_equal(printed, text);
  jpp_text_free(printed);
}

static void test_shards_survive(void** state) {
  (void)state;
  const char* text =
      "graph \"g\"\n"
      "arg %0 f32[4,8]/4 \"w\" donated\n"
      "%1:bf16[4]/2, %2:f32[] = f(%0)\n"
      "out %1\n";
  char* printed = print_of(text);
  assert_string_equal(printed, text);
  jpp_text_free(printed);
}

static void test_sharded_graphs_without_shards_survive(void** state) {
  (void)state;
  jpp_graph_t* graph = NULL;
  char* text = print_of("graph \"g\" ranks 2\narg %0 f32[4]\nout %0\n");
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &graph));
  assert_false(graph->sharded);
  ASSERT_OK(jpp_graph_set_sharded(graph));
  jpp_text_free(text);
  ASSERT_OK(jpp_graph_print(graph, &text));
  assert_memory_equal(text, "graph \"g\" ranks 2 sharded\n", 26);
  jpp_graph_destroy(graph);
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &graph));
  assert_true(graph->sharded);
  jpp_graph_destroy(graph);
  jpp_text_free(text);
}

static void test_memories_survive(void** state) {
  (void)state;
  const char* text =
      "graph \"g\"\n"
      "arg %0 f32[6,4]/3@pinned_host \"m\" donated\n"
      "%1:f32[6,4], %2:bf16[]@pinned_host = f(%0)\n"
      "out %1\n"
      "out %2\n";
  jpp_graph_t* graph = NULL;
  char* printed = NULL;
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &graph));
  assert_int_equal(graph->values[0].type.memory, JPP_MEMORY_PINNED_HOST);
  assert_int_equal(graph->values[1].type.memory, JPP_MEMORY_DEVICE);
  assert_int_equal(jpp_value_device_bytes(&graph->values[0]), 32);
  ASSERT_OK(jpp_graph_print(graph, &printed));
  assert_string_equal(printed, text);
  jpp_text_free(printed);
  jpp_graph_destroy(graph);
}

// s4[3] has one byte on each of two devices and of three. The two shards that follow from
// the bytes do not divide it, so no count is printed: the parser would refuse it.
static void test_shards_are_printed_as_they_are_read(void** state) {
  (void)state;
  const char* text = "graph \"g\"\narg %0 f32[6]\narg %1 s4[3]\n";
  const uint64_t bytes[] = {8, 1};
  jpp_graph_t* graph = NULL;
  char* printed = NULL;
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &graph));
  ASSERT_OK(jpp_graph_print_sharded(graph, bytes, &printed));
  assert_string_equal(printed, "graph \"g\"\narg %0 f32[6]/3\narg %1 s4[3]\n");
  jpp_text_free(printed);
  jpp_graph_destroy(graph);
}

static void test_names_places_and_costs_survive(void** state) {
  (void)state;
  char* printed = print_of(
      "graph \"a\\\"b\\n\" ranks 3 # a comment\n"
      "arg %x f32[2,3] \"x['\\x01']\" donated\n"
      "%y:bf16[], %z:s32[0] = name.with-dots(%x, %x) cost 1.5 cheap backward zeros "
      "body at \"f.py:3\"\n"
      "= effect(%y)\n"
      "out %z");
  assert_string_equal(
      printed,
      "graph \"a\\\"b\\n\" ranks 3\n"
      "arg %0 f32[2,3] \"x['\\x01']\" donated\n"
      "%1:bf16[], %2:s32[0] = name.with-dots(%0, %0) cheap backward zeros "
      "body cost 1.5 at \"f.py:3\"\n"
      "= effect(%1)\n"
      "out %2\n");
  jpp_text_free(printed);
}

static void test_copies_survive(void** state) {
  (void)state;
  const char* text =
      "graph \"g\"\n"
      "arg %0 f32[5,4]\n"
      "loop microbatches 2 index %1 {\n"
      "  %2:u32[] = convert(%1) cheap copies 0\n"
      "  %3:f32[1,4] = dynamic_slice(%0, %2) copies 0\n"
      "  %4:bf16[2,4] = slice(%0) copies 3 code 4\n"
      "}\n"
      "%5:f32[20] = reshape(%0) copies 0\n"
      "out %5\n";
  char* printed = print_of(text);
  assert_string_equal(printed, text);
  jpp_text_free(printed);
}

typedef struct refusal {
  const char* text;  // follows "graph \"g\"\narg %a f32[4]\n" unless it begins with '!'
  jpp_status_code_t code;
  const char* message;
} refusal_t;

static const refusal_t kRefusals[] = {
    // Words
    {"!", JPP_PARSE_ERROR, "test:1:1: expected 'graph \"name\"' at the beginning"},
    {"!arg %a f32[]", JPP_PARSE_ERROR, "test:1:1: expected 'graph \"name\"'"},
    {"!graph g", JPP_PARSE_ERROR, "test:1:7: expected the graph's name in quotes"},
    {"!graph \"g", JPP_PARSE_ERROR, "test:1:7: string is not closed on its line"},
    {"!graph \"g\n\"", JPP_PARSE_ERROR, "test:1:7: string is not closed on its line"},
    {"!graph \"\\q\"", JPP_PARSE_ERROR, "test:1:7: unknown escape in string"},
    {"!graph \"\\x1\"", JPP_PARSE_ERROR, "test:1:7: unknown escape in string"},
    {"!graph \"g\" ranks many", JPP_PARSE_ERROR, "1:17: expected a number of ranks"},
    {"!graph \"g\" ranks 1.5", JPP_PARSE_ERROR, "1:17: number is not a whole one"},
    {"!graph \"g\" ranks 3000000000", JPP_PARSE_ERROR, "1:17: number is not a whole one"},
    {"$", JPP_PARSE_ERROR, "test:3:1: expected a name, a number, a string"},
    {"%", JPP_PARSE_ERROR, "test:3:1: a name must follow % or @"},
    {"banana", JPP_PARSE_ERROR, "test:3:1: expected arg, out, loop, '}' or %value"},
    // Types
    {"arg %b x32[4]", JPP_PARSE_ERROR, "test:3:8: expected a type such as f32[4,8]"},
    {"arg %b f32", JPP_PARSE_ERROR, "test:3:11: expected '[' of a type, found the end"},
    {"arg %b f32[4 4]", JPP_PARSE_ERROR, "test:3:14: expected ',' or ']', found '4'"},
    {"arg %b f32[-4]", JPP_PARSE_ERROR, "test:3:12: expected a dimension"},
    {"arg %b f32[2000000000,2000000000,9]", JPP_PARSE_ERROR, "test:3:8: type has more"},
    {"arg %b f32[4,3]/8", JPP_PARSE_ERROR,
     "test:3:17: number of shards does not divide the type's elements"},
    {"arg %b f32[4]@", JPP_PARSE_ERROR, "test:3:14: a name must follow % or @"},
    {"arg %b f32[4]@vmem", JPP_PARSE_ERROR,
     "test:3:14: expected a memory, @device or @pinned_host, found '@vmem'"},
    {"%b:f32[4]@pinned_host = @mark 0 (%a)", JPP_GRAPH_ERROR,
     "test:3:1: op 0 (mark, ?): output 0 of a mark differs"},
    {"arg %b f32[4]@pinned_host\nout %a next %b", JPP_GRAPH_ERROR,
     "test:4:1: output 0 is argument %1 of the next step; expected one of its own type"},
    {"loop microbatches 2 index %i {\n%b:f32[4]@pinned_host = f(%a)\n} %r:f32[4] = "
     "concat "
     "%b",
     JPP_GRAPH_ERROR, "loop 0 (?): result 0 is in pinned_host; expected device memory"},
    {"loop microbatches 2 index %i {\n} %r:f32[4]@pinned_host = custom %a",
     JPP_GRAPH_ERROR, "loop 0 (?): result 0 is in pinned_host; expected device memory"},
    {"arg %b f32[]/2", JPP_PARSE_ERROR, "test:3:14: number of shards does not divide"},
    // Values
    {"arg %a f32[4]", JPP_PARSE_ERROR, "test:3:5: value is defined twice"},
    {"%b:f32[4], %b:f32[4] = f(%a)", JPP_PARSE_ERROR,
     "test:3:12: value is defined twice"},
    {"%b:f32[4] = f(%c)", JPP_PARSE_ERROR, "3:15: value is used before it is defined"},
    {"%b:f32[4] = f(%b)", JPP_PARSE_ERROR, "3:15: value is used before it is defined"},
    {"out %c", JPP_PARSE_ERROR, "test:3:5: value is used before it is defined"},
    {"%b f32[4] = f(%a)", JPP_PARSE_ERROR, "test:3:4: expected ':' and a type"},
    {"arg a f32[4]", JPP_PARSE_ERROR, "test:3:5: expected a value name such as %3"},
    // Ops
    {"%b:f32[4] = (%a)", JPP_PARSE_ERROR, "test:3:13: expected an op name"},
    {"%b:f32[4] = @sum(%a)", JPP_PARSE_ERROR, "test:3:13: expected an op name, @mark"},
    {"%b:f32[4] = @mark (%a)", JPP_PARSE_ERROR, "test:3:19: expected a stage number"},
    {"%b:f32[4] = f %a", JPP_PARSE_ERROR, "test:3:15: expected '(' and the inputs"},
    {"%b:f32[4] = f(%a %a)", JPP_PARSE_ERROR, "test:3:18: expected ',' or ')'"},
    {"%b:f32[4] = f(%a) copies", JPP_PARSE_ERROR, "test:3:25: expected a row"},
    {"%b:f32[4] = f(%a) copies 1", JPP_GRAPH_ERROR,
     "test:3:1: op 0 (f, ?): a copy from row 1 on: expected an output that fits"},
    {"%b:f32[5] = f(%a) copies 0", JPP_GRAPH_ERROR,
     "test:3:1: op 0 (f, ?): a copy from row 0"},
    {"%b:f32[4] = f() copies 0", JPP_GRAPH_ERROR,
     "test:3:1: op 0 (f, ?): a copy from row 0"},
    {"%b:f32[2] = f(%a, %a) copies 0", JPP_GRAPH_ERROR, "op 0 (f, ?): a copy from row 0"},
    {"%b:f32[2], %c:f32[2] = f(%a) copies 0", JPP_GRAPH_ERROR,
     "op 0 (f, ?): a copy from row 0"},
    {"arg %b f32[]\narg %i s32[]\n%c:f32[] = f(%b, %i) copies 0", JPP_GRAPH_ERROR,
     "test:5:1: op 0 (f, ?): a copy from row 0"},
    {"%b:f32[4] = @mark 0 (%a) copies 0", JPP_GRAPH_ERROR,
     "op 0 (mark, ?): a copy from row 0"},
    {"%b:f32[4] = f(%a) cost x", JPP_PARSE_ERROR, "test:3:24: expected a cost"},
    {"%b:f32[4] = f(%a) at 3", JPP_PARSE_ERROR, "test:3:22: expected \"file:line\""},
    {"%b:f32[5] = @mark 0 (%a)", JPP_GRAPH_ERROR,
     "test:3:1: op 0 (mark, ?): output 0 of a mark differs"},
    {"%b:f32[4] = @add(%a)", JPP_GRAPH_ERROR,
     "test:3:1: op 0 (add, ?): a sum takes two values"},
    {"= @mark 0 (%a)", JPP_GRAPH_ERROR,
     "test:3:1: op 0 (mark, ?): a mark has 1 inputs and 0"},
    // Loops
    {"}", JPP_PARSE_ERROR, "test:3:1: expected a statement, found '}'"},
    {"loop microbatches 2 index %i {", JPP_PARSE_ERROR, "expected '}' that closes the"},
    {"loop microbatches 2 {\n}", JPP_PARSE_ERROR, "a loop needs microbatches (at least"},
    {"loop microbatches 0 index %i {\n}", JPP_PARSE_ERROR, "a loop needs microbatches"},
    {"loop fast index %i {\n}", JPP_PARSE_ERROR, "test:3:"},
    {"loop microbatches 2 index %i {\nloop microbatches 2 index %j {\n}\n}",
     JPP_PARSE_ERROR, "test:4:1: loops do not nest"},
    {"loop microbatches 2 index %i {\narg %b f32[]\n}", JPP_GRAPH_ERROR,
     "test:4:1: argument"},
    {"loop microbatches 2 index %i {\n} %r:f32[4] = times %a", JPP_PARSE_ERROR,
     "test:4:15: expected add, max, concat or custom"},
    {"loop microbatches 2 index %i {\n} %r:f32[5] = add %a", JPP_GRAPH_ERROR,
     "test:4:1: loop 0 (?): result 0 under 'add' differs in type"},
    {"loop microbatches 2 index %i {\n%b:f32[] = f(%i)\n}\nout %b", JPP_GRAPH_ERROR,
     "test:6:1: output 0 is value %2, which is not defined outside the loops"},
    {"loop microbatches 2 index %i {\n%b:f32[] = f(%i)\n}\n%c:f32[] = f(%b)",
     JPP_GRAPH_ERROR, "test:6:1: op 2 (f, ?): input 0 is value %2 of a loop's body"},
    // Ranks of outputs
    {"out %a on", JPP_PARSE_ERROR, "test:3:10: expected a rank"},
    {"out %a on 0,", JPP_PARSE_ERROR, "test:3:13: expected a rank"},
    {"out %a on 0 1", JPP_PARSE_ERROR, "test:3:13: expected"},
    {"out %a on 1.5", JPP_PARSE_ERROR, "test:3:11: number is not a whole one"},
    {"out %a on 1, 0", JPP_GRAPH_ERROR,
     "test:3:1: output 0 is left on rank 1, then on 0; expected each rank once"},
    {"out %a on 0, 0", JPP_GRAPH_ERROR,
     "test:3:1: output 0 is left on rank 0, then on 0"},
    {"out %a next %a on 0", JPP_PARSE_ERROR, "test:3:16: expected"},
    // Outputs that the next step takes as arguments
    {"out %a next", JPP_PARSE_ERROR, "test:3:12: expected a value such as %3"},
    {"out %a next \"a\"", JPP_PARSE_ERROR, "test:3:13: expected a value such as %3"},
    {"%b:f32[4] = f(%a)\nout %a next %b", JPP_GRAPH_ERROR,
     "test:4:1: output 0 is %1 of the next step, which is not an argument"},
    {"loop microbatches 2 index %i {\n}\nout %a next %i", JPP_GRAPH_ERROR,
     "test:5:1: output 0 is %1 of the next step, which is not an argument"},
    {"arg %b f32[5]\nout %a next %b", JPP_GRAPH_ERROR,
     "test:4:1: output 0 is argument %1 of the next step; expected one of its own type"},
    {"out %a next %a\nout %a next %a", JPP_GRAPH_ERROR,
     "test:4:1: outputs 0 and 1 are both argument %0 of the next step"},
};

static void test_malformed_texts_are_refused_where_they_go_wrong(void** state) {
  (void)state;
  for (size_t i = 0; i < sizeof(kRefusals) / sizeof(*kRefusals); ++i) {
    const refusal_t* refusal = &kRefusals[i];
    bool whole = refusal->text[0] == '!';
    char text[512];
    snprintf(text, sizeof(text), "%s%s", whole ? "" : "graph \"g\"\narg %a f32[4]\n",
             refusal->text + whole);
    jpp_graph_t* graph = NULL;
    ASSERT_FAILS(jpp_graph_parse(text, strlen(text), "test", &graph), refusal->code,
                 refusal->message);
    assert_null(graph);
  }
}

// Truncated text and changed bytes cause errors at worst.
static void test_damaged_texts_do_no_harm(void** state) {
  (void)state;
  char* text = graph_text("tied");
  size_t length = strlen(text);
  for (size_t i = 0; i < length; ++i) {
    jpp_graph_t* graph = NULL;
    jpp_status_free(jpp_graph_parse(text, i, "test", &graph));
    jpp_graph_destroy(graph);
    char kept = text[i];
    text[i] = "%@\"\\{}[]\0 9"[i % 11];
    jpp_status_free(jpp_graph_parse(text, length, "test", &graph));
    jpp_graph_destroy(graph);
    text[i] = kept;
  }
  free(text);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_print_parse_print_is_stable),
      cmocka_unit_test(test_printed_graphs_are_as_their_golden_files),
      cmocka_unit_test(test_a_loop_may_have_no_results),
      cmocka_unit_test(test_shards_survive),
      cmocka_unit_test(test_sharded_graphs_without_shards_survive),
      cmocka_unit_test(test_memories_survive),
      cmocka_unit_test(test_copies_survive),
      cmocka_unit_test(test_shards_are_printed_as_they_are_read),
      cmocka_unit_test(test_names_places_and_costs_survive),
      cmocka_unit_test(test_malformed_texts_are_refused_where_they_go_wrong),
      cmocka_unit_test(test_damaged_texts_do_no_harm),
  };
  return cmocka_run_group_tests_name("graph", tests, NULL, NULL);
}
