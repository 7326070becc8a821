// Every plan is read back as it was saved, and a failed save leaves the previous file.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/alloc.h"
#include "planfile/format.h"
#include "planfile_util.h"
#include "random_step.h"
#include "test_util.h"

// --- Comparing ------------------------------------------------------------------------

static void expect_same_text(jpp_status_t* (*print)(const jpp_plan_t*, char**),
                             const jpp_plan_t* a, const jpp_plan_t* b) {
  char *text_a = NULL, *text_b = NULL;
  ASSERT_OK(print(a, &text_a));
  ASSERT_OK(print(b, &text_b));
  assert_string_equal(text_a, text_b);
  jpp_text_free(text_a);
  jpp_text_free(text_b);
}

static void append_value(void* user, uint32_t value, jpp_str_t* str) {
  (void)user;
  jpp_str_appendf(str, "sharding of %u", value);
}

static jpp_status_t* print_program(const jpp_plan_t* plan, char** out_text) {
  return jpp_plan_print_jaxpr(plan, NULL, append_value, NULL, out_text);
}

static void expect_same_bytes(jpp_planfile_bytes_t a, jpp_planfile_bytes_t b) {
  assert_int_equal(a.size, b.size);
  if (a.size) assert_memory_equal(a.data, b.data, a.size);
}

static void expect_same_layouts(const jpp_planfile_contents_t* a,
                                const jpp_planfile_contents_t* b) {
  const jpp_graph_t* graph = a->planned->graph;
  assert_int_equal(a->layouts == NULL, b->layouts == NULL);
  for (uint32_t i = 0; a->layouts && i < graph->num_args + graph->num_outputs; ++i) {
    uint32_t value = i < graph->num_args ? graph->args[i].value
                                         : graph->outputs[i - graph->num_args].value;
    uint32_t ndim = graph->values[value].type.ndim;
    if (!ndim) continue;
    assert_memory_equal(a->layouts[i].dims, b->layouts[i].dims, ndim * sizeof(int64_t));
    assert_memory_equal(a->layouts[i].starts, b->layouts[i].starts,
                        ndim * a->devices_per_rank * sizeof(int64_t));
  }
}

static void expect_same_dims(const jpp_planfile_contents_t* a,
                             const jpp_planfile_contents_t* b, uint32_t task) {
  const jpp_staged_t* staged = a->planned->staged;
  assert_int_equal(a->shard_dims[task] == NULL, b->shard_dims[task] == NULL);
  if (!a->shard_dims[task]) return;
  uint32_t at = 0;
  for (uint32_t i = 0; i < staged->tasks[task].num_outputs; ++i) {
    uint32_t ndim = staged->values[staged->tasks[task].outputs[i]].type.ndim;
    for (uint32_t d = 0; d < ndim; ++d, ++at) {
      assert_int_equal(a->shard_dims[task][at], b->shard_dims[task][at]);
    }
  }
}

