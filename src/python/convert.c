// Conversions between Python's objects and C's: texts, numbers, lists and errors. Values
// that do not fit are refused with a TypeError or ValueError, never truncated.
#include <string.h>

#include "python/core.h"

// --- Errors ---------------------------------------------------------------------------

bool jpp_py_check(jpp_status_t* status) {
  if (!status) return true;
  jpp_py_raise(status);
  return false;
}

static PyObject* error_type(jpp_status_code_t code, bool wrong_type) {
  switch (code) {
    case JPP_INVALID_ARGUMENT:
    case JPP_PARSE_ERROR:
    case JPP_GRAPH_ERROR:
    case JPP_MARKS_ERROR:
    case JPP_SCHEDULE_ERROR:
    case JPP_MESH_ERROR:
    case JPP_MICROBATCH_ERROR:
    case JPP_OPERATION_ERROR:
    case JPP_SHARDING_ERROR:
    case JPP_DEVICES_ERROR:
    case JPP_DONATED_ERROR:
      return wrong_type ? jpp_py_types.type_error : jpp_py_types.value_error;
    case JPP_NAN_ERROR:
      return jpp_py_types.nan_error;
    default:  // does not depend on the arguments
      return jpp_py_types.error;
  }
}

PyObject* jpp_py_make_error(jpp_status_code_t code, PyObject* message, bool wrong_type) {
  PyObject* type = error_type(code, wrong_type);
  PyObject* error = PyObject_CallFunctionObjArgs(type, message, NULL);
  PyObject* name = error ? PyUnicode_FromString(jpp_status_code_name(code)) : NULL;
  if (!name || PyObject_SetAttrString(error, "code", name) < 0) Py_CLEAR(error);
  Py_XDECREF(name);
  return error;
}

PyObject* jpp_py_raise(jpp_status_t* status) {
  PyObject* message = jpp_py_text(jpp_status_message(status));
  jpp_status_code_t code = jpp_status_code(status);
  PyObject* error = message ? jpp_py_make_error(code, message, false) : NULL;
  Py_XDECREF(message);
  jpp_status_free(status);
  if (error) PyErr_SetObject((PyObject*)Py_TYPE(error), error);
  Py_XDECREF(error);
  return NULL;
}

// --- Texts ----------------------------------------------------------------------------

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
  if (!str_or_none) {  // a later argument was refused
    jpp_py_utf8_release(out);
    return 1;
  }
  *out = (jpp_py_utf8_t){0};
  if (str_or_none == Py_None) return Py_CLEANUP_SUPPORTED;
  if (!PyUnicode_Check(str_or_none)) {
    PyErr_SetString(PyExc_TypeError, "expected a str or None");
    return 0;
  }
  Py_ssize_t size = 0;
  out->text = PyUnicode_AsUTF8AndSize(str_or_none, &size);
  if (out->text && strlen(out->text) == (size_t)size) return Py_CLEANUP_SUPPORTED;
  PyErr_Clear();
  out->owner = escape(str_or_none);
  out->text = out->owner ? PyBytes_AsString(out->owner) : NULL;
  return out->text ? Py_CLEANUP_SUPPORTED : 0;
}

int jpp_py_str_converter(PyObject* str, void* out_utf8) {
  if (str != Py_None) return jpp_py_utf8_converter(str, out_utf8);
  PyErr_SetString(PyExc_TypeError, "expected a str, found None");
  return 0;
}

void jpp_py_utf8_release(jpp_py_utf8_t* utf8) { Py_CLEAR(utf8->owner); }

int jpp_py_memory_converter(PyObject* str, void* out_memory) {
  Py_ssize_t size = 0;
  const char* name = PyUnicode_AsUTF8AndSize(str, &size);
  if (!name) return 0;
  jpp_memory_t memory = jpp_memory_parse(name, (uint32_t)size);
  *(jpp_memory_t*)out_memory = memory;
  if (memory != JPP_MEMORY_COUNT) return 1;
  PyErr_Format(PyExc_ValueError, "expected a memory, 'device' or 'pinned_host', found %R",
               str);
  return 0;
}

// --- Arguments ------------------------------------------------------------------------

bool jpp_py_refuse_keywords(PyObject* kwargs) {
  if (!kwargs || PyDict_Size(kwargs) == 0) return true;
  PyErr_SetString(PyExc_TypeError, "expected arguments by position only");
  return false;
}

// --- Numbers --------------------------------------------------------------------------

static bool read_number(PyObject* object, uint64_t most, uint64_t* out_number) {
  PyObject* index = PyNumber_Index(object);
  if (!index) return false;
  uint64_t number = PyLong_AsUnsignedLongLong(index);
  bool fits = !PyErr_Occurred() && number <= most;
  Py_DECREF(index);
  if (fits) {
    *out_number = number;
    return true;
  }
  PyErr_Clear();
  PyErr_Format(PyExc_ValueError, "expected a whole number from 0 to %llu, found %.100R",
               (unsigned long long)most, object);
  return false;
}

