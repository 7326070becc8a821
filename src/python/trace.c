// Joins, draws and predicts from the traces of several processes, which are texts.
#include <stdio.h>
#include <string.h>

#include "jaxpp/view.h"
#include "python/core.h"

enum { kMostColumns = 1 << 20 };  // limit on the width of a drawing
enum { kNameSize = 24 };

typedef struct texts {
  jpp_trace_text_t* texts;   // [count]
  jpp_py_utf8_t* utf8;       // [count]
  char (*names)[kNameSize];  // [count] "trace 3"
  uint32_t count;
} texts_t;

static bool fill_text(PyObject* list, uint32_t index, texts_t* texts) {
  jpp_py_utf8_t* utf8 = &texts->utf8[index];
  if (!jpp_py_str_converter(PyList_GetItem(list, index), utf8)) return false;
  snprintf(texts->names[index], kNameSize, "trace %u", index);
  texts->texts[index] = (jpp_trace_text_t){
      .name = texts->names[index], .text = utf8->text, .length = strlen(utf8->text)};
  return true;
}

// Borrows the strs of `list`. Returns false if it raised; release them in any case.
static bool borrow_texts(PyObject* list, texts_t* out_texts) {
  uint32_t count = (uint32_t)PyList_Size(list);
  *out_texts = (texts_t){.count = count};
  if (!jpp_py_check(JPP_ALLOC_ARRAY(count, &out_texts->texts)) ||
      !jpp_py_check(JPP_ALLOC_ARRAY(count, &out_texts->utf8)) ||
      !jpp_py_check(JPP_ALLOC_ARRAY(count, &out_texts->names))) {
    return false;
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (!fill_text(list, i, out_texts)) return false;
  }
  return true;
}

// NULL if it raised.
static jpp_spans_t* read_texts(PyObject* list) {
  texts_t texts;
  jpp_spans_t* spans = NULL;
  if (!PyList_Size(list)) {
    PyErr_SetString(PyExc_ValueError, "expected at least one trace");
    return NULL;
  }
  if (borrow_texts(list, &texts)) {
    (void)jpp_py_check(jpp_spans_read(texts.texts, texts.count, &spans));
  }
  for (uint32_t i = 0; texts.utf8 && i < texts.count; ++i) {
    jpp_py_utf8_release(&texts.utf8[i]);
  }
  jpp_free(texts.texts);
  jpp_free(texts.utf8);
  jpp_free(texts.names);
  return spans;
}

PyObject* jpp_py_join_traces(PyObject* module, PyObject* args) {
  (void)module;
  PyObject* list = NULL;
  char* text = NULL;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list)) return NULL;
  jpp_spans_t* spans = read_texts(list);
  if (!spans) return NULL;
  bool joined = jpp_py_check(jpp_spans_to_json(spans, &text));
  jpp_spans_destroy(spans);
  return joined ? jpp_py_take_text(text) : NULL;
}

PyObject* jpp_py_draw_traces(PyObject* module, PyObject* args) {
  (void)module;
  PyObject* list = NULL;
  uint32_t columns = 0;
  int color = 0;
  char* text = NULL;
  if (!PyArg_ParseTuple(args, "O!O&p", &PyList_Type, &list, jpp_py_u32_converter,
                        &columns, &color)) {
    return NULL;
  }
  if (columns > kMostColumns) {
    return PyErr_Format(PyExc_ValueError, "expected at most %d columns, found %u",
                        kMostColumns, columns);
  }
  jpp_spans_t* spans = read_texts(list);
  if (!spans) return NULL;
  bool drawn = jpp_py_check(jpp_spans_draw(spans, columns, color, &text));
  jpp_spans_destroy(spans);
  return drawn ? jpp_py_take_text(text) : NULL;
}

static PyObject* make_busy(const void* busy, uint64_t rank) {
  return PyFloat_FromDouble(((const double*)busy)[rank]);
}

static PyObject* prediction_to_tuple(const jpp_prediction_t* prediction) {
  char *table = NULL, *trace = NULL;
  if (!jpp_py_check(jpp_prediction_print(prediction, &table))) return NULL;
  if (!jpp_py_check(jpp_prediction_to_trace(prediction, &trace))) {
    jpp_text_free(table);
    return NULL;
  }
  PyObject* busy = jpp_py_make_list(prediction->plan->ranks, make_busy, prediction->busy);
  return Py_BuildValue("(dddNNN)", prediction->makespan, prediction->period,
                       prediction->bubble, busy, jpp_py_take_text(table),
                       jpp_py_take_text(trace));
}

PyObject* jpp_py_plan_predict(PyObject* plan, PyObject* args) {
  PyObject *texts = NULL, *devices = NULL, *result = NULL;
  jpp_machine_t machine = {.struct_size = sizeof(machine)};
  jpp_predict_options_t options = {.struct_size = sizeof(options), .machine = &machine};
  uint32_t* rank_device = NULL;
  uint32_t count = 0;
  if (!PyArg_ParseTuple(args, "O!OO&O&dO&ddddO&O&", &PyList_Type, &texts, &devices,
                        jpp_py_u32_converter, &machine.devices_per_rank,
                        jpp_py_u32_converter, &machine.cores, &machine.threads,
                        jpp_py_u32_converter, &machine.processes, &machine.call,
                        &machine.link.latency, &machine.link.bandwidth,
                        &machine.host.bandwidth, jpp_py_u32_converter, &options.steps,
                        jpp_py_u32_converter, &options.steps_in_flight) ||
      !jpp_py_to_u32s(devices, &rank_device, &count)) {
    return NULL;
  }
  const jpp_plan_t* of = ((jpp_py_plan_t*)plan)->plan;
  jpp_spans_t* spans = NULL;
  jpp_prediction_t* prediction = NULL;
  machine.rank_device = rank_device;
  if (count != of->ranks) {
    PyErr_Format(PyExc_ValueError, "expected a device for each of %u ranks, found %u",
                 of->ranks, count);
  } else if ((spans = read_texts(texts)) &&
             jpp_py_check(jpp_spans_predict(spans, of, &options, &prediction))) {
    result = prediction_to_tuple(prediction);
  }
  jpp_prediction_destroy(prediction);
  jpp_spans_destroy(spans);
  jpp_free(rank_device);
  return result;
}