static void expect_same(const jpp_planfile_contents_t* a,
                        const jpp_planfile_contents_t* b) {
  expect_same_text(jpp_plan_print, a->planned->plan, b->planned->plan);
  expect_same_text(print_program, a->planned->plan, b->planned->plan);
  jpp_plan_hashes_t hashes[2];
  jpp_planned_hash(a->planned, &hashes[0]);
  jpp_planned_hash(b->planned, &hashes[1]);
  assert_null(jpp_plan_hashes_difference(&hashes[0], &hashes[1]));
  assert_string_equal(a->platform, b->platform);
  assert_string_equal(a->format, b->format);
  assert_int_equal(a->steps_in_flight, b->steps_in_flight);
  assert_int_equal(a->planned->channel_slots, b->planned->channel_slots);
  assert_int_equal(a->devices_per_rank, b->devices_per_rank);
  assert_memory_equal(a->planned->offload, b->planned->offload, a->planned->ranks);
  assert_int_equal(a->num_axes, b->num_axes);
  for (uint32_t i = 0; i < a->num_axes; ++i) {
    assert_string_equal(a->axis_names[i], b->axis_names[i]);
  }
  for (uint32_t i = 0; i < a->planned->ranks * a->num_axes; ++i) {
    assert_int_equal(a->axis_sizes[i], b->axis_sizes[i]);
  }
  assert_memory_equal(a->device_ids, b->device_ids,
                      a->planned->ranks * a->devices_per_rank * sizeof(int32_t));
  expect_same_bytes(a->compile_options, b->compile_options);
  expect_same_bytes(a->front, b->front);
  assert_int_equal(a->num_modules, b->num_modules);
  for (uint32_t i = 0; i < a->num_modules; ++i) {
    expect_same_bytes(a->modules[i], b->modules[i]);
  }
  assert_int_equal(a->num_constants, b->num_constants);
  for (uint32_t i = 0; i < a->num_constants; ++i) {
    expect_same_bytes(a->constants[i], b->constants[i]);
  }
  for (uint32_t t = 0; t < a->planned->staged->num_tasks; ++t) {
    assert_int_equal(a->task_modules[t], b->task_modules[t]);
    expect_same_dims(a, b, t);
  }
  for (uint32_t o = 0; o < a->planned->graph->num_outputs; ++o) {
    assert_int_equal(a->planned->graph->outputs[o].next,
                     b->planned->graph->outputs[o].next);
  }
  expect_same_layouts(a, b);
}

// --- Round trips ----------------------------------------------------------------------

static void expect_return(const jpp_planfile_contents_t* contents) {
  size_t size = 0;
  unsigned char* bytes = contents_bytes(contents, &size);
  jpp_planfile_t* file = NULL;
  ASSERT_OK(jpp_planfile_read("here", bytes, size, &file));
  assert_string_equal(file->path, "here");
  assert_non_null(strstr(file->maker, "jaxpp "));
  expect_same(contents, &file->contents);
  // What was read back makes the same file again.
  size_t again_size = 0;
  unsigned char* again = contents_bytes(&file->contents, &again_size);
  assert_int_equal(size, again_size);
  assert_memory_equal(bytes, again, size);
  free(again);
  free(bytes);
  jpp_planfile_destroy(file);
}

static void round_trip(const planned_t* planned, uint32_t per_rank) {
  made_contents_t made = contents_of(planned->made, per_rank);
  expect_return(&made.contents);
  contents_free(&made);
}

static void test_all_graphs_come_back(void** state) {
  (void)state;
  for (uint32_t i = 0; kGraphs[i]; ++i) {
    planned_t planned;
    ASSERT_OK(plan_file(kGraphs[i], NULL, &planned));
    round_trip(&planned, 1 + i % 3);
    plan_free(&planned);
  }
}

static void test_random_steps_come_back(void** state) {
  (void)state;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    uint32_t slots = 0;
    planned_t planned = random_step(seed, &slots);
    ASSERT_OK(plan_scheduled(&planned, slots));
    round_trip(&planned, 1 + seed % 2);
    plan_free(&planned);
  }
}

static jpp_status_t* halve(void* context, const jpp_staged_t* staged,
                           uint64_t* out_bytes) {
  (void)context;
  for (uint32_t v = 0; v < staged->num_values; ++v) out_bytes[v] /= 2;
  return NULL;
}

// The bytes that the options' `measure` returned, and the other options, are saved.
static void test_options_of_the_plan_come_back(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("interleaved", NULL, &planned));
  jpp_planned_destroy(planned.made);
  jpp_plan_options_t options = {.struct_size = sizeof(options),
                                .fuse_steady_state = false,
                                .channel_slots = 5,
                                .measure = halve};
  ASSERT_OK(jpp_plan_graph(planned.graph, &options, &planned.made));
  round_trip(&planned, 2);
  plan_free(&planned);
}

// --- Hashes ---------------------------------------------------------------------------

