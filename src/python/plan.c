// jaxpp._core.Plan: takes a graph to a proved plan with jpp_plan_graph(), and searches
// for schedules by planning a step again.
#include <string.h>

#include "jaxpp/advise.h"
#include "jaxpp/view.h"
#include "python/core.h"

// --- Planning -------------------------------------------------------------------------

// Asks Python, during planning, how many bytes values take on a device.
typedef struct measuring {
  PyObject* measure;  // (Staged) -> bytes of every value, or None
  PyObject* staged;   // the Staged that was passed to it
  bool raised;
} measuring_t;

static bool ask(measuring_t* m, const jpp_staged_t* staged, uint64_t* out_bytes) {
  m->staged = jpp_py_staged_new(staged);
  if (!m->staged) return false;
  uint64_t* bytes = NULL;  // stays NULL for None
  PyObject* found = PyObject_CallFunctionObjArgs(m->measure, m->staged, NULL);
  bool ok = found && jpp_py_to_u64s(found, "bytes of values", staged->num_values, &bytes);
  if (bytes) memcpy(out_bytes, bytes, staged->num_values * sizeof(*bytes));
  jpp_free(bytes);
  Py_XDECREF(found);
  return ok;
}

static jpp_status_t* measure_values(void* context, const jpp_staged_t* staged,
                                    uint64_t* out_bytes) {
  measuring_t* m = context;
  PyGILState_STATE gil = PyGILState_Ensure();
  m->raised = !ask(m, staged, out_bytes);
  PyGILState_Release(gil);
  return m->raised ? jpp_status_make(JPP_CANCELLED, "an exception in Python") : NULL;
}

// Python may still hold the Staged that was passed to it.
static void settle_staged(const measuring_t* m, jpp_py_plan_t* plan) {
  jpp_py_staged_t* staged = (jpp_py_staged_t*)m->staged;
  if (!staged) return;
  if (plan->planned) {
    staged->plan = Py_NewRef((PyObject*)plan);
  } else {
    staged->staged = NULL;
  }
  Py_DECREF(m->staged);
}

typedef struct py_limits {
  jpp_memory_limits_t limits;
  const jpp_memory_limits_t* given;  // NULL: None was passed
  uint64_t* bytes;
  uint32_t* devices;
} py_limits_t;

static void free_limits(py_limits_t* limits) {
  jpp_free(limits->bytes);
  jpp_free(limits->devices);
}

// Reads None, or (bytes, devices) with a number for each rank; `devices` may be None.
// Returns false if it raised; otherwise the caller frees what was read.
static bool read_limits(PyObject* given, uint32_t ranks, py_limits_t* out_limits) {
  PyObject *bytes = NULL, *devices = NULL;
  py_limits_t limits = {0};
  *out_limits = limits;
  if (given == Py_None) return true;
  if (!PyTuple_Check(given)) {
    PyErr_Format(PyExc_TypeError, "expected None or (bytes, devices), found %.100R",
                 given);
    return false;
  }
  if (!PyArg_ParseTuple(given, "OO", &bytes, &devices)) return false;
  uint32_t count = ranks;
  bool ok = jpp_py_to_u64s(bytes, "memory limits", ranks, &limits.bytes);
  if (ok && devices != Py_None) ok = jpp_py_to_u32s(devices, &limits.devices, &count);
  ok = ok && jpp_py_check_count("devices of ranks", ranks, count);
  if (ok && !limits.bytes) {
    PyErr_SetString(PyExc_TypeError, "expected bytes for each rank, found None");
    ok = false;
  }
  if (!ok) {
    free_limits(&limits);
    return false;
  }
  *out_limits = limits;
  out_limits->limits =
      (jpp_memory_limits_t){.bytes = limits.bytes, .devices = limits.devices};
  out_limits->given = &out_limits->limits;
  return true;
}

