// jaxpp._core.Value: the shards of one array on the devices of some ranks. A handle: the
// buffers belong to it until a step takes them as a donation.
//
// Steps make these by the hundred, so they stay out of garbage collection: a Value refers
// to its client and to the Value that it is a copy of, and these references never close a
// cycle (set_origin).
#include "base/vec.h"
#include "python/core.h"

static jpp_client_t* client_of(const jpp_py_value_t* value) {
  return ((jpp_py_client_t*)value->client)->client;
}

jpp_py_value_t* jpp_py_value_new(PyObject* client, uint32_t num_ranks,
                                 uint32_t devices_per_rank) {
  jpp_py_value_t* self = jpp_py_new(jpp_py_types.value);
  if (!self) return NULL;
  self->client = Py_NewRef(client);
  self->num_ranks = num_ranks;
  self->devices_per_rank = devices_per_rank;
  size_t buffers = (size_t)num_ranks * devices_per_rank;
  if (jpp_py_check(JPP_ALLOC_ARRAY(num_ranks, &self->ranks)) &&
      jpp_py_check(JPP_ALLOC_ARRAY(buffers, &self->buffers))) {
    return self;
  }
  Py_DECREF(self);
  return NULL;
}

jpp_buffer_t** jpp_py_value_at(const jpp_py_value_t* value, uint32_t rank) {
  for (uint32_t i = 0; i < value->num_ranks; ++i) {
    if (value->ranks[i] == rank) return value->buffers + i * value->devices_per_rank;
  }
  return NULL;
}

void jpp_py_value_drop_buffers(jpp_py_value_t* self) {
  size_t count = (size_t)self->num_ranks * self->devices_per_rank;
  for (size_t i = 0; self->buffers && i < count; ++i) {
    jpp_client_buffer_destroy(client_of(self), self->buffers[i]);
    self->buffers[i] = NULL;
  }
}

void jpp_py_value_pin(jpp_py_value_t* value) { ++value->pins; }

void jpp_py_value_unpin(jpp_py_value_t* value) {
  if (--value->pins == 0 && value->deleted) jpp_py_value_drop_buffers(value);
}

const char* jpp_py_value_fate(const jpp_py_value_t* value) {
  if (value->lost) {
    return "was donated to a step that failed or was interrupted, and is gone; go back "
           "to "
           "a checkpoint, or to a copy made before the step";
  }
  return "was deleted or donated to a step; use what the step returned in its place";
}

static void value_dealloc(PyObject* object) {
  jpp_py_value_t* self = (jpp_py_value_t*)object;
  jpp_py_value_drop_buffers(self);
  jpp_free(self->buffers);
  jpp_free(self->ranks);
  Py_XDECREF(self->origin);
  Py_XDECREF(self->client);
  jpp_py_free(object);
}

static bool check_alive(const jpp_py_value_t* self) {
  if (!self->deleted) return true;
  jpp_py_raise(
      jpp_status_make(JPP_DONATED_ERROR, "the array %s", jpp_py_value_fate(self)));
  return false;
}

// --- Upload ---------------------------------------------------------------------------

static bool upload_shard(PyObject* client, PyObject* data, jpp_dtype_t dtype,
                         uint32_t device, jpp_buffer_t** out_buffer) {
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
    jpp_host_array_t array = {.data = view.buf,
                              .dtype = dtype,
                              .rank = (uint32_t)view.ndim,
                              .dims = dims,
                              .byte_strides = strides};
    jpp_client_t* handle = ((jpp_py_client_t*)client)->client;
    Py_BEGIN_ALLOW_THREADS
      status = jpp_client_buffer_from_host(handle, &array, device, out_buffer);
    Py_END_ALLOW_THREADS
  }
  PyBuffer_Release(&view);
  return jpp_py_check(status);
}

static bool upload_all(jpp_py_value_t* self, PyObject* shards, jpp_dtype_t dtype,
                       const uint32_t* devices) {
  uint32_t count = self->num_ranks * self->devices_per_rank;
  for (uint32_t i = 0; i < count; ++i) {
    PyObject* shard = Py_XNewRef(PyList_GetItem(shards, i));
    bool ok =
        shard && upload_shard(self->client, shard, dtype, devices[i], &self->buffers[i]);
    Py_XDECREF(shard);
    if (!ok) return false;
  }
  return true;
}

