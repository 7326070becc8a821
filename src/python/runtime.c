// jaxpp._core.Runtime: a step is one call, with the GIL released. Donated arguments are
// claimed before anything runs, all of them or none.
#include <time.h>

#include "base/arena.h"
#include "benchmarks/bare.h"
#include "jaxpp/view.h"
#include "python/core.h"

typedef struct runtime_object {
  PyObject ob_base;
  jpp_runtime_t* runtime;
  jpp_bare_t* bare;        // NULL but for benchmarks
  const jpp_plan_t* plan;  // of plan_object
  PyObject *client, *plan_object;
  PyObject* executables;  // a tuple, [tasks]: an Executable or None
  uint32_t devices_per_rank;
  uint32_t* output_ranks;  // [outputs of the step] how many ranks hold it
  unsigned long handling;  // the thread that runs signal handlers inside a step; 0: none
} runtime_object_t;

enum { kMostColumns = 1 << 20 };  // of a drawing

// --- Making ---------------------------------------------------------------------------

// self->executables, of which there must be `count`.
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

static bool count_output_ranks(runtime_object_t* self) {
  uint32_t outputs = self->plan->staged->graph->num_outputs;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(outputs, &self->output_ranks))) return false;
  for (uint32_t r = 0; r < self->plan->ranks; ++r) {
    const jpp_program_t* program = &self->plan->programs[r];
    for (uint32_t i = 0; i < program->num_outputs; ++i) {
      ++self->output_ranks[program->outputs[i].output];
    }
  }
  return true;
}

static bool make_runtime(runtime_object_t* self, PyObject* devices, int portable,
                         uint32_t issue_threads, int bare) {
  jpp_runtime_options_t options = {.client = ((jpp_py_client_t*)self->client)->client,
                                   .plan = self->plan,
                                   .devices_per_rank = self->devices_per_rank,
                                   .issue_threads = issue_threads};
  uint32_t *device_ids = NULL, count = 0;
  uint32_t tasks = self->plan->staged->num_tasks;
  jpp_task_executable_t* table = NULL;
  uint64_t expected = (uint64_t)self->plan->ranks * self->devices_per_rank;
  bool ok = jpp_py_to_u32s(devices, &device_ids, &count) &&
            jpp_py_check_count("devices of the ranks", expected, count) &&
            jpp_py_check(JPP_ALLOC_ARRAY(tasks, &table)) &&
            read_executables(self, portable, tasks, table);
  options.devices = device_ids;
  options.executables = table;
  ok = ok && jpp_py_check(jpp_runtime_create(&options, &self->runtime)) &&
       (!bare || jpp_py_check(jpp_bare_create(&options, &self->bare)));
  jpp_free(device_ids);
  jpp_free(table);
  return ok;
}

static PyObject* runtime_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  PyObject *client = NULL, *plan = NULL, *devices = NULL, *executables = NULL;
  uint32_t per_rank = 0, issue_threads = 0;
  int portable = 0, bare = 0;
  if (!PyArg_ParseTuple(args, "O!O!O&OOpO&p:Runtime", jpp_py_types.client, &client,
                        jpp_py_types.plan, &plan, jpp_py_u32_converter, &per_rank,
                        &devices, &executables, &portable, jpp_py_u32_converter,
                        &issue_threads, &bare)) {
    return NULL;
  }
  runtime_object_t* self = jpp_py_new(type);
  if (!self) return NULL;
  self->client = Py_NewRef(client);
  self->plan_object = Py_NewRef(plan);
  self->executables = PySequence_Tuple(executables);
  self->plan = ((jpp_py_plan_t*)plan)->plan;
  self->devices_per_rank = per_rank;
  if (self->executables && count_output_ranks(self) &&
      make_runtime(self, devices, portable, issue_threads, bare)) {
    return (PyObject*)self;
  }
  Py_DECREF(self);
  return NULL;
}

// An executable may keep a callback whose function calls the step again.
static int runtime_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((runtime_object_t*)object)->executables);
  return 0;
}

