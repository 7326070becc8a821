// jaxpp._core.Plan: the programs of all actors.
#include "base/vec.h"
#include "jaxpp/advise.h"
#include "python/core.h"

static bool read_schedules(PyObject* sequence, const jpp_schedule_t** schedules,
                           uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    PyObject* item = PySequence_GetItem(sequence, i);
    if (!item) return false;
    schedules[i] = ((jpp_py_schedule_t*)item)->schedule;
    Py_DECREF(item);  // the caller's sequence still holds it
  }
  return true;
}

static bool build(jpp_py_plan_t* self, PyObject* schedules, PyObject* value_bytes) {
  const jpp_staged_t* staged = ((jpp_py_staged_t*)self->staged)->staged;
  uint32_t loops = staged->graph->num_loops;
  const jpp_schedule_t** table = NULL;
  uint64_t* bytes = NULL;
  bool ok = jpp_py_check(JPP_ALLOC_ARRAY(loops, &table)) &&
            read_schedules(schedules, table, loops) &&
            jpp_py_to_u64s(value_bytes, staged->num_values, &bytes);
  if (ok) {
    jpp_program_options_t options = {.schedules = table, .value_bytes = bytes};
    jpp_status_t* status = NULL;
    Py_BEGIN_ALLOW_THREADS
      status = jpp_program_build(staged, &options, &self->plan);
    Py_END_ALLOW_THREADS
    ok = jpp_py_check(status);
  }
  jpp_free(table);
  jpp_free(bytes);
  return ok;
}

static PyObject* plan_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  (void)kwargs;
  PyObject *staged = NULL, *schedules = NULL, *value_bytes = NULL;
  if (!PyArg_ParseTuple(args, "O!OO", jpp_py_types.staged, &staged, &schedules,
                        &value_bytes)) {
    return NULL;
  }
  jpp_py_plan_t* self = jpp_py_new(type);
  if (!self) return NULL;
  self->staged = Py_NewRef(staged);
  if (build(self, schedules, value_bytes)) return (PyObject*)self;
  Py_DECREF(self);
  return NULL;
}

static void plan_dealloc(PyObject* object) {
  jpp_py_plan_t* self = (jpp_py_plan_t*)object;
  jpp_plan_destroy(self->plan);
  Py_XDECREF(self->staged);
  jpp_py_free(object);
}

static const jpp_plan_t* plan_of(PyObject* object) {
  return ((jpp_py_plan_t*)object)->plan;
}

