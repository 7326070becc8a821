// jaxpp._core.Wanted and Given: what a plan requires of an argument, what a program
// provides for it, and the library's decision about both (jaxpp/array_argument.h).
//
// Blocks are passed as buffers of int64, [count][ndim][2], and are copied.
#include <string.h>

#include "python/core.h"

typedef struct wanted_object {
  PyObject ob_base;
  jpp_wanted_t wanted;
  jpp_py_utf8_t name;
} wanted_object_t;

typedef struct given_object {
  PyObject ob_base;
  jpp_given_t given;
  jpp_given_block_t* blocks;  // [given.num_blocks]
  int64_t* bounds;            // [given.num_blocks][ndim][2]
} given_object_t;

// Copies a buffer of `count` int64 into a jpp_alloc()ed array. Returns false if it
// raised.
static bool read_numbers(PyObject* buffer, const char* what, uint64_t count,
                         int64_t** out_numbers) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer, &view, PyBUF_C_CONTIGUOUS) < 0) return false;
  bool ok = jpp_py_check_count(what, count * sizeof(int64_t), (uint64_t)view.len) &&
            jpp_py_check(JPP_ALLOC_ARRAY((size_t)count, out_numbers));
  if (ok && count) memcpy(*out_numbers, view.buf, (size_t)view.len);
  PyBuffer_Release(&view);
  return ok;
}

static bool read_dtype(const char* name, Py_ssize_t length, jpp_dtype_t* out_dtype) {
  *out_dtype = jpp_dtype_parse(name, (uint32_t)length);
  if (*out_dtype != JPP_DTYPE_INVALID) return true;
  PyErr_Format(PyExc_ValueError, "expected a dtype, found '%s'", name);
  return false;
}

static bool check_ndim(uint32_t ndim) {
  if (ndim <= JPP_BUFFER_MAX_RANK) return true;
  return jpp_py_check(jpp_status_make(JPP_UNSUPPORTED,
                                      "an array has %u dimensions; at most %d", ndim,
                                      JPP_BUFFER_MAX_RANK));
}

// --- Wanted ---------------------------------------------------------------------------

static bool read_wanted(wanted_object_t* self, PyObject* args) {
  PyObject *ranks = NULL, *is_local = NULL, *blocks = NULL;
  const char* dtype = NULL;
  Py_ssize_t dtype_length = 0;
  int donated = 0, can_move = 0;
  jpp_wanted_t* w = &self->wanted;
  w->struct_size = sizeof(*w);
  if (!PyArg_ParseTuple(args, "O&s#O&O&OOO&OppO&O&:Wanted", jpp_py_str_converter,
                        &self->name, &dtype, &dtype_length, jpp_py_u32_converter,
                        &w->ndim, jpp_py_u64_converter, &w->devices, &ranks, &is_local,
                        jpp_py_u32_converter, &w->devices_per_rank, &blocks, &donated,
                        &can_move, jpp_py_u64_converter, &w->least_borrowed,
                        jpp_py_memory_converter, &w->memory)) {
    return false;
  }
  w->name = self->name.text;
  w->donated = donated;
  w->can_move = can_move;
  uint32_t *found = NULL, *flags = NULL, num_flags = 0;
  bool* local = NULL;
  bool ok = check_ndim(w->ndim) && read_dtype(dtype, dtype_length, &w->dtype) &&
            jpp_py_to_u32s(ranks, &found, &w->num_ranks);
  w->ranks = found;
  ok = ok && jpp_py_to_u32s(is_local, &flags, &num_flags) &&
       jpp_py_check_count("flags of ranks", w->num_ranks, num_flags) &&
       jpp_py_check(JPP_ALLOC_ARRAY(num_flags, &local));
  w->is_local = local;
  for (uint32_t r = 0; ok && r < num_flags; ++r) local[r] = flags[r] != 0;
  jpp_free(flags);
  int64_t* numbers = NULL;
  ok = ok && read_numbers(blocks, "bytes of blocks",
                          (uint64_t)w->devices_per_rank * w->ndim * 2, &numbers);
  w->blocks = numbers;
  return ok;
}

static PyObject* wanted_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  wanted_object_t* self = jpp_py_new(type);
  if (!self || read_wanted(self, args)) return (PyObject*)self;
  Py_DECREF(self);
  return NULL;
}

static void wanted_dealloc(PyObject* object) {
  wanted_object_t* self = (wanted_object_t*)object;
  jpp_py_utf8_release(&self->name);
  jpp_free((void*)self->wanted.ranks);
  jpp_free((void*)self->wanted.is_local);
  jpp_free((void*)self->wanted.blocks);
  jpp_py_free(object);
}

