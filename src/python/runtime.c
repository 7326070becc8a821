// jaxpp._core.Runtime: a step is one call, which takes its arguments and returns
// promises.
#include <unistd.h>

#include "jaxpp/view.h"
#include "python/core.h"

typedef struct runtime_object {
  PyObject ob_base;
  struct runtime_object *next, *before;  // list of all runtimes
  jpp_runtime_t* runtime;
  const jpp_plan_t* plan;  // of plan_object
  PyObject *client, *plan_object;
  PyObject* executables;  // a tuple, [tasks]: an Executable or None
  uint32_t devices_per_rank;
  bool waits;        // a call returns when the step is done
  bool interrupted;  // a caller stopped waiting for a step
  bool networked;    // other processes depend on its steps
} runtime_object_t;

static runtime_object_t* g_runtimes;  // this and the next one: under the GIL
static unsigned long g_closer;  // the thread that ends the interpreter; 0: not yet known

// --- Making ---------------------------------------------------------------------------

// Reads self->executables, of which there must be `count`.
static bool read_executables(const runtime_object_t* self, bool portable, uint32_t count,
                             jpp_task_executable_t* table) {
  Py_ssize_t found = PyTuple_Size(self->executables);
  if (!jpp_py_check_count("executables", count, (uint64_t)found)) return false;
  for (uint32_t i = 0; i < count; ++i) {
    PyObject* item = PyTuple_GetItem(self->executables, i);
    if (item == Py_None) continue;
    if (!Py_IS_TYPE(item, jpp_py_types.executable) ||
        ((jpp_py_executable_t*)item)->client != self->client) {
      PyErr_Format(PyExc_TypeError,
                   "executable %u: expected None or an Executable of this client", i);
      return false;
    }
    table[i].executable = ((jpp_py_executable_t*)item)->executable;
    table[i].portable = portable;
  }
  return true;
}

// Reads which process has each rank; the transport between the processes becomes the
// runtime's.
static bool read_processes(const runtime_object_t* self, PyObject* processes,
                           PyObject* network, uint32_t** out_processes,
                           jpp_runtime_options_t* options) {
  *out_processes = NULL;
  if (network == Py_None) return true;
  jpp_py_network_t* found = (jpp_py_network_t*)network;
  uint32_t count = 0;
  if (!Py_IS_TYPE(network, jpp_py_types.network) || !found->transport) {
    PyErr_SetString(PyExc_TypeError, "expected None or a Network that is not in use");
    return false;
  }
  if (!jpp_py_to_u32s(processes, out_processes, &count) ||
      !jpp_py_check_count("processes of the ranks", self->plan->ranks, count)) {
    return false;
  }
  options->rank_process = *out_processes;
  options->process = found->process;
  options->network = found->transport;
  options->stall_timeout_ms = found->stall_timeout_ms;
  options->step_timeout_ms = found->step_timeout_ms;
  return true;
}

// Blocks until other processes answer, if there are any.
static jpp_status_t* create_runtime(const jpp_runtime_options_t* options,
                                    PyObject* network, jpp_runtime_t** out_runtime) {
  jpp_status_t* status = NULL;
  if (options->network) ((jpp_py_network_t*)network)->transport = NULL;
  Py_BEGIN_ALLOW_THREADS
    status = jpp_runtime_create(options, out_runtime);
  Py_END_ALLOW_THREADS
  return status;
}

