// jaxpp._core.Schedule: a built-in schedule, a user's rows or CSV file, or the result of
// a search. Every Schedule in Python has passed its proof.
#include <string.h>

#include "jaxpp/advise.h"
#include "jaxpp/schedule_csv.h"
#include "jaxpp/search.h"
#include "jaxpp/view.h"
#include "python/core.h"

PyObject* jpp_py_wrap_schedule(jpp_schedule_t* schedule) {
  jpp_py_schedule_t* self = jpp_py_new(jpp_py_types.schedule);
  if (!self) {
    jpp_schedule_destroy(schedule);
    return NULL;
  }
  self->schedule = schedule;
  return (PyObject*)self;
}

PyObject* jpp_py_read_schedules(PyObject* sequence, uint32_t count,
                                const jpp_schedule_t*** out_table) {
  *out_table = NULL;
  PyObject* tuple = PySequence_Tuple(sequence);
  if (!tuple) return NULL;
  bool ok = jpp_py_check_count("schedules", count, (uint64_t)PyTuple_Size(tuple)) &&
            jpp_py_check(JPP_ALLOC_ARRAY(count, out_table));
  for (uint32_t i = 0; ok && i < count; ++i) {
    PyObject* item = PyTuple_GetItem(tuple, i);
    ok = Py_IS_TYPE(item, jpp_py_types.schedule);
    if (ok) {
      (*out_table)[i] = ((jpp_py_schedule_t*)item)->schedule;
    } else {
      PyErr_Format(PyExc_TypeError, "expected a Schedule, found %.100R", item);
    }
  }
  if (ok) return tuple;
  jpp_free(*out_table);
  *out_table = NULL;
  Py_DECREF(tuple);
  return NULL;
}

static void schedule_dealloc(PyObject* object) {
  jpp_schedule_destroy(((jpp_py_schedule_t*)object)->schedule);
  jpp_py_free(object);
}

static PyObject* make_sizes(uint32_t stages, uint32_t ranks, uint32_t microbatches) {
  return JPP_PY_RECORD(JPP_PY_SCHEDULE_SIZES, PyLong_FromUnsignedLong(stages),
                       PyLong_FromUnsignedLong(ranks),
                       PyLong_FromUnsignedLong(microbatches));
}

static PyObject* schedule_build(PyObject* type, PyObject* args) {
  (void)type;
  const char* name = NULL;
  jpp_schedule_params_t params = {.struct_size = sizeof(params)};
  int fuse = 0;
  if (!PyArg_ParseTuple(args, "sO&O&O&p", &name, jpp_py_u32_converter, &params.stages,
                        jpp_py_u32_converter, &params.ranks, jpp_py_u32_converter,
                        &params.microbatches, &fuse)) {
    return NULL;
  }
  params.fuse_steady_state = fuse;
  jpp_schedule_t* schedule = NULL;
  if (!jpp_py_check(jpp_schedule_build(name, &params, &schedule))) return NULL;
  return jpp_py_wrap_schedule(schedule);
}

static PyObject* schedule_check(PyObject* type, PyObject* args) {
  (void)type;
  const char* name = NULL;
  uint32_t stages = 0, ranks = 0;
  if (!PyArg_ParseTuple(args, "sO&O&", &name, jpp_py_u32_converter, &stages,
                        jpp_py_u32_converter, &ranks) ||
      !jpp_py_check(jpp_schedule_check(name, stages, ranks))) {
    return NULL;
  }
  Py_RETURN_NONE;
}

static PyObject* make_info(const void* unused, uint64_t index) {
  (void)unused;
  const jpp_schedule_info_t* info = jpp_schedule_info_at((uint32_t)index);
  return JPP_PY_RECORD(
      JPP_PY_SCHEDULE_INFO, PyUnicode_FromString(info->name),
      PyUnicode_FromString(info->class_name), PyUnicode_FromString(info->help),
      PyUnicode_FromString(info->paper), PyLong_FromUnsignedLong(info->stages_a_rank),
      PyBool_FromLong(info->can_fuse),
      make_sizes(info->example->stages, info->example->ranks,
                 info->example->microbatches));
}

static PyObject* schedule_built_ins(PyObject* type, PyObject* unused) {
  (void)type;
  (void)unused;
  return jpp_py_make_list(jpp_schedule_info_count(), make_info, NULL);
}

