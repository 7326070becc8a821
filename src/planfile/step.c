// Makes a runnable step from a plan file: devices, executables, constants, a runtime.
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/null.h"
#include "base/struct_size.h"
#include "planfile/format.h"

// --- Devices --------------------------------------------------------------------------

static uint32_t count_devices(const jpp_planfile_t* file) {
  return file->contents.planned->ranks * file->contents.devices_per_rank;
}

static uint32_t find_device(const jpp_client_info_t* info, int32_t id) {
  for (uint32_t i = 0; i < info->device_count; ++i) {
    if (info->devices[i].id == id) return i;
  }
  return JPP_NO_DEVICE;
}

// Numbers the devices in the order in which the ranks name them; a device that several
// ranks share gets one number. Returns the number of devices.
static uint32_t number_devices(const jpp_planfile_t* file, uint32_t* out_numbers) {
  const int32_t* ids = file->contents.device_ids;
  uint32_t distinct = 0;
  for (uint32_t i = 0; i < count_devices(file); ++i) {
    uint32_t earlier = 0;
    out_numbers[i] = JPP_NO_DEVICE;
    if (ids[i] == -1) continue;
    while (ids[earlier] != ids[i]) ++earlier;
    out_numbers[i] = earlier < i ? out_numbers[earlier] : distinct++;
  }
  return distinct;
}

// Finds devices by the ids in the file if all of them exist; otherwise takes the first
// ones.
jpp_status_t* jpp_planfile_devices(const jpp_planfile_t* file, const jpp_client_t* client,
                                   uint32_t count, uint32_t* out_devices) {
  JPP_RETURN_IF_NULL(file, client, out_devices);
  JPP_RETURN_IF_ERROR(
      jpp__check_count("the devices of the ranks", count_devices(file), count));
  const jpp_client_info_t* info = jpp_client_info(client);
  uint32_t distinct = number_devices(file, out_devices);
  if (info->device_count < distinct) {
    return jpp_status_make(
        JPP_DEVICES_ERROR,
        "plan file %s: expected %u devices, %u ranks of at most %u, found %u on "
        "platform %s",
        file->path, distinct, file->contents.planned->ranks,
        file->contents.devices_per_rank, info->device_count, info->platform_name);
  }
  const int32_t* ids = file->contents.device_ids;
  for (uint32_t i = 0; i < count; ++i) {
    if (ids[i] != -1 && find_device(info, ids[i]) == JPP_NO_DEVICE) return NULL;
  }
  for (uint32_t i = 0; i < count; ++i) out_devices[i] = find_device(info, ids[i]);
  return NULL;
}

// --- Compiling ------------------------------------------------------------------------

// A module to compile for the devices of a rank or, if each rank has one device, for all
// ranks.
typedef struct job {
  uint32_t module, task;  // the first task that runs it
  uint32_t first;  // an earlier job for the same module; JPP_NONE: this is the first
  jpp_executable_t* executable;
  jpp_status_t* status;
} job_t;

struct jpp_planfile_step {
  const jpp_planfile_t* file;
  jpp_client_t* client;
  uint32_t* devices;    // [ranks * devices_per_rank]
  uint32_t* task_jobs;  // [num_tasks] JPP_NONE for a task that needs no executable
  job_t* jobs;          // [num_tasks], the first num_jobs are used
  uint32_t num_jobs;
  atomic_uint next_job;  // for the threads that compile
  bool copies;           // whether they run the jobs that have a `first`, or the others
  atomic_bool failed;
  jpp_task_executable_t* executables;  // [num_tasks]
  jpp_array_t** constants;             // [num_constants]
  jpp_runtime_t* runtime;
};

static const jpp_staged_t* staged_of(const jpp_planfile_step_t* step) {
  return step->file->contents.planned->staged;
}

static bool is_portable(const jpp_planfile_step_t* step) {
  return step->file->contents.devices_per_rank == 1;
}

// Returns JPP_NONE for a module without a job.
static uint32_t find_first(const jpp_planfile_step_t* step, uint32_t module) {
  for (uint32_t i = 0; i < step->num_jobs; ++i) {
    if (step->jobs[i].module == module) return i;
  }
  return JPP_NONE;
}

