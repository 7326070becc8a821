// The values that methods of jaxpp._core return: a record type for each kind of row,
// whose fields Python reads by name; and the library's enums as ints, so that Python need
// not repeat them.
#include <string.h>

#include "jaxpp/advise.h"
#include "python/core.h"

// --- Records --------------------------------------------------------------------------

static PyStructSequence_Field kStagedTask[] = {
    {"name", "as in texts and traces: \"fwd_0\""},
    {"kind", "TASK_FWD, ..."},
    {"rank", "where it runs"},
    {"loop", "None outside the loops"},
    {"stage", "None outside the loops"},
    {"ops", "ids, in an order that can run"},
    {"inputs", "value ids"},
    {"outputs", "value ids"},
    {"repeats",
     "the first task with the same ops, inputs and outputs; its own id if none"},
    {NULL, NULL},
};

static PyStructSequence_Field kStagedOp[] = {
    {"kind", "OP_CALL, ..."},
    {"attr", "what it means depends on the kind"},
    {"loop", "None outside the loops"},
    {"inputs", "value ids"},
    {"first_output", "value id"},
    {"num_outputs", "with consecutive ids"},
    {NULL, NULL},
};

static PyStructSequence_Field kPlacedValue[] = {
    {"value", "its id"},
    {"ranks", "that hold it"},
    {"memory", "\"device\" or \"pinned_host\""},
    {NULL, NULL},
};

static PyStructSequence_Field kRankSummary[] = {
    {"instructions", "of a step"},
    {"peak_bytes", "on each device of the rank"},
    {"reserved_bytes", "of them: receive slots"},
    {"peak_host_bytes", "in pinned host memory, for each device of the rank"},
    {NULL, NULL},
};

static PyStructSequence_Field kSearchResult[] = {
    {"schedule", "proved"},
    {"name", "of a built-in schedule, or \"searched\""},
    {"makespan", "in the unit of the costs"},
    {"bound", "no schedule is shorter"},
    {"built_in", "the best built-in schedule that fits; None: none fits"},
    {"built_in_makespan", "0 without one"},
    {"tried", "how many schedules"},
    {"activations", "of ranks over the limit: \"kept\", \"offloaded\", \"recomputed\""},
    {"makespans", "the shortest found with each of these; 0: none fits, or not tried"},
    {"offloads", "whether it fits only if ranks over their limits offload"},
    {NULL, NULL},
};

static PyStructSequence_Field kDeviceInfo[] = {
    {"id", "as the plugin numbers it"},
    {"kind", "as the plugin calls it"},
    {"hardware_id", "its number among the machine's devices"},
    {NULL, NULL},
};

static PyStructSequence_Field kGlobalDevice[] = {
    {"id", "the plugin's"},
    {"node", "whose client can address it"},
    {"kind", NULL},
    {NULL, NULL},
};

static PyStructSequence_Field kClientInfo[] = {
    {"platform", "\"cpu\""},
    {"version", "of the platform"},
    {"devices", "a list of DeviceInfo"},
    {"global_devices",
     "a list of GlobalDevice: these devices, then those of other nodes"},
    {NULL, NULL},
};

static PyStructSequence_Field kCompiled[] = {
    {"executable", "an Executable"},
    {"written", "False if it could not be written to the folder"},
    {NULL, NULL},
};

static PyStructSequence_Field kPlanFileContents[] = {
    {"maker", "the writer: \"jaxpp 0.2.0\""},
    {"platform", "of the devices that the modules were compiled for"},
    {"devices_per_rank", NULL},
    {"device_ids", "the plugin's ids, rank after rank"},
    {"compile_options", "a CompileOptionsProto without a device assignment"},
    {"modules", "StableHLO, a list of bytes"},
    {"task_modules", "the module of each task; None for a task without ops"},
    {"shard_dims",
     "of each task that the runtime can copy, the dims of its results on each device; "
     "None for others"},
    {"constants", "the last arguments, a list of bytes"},
    {"front", "data of the front end"},
    {NULL, NULL},
};

static PyStructSequence_Field kScheduleInfo[] = {
    {"name", "\"interleaved-1f1b\""},
    {"class_name", "\"Interleaved1F1B\""},
    {"help", "one line"},
    {"paper", "its arXiv number, or author and year"},
    {"stages_a_rank", "0: any"},
    {"can_fuse", "whether it supports fuse_steady_state"},
    {"example", "ScheduleSizes that it supports"},
    {NULL, NULL},
};

static PyStructSequence_Field kScheduleSizes[] = {
    {"stages", NULL},
    {"ranks", NULL},
    {"microbatches", NULL},
    {NULL, NULL},
};

static PyStructSequence_Field kScheduleTask[] = {
    {"kind", "TASK_IDLE, TASK_FWD, ..."},
    {"joins_next", "whether it is fused with the next one"},
    {"latency", "in steps of the schedule"},
    {"stage", NULL},
    {"microbatch", NULL},
    {NULL, NULL},
};

