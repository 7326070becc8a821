// jaxpp._core.Value: an array on the devices of some ranks, or the promise of a step to
// make it. The memory belongs to the library's jpp_array_t.
//
// Steps make hundreds of these, so they do not take part in garbage collection: a Value
// refers to its client, if it has one, and to no other Python object.
#include "python/core.h"

PyObject* jpp_py_value_wrap(PyObject* client, jpp_array_t* array) {
  jpp_py_value_t* self = jpp_py_new(jpp_py_types.value);
  if (!self) {
    jpp_array_release(array);
    return NULL;
  }
  self->client = Py_XNewRef(client);
  self->array = array;
  return (PyObject*)self;
}

static void value_dealloc(PyObject* object) {
  jpp_py_value_t* self = (jpp_py_value_t*)object;
  jpp_array_release(self->array);
  jpp_py_dropped_collect();
  Py_XDECREF(self->client);
  jpp_py_free(object);
}

// --- Waiting --------------------------------------------------------------------------

static bool handle_signals(void* user) {
  jpp_py_wait_t* wait = user;
  PyEval_RestoreThread(wait->state);
  wait->raised = PyErr_CheckSignals() < 0;
  wait->state = PyEval_SaveThread();
  return wait->raised;
}

void jpp_py_wait_begin(jpp_py_wait_t* wait) {
  wait->interrupt = (jpp_interrupt_t){.requested = handle_signals, .user = wait};
  wait->raised = false;
  wait->state = PyEval_SaveThread();
}

bool jpp_py_wait_end(jpp_py_wait_t* wait, jpp_status_t* status) {
  PyEval_RestoreThread(wait->state);
  jpp_py_stop_late_thread();
  if (!wait->raised) return jpp_py_check(status);
  jpp_status_free(status);
  return false;
}

// --- Upload ---------------------------------------------------------------------------

static bool upload_shard(const jpp_array_layout_t* layout, PyObject* data,
                         jpp_dtype_t dtype, uint32_t device, jpp_buffer_t** out_buffer) {
  Py_buffer view;
  *out_buffer = NULL;
  if (PyObject_GetBuffer(data, &view, PyBUF_STRIDED_RO) < 0) return false;
  int64_t dims[JPP_BUFFER_MAX_RANK], strides[JPP_BUFFER_MAX_RANK];
  jpp_status_t* status = NULL;
  if (view.ndim > JPP_BUFFER_MAX_RANK) {
    status = jpp_status_make(JPP_UNSUPPORTED, "an array has %d dimensions; at most %d",
                             view.ndim, JPP_BUFFER_MAX_RANK);
  } else if (view.itemsize * 8 != jpp_dtype_bits(dtype)) {
    status = jpp_status_make(JPP_INTERNAL_ERROR, "items of %d bytes given as %s",
                             (int)view.itemsize, jpp_dtype_name(dtype));
  }
  for (int i = 0; !status && i < view.ndim; ++i) {
    dims[i] = view.shape[i];
    strides[i] = view.strides[i];
  }
  if (!status) {
    jpp_host_array_t array = {.struct_size = sizeof(array),
                              .data = view.buf,
                              .dtype = dtype,
                              .rank = (uint32_t)view.ndim,
                              .dims = dims,
                              .byte_strides = strides,
                              .memory = layout->memory};
    Py_BEGIN_ALLOW_THREADS
      status = jpp_client_buffer_from_host(layout->client, &array, device, out_buffer);
    Py_END_ALLOW_THREADS
  }
  PyBuffer_Release(&view);
  return jpp_py_check(status);
}

static bool upload_all(const jpp_array_layout_t* layout, PyObject* shards,
                       jpp_dtype_t dtype, const uint32_t* devices,
                       jpp_buffer_t** buffers) {
  uint32_t count = layout->num_ranks * layout->devices_per_rank;
  for (uint32_t i = 0; i < count; ++i) {
    if (devices[i] == JPP_NO_DEVICE) continue;
    PyObject* shard = Py_XNewRef(PyList_GetItem(shards, i));
    bool ok = shard && upload_shard(layout, shard, dtype, devices[i], &buffers[i]);
    Py_XDECREF(shard);
    if (!ok) return false;
  }
  return true;
}