// Whether the runtime runs the task without an executable.
static bool is_copied(const jpp_planfile_contents_t* contents, uint32_t task) {
  return contents->shard_dims && contents->shard_dims[task] &&
         !strcmp(contents->platform, "cpu");
}

static jpp_status_t* make_jobs(jpp_planfile_step_t* step) {
  const jpp_planfile_contents_t* contents = &step->file->contents;
  uint32_t tasks = staged_of(step)->num_tasks, *job_of = NULL;
  uint32_t ranks = is_portable(step) ? 1 : contents->planned->ranks;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(tasks, &step->task_jobs));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(tasks, &step->jobs));
  JPP_RETURN_IF_ERROR(
      JPP_ALLOC_ARRAY(jpp__bytes_multiply(contents->num_modules, ranks), &job_of));
  // The job of each pair of module and rank, [num_modules][ranks], or of each module
  // alone.
  for (uint32_t t = 0; t < staged_of(step)->num_tasks; ++t) {
    uint32_t module = contents->task_modules[t];
    step->task_jobs[t] = JPP_NONE;
    if (module == JPP_NONE || is_copied(contents, t)) continue;
    size_t at = module;
    if (!is_portable(step)) {
      at = at * contents->planned->ranks + staged_of(step)->tasks[t].rank;
    }
    if (!job_of[at]) {
      step->jobs[step->num_jobs] =
          (job_t){.module = module, .task = t, .first = find_first(step, module)};
      job_of[at] = ++step->num_jobs;
    }
    step->task_jobs[t] = job_of[at] - 1;
  }
  jpp_free(job_of);
  return NULL;
}

// Takes over the status. A plugin names the missing function, but does not know who could
// register it.
static jpp_status_t* add_registration_hint(jpp_status_t* status) {
  if (!status || !strstr(jpp_status_message(status), "No FFI handler registered")) {
    return status;
  }
  jpp_status_t* said = jpp_status_make(
      jpp_status_code(status),
      "%s; this process has not registered that function: load the plan in Python "
      "(jaxpp.load), where JAX registers its own, or, in C, call "
      "jpp_client_register_custom_call() first",
      jpp_status_message(status));
  jpp_status_free(status);
  return said;
}

static jpp_status_t* compile_job(const jpp_planfile_step_t* step, job_t* job) {
  const jpp_planfile_contents_t* contents = &step->file->contents;
  const jpp_planfile_bytes_t* module = &contents->modules[job->module];
  const jpp_task_t* task = &staged_of(step)->tasks[job->task];
  jpp_compile_request_t request = {
      .struct_size = sizeof(request),
      .code = module->data,
      .code_size = module->size,
      .format = contents->format,
      .options = contents->compile_options.data,
      .options_size = contents->compile_options.size,
      .devices = step->devices + (size_t)task->rank * contents->devices_per_rank,
      .device_count =
          is_portable(step) ? 0 : jpp__planfile_count_devices(contents, task->rank)};
  jpp_status_t* status =
      job->first == JPP_NONE
          ? jpp_client_compile(step->client, &request, &job->executable)
          : jpp_client_compile_again(step->client, step->jobs[job->first].executable,
                                     &request, &job->executable);
  return jpp_status_annotate(add_registration_hint(status), "rank %u, task %s",
                             task->rank, task->name);
}

// A thread that compiles. After a failure, no thread begins another module.
static void* compile_jobs(void* user) {
  jpp_planfile_step_t* step = user;
  while (!atomic_load(&step->failed)) {
    uint32_t next = atomic_fetch_add(&step->next_job, 1);
    if (next >= step->num_jobs) break;
    job_t* job = &step->jobs[next];
    if ((job->first != JPP_NONE) != step->copies) continue;
    job->status = compile_job(step, job);
    if (job->status) atomic_store(&step->failed, true);
  }
  return NULL;
}

// The caller's thread compiles too.
static void compile_in_parallel(jpp_planfile_step_t* step) {
  enum { kMostThreads = 63 };
  pthread_t threads[kMostThreads];
  long wanted = sysconf(_SC_NPROCESSORS_ONLN) - 1;
  if (wanted >= step->num_jobs) wanted = step->num_jobs - 1;
  if (wanted > kMostThreads) wanted = kMostThreads;
  int started = 0;
  while (started < wanted &&
         pthread_create(&threads[started], NULL, compile_jobs, step) == 0) {
    ++started;
  }
  compile_jobs(step);
  for (int i = 0; i < started; ++i) pthread_join(threads[i], NULL);
}