// Devices and shards are [rank][device], flat. A value may lie on no rank at all.
static PyObject* value_put(PyObject* type, PyObject* args) {
  (void)type;
  PyObject *client = NULL, *ranks = NULL, *devices = NULL, *shards = NULL;
  const char* dtype_name = NULL;
  Py_ssize_t dtype_length = 0;
  uint32_t per_rank = 0;
  if (!PyArg_ParseTuple(args, "O!OO&OO!s#", jpp_py_types.client, &client, &ranks,
                        jpp_py_u32_converter, &per_rank, &devices, &PyList_Type, &shards,
                        &dtype_name, &dtype_length)) {
    return NULL;
  }
  uint32_t *rank_ids = NULL, *device_ids = NULL, num_ranks = 0, num_devices = 0;
  jpp_py_value_t* self = NULL;
  jpp_dtype_t dtype = jpp_dtype_parse(dtype_name, (uint32_t)dtype_length);
  bool ok = jpp_py_to_u32s(ranks, &rank_ids, &num_ranks) &&
            jpp_py_to_u32s(devices, &device_ids, &num_devices);
  uint64_t count = (uint64_t)num_ranks * per_rank;
  ok = ok && jpp_py_check_count("devices of the ranks", count, num_devices) &&
       jpp_py_check_count("shards", count, (uint64_t)PyList_Size(shards));
  if (ok) self = jpp_py_value_new(client, num_ranks, per_rank);
  ok = self != NULL;
  for (uint32_t i = 0; ok && i < num_ranks; ++i) self->ranks[i] = rank_ids[i];
  ok = ok && upload_all(self, shards, dtype, device_ids);
  jpp_free(rank_ids);
  jpp_free(device_ids);
  if (!ok) Py_CLEAR(self);
  return (PyObject*)self;
}

// --- Moves between ranks --------------------------------------------------------------

// A step that takes `copy` as a donation takes what it is a copy of. Origins make chains
// without an end that is met twice: what would close one stays without.
static void set_origin(jpp_py_value_t* copy, jpp_py_value_t* origin) {
  jpp_py_value_t* root = origin;
  while (root->origin && root != copy) root = (jpp_py_value_t*)root->origin;
  if (root == copy || copy->origin) return;
  copy->origin = Py_NewRef((PyObject*)root);
}

static bool copy_rank(jpp_py_value_t* to, uint32_t index, jpp_buffer_t** from,
                      const uint32_t* devices) {
  uint32_t per_rank = to->devices_per_rank;
  for (uint32_t d = 0; d < per_rank; ++d) {
    uint32_t at = index * per_rank + d;
    if (!jpp_py_check(jpp_client_buffer_copy_to_device(client_of(to), from[d],
                                                       devices[at], &to->buffers[at]))) {
      return false;
    }
  }
  return true;
}

static PyObject* value_place(PyObject* object, PyObject* args) {
  jpp_py_value_t* self = (jpp_py_value_t*)object;
  PyObject *ranks = NULL, *devices = NULL;
  if (!PyArg_ParseTuple(args, "OO", &ranks, &devices)) return NULL;
  if (!check_alive(self)) return NULL;
  uint32_t *rank_ids = NULL, *device_ids = NULL, num_ranks = 0, num_devices = 0;
  jpp_py_value_t* placed = NULL;
  bool ok = jpp_py_to_u32s(ranks, &rank_ids, &num_ranks) &&
            jpp_py_to_u32s(devices, &device_ids, &num_devices) &&
            jpp_py_check_count("devices of the ranks",
                               (uint64_t)num_ranks * self->devices_per_rank, num_devices);
  if (ok && num_ranks && !self->num_ranks) {
    PyErr_SetString(PyExc_ValueError, "the array lies on no rank from which to copy it");
    ok = false;
  }
  if (ok) placed = jpp_py_value_new(self->client, num_ranks, self->devices_per_rank);
  ok = placed != NULL;
  for (uint32_t i = 0; ok && i < num_ranks; ++i) {
    jpp_buffer_t** from = jpp_py_value_at(self, rank_ids[i]);
    placed->ranks[i] = rank_ids[i];
    ok = copy_rank(placed, i, from ? from : self->buffers, device_ids);
  }
  jpp_free(rank_ids);
  jpp_free(device_ids);
  if (!ok) Py_CLEAR(placed);
  if (placed) set_origin(placed, self);
  return (PyObject*)placed;
}

static PyObject* value_stands_for(PyObject* object, PyObject* origin) {
  if (!Py_IS_TYPE(origin, jpp_py_types.value)) {
    return PyErr_Format(PyExc_TypeError, "expected a Value");
  }
  set_origin((jpp_py_value_t*)object, (jpp_py_value_t*)origin);
  Py_RETURN_NONE;
}

// --- Looking --------------------------------------------------------------------------

