// The module jaxpp._core: its types, records, constants and functions, made when Python
// imports it.
#include <string.h>

#include "jaxpp/option.h"
#include "jaxpp/profile.h"
#include "jaxpp/version.h"
#include "python/core.h"

jpp_py_types_t jpp_py_types;

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

// An exception whose bases are `base` and, unless it is NULL, `other`.
static bool add_error(PyObject* module, const char* name, const char* doc, PyObject* base,
                      PyObject* other, PyObject** out_error) {
  PyObject* bases = other ? PyTuple_Pack(2, base, other) : PyTuple_Pack(1, base);
  if (!bases) return false;
  *out_error = PyErr_NewExceptionWithDoc(name, doc, bases, NULL);
  Py_DECREF(bases);
  if (!*out_error) return false;
  return PyModule_AddObjectRef(module, strchr(name, '.') + 1, *out_error) == 0;
}

static bool add_errors(PyObject* module) {
  jpp_py_types_t* t = &jpp_py_types;
  static const char kDoc[] =
      "What JaxPP refuses or what failed while it ran. `code` names the kind of error "
      "('stage-marks', 'schedule', 'mesh', 'microbatch', 'operation', 'sharding', "
      "'plugin', 'devices', 'donated', 'execution', 'out-of-memory', ...); the message "
      "says what was expected, what was found and where.";
  return add_error(module, "jaxpp.JaxppError", kDoc, PyExc_Exception, NULL, &t->error) &&
         add_error(module, "jaxpp.JaxppValueError", "A bad argument.", t->error,
                   PyExc_ValueError, &t->value_error) &&
         add_error(module, "jaxpp.JaxppTypeError", "An argument of a wrong type.",
                   t->value_error, PyExc_TypeError, &t->type_error) &&
         add_error(module, "jaxpp.NanError",
                   "A task computed a NaN under jax_debug_nans, or an infinity under "
                   "jax_debug_infs.",
                   t->error, PyExc_FloatingPointError, &t->nan_error);
}

static int module_exec(PyObject* module) {
  jpp_py_types_t* t = &jpp_py_types;
  bool ok = add_errors(module) && jpp_py_add_records(module) &&
            jpp_py_add_constants(module) &&
            add_type(module, "Graph", &jpp_py_graph_spec, &t->graph) &&
            add_type(module, "Schedule", &jpp_py_schedule_spec, &t->schedule) &&
            add_type(module, "Staged", &jpp_py_staged_spec, &t->staged) &&
            add_type(module, "Plan", &jpp_py_plan_spec, &t->plan) &&
            add_type(module, "Client", &jpp_py_client_spec, &t->client) &&
            add_type(module, "Executable", &jpp_py_executable_spec, &t->executable) &&
            add_type(module, "Value", &jpp_py_value_spec, &t->value) &&
            add_type(module, "Params", &jpp_py_params_spec, &t->params) &&
            add_type(module, "Wanted", &jpp_py_wanted_spec, &t->wanted) &&
            add_type(module, "Given", &jpp_py_given_spec, &t->given) &&
            add_type(module, "Network", &jpp_py_network_spec, &t->network) &&
            add_type(module, "Runtime", &jpp_py_runtime_spec, &t->runtime) &&
            add_type(module, "Callback", &jpp_py_callback_spec, &t->callback) &&
            add_type(module, "PlanFile", &jpp_py_planfile_spec, &t->planfile) &&
            add_type(module, "KeyValueStore", &jpp_py_store_spec, &t->store) &&
            PyModule_AddFunctions(module, jpp_py_job_methods) == 0 &&
            PyModule_AddStringConstant(module, "__version__", jpp_version()) == 0;
  return ok ? 0 : -1;
}

static PyObject* check_process(PyObject* module, PyObject* unused) {
  (void)module;
  (void)unused;
  if (!jpp_py_check(jpp_process_check())) return NULL;
  Py_RETURN_NONE;
}

static PyObject* make_error(PyObject* module, PyObject* args) {
  (void)module;
  const char* name = NULL;
  PyObject* message = NULL;
  int wrong_type = 0;
  if (!PyArg_ParseTuple(args, "sUp", &name, &message, &wrong_type)) return NULL;
  for (jpp_status_code_t code = JPP_OK + 1; code < JPP_STATUS_CODE_COUNT; ++code) {
    if (strcmp(name, jpp_status_code_name(code)) == 0) {
      return jpp_py_make_error(code, message, wrong_type);
    }
  }
  return PyErr_Format(PyExc_ValueError, "no code is named %s", name);
}

static PyObject* device_bytes(PyObject* module, PyObject* args) {
  (void)module;
  jpp_py_utf8_t name = {0};
  uint64_t elements = 0;
  if (!PyArg_ParseTuple(args, "O&O&", jpp_py_str_converter, &name, jpp_py_u64_converter,
                        &elements)) {
    return NULL;
  }
  jpp_dtype_t dtype = jpp_dtype_parse(name.text, (uint32_t)strlen(name.text));
  if (dtype == JPP_DTYPE_INVALID) {
    PyErr_Format(PyExc_ValueError, "expected a dtype, found '%s'", name.text);
  }
  jpp_py_utf8_release(&name);
  if (dtype == JPP_DTYPE_INVALID) return NULL;
  return PyLong_FromUnsignedLongLong(jpp_dtype_device_bytes(dtype, elements));
}