static const char* difference(const char* graph, const char* from, const char* to) {
  jpp_plan_hashes_t hashes[2];
  char* text = graph_text(graph);
  char* changed = malloc(strlen(text) + strlen(to) + 1);
  const char* at = strstr(text, from);
  assert_non_null(at);
  sprintf(changed, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from));
  const char* const texts[] = {text, changed};
  for (int i = 0; i < 2; ++i) {
    planned_t planned;
    ASSERT_OK(plan_text(texts[i], NULL, &planned));
    jpp_planned_hash(planned.made, &hashes[i]);
    plan_free(&planned);
  }
  free(text);
  free(changed);
  return jpp_plan_hashes_difference(&hashes[0], &hashes[1]);
}

static void test_ranks_of_unequal_sizes_come_back(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  made_contents_t made = contents_of(planned.made, 4);
  for (uint32_t d = 1; d < 4; ++d) made.device_ids[d] = -1;
  made.axis_sizes[0] = 1;
  expect_return(&made.contents);
  contents_free(&made);
  plan_free(&planned);
}

static void test_hashes_say_what_differs(void** state) {
  (void)state;
  assert_null(difference("mlp2", "1f1b", "1f1b"));
  assert_string_equal(difference("mlp2", "microbatches 4", "microbatches 5"), "graph");
  assert_string_equal(difference("mlp2", "1f1b", "gpipe"), "schedule");
  assert_string_equal(difference("mlp2", "donated", ""), "arguments");
  assert_string_equal(difference("mlp2", "dot", "dot_general"), "graph");
  assert_null(difference("mlp2", " cost ", " cost 1"));
  assert_null(difference("mlp2", ".py:", ".py:1"));
}

// --- Refusals -------------------------------------------------------------------------

static void refuse(const jpp_planfile_contents_t* contents, const char* message) {
  ASSERT_FAILS(jpp_planfile_save(contents, "/nowhere/plan"), JPP_INVALID_ARGUMENT,
               message);
}

static void test_contents_must_fit_together(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  made_contents_t made = contents_of(planned.made, 2);
  jpp_planfile_contents_t good = made.contents, bad = good;
  jpp_planned_t unproved = *planned.made;
  unproved.report = NULL;
  bad.planned = &unproved;
  refuse(&bad, "expected a plan with its proof");
  bad = good;
  bad.platform = NULL;
  refuse(&bad, "found none, fake and 2");
  bad = good;
  bad.num_modules = 1;
  refuse(&bad, "expected one of the 1 modules");
  bad = good;
  bad.num_constants = 100;
  refuse(&bad, "constants, as many as there are arguments, found 100");
  --made.constants[0].size;
  refuse(&good, "constant 0: expected ");
  ++made.constants[0].size;
  made.device_ids[0] = -1;
  refuse(&good, "rank 0, device 0: expected the id of a device, found -1");
  made.device_ids[0] = 3;
  made.device_ids[1] = -1;
  refuse(&good, "axes of the mesh of rank 0: expected sizes whose product is 1");
  made.device_ids[1] = 2;
  made.numbers[0] = -1;
  refuse(&good, "layout of argument 0: expected a part of the array");
  for (uint32_t t = 0; t < planned.made->staged->num_tasks; ++t) {
    if (!made.shard_dims[t]) made.shard_dims[t] = calloc(64, sizeof(uint64_t));
  }
  refuse(&good, "expected no dims of shards, because it does more than copy");
  contents_free(&made);
  plan_free(&planned);
}

// --- Files ----------------------------------------------------------------------------

static char g_folder[] = "/tmp/jaxpp-test-XXXXXX";

static const char* path_of(const char* name) {
  static char path[sizeof(g_folder) + 32];
  snprintf(path, sizeof(path), "%s/%s", g_folder, name);
  return path;
}

static long size_of(const char* path) {
  struct stat info;
  return stat(path, &info) == 0 ? (long)info.st_size : -1;
}

