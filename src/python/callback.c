// jaxpp._core.Callback: a Python function that a compiled task calls.
//
// The module refers to the object by its address, an attribute of the custom call; the
// Executable that was compiled from the module keeps the object alive. The function gets
// a memoryview of every operand and result, valid during the call, and returns None or
// the text of an error. The only exception that it raises is KeyboardInterrupt.
//
// The views show the device's memory if that is host memory, and otherwise a copy: one
// block for all operands and results of a call.
#include <string.h>
#include <xla/ffi/api/c_api.h>

#include "python/core.h"
#include "python/cuda_copy.h"
#include "python/gate.h"

typedef struct py_callback {
  PyObject ob_base;
  PyObject* function;
  uint32_t* item_bytes;  // [num_operands + num_results] size of an element
  uint32_t num_operands, num_results;
} py_callback_t;

const char jpp_py_callback_attribute[] = "callback";

static jpp_py_gate_t g_gate;

// --- The call -------------------------------------------------------------------------

static XLA_FFI_Error* make_error(const XLA_FFI_CallFrame* frame, const char* message) {
  XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE,
                                    .message = message,
                                    .errc = XLA_FFI_Error_Code_UNKNOWN};
  return frame->api->XLA_FFI_Error_Create(&args);
}

// NULL if the call has no such attribute.
static py_callback_t* find_callback(const XLA_FFI_CallFrame* frame) {
  for (int64_t i = 0; i < frame->attrs.size; ++i) {
    const XLA_FFI_ByteSpan* name = frame->attrs.names[i];
    if (frame->attrs.types[i] != XLA_FFI_AttrType_SCALAR) continue;
    if (name->len != strlen(jpp_py_callback_attribute)) continue;
    if (memcmp(name->ptr, jpp_py_callback_attribute, name->len) != 0) continue;
    const XLA_FFI_Scalar* scalar = frame->attrs.attrs[i];
    return (py_callback_t*)(uintptr_t) * (const uint64_t*)scalar->value;
  }
  return NULL;
}

// One call of a function: its operands, then its results, in host memory.
typedef struct call {
  const py_callback_t* callback;
  const XLA_FFI_CallFrame* frame;
  char* copies;  // NULL: device memory is host memory
} call_t;

static const XLA_FFI_Buffer* call_buffer(const call_t* call, uint32_t at) {
  uint32_t operands = call->callback->num_operands;
  bool operand = at < operands;
  return operand ? call->frame->args.args[at] : call->frame->rets.rets[at - operands];
}

static size_t call_bytes(const call_t* call, uint32_t at) {
  const XLA_FFI_Buffer* buffer = call_buffer(call, at);
  size_t bytes = call->callback->item_bytes[at];
  for (int64_t d = 0; d < buffer->rank; ++d) bytes *= (size_t)buffer->dims[d];
  return bytes;
}

enum { kCopyAlignment = 64 };  // bytes

// Where the copy of buffer `at` begins in the block; if `at` is the number of buffers,
// the size of the block.
static size_t copy_offset(const call_t* call, uint32_t at) {
  size_t offset = 0;
  for (uint32_t i = 0; i < at; ++i) {
    size_t bytes = call_bytes(call, i);
    offset += (bytes + kCopyAlignment - 1) / kCopyAlignment * kCopyAlignment;
  }
  return offset;
}

static bool put_view(PyObject* tuple, const call_t* call, uint32_t at) {
  static char empty;
  size_t bytes = call_bytes(call, at);
  char* data = call_buffer(call, at)->data;
  if (call->copies) data = call->copies + copy_offset(call, at);
  int flags = at < call->callback->num_operands ? PyBUF_READ : PyBUF_WRITE;
  PyObject* view =
      PyMemoryView_FromMemory(bytes ? data : &empty, (Py_ssize_t)bytes, flags);
  return view && PyTuple_SetItem(tuple, at, view) == 0;
}

static PyObject* make_views(const call_t* call) {
  uint32_t count = call->callback->num_operands + call->callback->num_results;
  PyObject* views = PyTuple_New(count);
  bool ok = views != NULL;
  for (uint32_t i = 0; ok && i < count; ++i) ok = put_view(views, call, i);
  if (!ok) Py_CLEAR(views);
  return views;
}

