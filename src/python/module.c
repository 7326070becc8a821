#include <string.h>

#include "base/alloc.h"
#include "jaxpp/version.h"
#include "python/core.h"

jpp_py_types_t jpp_py_types;

bool jpp_py_check(jpp_status_t* status) {
  if (!status) return true;
  jpp_py_raise(status);
  return false;
}

PyObject* jpp_py_raise(jpp_status_t* status) {
  const char* code = jpp_status_code_name(jpp_status_code(status));
  bool is_nan = jpp_status_code(status) == JPP_NAN_ERROR;
  PyObject* type = is_nan ? jpp_py_types.nan_error : jpp_py_types.error;
  PyObject* message = jpp_py_text(jpp_status_message(status));
  PyObject* error = message ? PyObject_CallFunctionObjArgs(type, message, NULL) : NULL;
  PyObject* name = PyUnicode_FromString(code);
  Py_XDECREF(message);
  jpp_status_free(status);
  if (error && name && PyObject_SetAttrString(error, "code", name) == 0) {
    PyErr_SetObject(type, error);
  }
  Py_XDECREF(name);
  Py_XDECREF(error);
  return NULL;
}

PyObject* jpp_py_text(const char* text) {
  return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "backslashreplace");
}

PyObject* jpp_py_take_text(char* text) {
  PyObject* str = jpp_py_text(text);
  jpp_text_free(text);
  return str;
}

static PyObject* escape(PyObject* str) {
  PyObject* bytes = PyUnicode_AsEncodedString(str, "utf-8", "backslashreplace");
  if (!bytes) return NULL;
  PyObject* escaped = PyObject_CallMethod(bytes, "replace", "y#y#", "\0", (Py_ssize_t)1,
                                          "\\0", (Py_ssize_t)2);
  Py_DECREF(bytes);
  return escaped;
}

int jpp_py_utf8_converter(PyObject* str_or_none, void* out_utf8) {
  jpp_py_utf8_t* out = out_utf8;
  *out = (jpp_py_utf8_t){0};
  if (str_or_none == Py_None) return 1;
  if (!PyUnicode_Check(str_or_none)) {
    PyErr_SetString(PyExc_TypeError, "expected a str or None");
    return 0;
  }
  Py_ssize_t size = 0;
  out->text = PyUnicode_AsUTF8AndSize(str_or_none, &size);
  if (out->text && strlen(out->text) == (size_t)size) return 1;
  PyErr_Clear();
  out->owner = escape(str_or_none);
  out->text = out->owner ? PyBytes_AsString(out->owner) : NULL;
  return out->text != NULL;
}

void jpp_py_utf8_release(jpp_py_utf8_t* utf8) { Py_CLEAR(utf8->owner); }

bool jpp_py_to_u32s(PyObject* sequence, uint32_t** out_values, uint32_t* out_count) {
  *out_values = NULL;
  Py_ssize_t count = PySequence_Size(sequence);
  *out_count = 0;
  if (count < 0) return false;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(count, out_values))) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    unsigned long number = item ? PyLong_AsUnsignedLong(item) : 0;
    Py_XDECREF(item);
    if (PyErr_Occurred()) {
      jpp_free(*out_values);
      *out_values = NULL;
      return false;
    }
    (*out_values)[i] = (uint32_t)number;
  }
  *out_count = (uint32_t)count;
  return true;
}

bool jpp_py_to_u64s(PyObject* sequence, uint32_t count, uint64_t** out_values) {
  *out_values = NULL;
  if (sequence == Py_None) return true;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(count, out_values))) return false;
  for (uint32_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    if (item) (*out_values)[i] = PyLong_AsUnsignedLongLong(item);
    Py_XDECREF(item);
    if (!PyErr_Occurred()) continue;
    jpp_free(*out_values);
    *out_values = NULL;
    return false;
  }
  return true;
}