// Compiles each module once, and then copies it to the devices of other ranks.
static void compile_and_copy(jpp_planfile_step_t* step) {
  compile_in_parallel(step);
  if (is_portable(step)) return;
  step->copies = true;
  atomic_store(&step->next_job, 0);
  compile_in_parallel(step);
}

// Returns the first failure and frees the others.
static jpp_status_t* take_failure(jpp_planfile_step_t* step) {
  jpp_status_t* first = NULL;
  for (uint32_t i = 0; i < step->num_jobs; ++i) {
    if (!first) {
      first = step->jobs[i].status;
    } else {
      jpp_status_free(step->jobs[i].status);
    }
    step->jobs[i].status = NULL;
  }
  return first;
}

static jpp_status_t* compile_tasks(jpp_planfile_step_t* step) {
  uint32_t tasks = staged_of(step)->num_tasks;
  JPP_RETURN_IF_ERROR(make_jobs(step));
  compile_and_copy(step);
  JPP_RETURN_IF_ERROR(take_failure(step));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(tasks, &step->executables));
  for (uint32_t t = 0; t < tasks; ++t) {
    uint32_t job = step->task_jobs[t];
    if (job == JPP_NONE) continue;
    step->executables[t] = (jpp_task_executable_t){step->jobs[job].executable,
                                                   .portable = is_portable(step)};
  }
  return NULL;
}

jpp_status_t* jpp_planfile_step_costs(const jpp_planfile_step_t* step,
                                      jpp_plan_costs_t** out_costs) {
  JPP_RETURN_IF_NULL(step, out_costs);
  const jpp_planfile_contents_t* contents = &step->file->contents;
  const jpp_plan_t* plan = contents->planned->plan;
  jpp_plan_costs_t* costs = NULL;
  *out_costs = NULL;
  JPP_RETURN_IF_ERROR(jpp_plan_costs(plan, &costs));
  jpp_status_t* status = NULL;
  if (contents->num_axes) {
    status = jpp_plan_costs_add_compiled(costs, plan, step->client, step->executables,
                                         contents->num_axes, contents->axis_names,
                                         contents->axis_sizes);
  }
  if (status) {
    jpp_plan_costs_destroy(costs);
    return status;
  }
  *out_costs = costs;
  return NULL;
}

// --- Arguments ------------------------------------------------------------------------

static jpp_status_t* read_data(void* data, uint32_t block, jpp_host_block_t* out_block) {
  (void)block;
  out_block->data = data;
  return NULL;
}

// Lists the block of the whole array, and the blocks of a rank's devices if they differ.
static jpp_status_t* list_blocks(const jpp_planfile_contents_t* contents, uint32_t arg,
                                 const jpp_type_t* type, int64_t** out_blocks) {
  const jpp_planfile_layout_t* layout =
      contents->layouts ? &contents->layouts[arg] : NULL;
  size_t devices = layout ? contents->devices_per_rank : 0;
  int64_t* blocks = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY((devices + 1) * type->ndim * 2, &blocks));
  for (uint32_t i = 0; i < type->ndim; ++i) blocks[2 * i + 1] = type->dims[i];
  int64_t* bounds = blocks + (size_t)type->ndim * 2;
  for (size_t k = 0; k < devices * type->ndim; ++k, bounds += 2) {
    bounds[0] = layout->starts[k];
    bounds[1] = bounds[0] + layout->dims[k % type->ndim];
  }
  *out_blocks = blocks;
  return NULL;
}