// An exception of the callback becomes an error of the device. A Ctrl-C during the
// callback belongs to the thread that called the step, so the signal is raised again for
// it.
static const char* text_of_raised(void) {
  bool interrupted = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
  PyErr_Clear();
  if (!interrupted) return "the callback was stopped by what a signal handler raised";
  PyErr_SetInterrupt();
  return "the callback was interrupted";
}

// Under the GIL.
static XLA_FFI_Error* call_function(const call_t* call) {
  PyObject* views = make_views(call);
  PyObject* answer = views ? PyObject_CallObject(call->callback->function, views) : NULL;
  jpp_py_utf8_t utf8 = {0};
  const char* text = NULL;
  if (answer && jpp_py_utf8_converter(answer, &utf8)) text = utf8.text;
  if (answer != Py_None && !text) text = text_of_raised();
  XLA_FFI_Error* error = text ? make_error(call->frame, text) : NULL;
  jpp_py_utf8_release(&utf8);
  Py_XDECREF(answer);
  Py_XDECREF(views);
  return error;
}

static XLA_FFI_Error* call_with_gil(const call_t* call) {
  PyGILState_STATE state = PyGILState_Ensure();
  XLA_FFI_Error* error = call_function(call);
  PyGILState_Release(state);
  return error;
}

static const char* copy_operands(const call_t* call, void* stream) {
  const char* failed = NULL;
  for (uint32_t i = 0; !failed && i < call->callback->num_operands; ++i) {
    size_t bytes = call_bytes(call, i);
    if (!bytes) continue;
    char* copy = call->copies + copy_offset(call, i);
    failed = jpp_py_cuda_to_host(stream, copy, call_buffer(call, i)->data, bytes);
  }
  return failed ? failed : jpp_py_cuda_wait(stream);
}

static const char* copy_results(const call_t* call, void* stream) {
  const char* failed = NULL;
  uint32_t count = call->callback->num_operands + call->callback->num_results;
  for (uint32_t i = call->callback->num_operands; !failed && i < count; ++i) {
    size_t bytes = call_bytes(call, i);
    if (!bytes) continue;
    const char* copy = call->copies + copy_offset(call, i);
    failed = jpp_py_cuda_to_device(stream, call_buffer(call, i)->data, copy, bytes);
  }
  // Waits even after a failure, because queued operations read the copies.
  const char* waited = jpp_py_cuda_wait(stream);
  return failed ? failed : waited;
}

static XLA_FFI_Error* call_with_copies(call_t* call) {
  XLA_FFI_Stream_Get_Args get = {.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE,
                                 .ctx = call->frame->ctx};
  XLA_FFI_Error* error = call->frame->api->XLA_FFI_Stream_Get(&get);
  if (error) return error;
  uint32_t count = call->callback->num_operands + call->callback->num_results;
  jpp_status_t* status = JPP_ALLOC_ARRAY(copy_offset(call, count) + 1, &call->copies);
  if (status) {
    error = make_error(call->frame, jpp_status_message(status));
    jpp_status_free(status);
    return error;
  }
  const char* failed = copy_operands(call, get.stream);
  if (!failed) error = call_with_gil(call);
  if (!failed && !error) failed = copy_results(call, get.stream);
  jpp_free(call->copies);
  return failed ? make_error(call->frame, failed) : error;
}

// The kind of memory that a handler serves.
typedef enum memory {
  MEMORY_HOST,
  MEMORY_CUDA,
} memory_t;

static XLA_FFI_Error* call_callback(const XLA_FFI_CallFrame* frame, memory_t memory) {
  call_t call = {.callback = find_callback(frame), .frame = frame};
  if (!call.callback || frame->args.size != call.callback->num_operands ||
      frame->rets.size != call.callback->num_results) {
    return make_error(frame, "a callback into Python with other operands or results");
  }
  return memory == MEMORY_HOST ? call_with_gil(&call) : call_with_copies(&call);
}

// The first fields of every extension have another type in each version of XLA, but the
// same layout. The plugin may be older than the header, so the handler claims no newer
// version than the plugin's own.
static bool answer_metadata(const XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Metadata_Extension* extension =
      (const XLA_FFI_Metadata_Extension*)frame->extension_start;
  if (!extension || extension->extension_base.type != XLA_FFI_Extension_Metadata) {
    return false;
  }
  int known = frame->api ? frame->api->api_version.minor_version : XLA_FFI_API_MINOR;
  XLA_FFI_Metadata* metadata = extension->metadata;
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version =
      known < XLA_FFI_API_MINOR ? known : XLA_FFI_API_MINOR;
  return true;
}

