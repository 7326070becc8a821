// jaxpp._core.Network: the transport between the processes of a job, until a Runtime
// takes it over.
#include "jaxpp/option.h"
#include "python/core.h"

static PyObject* network_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  jpp_py_utf8_t driver = {0}, address = {0};
  Py_buffer token;
  uint32_t device = 0;
  jpp_transport_options_t options = {.struct_size = sizeof(options)};
  if (!PyArg_ParseTuple(args, "O&O&O&O&y*O&:Network", jpp_py_str_converter, &driver,
                        jpp_py_u32_converter, &options.process, jpp_py_u32_converter,
                        &options.num_processes, jpp_py_str_converter, &address, &token,
                        jpp_py_u32_converter, &device)) {
    return NULL;
  }
  options.device = device;
  options.driver = driver.text;
  options.address = address.text;
  options.token = token.buf;
  options.token_size = (size_t)token.len;
  jpp_py_network_t* self = jpp_py_new(type);
  if (self) {
    self->process = options.process;
    jpp_status_t* status =
        jpp_option_get_ms(JPP_OPTION_STALL_TIMEOUT, &self->stall_timeout_ms);
    if (!status) {
      status = jpp_option_get_ms(JPP_OPTION_STEP_TIMEOUT, &self->step_timeout_ms);
    }
    if (!status) {
      status = jpp_option_get_ms(JPP_OPTION_PEER_TIMEOUT, &options.peer_timeout_ms);
    }
    Py_BEGIN_ALLOW_THREADS
      if (!status) status = jpp_transport_create(&options, &self->transport);
    Py_END_ALLOW_THREADS
    if (!jpp_py_check(status)) Py_CLEAR(self);
  }
  PyBuffer_Release(&token);
  jpp_py_utf8_release(&driver);
  jpp_py_utf8_release(&address);
  return (PyObject*)self;
}

static void network_dealloc(PyObject* object) {
  jpp_transport_destroy(((jpp_py_network_t*)object)->transport);
  jpp_py_free(object);
}

static jpp_transport_t* transport_of(PyObject* object) {
  jpp_transport_t* transport = ((jpp_py_network_t*)object)->transport;
  if (!transport)
    PyErr_SetString(PyExc_ValueError, "the network already belongs to a Runtime");
  return transport;
}

static PyObject* network_address(PyObject* object, PyObject* unused) {
  (void)unused;
  const void* address = NULL;
  size_t size = 0;
  jpp_transport_t* transport = transport_of(object);
  if (!transport) return NULL;
  jpp_transport_address(transport, &address, &size);
  return PyBytes_FromStringAndSize(address, (Py_ssize_t)size);
}

static PyObject* network_connect(PyObject* object, PyObject* args) {
  uint32_t process = 0;
  Py_buffer address;
  jpp_transport_t* transport = transport_of(object);
  if (!transport ||
      !PyArg_ParseTuple(args, "O&y*", jpp_py_u32_converter, &process, &address)) {
    return NULL;
  }
  jpp_status_t* status = NULL;
  Py_BEGIN_ALLOW_THREADS
    status = jpp_transport_connect(transport, process, address.buf, (size_t)address.len);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&address);
  if (!jpp_py_check(status)) return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef kMethods[] = {
    {"address", network_address, METH_NOARGS,
     "address($self, /)\n--\n\nThe data that other processes need to connect to this "
     "one."},
    {"connect", network_connect, METH_VARARGS,
     "connect($self, process, address, /)\n--\n\nBegins to connect to another process."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc,
     "Network(driver, process, num_processes, address, token, device, /)\n--\n\nMessages "
     "between the processes of a job. This process listens at `address`; a driver that "
     "sends from device memory uses `device`. The timeouts are JPP_PEER_TIMEOUT, "
     "JPP_STALL_TIMEOUT and JPP_STEP_TIMEOUT."},
    {Py_tp_new, (void*)network_new},
    {Py_tp_dealloc, (void*)network_dealloc},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_network_spec = {"jaxpp._core.Network", sizeof(jpp_py_network_t), 0,
                                   Py_TPFLAGS_DEFAULT, kSlots};
