// jaxpp._core.Staged: tasks and their placement, as in jaxpp/partition.h; the front end
// reads them to lower the tasks.
#include "python/core.h"

PyObject* jpp_py_staged_new(const jpp_staged_t* staged) {
  jpp_py_staged_t* self = jpp_py_new(jpp_py_types.staged);
  if (self) self->staged = staged;
  return (PyObject*)self;
}

static void staged_dealloc(PyObject* object) {
  Py_XDECREF(((jpp_py_staged_t*)object)->plan);
  jpp_py_free(object);
}

// NULL if it raised.
static const jpp_staged_t* staged_of(PyObject* object) {
  const jpp_staged_t* staged = ((jpp_py_staged_t*)object)->staged;
  if (!staged) PyErr_SetString(PyExc_RuntimeError, "its planning failed");
  return staged;
}

static PyObject* make_task(const void* tasks, uint64_t index) {
  const jpp_task_t* task = &((const jpp_task_t*)tasks)[index];
  return JPP_PY_RECORD(
      JPP_PY_STAGED_TASK, jpp_py_text(task->name), PyLong_FromUnsignedLong(task->kind),
      PyLong_FromUnsignedLong(task->rank), jpp_py_none_or_u32(task->loop),
      jpp_py_none_or_u32(task->stage), jpp_py_from_u32s(task->ops, task->num_ops),
      jpp_py_from_u32s(task->inputs, task->num_inputs),
      jpp_py_from_u32s(task->outputs, task->num_outputs),
      PyLong_FromUnsignedLong(task->repeats));
}

static PyObject* staged_tasks(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  if (!staged) return NULL;
  return jpp_py_make_list(staged->num_tasks, make_task, staged->tasks);
}

