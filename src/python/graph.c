// jaxpp._core.Graph: the builder of jaxpp/graph.h, and the graph once it is finished.
#include "python/core.h"

static PyObject* graph_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  jpp_py_utf8_t name = {0};
  uint32_t ranks = 0;
  if (!PyArg_ParseTuple(args, "O&O&:Graph", jpp_py_utf8_converter, &name,
                        jpp_py_u32_converter, &ranks)) {
    return NULL;
  }
  jpp_py_graph_t* self = jpp_py_new(type);
  if (self && !jpp_py_check(jpp_graph_builder_create(name.text, ranks, &self->builder))) {
    Py_CLEAR(self);
  }
  jpp_py_utf8_release(&name);
  return (PyObject*)self;
}

static void graph_dealloc(PyObject* object) {
  jpp_py_graph_t* self = (jpp_py_graph_t*)object;
  jpp_graph_builder_destroy(self->builder);
  jpp_graph_destroy(self->graph);
  jpp_py_free(object);
}

static jpp_graph_builder_t* open_builder(PyObject* object) {
  jpp_py_graph_t* self = (jpp_py_graph_t*)object;
  if (!self->builder) PyErr_SetString(PyExc_RuntimeError, "the graph is finished");
  return self->builder;
}

static bool read_dims(PyObject* sequence, int64_t** out_dims, uint32_t* out_ndim) {
  Py_ssize_t count = PySequence_Size(sequence);
  int64_t* dims = NULL;
  if (count < 0 || !jpp_py_check(JPP_ALLOC_ARRAY((size_t)count, &dims))) return false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    dims[i] = item ? PyLong_AsLongLong(item) : -1;
    Py_XDECREF(item);
    if (!PyErr_Occurred()) continue;
    jpp_free(dims);
    return false;
  }
  *out_dims = dims;
  *out_ndim = (uint32_t)count;
  return true;
}

// `item` is (dtype name, dims) or (dtype name, dims, memory). The caller deinits the type
// even after a failure.
static bool read_type(PyObject* item, jpp_type_t* type) {
  const char* dtype = NULL;
  Py_ssize_t length = 0;
  PyObject* sequence = NULL;
  int64_t* dims = NULL;
  type->memory = JPP_MEMORY_DEVICE;
  if (!PyTuple_Check(item)) {
    PyErr_Format(PyExc_TypeError, "expected a type as (dtype, dims), found %.100R", item);
    return false;
  }
  if (!PyArg_ParseTuple(item, "s#O|O&", &dtype, &length, &sequence,
                        jpp_py_memory_converter, &type->memory)) {
    return false;
  }
  type->dtype = jpp_dtype_parse(dtype, (uint32_t)length);
  if (type->dtype == JPP_DTYPE_INVALID) {
    jpp_py_raise(
        jpp_status_make(JPP_UNSUPPORTED, "element type %s is not supported", dtype));
    return false;
  }
  bool ok = read_dims(sequence, &dims, &type->ndim);
  type->dims = dims;
  return ok;
}

static void type_deinit(jpp_type_t* type) { jpp_free((void*)type->dims); }

typedef struct type_list {
  jpp_type_t* data;  // [count]
  uint32_t count;
} type_list_t;

static void type_list_deinit(type_list_t* list) {
  for (uint32_t i = 0; i < list->count; ++i) type_deinit(&list->data[i]);
  jpp_free(list->data);
}

// The caller deinits the list even after a failure.
static bool read_types(PyObject* sequence, type_list_t* list) {
  Py_ssize_t count = PySequence_Size(sequence);
  if (count < 0 || !jpp_py_check(JPP_ALLOC_ARRAY((size_t)count, &list->data))) {
    return false;
  }
  list->count = (uint32_t)count;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    bool ok = item && read_type(item, &list->data[i]);
    Py_XDECREF(item);
    if (!ok) return false;
  }
  return true;
}