// Ends the runtime, which borrows the executables; nobody can call it any more.
static int runtime_clear(PyObject* object) {
  runtime_object_t* self = (runtime_object_t*)object;
  jpp_runtime_destroy(self->runtime);
  jpp_bare_destroy(self->bare);
  self->runtime = NULL;
  self->bare = NULL;
  Py_CLEAR(self->executables);
  return 0;
}

static void runtime_dealloc(PyObject* object) {
  runtime_object_t* self = (runtime_object_t*)object;
  PyObject_GC_UnTrack(object);
  runtime_clear(object);
  jpp_free(self->output_ranks);
  Py_XDECREF(self->plan_object);
  Py_XDECREF(self->client);
  jpp_py_free(object);
}

// --- A step ---------------------------------------------------------------------------

// What one call needs, in one arena.
typedef struct call {
  runtime_object_t* self;
  jpp_arena_t arena;
  uint32_t num_args;
  jpp_py_value_t** args;     // [num_args] borrowed from the caller's list
  jpp_buffer_t*** inputs;    // [ranks][inputs * devices]
  jpp_buffer_t*** outputs;   // [ranks][outputs * devices]
  jpp_py_value_t** results;  // [outputs of the step] owned
} call_t;

static bool read_args(call_t* call, PyObject* list) {
  const jpp_graph_t* graph = call->self->plan->staged->graph;
  call->num_args = graph->num_args;
  if (!PyList_Check(list) || PyList_Size(list) != (Py_ssize_t)graph->num_args) {
    PyErr_Format(PyExc_TypeError, "expected a list of %u values", graph->num_args);
    return false;
  }
  if (!jpp_py_check(JPP_ARENA_ARRAY(&call->arena, graph->num_args, &call->args))) {
    return false;
  }
  for (uint32_t a = 0; a < graph->num_args; ++a) {
    PyObject* item = PyList_GetItem(list, a);
    if (!Py_IS_TYPE(item, jpp_py_types.value)) {
      PyErr_Format(PyExc_TypeError, "argument %u is not a Value", a);
      return false;
    }
    call->args[a] = (jpp_py_value_t*)item;
    if (call->args[a]->client != call->self->client ||
        call->args[a]->devices_per_rank != call->self->devices_per_rank) {
      PyErr_Format(PyExc_TypeError, "argument %u lies on devices of another mesh", a);
      return false;
    }
  }
  return true;
}

static const char* arg_name(const call_t* call, uint32_t arg) {
  const jpp_graph_t* graph = call->self->plan->staged->graph;
  const char* name = graph->values[graph->args[arg].value].name;
  return name ? name : "?";
}

static bool is_donated(const call_t* call, uint32_t arg) {
  return call->self->plan->staged->graph->args[arg].donated;
}

// The Value that the user has: an argument may be a copy made for this step.
static jpp_py_value_t* root_of(const call_t* call, uint32_t arg) {
  jpp_py_value_t* value = call->args[arg];
  return value->origin ? (jpp_py_value_t*)value->origin : value;
}

static void raise_deleted(const call_t* call, uint32_t arg) {
  jpp_py_raise(jpp_status_make(
      JPP_DONATED_ERROR, "argument %s: expected an array, found one that %s",
      arg_name(call, arg), jpp_py_value_fate(root_of(call, arg))));
}

// `arg` stands before `other`.
static void raise_used_twice(const call_t* call, uint32_t arg, uint32_t other) {
  jpp_py_raise(jpp_status_make(
      JPP_DONATED_ERROR,
      "arguments %s and %s are the same array, which %s donates; expected a donated "
      "array once",
      arg_name(call, arg), arg_name(call, other),
      is_donated(call, arg) ? "the first" : "the second"));
}

// Says why the array of `arg`, already deleted, can not be used: it was before this call,
// or another argument, one of the `marked` first ones, donates it too.
static void raise_unusable(const call_t* call, uint32_t arg, uint32_t marked) {
  for (uint32_t b = 0; b < marked; ++b) {
    if (b == arg || !is_donated(call, b) || root_of(call, b) != root_of(call, arg)) {
      continue;
    }
    raise_used_twice(call, b < arg ? b : arg, b < arg ? arg : b);
    return;
  }
  raise_deleted(call, arg);
}

