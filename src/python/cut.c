// jaxpp._core.cut_stages: the stages of a program without marks.
#include "jaxpp/partition_cut.h"
#include "python/core.h"

// A sequence of numbers into a jpp_alloc()ed array. False if it raised.
static bool read_costs(PyObject* sequence, uint32_t count, double** out_costs) {
  if (!jpp_py_check(JPP_ALLOC_ARRAY(count, out_costs))) return false;
  for (uint32_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    (*out_costs)[i] = item ? PyFloat_AsDouble(item) : -1;
    Py_XDECREF(item);
    if (PyErr_Occurred()) return false;
  }
  return true;
}

PyObject* jpp_py_cut_stages(PyObject* module, PyObject* args) {
  (void)module;
  PyObject *costs = NULL, *makers = NULL, *bytes = NULL, *used = NULL, *users = NULL;
  uint32_t stages = 0, num_users = 0;
  if (!PyArg_ParseTuple(args, "OOOOOO&", &costs, &makers, &bytes, &used, &users,
                        jpp_py_u32_converter, &stages)) {
    return NULL;
  }
  jpp_cut_program_t program = {.struct_size = sizeof(program)};
  double* cost_table = NULL;
  uint64_t* byte_table = NULL;
  uint32_t *maker_table = NULL, *used_table = NULL, *user_table = NULL, *found = NULL;
  Py_ssize_t ops = PySequence_Size(costs);
  bool ok = ops >= 0 && read_costs(costs, (uint32_t)ops, &cost_table) &&
            jpp_py_to_u32s(makers, &maker_table, &program.num_values) &&
            jpp_py_to_u64s(bytes, "bytes of values", program.num_values, &byte_table) &&
            jpp_py_to_u32s(used, &used_table, &program.num_uses) &&
            jpp_py_to_u32s(users, &user_table, &num_users) &&
            jpp_py_check_count("users", program.num_uses, num_users) &&
            jpp_py_check(JPP_ALLOC_ARRAY(ops, &found));
  program.num_ops = (uint32_t)ops;
  program.costs = cost_table;
  program.makers = maker_table;
  program.bytes = byte_table;
  program.used = used_table;
  program.users = user_table;
  ok = ok && jpp_py_check(jpp_cut_stages(&program, stages, found));
  PyObject* result = ok ? jpp_py_from_u32s(found, (uint32_t)ops) : NULL;
  jpp_free(cost_table);
  jpp_free(maker_table);
  jpp_free(byte_table);
  jpp_free(used_table);
  jpp_free(user_table);
  jpp_free(found);
  return result;
}
