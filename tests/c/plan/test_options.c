// Every function that takes options accepts option structs of other versions: all are
// tried with the same sizes and bytes.
#include <stdio.h>
#include <stdlib.h>

#include "fake/device.h"
#include "jaxpp/advise.h"
#include "jaxpp/array_argument.h"
#include "jaxpp/device.h"
#include "jaxpp/job_ranks.h"
#include "jaxpp/planfile.h"
#include "jaxpp/runtime.h"
#include "plan_util.h"
#include "schedule_util.h"

static planned_t g_planned;  // mlp2, the graph that all functions get
static const jpp_cost_t kCosts[] = {{1, 1, 1}, {1, 1, 1}};

static jpp_status_t* call_timeline(const void* options) {
  jpp_schedule_timeline_t* timeline = NULL;
  jpp_status_t* status =
      jpp_schedule_timeline(g_planned.schedules[0], options, &timeline);
  jpp_schedule_timeline_destroy(timeline);
  return status;
}

static jpp_status_t* call_simulate(const void* options) {
  jpp_simulation_t* simulation = NULL;
  jpp_status_t* status =
      jpp_schedule_simulate(g_planned.schedules[0], options, &simulation);
  jpp_simulation_destroy(simulation);
  return status;
}

static jpp_status_t* call_search(const void* options) {
  jpp_search_result_t result;
  jpp_status_t* status = jpp_schedule_search(options, &result);
  jpp_schedule_destroy(result.schedule);
  return status;
}

static jpp_status_t* call_advise_search(const void* options) {
  jpp_advise_search_t step = {
      .graph = g_planned.graph, .schedules = g_planned.schedules, .like = g_planned.plan};
  jpp_search_result_t result;
  jpp_status_t* status = jpp_advise_search(&step, options, &result);
  jpp_schedule_destroy(result.schedule);
  return status;
}

static jpp_status_t* call_partition(const void* options) {
  jpp_staged_t* staged = NULL;
  jpp_status_t* status = jpp_partition(g_planned.graph, options, &staged);
  jpp_staged_destroy(staged);
  return status;
}

static jpp_status_t* call_program(const void* options) {
  jpp_plan_t* plan = NULL;
  jpp_status_t* status = jpp_program_build(g_planned.staged, options, &plan);
  jpp_plan_destroy(plan);
  return status;
}

static jpp_status_t* call_plan(const void* options) {
  jpp_planned_t* planned = NULL;
  jpp_status_t* status = jpp_plan_graph(g_planned.graph, options, &planned);
  jpp_planned_destroy(planned);
  return status;
}

// The options of the search for a loop's schedule.
static jpp_status_t* call_plan_with_search(const void* search) {
  jpp_loop_schedule_t loop = {.struct_size = sizeof(loop), .search = search};
  jpp_plan_options_t options = {.struct_size = sizeof(options), .loops = &loop};
  return call_plan(&options);
}

static jpp_status_t* call_fake(const void* options) {
  jpp_client_t* client = NULL;
  jpp_status_t* status = jpp_client_create_fake(options, &client);
  jpp_client_destroy(client);
  return status;
}

static jpp_status_t* call_pjrt(const void* options) {
  jpp_client_t* client = NULL;
  jpp_status_t* status = jpp_client_create_pjrt(options, &client);
  jpp_client_destroy(client);
  return status;
}

static jpp_status_t* call_planfile(const void* contents) {
  return jpp_planfile_save(contents, "/nowhere/plan");
}

static jpp_status_t* call_transport(const void* options) {
  jpp_transport_t* transport = NULL;
  jpp_status_t* status = jpp_transport_create(options, &transport);
  jpp_transport_destroy(transport);
  return status;
}

static jpp_status_t* call_channel(const void* spec) {
  jpp_transport_options_t options = {.struct_size = sizeof(options), .driver = "inproc"};
  jpp_transport_t* transport = NULL;
  jpp_channel_t* channel = NULL;
  JPP_RETURN_IF_ERROR(jpp_transport_create(&options, &transport));
  jpp_status_t* status = jpp_transport_open_channel(transport, spec, &channel);
  jpp_channel_close(channel);
  jpp_transport_destroy(transport);
  return status;
}