// Another thread may be reading what this call donates. Releases the GIL while it waits;
// nothing is claimed yet. False: a signal handler raised.
static bool wait_for_readers(const call_t* call) {
  const struct timespec pause = {.tv_nsec = 20000};
  for (uint32_t a = 0; a < call->num_args;) {
    const jpp_py_value_t* value = root_of(call, a);
    if (!is_donated(call, a) || value->deleted || !value->pins) {
      ++a;
      continue;
    }
    Py_BEGIN_ALLOW_THREADS
      nanosleep(&pause, NULL);
    Py_END_ALLOW_THREADS
    if (PyErr_CheckSignals() < 0) return false;
    a = 0;
  }
  return true;
}

// Marks the arrays of donated arguments as deleted, in order, up to the first one that is
// already. Returns that argument, or num_args.
static uint32_t mark_donated(const call_t* call) {
  for (uint32_t a = 0; a < call->num_args; ++a) {
    if (!is_donated(call, a)) continue;
    if (root_of(call, a)->deleted) return a;
    root_of(call, a)->deleted = true;
  }
  return call->num_args;
}

// Those of the `marked` first arguments.
static void unmark_donated(const call_t* call, uint32_t marked) {
  for (uint32_t a = 0; a < marked; ++a) {
    if (is_donated(call, a)) root_of(call, a)->deleted = false;
  }
}

// The first argument that is only read and whose array is deleted; num_args: none.
static uint32_t find_deleted_reader(const call_t* call) {
  for (uint32_t a = 0; a < call->num_args; ++a) {
    if (!is_donated(call, a) && root_of(call, a)->deleted) return a;
  }
  return call->num_args;
}

// Claims all donated arguments for this call, or none. Readers are looked at when all are
// marked, so that an array which one argument donates and another one reads is refused
// whichever comes first.
static bool claim_donated(const call_t* call) {
  if (!wait_for_readers(call)) return false;
  uint32_t marked = mark_donated(call);
  uint32_t refused = marked < call->num_args ? marked : find_deleted_reader(call);
  if (refused == call->num_args) return true;
  raise_unusable(call, refused, marked);
  unmark_donated(call, marked);
  return false;
}

// A donated argument that was copied for this step: the copy is used, the memory of what
// the user has is freed all the same.
static void drop_origins(call_t* call) {
  for (uint32_t a = 0; a < call->num_args; ++a) {
    if (!is_donated(call, a) || !call->args[a]->origin) continue;
    call->args[a]->deleted = true;
    jpp_py_value_drop_buffers(root_of(call, a));
  }
}

static bool misplaced(uint32_t arg) {
  PyObject* number = PyLong_FromUnsignedLong(arg);
  if (number) PyErr_SetObject(PyExc_KeyError, number);
  Py_XDECREF(number);
  return false;
}

// Every program input must lie on its rank; KeyError(argument) otherwise.
static bool check_places(const call_t* call) {
  const jpp_plan_t* plan = call->self->plan;
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    for (uint32_t i = 0; i < plan->programs[r].num_inputs; ++i) {
      uint32_t arg = plan->programs[r].inputs[i].arg;
      if (!root_of(call, arg)->deleted && !jpp_py_value_at(call->args[arg], r)) {
        return misplaced(arg);
      }
    }
  }
  return true;
}