static void test_a_file_that_can_not_be_written_stays(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  made_contents_t made = contents_of(planned.made, 1);
  assert_non_null(mkdtemp(g_folder));
  ASSERT_OK(jpp_planfile_save(&made.contents, path_of("plan")));
  long size = size_of(path_of("plan"));
  // Fails like a full disk: writes beyond the limit return an error.
  struct rlimit before, limit = {.rlim_cur = 1000, .rlim_max = RLIM_INFINITY};
  assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
  limit.rlim_max = before.rlim_max;
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
  jpp_status_t* status = jpp_planfile_save(&made.contents, path_of("plan"));
  assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
  ASSERT_FAILS(status, JPP_INVALID_ARGUMENT,
               "plan: cannot be written: File too large; expected a folder with space");
  assert_int_equal(size_of(path_of("plan")), size);
  ASSERT_FAILS(jpp_planfile_save(&made.contents, path_of("none/plan")),
               JPP_INVALID_ARGUMENT, "cannot be written: No such file or directory");
  ASSERT_FAILS(jpp_planfile_save(&made.contents, g_folder), JPP_INVALID_ARGUMENT,
               "cannot be written: ");
  jpp_planfile_t* file = NULL;
  ASSERT_OK(jpp_planfile_load(path_of("plan"), &file));
  jpp_planfile_destroy(file);
  unlink(path_of("plan"));
  assert_int_equal(rmdir(g_folder), 0);  // no other file was left
  contents_free(&made);
  plan_free(&planned);
}

static void test_what_is_no_file(void** state) {
  (void)state;
  jpp_planfile_t* file = NULL;
  ASSERT_FAILS(jpp_planfile_load("/nowhere/plan", &file), JPP_INVALID_ARGUMENT,
               "plan file /nowhere/plan: cannot be read: No such file or directory");
  ASSERT_FAILS(jpp_planfile_load("/tmp", &file), JPP_INVALID_ARGUMENT,
               "it is not a regular file");
  ASSERT_FAILS(jpp_planfile_load("/dev/zero", &file), JPP_INVALID_ARGUMENT,
               "it is not a regular file");
  assert_null(file);
}

// --- Memory ---------------------------------------------------------------------------

static void test_every_allocation_may_fail(void** state) {
  (void)state;
  planned_t planned;
  ASSERT_OK(plan_file("mlp2", NULL, &planned));
  made_contents_t made = contents_of(planned.made, 2);
  size_t size = 0;
  unsigned char* bytes = contents_bytes(&made.contents, &size);
  jpp_status_t* status = NULL;
  uint32_t failures = 0;
  do {
    jpp_planfile_t* file = NULL;
    jpp__alloc_fail_after(failures++);
    status = jpp_planfile_read("here", bytes, size, &file);
    jpp__alloc_fail_after(-1);
    if (status) assert_int_equal(jpp_status_code(status), JPP_OUT_OF_MEMORY);
    assert_int_equal(status == NULL, file != NULL);
    jpp_planfile_destroy(file);
    jpp_status_free(status);
  } while (status);
  assert_true(failures > 20);
  free(bytes);
  contents_free(&made);
  plan_free(&planned);
}

int main(void) {
  signal(SIGXFSZ, SIG_IGN);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_all_graphs_come_back),
      cmocka_unit_test(test_random_steps_come_back),
      cmocka_unit_test(test_options_of_the_plan_come_back),
      cmocka_unit_test(test_ranks_of_unequal_sizes_come_back),
      cmocka_unit_test(test_hashes_say_what_differs),
      cmocka_unit_test(test_contents_must_fit_together),
      cmocka_unit_test(test_a_file_that_can_not_be_written_stays),
      cmocka_unit_test(test_what_is_no_file),
      cmocka_unit_test(test_every_allocation_may_fail),
  };
  return cmocka_run_group_tests_name("planfile", tests, NULL, NULL);
}