static bool make_runtime(runtime_object_t* self, PyObject* devices, PyObject* shard_dims,
                         int portable, uint32_t steps_in_flight, PyObject* processes,
                         PyObject* network) {
  jpp_runtime_options_t options = {
      .struct_size = sizeof(options),
      .client = ((jpp_py_client_t*)self->client)->client,
      .plan = self->plan,
      .devices_per_rank = self->devices_per_rank,
      .steps_in_flight = steps_in_flight ? steps_in_flight : 1};
  uint32_t *device_ids = NULL, *process_ids = NULL, count = 0;
  uint32_t tasks = self->plan->staged->num_tasks;
  jpp_task_executable_t* table = NULL;
  uint64_t** dims = NULL;
  uint64_t expected = (uint64_t)self->plan->ranks * self->devices_per_rank;
  bool ok = jpp_py_to_u32s(devices, &device_ids, &count) &&
            jpp_py_check_count("devices of the ranks", expected, count) &&
            jpp_py_check(JPP_ALLOC_ARRAY(tasks, &table)) &&
            read_executables(self, portable, tasks, table) &&
            jpp_py_to_shard_dims(self->plan->staged, shard_dims, &dims) &&
            read_processes(self, processes, network, &process_ids, &options);
  options.devices = device_ids;
  options.executables = table;
  options.shard_dims = (const uint64_t* const*)dims;
  ok = ok && jpp_py_check(create_runtime(&options, network, &self->runtime));
  jpp_free(device_ids);
  jpp_free(process_ids);
  jpp_free(table);
  jpp_py_free_shard_dims(self->plan->staged, dims);
  return ok;
}

static PyObject* runtime_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  PyObject *client = NULL, *plan = NULL, *devices = NULL, *executables = NULL;
  PyObject *shard_dims = NULL, *processes = NULL, *network = NULL;
  uint32_t per_rank = 0, steps_in_flight = 0;
  int portable = 0;
  if (!PyArg_ParseTuple(args, "O!O!O&OOOpO&OO:Runtime", jpp_py_types.client, &client,
                        jpp_py_types.plan, &plan, jpp_py_u32_converter, &per_rank,
                        &devices, &executables, &shard_dims, &portable,
                        jpp_py_u32_converter, &steps_in_flight, &processes, &network)) {
    return NULL;
  }
  runtime_object_t* self = jpp_py_new(type);
  if (!self) return NULL;
  self->client = Py_NewRef(client);
  self->plan_object = Py_NewRef(plan);
  self->executables = PySequence_Tuple(executables);
  self->plan = ((jpp_py_plan_t*)plan)->plan;
  self->devices_per_rank = per_rank;
  self->waits = steps_in_flight == 0;
  self->networked = network != Py_None;
  if (self->executables && make_runtime(self, devices, shard_dims, portable,
                                        steps_in_flight, processes, network)) {
    self->next = g_runtimes;
    if (g_runtimes) g_runtimes->before = self;
    g_runtimes = self;
    return (PyObject*)self;
  }
  Py_DECREF(self);
  return NULL;
}

// An executable may keep a callback alive whose function calls the step again.
static int runtime_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((runtime_object_t*)object)->executables);
  return 0;
}

static void unlist(runtime_object_t* self) {
  if (self->next) self->next->before = self->before;
  if (self->before) self->before->next = self->next;
  if (g_runtimes == self) g_runtimes = self->next;
  self->next = self->before = NULL;
}

// Ends the runtime, which borrows the executables; no caller can reach it any more. Its
// steps are finished first, which may run callbacks into Python. Executables that devices
// may still run after a failure are not freed, and after a failure of the job the runtime
// is not freed either.
static int runtime_clear(PyObject* object) {
  runtime_object_t* self = (runtime_object_t*)object;
  jpp_runtime_t* runtime = self->runtime;
  unlist(self);
  self->runtime = NULL;
  if (runtime && jpp_runtime_has_given_up(runtime)) {
    Py_XINCREF(self->executables);
    if (jpp_runtime_is_broken(runtime)) runtime = NULL;
  }
  Py_BEGIN_ALLOW_THREADS
    jpp_runtime_destroy(runtime);
  Py_END_ALLOW_THREADS
  Py_CLEAR(self->executables);
  return 0;
}

static void runtime_dealloc(PyObject* object) {
  runtime_object_t* self = (runtime_object_t*)object;
  PyObject_GC_UnTrack(object);
  runtime_clear(object);
  Py_XDECREF(self->plan_object);
  Py_XDECREF(self->client);
  jpp_py_free(object);
}

// --- A step ---------------------------------------------------------------------------

// The arrays of one call.
typedef struct call {
  runtime_object_t* self;
  uint32_t num_args, num_results;
  jpp_array_t** args;     // [num_args] borrowed from the caller's list
  jpp_array_t** results;  // [num_results] held; they follow args in the same allocation
} call_t;

