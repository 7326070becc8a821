// Fills the contents of a plan file from a plan: modules are pieces of one text with
// different lengths, layouts follow from the types, and results replace arguments of
// their type.
#include "planfile_util.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "planfile/format.h"
#include "test_util.h"

static const jpp_type_t* type_of(const jpp_graph_t* graph, uint32_t number) {
  uint32_t value = number < graph->num_args
                       ? graph->args[number].value
                       : graph->outputs[number - graph->num_args].value;
  return &graph->values[value].type;
}

static void make_layout(const jpp_type_t* type, uint32_t devices, int64_t* numbers,
                        jpp_planfile_layout_t* layout) {
  int64_t* starts = numbers + type->ndim;
  bool cut = false;
  for (uint32_t i = 0; i < type->ndim; ++i) {
    bool here = !cut && type->dims[i] % devices == 0;
    numbers[i] = here ? type->dims[i] / devices : type->dims[i];
    for (uint32_t d = 0; d < devices; ++d) {
      starts[d * type->ndim + i] = here ? d * numbers[i] : 0;
    }
    cut = cut || here;
  }
  *layout = (jpp_planfile_layout_t){.dims = numbers, .starts = starts};
}

static void make_layouts(made_contents_t* made, uint32_t devices) {
  const jpp_graph_t* graph = made->contents.planned->graph;
  uint32_t count = graph->num_args + graph->num_outputs;
  size_t numbers = 0;
  for (uint32_t i = 0; i < count; ++i) numbers += type_of(graph, i)->ndim * (devices + 1);
  made->layouts = calloc(count + 1, sizeof(*made->layouts));
  made->numbers = calloc(numbers + 1, sizeof(*made->numbers));
  int64_t* at = made->numbers;
  for (uint32_t i = 0; i < count; ++i) {
    make_layout(type_of(graph, i), devices, at, &made->layouts[i]);
    at += (size_t)type_of(graph, i)->ndim * (devices + 1);
  }
  made->contents.layouts = made->layouts;
}

// Every second task with ops shares the module of the previous one.
static void make_modules(made_contents_t* made) {
  const jpp_staged_t* staged = made->contents.planned->staged;
  uint32_t with_ops = 0;
  made->task_modules = calloc(staged->num_tasks + 1, sizeof(uint32_t));
  made->modules = calloc(staged->num_tasks + 1, sizeof(*made->modules));
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    bool has_ops = staged->tasks[t].num_ops != 0;
    made->task_modules[t] = has_ops ? with_ops++ / 2 : JPP_NONE;
  }
  made->contents.num_modules = (with_ops + 1) / 2;
  for (uint32_t m = 0; m < made->contents.num_modules; ++m) {
    made->modules[m] = (jpp_planfile_bytes_t){made->text + m % 50, 20 + m};
  }
}

// Every device has all of what a task copies.
static void make_shard_dims(made_contents_t* made) {
  const jpp_planned_t* planned = made->contents.planned;
  const jpp_staged_t* staged = planned->staged;
  made->shard_dims = calloc(staged->num_tasks + 1, sizeof(*made->shard_dims));
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    const jpp_task_t* task = &staged->tasks[t];
    if (!jpp_plan_task_copies(planned->plan, t, NULL)) continue;
    uint64_t* dims = calloc(task->num_outputs * JPP_BUFFER_MAX_RANK, sizeof(*dims));
    made->shard_dims[t] = dims;
    for (uint32_t i = 0; i < task->num_outputs; ++i) {
      const jpp_type_t* type = &staged->values[task->outputs[i]].type;
      for (uint32_t d = 0; d < type->ndim; ++d) *dims++ = (uint64_t)type->dims[d];
    }
  }
}

made_contents_t contents_of(const jpp_planned_t* planned, uint32_t devices_per_rank) {
  made_contents_t made = {.contents = {.planned = planned}};
  jpp_planfile_contents_t* contents = &made.contents;
  const jpp_graph_t* graph = planned->graph;
  uint32_t devices = planned->ranks * devices_per_rank;
  made.text = malloc(1 << 16);
  for (int i = 0; i < 1 << 16; ++i) made.text[i] = (char)(i * 7 + i / 256);
  made.device_ids = calloc(devices, sizeof(*made.device_ids));
  for (uint32_t i = 0; i < devices; ++i) made.device_ids[i] = (int32_t)(devices - 1 - i);
  make_modules(&made);
  make_shard_dims(&made);
  made.axis_names = calloc(1, sizeof(*made.axis_names));
  made.axis_sizes = calloc(planned->ranks, sizeof(*made.axis_sizes));
  made.axis_names[0] = "data";
  for (uint32_t r = 0; r < planned->ranks; ++r) made.axis_sizes[r] = devices_per_rank;
  made.constants = calloc(1, sizeof(*made.constants));
  contents->num_constants = graph->num_args > 1;
  if (contents->num_constants) {
    uint64_t bytes = jpp_type_host_bytes(type_of(graph, graph->num_args - 1));
    assert_true(bytes <= 1 << 16);
    made.constants[0] = (jpp_planfile_bytes_t){made.text, bytes};
  }
  if (devices_per_rank > 1) make_layouts(&made, devices_per_rank);
  contents->struct_size = sizeof(*contents);
  contents->num_axes = 1;
  contents->axis_names = made.axis_names;
  contents->axis_sizes = made.axis_sizes;
  contents->steps_in_flight = 3;
  contents->platform = "cpu";
  contents->format = "fake";
  contents->devices_per_rank = devices_per_rank;
  contents->device_ids = made.device_ids;
  contents->compile_options = (jpp_planfile_bytes_t){"options", 7};
  contents->modules = made.modules;
  contents->task_modules = made.task_modules;
  contents->shard_dims = (const uint64_t* const*)made.shard_dims;
  contents->constants = made.constants;
  contents->front = (jpp_planfile_bytes_t){"front\0end", 9};
  return made;
}

void contents_free(made_contents_t* made) {
  free(made->device_ids);
  free(made->axis_names);
  free(made->axis_sizes);
  const jpp_staged_t* staged = made->contents.planned->staged;
  for (uint32_t t = 0; t < staged->num_tasks; ++t) free((void*)made->shard_dims[t]);
  free(made->shard_dims);
  free(made->task_modules);
  free(made->modules);
  free(made->constants);
  free(made->layouts);
  free(made->numbers);
  free(made->text);
}

unsigned char* contents_bytes(const jpp_planfile_contents_t* contents, size_t* out_size) {
  char path[] = "/tmp/jaxpp-test-XXXXXX";
  int descriptor = mkstemp(path);
  assert_true(descriptor >= 0);
  close(descriptor);
  ASSERT_OK(jpp_planfile_save(contents, path));
  FILE* file = fopen(path, "rb");
  assert_non_null(file);
  fseek(file, 0, SEEK_END);
  *out_size = (size_t)ftell(file);
  rewind(file);
  unsigned char* bytes = malloc(*out_size);
  assert_int_equal(fread(bytes, 1, *out_size, file), *out_size);
  fclose(file);
  unlink(path);
  return bytes;
}

void seal_bytes(unsigned char* bytes, size_t size) {
  jpp__planfile_put(bytes + JPP_PLANFILE_SIZE_AT, 8, size);
  jpp__planfile_put(bytes + JPP_PLANFILE_HASH_AT, 8, jpp__planfile_hash(bytes, size));
}
