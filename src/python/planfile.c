// Plan files in Python: Plan.save(), and jaxpp._core.PlanFile, a file that was read.
#include "jaxpp/planfile.h"

#include <string.h>

#include "python/core.h"

// --- Saving ---------------------------------------------------------------------------

// The memory to which the contents point while they are passed to the library.
typedef struct saving {
  PyObject* path;
  jpp_py_utf8_t platform;
  PyObject *ids, *modules, *task_modules, *shard_dims, *layouts, *constants;  // borrowed
  PyObject *module_tuple, *constant_tuple;  // that keep their bytes
  PyObject *axis_names, *axis_sizes;        // borrowed
  Py_buffer options, front;
  const char** name_table;
  uint32_t *size_table, *id_table, *task_table;
  uint64_t** dims_table;  // [num_tasks]
  uint64_t* numbers;      // of the layouts
  jpp_planfile_layout_t* layout_table;
  jpp_planfile_bytes_t *module_table, *constant_table;
  jpp_planfile_contents_t contents;
} saving_t;

// Reads a list of bytes objects. Returns a tuple that keeps them alive; NULL if it
// raised.
static PyObject* read_blobs(PyObject* list, jpp_planfile_bytes_t** out_table,
                            uint32_t* out_count) {
  PyObject* tuple = PySequence_Tuple(list);
  if (!tuple) return NULL;
  Py_ssize_t count = PyTuple_Size(tuple);
  bool ok = jpp_py_check(JPP_ALLOC_ARRAY(count, out_table));
  for (Py_ssize_t i = 0; ok && i < count; ++i) {
    char* data = NULL;
    Py_ssize_t size = 0;
    ok = PyBytes_AsStringAndSize(PyTuple_GetItem(tuple, i), &data, &size) == 0;
    (*out_table)[i] = (jpp_planfile_bytes_t){data, (size_t)size};
  }
  *out_count = (uint32_t)count;
  if (!ok) Py_CLEAR(tuple);
  return tuple;
}

static bool read_ids(PyObject* sequence, const char* what, uint64_t expected,
                     uint32_t** out_ids) {
  uint32_t count = 0;
  return jpp_py_to_u32s(sequence, out_ids, &count) &&
         jpp_py_check_count(what, expected, count);
}

static uint32_t ndim_of(const jpp_graph_t* graph, uint32_t number) {
  uint32_t value = number < graph->num_args
                       ? graph->args[number].value
                       : graph->outputs[number - graph->num_args].value;
  return graph->values[value].type.ndim;
}

// One flat list: for each array, the shape of a box and the start of each device's box.
static bool read_layouts(saving_t* s) {
  const jpp_graph_t* graph = s->contents.planned->graph;
  uint32_t count = graph->num_args + graph->num_outputs, numbers = 0;
  uint32_t rows = 1 + s->contents.devices_per_rank;
  for (uint32_t i = 0; i < count; ++i) numbers += rows * ndim_of(graph, i);
  if (s->layouts == Py_None) return true;
  if (!jpp_py_to_u64s(s->layouts, "numbers of layouts", numbers, &s->numbers) ||
      !jpp_py_check(JPP_ALLOC_ARRAY(count, &s->layout_table))) {
    return false;
  }
  const int64_t* at = (const int64_t*)s->numbers;
  for (uint32_t i = 0; i < count; ++i) {
    s->layout_table[i] = (jpp_planfile_layout_t){at, at + ndim_of(graph, i)};
    at += (size_t)rows * ndim_of(graph, i);
  }
  s->contents.layouts = s->layout_table;
  return true;
}

static bool read_contents(saving_t* s) {
  jpp_planfile_contents_t* c = &s->contents;
  const jpp_planned_t* planned = c->planned;
  uint64_t devices = (uint64_t)planned->ranks * c->devices_per_rank;
  s->module_tuple = read_blobs(s->modules, &s->module_table, &c->num_modules);
  if (!s->module_tuple) return false;
  s->constant_tuple = read_blobs(s->constants, &s->constant_table, &c->num_constants);
  if (!s->constant_tuple) return false;
  bool ok = read_ids(s->ids, "ids of devices", devices, &s->id_table) &&
            read_ids(s->task_modules, "modules of tasks", planned->staged->num_tasks,
                     &s->task_table) &&
            jpp_py_to_shard_dims(planned->staged, s->shard_dims, &s->dims_table) &&
            jpp_py_to_axes(s->axis_names, s->axis_sizes, planned->ranks, &s->name_table,
                           &s->size_table, &c->num_axes) &&
            read_layouts(s);
  c->axis_names = s->name_table;
  c->axis_sizes = s->size_table;
  c->struct_size = sizeof(*c);
  c->platform = s->platform.text;
  c->format = "mlir";
  c->device_ids = (const int32_t*)s->id_table;
  c->compile_options = (jpp_planfile_bytes_t){s->options.buf, (size_t)s->options.len};
  c->modules = s->module_table;
  c->task_modules = s->task_table;
  c->shard_dims = (const uint64_t* const*)s->dims_table;
  c->constants = s->constant_table;
  c->front = (jpp_planfile_bytes_t){s->front.buf, (size_t)s->front.len};
  return ok;
}