static PyObject* schedule_one_pass(PyObject* type, PyObject* args) {
  (void)type;
  jpp_schedule_params_t params = {.struct_size = sizeof(params)};
  int split_backward = 0;
  if (!PyArg_ParseTuple(args, "O&O&O&p", jpp_py_u32_converter, &params.stages,
                        jpp_py_u32_converter, &params.ranks, jpp_py_u32_converter,
                        &params.microbatches, &split_backward)) {
    return NULL;
  }
  jpp_schedule_t* schedule = NULL;
  if (!jpp_py_check(jpp_schedule_one_pass(&params, split_backward, &schedule))) {
    return NULL;
  }
  return jpp_py_wrap_schedule(schedule);
}

// Joins the given schedules and the made ones, in the order of the loops.
static PyObject* join_schedules(PyObject* given, uint32_t count, jpp_schedule_t** made) {
  PyObject* list = PyList_New(count);
  for (uint32_t l = 0; list && l < count; ++l) {
    PyObject* item =
        made[l] ? jpp_py_wrap_schedule(made[l]) : Py_NewRef(PyTuple_GetItem(given, l));
    made[l] = NULL;
    if (item) {
      PyList_SetItem(list, l, item);
    } else {
      Py_CLEAR(list);
    }
  }
  for (uint32_t l = 0; l < count; ++l) jpp_schedule_destroy(made[l]);
  return list;
}

static bool read_given(PyObject* tuple, uint32_t count, const jpp_schedule_t** table) {
  if (!jpp_py_check_count("schedules", count, (uint64_t)PyTuple_Size(tuple))) {
    return false;
  }
  for (uint32_t l = 0; l < count; ++l) {
    PyObject* item = PyTuple_GetItem(tuple, l);
    if (item == Py_None) continue;
    if (!Py_IS_TYPE(item, jpp_py_types.schedule)) {
      PyErr_Format(PyExc_TypeError, "expected a Schedule or None, found %.100R", item);
      return false;
    }
    table[l] = ((jpp_py_schedule_t*)item)->schedule;
  }
  return true;
}

static PyObject* schedule_placeholders(PyObject* type, PyObject* args) {
  (void)type;
  PyObject *graph = NULL, *given = NULL, *list = NULL;
  uint32_t ranks = 0;
  if (!PyArg_ParseTuple(args, "O!O&O", jpp_py_types.graph, &graph, jpp_py_u32_converter,
                        &ranks, &given)) {
    return NULL;
  }
  const jpp_graph_t* of = ((jpp_py_graph_t*)graph)->graph;
  if (!of) return PyErr_Format(PyExc_RuntimeError, "finish() the graph first");
  PyObject* tuple = PySequence_Tuple(given);
  if (!tuple) return NULL;
  const jpp_schedule_t** table = NULL;
  jpp_schedule_t** made = NULL;
  if (jpp_py_check(JPP_ALLOC_ARRAY(of->num_loops, &table)) &&
      jpp_py_check(JPP_ALLOC_ARRAY(of->num_loops, &made)) &&
      read_given(tuple, of->num_loops, table) &&
      jpp_py_check(jpp_advise_placeholders(of, ranks, table, of->num_loops, made))) {
    list = join_schedules(tuple, of->num_loops, made);
  }
  jpp_free(table);
  jpp_free(made);
  Py_DECREF(tuple);
  return list;
}

// `item` is a ScheduleTask or a tuple like it.
static bool read_task(PyObject* item, jpp_schedule_task_t* task) {
  uint32_t kind = 0, latency = 0;
  int joins = 0;
  if (!PyTuple_Check(item)) {
    PyErr_Format(PyExc_TypeError, "expected a ScheduleTask, found %.100R", item);
    return false;
  }
  if (!PyArg_ParseTuple(item, "O&pO&O&O&", jpp_py_u32_converter, &kind, &joins,
                        jpp_py_u32_converter, &latency, jpp_py_u32_converter,
                        &task->stage, jpp_py_u32_converter, &task->microbatch)) {
    return false;
  }
  if (kind > JPP_TASK_BWD_W || latency > UINT16_MAX) {
    PyErr_Format(PyExc_ValueError,
                 "expected a kind of 0 to %d and a latency of 0 to %d, found %u and %u",
                 JPP_TASK_BWD_W, UINT16_MAX, kind, latency);
    return false;
  }
  task->kind = (uint8_t)kind;
  task->joins_next = joins;
  task->latency = (uint16_t)latency;
  return true;
}

