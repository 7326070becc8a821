// jaxpp._core.Client and Executable: a PJRT plugin, and the programs that it compiled for
// its devices.
#include "python/core.h"

// Reads an option that is a list. free_options() frees it.
static bool read_list(PyObject* value, const jpp_int64_list_t** out_list) {
  Py_ssize_t count = PyList_Size(value);
  jpp_int64_list_t* list = NULL;
  size_t size = sizeof(*list) + (size_t)count * sizeof(*list->values);
  if (!jpp_py_check(jpp_alloc(size, (void**)&list))) return false;
  int64_t* values = (int64_t*)(list + 1);
  for (Py_ssize_t i = 0; i < count && !PyErr_Occurred(); ++i) {
    values[i] = PyLong_AsLongLong(PyList_GetItem(value, i));
  }
  *list = (jpp_int64_list_t){.values = values, .count = (size_t)count};
  *out_list = list;
  return !PyErr_Occurred();
}

static void free_options(jpp_client_option_t* options, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    if (options[i].type != JPP_OPTION_INT64_LIST) continue;
    jpp_free((void*)options[i].int64_list_value);
  }
  jpp_free(options);
}

static bool read_option(PyObject* key, PyObject* value, jpp_client_option_t* out_option) {
  jpp_client_option_t option = {.name = PyUnicode_AsUTF8AndSize(key, NULL)};
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
  } else if (PyList_Check(value)) {
    option.type = JPP_OPTION_INT64_LIST;
    read_list(value, &option.int64_list_value);
  } else {
    option.type = JPP_OPTION_STRING;
    option.string_value = PyUnicode_AsUTF8AndSize(value, NULL);
  }
  *out_option = option;
  return !PyErr_Occurred();
}

static PyObject* client_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  jpp_pjrt_options_t options = {.struct_size = sizeof(options)};
  jpp_key_value_store_t calls;
  PyObject *path = NULL, *dict = NULL, *store = NULL, *key = NULL, *value = NULL;
  Py_ssize_t at = 0;
  if (!PyArg_ParseTuple(args, "O&O!|O!O&O&:Client", PyUnicode_FSConverter, &path,
                        &PyDict_Type, &dict, jpp_py_types.store, &store,
                        jpp_py_u32_converter, &options.node_id, jpp_py_u32_converter,
                        &options.num_nodes)) {
    return NULL;
  }
  options.plugin_path = PyBytes_AsString(path);
  jpp_client_option_t* list = NULL;
  bool ok = jpp_py_check(JPP_ALLOC_ARRAY((size_t)PyDict_Size(dict), &list));
  while (ok && PyDict_Next(dict, &at, &key, &value)) {
    ok = read_option(key, value, &list[options.option_count++]);
  }
  jpp_py_client_t* self = ok ? jpp_py_new(type) : NULL;
  if (self) {
    options.options = list;
    self->store = Py_XNewRef(store);
    if (store) {
      calls = jpp_py_store_calls(store);
      options.store = &calls;
    }
    jpp_status_t* status = NULL;
    Py_BEGIN_ALLOW_THREADS
      status = jpp_client_create_pjrt(&options, &self->client);
    Py_END_ALLOW_THREADS
    // A Ctrl-C during a call of the store is not an error of the plugin.
    if (status && PyErr_CheckSignals() < 0) {
      jpp_status_free(status);
      Py_CLEAR(self);
    } else if (!jpp_py_check(status)) {
      Py_CLEAR(self);
    }
  }
  free_options(list, options.option_count);
  Py_DECREF(path);
  return (PyObject*)self;
}

static int client_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((jpp_py_client_t*)object)->store);
  return 0;
}

static void client_dealloc(PyObject* object) {
  jpp_py_client_t* self = (jpp_py_client_t*)object;
  PyObject_GC_UnTrack(object);
  if (self->store) {  // the plugin may call the store meanwhile
    Py_BEGIN_ALLOW_THREADS
      jpp_client_destroy(self->client);
    Py_END_ALLOW_THREADS
  } else {
    jpp_client_destroy(self->client);
  }
  Py_XDECREF(self->store);
  jpp_py_free(object);
}

