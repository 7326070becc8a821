// Builds the models of model.h: it writes the graphs as text, plans them, and gives each
// task a program that hashes its arguments.
#include "model.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/str.h"

// --- Graph texts ----------------------------------------------------------------------

static void chain_forward(jpp_str_t* text, uint32_t stages) {
  jpp_str_append(text, "  %x0:f32[4] = slice(%x, %i) cheap\n");
  for (uint32_t s = 0; s < stages; ++s) {
    jpp_str_appendf(text, "  %%h%u:f32[4] = dot(%%x%u, %%w%u) cost 10\n", s, s, s);
    jpp_str_appendf(text, "  %%x%u:f32[4] = @mark %u (%%h%u)\n", s + 1, s, s);
  }
  jpp_str_appendf(text, "  %%loss:f32[] = mean(%%x%u)\n", stages);
}

static void chain_backward(jpp_str_t* text, uint32_t stages) {
  jpp_str_appendf(text, "  %%c%u:f32[4] = grad(%%x%u) backward\n", stages, stages);
  for (uint32_t s = stages; s-- > 0;) {
    jpp_str_appendf(text, "  %%b%u:f32[4] = @mark_backward %u (%%c%u)\n", s, s, s + 1);
    jpp_str_appendf(text, "  %%g%u:f32[4] = dotT(%%b%u, %%x%u) backward cost 10\n", s, s,
                    s);
    if (!s) continue;
    jpp_str_appendf(text, "  %%c%u:f32[4] = dot(%%b%u, %%w%u) backward cost 10\n", s, s,
                    s);
  }
}

static void chain_end(jpp_str_t* text, uint32_t stages) {
  jpp_str_append(text, "} %L:f32[] = add %loss");
  for (uint32_t s = 0; s < stages; ++s) {
    jpp_str_appendf(text, ", %%G%u:f32[4] = add %%g%u", s, s);
  }
  jpp_str_append(text, "\n");
  for (uint32_t s = 0; s < stages; ++s) {
    jpp_str_appendf(text, "%%u%u:f32[4] = upd(%%w%u, %%G%u)\n", s, s, s);
  }
  for (uint32_t s = 0; s < stages; ++s) jpp_str_appendf(text, "out %%u%u\n", s);
  for (uint32_t s = 0; s < stages; ++s) jpp_str_appendf(text, "out %%G%u\n", s);
  jpp_str_append(text, "out %L \"loss\"\n");
}

char* model_chain(uint32_t stages, uint32_t ranks, uint32_t microbatches) {
  jpp_str_t text = {0};
  char* finished = NULL;
  jpp_str_appendf(&text, "graph \"chain\" ranks %u\n", ranks);
  for (uint32_t s = 0; s < stages; ++s) {
    jpp_str_appendf(&text, "arg %%w%u f32[4] \"w%u\" donated\n", s, s);
  }
  jpp_str_append(&text, "arg %x f32[8,4] \"x\"\n");
  jpp_str_appendf(&text,
                  "loop microbatches %u stages %u schedule \"1f1b\" index %%i at "
                  "\"train.py:30\" {\n",
                  microbatches, stages);
  chain_forward(&text, stages);
  chain_backward(&text, stages);
  chain_end(&text, stages);
  ASSERT_OK(jpp_str_finish(&text, &finished));
  return finished;
}

const char kModelOutputs[] =
    "graph \"outputs\" ranks 2\n"
    "arg %w f32[4] \"w\"\n"
    "arg %v f32[4] \"v\" donated\n"
    "arg %unused f32[4] \"unused\" donated\n"
    "arg %x f32[8,4] \"x\"\n"
    "loop microbatches 3 stages 2 schedule \"1f1b\" index %i at \"t.py:1\" {\n"
    "  %x0:f32[4] = slice(%x, %i) cheap\n"
    "  %h0:f32[4] = relu(%x0) cost 10\n"
    "  %m0:f32[4] = @mark 0 (%h0)\n"
    "  %h1:f32[4] = dot(%m0, %w) cost 10\n"
    "  %m1:f32[4] = @mark 1 (%h1)\n"
    "  %c2:f32[4] = grad(%m1) backward\n"
    "  %b1:f32[4] = @mark_backward 1 (%c2)\n"
    "  %g1:f32[4] = dotT(%b1, %m0) backward cost 10\n"
    "  %c1:f32[4] = dot(%b1, %w) backward\n"
    "  %b0:f32[4] = @mark_backward 0 (%c1)\n"
    "} %L:f32[4] = add %g1\n"
    "out %w\n"
    "out %L\n"
    "out %L\n"
    "out %v\n"
    "out %v\n";