static bool read_row(PyObject* sequence, jpp_schedule_row_t* row) {
  Py_ssize_t count = PySequence_Size(sequence);
  jpp_schedule_task_t* tasks = NULL;
  if (count < 0 || !jpp_py_check(JPP_ALLOC_ARRAY((size_t)count, &tasks))) return false;
  *row = (jpp_schedule_row_t){.tasks = tasks, .count = (uint32_t)count};
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    bool ok = item && read_task(item, &tasks[i]);
    Py_XDECREF(item);
    if (!ok) return false;
  }
  return true;
}

// Reads one row per rank; `list` has that many. The caller frees each row's tasks, even
// after a failure.
static bool read_rows(PyObject* list, uint32_t ranks, jpp_schedule_row_t* rows) {
  for (uint32_t r = 0; r < ranks; ++r) {
    PyObject* row = PySequence_GetItem(list, r);
    bool ok = row && read_row(row, &rows[r]);
    Py_XDECREF(row);
    if (!ok) return false;
  }
  return true;
}

static PyObject* schedule_from_rows(PyObject* type, PyObject* args) {
  (void)type;
  jpp_schedule_rows_t rows = {0};
  PyObject* list = NULL;
  jpp_py_utf8_t name = {0};
  if (!PyArg_ParseTuple(args, "O&O&O&O&O!", jpp_py_str_converter, &name,
                        jpp_py_u32_converter, &rows.stages, jpp_py_u32_converter,
                        &rows.ranks, jpp_py_u32_converter, &rows.microbatches,
                        &PyList_Type, &list)) {
    return NULL;
  }
  rows.name = name.text;
  jpp_schedule_row_t* table = NULL;
  jpp_schedule_t* schedule = NULL;
  bool ok = jpp_py_check_count("rows", rows.ranks, (uint64_t)PyList_Size(list)) &&
            jpp_py_check(JPP_ALLOC_ARRAY(rows.ranks, &table)) &&
            read_rows(list, rows.ranks, table);
  rows.rows = table;
  ok = ok && jpp_py_check(jpp_schedule_from_rows(&rows, &schedule));
  ok = ok && jpp_py_check(jpp_schedule_verify(schedule));
  for (uint32_t r = 0; table && r < rows.ranks; ++r) jpp_free((void*)table[r].tasks);
  jpp_free(table);
  jpp_py_utf8_release(&name);
  if (ok) return jpp_py_wrap_schedule(schedule);
  jpp_schedule_destroy(schedule);
  return NULL;
}

static PyObject* schedule_from_csv(PyObject* type, PyObject* args) {
  (void)type;
  jpp_py_utf8_t file = {0};
  const char* text = NULL;
  Py_ssize_t length = 0;
  jpp_schedule_t* schedule = NULL;
  if (!PyArg_ParseTuple(args, "O&s#", jpp_py_str_converter, &file, &text, &length)) {
    return NULL;
  }
  bool ok = jpp_py_check(
      jpp_schedule_from_csv(file.text, text, (size_t)length, NULL, &schedule));
  jpp_py_utf8_release(&file);
  return ok ? jpp_py_wrap_schedule(schedule) : NULL;
}

// Replaces a TypeError by a JaxppError; other exceptions, such as Ctrl-C, are kept.
static void refuse_costs(PyObject* item, uint32_t stage) {
  if (!item || !PyErr_ExceptionMatches(PyExc_TypeError)) return;
  PyErr_Clear();
  PyObject* text = PyObject_ASCII(item);
  PyObject* ascii = text ? PyUnicode_AsASCIIString(text) : NULL;
  if (ascii) {
    jpp_py_raise(
        jpp_status_make(JPP_INVALID_ARGUMENT,
                        "stage %u: expected costs as three numbers (forward, input "
                        "gradient, weight gradient), found %.80s",
                        stage, PyBytes_AsString(ascii)));
  }
  Py_XDECREF(ascii);
  Py_XDECREF(text);
}

bool jpp_py_read_costs(PyObject* list, uint32_t stages, jpp_cost_t* costs) {
  Py_ssize_t count = PySequence_Size(list);
  if (count < 0 || !jpp_py_check_count("costs of stages", stages, (uint64_t)count)) {
    return false;
  }
  for (uint32_t s = 0; s < stages; ++s) {
    PyObject* item = PySequence_GetItem(list, s);
    PyObject* tuple = item ? PySequence_Tuple(item) : NULL;
    bool ok = tuple && PyArg_ParseTuple(tuple, "ddd", &costs[s].forward,
                                        &costs[s].backward, &costs[s].weight);
    if (!ok) refuse_costs(item, s);
    Py_XDECREF(tuple);
    Py_XDECREF(item);
    if (!ok) return false;
  }
  return true;
}

