// jaxpp._core.KeyValueStore: connects the clients of several nodes to a store in Python,
// such as the one of jax.distributed.
//
// `get` takes a key and milliseconds and returns bytes, or None if the key is not there
// in that time; `put` takes a key and bytes. Any thread of the plugin may call them, even
// long after the client was created.
#include <string.h>

#include "python/core.h"
#include "python/gate.h"

// How long the interpreter's exit may have to wait for a thread that waits for a key.
enum { kSliceMs = 250 };

static jpp_py_gate_t g_gate;

// Takes the GIL; returns false if the interpreter is about to exit.
static bool enter_python(PyGILState_STATE* out_state) {
  if (!jpp_py_gate_enter(&g_gate)) return false;
  *out_state = PyGILState_Ensure();
  return true;
}

static void leave_python(PyGILState_STATE state) {
  PyGILState_Release(state);
  jpp_py_gate_leave(&g_gate);
}

static jpp_status_t* make_closed_error(const char* key) {
  return jpp_status_make(JPP_CANCELLED, "%s: the interpreter is about to exit", key);
}

PyObject* jpp_py_stores_close(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  jpp_py_gate_close(&g_gate);
  Py_RETURN_NONE;
}

// --- The calls ------------------------------------------------------------------------

// Converts the raised exception to an error of the store. A Ctrl-C is raised again in the
// main thread.
static jpp_status_t* take_raised(const char* key) {
  bool interrupted = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
  PyObject *type = NULL, *value = NULL, *trace = NULL;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  PyObject* text = value ? PyObject_Str(value) : NULL;
  jpp_py_utf8_t utf8 = {0};
  if (!text || !jpp_py_utf8_converter(text, &utf8)) PyErr_Clear();
  jpp_status_t* status =
      jpp_status_make(interrupted ? JPP_CANCELLED : JPP_PEER_ERROR, "%s: %s", key,
                      interrupted ? "was interrupted"
                      : utf8.text ? utf8.text
                                  : "an error without a text");
  jpp_py_utf8_release(&utf8);
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  if (interrupted) PyErr_SetInterrupt();
  return status;
}

static jpp_status_t* copy_bytes(PyObject* bytes, void** out_value, size_t* out_size) {
  size_t size = (size_t)PyBytes_Size(bytes);
  JPP_RETURN_IF_ERROR(jpp_alloc(size, out_value));
  memcpy(*out_value, PyBytes_AsString(bytes), size);
  *out_size = size;
  return NULL;
}

// Called with the GIL.
static jpp_status_t* call_get(const jpp_py_store_t* self, const char* key,
                              uint32_t timeout_ms, void** out_value, size_t* out_size) {
  if (!self->get) return make_closed_error(key);
  PyObject* answer =
      PyObject_CallFunction(self->get, "sk", key, (unsigned long)timeout_ms);
  if (!answer) return take_raised(key);
  jpp_status_t* status = NULL;
  if (PyBytes_Check(answer)) {
    status = copy_bytes(answer, out_value, out_size);
  } else if (answer != Py_None) {
    status =
        jpp_status_make(JPP_INVALID_ARGUMENT,
                        "%s: expected a key-value store that gives bytes or None", key);
  }
  Py_DECREF(answer);
  return status;
}

// Any thread, without the GIL. Waits in slices, so that it does not delay the
// interpreter's exit.
static jpp_status_t* store_get(void* user, const char* key, uint32_t timeout_ms,
                               void** out_value, size_t* out_size) {
  PyGILState_STATE state;
  jpp_status_t* status = NULL;
  uint32_t left_ms = timeout_ms;
  do {
    uint32_t slice_ms = left_ms < kSliceMs ? left_ms : kSliceMs;
    if (!enter_python(&state)) return make_closed_error(key);
    status = call_get(user, key, slice_ms, out_value, out_size);
    leave_python(state);
    left_ms -= slice_ms;
  } while (!status && !*out_value && left_ms);
  return status;
}

static jpp_status_t* store_put(void* user, const char* key, const void* value,
                               size_t size) {
  const jpp_py_store_t* self = user;
  PyGILState_STATE state;
  if (!enter_python(&state)) return make_closed_error(key);
  jpp_status_t* status = self->put ? NULL : make_closed_error(key);
  PyObject* answer = NULL;
  if (!status) {
    answer = PyObject_CallFunction(self->put, "sy#", key, value, (Py_ssize_t)size);
    if (!answer) status = take_raised(key);
  }
  Py_XDECREF(answer);
  leave_python(state);
  return status;
}

jpp_key_value_store_t jpp_py_store_calls(PyObject* store) {
  return (jpp_key_value_store_t){.user = store, .get = store_get, .put = store_put};
}

// --- The object -----------------------------------------------------------------------

static PyObject* store_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  PyObject* functions[2] = {NULL, NULL};
  if (!PyArg_ParseTuple(args, "OO:KeyValueStore", &functions[0], &functions[1])) {
    return NULL;
  }
  for (int i = 0; i < 2; ++i) {
    if (PyCallable_Check(functions[i])) continue;
    return PyErr_Format(PyExc_TypeError, "expected a function, found %.100R",
                        functions[i]);
  }
  jpp_py_store_t* self = jpp_py_new(type);
  if (!self) return NULL;
  self->get = Py_NewRef(functions[0]);
  self->put = Py_NewRef(functions[1]);
  return (PyObject*)self;
}

static int store_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((jpp_py_store_t*)object)->get);
  Py_VISIT(((jpp_py_store_t*)object)->put);
  return 0;
}

static int store_clear(PyObject* object) {
  Py_CLEAR(((jpp_py_store_t*)object)->get);
  Py_CLEAR(((jpp_py_store_t*)object)->put);
  return 0;
}

static void store_dealloc(PyObject* object) {
  PyObject_GC_UnTrack(object);
  store_clear(object);
  jpp_py_free(object);
}

static PyType_Slot kSlots[] = {
    {Py_tp_doc,
     "KeyValueStore(get, put, /)\n--\n\nThe store through which the clients of several "
     "nodes exchange data: get(key, ms) returns bytes, or None if the key is not there "
     "in time; put(key, bytes) stores them."},
    {Py_tp_new, (void*)store_new},
    {Py_tp_dealloc, (void*)store_dealloc},
    {Py_tp_traverse, (void*)store_traverse},
    {Py_tp_clear, (void*)store_clear},
    {0, NULL},
};
PyType_Spec jpp_py_store_spec = {"jaxpp._core.KeyValueStore", sizeof(jpp_py_store_t), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};