// --- Plan -----------------------------------------------------------------------------

static void plan(model_t* model) {
  jpp_loop_schedule_t loops[4] = {0};
  assert_true(model->graph->num_loops <= 4);
  for (uint32_t i = 0; i < model->graph->num_loops; ++i) {
    loops[i] = (jpp_loop_schedule_t){.struct_size = sizeof(*loops),
                                     .built_in = model->options.schedule};
  }
  jpp_plan_options_t options = {
      .struct_size = sizeof(options), .ranks = model->options.ranks, .loops = loops};
  ASSERT_OK(jpp_plan_graph(model->graph, &options, &model->planned));
  model->staged = model->planned->staged;
  model->plan = model->planned->plan;
}

// --- Executables ----------------------------------------------------------------------

jpp_executable_t* model_compile_task(const model_t* model, uint32_t task) {
  bool fake = !model->options.plugin_path;
  char* code = fake ? model_fake_code(model, task) : model_mlir_code(model, task);
  jpp_compile_request_t request = {.struct_size = sizeof(request),
                                   .code = code,
                                   .code_size = strlen(code),
                                   .format = fake ? "fake" : "mlir"};
  jpp_executable_t* executable = NULL;
  ASSERT_OK(jpp_client_compile(model->client, &request, &executable));
  free(code);
  return executable;
}

// Without nodes it compiles all tasks: each client has all devices.
static bool has_rank(const model_t* model, uint32_t task) {
  const uint32_t* rank_process = model->options.rank_process;
  uint32_t rank = model->staged->tasks[task].rank;
  return model->options.slices == 1 || !rank_process ||
         rank_process[rank] == model->options.process;
}

void model_compile(model_t* model) {
  uint32_t tasks = model->staged->num_tasks;
  model->executables = calloc(tasks, sizeof(*model->executables));
  for (uint32_t t = 0; t < tasks; ++t) {
    if (!model->staged->tasks[t].num_ops || !has_rank(model, t)) continue;
    if (model->options.copies && jpp_plan_task_copies(model->plan, t, NULL)) continue;
    model->executables[t].executable = model_compile_task(model, t);
    model->executables[t].portable =
        model->options.portable || model->options.plugin_path;
  }
}

// --- Create and destroy ---------------------------------------------------------------

static void create_plugin_client(model_t* model, uint32_t devices) {
  const jpp_client_option_t client_options[] = {
      {.name = "cpu_device_count", .type = JPP_OPTION_INT64, .int64_value = devices},
      {.name = "asynchronous", .type = JPP_OPTION_BOOL, .bool_value = false}};
  bool in_call = !model->options.network && model->options.devices_per_rank == 1;
  jpp_pjrt_options_t options = {.struct_size = sizeof(options),
                                .plugin_path = model->options.plugin_path,
                                .options = client_options,
                                .option_count = in_call ? 2 : 1};
  ASSERT_OK(jpp_client_create_pjrt(&options, &model->client));
}

uint32_t model_node_of(const model_t* model, uint32_t slice, uint32_t process) {
  return model->options.slices > 1
             ? slice * model->options.processes + process % model->options.processes
             : 0;
}

static void create_client(model_t* model) {
  uint32_t per_rank = model->options.devices_per_rank;
  uint32_t sharing = model->options.ranks_per_device;
  uint32_t devices = (model->options.ranks + sharing - 1) / sharing * per_rank;
  bool spans = model->options.slices > 1;
  uint32_t nodes = spans ? model->options.slices * model->options.processes : 1;
  jpp_fake_options_t options = {
      .struct_size = sizeof(options),
      .device_count = devices,
      .threads = model->options.device_threads,
      .latency_us = model->options.latency_us,
      .device_memory_only = model->options.device_memory_only,
      .store = model->options.store,
      .node_id = model_node_of(model, model->options.slice, model->options.process),
      .num_nodes = nodes};
  if (model->options.plugin_path) {
    create_plugin_client(model, devices);
  } else {
    ASSERT_OK(jpp_client_create_fake(&options, &model->client));
  }
  // In reverse, so that the numbers of ranks and devices differ.
  for (uint32_t i = 0; i < model->options.ranks * per_rank; ++i) {
    uint32_t group = i / per_rank / sharing;
    bool exists = !model->options.odd_have_one || group % 2 == 0 || i % per_rank == 0;
    uint32_t device = devices - 1 - (group * per_rank + i % per_rank);
    model->devices[i] = exists ? device : JPP_NO_DEVICE;
  }
}