static PyObject* put_shards(const jpp_array_layout_t* layout, PyObject* client,
                            PyObject* shards, jpp_dtype_t dtype,
                            const uint32_t* devices) {
  size_t count = (size_t)layout->num_ranks * layout->devices_per_rank;
  jpp_buffer_t** buffers = NULL;
  jpp_array_t* array = NULL;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(count, &buffers))) return NULL;
  bool ok = upload_all(layout, shards, dtype, devices, buffers) &&
            jpp_py_check(jpp_array_create(layout, buffers, &array));
  for (size_t i = 0; i < count && !ok; ++i) {
    jpp_client_buffer_destroy(layout->client, buffers[i]);
  }
  jpp_free(buffers);
  return ok ? jpp_py_value_wrap(client, array) : NULL;
}

// The arguments of put(), with devices and shards as [rank][device], flat.
typedef struct put_args {
  PyObject* client;  // borrowed
  PyObject* list;    // borrowed; its length is checked
  jpp_array_layout_t layout;
  uint32_t* ranks;    // owned; those of the layout
  uint32_t* devices;  // owned
  jpp_dtype_t dtype;  // JPP_DTYPE_INVALID for an unknown name
} put_args_t;

static bool parse_put_args(PyObject* args, put_args_t* out_args) {
  PyObject *ranks = NULL, *devices = NULL;
  const char* dtype = NULL;
  Py_ssize_t dtype_length = 0;
  uint32_t num_devices = 0;
  *out_args = (put_args_t){.layout = {.struct_size = sizeof(out_args->layout)}};
  jpp_array_layout_t* layout = &out_args->layout;
  if (!PyArg_ParseTuple(args, "O!OO&OO!s#O&", jpp_py_types.client, &out_args->client,
                        &ranks, jpp_py_u32_converter, &layout->devices_per_rank, &devices,
                        &PyList_Type, &out_args->list, &dtype, &dtype_length,
                        jpp_py_memory_converter, &layout->memory)) {
    return false;
  }
  out_args->dtype = jpp_dtype_parse(dtype, (uint32_t)dtype_length);
  if (!jpp_py_to_u32s(ranks, &out_args->ranks, &layout->num_ranks) ||
      !jpp_py_to_u32s(devices, &out_args->devices, &num_devices)) {
    return false;
  }
  layout->client = ((jpp_py_client_t*)out_args->client)->client;
  layout->ranks = out_args->ranks;
  // Check the list last, because earlier conversions may have run code that changes it.
  uint64_t count = (uint64_t)layout->num_ranks * layout->devices_per_rank;
  return jpp_py_check_count("devices of the ranks", count, num_devices) &&
         jpp_py_check_count("shards", count, (uint64_t)PyList_Size(out_args->list));
}

// A value may be on no rank at all.
static PyObject* value_put(PyObject* type, PyObject* args) {
  (void)type;
  put_args_t put;
  PyObject* value = NULL;
  if (parse_put_args(args, &put)) {
    value = put_shards(&put.layout, put.client, put.list, put.dtype, put.devices);
  }
  jpp_free(put.ranks);
  jpp_free(put.devices);
  return value;
}

static PyObject* value_elsewhere(PyObject* type, PyObject* unused) {
  (void)type, (void)unused;
  jpp_array_t* array = NULL;
  if (!jpp_py_check(jpp_array_create_elsewhere(&array))) return NULL;
  return jpp_py_value_wrap(NULL, array);
}

static PyObject* value_set_origin(PyObject* object, PyObject* origin) {
  if (!Py_IS_TYPE(origin, jpp_py_types.value)) {
    return PyErr_Format(PyExc_TypeError, "expected a Value");
  }
  jpp_array_set_origin(((jpp_py_value_t*)object)->array,
                       ((jpp_py_value_t*)origin)->array);
  Py_RETURN_NONE;
}

// --- Inspection ----------------------------------------------------------------------

bool jpp_py_value_check_shard(const jpp_array_t* array, uint32_t rank, uint32_t device) {
  const jpp_array_layout_t* layout = jpp_array_layout(array);
  for (uint32_t i = 0; i < layout->num_ranks; ++i) {
    if (layout->ranks[i] == rank && device < layout->devices_per_rank) return true;
  }
  PyErr_Format(PyExc_IndexError, "no shard %u on rank %u", device, rank);
  return false;
}

