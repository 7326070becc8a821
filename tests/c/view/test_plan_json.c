// Plans and traces as JSON: complete and valid whatever bytes a name holds, or an error.
#include "base/alloc.h"
#include "base/json.h"
#include "base/utf8.h"
#include "jaxpp/view.h"
#include "test_util.h"
#include "view/chrome.h"

// Names of every kind with a byte that is not UTF-8, escaped as in the text form and raw.
static const char kGraph[] =
    "graph \"g\\xff\" ranks 2\n"
    "arg %0 f32[2] \"a\xfe\"\n"
    "loop microbatches 2 stages 2 schedule \"1f1b\" index %1 at \"f\\xe9.py:1\" {\n"
    "  %2:f32[2] = f(%0, %1) cost 2 at \"f\xc3.py:2\"\n"
    "  %3:f32[2] = @mark 0 (%2)\n"
    "  %4:f32[2] = g(%3)\n"
    "  %5:f32[2] = @mark 1 (%4)\n"
    "} %6:f32[2] = add %5\n"
    "out %6 \"o\\x80\"\n";

static jpp_planned_t* plan(jpp_graph_t** out_graph) {
  jpp_planned_t* planned = NULL;
  ASSERT_OK(jpp_graph_parse(kGraph, sizeof(kGraph) - 1, "test", out_graph));
  ASSERT_OK(jpp_plan_graph(*out_graph, NULL, &planned));
  return planned;
}

static void test_names_are_utf8_and_nothing_is_left_out(void** state) {
  (void)state;
  jpp_graph_t* source = NULL;
  jpp_planned_t* planned = plan(&source);
  char* text = NULL;
  ASSERT_OK(jpp_planned_print_json(planned, JPP_PART_COUNT, &text));
  assert_true(jpp__utf8_is_valid(text, strlen(text)));
  json_t* all = NULL;
  ASSERT_OK(jpp__json_read("x", text, strlen(text), &all));
  json_t* graph = json_object_get(all, "graph");
  assert_string_equal(json_string_value(json_object_get(graph, "name")), "g\xef\xbf\xbd");
  assert_int_equal(json_array_size(json_object_get(graph, "values")), source->num_values);
  json_t* value = json_array_get(json_object_get(graph, "values"), 0);
  assert_string_equal(json_string_value(json_object_get(value, "name")), "a\xef\xbf\xbd");
  json_decref(all);
  jpp_text_free(text);
  jpp_planned_destroy(planned);
  jpp_graph_destroy(source);
}

// An allocator for jansson that jpp__alloc_fail_after() can make fail.
static void* allocate(size_t size) {
  void* memory = NULL;
  jpp_status_free(jpp_alloc(size, &memory));
  return memory;
}

// When the n-th allocation fails, the result is the same text or an out-of-memory error.
static void test_every_allocation_may_fail(void** state) {
  (void)state;
  jpp_graph_t* graph = NULL;
  jpp_planned_t* planned = plan(&graph);
  char* whole = NULL;
  json_set_alloc_funcs(allocate, jpp_free);
  ASSERT_OK(jpp_planned_print_json(planned, JPP_PART_COUNT, &whole));
  uint32_t fine = 0, failed = 0;
  for (int64_t n = 0; fine < 20; n += 1 + n / 16) {
    char* text = NULL;
    json_t* value = NULL;
    jpp__alloc_fail_after(n);
    jpp_status_t* status = jpp_planned_print_json(planned, JPP_PART_COUNT, &text);
    if (!status) status = jpp__json_read("x", text, strlen(text), &value);
    jpp__alloc_fail_after(-1);
    if (status) {
      assert_int_equal(jpp_status_code(status), JPP_OUT_OF_MEMORY);
      ++failed;
    } else {
      assert_string_equal(text, whole);
      ++fine;
    }
    jpp_status_free(status);
    json_decref(value);
    jpp_text_free(text);
  }
  assert_true(failed > 50);
  jpp_text_free(whole);
  jpp_planned_destroy(planned);
  jpp_graph_destroy(graph);
}

static void test_a_text_that_is_no_json_is_none(void** state) {
  (void)state;
  json_t* value = NULL;
  ASSERT_FAILS(jpp__json_read("f", "{\n\"a\": x}", 9, &value), JPP_PARSE_ERROR, "f:2: ");
  ASSERT_FAILS(jpp__json_read("f", "{\"\xff\": 1}", 8, &value), JPP_PARSE_ERROR, "f:1: ");
}