// A client with one device is too small for two ranks.
static jpp_status_t* call_runtime(const void* options) {
  jpp_runtime_t* runtime = NULL;
  jpp_status_t* status = jpp_runtime_create(options, &runtime);
  jpp_runtime_destroy(runtime);
  return status;
}

static jpp_status_t* call_loop_schedule(const void* loop) {
  jpp_plan_options_t options = {.struct_size = sizeof(options), .loops = loop};
  return call_plan(&options);
}

static jpp_status_t* call_build(const void* params) {
  jpp_schedule_t* schedule = NULL;
  jpp_status_t* status = jpp_schedule_build("1f1b", params, &schedule);
  jpp_schedule_destroy(schedule);
  return status;
}

static jpp_status_t* call_one_pass(const void* params) {
  jpp_schedule_t* schedule = NULL;
  jpp_status_t* status = jpp_schedule_one_pass(params, false, &schedule);
  jpp_schedule_destroy(schedule);
  return status;
}

static jpp_status_t* call_add_op(const void* desc) {
  jpp_graph_builder_t* builder = NULL;
  uint32_t first;
  JPP_RETURN_IF_ERROR(jpp_graph_builder_create(NULL, 0, &builder));
  jpp_status_t* status = jpp_graph_builder_add_op(builder, desc, &first);
  jpp_graph_builder_destroy(builder);
  return status;
}

static jpp_client_t* g_client;  // a fake one
static const uint32_t kZero = 0;

static jpp_status_t* call_compile(const void* request) {
  jpp_executable_t* executable = NULL;
  jpp_status_t* status = jpp_client_compile(g_client, request, &executable);
  jpp_client_executable_destroy(g_client, executable);
  return status;
}

// The fake driver copies no programs, but compiles the request.
static jpp_status_t* call_compile_again(const void* request) {
  jpp_executable_t *compiled = NULL, *executable = NULL;
  jpp_status_t* status = jpp_client_compile(g_client, request, &compiled);
  if (!status) {
    status = jpp_client_compile_again(g_client, compiled, request, &executable);
  }
  jpp_client_executable_destroy(g_client, executable);
  jpp_client_executable_destroy(g_client, compiled);
  return status;
}

static jpp_status_t* call_compile_cached(const void* request) {
  jpp_executable_t* executable = NULL;
  jpp_cache_outcome_t outcome;
  return jpp_client_compile_cached(g_client, request, "/nowhere", NULL, &executable,
                                   &outcome);
}

static jpp_status_t* call_cache_key(const void* request) {
  char key[kJppCacheKeySize];
  return jpp_client_cache_key(g_client, request, key);
}

// Without an executable: NULL where a pointer is required.
static jpp_status_t* call_execute(const void* execute) {
  return jpp_client_execute(g_client, execute);
}

static jpp_status_t* call_from_host(const void* array) {
  jpp_buffer_t* buffer = NULL;
  jpp_status_t* status = jpp_client_buffer_from_host(g_client, array, 0, &buffer);
  jpp_client_buffer_destroy(g_client, buffer);
  return status;
}

static jpp_status_t* call_upload(const void* shards) {
  jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                               .client = g_client,
                               .num_ranks = 1,
                               .devices_per_rank = 1,
                               .ranks = &kZero};
  jpp_array_t* array = NULL;
  jpp_status_t* status = jpp_array_upload(&layout, shards, &kZero, &array);
  jpp_array_release(array);
  return status;
}

static jpp_wanted_t g_wanted = {.struct_size = sizeof(g_wanted), .name = "x"};

static jpp_status_t* decide(const jpp_wanted_t* wanted, const jpp_given_t* given) {
  jpp_decision_t decision;
  jpp_status_t* status = jpp_argument_decide(wanted, given, &decision);
  jpp_decision_free(&decision);
  return status;
}

static jpp_status_t* call_decide_wanted(const void* wanted) {
  const jpp_given_t given = {.struct_size = sizeof(given)};
  return decide(wanted, &given);
}

static jpp_status_t* call_decide_given(const void* given) {
  return decide(&g_wanted, given);
}

static jpp_status_t* call_take(const void* source) {
  const uint32_t device = 0;
  jpp_array_t* array = NULL;
  jpp_status_t* status =
      jpp_argument_take(&g_wanted, source, g_client, &device, 1, &array);
  jpp_array_release(array);
  return status;
}