static void allocate_io(model_t* model) {
  uint32_t per_rank = model->options.devices_per_rank;
  model->inputs = calloc(model->plan->ranks, sizeof(*model->inputs));
  model->outputs = calloc(model->plan->ranks, sizeof(*model->outputs));
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    model->inputs[r] = calloc(program->num_inputs * per_rank + 1, sizeof(jpp_buffer_t*));
    model->outputs[r] =
        calloc(program->num_outputs * per_rank + 1, sizeof(jpp_buffer_t*));
  }
}

model_t* model_plan(const char* text, model_options_t options) {
  model_t* model = calloc(1, sizeof(*model));
  model->options = options;
  ASSERT_OK(jpp_graph_parse(text, strlen(text), "test", &model->graph));
  if (!options.ranks) model->options.ranks = model->graph->ranks;
  if (!options.devices_per_rank) model->options.devices_per_rank = 1;
  if (!options.ranks_per_device) model->options.ranks_per_device = 1;
  if (!options.slices) model->options.slices = 1;
  plan(model);
  create_client(model);
  if (!options.custom_call) model_compile(model);
  allocate_io(model);
  return model;
}

jpp_status_t* model_try_create_runtime(model_t* model) {
  jpp_runtime_options_t options = {.struct_size = sizeof(options),
                                   .client = model->client,
                                   .plan = model->plan,
                                   .devices_per_rank = model->options.devices_per_rank,
                                   .devices = model->devices,
                                   .executables = model->executables,
                                   .steps_in_flight = model->options.steps_in_flight,
                                   .rank_process = model->options.rank_process,
                                   .process = model->options.process,
                                   .network = model->options.network,
                                   .stall_timeout_ms = model->options.stall_timeout_ms,
                                   .step_timeout_ms = model->options.step_timeout_ms};
  return jpp_runtime_create(&options, &model->runtime);
}

model_t* model_create(const char* text, model_options_t options) {
  model_t* model = model_plan(text, options);
  ASSERT_OK(model_try_create_runtime(model));
  return model;
}

void model_destroy(model_t* model) {
  jpp_runtime_destroy(model->runtime);
  for (uint32_t t = 0; t < model->staged->num_tasks; ++t) {
    jpp_client_executable_destroy(model->client, model->executables[t].executable);
  }
  if (!model->options.plugin_path) {
    jpp_fake_stats_t stats = model_stats(model);
    assert_int_equal(stats.live_buffers, 0);
    assert_int_equal(stats.live_events, 0);
    assert_int_equal(stats.live_executables, 0);
    assert_int_equal(stats.misuses, 0);
  }
  jpp_client_destroy(model->client);
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    free(model->inputs[r]);
    free(model->outputs[r]);
  }
  free(model->inputs);
  free(model->outputs);
  free(model->executables);
  jpp_planned_destroy(model->planned);
  jpp_graph_destroy(model->graph);
  free(model);
}

// --- Arrays ---------------------------------------------------------------------------

enum { kMostNumbers = 64, kMostDevices = 8 };  // of an array, of a rank

jpp_array_t* model_array(const model_t* model, uint32_t arg, uint32_t rank, float first,
                         float more) {
  const jpp_type_t* type = &model->staged->values[model->graph->args[arg].value].type;
  uint32_t per_rank = model->options.devices_per_rank;
  float data[kMostDevices][kMostNumbers];
  jpp_host_array_t shards[kMostDevices];
  assert_true(jpp_type_bytes(type) <= sizeof(data[0]) && per_rank <= kMostDevices);
  for (uint32_t d = 0; d < per_rank; ++d) {
    uint32_t shard = model->options.slice * per_rank + d;
    float offset = model->options.collective ? (float)shard / 8 : 0;
    for (int i = 0; i < kMostNumbers; ++i) data[d][i] = first + offset + (float)i * more;
    shards[d] = (jpp_host_array_t){.struct_size = sizeof(jpp_host_array_t),
                                   .data = data[d],
                                   .dtype = JPP_DTYPE_F32,
                                   .rank = type->ndim,
                                   .dims = type->dims};
  }
  jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                               .client = model->client,
                               .num_ranks = 1,
                               .devices_per_rank = per_rank,
                               .ranks = &rank};
  jpp_array_t* array = NULL;
  ASSERT_OK(jpp_array_upload(&layout, shards, model->devices + rank * per_rank, &array));
  return array;
}