static void saving_deinit(saving_t* s) {
  jpp_free(s->name_table);
  jpp_free(s->size_table);
  jpp_free(s->id_table);
  jpp_free(s->task_table);
  jpp_py_free_shard_dims(s->contents.planned->staged, s->dims_table);
  jpp_free(s->numbers);
  jpp_free(s->layout_table);
  jpp_free(s->module_table);
  jpp_free(s->constant_table);
  Py_XDECREF(s->module_tuple);
  Py_XDECREF(s->constant_tuple);
  Py_XDECREF(s->path);
  jpp_py_utf8_release(&s->platform);
  if (s->options.obj) PyBuffer_Release(&s->options);
  if (s->front.obj) PyBuffer_Release(&s->front);
}

static bool save(saving_t* s) {
  if (!read_contents(s)) return false;
  jpp_status_t* status = NULL;
  const char* path = PyBytes_AsString(s->path);
  Py_BEGIN_ALLOW_THREADS
    status = jpp_planfile_save(&s->contents, path);
  Py_END_ALLOW_THREADS
  return jpp_py_check(status);
}

PyObject* jpp_py_plan_save(PyObject* plan, PyObject* args) {
  saving_t s = {.contents = {.planned = ((jpp_py_plan_t*)plan)->planned}};
  bool ok = PyArg_ParseTuple(
      args, "O&O&O&OO!OO&y*OOOOOy*", PyUnicode_FSConverter, &s.path, jpp_py_str_converter,
      &s.platform, jpp_py_u32_converter, &s.contents.devices_per_rank, &s.ids,
      &PyTuple_Type, &s.axis_names, &s.axis_sizes, jpp_py_u32_converter,
      &s.contents.steps_in_flight, &s.options, &s.modules, &s.task_modules, &s.shard_dims,
      &s.layouts, &s.constants, &s.front);
  // After a failure the parser has released what its converters and buffers held.
  if (!ok) return NULL;
  ok = save(&s);
  saving_deinit(&s);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

// --- PlanFile -------------------------------------------------------------------------

typedef struct file_object {
  PyObject ob_base;
  jpp_planfile_t* file;
} file_object_t;

static PyObject* file_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  PyObject* path = NULL;
  if (!PyArg_ParseTuple(args, "O&:PlanFile", PyUnicode_FSConverter, &path)) return NULL;
  file_object_t* self = jpp_py_new(type);
  if (self) {
    jpp_status_t* status = NULL;
    const char* name = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
      status = jpp_planfile_load(name, &self->file);
    Py_END_ALLOW_THREADS
    if (!jpp_py_check(status)) Py_CLEAR(self);
  }
  Py_DECREF(path);
  return (PyObject*)self;
}

static void file_dealloc(PyObject* object) {
  jpp_planfile_destroy(((file_object_t*)object)->file);
  jpp_py_free(object);
}

static PyObject* file_plan(PyObject* object, PyObject* unused) {
  (void)unused;
  return jpp_py_plan_of_file(object, ((file_object_t*)object)->file->contents.planned);
}

static PyObject* make_bytes(const void* blobs, uint64_t index) {
  const jpp_planfile_bytes_t* blob = &((const jpp_planfile_bytes_t*)blobs)[index];
  return PyBytes_FromStringAndSize(blob->data, (Py_ssize_t)blob->size);
}

static PyObject* make_module(const void* modules, uint64_t task) {
  return jpp_py_none_or_u32(((const uint32_t*)modules)[task]);
}

static PyObject* make_dim(const void* dims, uint64_t index) {
  return PyLong_FromUnsignedLongLong(((const uint64_t*)dims)[index]);
}

static PyObject* make_dims(const void* context, uint64_t task) {
  const jpp_planfile_contents_t* c = context;
  const uint64_t* dims = c->shard_dims[task];
  if (!dims) Py_RETURN_NONE;
  return jpp_py_make_list(jpp_py_count_dims(c->planned->staged, (uint32_t)task), make_dim,
                          dims);
}

static PyObject* file_contents(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_planfile_t* file = ((file_object_t*)object)->file;
  const jpp_planfile_contents_t* c = &file->contents;
  uint32_t devices = c->planned->ranks * c->devices_per_rank;
  return JPP_PY_RECORD(
      JPP_PY_PLANFILE_CONTENTS, jpp_py_text(file->maker), jpp_py_text(c->platform),
      PyLong_FromUnsignedLong(c->devices_per_rank),
      jpp_py_from_u32s((const uint32_t*)c->device_ids, devices),
      make_bytes(&c->compile_options, 0),
      jpp_py_make_list(c->num_modules, make_bytes, c->modules),
      jpp_py_make_list(c->planned->staged->num_tasks, make_module, c->task_modules),
      jpp_py_make_list(c->planned->staged->num_tasks, make_dims, c),
      jpp_py_make_list(c->num_constants, make_bytes, c->constants),
      make_bytes(&c->front, 0));
}

static PyMethodDef kMethods[] = {
    {"plan", file_plan, METH_NOARGS,
     "plan($self, /)\n--\n\nThe Plan, made and proved again."},
    {"contents", file_contents, METH_NOARGS,
     "contents($self, /)\n--\n\nPlanFileContents: everything in the file except the "
     "plan."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc, "PlanFile(path, /)\n--\n\nA plan file that was read. Releases the GIL."},
    {Py_tp_new, (void*)file_new},
    {Py_tp_dealloc, (void*)file_dealloc},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_planfile_spec = {"jaxpp._core.PlanFile", sizeof(file_object_t), 0,
                                    Py_TPFLAGS_DEFAULT, kSlots};