static bool read_args(call_t* call, PyObject* list) {
  if (!PyList_Check(list) || PyList_Size(list) != (Py_ssize_t)call->num_args) {
    PyErr_Format(PyExc_TypeError, "expected a list of %u values", call->num_args);
    return false;
  }
  for (uint32_t a = 0; a < call->num_args; ++a) {
    PyObject* item = PyList_GetItem(list, a);
    if (!Py_IS_TYPE(item, jpp_py_types.value)) {
      PyErr_Format(PyExc_TypeError, "argument %u is not a Value", a);
      return false;
    }
    const jpp_py_value_t* value = (jpp_py_value_t*)item;
    call->args[a] = value->array;
    if (value->client != call->self->client ||
        jpp_array_layout(value->array)->devices_per_rank !=
            call->self->devices_per_rank) {
      PyErr_Format(PyExc_TypeError, "argument %u is on devices of another mesh", a);
      return false;
    }
  }
  return true;
}

static bool open_call(call_t* call, PyObject* list) {
  const jpp_graph_t* graph = call->self->plan->staged->graph;
  call->num_args = graph->num_args;
  call->num_results = graph->num_outputs;
  size_t count = (size_t)call->num_args + call->num_results;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(count, &call->args))) return false;
  call->results = call->args + call->num_args;
  return read_args(call, list);
}

static PyObject* results_to_list(call_t* call) {
  PyObject* list = PyList_New(call->num_results);
  for (uint32_t o = 0; list && o < call->num_results; ++o) {
    PyObject* value = jpp_py_value_wrap(call->self->client, call->results[o]);
    call->results[o] = NULL;
    if (value) {
      PyList_SetItem(list, o, value);
    } else {
      Py_CLEAR(list);
    }
  }
  return list;
}

static void close_call(call_t* call) {
  for (uint32_t o = 0; call->results && o < call->num_results; ++o) {
    jpp_array_release(call->results[o]);
  }
  jpp_free((void*)call->args);
}

void jpp_py_stop_late_thread(void) {
  if (!g_closer || g_closer == PyThread_get_thread_ident()) return;
  Py_BEGIN_ALLOW_THREADS
    for (;;) pause();
  Py_END_ALLOW_THREADS
}

static bool check_open(const runtime_object_t* self) {
  if (self->runtime) return true;
  PyErr_SetString(PyExc_RuntimeError, "the interpreter is about to exit");
  return false;
}

static bool run_call(call_t* call) {
  jpp_call_t request = {.struct_size = sizeof(request),
                        .args = call->args,
                        .num_args = call->num_args,
                        .results = call->results,
                        .num_results = call->num_results};
  jpp_py_wait_t wait;
  jpp_py_wait_begin(&wait);
  request.interrupt = &wait.interrupt;
  jpp_status_t* status = jpp_runtime_call(call->self->runtime, &request);
  bool ok = jpp_py_wait_end(&wait, status);
  call->self->interrupted = wait.raised;
  return ok;
}

// Waits until the first `count` steps are done. Raises a failure that was not reported
// before.
static bool await_first_steps(runtime_object_t* self, uint64_t count) {
  if (!check_open(self)) return false;
  jpp_py_wait_t wait;
  jpp_py_wait_begin(&wait);
  jpp_status_t* status = jpp_runtime_await_steps(self->runtime, count, &wait.interrupt);
  bool ok = jpp_py_wait_end(&wait, status);
  self->interrupted = wait.raised;
  return ok;
}

static bool await_steps(runtime_object_t* self) {
  return await_first_steps(self, UINT64_MAX);
}

// Cancels the steps in flight. The devices still execute the work that they have,
// including callbacks into Python, and no thread waits for them; therefore the
// executables are never freed.
static void cancel_steps(runtime_object_t* self) {
  jpp_runtime_cancel(self->runtime);
  Py_XINCREF(self->executables);
}

// A caller that waits inside the call and is interrupted does not get the step's results:
// the step is cancelled, which takes a moment, and its failure is not reported.
static bool await_call(runtime_object_t* self) {
  if (await_steps(self)) return true;
  if (!self->interrupted) return false;
  PyObject *type = NULL, *value = NULL, *traceback = NULL;
  PyErr_Fetch(&type, &value, &traceback);
  cancel_steps(self);
  if (!await_steps(self)) PyErr_Clear();
  PyErr_Restore(type, value, traceback);
  return false;
}