// Of floats.
static size_t size_of(jpp_client_t* client, jpp_buffer_t* buffer) {
  jpp_buffer_shape_t shape;
  size_t bytes = sizeof(float);
  ASSERT_OK(jpp_client_buffer_shape(client, buffer, &shape));
  for (uint32_t i = 0; i < shape.rank; ++i) bytes *= (size_t)shape.dims[i];
  return bytes;
}

float model_read_array(jpp_array_t* array) {
  float data[kMostNumbers] = {0};
  const jpp_array_layout_t* layout = jpp_array_layout(array);
  ASSERT_OK(jpp_array_await(array, NULL));
  jpp_buffer_t* buffer = jpp_array_shards(array, layout->ranks[0])[0];
  size_t bytes = size_of(layout->client, buffer);
  assert_true(bytes <= sizeof(data));
  ASSERT_OK(jpp_array_read(array, layout->ranks[0], 0, data, bytes, NULL));
  return data[0];
}

// --- Steps ----------------------------------------------------------------------------

static jpp_buffer_t* upload(const model_t* model, uint32_t arg, uint32_t device) {
  const jpp_type_t* type = &model->staged->values[model->graph->args[arg].value].type;
  size_t count = (size_t)(jpp_type_bytes(type) / sizeof(float));
  if (device == JPP_NO_DEVICE) return NULL;
  float* data = calloc(count + 1, sizeof(*data));
  for (size_t i = 0; i < count; ++i) data[i] = (float)arg + (float)i / 16;
  jpp_host_array_t array = {.struct_size = sizeof(array),
                            .data = data,
                            .dtype = JPP_DTYPE_F32,
                            .rank = type->ndim,
                            .dims = type->dims,
                            .memory = type->memory};
  jpp_buffer_t* buffer = NULL;
  ASSERT_OK(jpp_client_buffer_from_host(model->client, &array, device, &buffer));
  free(data);
  return buffer;
}

void model_give(model_t* model) {
  uint32_t per_rank = model->options.devices_per_rank;
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      for (uint32_t d = 0; d < per_rank; ++d) {
        model->inputs[r][i * per_rank + d] =
            upload(model, program->inputs[i].arg, model->devices[r * per_rank + d]);
      }
    }
  }
}

void model_take_back(model_t* model) {
  uint32_t per_rank = model->options.devices_per_rank;
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    for (uint32_t i = 0; i < program->num_inputs * per_rank; ++i) {
      bool owned = program->inputs[i / per_rank].owned;
      if (!owned) jpp_client_buffer_destroy(model->client, model->inputs[r][i]);
      model->inputs[r][i] = NULL;
    }
    for (uint32_t i = 0; i < program->num_outputs * per_rank; ++i) {
      jpp_client_buffer_destroy(model->client, model->outputs[r][i]);
      model->outputs[r][i] = NULL;
    }
  }
}

static jpp_memory_t memory_of_arg(const model_t* model, uint32_t arg) {
  return model->graph->values[model->graph->args[arg].value].type.memory;
}

// The input of each rank that has argument `arg`, as one array.
static jpp_array_t* wrap_arg(model_t* model, uint32_t arg) {
  uint32_t per_rank = model->options.devices_per_rank, ranks[JPP_FAKE_MAX_DEVICES];
  jpp_buffer_t* buffers[JPP_FAKE_MAX_DEVICES];
  jpp_array_layout_t layout = {.struct_size = sizeof(layout),
                               .client = model->client,
                               .devices_per_rank = per_rank,
                               .ranks = ranks,
                               .memory = memory_of_arg(model, arg)};
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      if (program->inputs[i].arg != arg) continue;
      jpp_buffer_t** shards = &model->inputs[r][(size_t)i * per_rank];
      for (uint32_t d = 0; d < per_rank; ++d) {
        buffers[layout.num_ranks * per_rank + d] = shards[d];
        shards[d] = NULL;
      }
      ranks[layout.num_ranks++] = r;
    }
  }
  jpp_array_t* array = NULL;
  ASSERT_OK(jpp_array_create(&layout, buffers, &array));
  return array;
}