jpp_status_t* jpp_py_poll(void* context) {
  (void)context;
  PyGILState_STATE state = PyGILState_Ensure();
  bool raised = PyErr_CheckSignals() < 0;
  PyGILState_Release(state);
  return raised ? jpp_status_make(JPP_CANCELLED, "search: interrupted") : NULL;
}

bool jpp_py_check_search(jpp_status_t* status) {
  if (!PyErr_Occurred()) return jpp_py_check(status);
  jpp_status_free(status);
  return false;
}

PyObject* jpp_py_found_to_record(jpp_search_result_t* result) {
  const double* makespans = result->makespans;
  PyObject* name = jpp_py_text(result->schedule->name);
  PyObject* built_in =
      result->built_in ? jpp_py_text(result->built_in) : Py_NewRef(Py_None);
  return JPP_PY_RECORD(JPP_PY_SEARCH_RESULT, jpp_py_wrap_schedule(result->schedule), name,
                       PyFloat_FromDouble(result->makespan),
                       PyFloat_FromDouble(result->bound), built_in,
                       PyFloat_FromDouble(result->built_in_makespan),
                       PyLong_FromUnsignedLongLong(result->tried),
                       jpp_py_text(jpp_activations_name(result->activations)),
                       Py_BuildValue("(ddd)", makespans[JPP_ACTIVATIONS_KEPT],
                                     makespans[JPP_ACTIVATIONS_OFFLOADED],
                                     makespans[JPP_ACTIVATIONS_RECOMPUTED]),
                       PyBool_FromLong(result->offloads));
}

static PyObject* schedule_search(PyObject* type, PyObject* args) {
  (void)type;
  jpp_search_options_t options = {.struct_size = sizeof(options)};
  PyObject* list = NULL;
  if (!PyArg_ParseTuple(args, "O&O&O&O!dO&O&dO&d", jpp_py_u32_converter, &options.stages,
                        jpp_py_u32_converter, &options.ranks, jpp_py_u32_converter,
                        &options.microbatches, &PyList_Type, &list, &options.latency,
                        jpp_py_u64_converter, &options.memory_limit, jpp_py_u64_converter,
                        &options.activation_bytes, &options.seconds, jpp_py_u64_converter,
                        &options.input_bytes, &options.host_bandwidth)) {
    return NULL;
  }
  jpp_cost_t* costs = NULL;
  jpp_search_result_t result = {0};
  bool ok = jpp_py_check_count("costs of stages", options.stages,
                               (uint64_t)PyList_Size(list)) &&
            jpp_py_check(JPP_ALLOC_ARRAY(options.stages, &costs)) &&
            jpp_py_read_costs(list, options.stages, costs);
  options.costs = costs;
  options.poll = jpp_py_poll;
  if (ok) {
    jpp_status_t* status = NULL;
    Py_BEGIN_ALLOW_THREADS
      status = jpp_schedule_search(&options, &result);
    Py_END_ALLOW_THREADS
    ok = jpp_py_check_search(status);
  }
  jpp_free(costs);
  return ok ? jpp_py_found_to_record(&result) : NULL;
}

static PyObject* schedule_csv(PyObject* object, PyObject* args) {
  int communication = 0;
  char* text = NULL;
  if (!PyArg_ParseTuple(args, "p", &communication)) return NULL;
  if (!jpp_py_check(jpp_schedule_print_csv(((jpp_py_schedule_t*)object)->schedule,
                                           communication, &text))) {
    return NULL;
  }
  return jpp_py_take_text(text);
}

static PyObject* schedule_sizes(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_schedule_t* schedule = ((jpp_py_schedule_t*)object)->schedule;
  return make_sizes(schedule->stages, schedule->ranks, schedule->microbatches);
}

static PyObject* task_to_record(const jpp_schedule_task_t* task) {
  bool idle = task->kind == JPP_TASK_IDLE;
  return JPP_PY_RECORD(JPP_PY_SCHEDULE_TASK, PyLong_FromUnsignedLong(task->kind),
                       PyBool_FromLong(task->joins_next),
                       PyLong_FromUnsignedLong(task->latency),
                       PyLong_FromUnsignedLong(task->stage),
                       PyLong_FromUnsignedLong(idle ? 0 : task->microbatch));
}