static PyObject* wrap_decision(const jpp_decision_t* decision) {
  static const char* const kActions[] = {[JPP_ACTION_USE] = "use",
                                         [JPP_ACTION_BORROW] = "borrow",
                                         [JPP_ACTION_UPLOAD] = "upload"};
  return JPP_PY_RECORD(JPP_PY_DECISION,
                       PyUnicode_InternFromString(kActions[decision->action]),
                       PyLong_FromUnsignedLong(decision->part),
                       jpp_py_from_u32s(decision->ranks, decision->num_ranks),
                       jpp_py_from_u32s(decision->blocks, decision->num_blocks));
}

static jpp_given_t describe(PyObject* given, const jpp_py_utf8_t* deletion_reason,
                            int copies) {
  jpp_given_t described = ((given_object_t*)given)->given;
  if (copies) described.home = JPP_HOME_HOST;
  described.deletion_reason = deletion_reason->text;
  return described;
}

static PyObject* wanted_decide(PyObject* object, PyObject* args) {
  PyObject* given = NULL;
  jpp_py_utf8_t reason = {0};
  int copies = 0;
  if (!PyArg_ParseTuple(args, "O!O&p", jpp_py_types.given, &given, jpp_py_utf8_converter,
                        &reason, &copies)) {
    return NULL;
  }
  const jpp_given_t from = describe(given, &reason, copies);
  jpp_decision_t decision;
  jpp_status_t* status =
      jpp_argument_decide(&((wanted_object_t*)object)->wanted, &from, &decision);
  jpp_py_utf8_release(&reason);
  if (!jpp_py_check(status)) return NULL;
  PyObject* record = wrap_decision(&decision);
  jpp_decision_free(&decision);
  return record;
}

// --- Host blocks ----------------------------------------------------------------------

// The arguments of gather(): arrays, and the blocks that they hold.
typedef struct host_blocks {
  uint32_t count;
  jpp_host_block_t* blocks;  // [count]
  Py_buffer* views;          // [count]; the first `viewed` are held
  uint32_t viewed;
  int64_t* bounds;   // [count][ndim][2]
  int64_t* strides;  // [count][ndim]
} host_blocks_t;

static bool check_extents(const Py_buffer* view, const int64_t* bounds, uint32_t ndim) {
  bool ok = jpp_py_check_count("dimensions of a block", ndim, (uint64_t)view->ndim);
  for (uint32_t i = 0; ok && i < ndim; ++i) {
    int64_t extent = bounds[2 * i + 1] - bounds[2 * i];
    ok = jpp_py_check_count("elements along an axis of a block", (uint64_t)extent,
                            (uint64_t)view->shape[i]);
  }
  return ok;
}

// Fills a block whose bounds are set from an array. `view` and `strides`, [ndim], must
// live as long as the block; if this succeeds, the caller releases `view`.
static bool read_array(const jpp_wanted_t* wanted, PyObject* array, Py_buffer* view,
                       int64_t* strides, jpp_host_block_t* block) {
  if (PyObject_GetBuffer(array, view, PyBUF_STRIDED_RO) < 0) return false;
  bool ok = check_extents(view, block->bounds, wanted->ndim);
  if (ok && view->itemsize * 8 != jpp_dtype_bits(wanted->dtype)) {
    ok =
        jpp_py_check(jpp_status_make(JPP_INTERNAL_ERROR, "items of %d bytes given as %s",
                                     (int)view->itemsize, jpp_dtype_name(wanted->dtype)));
  }
  if (!ok) {
    PyBuffer_Release(view);
    return false;
  }
  for (uint32_t i = 0; i < wanted->ndim; ++i) strides[i] = view->strides[i];
  block->data = view->buf;
  block->byte_strides = strides;
  return true;
}