static PyObject* runtime_step(PyObject* object, PyObject* args) {
  call_t call = {.self = (runtime_object_t*)object};
  PyObject *list = NULL, *results = NULL;
  int waits = 0;
  if (!PyArg_ParseTuple(args, "Op:step", &list, &waits)) return NULL;
  jpp_py_stop_late_thread();
  if (!check_open(call.self) || !jpp_py_check(jpp_process_check())) return NULL;
  if (open_call(&call, list) && run_call(&call) &&
      (!(waits || call.self->waits) || await_call(call.self))) {
    results = results_to_list(&call);
  }
  close_call(&call);
  return results;
}

static PyObject* runtime_wait(PyObject* object, PyObject* args) {
  uint64_t count = 0;
  if (!PyArg_ParseTuple(args, "O&", jpp_py_u64_converter, &count)) return NULL;
  if (!await_first_steps((runtime_object_t*)object, count)) return NULL;
  Py_RETURN_NONE;
}

static PyObject* runtime_num_steps(PyObject* object, PyObject* unused) {
  (void)unused;
  runtime_object_t* self = (runtime_object_t*)object;
  if (!check_open(self)) return NULL;
  return PyLong_FromUnsignedLongLong(jpp_runtime_num_steps(self->runtime));
}

static bool add_compiled(const runtime_object_t* self, PyObject* names, PyObject* sizes,
                         jpp_plan_costs_t* costs) {
  uint32_t tasks = self->plan->staged->num_tasks, count = 0, *axis_sizes = NULL;
  jpp_task_executable_t* table = NULL;
  const char** axis_names = NULL;
  bool ok =
      jpp_py_to_axes(names, sizes, self->plan->ranks, &axis_names, &axis_sizes, &count) &&
      jpp_py_check(JPP_ALLOC_ARRAY(tasks, &table)) &&
      read_executables(self, false, tasks, table);
  jpp_client_t* client = ((jpp_py_client_t*)self->client)->client;
  ok = ok && jpp_py_check(jpp_plan_costs_add_compiled(costs, self->plan, client, table,
                                                      count, axis_names, axis_sizes));
  jpp_free(axis_sizes);
  jpp_free(axis_names);
  jpp_free(table);
  return ok;
}

static PyObject* runtime_collectives(PyObject* object, PyObject* args) {
  runtime_object_t* self = (runtime_object_t*)object;
  PyObject *names = NULL, *sizes = NULL, *rows = NULL;
  jpp_plan_costs_t* costs = NULL;
  if (!PyArg_ParseTuple(args, "O!O", &PyTuple_Type, &names, &sizes) ||
      !check_open(self) || !jpp_py_check(jpp_plan_costs(self->plan, &costs))) {
    return NULL;
  }
  if (add_compiled(self, names, sizes, costs)) rows = jpp_py_from_collective_costs(costs);
  jpp_plan_costs_destroy(costs);
  return rows;
}

static PyObject* make_number(const void* numbers, uint64_t index) {
  return PyLong_FromUnsignedLongLong(((const uint64_t*)numbers)[index]);
}

static PyObject* runtime_memory(PyObject* object, PyObject* args) {
  runtime_object_t* self = (runtime_object_t*)object;
  uint32_t rank = 0;
  jpp_task_executable_t* table = NULL;
  jpp_rank_memory_t memory = {0};
  if (!PyArg_ParseTuple(args, "O&", jpp_py_u32_converter, &rank) || !check_open(self) ||
      !jpp_py_check(JPP_ALLOC_ARRAY(self->plan->staged->num_tasks, &table))) {
    return NULL;
  }
  jpp_client_t* client = ((jpp_py_client_t*)self->client)->client;
  bool ok = read_executables(self, false, self->plan->staged->num_tasks, table) &&
            jpp_py_check(jpp_plan_rank_memory(self->plan, rank, client, table, &memory));
  jpp_free(table);
  if (!ok) return NULL;
  const uint64_t numbers[] = {
      memory.arguments,      memory.results,      memory.donated,
      memory.temporary,      memory.code,         memory.peak,
      memory.host_arguments, memory.host_results, memory.host_donated,
      memory.host_temporary, memory.host_peak};
  return jpp_py_make_list(sizeof(numbers) / sizeof(*numbers), make_number, numbers);
}

