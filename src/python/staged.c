// jaxpp._core.Staged: tasks and placement, as jaxpp/partition.h decides them.
#include "base/vec.h"
#include "python/core.h"

// The placement of each loop comes from its schedule.
static bool read_placements(PyObject* schedules, jpp_loop_placement_t* placements,
                            uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(schedules, i);
    if (!item) return false;
    placements[i] = jpp_schedule_placement(((jpp_py_schedule_t*)item)->schedule);
    Py_DECREF(item);  // the caller's sequence still holds it
  }
  return true;
}

static PyObject* staged_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  (void)kwargs;
  PyObject *graph = NULL, *schedules = NULL;
  jpp_partition_options_t options = {0};
  if (!PyArg_ParseTuple(args, "O!IO", jpp_py_types.graph, &graph, &options.ranks,
                        &schedules)) {
    return NULL;
  }
  const jpp_graph_t* source = ((jpp_py_graph_t*)graph)->graph;
  if (!source) return PyErr_Format(PyExc_RuntimeError, "finish() the graph first");
  jpp_py_staged_t* self = jpp_py_new(type);
  if (!self) return NULL;
  self->graph = Py_NewRef(graph);
  jpp_loop_placement_t* placements = NULL;
  bool ok = jpp_py_check(JPP_ALLOC_ARRAY(source->num_loops, &placements)) &&
            read_placements(schedules, placements, source->num_loops);
  options.loops = placements;
  ok = ok && jpp_py_check(jpp_partition(source, &options, &self->staged));
  jpp_free(placements);
  if (ok) return (PyObject*)self;
  Py_DECREF(self);
  return NULL;
}

static void staged_dealloc(PyObject* object) {
  jpp_py_staged_t* self = (jpp_py_staged_t*)object;
  jpp_staged_destroy(self->staged);
  Py_XDECREF(self->graph);
  jpp_py_free(object);
}

static const jpp_staged_t* staged_of(PyObject* object) {
  return ((jpp_py_staged_t*)object)->staged;
}

static PyObject* none_or_u32(uint32_t number) {
  if (number == JPP_NONE) Py_RETURN_NONE;
  return PyLong_FromUnsignedLong(number);
}

static PyObject* task_to_tuple(const jpp_task_t* task) {
  return Py_BuildValue("(NIINNNNN)", jpp_py_text(task->name), task->kind, task->rank,
                       none_or_u32(task->loop), none_or_u32(task->stage),
                       jpp_py_from_u32s(task->ops, task->num_ops),
                       jpp_py_from_u32s(task->inputs, task->num_inputs),
                       jpp_py_from_u32s(task->outputs, task->num_outputs));
}

static PyObject* staged_tasks(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  PyObject* list = PyList_New(staged->num_tasks);
  for (uint32_t i = 0; list && i < staged->num_tasks; ++i) {
    PyObject* item = task_to_tuple(&staged->tasks[i]);
    if (!item || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject* staged_op(PyObject* object, PyObject* args) {
  unsigned int id = 0;
  if (!PyArg_ParseTuple(args, "I", &id)) return NULL;
  const jpp_staged_t* staged = staged_of(object);
  if (id >= staged->num_ops) return PyErr_Format(PyExc_IndexError, "no op %u", id);
  const jpp_op_t* op = &staged->ops[id];
  return Py_BuildValue("(IINNII)", op->kind, op->attr, none_or_u32(op->loop),
                       jpp_py_from_u32s(op->inputs, op->num_inputs), op->first_output,
                       op->num_outputs);
}

// For values the planner made: which result of which loop they hold.
static PyObject* staged_accumulators(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  PyObject* list = PyList_New(staged->num_accumulators);
  for (uint32_t i = 0; list && i < staged->num_accumulators; ++i) {
    const jpp_accumulator_t* acc = &staged->accumulators[i];
    PyObject* item = Py_BuildValue("(IIIIIII)", acc->loop, acc->result, acc->task,
                                   acc->init, acc->state, acc->next, acc->final);
    if (!item || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject* ranks_to_list(const jpp_staged_t* staged, jpp_rank_set_t ranks) {
  PyObject* list = PyList_New(0);
  for (uint32_t r = 0; list && r < staged->ranks; ++r) {
    if (!jpp_rank_set_has(ranks, r)) continue;
    PyObject* number = PyLong_FromUnsignedLong(r);
    if (!number || PyList_Append(list, number) < 0) Py_CLEAR(list);
    Py_XDECREF(number);
  }
  return list;
}

static PyObject* values_to_list(const jpp_staged_t* staged,
                                const jpp_staged_value_t* values, uint32_t count) {
  PyObject* list = PyList_New(count);
  for (uint32_t i = 0; list && i < count; ++i) {
    PyObject* item =
        Py_BuildValue("(IN)", values[i].value, ranks_to_list(staged, values[i].ranks));
    if (!item || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject* staged_args(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  return values_to_list(staged, staged->args, staged->graph->num_args);
}

static PyObject* staged_outputs(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  return values_to_list(staged, staged->outputs, staged->graph->num_outputs);
}

static PyObject* staged_origins(PyObject* object, PyObject* unused) {
  (void)unused;
  return jpp_py_from_u32s(staged_of(object)->origins, staged_of(object)->num_values);
}

static PyObject* staged_notes(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  PyObject* list = PyList_New(staged->num_notes);
  for (uint32_t i = 0; list && i < staged->num_notes; ++i) {
    char* text = NULL;
    bool ok = jpp_py_check(jpp_staged_print_note(staged, i, &text));
    PyObject* item = ok ? jpp_py_take_text(text) : NULL;
    if (!item || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject* staged_text(PyObject* object, PyObject* unused) {
  (void)unused;
  char* text = NULL;
  if (!jpp_py_check(jpp_staged_print(staged_of(object), &text))) return NULL;
  return jpp_py_take_text(text);
}

static PyMethodDef kMethods[] = {
    {"tasks", staged_tasks, METH_NOARGS,
     "[(name, kind, rank, loop, stage, ops, inputs, outputs)]"},
    {"op", staged_op, METH_VARARGS,
     "(id) -> (kind, attr, loop, inputs, first output, number of outputs)"},
    {"accumulators", staged_accumulators, METH_NOARGS,
     "[(loop, result, task, init, state, next, final)]"},
    {"args", staged_args, METH_NOARGS, "[(value, ranks)]"},
    {"outputs", staged_outputs, METH_NOARGS, "[(value, ranks)]"},
    {"origins", staged_origins, METH_NOARGS,
     "For every value that of the graph whose type and sharding it has."},
    {"notes", staged_notes, METH_NOARGS, "What the partition costs, a sentence each."},
    {"text", staged_text, METH_NOARGS, "The staged graph's text form."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_new, (void*)staged_new},
    {Py_tp_dealloc, (void*)staged_dealloc},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_staged_spec = {"jaxpp._core.Staged", sizeof(jpp_py_staged_t), 0,
                                  Py_TPFLAGS_DEFAULT, kSlots};