// `limits`: NULL for none.
static bool make_plan(jpp_py_plan_t* self, jpp_plan_options_t* options,
                      const jpp_memory_limits_t* limits, measuring_t* measuring) {
  const jpp_graph_t* graph = ((jpp_py_graph_t*)self->graph)->graph;
  options->ranks = graph->ranks;
  if (measuring->measure != Py_None) {
    options->measure = measure_values;
    options->context = measuring;
  }
  jpp_planned_t* planned = NULL;
  jpp_status_t* status = NULL;
  Py_BEGIN_ALLOW_THREADS
    status = jpp_plan_graph(graph, options, &planned);
    if (!status && limits) status = jpp_advise_fit(planned, limits);
  Py_END_ALLOW_THREADS
  if (status) {
    jpp_planned_destroy(planned);
    planned = NULL;
  }
  self->planned = planned;
  settle_staged(measuring, self);
  if (measuring->raised) {  // the exception is already set
    jpp_status_free(status);
    return false;
  }
  if (self->planned)
    self->plan = self->planned->plan;  // NULL if only the graph was partitioned
  return jpp_py_check(status);
}

// True: all ranks; False, and None for those over their limits: NULL.
static bool read_offload(PyObject* offload, uint32_t ranks, bool** out_ranks) {
  *out_ranks = NULL;
  if (offload != Py_None && !PyBool_Check(offload)) {
    PyErr_Format(PyExc_TypeError, "expected True, False or None, found %.100R", offload);
    return false;
  }
  if (offload != Py_True) return true;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(ranks, out_ranks))) return false;
  memset(*out_ranks, true, ranks * sizeof(**out_ranks));
  return true;
}

// Reads the tables that the options point to, and frees them again.
static bool plan_with(jpp_py_plan_t* self, PyObject* schedules, PyObject* memory_limits,
                      PyObject* measure, PyObject* offload, jpp_plan_part_t last) {
  const jpp_graph_t* graph = ((jpp_py_graph_t*)self->graph)->graph;
  const jpp_schedule_t** table = NULL;
  jpp_loop_schedule_t* loops = NULL;
  bool* offload_ranks = NULL;
  py_limits_t limits = {0};
  self->schedules = jpp_py_read_schedules(schedules, graph->num_loops, &table);
  bool ok = self->schedules && read_limits(memory_limits, graph->ranks, &limits) &&
            read_offload(offload, graph->ranks, &offload_ranks) &&
            jpp_py_check(JPP_ALLOC_ARRAY(graph->num_loops, &loops));
  for (uint32_t l = 0; ok && l < graph->num_loops; ++l) {
    loops[l] = (jpp_loop_schedule_t){.struct_size = sizeof(*loops), .given = table[l]};
  }
  jpp_plan_options_t options = {.struct_size = sizeof(options),
                                .loops = loops,
                                .offload = offload_ranks,
                                .offload_over = offload == Py_None ? limits.given : NULL,
                                .last = last};
  measuring_t measuring = {.measure = measure};
  ok = ok && make_plan(self, &options, limits.given, &measuring);
  jpp_free(table);
  jpp_free(loops);
  jpp_free(offload_ranks);
  free_limits(&limits);
  return ok;
}

static PyObject* plan_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (!jpp_py_refuse_keywords(kwargs)) return NULL;
  PyObject *graph = NULL, *schedules = NULL, *memory_limits = NULL, *measure = NULL;
  PyObject* offload = NULL;
  if (!PyArg_ParseTuple(args, "O!OOOO:Plan", jpp_py_types.graph, &graph, &schedules,
                        &memory_limits, &measure, &offload)) {
    return NULL;
  }
  if (!((jpp_py_graph_t*)graph)->graph) {
    return PyErr_Format(PyExc_RuntimeError, "finish() the graph first");
  }
  if (measure != Py_None && !PyCallable_Check(measure)) {
    return PyErr_Format(PyExc_TypeError, "expected a function or None, found %.100R",
                        measure);
  }
  jpp_py_plan_t* self = jpp_py_new(type);
  if (!self) return NULL;
  self->graph = Py_NewRef(graph);
  if (plan_with(self, schedules, memory_limits, measure, offload, JPP_PART_CHECK)) {
    return (PyObject*)self;
  }
  Py_DECREF(self);
  return NULL;
}