static PyStructSequence_Field kStageCosts[] = {
    {"forward", "of a microbatch, in ms"},
    {"backward", "of the input gradients, or of the whole backward"},
    {"weight", "of its weight gradients"},
    {"forward_spread", "the standard deviation of what was measured"},
    {"backward_spread", NULL},
    {"weight_spread", NULL},
    {NULL, NULL},
};

static PyStructSequence_Field kTaskRun[] = {
    {"rank", NULL},
    {"task", "its name"},
    {"microbatch", "-1 outside the loops"},
    {"issued", "in ns from the step's begin"},
    {"start", "when the device could begin"},
    {"end", "when the results existed"},
    {NULL, NULL},
};

static PyStructSequence_Field kDecision[] = {
    {"action", "\"use\", \"borrow\" or \"upload\""},
    {"part", "to use: the number of the array"},
    {"ranks", "to borrow: the ranks that will hold the array"},
    {"blocks",
     "numbers of given blocks: to borrow, one per device of each rank; to upload, the "
     "needed ones"},
    {NULL, NULL},
};

static PyStructSequence_Field kJobPart[] = {
    {"rank_process", "for each rank, the process with which this one exchanges values"},
    {"places", "positions of this process's devices in each of its ranks"},
    {"spans", "whether any rank spans processes"},
    {NULL, NULL},
};

#define JPP_PY_FIELDS(fields) fields, sizeof(fields) / sizeof(*(fields)) - 1

static PyStructSequence_Desc kRecords[] = {
    [JPP_PY_STAGED_TASK] = {"jaxpp._core.StagedTask", "A task of a partitioned step.",
                            JPP_PY_FIELDS(kStagedTask)},
    [JPP_PY_STAGED_OP] = {"jaxpp._core.StagedOp", "An op of a partitioned step.",
                          JPP_PY_FIELDS(kStagedOp)},
    [JPP_PY_PLACED_VALUE] = {"jaxpp._core.PlacedValue",
                             "An argument or result, and its ranks.",
                             JPP_PY_FIELDS(kPlacedValue)},
    [JPP_PY_RANK_SUMMARY] = {"jaxpp._core.RankSummary", "A rank's work and memory.",
                             JPP_PY_FIELDS(kRankSummary)},
    [JPP_PY_SEARCH_RESULT] = {"jaxpp._core.SearchResult", "What a search found.",
                              JPP_PY_FIELDS(kSearchResult)},
    [JPP_PY_DEVICE_INFO] = {"jaxpp._core.DeviceInfo", "A device of a client.",
                            JPP_PY_FIELDS(kDeviceInfo)},
    [JPP_PY_GLOBAL_DEVICE] = {"jaxpp._core.GlobalDevice", "A device of some node's.",
                              JPP_PY_FIELDS(kGlobalDevice)},
    [JPP_PY_CLIENT_INFO] = {"jaxpp._core.ClientInfo", "A plugin's description of itself.",
                            JPP_PY_FIELDS(kClientInfo)},
    [JPP_PY_COMPILED] = {"jaxpp._core.Compiled", "What a compilation gives.",
                         JPP_PY_FIELDS(kCompiled)},
    [JPP_PY_PLANFILE_CONTENTS] = {"jaxpp._core.PlanFileContents",
                                  "The contents of a plan file, except the plan.",
                                  JPP_PY_FIELDS(kPlanFileContents)},
    [JPP_PY_SCHEDULE_INFO] = {"jaxpp._core.ScheduleInfo", "A built-in schedule.",
                              JPP_PY_FIELDS(kScheduleInfo)},
    [JPP_PY_SCHEDULE_SIZES] = {"jaxpp._core.ScheduleSizes", "What a schedule is for.",
                               JPP_PY_FIELDS(kScheduleSizes)},
    [JPP_PY_SCHEDULE_TASK] = {"jaxpp._core.ScheduleTask", "An entry of a rank's row.",
                              JPP_PY_FIELDS(kScheduleTask)},
    [JPP_PY_STAGE_COSTS] = {"jaxpp._core.StageCosts", "How long a stage takes.",
                            JPP_PY_FIELDS(kStageCosts)},
    [JPP_PY_TASK_RUN] = {"jaxpp._core.TaskRun", "A task as it ran in a traced step.",
                         JPP_PY_FIELDS(kTaskRun)},
    [JPP_PY_DECISION] = {"jaxpp._core.Decision", "The decision about an argument.",
                         JPP_PY_FIELDS(kDecision)},
    [JPP_PY_JOB_PART] = {"jaxpp._core.JobPart",
                         "The ranks of a mesh, as one process sees them.",
                         JPP_PY_FIELDS(kJobPart)},
};