static PyObject* make_device(const void* devices, uint64_t index) {
  const jpp_device_info_t* device = &((const jpp_device_info_t*)devices)[index];
  return JPP_PY_RECORD(JPP_PY_DEVICE_INFO, PyLong_FromLong(device->id),
                       jpp_py_text(device->kind), PyLong_FromLong(device->hardware_id));
}

static PyObject* make_global_device(const void* devices, uint64_t index) {
  const jpp_global_device_t* device = &((const jpp_global_device_t*)devices)[index];
  return JPP_PY_RECORD(JPP_PY_GLOBAL_DEVICE, PyLong_FromLong(device->id),
                       PyLong_FromUnsignedLong(device->node), jpp_py_text(device->kind));
}

static PyObject* client_info(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_client_info_t* info = jpp_client_info(((jpp_py_client_t*)object)->client);
  return JPP_PY_RECORD(JPP_PY_CLIENT_INFO, jpp_py_text(info->platform_name),
                       jpp_py_text(info->platform_version),
                       jpp_py_make_list(info->device_count, make_device, info->devices),
                       jpp_py_make_list(info->global_device_count, make_global_device,
                                        info->global_devices));
}

// `compiled` is the program for other devices, or NULL. Without a folder (""), nothing is
// loaded; with one, the program for other devices is there already.
static jpp_status_t* load_or_compile(jpp_client_t* client, jpp_executable_t* compiled,
                                     const jpp_compile_request_t* request,
                                     const char* folder,
                                     jpp_executable_t** out_executable,
                                     jpp_cache_outcome_t* out_outcome) {
  *out_outcome = JPP_CACHE_NOT_KEPT;
  if (!*folder && compiled) {
    return jpp_client_compile_again(client, compiled, request, out_executable);
  }
  if (!*folder) return jpp_client_compile(client, request, out_executable);
  return jpp_client_compile_cached(client, request, folder, NULL, out_executable,
                                   out_outcome);
}

static PyObject* client_compile(PyObject* object, PyObject* args) {
  Py_buffer code, options, identity;
  PyObject* kept = NULL;
  const char* folder = NULL;
  PyObject *devices = NULL, *compiled = NULL;
  uint32_t *device_table = NULL, device_count = 0;
  if (!PyArg_ParseTuple(args, "y*y*OOyy*|O!", &code, &options, &devices, &kept, &folder,
                        &identity, jpp_py_types.executable, &compiled)) {
    return NULL;
  }
  if (!jpp_py_to_u32s(devices, &device_table, &device_count)) {
    PyBuffer_Release(&code);
    PyBuffer_Release(&options);
    PyBuffer_Release(&identity);
    return NULL;
  }
  jpp_compile_request_t request = {.struct_size = sizeof(request),
                                   .code = code.buf,
                                   .code_size = (size_t)code.len,
                                   .format = "mlir",
                                   .options = options.buf,
                                   .options_size = (size_t)options.len,
                                   .devices = device_table,
                                   .device_count = device_count,
                                   .identity = identity.buf,
                                   .identity_size = (size_t)identity.len};
  jpp_executable_t* executable = NULL;
  jpp_cache_outcome_t outcome;
  jpp_status_t* status = NULL;
  jpp_client_t* client = ((jpp_py_client_t*)object)->client;
  jpp_executable_t* other =
      compiled ? ((jpp_py_executable_t*)compiled)->executable : NULL;
  Py_BEGIN_ALLOW_THREADS
    status = load_or_compile(client, other, &request, folder, &executable, &outcome);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&code);
  PyBuffer_Release(&options);
  PyBuffer_Release(&identity);
  jpp_free(device_table);
  if (!jpp_py_check(status)) return NULL;
  jpp_py_executable_t* self = jpp_py_new(jpp_py_types.executable);
  if (!self) {
    jpp_client_executable_destroy(client, executable);
    return NULL;
  }
  self->executable = executable;
  self->client = Py_NewRef(object);
  self->kept = Py_NewRef(kept);
  return JPP_PY_RECORD(JPP_PY_COMPILED, (PyObject*)self,
                       PyBool_FromLong(outcome != JPP_CACHE_NOT_WRITTEN));
}