static PyObject* plan_partition(PyObject* unused, PyObject* args) {
  (void)unused;
  PyObject *graph = NULL, *schedules = NULL;
  if (!PyArg_ParseTuple(args, "O!O", jpp_py_types.graph, &graph, &schedules)) return NULL;
  if (!((jpp_py_graph_t*)graph)->graph) {
    return PyErr_Format(PyExc_RuntimeError, "finish() the graph first");
  }
  jpp_py_plan_t* self = jpp_py_new(jpp_py_types.plan);
  if (!self) return NULL;
  self->graph = Py_NewRef(graph);
  PyObject* staged = NULL;
  if (plan_with(self, schedules, Py_None, Py_None, Py_False, JPP_PART_PARTITION)) {
    staged = jpp_py_staged_new(self->planned->staged);
  }
  if (staged) ((jpp_py_staged_t*)staged)->plan = Py_NewRef((PyObject*)self);
  Py_DECREF(self);
  return staged;
}

PyObject* jpp_py_plan_of_file(PyObject* file, const jpp_planned_t* planned) {
  jpp_py_plan_t* self = jpp_py_new(jpp_py_types.plan);
  if (!self) return NULL;
  self->file = Py_NewRef(file);
  self->planned = planned;
  self->plan = planned->plan;
  return (PyObject*)self;
}

static void plan_dealloc(PyObject* object) {
  jpp_py_plan_t* self = (jpp_py_plan_t*)object;
  if (!self->file) jpp_planned_destroy((jpp_planned_t*)self->planned);
  Py_XDECREF(self->file);
  Py_XDECREF(self->schedules);
  Py_XDECREF(self->graph);
  jpp_py_free(object);
}

// --- Reading --------------------------------------------------------------------------

static const jpp_plan_t* plan_of(PyObject* object) {
  return ((jpp_py_plan_t*)object)->plan;
}

static PyObject* make_donation(const void* donated_to, uint64_t input) {
  return jpp_py_none_or_u32(((const uint32_t*)donated_to)[input]);
}

static PyObject* make_donations(const void* context, uint64_t task) {
  const jpp_plan_t* plan = context;
  return jpp_py_make_list(plan->staged->tasks[task].num_inputs, make_donation,
                          plan->bindings[task].donated_to);
}

static PyObject* make_copy(const void* copies, uint64_t result) {
  const jpp_copy_t* copy = &((const jpp_copy_t*)copies)[result];
  return Py_BuildValue("(NO)", jpp_py_none_or_u32(copy->input),
                       copy->by_rows ? Py_True : Py_False);
}

static PyObject* make_copies(const void* context, uint64_t task) {
  const jpp_plan_t* plan = context;
  uint32_t results = plan->staged->tasks[task].num_outputs;
  jpp_copy_t* copies = NULL;
  if (!jpp_py_check(JPP_ALLOC_ARRAY(results, &copies))) return NULL;
  PyObject* list = jpp_plan_task_copies(plan, (uint32_t)task, copies)
                       ? jpp_py_make_list(results, make_copy, copies)
                       : Py_NewRef(Py_None);
  jpp_free(copies);
  return list;
}

static PyObject* plan_copies(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_plan_t* plan = plan_of(object);
  return jpp_py_make_list(plan->staged->num_tasks, make_copies, plan);
}

static PyObject* plan_donations(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_plan_t* plan = plan_of(object);
  return jpp_py_make_list(plan->staged->num_tasks, make_donations, plan);
}

static PyObject* make_summary(const void* programs, uint64_t rank) {
  const jpp_program_t* program = &((const jpp_program_t*)programs)[rank];
  return JPP_PY_RECORD(JPP_PY_RANK_SUMMARY, PyLong_FromUnsignedLong(program->num_instrs),
                       PyLong_FromUnsignedLongLong(program->peak_bytes),
                       PyLong_FromUnsignedLongLong(program->reserved_bytes),
                       PyLong_FromUnsignedLongLong(program->peak_host_bytes));
}