int jpp_py_u32_converter(PyObject* number, void* out_u32) {
  uint64_t read = 0;
  bool ok = read_number(number, UINT32_MAX, &read);
  *(uint32_t*)out_u32 = (uint32_t)read;
  return ok;
}

int jpp_py_u64_converter(PyObject* number, void* out_u64) {
  return read_number(number, UINT64_MAX, out_u64);
}

bool jpp_py_check_count(const char* what, uint64_t expected, uint64_t found) {
  if (found == expected) return true;
  PyErr_Format(PyExc_ValueError, "%s: expected %llu, found %llu", what,
               (unsigned long long)expected, (unsigned long long)found);
  return false;
}

bool jpp_py_to_u32s(PyObject* sequence, uint32_t** out_values, uint32_t* out_count) {
  *out_values = NULL;
  *out_count = 0;
  Py_ssize_t count = PySequence_Size(sequence);
  if (count < 0) return false;
  uint32_t* values = NULL;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(count, &values))) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    bool ok = item && jpp_py_u32_converter(item, &values[i]);
    Py_XDECREF(item);
    if (ok) continue;
    jpp_free(values);
    return false;
  }
  *out_values = values;
  *out_count = (uint32_t)count;
  return true;
}

bool jpp_py_to_axes(PyObject* names, PyObject* sizes, uint32_t ranks,
                    const char*** out_names, uint32_t** out_sizes, uint32_t* out_count) {
  uint32_t num_sizes = 0;
  *out_names = NULL;
  *out_count = (uint32_t)PyTuple_Size(names);
  bool ok =
      jpp_py_to_u32s(sizes, out_sizes, &num_sizes) &&
      jpp_py_check_count("sizes of axes", (uint64_t)ranks * *out_count, num_sizes) &&
      jpp_py_check(JPP_ALLOC_ARRAY(*out_count, out_names));
  for (uint32_t a = 0; ok && a < *out_count; ++a) {
    (*out_names)[a] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(names, a), NULL);
    ok = (*out_names)[a];
  }
  return ok;
}

bool jpp_py_to_u64s(PyObject* sequence, const char* what, uint32_t count,
                    uint64_t** out_values) {
  *out_values = NULL;
  if (sequence == Py_None) return true;
  Py_ssize_t found = PySequence_Size(sequence);
  if (found < 0 || !jpp_py_check_count(what, count, (uint64_t)found)) return false;
  uint64_t* values = NULL;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(count, &values))) return false;
  for (uint32_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    bool ok = item && jpp_py_u64_converter(item, &values[i]);
    Py_XDECREF(item);
    if (ok) continue;
    jpp_free(values);
    return false;
  }
  *out_values = values;
  return true;
}

uint32_t jpp_py_count_dims(const jpp_staged_t* staged, uint32_t task) {
  const jpp_task_t* made = &staged->tasks[task];
  uint32_t count = 0;
  for (uint32_t i = 0; i < made->num_outputs; ++i) {
    count += staged->values[made->outputs[i]].type.ndim;
  }
  return count;
}

bool jpp_py_to_shard_dims(const jpp_staged_t* staged, PyObject* sequence,
                          uint64_t*** out_table) {
  *out_table = NULL;
  Py_ssize_t found = PySequence_Size(sequence);
  if (found < 0 ||
      !jpp_py_check_count("dims of tasks", staged->num_tasks, (uint64_t)found) ||
      !jpp_py_check(JPP_ALLOC_ARRAY(staged->num_tasks, out_table))) {
    return false;
  }
  for (uint32_t t = 0; t < staged->num_tasks; ++t) {
    PyObject* item = PySequence_GetItem(sequence, t);
    bool ok = item && jpp_py_to_u64s(item, "dims of results",
                                     jpp_py_count_dims(staged, t), &(*out_table)[t]);
    Py_XDECREF(item);
    if (!ok) return false;
  }
  return true;
}

void jpp_py_free_shard_dims(const jpp_staged_t* staged, uint64_t** table) {
  for (uint32_t t = 0; table && t < staged->num_tasks; ++t) jpp_free(table[t]);
  jpp_free(table);
}

PyObject* jpp_py_none_or_u32(uint32_t number) {
  if (number == JPP_NONE) Py_RETURN_NONE;
  return PyLong_FromUnsignedLong(number);
}

// --- Lists ----------------------------------------------------------------------------

PyObject* jpp_py_make_list(uint64_t count,
                           PyObject* (*make)(const void* context, uint64_t index),
                           const void* context) {
  PyObject* list = PyList_New((Py_ssize_t)count);
  for (uint64_t i = 0; list && i < count; ++i) {
    PyObject* item = make(context, i);
    if (!item || PyList_SetItem(list, (Py_ssize_t)i, item) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject* make_u32(const void* values, uint64_t index) {
  return PyLong_FromUnsignedLong(((const uint32_t*)values)[index]);
}

PyObject* jpp_py_from_u32s(const uint32_t* values, uint32_t count) {
  return jpp_py_make_list(count, make_u32, values);
}
