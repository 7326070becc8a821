// jaxpp._core.Client and Executable: a PJRT plugin, and what it compiled.
#include "base/vec.h"
#include "python/core.h"

typedef JPP_VEC(jpp_client_option_t) option_vec_t;

static bool read_option(PyObject* key, PyObject* value, option_vec_t* options) {
  jpp_client_option_t option = {0};
  option.name = PyUnicode_AsUTF8AndSize(key, NULL);
  if (!option.name) return false;
  if (PyBool_Check(value)) {
    option.type = JPP_OPTION_BOOL;
    option.bool_value = value == Py_True;
  } else if (PyLong_Check(value)) {
    option.type = JPP_OPTION_INT64;
    option.int64_value = PyLong_AsLongLong(value);
  } else if (PyFloat_Check(value)) {
    option.type = JPP_OPTION_FLOAT;
    option.float_value = (float)PyFloat_AsDouble(value);
  } else {
    option.type = JPP_OPTION_STRING;
    option.string_value = PyUnicode_AsUTF8AndSize(value, NULL);
  }
  return !PyErr_Occurred() && jpp_py_check(JPP_VEC_PUSH(options, option));
}

static PyObject* client_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  (void)kwargs;
  jpp_pjrt_options_t options = {0};
  PyObject *path = NULL, *dict = NULL, *key = NULL, *value = NULL;
  Py_ssize_t at = 0;
  if (!PyArg_ParseTuple(args, "O&O!", PyUnicode_FSConverter, &path, &PyDict_Type,
                        &dict)) {
    return NULL;
  }
  options.plugin_path = PyBytes_AsString(path);
  option_vec_t list = {0};
  bool ok = true;
  while (ok && PyDict_Next(dict, &at, &key, &value)) ok = read_option(key, value, &list);
  jpp_py_client_t* self = ok ? jpp_py_new(type) : NULL;
  if (self) {
    options.options = list.data;
    options.option_count = (uint32_t)list.count;
    jpp_status_t* status = NULL;
    Py_BEGIN_ALLOW_THREADS
      status = jpp_client_create_pjrt(&options, &self->client);
    Py_END_ALLOW_THREADS
    if (!jpp_py_check(status)) Py_CLEAR(self);
  }
  jpp_vec_deinit(&list);
  Py_DECREF(path);
  return (PyObject*)self;
}

static void client_dealloc(PyObject* object) {
  jpp_client_destroy(((jpp_py_client_t*)object)->client);
  jpp_py_free(object);
}

static PyObject* client_info(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_client_info_t* info = jpp_client_info(((jpp_py_client_t*)object)->client);
  PyObject* devices = PyList_New(info->device_count);
  for (uint32_t i = 0; devices && i < info->device_count; ++i) {
    PyObject* item =
        Py_BuildValue("(iN)", info->devices[i].id, jpp_py_text(info->devices[i].kind));
    if (!item || PyList_SetItem(devices, i, item) < 0) Py_CLEAR(devices);
  }
  if (!devices) return NULL;
  return Py_BuildValue("(NNN)", jpp_py_text(info->platform_name),
                       jpp_py_text(info->platform_version), devices);
}

// Without a folder ("") it only compiles.
static jpp_status_t* compile(jpp_client_t* client, const jpp_compile_request_t* request,
                             const char* folder, const char* key,
                             jpp_executable_t** out_executable,
                             jpp_cache_outcome_t* out_outcome) {
  *out_outcome = JPP_CACHE_NOT_KEPT;
  if (!*folder) return jpp_client_compile(client, request, out_executable);
  return jpp_client_compile_cached(client, request, folder, key, out_executable,
                                   out_outcome);
}

static PyObject* client_compile(PyObject* object, PyObject* args) {
  Py_buffer code, options;
  PyObject* kept = NULL;
  const char *folder = NULL, *key = NULL;
  if (!PyArg_ParseTuple(args, "y*y*Oyz", &code, &options, &kept, &folder, &key)) {
    return NULL;
  }
  jpp_compile_request_t request = {.code = code.buf,
                                   .code_size = (size_t)code.len,
                                   .format = "mlir",
                                   .options = options.buf,
                                   .options_size = (size_t)options.len};
  jpp_executable_t* executable = NULL;
  jpp_cache_outcome_t outcome;
  jpp_status_t* status = NULL;
  jpp_client_t* client = ((jpp_py_client_t*)object)->client;
  Py_BEGIN_ALLOW_THREADS
    status = compile(client, &request, folder, key, &executable, &outcome);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&code);
  PyBuffer_Release(&options);
  if (!jpp_py_check(status)) return NULL;
  jpp_py_executable_t* self = jpp_py_new(jpp_py_types.executable);
  if (!self) {
    jpp_client_executable_destroy(client, executable);
    return NULL;
  }
  self->executable = executable;
  self->client = Py_NewRef(object);
  self->kept = Py_NewRef(kept);
  PyObject* written = outcome == JPP_CACHE_NOT_WRITTEN ? Py_False : Py_True;
  return Py_BuildValue("(NO)", self, written);
}

static PyObject* client_register_custom_call(PyObject* object, PyObject* args) {
  jpp_custom_call_t call = {0};
  PyObject* capsule = NULL;
  unsigned int traits = 0;
  if (!PyArg_ParseTuple(args, "ssOI", &call.name, &call.platform, &capsule, &traits)) {
    return NULL;
  }
  call.handler = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
  call.traits = traits;
  if (!call.handler) return NULL;
  jpp_client_t* client = ((jpp_py_client_t*)object)->client;
  if (!jpp_py_check(jpp_client_register_custom_call(client, &call))) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef kMethods[] = {
    {"info", client_info, METH_NOARGS, "(platform, version, [(id, kind)])"},
    {"compile", client_compile, METH_VARARGS,
     "(StableHLO, serialized CompileOptionsProto, kept, folder, key) -> (Executable, "
     "which keeps `kept` alive; False if it could not be written to the folder). With a "
     "folder, as bytes: loads what was compiled under the key before, or leaves it "
     "there. Releases "
     "the GIL"},
    {"register_custom_call", client_register_custom_call, METH_VARARGS,
     "(name, platform, capsule, traits): an XLA FFI handler for this plugin"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_new, (void*)client_new},
    {Py_tp_dealloc, (void*)client_dealloc},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_client_spec = {"jaxpp._core.Client", sizeof(jpp_py_client_t), 0,
                                  Py_TPFLAGS_DEFAULT, kSlots};

static void executable_dealloc(PyObject* object) {
  jpp_py_executable_t* self = (jpp_py_executable_t*)object;
  if (self->client) {
    jpp_client_executable_destroy(((jpp_py_client_t*)self->client)->client,
                                  self->executable);
  }
  Py_XDECREF(self->client);
  Py_XDECREF(self->kept);
  jpp_py_free(object);
}

static PyType_Slot kExecutableSlots[] = {
    {Py_tp_dealloc, (void*)executable_dealloc},
    {0, NULL},
};
PyType_Spec jpp_py_executable_spec = {
    "jaxpp._core.Executable", sizeof(jpp_py_executable_t), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, kExecutableSlots};