jpp_call_t model_wrap(model_t* model) {
  jpp_array_t** args = calloc(model->graph->num_args + 1, sizeof(jpp_array_t*));
  for (uint32_t a = 0; a < model->graph->num_args; ++a) args[a] = wrap_arg(model, a);
  return (jpp_call_t){
      .struct_size = sizeof(jpp_call_t),
      .args = args,
      .num_args = model->graph->num_args,
      .num_results = model->graph->num_outputs,
      .results = calloc(model->graph->num_outputs + 1, sizeof(jpp_array_t*))};
}

// Takes each array apart, rank by rank; on the first rank it is deleted.
void model_unwrap(model_t* model, const jpp_call_t* call) {
  uint32_t per_rank = model->options.devices_per_rank;
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      if (program->inputs[i].owned) continue;
      ASSERT_OK(jpp_array_take(call->args[program->inputs[i].arg], r, per_rank,
                               &model->inputs[r][(size_t)i * per_rank]));
    }
    for (uint32_t o = 0; o < program->num_outputs; ++o) {
      jpp_array_t* result = call->results[program->outputs[o].output];
      if (!result) continue;
      ASSERT_OK(
          jpp_array_take(result, r, per_rank, &model->outputs[r][(size_t)o * per_rank]));
    }
  }
  for (uint32_t a = 0; a < model->graph->num_args; ++a) jpp_array_release(call->args[a]);
  for (uint32_t o = 0; o < model->graph->num_outputs; ++o) {
    jpp_array_release(call->results[o]);
  }
  free((void*)call->args);
  free((void*)call->results);
}

jpp_status_t* model_step(model_t* model) {
  jpp_call_t call = model_wrap(model);
  jpp_status_t* status = jpp_runtime_call(model->runtime, &call);
  if (!status) status = jpp_runtime_await(model->runtime, NULL);
  for (uint32_t o = 0; o < model->graph->num_outputs && status; ++o) {
    jpp_array_release(call.results[o]);
    call.results[o] = NULL;
  }
  model_unwrap(model, &call);
  return status;
}

static float read_number(const model_t* model, jpp_buffer_t* buffer) {
  float data[64] = {0};
  assert_non_null(buffer);
  size_t bytes = size_of(model->client, buffer);
  assert_true(bytes <= sizeof(data));
  ASSERT_OK(jpp_client_buffer_read(model->client, buffer, data, bytes));
  return data[bytes / sizeof(float) - 1];
}

static void read_outputs(const model_t* model, float* numbers) {
  uint32_t per_rank = model->options.devices_per_rank;
  for (uint32_t o = 0; o < model->graph->num_outputs; ++o) numbers[o] = -1;
  for (uint32_t r = 0; r < model->plan->ranks; ++r) {
    const jpp_program_t* program = &model->plan->programs[r];
    for (uint32_t i = 0; i < program->num_outputs * per_rank; ++i) {
      float* number = &numbers[program->outputs[i / per_rank].output];
      if (model->devices[r * per_rank + i % per_rank] == JPP_NO_DEVICE) {
        assert_null(model->outputs[r][i]);
        continue;
      }
      float found = read_number(model, model->outputs[r][i]);
      if (*number != -1) assert_float_equal(found, *number, 0);
      *number = found;
    }
  }
  for (uint32_t o = 0; o < model->graph->num_outputs; ++o) assert_true(numbers[o] != -1);
}

void model_run(model_t* model, float* numbers) {
  model_give(model);
  ASSERT_OK(model_step(model));
  read_outputs(model, numbers);
  model_take_back(model);
  model_expect_clean(model);
}

jpp_fake_stats_t model_stats(model_t* model) {
  jpp_fake_stats_t stats;
  ASSERT_OK(jpp_fake_stats(model->client, &stats));
  return stats;
}

void model_expect_clean(model_t* model) {
  if (model->options.plugin_path) return;
  jpp_fake_stats_t stats = model_stats(model);
  uint32_t constants = 0, per_rank = model->options.devices_per_rank;
  for (uint32_t i = 0; i < model->plan->ranks * per_rank; ++i) {
    bool exists = model->devices[i] != JPP_NO_DEVICE;
    if (exists) constants += model->plan->programs[i / per_rank].num_constants;
  }
  assert_int_equal(stats.live_buffers, constants);
  assert_int_equal(stats.live_events, 0);
  assert_int_equal(stats.misuses, 0);
}