static PyObject* plan_summary(PyObject* object, PyObject* unused) {
  (void)unused;
  const jpp_plan_t* plan = plan_of(object);
  return jpp_py_make_list(plan->ranks, make_summary, plan->programs);
}

static PyObject* make_rank_costs(const void* ranks, uint64_t index) {
  const jpp_rank_costs_t* rank = &((const jpp_rank_costs_t*)ranks)[index];
  return Py_BuildValue("(IdKK)", rank->tasks, rank->flops,
                       (unsigned long long)rank->peak_bytes,
                       (unsigned long long)rank->peak_host_bytes);
}

static PyObject* make_link_costs(const void* links, uint64_t index) {
  const jpp_link_costs_t* link = &((const jpp_link_costs_t*)links)[index];
  return Py_BuildValue("(IIKK)", link->src, link->dst, (unsigned long long)link->messages,
                       (unsigned long long)link->bytes);
}

static PyObject* make_collective_costs(const void* collectives, uint64_t index) {
  const jpp_collective_costs_t* row =
      &((const jpp_collective_costs_t*)collectives)[index];
  return Py_BuildValue("(INNNKK)", row->rank, jpp_py_text(row->task),
                       jpp_py_text(row->kind), jpp_py_text(row->axes),
                       (unsigned long long)row->times, (unsigned long long)row->bytes);
}

PyObject* jpp_py_from_collective_costs(const jpp_plan_costs_t* costs) {
  return jpp_py_make_list(costs->num_collectives, make_collective_costs,
                          costs->collectives);
}

// `item` is a tuple that make_collective_costs() made.
static bool add_collective(jpp_plan_costs_t* costs, PyObject* item) {
  jpp_py_utf8_t task = {0}, kind = {0}, axes = {0};
  jpp_collective_costs_t row = {0};
  if (!PyTuple_Check(item)) {
    PyErr_SetString(PyExc_TypeError, "expected a list of tuples");
    return false;
  }
  if (!PyArg_ParseTuple(item, "O&O&O&O&O&O&", jpp_py_u32_converter, &row.rank,
                        jpp_py_str_converter, &task, jpp_py_str_converter, &kind,
                        jpp_py_str_converter, &axes, jpp_py_u64_converter, &row.times,
                        jpp_py_u64_converter, &row.bytes)) {
    return false;
  }
  row.task = task.text;
  row.kind = kind.text;
  row.axes = axes.text;
  bool ok = jpp_py_check(jpp_plan_costs_add_collective(costs, &row));
  jpp_py_utf8_release(&task);
  jpp_py_utf8_release(&kind);
  jpp_py_utf8_release(&axes);
  return ok;
}

// The costs of the plan with a list of collectives, the only argument;
// jpp_plan_costs_destroy() frees them. NULL if it raised.
static jpp_plan_costs_t* costs_with(PyObject* object, PyObject* args) {
  PyObject* rows = NULL;
  jpp_plan_costs_t* costs = NULL;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &rows) ||
      !jpp_py_check(jpp_plan_costs(plan_of(object), &costs))) {
    return NULL;
  }
  bool ok = true;
  for (Py_ssize_t i = 0; ok && i < PyList_Size(rows); ++i) {
    ok = add_collective(costs, PyList_GetItem(rows, i));
  }
  if (ok) return costs;
  jpp_plan_costs_destroy(costs);
  return NULL;
}

static PyObject* plan_costs(PyObject* object, PyObject* args) {
  jpp_plan_costs_t* costs = costs_with(object, args);
  char* text = NULL;
  PyObject* result = NULL;
  if (costs && jpp_py_check(jpp_plan_costs_print(costs, &text))) {
    result = Py_BuildValue(
        "(NNNN)", jpp_py_make_list(costs->num_ranks, make_rank_costs, costs->ranks),
        jpp_py_make_list(costs->num_links, make_link_costs, costs->links),
        jpp_py_from_collective_costs(costs), jpp_py_take_text(text));
  }
  jpp_plan_costs_destroy(costs);
  return result;
}