static PyObject* make_row(const void* rows, uint64_t rank) {
  // Idle steps become separate entries.
  const jpp_schedule_row_t* row = &((const jpp_schedule_row_t*)rows)[rank];
  PyObject* list = PyList_New(0);
  for (uint32_t i = 0; list && i < row->count; ++i) {
    PyObject* item = task_to_record(&row->tasks[i]);
    if (!item) Py_CLEAR(list);
    for (uint64_t step = 0; list && step < jpp_task_steps(&row->tasks[i]); ++step) {
      if (PyList_Append(list, item) < 0) Py_CLEAR(list);
    }
    Py_XDECREF(item);
  }
  return list;
}

static PyObject* schedule_rows(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_schedule_t* schedule = ((jpp_py_schedule_t*)object)->schedule;
  return jpp_py_make_list(schedule->ranks, make_row, schedule->rows);
}

static PyObject* schedule_stage_ranks(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_schedule_t* schedule = ((jpp_py_schedule_t*)object)->schedule;
  return jpp_py_from_u32s(schedule->stage_rank, schedule->stages);
}

static PyObject* schedule_text(PyObject* object, PyObject* unused) {
  (void)unused;
  char* text = NULL;
  if (!jpp_py_check(jpp_schedule_print(((jpp_py_schedule_t*)object)->schedule, &text))) {
    return NULL;
  }
  return jpp_py_take_text(text);
}

static PyMethodDef kMethods[] = {
    {"build", schedule_build, METH_VARARGS | METH_STATIC,
     "build(name, stages, ranks, microbatches, fuse_steady_state, /)\n--\n\n"
     "A built-in schedule."},
    {"check", schedule_check, METH_VARARGS | METH_STATIC,
     "check(name, stages, ranks, /)\n--\n\n"
     "Raises if the built-in schedule does not support these stages and ranks."},
    {"built_ins", schedule_built_ins, METH_NOARGS | METH_STATIC,
     "built_ins()\n--\n\nA ScheduleInfo of each built-in schedule."},
    {"placeholders", schedule_placeholders, METH_VARARGS | METH_STATIC,
     "placeholders(graph, ranks, schedules, /)\n--\n\nA Schedule for each loop of the "
     "graph: the given one or, for None, a schedule of one microbatch after the other."},
    {"one_pass", schedule_one_pass, METH_VARARGS | METH_STATIC,
     "one_pass(stages, ranks, microbatches, split_backward, /)\n--\n\n"
     "One microbatch after the other, each forward and back."},
    {"from_rows", schedule_from_rows, METH_VARARGS | METH_STATIC,
     "from_rows(name, stages, ranks, microbatches, rows, /)\n--\n\n"
     "A schedule with a list of ScheduleTasks per rank."},
    {"from_csv", schedule_from_csv, METH_VARARGS | METH_STATIC,
     "from_csv(file, text, /)\n--\n\n"
     "A schedule in CSV form; `file` is what errors name."},
    {"search", schedule_search, METH_VARARGS | METH_STATIC,
     "search(stages, ranks, microbatches, costs, latency, memory_limit, "
     "activation_bytes, seconds, input_bytes, host_bandwidth, /)\n--\n\n"
     "The best schedule found for stages of these costs. Ctrl-C ends the search."},
    {"csv", schedule_csv, METH_VARARGS,
     "csv($self, communication, /)\n--\n\nThe CSV form."},
    {"sizes", schedule_sizes, METH_NOARGS,
     "sizes($self, /)\n--\n\nThe numbers of stages, ranks and microbatches."},
    {"rows", schedule_rows, METH_NOARGS,
     "rows($self, /)\n--\n\nA list of ScheduleTasks per rank, with one entry per idle "
     "step."},
    {"text", schedule_text, METH_NOARGS,
     "text($self, /)\n--\n\nThe text form, one line per rank."},
    {"stage_ranks", schedule_stage_ranks, METH_NOARGS,
     "stage_ranks($self, /)\n--\n\nThe rank of each stage."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc,
     "Which rank runs which stage's forward or backward, in which order; proved."},
    {Py_tp_dealloc, (void*)schedule_dealloc},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_schedule_spec = {
    "jaxpp._core.Schedule", sizeof(jpp_py_schedule_t), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, kSlots};