static PyTypeObject* g_record_types[JPP_PY_RECORD_COUNT];

bool jpp_py_add_records(PyObject* module) {
  for (int i = 0; i < JPP_PY_RECORD_COUNT; ++i) {
    g_record_types[i] = PyStructSequence_NewType(&kRecords[i]);
    const char* name = strrchr(kRecords[i].name, '.') + 1;
    if (!g_record_types[i] ||
        PyModule_AddObjectRef(module, name, (PyObject*)g_record_types[i]) < 0) {
      return false;
    }
  }
  return true;
}

PyObject* jpp_py_make_record(jpp_py_record_t record, PyObject* const* fields) {
  int count = kRecords[record].n_in_sequence;
  bool ok = true;
  for (int i = 0; i < count; ++i) ok = ok && fields[i];
  PyObject* made = ok ? PyStructSequence_New(g_record_types[record]) : NULL;
  for (int i = 0; i < count; ++i) {
    if (made) {
      PyStructSequence_SetItem(made, i, fields[i]);
    } else {
      Py_XDECREF(fields[i]);
    }
  }
  return made;
}

// --- Constants ------------------------------------------------------------------------

static const struct {
  const char* name;
  long value;
} kConstants[] = {
    {"OP_CALL", JPP_OP_CALL},
    {"OP_MARK", JPP_OP_MARK},
    {"OP_MARK_BACKWARD", JPP_OP_MARK_BACKWARD},
    {"OP_ADD", JPP_OP_ADD},
    {"OP_PLACE", JPP_OP_PLACE},
    {"OP_TASK", JPP_OP_TASK},
    {"OP_INIT", JPP_OP_INIT},
    {"OP_ACCUMULATE", JPP_OP_ACCUMULATE},
    {"OP_SUM", JPP_OP_SUM},
    {"OP_PACK", JPP_OP_PACK},
    {"OP_UNPACK", JPP_OP_UNPACK},
    {"OP_REPEAT", JPP_OP_REPEAT},
    {"FLAG_CHEAP", JPP_OP_CHEAP},
    {"FLAG_BACKWARD", JPP_OP_BACKWARD},
    {"FLAG_EFFECT", JPP_OP_EFFECT},
    {"FLAG_COPY", JPP_OP_COPY},
    {"FLAG_ZEROS", JPP_OP_ZEROS},
    {"FLAG_BODY", JPP_OP_BODY},
    {"FLAG_LINEAR", JPP_OP_LINEAR},
    {"REDUCE_ADD", JPP_REDUCE_ADD},
    {"REDUCE_MAX", JPP_REDUCE_MAX},
    {"REDUCE_CONCAT", JPP_REDUCE_CONCAT},
    {"REDUCE_CUSTOM", JPP_REDUCE_CUSTOM},
    {"TASK_IDLE", JPP_TASK_IDLE},
    {"TASK_FWD", JPP_TASK_FWD},
    {"TASK_BWD", JPP_TASK_BWD},
    {"TASK_BWD_I", JPP_TASK_BWD_I},
    {"TASK_BWD_W", JPP_TASK_BWD_W},
    {"TRIAL_MICROBATCHES", kJppTrialMicrobatches},
    {"NONE", JPP_NONE},               // for example the module of a task without ops
    {"NO_DEVICE", JPP_NO_DEVICE},     // where a rank has fewer devices than others
    {"ANY_RANK", JPP_ANY_RANK},       // every device of every rank
    {"NO_RANK", JPP_NO_RANK},         // no rank
    {"LARGEST_COUNT", INT32_MAX},     // of stages, ranks and microbatches
    {"LARGEST_LATENCY", UINT16_MAX},  // of a task in a schedule
};

static PyObject* make_code(const void* unused, uint64_t index) {
  (void)unused;
  return PyUnicode_FromString(jpp_status_code_name((jpp_status_code_t)(index + 1)));
}

// Adds the values that the `code` of a JaxppError can have.
static bool add_codes(PyObject* module) {
  PyObject* list = jpp_py_make_list(JPP_STATUS_CODE_COUNT - 1, make_code, NULL);
  PyObject* tuple = list ? PyList_AsTuple(list) : NULL;
  bool ok = tuple && PyModule_AddObjectRef(module, "ERROR_CODES", tuple) == 0;
  Py_XDECREF(tuple);
  Py_XDECREF(list);
  return ok;
}

bool jpp_py_add_constants(PyObject* module) {
  for (size_t i = 0; i < sizeof(kConstants) / sizeof(*kConstants); ++i) {
    if (PyModule_AddIntConstant(module, kConstants[i].name, kConstants[i].value) < 0) {
      return false;
    }
  }
  return add_codes(module) && PyModule_AddStringConstant(module, "CALLBACK_ATTRIBUTE",
                                                         jpp_py_callback_attribute) == 0;
}