static bool read_blocks(const jpp_wanted_t* wanted, PyObject* list, PyObject* bounds,
                        host_blocks_t* out_blocks) {
  *out_blocks = (host_blocks_t){.count = (uint32_t)PyList_Size(list)};
  host_blocks_t* b = out_blocks;
  bool ok = read_numbers(bounds, "bytes of blocks", (uint64_t)b->count * wanted->ndim * 2,
                         &b->bounds) &&
            jpp_py_check(JPP_ALLOC_ARRAY(b->count, &b->blocks)) &&
            jpp_py_check(JPP_ALLOC_ARRAY(b->count, &b->views)) &&
            jpp_py_check(JPP_ALLOC_ARRAY((size_t)b->count * wanted->ndim, &b->strides));
  for (uint32_t i = 0; ok && i < b->count; ++i) {
    PyObject* array = Py_XNewRef(PyList_GetItem(list, i));
    b->blocks[i].bounds = b->bounds + (size_t)i * wanted->ndim * 2;
    ok = array && read_array(wanted, array, &b->views[i],
                             b->strides + (size_t)i * wanted->ndim, &b->blocks[i]);
    Py_XDECREF(array);
    b->viewed += ok;
  }
  return ok;
}

static void free_blocks(host_blocks_t* blocks) {
  for (uint32_t i = 0; i < blocks->viewed; ++i) PyBuffer_Release(&blocks->views[i]);
  jpp_free(blocks->views);
  jpp_free(blocks->blocks);
  jpp_free(blocks->bounds);
  jpp_free(blocks->strides);
}