static bool allocate_io(call_t* call) {
  const jpp_plan_t* plan = call->self->plan;
  uint32_t per_rank = call->self->devices_per_rank;
  jpp_arena_t* arena = &call->arena;
  if (!jpp_py_check(JPP_ARENA_ARRAY(arena, plan->ranks, &call->inputs)) ||
      !jpp_py_check(JPP_ARENA_ARRAY(arena, plan->ranks, &call->outputs))) {
    return false;
  }
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    size_t inputs = (size_t)program->num_inputs * per_rank;
    size_t outputs = (size_t)program->num_outputs * per_rank;
    if (!jpp_py_check(JPP_ARENA_ARRAY(arena, inputs, &call->inputs[r])) ||
        !jpp_py_check(JPP_ARENA_ARRAY(arena, outputs, &call->outputs[r]))) {
      return false;
    }
  }
  return true;
}

static bool make_results(call_t* call) {
  const runtime_object_t* self = call->self;
  uint32_t outputs = self->plan->staged->graph->num_outputs;
  if (!jpp_py_check(JPP_ARENA_ARRAY(&call->arena, outputs, &call->results))) return false;
  for (uint32_t o = 0; o < outputs; ++o) {
    call->results[o] =
        jpp_py_value_new(self->client, self->output_ranks[o], self->devices_per_rank);
    if (!call->results[o]) return false;
    call->results[o]->num_ranks = 0;  // counts up while ranks are filled in
  }
  return true;
}

// The step owns what it may delete: those handles leave their values.
static void fill_inputs(call_t* call) {
  const jpp_plan_t* plan = call->self->plan;
  uint32_t per_rank = call->self->devices_per_rank;
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    for (uint32_t i = 0; i < program->num_inputs; ++i) {
      jpp_buffer_t** buffers = jpp_py_value_at(call->args[program->inputs[i].arg], r);
      for (uint32_t d = 0; d < per_rank; ++d) {
        call->inputs[r][i * per_rank + d] = buffers[d];
        if (program->inputs[i].owned) buffers[d] = NULL;
      }
    }
  }
}

static void fill_results(call_t* call) {
  const jpp_plan_t* plan = call->self->plan;
  uint32_t per_rank = call->self->devices_per_rank;
  for (uint32_t r = 0; r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    for (uint32_t i = 0; i < program->num_outputs; ++i) {
      jpp_py_value_t* result = call->results[program->outputs[i].output];
      uint32_t at = result->num_ranks++;
      result->ranks[at] = r;
      for (uint32_t d = 0; d < per_rank; ++d) {
        result->buffers[at * per_rank + d] = call->outputs[r][i * per_rank + d];
      }
    }
  }
}

static void pin_args(call_t* call) {
  for (uint32_t a = 0; a < call->num_args; ++a) jpp_py_value_pin(call->args[a]);
}

static void unpin_args(call_t* call) {
  for (uint32_t a = 0; a < call->num_args; ++a) jpp_py_value_unpin(call->args[a]);
}

// The thread state of a step, and whether a signal handler raised in it.
typedef struct interruption {
  runtime_object_t* self;
  PyThreadState* state;
  bool raised;
} interruption_t;

// The step's thread, without the GIL. Ctrl-C and other signals: Python's handlers run
// here, as they would between two lines; one that raises stops the step.
static bool handle_signals(void* user) {
  interruption_t* interruption = user;
  runtime_object_t* self = interruption->self;
  PyEval_RestoreThread(interruption->state);
  self->handling = PyThread_get_thread_ident();
  interruption->raised = PyErr_CheckSignals() < 0;
  self->handling = 0;
  interruption->state = PyEval_SaveThread();
  return interruption->raised;
}

// What a step took and gave nothing for.
static void lose_donated(const call_t* call) {
  for (uint32_t a = 0; a < call->num_args; ++a) {
    if (is_donated(call, a)) root_of(call, a)->lost = call->args[a]->lost = true;
  }
}