// Whether a step has effects outside the devices.
static bool has_callbacks(const runtime_object_t* self) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(self->executables); ++i) {
    PyObject* item = PyTuple_GetItem(self->executables, i);
    if (item != Py_None && PyObject_IsTrue(((jpp_py_executable_t*)item)->kept) > 0) {
      return true;
    }
  }
  return false;
}

// Leaves the job once the others no longer need this process.
static void leave_job(runtime_object_t* self) {
  jpp_runtime_t* runtime = self->runtime;
  self->runtime = NULL;
  Py_BEGIN_ALLOW_THREADS
    jpp_runtime_destroy(runtime);
  Py_END_ALLOW_THREADS
}

// Ends what the runtime does, as below. Returns false if the user interrupts.
static bool close_runtime(runtime_object_t* self, bool* broken) {
  bool needed = self->networked || has_callbacks(self);
  bool given_up = self->interrupted || !needed;
  if (!self->runtime) return true;
  if (given_up) cancel_steps(self);
  bool ok = await_steps(self);
  *broken |= jpp_runtime_is_broken(self->runtime);
  bool hangs = jpp_runtime_has_given_up(self->runtime);
  if (hangs) cancel_steps(self);  // keeps the executables
  if (self->networked && !self->interrupted && !hangs) leave_job(self);
  if (ok) return true;
  if (given_up || (jpp_py_job_told && self->networked)) {
    PyErr_Clear();
  } else if (self->interrupted) {
    cancel_steps(self);
    return false;
  } else {
    PyErr_WriteUnraisable((PyObject*)self);  // a failure that no caller waited for
  }
  return true;
}

// Cancels steps in flight that no caller waits for and that call nothing back, unless
// other processes depend on them. Returns true if their job has failed.
PyObject* jpp_py_runtimes_close(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  g_closer = PyThread_get_thread_ident();
  jpp_py_dropped_close();
  bool broken = false, ok = true;
  // Holds each one: other threads may drop it while this one waits.
  for (PyObject* at = Py_XNewRef((PyObject*)g_runtimes); at;) {
    runtime_object_t* self = (runtime_object_t*)at;
    ok = close_runtime(self, &broken);
    PyObject* next = ok ? Py_XNewRef((PyObject*)self->next) : NULL;
    Py_DECREF(at);
    at = next;
  }
  return ok ? PyBool_FromLong(broken) : NULL;
}

// --- What happened --------------------------------------------------------------------

static PyObject* runtime_set_checks(PyObject* object, PyObject* args) {
  int nans = 0, infs = 0;
  if (!PyArg_ParseTuple(args, "pp", &nans, &infs)) return NULL;
  if (!check_open((runtime_object_t*)object)) return NULL;
  jpp_runtime_set_checks(((runtime_object_t*)object)->runtime, nans, infs);
  Py_RETURN_NONE;
}

static PyObject* runtime_set_tracing(PyObject* object, PyObject* enabled) {
  int on = PyObject_IsTrue(enabled);
  if (on < 0 || !check_open((runtime_object_t*)object)) return NULL;
  jpp_runtime_set_tracing(((runtime_object_t*)object)->runtime, on);
  Py_RETURN_NONE;
}

static const jpp_trace_t* last_trace(PyObject* object) {
  if (!await_steps((runtime_object_t*)object)) return NULL;
  const jpp_trace_t* trace = jpp_runtime_last_trace(((runtime_object_t*)object)->runtime);
  if (!trace) {
    (void)jpp_py_check(
        jpp_status_make(JPP_INVALID_ARGUMENT,
                        "no step has been traced; call set_tracing() before the step"));
  }
  return trace;
}