// Called on any thread of the plugin, or on one that issues a step, without the GIL.
static XLA_FFI_Error* handle_custom_call(const XLA_FFI_CallFrame* frame,
                                         memory_t memory) {
  if (answer_metadata(frame)) return NULL;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL;
  if (!jpp_py_gate_enter(&g_gate)) {
    return make_error(frame, "the interpreter is about to exit");
  }
  XLA_FFI_Error* error = call_callback(frame, memory);
  jpp_py_gate_leave(&g_gate);
  return error;
}

static XLA_FFI_Error* handle_on_host(XLA_FFI_CallFrame* frame) {
  return handle_custom_call(frame, MEMORY_HOST);
}

static XLA_FFI_Error* handle_on_cuda(XLA_FFI_CallFrame* frame) {
  return handle_custom_call(frame, MEMORY_CUDA);
}

PyObject* jpp_py_callback_handler(PyObject* module, PyObject* args) {
  (void)module;
  const char* platform = NULL;
  if (!PyArg_ParseTuple(args, "s", &platform)) return NULL;
  if (strcmp(platform, "Host") == 0) {
    return PyCapsule_New((void*)handle_on_host, NULL, NULL);
  }
  if (strcmp(platform, "CUDA") == 0) {
    return PyCapsule_New((void*)handle_on_cuda, NULL, NULL);
  }
  return PyErr_Format(PyExc_ValueError, "expected Host or CUDA, found %.100s", platform);
}

PyObject* jpp_py_callbacks_close(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  jpp_py_gate_close(&g_gate);
  Py_RETURN_NONE;
}

// --- The object -----------------------------------------------------------------------

static bool read_item_bytes(py_callback_t* self, PyObject* operands, PyObject* results) {
  PyObject* all = PySequence_Concat(operands, results);
  uint32_t count = 0;
  bool ok = all && jpp_py_to_u32s(all, &self->item_bytes, &count);
  Py_XDECREF(all);
  if (!ok) return false;
  self->num_operands = (uint32_t)PyList_Size(operands);
  self->num_results = count - self->num_operands;
  return true;
}

static PyObject* callback_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  PyObject *function = NULL, *operands = NULL, *results = NULL;
  if (!PyArg_ParseTuple(args, "OO!O!:Callback", &function, &PyList_Type, &operands,
                        &PyList_Type, &results)) {
    return NULL;
  }
  if (!PyCallable_Check(function)) {
    return PyErr_Format(PyExc_TypeError, "expected a function, found %.100R", function);
  }
  py_callback_t* self = jpp_py_new(type);
  if (!self) return NULL;
  self->function = Py_NewRef(function);
  if (!read_item_bytes(self, operands, results)) Py_CLEAR(self);
  return (PyObject*)self;
}

static int callback_traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(((py_callback_t*)object)->function);
  return 0;
}

// No executable that refers to it can run any more.
static int callback_clear(PyObject* object) {
  Py_CLEAR(((py_callback_t*)object)->function);
  return 0;
}

static void callback_dealloc(PyObject* object) {
  py_callback_t* self = (py_callback_t*)object;
  PyObject_GC_UnTrack(object);
  Py_XDECREF(self->function);
  jpp_free(self->item_bytes);
  jpp_py_free(object);
}

static PyObject* callback_address(PyObject* object, PyObject* unused) {
  (void)unused;
  return PyLong_FromVoidPtr(object);
}

static PyMethodDef kMethods[] = {
    {"address", callback_address, METH_NOARGS,
     "address($self, /)\n--\n\nThe value of the custom call's CALLBACK_ATTRIBUTE."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc,
     "Callback(function, operands, results, /)\n--\n\nA function for compiled tasks; "
     "`operands` and `results` are the element sizes in bytes."},
    {Py_tp_new, (void*)callback_new},
    {Py_tp_dealloc, (void*)callback_dealloc},
    {Py_tp_traverse, (void*)callback_traverse},
    {Py_tp_clear, (void*)callback_clear},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_callback_spec = {"jaxpp._core.Callback", sizeof(py_callback_t), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, kSlots};
