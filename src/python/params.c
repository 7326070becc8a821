// jaxpp._core.Params: the arguments of a step that other processes run, and the rules of
// donation for them.
#include "python/core.h"

typedef struct params_object {
  PyObject ob_base;
  PyObject* names;  // a tuple of str, which own the texts that need no escapes
  jpp_params_t params;
  jpp_py_utf8_t* texts;  // [params.count]
} params_object_t;

static bool read_flag(PyObject* donated, uint32_t index, bool* table) {
  PyObject* flag = PySequence_GetItem(donated, index);
  int is_true = flag ? PyObject_IsTrue(flag) : -1;
  table[index] = is_true > 0;
  Py_XDECREF(flag);
  return is_true >= 0;
}

static bool read_params(params_object_t* self, PyObject* names, PyObject* donated) {
  self->names = PySequence_Tuple(names);
  if (!self->names) return false;
  Py_ssize_t count = PyTuple_Size(self->names), flags = PySequence_Size(donated);
  if (flags < 0 ||
      !jpp_py_check_count("flags of donation", (uint64_t)count, (uint64_t)flags)) {
    return false;
  }
  const char** name_table = NULL;
  bool* flag_table = NULL;
  bool ok = jpp_py_check(JPP_ALLOC_ARRAY((size_t)count, &self->texts)) &&
            jpp_py_check(JPP_ALLOC_ARRAY((size_t)count, &name_table)) &&
            jpp_py_check(JPP_ALLOC_ARRAY((size_t)count, &flag_table));
  self->params = (jpp_params_t){.struct_size = sizeof(self->params),
                                .names = name_table,
                                .donated = flag_table,
                                .count = self->texts ? (uint32_t)count : 0};
  for (uint32_t i = 0; ok && i < self->params.count; ++i) {
    ok = jpp_py_str_converter(PyTuple_GetItem(self->names, i), &self->texts[i]) &&
         read_flag(donated, i, flag_table);
    name_table[i] = self->texts[i].text;
  }
  return ok;
}

static PyObject* params_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject *names = NULL, *donated = NULL;
  if (!jpp_py_refuse_keywords(kwargs) ||
      !PyArg_ParseTuple(args, "OO:Params", &names, &donated)) {
    return NULL;
  }
  params_object_t* self = jpp_py_new(type);
  if (!self || read_params(self, names, donated)) return (PyObject*)self;
  Py_DECREF(self);
  return NULL;
}

static void params_dealloc(PyObject* object) {
  params_object_t* self = (params_object_t*)object;
  for (uint32_t i = 0; i < self->params.count; ++i) {
    jpp_py_utf8_release(&self->texts[i]);
  }
  jpp_free(self->texts);
  Py_XDECREF(self->names);
  jpp_free((void*)self->params.names);
  jpp_free((void*)self->params.donated);
  jpp_py_free(object);
}

// --- Claims ---------------------------------------------------------------------------

// The arrays of a list of Values and Nones, borrowed from it; free the table with
// jpp_free().
static bool read_arrays(const params_object_t* self, PyObject* list,
                        jpp_array_t*** out_arrays) {
  if (!PyList_Check(list) || PyList_Size(list) != (Py_ssize_t)self->params.count) {
    PyErr_Format(PyExc_TypeError, "expected a list of %u values", self->params.count);
    return false;
  }
  if (!jpp_py_check(JPP_ALLOC_ARRAY(self->params.count, out_arrays))) return false;
  for (uint32_t i = 0; i < self->params.count; ++i) {
    PyObject* item = PyList_GetItem(list, i);
    if (item == Py_None) continue;
    if (!Py_IS_TYPE(item, jpp_py_types.value)) {
      PyErr_Format(PyExc_TypeError, "argument %u is not a Value", i);
      return false;
    }
    (*out_arrays)[i] = ((jpp_py_value_t*)item)->array;
  }
  return true;
}

static PyObject* params_claim(PyObject* object, PyObject* list) {
  const params_object_t* self = (params_object_t*)object;
  jpp_array_t** arrays = NULL;
  bool ok = read_arrays(self, list, &arrays) &&
            jpp_py_check(jpp_arrays_claim(&self->params, arrays, NULL));
  jpp_free(arrays);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyObject* params_lose(PyObject* object, PyObject* list) {
  const params_object_t* self = (params_object_t*)object;
  jpp_array_t** arrays = NULL;
  bool ok = read_arrays(self, list, &arrays) &&
            jpp_py_check(jpp_arrays_lose(&self->params, arrays));
  jpp_free(arrays);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef kMethods[] = {
    {"claim", params_claim, METH_O,
     "claim($self, values, /)\n--\n\nDeletes the donated Values of a list, with their "
     "origins: all or, after an error, none. None is an argument without a Value."},
    {"lose", params_lose, METH_O,
     "lose($self, values, /)\n--\n\nRecords that the step that claimed them has failed."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc, "Params(names, donated, /)\n--\n\nThe arguments of a step."},
    {Py_tp_new, (void*)params_new},
    {Py_tp_dealloc, (void*)params_dealloc},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_params_spec = {"jaxpp._core.Params", sizeof(params_object_t), 0,
                                  Py_TPFLAGS_DEFAULT, kSlots};