static PyObject* client_register_custom_call(PyObject* object, PyObject* args) {
  jpp_custom_call_t call = {0};
  PyObject* capsule = NULL;
  if (!PyArg_ParseTuple(args, "ssOO&", &call.name, &call.platform, &capsule,
                        jpp_py_u32_converter, &call.traits)) {
    return NULL;
  }
  if (!PyCapsule_CheckExact(capsule)) {
    return PyErr_Format(PyExc_TypeError, "expected a capsule, found %.100R", capsule);
  }
  call.handler = PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule));
  if (!call.handler) return NULL;
  jpp_client_t* client = ((jpp_py_client_t*)object)->client;
  if (!jpp_py_check(jpp_client_register_custom_call(client, &call))) return NULL;
  Py_RETURN_NONE;
}

static PyObject* client_warm_up(PyObject* object, PyObject* unused) {
  (void)unused;
  jpp_status_t* status = NULL;
  Py_BEGIN_ALLOW_THREADS
    status = jpp_client_warm_up(((jpp_py_client_t*)object)->client);
  Py_END_ALLOW_THREADS
  if (!jpp_py_check(status)) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef kMethods[] = {
    {"info", client_info, METH_NOARGS, "info($self, /)\n--\n\nA ClientInfo."},
    {"compile", client_compile, METH_VARARGS,
     "compile($self, code, options, devices, kept, folder, identity, compiled=..., "
     "/)\n--\n\nCompiles "
     "StableHLO under a serialized CompileOptionsProto, for these devices, numbered over "
     "all nodes; without any, for any one device. The Executable keeps `kept` alive. "
     "With a folder, as bytes: loads what was compiled before from what stands for the "
     "code in the cache, as bytes, or leaves it there; b\"\": no folder. `compiled`: the "
     "Executable of the same code for other devices. Releases the GIL."},
    {"warm_up", client_warm_up, METH_NOARGS,
     "warm_up($self, /)\n--\n\nRuns a small program on a CPU, so that the plugin sets "
     "itself up. Releases the GIL."},
    {"register_custom_call", client_register_custom_call, METH_VARARGS,
     "register_custom_call($self, name, platform, handler, traits, /)\n--\n\n"
     "Gives the plugin an XLA FFI handler, a capsule."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc,
     "Client(plugin, options, store=..., node_id=0, num_nodes=0, /)\n--\n\nA client of a "
     "PJRT plugin. One of several nodes also needs a KeyValueStore that all of them "
     "share; the constructor returns when all nodes have called it."},
    {Py_tp_new, (void*)client_new},
    {Py_tp_dealloc, (void*)client_dealloc},
    {Py_tp_traverse, (void*)client_traverse},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_client_spec = {"jaxpp._core.Client", sizeof(jpp_py_client_t), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};

// --- Executable -----------------------------------------------------------------------

static int executable_traverse(PyObject* object, visitproc visit, void* arg) {
  jpp_py_executable_t* self = (jpp_py_executable_t*)object;
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(self->kept);
  return 0;
}

// No caller can run it any more.
static int executable_clear(PyObject* object) {
  Py_CLEAR(((jpp_py_executable_t*)object)->kept);
  return 0;
}

static void executable_dealloc(PyObject* object) {
  jpp_py_executable_t* self = (jpp_py_executable_t*)object;
  PyObject_GC_UnTrack(object);
  PyObject_ClearWeakRefs(object);
  if (self->client) {
    jpp_client_executable_destroy(((jpp_py_client_t*)self->client)->client,
                                  self->executable);
  }
  Py_XDECREF(self->client);
  Py_XDECREF(self->kept);
  jpp_py_free(object);
}

static PyMemberDef kExecutableMembers[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(jpp_py_executable_t, weak_references),
     READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot kExecutableSlots[] = {
    {Py_tp_doc, "A compiled task."},
    {Py_tp_dealloc, (void*)executable_dealloc},
    {Py_tp_traverse, (void*)executable_traverse},
    {Py_tp_clear, (void*)executable_clear},
    {Py_tp_members, kExecutableMembers},
    {0, NULL},
};
PyType_Spec jpp_py_executable_spec = {
    "jaxpp._core.Executable", sizeof(jpp_py_executable_t), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    kExecutableSlots};