static bool run_step(call_t* call, bool bare) {
  fill_inputs(call);
  drop_origins(call);
  interruption_t interruption = {.self = call->self};
  jpp_step_io_t io = {.inputs = (jpp_buffer_t* const* const*)call->inputs,
                      .outputs = call->outputs,
                      .should_cancel = handle_signals,
                      .user = &interruption};
  pin_args(call);
  interruption.state = PyEval_SaveThread();
  jpp_status_t* status = bare ? jpp_bare_step(call->self->bare, &io)
                              : jpp_runtime_step(call->self->runtime, &io);
  PyEval_RestoreThread(interruption.state);
  unpin_args(call);
  if (!status) {
    fill_results(call);
    return true;
  }
  lose_donated(call);
  // Ctrl-C may have come in a callback: what the device tells is its trace.
  if (!interruption.raised) interruption.raised = PyErr_CheckSignals() < 0;
  if (!interruption.raised) return jpp_py_check(status);
  // The devices still work on what they were given, callbacks into Python included, and
  // nobody waits for them: what they run is never freed.
  Py_XINCREF(call->self->executables);
  jpp_status_free(status);
  return false;
}

static PyObject* results_to_list(call_t* call) {
  uint32_t outputs = call->self->plan->staged->graph->num_outputs;
  PyObject* list = PyList_New(outputs);
  for (uint32_t o = 0; list && o < outputs; ++o) {
    PyList_SetItem(list, o, (PyObject*)call->results[o]);
    call->results[o] = NULL;
  }
  return list;
}

static void call_deinit(call_t* call) {
  uint32_t outputs = call->self->plan->staged->graph->num_outputs;
  for (uint32_t o = 0; call->results && o < outputs; ++o)
    Py_XDECREF((PyObject*)call->results[o]);
  jpp_arena_deinit(&call->arena);
}

static PyObject* call_step(PyObject* object, PyObject* list, bool bare) {
  call_t call = {.self = (runtime_object_t*)object};
  PyObject* results = NULL;
  if (!jpp_py_check(jpp_process_check())) return NULL;
  if (call.self->handling == PyThread_get_thread_ident()) {
    return PyErr_Format(PyExc_RuntimeError,
                        "a signal handler called the step that it interrupted; expected "
                        "one that sets a flag or raises");
  }
  if (read_args(&call, list) && check_places(&call) && allocate_io(&call) &&
      make_results(&call) && claim_donated(&call) && run_step(&call, bare)) {
    results = results_to_list(&call);
  }
  call_deinit(&call);
  return results;
}

static PyObject* runtime_step(PyObject* object, PyObject* list) {
  return call_step(object, list, false);
}

static PyObject* runtime_bare_step(PyObject* object, PyObject* list) {
  if (((runtime_object_t*)object)->bare) return call_step(object, list, true);
  return PyErr_Format(PyExc_RuntimeError, "the runtime was made without a bare loop");
}

static PyObject* runtime_instructions(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_bare_t* bare = ((runtime_object_t*)object)->bare;
  return PyLong_FromUnsignedLongLong(bare ? jpp_bare_instructions(bare) : 0);
}

// --- What happened --------------------------------------------------------------------

static PyObject* runtime_set_checks(PyObject* object, PyObject* args) {
  int nans = 0, infs = 0;
  if (!PyArg_ParseTuple(args, "pp", &nans, &infs)) return NULL;
  jpp_runtime_set_checks(((runtime_object_t*)object)->runtime, nans, infs);
  Py_RETURN_NONE;
}

static PyObject* runtime_set_tracing(PyObject* object, PyObject* enabled) {
  int on = PyObject_IsTrue(enabled);
  if (on < 0) return NULL;
  jpp_runtime_set_tracing(((runtime_object_t*)object)->runtime, on);
  Py_RETURN_NONE;
}