static PyObject* wanted_gather(PyObject* object, PyObject* args) {
  const jpp_wanted_t* wanted = &((wanted_object_t*)object)->wanted;
  PyObject *list = NULL, *bounds = NULL;
  uint32_t device = 0;
  Py_buffer into;
  if (!PyArg_ParseTuple(args, "O&O!Ow*", jpp_py_u32_converter, &device, &PyList_Type,
                        &list, &bounds, &into)) {
    return NULL;
  }
  host_blocks_t blocks;
  bool ok = read_blocks(wanted, list, bounds, &blocks) &&
            jpp_py_check(jpp_argument_gather(wanted, device, blocks.blocks, blocks.count,
                                             into.buf, (size_t)into.len));
  free_blocks(&blocks);
  PyBuffer_Release(&into);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

// --- Taking ---------------------------------------------------------------------------

// A Python Source, whose methods the library calls without the GIL.
typedef struct py_source {
  jpp_py_wait_t wait;
  const jpp_wanted_t* wanted;
  PyObject* source;   // borrowed
  const char* dtype;  // the wanted dtype, by numpy's name
  PyObject* used;     // held: the Value that is used unchanged; or NULL
  uint32_t* devices;  // [num_devices]
  uint32_t num_devices;
  Py_buffer* views;  // [given.num_blocks]; the first `viewed` are held
  uint32_t viewed;
  int64_t* strides;  // [given.num_blocks][ndim]
} py_source_t;

static py_source_t* enter_python(void* user) {
  py_source_t* self = user;
  PyEval_RestoreThread(self->wait.state);
  return self;
}

static jpp_status_t* leave_python(py_source_t* self, jpp_status_t* status) {
  self->wait.raised = PyErr_Occurred() != NULL;
  if (self->wait.raised && !status) status = jpp_status_make(JPP_CANCELLED, "it raised");
  self->wait.state = PyEval_SaveThread();
  return status;
}

static jpp_status_t* use_value(void* user, uint32_t part, jpp_array_t** out_array) {
  py_source_t* self = enter_python(user);
  self->used = PyObject_CallMethod(self->source, "value", "I", part);
  if (self->used && !Py_IS_TYPE(self->used, jpp_py_types.value)) {
    PyErr_SetString(PyExc_TypeError, "expected a Value");
  } else if (self->used) {
    *out_array = ((jpp_py_value_t*)self->used)->array;
  }
  return leave_python(self, NULL);
}

static jpp_status_t* lend_capsules(void* user, const uint32_t* blocks,
                                   uint32_t num_blocks, jpp_foreign_memory_t* out_memory,
                                   void (**out_release)(void* owner), void** out_owner) {
  py_source_t* self = enter_python(user);
  jpp_status_t* status = NULL;
  PyObject* list = PyObject_CallMethod(self->source, "capsules", "N",
                                       jpp_py_from_u32s(blocks, num_blocks));
  if (list == Py_None) {
    status = jpp_status_make(JPP_UNSUPPORTED, "expected arrays with DLPack exports");
  } else if (list) {
    PyObject* capsules = PyList_AsTuple(list);
    if (capsules &&
        jpp_py_check_count("capsules", num_blocks, (uint64_t)PyTuple_Size(capsules))) {
      status = jpp_py_capsules_lend(capsules, self->wanted->dtype, num_blocks, out_memory,
                                    out_release, out_owner);
    }
    Py_XDECREF(capsules);
  }
  Py_XDECREF(list);
  return leave_python(self, status);
}

static jpp_status_t* read_host(void* user, uint32_t block, jpp_host_block_t* out_block) {
  py_source_t* self = enter_python(user);
  PyObject* array = PyObject_CallMethod(self->source, "host", "Is", block, self->dtype);
  uint32_t k = self->viewed;
  int64_t* strides = self->strides + (size_t)k * self->wanted->ndim;
  if (array && read_array(self->wanted, array, &self->views[k], strides, out_block)) {
    ++self->viewed;
  }
  Py_XDECREF(array);
  return leave_python(self, NULL);
}

static PyObject* take(py_source_t* self, PyObject* client, const jpp_given_t* given) {
  const jpp_source_t source = {.struct_size = sizeof(source),
                               .given = given,
                               .user = self,
                               .part = use_value,
                               .lend = lend_capsules,
                               .read = read_host};
  if (!jpp_py_check(JPP_ALLOC_ARRAY(given->num_blocks, &self->views)) ||
      !jpp_py_check(JPP_ALLOC_ARRAY((size_t)given->num_blocks * self->wanted->ndim,
                                    &self->strides))) {
    return NULL;
  }
  jpp_array_t* array = NULL;
  jpp_py_wait_begin(&self->wait);
  jpp_status_t* status =
      jpp_argument_take(self->wanted, &source, ((jpp_py_client_t*)client)->client,
                        self->devices, self->num_devices, &array);
  if (!jpp_py_wait_end(&self->wait, status)) return NULL;
  if (!self->used) return jpp_py_value_wrap(client, array);
  jpp_array_release(array);
  return Py_NewRef(self->used);
}

static PyObject* wanted_take(PyObject* object, PyObject* args) {
  PyObject *client = NULL, *devices = NULL, *given = NULL, *value = NULL;
  py_source_t self = {.wanted = &((wanted_object_t*)object)->wanted};
  jpp_py_utf8_t reason = {0};
  int copies = 0;
  if (!PyArg_ParseTuple(args, "O!OOO!O&sp", jpp_py_types.client, &client, &devices,
                        &self.source, jpp_py_types.given, &given, jpp_py_utf8_converter,
                        &reason, &self.dtype, &copies)) {
    return NULL;
  }
  const jpp_given_t from = describe(given, &reason, copies);
  if (jpp_py_to_u32s(devices, &self.devices, &self.num_devices)) {
    value = take(&self, client, &from);
  }
  for (uint32_t i = 0; i < self.viewed; ++i) PyBuffer_Release(&self.views[i]);
  Py_XDECREF(self.used);
  jpp_py_utf8_release(&reason);
  jpp_free(self.views);
  jpp_free(self.strides);
  jpp_free(self.devices);
  return value;
}

static PyObject* make_extent(const void* context, uint64_t axis) {
  const jpp_wanted_t* wanted = context;
  return PyLong_FromLongLong(wanted->blocks[2 * axis + 1] - wanted->blocks[2 * axis]);
}

static PyObject* wanted_get_shape(PyObject* object, void* unused) {
  (void)unused;
  const jpp_wanted_t* wanted = &((wanted_object_t*)object)->wanted;
  return jpp_py_make_list(wanted->ndim, make_extent, wanted);
}

static PyGetSetDef kWantedGetSet[] = {
    {"shape", wanted_get_shape, NULL, "The extents of a device's block.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef kWantedMethods[] = {
    {"decide", wanted_decide, METH_VARARGS,
     "decide($self, given, deletion_reason, copies, /)\n--\n\n"
     "A Decision about a Given. `deletion_reason`: None for an array that was not "
     "deleted. "
     "`copies`: upload it even if it could be used or borrowed."},
    {"take", wanted_take, METH_VARARGS,
     "take($self, client, devices, source, given, deletion_reason, dtype, copies, /)\n"
     "--\n\n"
     "Decides as decide() does, and makes the argument's Value. `devices` are "
     "[rank][device], flat, of every rank. The source has the methods value(part), "
     "capsules(blocks) and host(block, dtype)."},
    {"gather", wanted_gather, METH_VARARGS,
     "gather($self, device, arrays, bounds, buffer, /)\n--\n\n"
     "Copies a device's block into a buffer, dense with the last dimension fastest."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kWantedSlots[] = {
    {Py_tp_doc,
     "Wanted(name, dtype, ndim, devices, ranks, is_local, devices_per_rank, blocks, "
     "donated, can_move, least_borrowed, memory, /)\n--\n\nWhat a plan requires of an "
     "argument: jpp_wanted_t, with `blocks` as a buffer of int64."},
    {Py_tp_new, (void*)wanted_new},
    {Py_tp_dealloc, (void*)wanted_dealloc},
    {Py_tp_methods, kWantedMethods},
    {Py_tp_getset, kWantedGetSet},
    {0, NULL},
};
PyType_Spec jpp_py_wanted_spec = {"jaxpp._core.Wanted", sizeof(wanted_object_t), 0,
                                  Py_TPFLAGS_DEFAULT, kWantedSlots};

// --- Given ----------------------------------------------------------------------------

static bool read_home(const char* home, jpp_home_t* out_home) {
  static const char* const kHomes[] = {[JPP_HOME_CLIENT] = "client",
                                       [JPP_HOME_FOREIGN] = "foreign",
                                       [JPP_HOME_HOST] = "host"};
  for (uint32_t i = 0; i < sizeof(kHomes) / sizeof(*kHomes); ++i) {
    if (strcmp(home, kHomes[i]) != 0) continue;
    *out_home = (jpp_home_t)i;
    return true;
  }
  PyErr_Format(PyExc_ValueError, "expected a home, found '%s'", home);
  return false;
}

enum { kPart, kRank, kDevice, kIsLocal, kPlaceFields };

static bool fill_blocks(given_object_t* self, const int64_t* places) {
  jpp_given_t* g = &self->given;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(g->num_blocks, &self->blocks))) return false;
  for (uint32_t b = 0; b < g->num_blocks; ++b) {
    const int64_t* place = places + (size_t)b * kPlaceFields;
    self->blocks[b] =
        (jpp_given_block_t){.part = (uint32_t)place[kPart],
                            .rank = (uint32_t)place[kRank],
                            .device = (uint32_t)place[kDevice],
                            .is_local = place[kIsLocal] != 0,
                            .bounds = self->bounds + (size_t)b * g->ndim * 2};
  }
  g->blocks = self->blocks;
  return true;
}

static bool read_given(given_object_t* self, PyObject* args) {
  PyObject *places = NULL, *bounds = NULL;
  const char* home = NULL;
  jpp_py_utf8_t dtype = {0};
  jpp_given_t* g = &self->given;
  g->struct_size = sizeof(*g);
  if (!PyArg_ParseTuple(args, "sO&O&O&O&O&OO:Given", &home, jpp_py_str_converter, &dtype,
                        jpp_py_u32_converter, &g->ndim, jpp_py_u64_converter, &g->devices,
                        jpp_py_u64_converter, &g->bytes, jpp_py_u32_converter,
                        &g->num_blocks, &places, &bounds)) {
    return false;
  }
  // A type that no step has, such as object, is converted if possible.
  g->dtype = jpp_dtype_parse(dtype.text, (uint32_t)strlen(dtype.text));
  jpp_py_utf8_release(&dtype);
  int64_t* numbers = NULL;
  bool ok = check_ndim(g->ndim) && read_home(home, &g->home) &&
            read_numbers(bounds, "bytes of blocks", (uint64_t)g->num_blocks * g->ndim * 2,
                         &self->bounds) &&
            read_numbers(places, "bytes of places",
                         (uint64_t)g->num_blocks * kPlaceFields, &numbers) &&
            fill_blocks(self, numbers);
  jpp_free(numbers);
  return ok;
}

static PyObject* given_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  given_object_t* self = jpp_py_new(type);
  if (!self || read_given(self, args)) return (PyObject*)self;
  Py_DECREF(self);
  return NULL;
}

static void given_dealloc(PyObject* object) {
  given_object_t* self = (given_object_t*)object;
  jpp_free(self->blocks);
  jpp_free(self->bounds);
  jpp_py_free(object);
}

static PyType_Slot kGivenSlots[] = {
    {Py_tp_doc,
     "Given(home, dtype, ndim, devices, bytes, num_blocks, places, bounds, /)\n--\n\n"
     "What a program provides for an argument: jpp_given_t. `places` is a buffer of "
     "int64, "
     "[num_blocks][4]: part, rank (ANY_RANK, NO_RANK), device, whether this process can "
     "read it."},
    {Py_tp_new, (void*)given_new},
    {Py_tp_dealloc, (void*)given_dealloc},
    {0, NULL},
};
PyType_Spec jpp_py_given_spec = {"jaxpp._core.Given", sizeof(given_object_t), 0,
                                 Py_TPFLAGS_DEFAULT, kGivenSlots};