static PyObject* staged_op(PyObject* object, PyObject* args) {
  uint32_t id = 0;
  if (!PyArg_ParseTuple(args, "O&", jpp_py_u32_converter, &id)) return NULL;
  const jpp_staged_t* staged = staged_of(object);
  if (!staged) return NULL;
  if (id >= staged->num_ops) return PyErr_Format(PyExc_IndexError, "no op %u", id);
  const jpp_op_t* op = &staged->ops[id];
  return JPP_PY_RECORD(JPP_PY_STAGED_OP, PyLong_FromUnsignedLong(op->kind),
                       PyLong_FromUnsignedLong(op->attr), jpp_py_none_or_u32(op->loop),
                       jpp_py_from_u32s(op->inputs, op->num_inputs),
                       PyLong_FromUnsignedLong(op->first_output),
                       PyLong_FromUnsignedLong(op->num_outputs));
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

static PyObject* make_repeat(const void* repeats, uint64_t index) {
  const jpp_repeat_t* repeat = &((const jpp_repeat_t*)repeats)[index];
  return Py_BuildValue("III", repeat->first, repeat->length, repeat->count);
}

static PyObject* staged_repeats(PyObject* object, PyObject* args) {
  uint32_t task = 0;
  if (!PyArg_ParseTuple(args, "O&", jpp_py_u32_converter, &task)) return NULL;
  const jpp_staged_t* staged = staged_of(object);
  if (!staged) return NULL;
  if (task >= staged->num_tasks) {
    return PyErr_Format(PyExc_IndexError, "no task %u", task);
  }
  uint32_t num_ops = staged->tasks[task].num_ops, count = 0;
  uint32_t* ops = NULL;
  jpp_repeat_t* repeats = NULL;
  PyObject* result = NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(num_ops, &ops);
  if (!status) status = JPP_ALLOC_ARRAY(num_ops / 2, &repeats);
  if (!status) status = jpp_staged_find_repeats(staged, task, ops, repeats, &count);
  if (jpp_py_check(status)) {
    result = Py_BuildValue("NN", jpp_py_from_u32s(ops, num_ops),
                           jpp_py_make_list(count, make_repeat, repeats));
  }
  jpp_free(ops);
  jpp_free(repeats);
  return result;
}

static PyObject* place_value(const jpp_staged_t* staged,
                             const jpp_staged_value_t* value) {
  jpp_memory_t memory = staged->values[value->value].type.memory;
  return JPP_PY_RECORD(JPP_PY_PLACED_VALUE, PyLong_FromUnsignedLong(value->value),
                       ranks_to_list(staged, value->ranks),
                       PyUnicode_InternFromString(jpp_memory_name(memory)));
}

static PyObject* make_arg(const void* staged, uint64_t index) {
  return place_value(staged, &((const jpp_staged_t*)staged)->args[index]);
}

static PyObject* make_output(const void* staged, uint64_t index) {
  return place_value(staged, &((const jpp_staged_t*)staged)->outputs[index]);
}

static PyObject* staged_args(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  if (!staged) return NULL;
  return jpp_py_make_list(staged->graph->num_args, make_arg, staged);
}

static PyObject* staged_outputs(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  if (!staged) return NULL;
  return jpp_py_make_list(staged->graph->num_outputs, make_output, staged);
}

static PyObject* staged_origins(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  return staged ? jpp_py_from_u32s(staged->origins, staged->num_values) : NULL;
}

static PyObject* staged_packed(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  PyObject* dict = staged ? PyDict_New() : NULL;
  for (uint32_t v = 0; dict && v < staged->num_values; ++v) {
    if (!jpp_staged_is_packed(staged, v)) continue;
    PyObject* key = PyLong_FromUnsignedLong(v);
    PyObject* item = PyLong_FromLongLong(staged->values[v].type.dims[0]);
    if (!key || !item || PyDict_SetItem(dict, key, item) < 0) Py_CLEAR(dict);
    Py_XDECREF(key);
    Py_XDECREF(item);
  }
  return dict;
}

static PyObject* make_accumulator(const void* from, uint64_t index) {
  const jpp_staged_t* staged = from;
  const jpp_accumulator_t* acc = &staged->accumulators[index];
  bool partial = staged->graph->loops[acc->loop].results[acc->result].partial;
  const uint32_t values[] = {acc->init, acc->state, acc->next, acc->final};
  return Py_BuildValue("IINN", acc->loop, acc->result, PyBool_FromLong(partial),
                       jpp_py_from_u32s(values, 4));
}

static PyObject* staged_accumulators(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  if (!staged) return NULL;
  return jpp_py_make_list(staged->num_accumulators, make_accumulator, staged);
}

static PyObject* make_note(const void* staged, uint64_t index) {
  char* text = NULL;
  if (!jpp_py_check(jpp_staged_print_note(staged, (uint32_t)index, &text))) return NULL;
  return jpp_py_take_text(text);
}

static PyObject* staged_notes(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  if (!staged) return NULL;
  return jpp_py_make_list(staged->num_notes, make_note, staged);
}

static PyObject* staged_text(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_staged_t* staged = staged_of(object);
  char* text = NULL;
  if (!staged || !jpp_py_check(jpp_staged_print(staged, &text))) return NULL;
  return jpp_py_take_text(text);
}

static PyMethodDef kMethods[] = {
    {"tasks", staged_tasks, METH_NOARGS,
     "tasks($self, /)\n--\n\nA list of StagedTask; its index is the task's id."},
    {"op", staged_op, METH_VARARGS, "op($self, id, /)\n--\n\nA StagedOp."},
    {"repeats", staged_repeats, METH_VARARGS,
     "repeats($self, task, /)\n--\n\n"
     "The task's ops in an order in which equal blocks of ops follow each other, and the "
     "blocks: (position of the first op, ops in a block, number of blocks)."},
    {"args", staged_args, METH_NOARGS,
     "args($self, /)\n--\n\nA PlacedValue for every argument of the step."},
    {"outputs", staged_outputs, METH_NOARGS,
     "outputs($self, /)\n--\n\nA PlacedValue for every result of the step."},
    {"origins", staged_origins, METH_NOARGS,
     "origins($self, /)\n--\n\n"
     "For each value, the graph's value with the same type and sharding; for several "
     "values in one array, the first of these."},
    {"packed", staged_packed, METH_NOARGS,
     "packed($self, /)\n--\n\n"
     "For each array of several values, the number of its elements."},
    {"accumulators", staged_accumulators, METH_NOARGS,
     "accumulators($self, /)\n--\n\n"
     "(loop, result, is partial over a rank's devices, values) for each accumulator; its "
     "values share memory."},
    {"notes", staged_notes, METH_NOARGS,
     "notes($self, /)\n--\n\nCosts of the partition, one sentence each."},
    {"text", staged_text, METH_NOARGS,
     "text($self, /)\n--\n\nThe staged graph's text form."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc,
     "A graph partitioned into tasks that are placed on ranks; part of a Plan."},
    {Py_tp_dealloc, (void*)staged_dealloc},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_staged_spec = {"jaxpp._core.Staged", sizeof(jpp_py_staged_t), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                  kSlots};