static const jpp_trace_t* last_trace(PyObject* object) {
  const jpp_trace_t* trace = jpp_runtime_last_trace(((runtime_object_t*)object)->runtime);
  if (!trace) PyErr_SetString(PyExc_RuntimeError, "no step has been traced");
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

static PyObject* make_costs(const void* costs, uint64_t stage) {
  const jpp_cost_t* cost = &((const jpp_cost_t*)costs)[stage];
  return JPP_PY_RECORD(JPP_PY_STAGE_COSTS, PyFloat_FromDouble(cost->forward),
                       PyFloat_FromDouble(cost->backward),
                       PyFloat_FromDouble(cost->weight));
}

static PyObject* runtime_costs(PyObject* object, PyObject* args) {
  uint32_t loop = 0;
  if (!PyArg_ParseTuple(args, "O&", jpp_py_u32_converter, &loop)) return NULL;
  const jpp_trace_t* trace = last_trace(object);
  if (!trace) return NULL;
  const jpp_staged_t* staged = trace->plan->staged;
  if (loop >= staged->graph->num_loops) {
    return PyErr_Format(PyExc_IndexError, "no loop %u", loop);
  }
  uint32_t stages = staged->loops[loop].stages;
  jpp_cost_t* costs = NULL;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(stages, &costs))) return NULL;
  jpp_trace_costs(trace, loop, costs);
  PyObject* list = jpp_py_make_list(stages, make_costs, costs);
  jpp_free(costs);
  return list;
}

static PyObject* runtime_trace_json(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_trace_t* trace = last_trace(object);
  char* text = NULL;
  if (!trace || !jpp_py_check(jpp_trace_to_json(trace, &text))) return NULL;
  return jpp_py_take_text(text);
}

static PyObject* runtime_trace_draw(PyObject* object, PyObject* args) {
  uint32_t columns = 0;
  int color = 0;
  if (!PyArg_ParseTuple(args, "O&p", jpp_py_u32_converter, &columns, &color)) return NULL;
  if (columns > kMostColumns) {
    return PyErr_Format(PyExc_ValueError, "expected at most %d columns, found %u",
                        kMostColumns, columns);
  }
  const jpp_trace_t* trace = last_trace(object);
  char* text = NULL;
  if (!trace || !jpp_py_check(jpp_trace_draw(trace, columns, color, &text))) return NULL;
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
    {"step", runtime_step, METH_O,
     "step($self, values, /)\n--\n\n"
     "Runs a step on a list of Values, one an argument; gives one for each result. "
     "KeyError(argument) if one is not on the ranks that need it."},
    {"bare_step", runtime_bare_step, METH_O,
     "bare_step($self, values, /)\n--\n\nThe yardstick of benchmarks."},
    {"bare_instructions", runtime_instructions, METH_NOARGS,
     "bare_instructions($self, /)\n--\n\n"
     "Runs, sends and deletions of a step, as the bare loop makes them."},
    {"set_checks", runtime_set_checks, METH_VARARGS,
     "set_checks($self, nans, infs, /)\n--\n\n"
     "Refuses such results, from the next step on."},
    {"set_tracing", runtime_set_tracing, METH_O,
     "set_tracing($self, enabled, /)\n--\n\nFrom the next step on."},
    {"trace", runtime_trace, METH_NOARGS,
     "trace($self, /)\n--\n\nThe TaskRuns of the last traced step."},
    {"costs", runtime_costs, METH_VARARGS,
     "costs($self, loop, /)\n--\n\nThe StageCosts of a loop in the last traced step."},
    {"trace_json", runtime_trace_json, METH_NOARGS,
     "trace_json($self, /)\n--\n\nThe last traced step for Perfetto."},
    {"trace_draw", runtime_trace_draw, METH_VARARGS,
     "trace_draw($self, columns, color, /)\n--\n\nThe last traced step, a line a rank."},
    {"trace_peaks", runtime_trace_peaks, METH_NOARGS,
     "trace_peaks($self, /)\n--\n\n"
     "Live bytes at each rank's peak, counted in the last traced step."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc,
     "Runtime(client, plan, devices_per_rank, devices, executables, portable, "
     "issue_threads, bare, /)\n--\n\n"
     "A plan ready to run; `executables`: of every task, None where it has no "
     "ops; devices are [rank][device], flat."},
    {Py_tp_new, (void*)runtime_new},
    {Py_tp_dealloc, (void*)runtime_dealloc},
    {Py_tp_traverse, (void*)runtime_traverse},
    {Py_tp_clear, (void*)runtime_clear},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_runtime_spec = {"jaxpp._core.Runtime", sizeof(runtime_object_t), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};