static PyObject* make_run(const void* context, uint64_t index) {
  const jpp_trace_t* trace = context;
  const jpp_trace_run_t* run = &trace->runs[index];
  long microbatch = run->microbatch == JPP_NONE ? -1 : (long)run->microbatch;
  return JPP_PY_RECORD(JPP_PY_TASK_RUN, PyLong_FromUnsignedLong(run->rank),
                       jpp_py_text(trace->plan->staged->tasks[run->task].name),
                       PyLong_FromLong(microbatch), PyLong_FromLongLong(run->issued),
                       PyLong_FromLongLong(run->start), PyLong_FromLongLong(run->end));
}

static PyObject* runtime_trace(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_trace_t* trace = last_trace(object);
  return trace ? jpp_py_make_list(trace->num_runs, make_run, trace) : NULL;
}

// The costs and spreads of all stages, and the first stage of the current loop.
typedef struct measured {
  jpp_cost_t *costs, *spreads;
  uint32_t first;
} measured_t;

static PyObject* make_costs(const void* context, uint64_t stage) {
  const measured_t* measured = context;
  const jpp_cost_t* cost = &measured->costs[measured->first + stage];
  const jpp_cost_t* spread = &measured->spreads[measured->first + stage];
  return JPP_PY_RECORD(
      JPP_PY_STAGE_COSTS, PyFloat_FromDouble(cost->forward),
      PyFloat_FromDouble(cost->backward), PyFloat_FromDouble(cost->weight),
      PyFloat_FromDouble(spread->forward), PyFloat_FromDouble(spread->backward),
      PyFloat_FromDouble(spread->weight));
}

static bool measure(call_t* call, uint32_t stages, measured_t* measured) {
  jpp_py_wait_t wait;
  jpp_py_wait_begin(&wait);
  jpp_status_t* status =
      jpp_runtime_measure(call->self->runtime, call->args, &wait.interrupt, stages,
                          measured->costs, measured->spreads);
  bool ok = jpp_py_wait_end(&wait, status);
  call->self->interrupted = wait.raised;
  return ok;
}

// Makes a list for each loop.
static PyObject* costs_to_lists(const jpp_staged_t* staged, measured_t* measured) {
  PyObject* lists = PyList_New(staged->graph->num_loops);
  for (uint32_t l = 0; lists && l < staged->graph->num_loops; ++l) {
    PyObject* list = jpp_py_make_list(staged->loops[l].stages, make_costs, measured);
    measured->first += staged->loops[l].stages;
    if (list) {
      PyList_SetItem(lists, l, list);
    } else {
      Py_CLEAR(lists);
    }
  }
  return lists;
}

static PyObject* runtime_measure(PyObject* object, PyObject* args) {
  call_t call = {.self = (runtime_object_t*)object};
  PyObject *list = NULL, *lists = NULL;
  measured_t measured = {0};
  if (!PyArg_ParseTuple(args, "O:measure", &list)) return NULL;
  if (!check_open(call.self) || !jpp_py_check(jpp_process_check())) return NULL;
  const jpp_staged_t* staged = call.self->plan->staged;
  uint32_t stages = 0;
  for (uint32_t l = 0; l < staged->graph->num_loops; ++l) {
    stages += staged->loops[l].stages;
  }
  if (open_call(&call, list) && jpp_py_check(JPP_ALLOC_ARRAY(stages, &measured.costs)) &&
      jpp_py_check(JPP_ALLOC_ARRAY(stages, &measured.spreads)) &&
      measure(&call, stages, &measured)) {
    lists = costs_to_lists(staged, &measured);
  }
  jpp_free(measured.costs);
  jpp_free(measured.spreads);
  close_call(&call);
  return lists;
}

enum { kMostTraces = 64 };

// Stores the last `count` steps in out_traces, the oldest first.
static bool last_traces(PyObject* object, uint32_t count,
                        const jpp_trace_t** out_traces) {
  if (!last_trace(object)) return false;
  const jpp_runtime_t* runtime = ((runtime_object_t*)object)->runtime;
  bool all = 0 < count && count <= kMostTraces;
  for (uint32_t t = 0; all && t < count; ++t) {
    out_traces[t] = jpp_runtime_trace(runtime, count - 1 - t);
    all = out_traces[t] != NULL;
  }
  if (all) return true;
  return jpp_py_check(jpp_status_make(
      JPP_INVALID_ARGUMENT,
      "expected a number of steps that were traced one after the other, at most "
      "steps_in_flight; found %u",
      count));
}