// Tries each byte that a name can hold, alone and inside quoted text.
static void test_events_are_json_whatever_their_names(void** state) {
  (void)state;
  for (int byte = 1; byte < 256; ++byte) {
    const char name[] = {'f', (char)byte, 'g', '"', (char)byte, 0};
    jpp_chrome_event_t event = {.name = name, .kind = JPP_TASK_FWD, .start = 0.5};
    jpp_str_t str = {0};
    char* text = NULL;
    jpp__chrome_begin(1, 2, &str);
    jpp__chrome_append_process(name, 0, &str);
    jpp__chrome_append_rank(0, 0, &str);
    jpp__chrome_append_event(&event, &str);
    jpp__chrome_end(&str);
    ASSERT_OK(jpp_str_finish(&str, &text));
    json_t* trace = NULL;
    ASSERT_OK(jpp__json_read("trace", text, strlen(text), &trace));
    const json_t* events = json_object_get(trace, "traceEvents");
    assert_int_equal(json_array_size(events), 4);
    const json_t* found = json_object_get(json_array_get(events, 3), "name");
    jpp_str_append_utf8(&str, name, strlen(name));
    assert_string_equal(json_string_value(found), str.data);
    jpp_str_deinit(&str);
    json_decref(trace);
    jpp_free(text);
  }
}

static jpp_status_t* print_event(double start, double duration, char** out_text) {
  jpp_chrome_event_t event = {
      .name = "f", .kind = JPP_TASK_FWD, .start = start, .duration = duration};
  jpp_str_t str = {0};
  jpp__chrome_begin(1, 2, &str);
  jpp__chrome_append_process("step", 0, &str);
  jpp__chrome_append_rank(0, 0, &str);
  jpp__chrome_append_event(&event, &str);
  jpp__chrome_end(&str);
  return jpp_str_finish(&str, out_text);
}

// Times are printed as short decimals, although doubles cannot represent them exactly.
static void test_times_have_at_most_three_decimals(void** state) {
  (void)state;
  static const struct {
    double time;
    const char* text;
  } kTimes[] = {{0, "0.0"},
                {0.1 + 0.2, "0.3"},
                {1.2344999999999999, "1.234"},
                {1.2346, "1.235"},
                {123456789012.345, "123456789012.345"},
                {-0.5, "-0.5"},
                {1e300, "1e300"}};
  for (size_t i = 0; i < sizeof(kTimes) / sizeof(*kTimes); ++i) {
    char *text = NULL, expected[80];
    snprintf(expected, sizeof(expected), "\"ts\":%s,\"dur\":%s,\"args\"", kTimes[i].text,
             kTimes[i].text);
    ASSERT_OK(print_event(kTimes[i].time, kTimes[i].time, &text));
    if (!strstr(text, expected)) fail_msg("expected %s in %s", expected, text);
    jpp_text_free(text);
  }
}

static void test_no_event_is_lost_without_memory(void** state) {
  (void)state;
  char* whole = NULL;
  uint32_t failed = 0;
  json_set_alloc_funcs(allocate, jpp_free);
  ASSERT_OK(print_event(1, 2, &whole));
  for (jpp_status_t* status = NULL;; ++failed) {
    char* text = NULL;
    jpp__alloc_fail_after(failed);
    status = print_event(1, 2, &text);
    jpp__alloc_fail_after(-1);
    if (!status) {
      assert_string_equal(text, whole);
      jpp_text_free(text);
      break;
    }
    assert_int_equal(jpp_status_code(status), JPP_OUT_OF_MEMORY);
    assert_null(text);
    jpp_status_free(status);
  }
  assert_true(failed > 30);
  jpp_text_free(whole);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_names_are_utf8_and_nothing_is_left_out),
      cmocka_unit_test(test_every_allocation_may_fail),
      cmocka_unit_test(test_a_text_that_is_no_json_is_none),
      cmocka_unit_test(test_events_are_json_whatever_their_names),
      cmocka_unit_test(test_times_have_at_most_three_decimals),
      cmocka_unit_test(test_no_event_is_lost_without_memory),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