static PyObject* value_read(PyObject* object, PyObject* args) {
  jpp_array_t* array = ((jpp_py_value_t*)object)->array;
  uint32_t rank = 0, device = 0;
  Py_buffer view;
  if (!PyArg_ParseTuple(args, "O&O&w*", jpp_py_u32_converter, &rank, jpp_py_u32_converter,
                        &device, &view)) {
    return NULL;
  }
  bool ok = jpp_py_value_check_shard(array, rank, device);
  if (ok) {
    jpp_py_wait_t wait;
    jpp_py_wait_begin(&wait);
    jpp_status_t* status =
        jpp_array_read(array, rank, device, view.buf, (size_t)view.len, &wait.interrupt);
    ok = jpp_py_wait_end(&wait, status);
  }
  PyBuffer_Release(&view);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyObject* value_delete(PyObject* object, PyObject* unused) {
  (void)unused;
  jpp_array_delete(((jpp_py_value_t*)object)->array);
  Py_RETURN_NONE;
}

static PyObject* value_wait(PyObject* object, PyObject* unused) {
  (void)unused;
  jpp_py_wait_t wait;
  jpp_py_wait_begin(&wait);
  jpp_status_t* status =
      jpp_array_await(((jpp_py_value_t*)object)->array, &wait.interrupt);
  if (!jpp_py_wait_end(&wait, status)) return NULL;
  Py_RETURN_NONE;
}

static PyObject* value_is_ready(PyObject* object, PyObject* unused) {
  (void)unused;
  bool ready = false;
  if (!jpp_py_check(jpp_array_is_ready(((jpp_py_value_t*)object)->array, &ready))) {
    return NULL;
  }
  return PyBool_FromLong(ready);
}

static PyObject* value_get_ranks(PyObject* object, void* unused) {
  (void)unused;
  const jpp_array_layout_t* layout = jpp_array_layout(((jpp_py_value_t*)object)->array);
  return jpp_py_from_u32s(layout->ranks, layout->num_ranks);
}

static PyObject* value_get_deleted(PyObject* object, void* unused) {
  (void)unused;
  return PyBool_FromLong(jpp_array_is_deleted(((jpp_py_value_t*)object)->array));
}

static PyObject* value_get_deletion_reason(PyObject* object, void* unused) {
  (void)unused;
  return PyUnicode_FromString(
      jpp_array_deletion_reason(((jpp_py_value_t*)object)->array));
}

static PyMethodDef kMethods[] = {
    {"put", value_put, METH_VARARGS | METH_STATIC,
     "put(client, ranks, devices_per_rank, devices, shards, dtype, memory, /)\n--\n\n"
     "Uploads a list of shards; devices and shards are [rank][device], flat."},
    {"elsewhere", value_elsewhere, METH_NOARGS | METH_STATIC,
     "elsewhere()\n--\n\nThe state of an array that other processes hold."},
    {"set_origin", value_set_origin, METH_O,
     "set_origin($self, origin, /)\n--\n\n"
     "Makes this a copy of `origin`: donating the copy donates both."},
    {"read", value_read, METH_VARARGS,
     "read($self, rank, device, buffer, /)\n--\n\n"
     "Waits, and copies a shard into a writable buffer, dense with the last dimension "
     "fastest."},
    {"lend", jpp_py_value_lend, METH_VARARGS,
     "lend($self, rank, device, device_type, device_id, flat, /)\n--\n\nWaits, and "
     "returns a DLPack capsule of a shard in place, on the given DLPack device; `flat`: "
     "of its bytes. None if the memory cannot be shared."},
    {"delete", value_delete, METH_NOARGS,
     "delete($self, /)\n--\n\nFrees the device memory now."},
    {"wait", value_wait, METH_NOARGS,
     "wait($self, /)\n--\n\nWaits until the contents exist."},
    {"is_ready", value_is_ready, METH_NOARGS,
     "is_ready($self, /)\n--\n\nWhether wait() would return at once."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef kGetSet[] = {
    {"ranks", value_get_ranks, NULL, "The ranks that hold the array.", NULL},
    {"deleted", value_get_deleted, NULL, "Deleted, or donated to a step.", NULL},
    {"deletion_reason", value_get_deletion_reason, NULL,
     "Why a deleted array cannot be used, in words.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc, "An array on the devices of some ranks."},
    {Py_tp_dealloc, (void*)value_dealloc},
    {Py_tp_methods, kMethods},
    {Py_tp_getset, kGetSet},
    {0, NULL},
};
PyType_Spec jpp_py_value_spec = {"jaxpp._core.Value", sizeof(jpp_py_value_t), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 kSlots};