static PyObject* plan_explain(PyObject* object, PyObject* args) {
  jpp_plan_costs_t* costs = costs_with(object, args);
  const jpp_planned_t* planned = ((jpp_py_plan_t*)object)->planned;
  char* text = NULL;
  bool ok = costs && jpp_py_check(jpp_planned_summarize(planned, costs, &text));
  jpp_plan_costs_destroy(costs);
  return ok ? jpp_py_take_text(text) : NULL;
}

static PyObject* plan_explain_memory(PyObject* object, PyObject* args) {
  uint32_t rank = 0;
  jpp_py_utf8_t message = {0};
  if (!PyArg_ParseTuple(args, "O&O&", jpp_py_u32_converter, &rank, jpp_py_str_converter,
                        &message)) {
    return NULL;
  }
  if (rank >= plan_of(object)->ranks) {
    jpp_py_utf8_release(&message);
    return PyErr_Format(PyExc_IndexError, "no rank %u", rank);
  }
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

// After an exception it is not called again.
static void append_sharding(void* user, uint32_t value, jpp_str_t* str) {
  if (PyErr_Occurred()) return;
  PyObject* text = PyObject_CallFunction(user, "I", value);
  const char* utf8 = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
  if (utf8) jpp_str_append(str, utf8);
  Py_XDECREF(text);
}

static PyObject* plan_program_text(PyObject* object, PyObject* sharding_of) {
  const jpp_planned_t* planned = ((jpp_py_plan_t*)object)->planned;
  char* text = NULL;
  if (!jpp_py_check(jpp_plan_print_jaxpr(planned->plan, planned->schedules,
                                         append_sharding, sharding_of, &text))) {
    return NULL;
  }
  if (!PyErr_Occurred()) return jpp_py_take_text(text);
  jpp_text_free(text);
  return NULL;
}

static PyObject* plan_staged(PyObject* object, PyObject* unused) {
  (void)unused;
  PyObject* staged = jpp_py_staged_new(plan_of(object)->staged);
  if (staged) ((jpp_py_staged_t*)staged)->plan = Py_NewRef(object);
  return staged;
}

static PyObject* plan_proof(PyObject* object, PyObject* unused) {
  (void)unused;
  char* text = NULL;
  const jpp_check_report_t* report = ((jpp_py_plan_t*)object)->planned->report;
  if (!jpp_py_check(jpp_check_report_print(report, &text))) return NULL;
  return jpp_py_take_text(text);
}

// --- Search ---------------------------------------------------------------------------

// Fills in the loop's sizes for a search; `schedules` has a schedule of these sizes.
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

static PyObject* search_for_loop(const jpp_advise_search_t* step, PyObject* costs,
                                 double seconds) {
  jpp_search_options_t options = {
      .struct_size = sizeof(options), .seconds = seconds, .poll = jpp_py_poll};
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
  return ok ? jpp_py_found_to_record(&result) : NULL;
}

// The plan must be one of a trial of the graph, with fewer microbatches but the same
// values.
static bool check_like(const jpp_advise_search_t* step) {
  const jpp_graph_t* like = step->like->staged->graph;
  const jpp_graph_t* graph = step->graph;
  if (!graph) {
    PyErr_SetString(PyExc_RuntimeError, "finish() the graph first");
    return false;
  }
  if (step->loop >= graph->num_loops) {
    PyErr_Format(PyExc_IndexError, "no loop %u", step->loop);
    return false;
  }
  return jpp_py_check_count("values of the graph", like->num_values, graph->num_values) &&
         jpp_py_check_count("loops of the graph", like->num_loops, graph->num_loops);
}

static bool check_ranks(const jpp_advise_search_t* step) {
  for (uint32_t l = 0; l < step->graph->num_loops; ++l) {
    if (!jpp_py_check_count("ranks of a schedule", step->like->ranks,
                            step->schedules[l]->ranks)) {
      return false;
    }
  }
  return true;
}

static PyObject* plan_search(PyObject* object, PyObject* args) {
  PyObject *graph = NULL, *list = NULL, *costs = NULL, *limits = NULL;
  jpp_advise_search_t step = {.like = plan_of(object)};
  double seconds = 0;
  PyObject* offload = NULL;
  if (!PyArg_ParseTuple(args, "O!O&OOOdO", jpp_py_types.graph, &graph,
                        jpp_py_u32_converter, &step.loop, &list, &costs, &limits,
                        &seconds, &offload)) {
    return NULL;
  }
  step.graph = ((jpp_py_graph_t*)graph)->graph;
  if (!check_like(&step)) return NULL;
  const jpp_schedule_t** schedules = NULL;
  py_limits_t bounds = {0};
  PyObject* kept = jpp_py_read_schedules(list, step.graph->num_loops, &schedules);
  step.schedules = schedules;
  bool* offload_ranks = NULL;
  bool ok = kept && check_ranks(&step) &&
            read_limits(limits, step.like->ranks, &bounds) &&
            read_offload(offload, step.like->ranks, &offload_ranks);
  step.limits = bounds.given;
  step.offload = offload_ranks;
  step.offload_over = offload == Py_None ? bounds.given : NULL;
  PyObject* found = ok ? search_for_loop(&step, costs, seconds) : NULL;
  jpp_free(schedules);
  jpp_free(offload_ranks);
  free_limits(&bounds);
  Py_XDECREF(kept);
  return found;
}

static PyObject* plan_check_host_limit(PyObject* object, PyObject* given) {
  const jpp_planned_t* planned = ((jpp_py_plan_t*)object)->planned;
  py_limits_t limits = {0};
  if (!read_limits(given, planned->ranks, &limits)) return NULL;
  bool ok =
      !limits.given || jpp_py_check(jpp_check_host_limit(planned->report, limits.given));
  free_limits(&limits);
  if (!ok) return NULL;
  Py_RETURN_NONE;
}

static PyObject* plan_steps_in_flight(PyObject* object, PyObject* args) {
  const jpp_planned_t* planned = ((jpp_py_plan_t*)object)->planned;
  PyObject* given = NULL;
  uint32_t wanted = 0;
  py_limits_t limits = {0};
  if (!PyArg_ParseTuple(args, "OO&", &given, jpp_py_u32_converter, &wanted) ||
      !read_limits(given, planned->ranks, &limits)) {
    return NULL;
  }
  uint32_t steps = jpp_check_steps_in_flight(planned->report, limits.given, wanted);
  free_limits(&limits);
  return PyLong_FromUnsignedLong(steps);
}

static bool set_hash(PyObject* dict, const char* name, uint64_t hash) {
  PyObject* number = PyLong_FromUnsignedLongLong(hash);
  bool ok = number && PyDict_SetItemString(dict, name, number) == 0;
  Py_XDECREF(number);
  return ok;
}

static PyObject* plan_hashes(PyObject* object, PyObject* unused) {
  (void)unused;
  jpp_plan_hashes_t hashes;
  jpp_planned_hash(((jpp_py_plan_t*)object)->planned, &hashes);
  PyObject* dict = PyDict_New();
  if (dict && set_hash(dict, "arguments", hashes.arguments) &&
      set_hash(dict, "graph", hashes.graph) &&
      set_hash(dict, "schedule", hashes.schedule) &&
      set_hash(dict, "program", hashes.program)) {
    return dict;
  }
  Py_XDECREF(dict);
  return NULL;
}

static PyMethodDef kMethods[] = {
    {"partition", plan_partition, METH_VARARGS | METH_STATIC,
     "partition(graph, schedules, /)\n--\n\nPartitions a graph into tasks, without "
     "planning it."},
    {"staged", plan_staged, METH_NOARGS,
     "staged($self, /)\n--\n\nThe graph, partitioned into tasks."},
    {"proof", plan_proof, METH_NOARGS,
     "proof($self, /)\n--\n\nThe checker's report: runs, transfers, peaks by kind."},
    {"donations", plan_donations, METH_NOARGS,
     "donations($self, /)\n--\n\n"
     "For each input of each task, the output that takes over its memory, or None."},
    {"copies", plan_copies, METH_NOARGS,
     "copies($self, /)\n--\n\n"
     "For each task, None, or if it only copies and fills with zeros, for each result "
     "the input that it copies from (None: zeros), and whether it takes whole rows of "
     "it. Such a task needs no module on a rank of one device."},
    {"summary", plan_summary, METH_NOARGS,
     "summary($self, /)\n--\n\nA RankSummary for each rank."},
    {"costs", plan_costs, METH_VARARGS,
     "costs($self, collectives, /)\n--\n\n"
     "The costs of a step: (tasks, FLOPs, peak bytes, peak host bytes) for each rank, "
     "(src, dst, messages, bytes) for each link, the given collectives, and a table."},
    {"search", plan_search, METH_VARARGS,
     "search($self, graph, loop, schedules, costs, memory_limits, seconds, offload, "
     "/)\n--\n\n"
     "Searches for a schedule for a loop of the graph, with this plan's sizes of "
     "values."},
    {"predict", jpp_py_plan_predict, METH_VARARGS,
     "predict($self, traces, rank_devices, devices_per_rank, cores, threads, processes, "
     "call, latency, bandwidth, host_bandwidth, steps, steps_in_flight, /)\n--\n\n"
     "(makespan, period, bubble, busy time of each rank, table, trace) of a step with "
     "the "
     "task times of these traces; 0 for what the library chooses."},
    {"save", jpp_py_plan_save, METH_VARARGS,
     "save($self, path, platform, devices_per_rank, device_ids, axis_names, axis_sizes, "
     "steps_in_flight, compile_options, modules, task_modules, shard_dims, layouts, "
     "constants, front, /)\n--\n\n"
     "Writes a plan file. `task_modules`: NONE for a task without ops. `shard_dims`: for "
     "a task that the runtime can copy, the dims of its results on each device; None for "
     "others. `layouts`: None, or flat, for each argument and result, the shape of a "
     "shard and the first index of each device's shard."},
    {"explain", plan_explain, METH_VARARGS,
     "explain($self, collectives, /)\n--\n\n"
     "The output of `jaxpp plan`, with Runtime.collectives()."},
    {"explain_memory", plan_explain_memory, METH_VARARGS,
     "explain_memory($self, rank, message, /)\n--\n\n"
     "Extends an out-of-memory message with the plan's memory use of the rank."},
    {"hashes", plan_hashes, METH_NOARGS,
     "hashes($self, /)\n--\n\nThe plan's hashes, ordered from likely causes of a "
     "difference to their consequences."},
    {"check_host_limit", plan_check_host_limit, METH_O,
     "check_host_limit($self, limits, /)\n--\n\n"
     "Raises unless the peaks in pinned host memory are within the limits."},
    {"steps_in_flight", plan_steps_in_flight, METH_VARARGS,
     "steps_in_flight($self, memory_limits, wanted, /)\n--\n\n"
     "How many steps, at most `wanted`, may be in flight within the limits (or None)."},
    {"program_text", plan_program_text, METH_O,
     "program_text($self, sharding_of, /)\n--\n\nAll actors, as a jaxpr. "
     "sharding_of(value) returns the layout of a transferred value as text."},
    {"text", plan_text, METH_NOARGS, "text($self, /)\n--\n\nThe programs' text form."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot kSlots[] = {
    {Py_tp_doc,
     "Plan(graph, schedules, memory_limits, measure, offload, /)\n--\n\n"
     "The proved programs of all ranks. `memory_limits`: None, or (bytes for each rank, "
     "the group of devices of each rank, whose needs add up, or None). `measure`, if not "
     "None, is called with the Staged and gives the bytes of "
     "every value on one device, or None. `offload`: whether activations wait in host "
     "memory; None: on ranks over their limits."},
    {Py_tp_new, (void*)plan_new},
    {Py_tp_dealloc, (void*)plan_dealloc},
    {Py_tp_methods, kMethods},
    {0, NULL},
};
PyType_Spec jpp_py_plan_spec = {"jaxpp._core.Plan", sizeof(jpp_py_plan_t), 0,
                                Py_TPFLAGS_DEFAULT, kSlots};