static PyObject* runtime_trace_json(PyObject* object, PyObject* args) {
  const jpp_trace_t* traces[kMostTraces];
  uint32_t steps = 0;
  char* text = NULL;
  if (!PyArg_ParseTuple(args, "O&", jpp_py_u32_converter, &steps) ||
      !last_traces(object, steps, traces) ||
      !jpp_py_check(jpp_trace_to_json(traces, steps, &text))) {
    return NULL;
  }
  return jpp_py_take_text(text);
}

static PyObject* make_peak(const void* peaks, uint64_t rank) {
  return PyLong_FromUnsignedLongLong(((const uint64_t*)peaks)[rank]);
}

static PyObject* runtime_trace_peaks(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_trace_t* trace = last_trace(object);
  if (!trace) return NULL;
  return jpp_py_make_list(trace->plan->ranks, make_peak, trace->peak_live_bytes);
}

static PyMethodDef kMethods[] = {
    {"step", runtime_step, METH_VARARGS,
     "step($self, values, waits, /)\n--\n\nBegins a step on a list of Values, one per "
     "argument; returns one per result, a promise unless it `waits`."},
    {"wait", runtime_wait, METH_VARARGS,
     "wait($self, count, /)\n--\n\n"
     "Waits until the first `count` steps are done; raises a failure that was not "
     "reported yet."},
    {"collectives", runtime_collectives, METH_VARARGS,
     "collectives($self, names, sizes, /)\n--\n\n"
     "(rank, task, kind, axes, times, bytes) for each collective of the tasks compiled "
     "in "
     "this process. A rank's mesh has axes of these names and sizes."},
    {"memory", runtime_memory, METH_VARARGS,
     "memory($self, rank, /)\n--\n\n"
     "Bytes on each device: (arguments, results, donated, temporary, code, peak), and in "
     "pinned host memory: (arguments, results, donated, temporary, peak)."},
    {"num_steps", runtime_num_steps, METH_NOARGS,
     "num_steps($self, /)\n--\n\nThe number of steps called so far."},
    {"set_checks", runtime_set_checks, METH_VARARGS,
     "set_checks($self, nans, infs, /)\n--\n\n"
     "Makes such results errors, from the next step on."},
    {"set_tracing", runtime_set_tracing, METH_O,
     "set_tracing($self, enabled, /)\n--\n\nTurns tracing on or off, from the next step "
     "on."},
    {"trace", runtime_trace, METH_NOARGS,
     "trace($self, /)\n--\n\nThe TaskRuns of the last traced step."},
    {"measure", runtime_measure, METH_VARARGS,
     "measure($self, values, /)\n--\n\nThe StageCosts of each loop, from a few runs on "
     "these values; none may be donated."},
    {"trace_json", runtime_trace_json, METH_VARARGS,
     "trace_json($self, steps, /)\n--\n\nThe last traced steps for Perfetto."},
    {"trace_peaks", runtime_trace_peaks, METH_NOARGS,
     "trace_peaks($self, /)\n--\n\n"
     "Live bytes at each rank's peak, counted in the last traced step."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc,
     "Runtime(client, plan, devices_per_rank, devices, executables, shard_dims, "
     "portable, steps_in_flight, processes, network, /)\n--\n\n"
     "A plan ready to run; steps_in_flight 0: a call returns when the step is done; "
     "processes: whose each rank is, and the Network between them, or None twice; "
     "`executables`: of every task, None where it has no ops or the runtime copies; "
     "`shard_dims`: of every task, the dims of its results on each device, if the "
     "runtime copies to several; devices are [rank][device], flat."},
    {Py_tp_new, (void*)runtime_new},
    {Py_tp_dealloc, (void*)runtime_dealloc},
    {Py_tp_traverse, (void*)runtime_traverse},
    {Py_tp_clear, (void*)runtime_clear},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_runtime_spec = {"jaxpp._core.Runtime", sizeof(runtime_object_t), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};