static jpp_status_t* call_divide_ranks(const void* mesh) {
  jpp_job_part_t part;
  jpp_status_t* status = jpp_job_divide_ranks(mesh, 0, &part);
  jpp_job_part_free(&part);
  return status;
}

static jpp_status_t* call_create_array(const void* layout) {
  jpp_buffer_t* none = NULL;
  jpp_array_t* array = NULL;
  jpp_status_t* status = jpp_array_create(layout, &none, &array);
  jpp_array_release(array);
  return status;
}

typedef struct entry {
  const char* type;
  jpp_status_t* (*call)(const void* options);
  const void* options;     // valid ones
  size_t size;             // of them
  jpp_status_code_t code;  // expected outcome
} entry_t;

// Calls the function with the first bytes of valid options, then zeros up to `size`,
// `last` in the last byte, and this struct_size.
static jpp_status_t* call_with(const entry_t* entry, size_t struct_size, size_t size,
                               uint8_t last) {
  // Exactly `size` bytes, so that the sanitizer detects reads past them.
  uint8_t* bytes = calloc(1, size);
  assert_non_null(bytes);
  memcpy(bytes, entry->options, size < entry->size ? size : entry->size);
  memcpy(bytes, &struct_size, sizeof(struct_size));
  if (size > entry->size) bytes[size - 1] = last;
  jpp_status_t* status = entry->call(bytes);
  free(bytes);
  return status;
}

static void check_entry(const entry_t* entry) {
  char refused[80], newer[80];
  snprintf(refused, sizeof(refused), "set it to sizeof(%s)", entry->type);
  snprintf(newer, sizeof(newer), "%s: expected zeros after the %zu bytes", entry->type,
           entry->size);
  size_t size = entry->size;
  ASSERT_FAILS(call_with(entry, 0, size, 0), JPP_INVALID_ARGUMENT, refused);
  ASSERT_FAILS(call_with(entry, sizeof(size_t), sizeof(size_t), 0), JPP_INVALID_ARGUMENT,
               refused);
  ASSERT_FAILS(call_with(entry, SIZE_MAX, size, 0), JPP_INVALID_ARGUMENT, refused);
  ASSERT_FAILS(call_with(entry, size + 9, size + 9, 1), JPP_INVALID_ARGUMENT, newer);
  for (size_t more = 0; more <= 16; more += 8) {
    jpp_status_t* status = call_with(entry, size + more, size + more, 0);
    if (jpp_status_code(status) != entry->code) {
      fail_msg("%s: %s", entry->type, jpp_status_message(status));
    }
    jpp_status_free(status);
  }
}