PyObject* jpp_py_from_u32s(const uint32_t* values, uint32_t count) {
  PyObject* list = PyList_New(count);
  for (uint32_t i = 0; list && i < count; ++i) {
    PyObject* number = PyLong_FromUnsignedLong(values[i]);
    if (!number || PyList_SetItem(list, i, number) < 0) Py_CLEAR(list);
  }
  return list;
}

void* jpp_py_new(PyTypeObject* type) {
  allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
  return alloc(type, 0);
}

void jpp_py_free(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  freefunc free_memory = (freefunc)PyType_GetSlot(type, Py_tp_free);
  free_memory(self);
  Py_DECREF(type);
}

static bool add_type(PyObject* module, const char* name, PyType_Spec* spec,
                     PyTypeObject** out_type) {
  *out_type = (PyTypeObject*)PyType_FromSpec(spec);
  if (!*out_type) return false;
  return PyModule_AddObjectRef(module, name, (PyObject*)*out_type) == 0;
}

static bool add_error(PyObject* module) {
  jpp_py_types.error = PyErr_NewExceptionWithDoc(
      "jaxpp.JaxppError",
      "What JaxPP refuses or what failed while it ran. `code` names the kind of error "
      "('stage-marks', 'schedule', 'mesh', 'microbatch', 'operation', 'sharding', "
      "'plugin', 'devices', 'donated', 'execution', 'out-of-memory', ...); the message "
      "says what was expected, what was found and where.",
      NULL, NULL);
  if (!jpp_py_types.error) return false;
  return PyModule_AddObjectRef(module, "JaxppError", jpp_py_types.error) == 0;
}

static bool add_nan_error(PyObject* module) {
  PyObject* bases = PyTuple_Pack(2, jpp_py_types.error, PyExc_FloatingPointError);
  if (!bases) return false;
  jpp_py_types.nan_error = PyErr_NewExceptionWithDoc(
      "jaxpp.NanError",
      "A task made a NaN under jax_debug_nans, or an infinity under jax_debug_infs.",
      bases, NULL);
  Py_DECREF(bases);
  if (!jpp_py_types.nan_error) return false;
  return PyModule_AddObjectRef(module, "NanError", jpp_py_types.nan_error) == 0;
}

static int module_exec(PyObject* module) {
  jpp_py_types_t* t = &jpp_py_types;
  bool ok = add_error(module) && add_nan_error(module) &&
            add_type(module, "Graph", &jpp_py_graph_spec, &t->graph) &&
            add_type(module, "Schedule", &jpp_py_schedule_spec, &t->schedule) &&
            add_type(module, "Staged", &jpp_py_staged_spec, &t->staged) &&
            add_type(module, "Plan", &jpp_py_plan_spec, &t->plan) &&
            add_type(module, "Client", &jpp_py_client_spec, &t->client) &&
            add_type(module, "Executable", &jpp_py_executable_spec, &t->executable) &&
            add_type(module, "Value", &jpp_py_value_spec, &t->value) &&
            add_type(module, "Runtime", &jpp_py_runtime_spec, &t->runtime) &&
            add_type(module, "Callback", &jpp_py_callback_spec, &t->callback) &&
            PyModule_AddStringConstant(module, "__version__", jpp_version()) == 0;
  return ok ? 0 : -1;
}

static PyObject* check_process(PyObject* module, PyObject* unused) {
  (void)module;
  (void)unused;
  if (!jpp_py_check(jpp_process_check())) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef kMethods[] = {
    {"check_process", check_process, METH_NOARGS,
     "(): raises in a process forked after the devices were in use"},
    {"callback_handler", jpp_py_callback_handler, METH_NOARGS,
     "() -> capsule of the XLA FFI handler that calls a Callback by its address"},
    {"callbacks_close", jpp_py_callbacks_close, METH_NOARGS,
     "(): from now on callbacks fail; returns when none runs. For the interpreter's "
     "exit"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot kSlots[] = {{Py_mod_exec, (void*)module_exec}, {0, NULL}};

static struct PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT,
    .m_name = "jaxpp._core",
    .m_doc = "The C library of JaxPP, as Python sees it.",
    .m_methods = kMethods,
    .m_slots = kSlots,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&kModule); }