jpp_status_t* jpp_planfile_step_upload(const jpp_planfile_step_t* step, uint32_t arg,
                                       const void* data, jpp_array_t** out_array) {
  JPP_RETURN_IF_NULL(step, data, out_array);
  const jpp_planfile_contents_t* contents = &step->file->contents;
  const jpp_graph_t* graph = contents->planned->graph;
  *out_array = NULL;
  if (arg >= graph->num_args) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected the number of an argument, below %u, found %u",
                           graph->num_args, arg);
  }
  const jpp_type_t* type = jpp__planfile_type(graph, arg);
  int64_t* blocks = NULL;
  JPP_RETURN_IF_ERROR(list_blocks(contents, arg, type, &blocks));
  const jpp_given_block_t whole = {
      .rank = JPP_ANY_RANK, .is_local = true, .bounds = blocks};
  const jpp_given_t given = {.struct_size = sizeof(given),
                             .home = JPP_HOME_HOST,
                             .dtype = type->dtype,
                             .ndim = type->ndim,
                             .num_blocks = 1,
                             .blocks = &whole};
  const jpp_source_t source = {.struct_size = sizeof(source),
                               .given = &given,
                               .user = (void*)data,
                               .read = read_data};
  jpp_status_t* status = jpp_runtime_take(
      step->runtime, arg, contents->layouts ? blocks + (size_t)type->ndim * 2 : NULL,
      &source, out_array);
  jpp_free(blocks);
  return status;
}

// --- Results --------------------------------------------------------------------------

// Copies a dense box to its place in a dense array, one row of the last dimension at a
// time.
static void copy_box(const jpp_type_t* type, const int64_t* dims, const int64_t* start,
                     const char* from, char* to) {
  int64_t at[JPP_BUFFER_MAX_RANK] = {0};
  uint32_t last = type->ndim - 1;
  int64_t element = jpp_dtype_bits(type->dtype) / 8, row = dims[last] * element;
  for (uint32_t i = 0; i < type->ndim; ++i) {
    if (!dims[i]) return;
  }
  while (true) {
    int64_t offset = 0;
    for (uint32_t i = 0; i <= last; ++i) {
      offset = offset * type->dims[i] + start[i] + at[i];
    }
    memcpy(to + offset * element, from, (size_t)row);
    from += row;
    uint32_t next = last;
    while (next-- > 0 && ++at[next] == dims[next]) at[next] = 0;
    if (next == UINT32_MAX) return;
  }
}

static jpp_status_t* read_boxes(const jpp_planfile_step_t* step, const jpp_type_t* type,
                                const jpp_planfile_layout_t* layout, jpp_array_t* array,
                                char* data) {
  jpp_type_t box_type = *type;
  box_type.dims = layout->dims;
  uint64_t bytes = jpp_type_host_bytes(&box_type);
  uint32_t rank = jpp_array_layout(array)->ranks[0];
  char* box = NULL;
  jpp_status_t* status = jpp_alloc(bytes, (void**)&box);
  uint32_t devices = jpp__planfile_count_devices(&step->file->contents, rank);
  for (uint32_t d = 0; d < devices && !status; ++d) {
    status = jpp_array_read(array, rank, d, box, bytes, NULL);
    if (status) break;
    copy_box(type, layout->dims, layout->starts + (size_t)d * type->ndim, box, data);
  }
  jpp_free(box);
  return status;
}

jpp_status_t* jpp_planfile_step_read(const jpp_planfile_step_t* step, uint32_t output,
                                     jpp_array_t* array, void* data) {
  JPP_RETURN_IF_NULL(step, array, data);
  const jpp_planfile_contents_t* contents = &step->file->contents;
  const jpp_graph_t* graph = contents->planned->graph;
  if (output >= graph->num_outputs) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "expected the number of a result, below %u, found %u",
                           graph->num_outputs, output);
  }
  const jpp_type_t* type = jpp__planfile_type(graph, graph->num_args + output);
  if (contents->layouts && type->ndim && type->ndim <= JPP_BUFFER_MAX_RANK) {
    const jpp_planfile_layout_t* layout = &contents->layouts[graph->num_args + output];
    return read_boxes(step, type, layout, array, data);
  }
  return jpp_array_read(array, jpp_array_layout(array)->ranks[0], 0, data,
                        jpp_type_host_bytes(type), NULL);
}

// --- Constants ------------------------------------------------------------------------

static uint32_t count_args(const jpp_planfile_step_t* step) {
  return step->file->contents.planned->graph->num_args -
         step->file->contents.num_constants;
}

// --- Create and destroy ---------------------------------------------------------------