static PyObject* value_read(PyObject* object, PyObject* args) {
  jpp_py_value_t* self = (jpp_py_value_t*)object;
  uint32_t rank = 0, device = 0;
  Py_buffer view;
  if (!PyArg_ParseTuple(args, "O&O&w*", jpp_py_u32_converter, &rank, jpp_py_u32_converter,
                        &device, &view)) {
    return NULL;
  }
  jpp_buffer_t** buffers = check_alive(self) ? jpp_py_value_at(self, rank) : NULL;
  bool ok = buffers && device < self->devices_per_rank;
  if (ok) {
    jpp_client_t* client = client_of(self);
    jpp_buffer_t* buffer = buffers[device];
    jpp_status_t* status = NULL;
    jpp_py_value_pin(self);
    Py_BEGIN_ALLOW_THREADS
      status = jpp_client_buffer_read(client, buffer, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    jpp_py_value_unpin(self);
    ok = jpp_py_check(status);
  } else if (!PyErr_Occurred()) {
    PyErr_Format(PyExc_IndexError, "no shard %u on rank %u", device, rank);
  }
  PyBuffer_Release(&view);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyObject* value_delete(PyObject* object, PyObject* unused) {
  (void)unused;
  jpp_py_value_t* self = (jpp_py_value_t*)object;
  self->deleted = true;
  jpp_py_value_pin(self);
  jpp_py_value_unpin(self);
  Py_RETURN_NONE;
}

static jpp_status_t* await_buffer(jpp_client_t* client, jpp_buffer_t* buffer) {
  jpp_event_t* event = NULL;
  JPP_RETURN_IF_ERROR(jpp_client_buffer_ready_event(client, buffer, &event));
  jpp_status_t* status = jpp_client_event_await(client, event);
  jpp_client_event_destroy(client, event);
  return status;
}

static PyObject* value_wait(PyObject* object, PyObject* unused) {
  (void)unused;
  jpp_py_value_t* self = (jpp_py_value_t*)object;
  if (!check_alive(self)) return NULL;
  uint32_t count = self->num_ranks * self->devices_per_rank;
  jpp_status_t* status = NULL;
  jpp_py_value_pin(self);
  Py_BEGIN_ALLOW_THREADS
    for (uint32_t i = 0; i < count && !status; ++i) {
      status = await_buffer(client_of(self), self->buffers[i]);
    }
  Py_END_ALLOW_THREADS
  jpp_py_value_unpin(self);
  if (!jpp_py_check(status)) return NULL;
  Py_RETURN_NONE;
}

static PyObject* value_get_ranks(PyObject* object, void* unused) {
  (void)unused;
  jpp_py_value_t* self = (jpp_py_value_t*)object;
  return jpp_py_from_u32s(self->ranks, self->num_ranks);
}

static PyObject* value_get_deleted(PyObject* object, void* unused) {
  (void)unused;
  return PyBool_FromLong(((jpp_py_value_t*)object)->deleted);
}

static PyObject* value_get_fate(PyObject* object, void* unused) {
  (void)unused;
  return PyUnicode_FromString(jpp_py_value_fate((jpp_py_value_t*)object));
}

static PyMethodDef kMethods[] = {
    {"put", value_put, METH_VARARGS | METH_STATIC,
     "put(client, ranks, devices_per_rank, devices, shards, dtype, /)\n--\n\n"
     "Uploads a list of shards; devices and shards are [rank][device], flat."},
    {"place", value_place, METH_VARARGS,
     "place($self, ranks, devices, /)\n--\n\nThe same array on these ranks."},
    {"stands_for", value_stands_for, METH_O,
     "stands_for($self, origin, /)\n--\n\n"
     "Donating this one donates `origin`, of which it is a copy."},
    {"read", value_read, METH_VARARGS,
     "read($self, rank, device, buffer, /)\n--\n\n"
     "Copies a shard into a writable buffer, dense, last dimension fastest."},
    {"delete", value_delete, METH_NOARGS,
     "delete($self, /)\n--\n\nFrees the device memory now."},
    {"wait", value_wait, METH_NOARGS,
     "wait($self, /)\n--\n\nBlocks until the contents are there."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef kGetSet[] = {
    {"ranks", value_get_ranks, NULL, "The ranks that hold the array.", NULL},
    {"deleted", value_get_deleted, NULL, "Deleted, or donated to a step.", NULL},
    {"fate", value_get_fate, NULL, "Why a deleted one can not be used, in words.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc, "The shards of one array on the devices of some ranks."},
    {Py_tp_dealloc, (void*)value_dealloc},
    {Py_tp_methods, kMethods},
    {Py_tp_getset, kGetSet},
    {0, NULL},
};
PyType_Spec jpp_py_value_spec = {"jaxpp._core.Value", sizeof(jpp_py_value_t), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 kSlots};