static void test_all_options_are_read_by_their_size(void** state) {
  (void)state;
  ASSERT_OK(plan_file("mlp2", NULL, &g_planned));
  uint32_t ranks[] = {0, 1};
  jpp_loop_placement_t placement = {.stages = 2, .stage_rank = ranks};
  jpp_schedule_timeline_options_t timeline = {.fused_as_one = true};
  jpp_simulate_options_t simulate = {.rank_cost = {1, 1, 1}, .host_bandwidth = 1};
  jpp_search_options_t search = {
      .stages = 2, .ranks = 2, .microbatches = 4, .costs = kCosts, .host_bandwidth = 1};
  jpp_partition_options_t partition = {.ranks = 2, .loops = &placement};
  jpp_program_options_t program = {.schedules = g_planned.schedules};
  jpp_plan_options_t plan = {.last = JPP_PART_PROGRAM};
  jpp_fake_options_t fake = {.device_count = 1};
  jpp_planfile_contents_t contents = {.front = {"", 0}};
  jpp_pjrt_options_t pjrt = {.plugin_path = "/nowhere/plugin.so"};
  jpp_fake_options_t one = {.struct_size = sizeof(one), .device_count = 1};
  const jpp_task_executable_t none = {0};
  jpp_runtime_options_t runtime = {
      .plan = g_planned.plan, .devices_per_rank = 1, .executables = &none};
  ASSERT_OK(jpp_client_create_fake(&one, &runtime.client));
  ASSERT_OK(jpp_client_create_fake(&one, &g_client));
  jpp_loop_schedule_t loop = {.built_in = "1f1b"};
  jpp_schedule_params_t params = {.stages = 2, .ranks = 2, .microbatches = 2};
  jpp_op_desc_t op = {.name = "f"};
  jpp_compile_request_t request = {
      .code = "args 1", .code_size = strlen("args 1"), .format = "fake"};
  jpp_execute_t execute = {.device = JPP_DEVICE_COMPILED};
  jpp_host_array_t scalar = {.data = kCosts, .dtype = JPP_DTYPE_F32};
  jpp_array_layout_t layout = {
      .client = g_client, .devices_per_rank = 1, .ranks = &kZero};
  jpp_wanted_t wanted = {.name = "x"};
  jpp_given_t given = {.ndim = 0};
  static const jpp_given_t kNothing = {.struct_size = sizeof(kNothing)};
  jpp_source_t source = {.given = &kNothing};
  jpp_job_mesh_t mesh = {.num_ranks = 1, .rank_size = 1, .owners = &kZero};
  jpp_transport_options_t transport = {.driver = "inproc"};
  jpp_channel_spec_t channel = {.slots = 1, .capacity = 1};
#define ENTRY(type, call, options, code) \
  { #type, call, &(options), sizeof(type), code }
  const entry_t entries[] = {
      ENTRY(jpp_schedule_timeline_options_t, call_timeline, timeline, JPP_OK),
      ENTRY(jpp_simulate_options_t, call_simulate, simulate, JPP_OK),
      ENTRY(jpp_search_options_t, call_search, search, JPP_OK),
      ENTRY(jpp_search_options_t, call_advise_search, search, JPP_OK),
      ENTRY(jpp_search_options_t, call_plan_with_search, search, JPP_OK),
      ENTRY(jpp_partition_options_t, call_partition, partition, JPP_OK),
      ENTRY(jpp_program_options_t, call_program, program, JPP_OK),
      ENTRY(jpp_plan_options_t, call_plan, plan, JPP_OK),
      ENTRY(jpp_fake_options_t, call_fake, fake, JPP_OK),
      ENTRY(jpp_planfile_contents_t, call_planfile, contents, JPP_INVALID_ARGUMENT),
      ENTRY(jpp_pjrt_options_t, call_pjrt, pjrt, JPP_PLUGIN_ERROR),
      ENTRY(jpp_transport_options_t, call_transport, transport, JPP_OK),
      ENTRY(jpp_channel_spec_t, call_channel, channel, JPP_OK),
      ENTRY(jpp_loop_schedule_t, call_loop_schedule, loop, JPP_OK),
      ENTRY(jpp_schedule_params_t, call_build, params, JPP_OK),
      ENTRY(jpp_schedule_params_t, call_one_pass, params, JPP_OK),
      ENTRY(jpp_op_desc_t, call_add_op, op, JPP_OK),
      ENTRY(jpp_compile_request_t, call_compile, request, JPP_OK),
      ENTRY(jpp_compile_request_t, call_compile_again, request, JPP_OK),
      ENTRY(jpp_compile_request_t, call_cache_key, request, JPP_OK),
      ENTRY(jpp_compile_request_t, call_compile_cached, request, JPP_OK),
      ENTRY(jpp_execute_t, call_execute, execute, JPP_INVALID_ARGUMENT),
      ENTRY(jpp_host_array_t, call_from_host, scalar, JPP_OK),
      ENTRY(jpp_host_array_t, call_upload, scalar, JPP_OK),
      ENTRY(jpp_array_layout_t, call_create_array, layout, JPP_OK),
      ENTRY(jpp_wanted_t, call_decide_wanted, wanted, JPP_OK),
      ENTRY(jpp_given_t, call_decide_given, given, JPP_OK),
      ENTRY(jpp_source_t, call_take, source, JPP_OK),
      ENTRY(jpp_job_mesh_t, call_divide_ranks, mesh, JPP_OK),
      ENTRY(jpp_runtime_options_t, call_runtime, runtime, JPP_DEVICES_ERROR),
  };
#undef ENTRY
  for (size_t i = 0; i < sizeof(entries) / sizeof(*entries); ++i) {
    check_entry(&entries[i]);
  }
  jpp_client_destroy(runtime.client);
  jpp_client_destroy(g_client);
  plan_free(&g_planned);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_all_options_are_read_by_their_size),
  };
  return cmocka_run_group_tests_name("plan_options", tests, NULL, NULL);
}