static jpp_status_t* check_platform(const jpp_planfile_t* file,
                                    const jpp_client_t* client) {
  const char* found = jpp_client_info(client)->platform_name;
  if (!strcmp(file->contents.platform, found)) return NULL;
  return jpp_status_make(
      JPP_UNSUPPORTED,
      "plan file %s: its tasks are lowered for platform %s; expected a "
      "plugin of that one, found %s",
      file->path, file->contents.platform, found);
}

static jpp_status_t* create_step(jpp_planfile_step_t* step, const uint32_t* devices) {
  const jpp_planfile_contents_t* contents = &step->file->contents;
  JPP_RETURN_IF_ERROR(check_platform(step->file, step->client));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(count_devices(step->file), &step->devices));
  memcpy(step->devices, devices, count_devices(step->file) * sizeof(*devices));
  JPP_RETURN_IF_ERROR(compile_tasks(step));
  jpp_runtime_options_t options = {.struct_size = sizeof(options),
                                   .client = step->client,
                                   .plan = contents->planned->plan,
                                   .devices_per_rank = contents->devices_per_rank,
                                   .devices = step->devices,
                                   .executables = step->executables,
                                   .shard_dims = contents->shard_dims,
                                   .steps_in_flight = contents->steps_in_flight};
  JPP_RETURN_IF_ERROR(jpp_runtime_create(&options, &step->runtime));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(contents->num_constants, &step->constants));
  for (uint32_t c = 0; c < contents->num_constants; ++c) {
    JPP_RETURN_IF_ERROR(jpp_planfile_step_upload(
        step, count_args(step) + c, contents->constants[c].data, &step->constants[c]));
  }
  return NULL;
}

jpp_status_t* jpp_planfile_step_create(const jpp_planfile_t* file, jpp_client_t* client,
                                       const uint32_t* devices,
                                       jpp_planfile_step_t** out_step) {
  JPP_RETURN_IF_NULL(file, client, devices, out_step);
  jpp_planfile_step_t* step = NULL;
  *out_step = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &step));
  step->file = file;
  step->client = client;
  jpp_status_t* status = create_step(step, devices);
  if (status) {
    jpp_planfile_step_destroy(step);
    return status;
  }
  *out_step = step;
  return NULL;
}

void jpp_planfile_step_destroy(jpp_planfile_step_t* step) {
  if (!step) return;
  jpp_runtime_destroy(step->runtime);
  for (uint32_t c = 0; step->constants && c < step->file->contents.num_constants; ++c) {
    jpp_array_release(step->constants[c]);
  }
  for (uint32_t i = 0; i < step->num_jobs; ++i) {
    jpp_client_executable_destroy(step->client, step->jobs[i].executable);
  }
  jpp_free(step->constants);
  jpp_free(step->executables);
  jpp_free(step->jobs);
  jpp_free(step->task_jobs);
  jpp_free(step->devices);
  jpp_free(step);
}

jpp_runtime_t* jpp_planfile_step_runtime(const jpp_planfile_step_t* step) {
  return step->runtime;
}

// --- Calls ----------------------------------------------------------------------------

jpp_status_t* jpp_planfile_step_call(jpp_planfile_step_t* step, const jpp_call_t* call) {
  JPP_RETURN_IF_NULL(step, call);
  jpp_call_t whole;
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_call_t, interrupt, call, &whole));
  call = &whole;
  if (count_args(step)) JPP_RETURN_IF_NULL(call->args);
  const jpp_planfile_contents_t* contents = &step->file->contents;
  uint32_t args = count_args(step);
  uint32_t outputs = contents->planned->graph->num_outputs;
  JPP_RETURN_IF_ERROR(jpp__check_count("the arguments of a call", args, call->num_args));
  JPP_RETURN_IF_ERROR(
      jpp__check_count("the results of a call", outputs, call->num_results));
  if (outputs) JPP_RETURN_IF_NULL(call->results);
  for (uint32_t o = 0; o < outputs; ++o) call->results[o] = NULL;
  jpp_array_t** all = NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(contents->planned->graph->num_args, &all));
  for (uint32_t a = 0; a < args; ++a) all[a] = call->args[a];
  for (uint32_t c = 0; c < contents->num_constants; ++c) {
    all[args + c] = step->constants[c];
  }
  whole.args = all;
  whole.num_args = args + contents->num_constants;
  jpp_status_t* status = jpp_runtime_call(step->runtime, &whole);
  jpp_free(all);
  return status;
}