static PyObject* option(PyObject* module, PyObject* args) {
  (void)module;
  const char* name = NULL;
  if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
  jpp_option_t found = jpp_option_find(name);
  if (found == JPP_OPTION_COUNT) {
    return PyErr_Format(PyExc_ValueError, "no option is named %s", name);
  }
  const char* value = jpp_option_get(found);
  return value ? PyUnicode_DecodeFSDefault(value) : Py_NewRef(Py_None);
}

static PyObject* option_ms(PyObject* module, PyObject* args) {
  (void)module;
  const char* name = NULL;
  uint32_t ms = 0;
  if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
  jpp_option_t found = jpp_option_find(name);
  if (found == JPP_OPTION_COUNT) {
    return PyErr_Format(PyExc_ValueError, "no option is named %s", name);
  }
  if (!jpp_py_check(jpp_option_get_ms(found, &ms))) return NULL;
  return PyLong_FromUnsignedLong(ms);
}

static PyObject* misspelt_options(PyObject* module, PyObject* unused) {
  (void)module;
  (void)unused;
  char* text = NULL;
  if (!jpp_py_check(jpp_options_misspelt(&text))) return NULL;
  return text ? jpp_py_take_text(text) : Py_NewRef(Py_None);
}

static PyObject* module_profile_plugin(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  // The name that jaxlib expects; nothing writes through the pointer.
  return PyCapsule_New((void*)jpp_profile_plugin(), "pjrt_c_api", NULL);
}

static PyMethodDef kMethods[] = {
    {"device_bytes", device_bytes, METH_VARARGS,
     "device_bytes($module, dtype, elements, /)\n--\n\n"
     "Bytes on a device, which packs types of 2 and 4 bits."},
    {"make_error", make_error, METH_VARARGS,
     "make_error($module, code, message, wrong_type, /)\n--\n\n"
     "Makes the exception to raise for a code."},
    {"check_process", check_process, METH_NOARGS,
     "check_process($module, /)\n--\n\n"
     "Raises in a process forked after the devices were in use."},
    {"option", option, METH_VARARGS,
     "option($module, name, /)\n--\n\n"
     "An environment variable of the table that `jaxpp options` prints; None: not set."},
    {"option_ms", option_ms, METH_VARARGS,
     "option_ms($module, name, /)\n--\n\n"
     "The milliseconds of an environment variable in seconds; 0 if not set."},
    {"misspelt_options", misspelt_options, METH_NOARGS,
     "misspelt_options($module, /)\n--\n\n"
     "A warning about misspelt JPP_ variables in the environment, or None."},
    {"callback_handler", jpp_py_callback_handler, METH_VARARGS,
     "callback_handler($module, platform, /)\n--\n\n"
     "A capsule of the XLA FFI handler that calls a Callback by its address."},
    {"cut_stages", jpp_py_cut_stages, METH_VARARGS,
     "cut_stages($module, costs, makers, bytes, used, users, num_stages, /)\n--\n\n"
     "The stage of each op. `makers` and `bytes` are of values; a use has a value and an "
     "op."},
    {"join_traces", jpp_py_join_traces, METH_VARARGS,
     "join_traces($module, texts, /)\n--\n\n"
     "Joins traces of the same steps by several processes into one for Perfetto."},
    {"draw_traces", jpp_py_draw_traces, METH_VARARGS,
     "draw_traces($module, texts, columns, color, /)\n--\n\n"
     "The same for a terminal, a line a rank."},
    {"profile_plugin", module_profile_plugin, METH_NOARGS,
     "profile_plugin($module, /)\n--\n\n"
     "A capsule of the PJRT_Api through which JAX's profiles get the steps."},
    {"runtimes_close", jpp_py_runtimes_close, METH_NOARGS,
     "runtimes_close($module, /)\n--\n\nWaits for the steps in flight. For the "
     "interpreter's exit, before callbacks_close()."},
    {"callbacks_close", jpp_py_callbacks_close, METH_NOARGS,
     "callbacks_close($module, /)\n--\n\n"
     "Makes further callbacks fail; returns when none is running. For the interpreter's "
     "exit."},
    {"stores_close", jpp_py_stores_close, METH_NOARGS,
     "stores_close($module, /)\n--\n\nStops all use of KeyValueStores; returns when none "
     "is in use. For the interpreter's exit."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot kSlots[] = {{Py_mod_exec, (void*)module_exec}, {0, NULL}};

static struct PyModuleDef kModule = {
    PyModuleDef_HEAD_INIT,
    .m_name = "jaxpp._core",
    .m_doc = "Python's interface to JaxPP's C library.",
    .m_methods = kMethods,
    .m_slots = kSlots,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&kModule); }