// For each task a list: None, or the output that takes over the input's memory.
static PyObject* task_donations(const jpp_plan_t* plan, uint32_t task) {
  uint32_t count = plan->staged->tasks[task].num_inputs;
  PyObject* list = PyList_New(count);
  for (uint32_t i = 0; list && i < count; ++i) {
    uint32_t output = plan->bindings[task].donated_to[i];
    PyObject* item =
        output == JPP_NONE ? Py_NewRef(Py_None) : PyLong_FromUnsignedLong(output);
    if (!item || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject* plan_donations(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_plan_t* plan = plan_of(object);
  PyObject* list = PyList_New(plan->staged->num_tasks);
  for (uint32_t t = 0; list && t < plan->staged->num_tasks; ++t) {
    PyObject* item = task_donations(plan, t);
    if (!item || PyList_SetItem(list, t, item) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject* plan_summary(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_plan_t* plan = plan_of(object);
  PyObject* list = PyList_New(plan->ranks);
  for (uint32_t r = 0; list && r < plan->ranks; ++r) {
    const jpp_program_t* program = &plan->programs[r];
    PyObject* item = Py_BuildValue("(IKK)", program->num_instrs,
                                   (unsigned long long)program->peak_bytes,
                                   (unsigned long long)program->reserved_bytes);
    if (!item || PyList_SetItem(list, r, item) < 0) Py_CLEAR(list);
  }
  return list;
}

static PyObject* plan_explain_memory(PyObject* object, PyObject* args) {
  unsigned int rank = 0;
  jpp_py_utf8_t message = {0};
  if (!PyArg_ParseTuple(args, "IO&", &rank, jpp_py_utf8_converter, &message)) return NULL;
  jpp_status_t* status = jpp_status_make(JPP_OUT_OF_MEMORY, "%s", message.text);
  jpp_py_utf8_release(&message);
  status = jpp_plan_explain_memory(plan_of(object), rank, status);
  PyObject* text = jpp_py_text(jpp_status_message(status));
  jpp_status_free(status);
  return text;
}

static PyObject* plan_text(PyObject* object, PyObject* unused) {
  (void)unused;
  char* text = NULL;
  if (!jpp_py_check(jpp_plan_print(plan_of(object), &text))) return NULL;
  return jpp_py_take_text(text);
}

static PyObject* plan_program_text(PyObject* object, PyObject* unused) {
  (void)unused;
  char* text = NULL;
  if (!jpp_py_check(jpp_plan_print_jaxpr(plan_of(object), &text))) return NULL;
  return jpp_py_take_text(text);
}

static jpp_status_t* measure_like(void* context, const jpp_staged_t* staged,
                                  uint64_t* out_bytes) {
  const jpp_plan_t* plan = context;
  for (uint32_t v = 0; v < staged->num_values; ++v) out_bytes[v] = plan->value_bytes[v];
  return NULL;
}

static jpp_status_t* check_limits(const jpp_plan_t* plan,
                                  const jpp_check_report_t* report,
                                  const jpp_schedule_t* const* schedules,
                                  const uint64_t* limits) {
  jpp_status_t* status = jpp_check_memory_limit(report, limits);
  const jpp_graph_t* graph = plan->staged->graph;
  jpp_loop_schedule_t* loops = NULL;
  if (!status) return NULL;
  jpp_status_t* failed = JPP_ALLOC_ARRAY(graph->num_loops, &loops);
  for (uint32_t l = 0; loops && l < graph->num_loops; ++l) loops[l].given = schedules[l];
  jpp_plan_options_t options = {.ranks = plan->ranks,
                                .loops = loops,
                                .memory_limits = limits,
                                .measure = measure_like,
                                .context = (void*)plan};
  if (!failed) status = jpp_advise_fit(graph, &options, status);
  jpp_status_free(failed);
  jpp_free(loops);
  return status;
}

// Proves the plan from its instruction lists alone; what the proof found, as text.
static PyObject* plan_check(PyObject* object, PyObject* args) {
  const jpp_plan_t* plan = plan_of(object);
  PyObject *list = NULL, *memory_limits = NULL;
  if (!PyArg_ParseTuple(args, "OO", &list, &memory_limits)) return NULL;
  uint32_t loops = plan->staged->graph->num_loops;
  const jpp_schedule_t** schedules = NULL;
  uint64_t* limits = NULL;
  bool ok = jpp_py_check(JPP_ALLOC_ARRAY(loops, &schedules)) &&
            read_schedules(list, schedules, loops) &&
            jpp_py_to_u64s(memory_limits, plan->ranks, &limits);
  jpp_check_report_t* report = NULL;
  jpp_status_t* status = NULL;
  if (ok) {
    Py_BEGIN_ALLOW_THREADS
      status = jpp_check_plan(plan, &report);
      if (!status && limits) status = check_limits(plan, report, schedules, limits);
    Py_END_ALLOW_THREADS
  }
  jpp_free(schedules);
  jpp_free(limits);
  if (!ok) return NULL;
  char* text = NULL;
  if (!status) status = jpp_check_report_print(report, &text);
  jpp_check_report_destroy(report);
  return jpp_py_check(status) ? jpp_py_take_text(text) : NULL;
}

static PyObject* found_to_tuple(jpp_search_result_t* result) {
  const char* name = result->schedule->name;
  PyObject* schedule = jpp_py_wrap_schedule(result->schedule);
  if (!schedule) return NULL;
  return Py_BuildValue("(NsddzdK)", schedule, name, result->makespan, result->bound,
                       result->built_in, result->built_in_makespan,
                       (unsigned long long)result->tried);
}

// Fills in what a search needs of a loop's sizes; `schedules` has one of these sizes.
static bool read_search(const jpp_advise_search_t* step, PyObject* list,
                        jpp_search_options_t* options, jpp_cost_t** out_costs) {
  const jpp_schedule_t* like = step->schedules[step->loop];
  options->stages = like->stages;
  options->ranks = like->ranks;
  options->microbatches = like->microbatches;
  bool ok = jpp_py_check(JPP_ALLOC_ARRAY(options->stages, out_costs)) &&
            jpp_py_read_costs(list, options->stages, *out_costs);
  options->costs = *out_costs;
  return ok;
}

static PyObject* search(const jpp_advise_search_t* step, PyObject* costs,
                        double seconds) {
  jpp_search_options_t options = {.seconds = seconds, .poll = jpp_py_poll};
  jpp_search_result_t result = {0};
  jpp_cost_t* table = NULL;
  bool ok = read_search(step, costs, &options, &table);
  if (ok) {
    jpp_status_t* status = NULL;
    Py_BEGIN_ALLOW_THREADS
      status = jpp_advise_search(step, &options, &result);
    Py_END_ALLOW_THREADS
    ok = jpp_py_check_search(status);
  }
  jpp_free(table);
  return ok ? found_to_tuple(&result) : NULL;
}

static PyObject* plan_search(PyObject* object, PyObject* args) {
  PyObject *graph = NULL, *list = NULL, *costs = NULL, *limits = NULL;
  jpp_advise_search_t step = {.like = plan_of(object)};
  double seconds = 0;
  if (!PyArg_ParseTuple(args, "O!IOOOd", jpp_py_types.graph, &graph, &step.loop, &list,
                        &costs, &limits, &seconds)) {
    return NULL;
  }
  step.graph = ((jpp_py_graph_t*)graph)->graph;
  if (!step.graph || step.loop >= step.graph->num_loops) {
    return PyErr_Format(PyExc_IndexError, "no loop %u", step.loop);
  }
  const jpp_schedule_t** schedules = NULL;
  uint64_t* bytes = NULL;
  bool ok = jpp_py_check(JPP_ALLOC_ARRAY(step.graph->num_loops, &schedules)) &&
            read_schedules(list, schedules, step.graph->num_loops) &&
            jpp_py_to_u64s(limits, step.like->ranks, &bytes);
  step.schedules = schedules;
  step.limits = bytes;
  PyObject* found = ok ? search(&step, costs, seconds) : NULL;
  jpp_free(schedules);
  jpp_free(bytes);
  return found;
}

static PyMethodDef kMethods[] = {
    {"check", plan_check, METH_VARARGS,
     "(schedules, bytes a rank may take or None) -> what the proof found. Proves that it "
     "runs: no deadlock, no use before definition, no leak, peak bytes within limits."},
    {"donations", plan_donations, METH_NOARGS,
     "A list per task of None or the output that takes over the input's memory."},
    {"summary", plan_summary, METH_NOARGS,
     "A list per rank of (instructions, peak bytes, bytes of receive slots)."},
    {"search", plan_search, METH_VARARGS,
     "(graph, loop, schedules, costs of the loop's stages, bytes a rank may take or "
     "None, "
     "seconds) -> (Schedule, name, makespan, bound, best built-in, its makespan, tried), "
     "with this plan's bytes of values"},
    {"explain_memory", plan_explain_memory, METH_VARARGS,
     "(rank, message): an out-of-memory message with what the plan says of the rank."},
    {"program_text", plan_program_text, METH_NOARGS, "All actors, as a jaxpr."},
    {"text", plan_text, METH_NOARGS, "The programs' text form."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_new, (void*)plan_new},
    {Py_tp_dealloc, (void*)plan_dealloc},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_plan_spec = {"jaxpp._core.Plan", sizeof(jpp_py_plan_t), 0,
                                Py_TPFLAGS_DEFAULT, kSlots};