static PyObject* graph_add_arg(PyObject* self, PyObject* args) {
  PyObject* type = NULL;
  int donated = 0;
  jpp_py_utf8_t name = {0};
  jpp_graph_builder_t* builder = open_builder(self);
  if (!builder ||
      !PyArg_ParseTuple(args, "OpO&", &type, &donated, jpp_py_utf8_converter, &name)) {
    return NULL;
  }
  jpp_type_t read = {0};
  uint32_t value = 0;
  bool ok = read_type(type, &read) && jpp_py_check(jpp_graph_builder_add_arg(
                                          builder, &read, donated, name.text, &value));
  type_deinit(&read);
  jpp_py_utf8_release(&name);
  return ok ? PyLong_FromUnsignedLong(value) : NULL;
}

// Sets the ranks of the argument or output that was added last.
static PyObject* set_ranks(PyObject* self, PyObject* ranks,
                           jpp_status_t* (*set)(jpp_graph_builder_t* builder,
                                                const uint32_t* ranks, uint32_t count)) {
  uint32_t* read = NULL;
  uint32_t count = 0;
  jpp_graph_builder_t* builder = open_builder(self);
  if (!builder || !jpp_py_to_u32s(ranks, &read, &count)) return NULL;
  bool ok = jpp_py_check(set(builder, read, count));
  jpp_free(read);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyObject* graph_give_arg(PyObject* self, PyObject* ranks) {
  return set_ranks(self, ranks, jpp_graph_builder_give_arg);
}

static bool check_bits(const char* what, uint32_t found, uint32_t known) {
  if (!(found & ~known)) return true;
  PyErr_Format(PyExc_ValueError, "%s: expected a sum of the bits of %u, found %u", what,
               known, found);
  return false;
}

static PyObject* graph_add_op(PyObject* self, PyObject* args) {
  PyObject *inputs = NULL, *outputs = NULL, *ranks = NULL;
  uint32_t kind = 0, flags = 0;
  jpp_op_desc_t desc = {.struct_size = sizeof(desc)};
  jpp_py_utf8_t name = {0}, where = {0};
  jpp_graph_builder_t* builder = open_builder(self);
  if (!builder || !PyArg_ParseTuple(args, "O&O&O&OOfO&O&O&O", jpp_py_u32_converter, &kind,
                                    jpp_py_u32_converter, &flags, jpp_py_u32_converter,
                                    &desc.attr, &inputs, &outputs, &desc.cost,
                                    jpp_py_utf8_converter, &name, jpp_py_utf8_converter,
                                    &where, jpp_py_u32_converter, &desc.code, &ranks)) {
    return NULL;
  }
  desc.name = name.text;
  desc.where = where.text;
  desc.kind = (jpp_op_kind_t)kind;
  desc.flags = (uint8_t)flags;
  type_list_t list = {0};
  uint32_t *input_ids = NULL, *rank_ids = NULL;
  uint32_t first = 0;
  bool ok = check_bits("flags", flags, JPP_OP_FLAGS) &&
            jpp_py_to_u32s(inputs, &input_ids, &desc.num_inputs) &&
            jpp_py_to_u32s(ranks, &rank_ids, &desc.num_ranks) &&
            read_types(outputs, &list);
  if (ok) {
    desc.ranks = rank_ids;
    desc.inputs = input_ids;
    desc.num_outputs = list.count;
    desc.outputs = list.data;
    ok = jpp_py_check(jpp_graph_builder_add_op(builder, &desc, &first));
  }
  jpp_free(input_ids);
  jpp_free(rank_ids);
  type_list_deinit(&list);
  jpp_py_utf8_release(&name);
  jpp_py_utf8_release(&where);
  return ok ? PyLong_FromUnsignedLong(first) : NULL;
}

static PyObject* graph_begin_loop(PyObject* self, PyObject* args) {
  jpp_loop_desc_t desc = {0};
  jpp_py_utf8_t schedule = {0}, where = {0};
  jpp_graph_builder_t* builder = open_builder(self);
  if (!builder ||
      !PyArg_ParseTuple(args, "O&O&O&O&", jpp_py_u32_converter, &desc.microbatches,
                        jpp_py_u32_converter, &desc.stages, jpp_py_utf8_converter,
                        &schedule, jpp_py_utf8_converter, &where)) {
    return NULL;
  }
  desc.schedule = schedule.text;
  desc.where = where.text;
  uint32_t index = 0;
  bool ok = jpp_py_check(jpp_graph_builder_begin_loop(builder, &desc, &index));
  jpp_py_utf8_release(&schedule);
  jpp_py_utf8_release(&where);
  return ok ? PyLong_FromUnsignedLong(index) : NULL;
}

// Reads as many reduction kinds as values.
static bool read_results(PyObject* reduces, PyObject* values,
                         jpp_loop_result_t** out_results, uint32_t* out_count) {
  uint32_t *kinds = NULL, *ids = NULL, kind_count = 0;
  *out_results = NULL;
  bool ok = jpp_py_to_u32s(values, &ids, out_count) &&
            jpp_py_to_u32s(reduces, &kinds, &kind_count) &&
            jpp_py_check_count("kinds of reductions", *out_count, kind_count) &&
            jpp_py_check(JPP_ALLOC_ARRAY(*out_count, out_results));
  for (uint32_t i = 0; ok && i < *out_count; ++i) {
    // A kind that is invalid must stay invalid in 8 bits.
    uint8_t kind = kinds[i] <= UINT8_MAX ? (uint8_t)kinds[i] : UINT8_MAX;
    (*out_results)[i] = (jpp_loop_result_t){.reduce = kind, .value = ids[i]};
  }
  jpp_free(kinds);
  jpp_free(ids);
  return ok;
}

static PyObject* graph_end_loop(PyObject* self, PyObject* args) {
  PyObject *reduces = NULL, *values = NULL, *types = NULL;
  if (!PyArg_ParseTuple(args, "OOO", &reduces, &values, &types)) return NULL;
  jpp_graph_builder_t* builder = open_builder(self);
  if (!builder) return NULL;
  type_list_t list = {0};
  jpp_loop_result_t* results = NULL;
  uint32_t count = 0, first = 0;
  bool ok = read_results(reduces, values, &results, &count) && read_types(types, &list) &&
            jpp_py_check_count("types of results", count, list.count) &&
            jpp_py_check(
                jpp_graph_builder_end_loop(builder, results, list.data, count, &first));
  jpp_free(results);
  type_list_deinit(&list);
  return ok ? PyLong_FromUnsignedLong(first) : NULL;
}

static PyObject* graph_add_output(PyObject* self, PyObject* args) {
  uint32_t value = 0, next = JPP_NONE;
  jpp_py_utf8_t name = {0};
  jpp_graph_builder_t* builder = open_builder(self);
  if (!builder ||
      !PyArg_ParseTuple(args, "O&O&O&", jpp_py_u32_converter, &value,
                        jpp_py_utf8_converter, &name, jpp_py_u32_converter, &next)) {
    return NULL;
  }
  bool ok = jpp_py_check(jpp_graph_builder_add_output(builder, value, name.text, next));
  jpp_py_utf8_release(&name);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyObject* graph_leave_output(PyObject* self, PyObject* ranks) {
  return set_ranks(self, ranks, jpp_graph_builder_leave_output);
}

static PyObject* graph_set_partial(PyObject* object, PyObject* args) {
  jpp_graph_t* graph = ((jpp_py_graph_t*)object)->graph;
  uint32_t loop = 0, count = 0, *numbers = NULL;
  PyObject* results = NULL;
  if (!PyArg_ParseTuple(args, "O&O", jpp_py_u32_converter, &loop, &results)) return NULL;
  if (!graph) return PyErr_Format(PyExc_RuntimeError, "finish() the graph first");
  bool* partial = NULL;
  uint32_t all = loop < graph->num_loops ? graph->loops[loop].num_results : 0;
  bool ok = jpp_py_to_u32s(results, &numbers, &count) &&
            jpp_py_check(JPP_ALLOC_ARRAY(all, &partial));
  for (uint32_t i = 0; ok && i < count; ++i) {
    ok = numbers[i] < all;
    if (ok) partial[numbers[i]] = true;
    if (!ok) PyErr_Format(PyExc_IndexError, "no result %u", numbers[i]);
  }
  ok = ok && jpp_py_check(jpp_graph_set_partial(graph, loop, partial));
  jpp_free(numbers);
  jpp_free(partial);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyObject* graph_set_sharded(PyObject* object, PyObject* unused) {
  (void)unused;
  jpp_graph_t* graph = ((jpp_py_graph_t*)object)->graph;
  if (!graph) return PyErr_Format(PyExc_RuntimeError, "finish() the graph first");
  if (!jpp_py_check(jpp_graph_set_sharded(graph))) return NULL;
  Py_RETURN_NONE;
}

static PyObject* graph_finish(PyObject* object, PyObject* unused) {
  (void)unused;
  jpp_py_graph_t* self = (jpp_py_graph_t*)object;
  jpp_graph_builder_t* builder = open_builder(object);
  if (!builder) return NULL;
  if (!jpp_py_check(jpp_graph_builder_finish(builder, &self->graph))) return NULL;
  jpp_graph_builder_destroy(self->builder);
  self->builder = NULL;
  Py_RETURN_NONE;
}

static PyObject* graph_text(PyObject* object, PyObject* args) {
  PyObject* device_bytes = Py_None;
  if (!PyArg_ParseTuple(args, "|O", &device_bytes)) return NULL;
  jpp_py_graph_t* self = (jpp_py_graph_t*)object;
  char* text = NULL;
  uint64_t* bytes = NULL;
  if (!self->graph) return PyErr_Format(PyExc_RuntimeError, "finish() the graph first");
  if (!jpp_py_to_u64s(device_bytes, "bytes of values", self->graph->num_values, &bytes))
    return NULL;
  jpp_status_t* status = bytes ? jpp_graph_print_sharded(self->graph, bytes, &text)
                               : jpp_graph_print(self->graph, &text);
  jpp_free(bytes);
  if (!jpp_py_check(status)) return NULL;
  return jpp_py_take_text(text);
}

static PyMethodDef kMethods[] = {
    {"add_arg", graph_add_arg, METH_VARARGS,
     "add_arg($self, type, donated, name, /)\n--\n\n"
     "Adds an argument of a type (dtype, dims[, memory]); returns its value id."},
    {"give_arg", graph_give_arg, METH_O,
     "give_arg($self, ranks, /)\n--\n\n"
     "The argument added last is passed on these ranks, ascending, and no others."},
    {"add_op", graph_add_op, METH_VARARGS,
     "add_op($self, kind, flags, attr, inputs, types, cost, name, where, code, ranks, "
     "/)\n--\n\nAdds an op with outputs of these types; returns the first one's value "
     "id. `ranks`: the ranks that run a task."},
    {"begin_loop", graph_begin_loop, METH_VARARGS,
     "begin_loop($self, microbatches, stages, schedule, where, /)\n--\n\n"
     "Begins a loop's body; returns the value id of the microbatch number."},
    {"end_loop", graph_end_loop, METH_VARARGS,
     "end_loop($self, reduces, values, types, /)\n--\n\n"
     "Ends the body, whose values are reduced; returns the first result's value id."},
    {"add_output", graph_add_output, METH_VARARGS,
     "add_output($self, value, name, next, /)\n--\n\n"
     "Makes a value a result of the step, which becomes argument `next` of the next "
     "step, or NONE."},
    {"leave_output", graph_leave_output, METH_O,
     "leave_output($self, ranks, /)\n--\n\n"
     "Leaves the result added last on these ranks, ascending, and no others."},
    {"finish", graph_finish, METH_NOARGS, "finish($self, /)\n--\n\nEnds the building."},
    {"set_partial", graph_set_partial, METH_VARARGS,
     "set_partial($self, loop, results, /)\n--\n\n"
     "Says which results of a loop, by number, are partial over a rank's devices."},
    {"set_sharded", graph_set_sharded, METH_NOARGS,
     "set_sharded($self, /)\n--\n\n"
     "Says that ops may move data between the devices of a rank."},
    {"text", graph_text, METH_VARARGS,
     "text($self, device_bytes=None, /)\n--\n\n"
     "The graph's text form, with shards if the bytes of every value on one device are "
     "given."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc,
     "Graph(name, ranks, /)\n--\n\nA step for the planner, under construction, "
     "then finished."},
    {Py_tp_new, (void*)graph_new},
    {Py_tp_dealloc, (void*)graph_dealloc},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_graph_spec = {"jaxpp._core.Graph", sizeof(jpp_py_graph_t), 0,
                                 Py_TPFLAGS_DEFAULT, kSlots};
