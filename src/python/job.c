// The job's functions in jaxpp._core: job_join(), job_fail() and the others.
#include "jaxpp/job.h"

#include <stdio.h>
#include <sys/stat.h>

#include "jaxpp/job_ranks.h"
#include "jaxpp/option.h"
#include "python/core.h"

enum { kGraceMs = 5000 };

bool jpp_py_job_told = false;

// The launcher's pipe, "DESCRIPTOR:INODE"; 0 if it was closed before, as Python's
// subprocess does, because the number may now be that of another file.
static int find_report(void) {
  const char* report = jpp_option_get(JPP_OPTION_REPORT);
  struct stat found;
  int descriptor = 0;
  unsigned long long inode = 0;
  if (!report || sscanf(report, "%d:%llu", &descriptor, &inode) != 2) return 0;
  bool same =
      fstat(descriptor, &found) == 0 && S_ISFIFO(found.st_mode) && found.st_ino == inode;
  return same ? descriptor : 0;
}

static PyObject* job_join(PyObject* module, PyObject* args) {
  (void)module;
  jpp_py_utf8_t address = {0};
  Py_buffer token;
  uint32_t port = 0;
  uint16_t listens_at = 0;
  jpp_job_options_t options = {.struct_size = sizeof(options)};
  if (!PyArg_ParseTuple(args, "O&O&O&O&y*:job_join", jpp_py_u32_converter,
                        &options.process, jpp_py_u32_converter, &options.num_processes,
                        jpp_py_str_converter, &address, jpp_py_u32_converter, &port,
                        &token)) {
    return NULL;
  }
  options.address = address.text;
  options.port = (uint16_t)port;
  options.token = token.buf;
  options.token_size = (size_t)token.len;
  options.report = find_report();
  jpp_status_t* status =
      jpp_option_get_ms(JPP_OPTION_PEER_TIMEOUT, &options.peer_timeout_ms);
  if (!status) status = jpp_option_get_ms(JPP_OPTION_GRACE, &options.grace_ms);
  if (!options.grace_ms) options.grace_ms = kGraceMs;
  Py_BEGIN_ALLOW_THREADS
    if (!status) status = jpp_job_join(&options, &listens_at);
  Py_END_ALLOW_THREADS
  PyBuffer_Release(&token);
  jpp_py_utf8_release(&address);
  return jpp_py_check(status) ? PyLong_FromUnsignedLong(listens_at) : NULL;
}

static PyObject* job_check(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  if (!jpp_py_check(jpp_job_failure())) return NULL;
  Py_RETURN_NONE;
}

static PyObject* job_has_left(PyObject* module, PyObject* args) {
  (void)module;
  uint32_t process = 0;
  if (!PyArg_ParseTuple(args, "O&:job_has_left", jpp_py_u32_converter, &process)) {
    return NULL;
  }
  return PyBool_FromLong(jpp_job_has_left(process));
}

static PyObject* job_note_absent(PyObject* module, PyObject* args) {
  (void)module;
  uint32_t process = 0;
  jpp_py_utf8_t text = {0};
  if (!PyArg_ParseTuple(args, "O&O&:job_note_absent", jpp_py_u32_converter, &process,
                        jpp_py_str_converter, &text)) {
    return NULL;
  }
  jpp_job_note_absent(process, text.text);
  jpp_py_utf8_release(&text);
  Py_RETURN_NONE;
}

static PyObject* job_fail(PyObject* module, PyObject* args) {
  (void)module;
  jpp_py_utf8_t text = {0};
  int own = 0;
  if (!PyArg_ParseTuple(args, "O&p:job_fail", jpp_py_str_converter, &text, &own)) {
    return NULL;
  }
  jpp_py_job_told = true;
  if (own) {
    jpp_job_fail(text.text);
  } else {
    jpp_job_fail_after_another(text.text);
  }
  jpp_py_utf8_release(&text);
  Py_RETURN_NONE;
}

static const char kWait[] = "jaxpp._core.job_wait";

static void end_wait(PyObject* capsule) {
  jpp_job_end_wait(PyCapsule_GetPointer(capsule, kWait));
}

static PyObject* job_begin_wait(PyObject* module, PyObject* args) {
  (void)module;
  jpp_py_utf8_t name = {0};
  PyObject* processes = NULL;
  uint32_t* numbers = NULL;
  uint32_t count = 0;
  if (!PyArg_ParseTuple(args, "O&O:job_begin_wait", jpp_py_str_converter, &name,
                        &processes)) {
    return NULL;
  }
  jpp_job_wait_t* wait = NULL;
  bool all = processes == Py_None;
  bool began =
      (all || jpp_py_to_u32s(processes, &numbers, &count)) &&
      jpp_py_check(jpp_job_begin_wait(name.text, all ? NULL : numbers, count, &wait));
  jpp_free(numbers);
  jpp_py_utf8_release(&name);
  if (!began) return NULL;
  if (!wait) Py_RETURN_NONE;
  return PyCapsule_New(wait, kWait, end_wait);
}

static PyObject* job_leave(PyObject* module, PyObject* args) {
  (void)module;
  int wait = 0;
  bool all = false;
  if (!PyArg_ParseTuple(args, "p:job_leave", &wait)) return NULL;
  Py_BEGIN_ALLOW_THREADS
    all = jpp_job_leave(wait);
    if (all) jpp_job_hurry();
  Py_END_ALLOW_THREADS
  return PyBool_FromLong(all);
}

static PyObject* job_end(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  Py_BEGIN_ALLOW_THREADS
    jpp_job_end();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

static PyObject* job_await_end(PyObject* module, PyObject* unused) {
  (void)module, (void)unused;
  char* text = NULL;
  bool over = false;
  Py_BEGIN_ALLOW_THREADS
    over = jpp_job_await_end(&text);
  Py_END_ALLOW_THREADS
  if (!over) Py_RETURN_NONE;
  return text ? jpp_py_take_text(text) : PyUnicode_FromString("");
}

// `owners` are [num_ranks][rank_size], flat.
static PyObject* job_divide_ranks(PyObject* module, PyObject* args) {
  (void)module;
  PyObject* owners = NULL;
  uint32_t process = 0, count = 0;
  int on_cpu = 0, shares_devices = 0;
  jpp_job_mesh_t mesh = {.struct_size = sizeof(mesh)};
  if (!PyArg_ParseTuple(args, "OO&O&pp:job_divide_ranks", &owners, jpp_py_u32_converter,
                        &mesh.num_ranks, jpp_py_u32_converter, &process, &on_cpu,
                        &shares_devices)) {
    return NULL;
  }
  mesh.on_cpu = on_cpu;
  mesh.shares_devices = shares_devices;
  uint32_t* numbers = NULL;
  jpp_job_part_t part = {0};
  bool ok = jpp_py_to_u32s(owners, &numbers, &count);
  mesh.owners = numbers;
  mesh.rank_size = mesh.num_ranks ? count / mesh.num_ranks : 0;
  ok = ok &&
       jpp_py_check_count("owners of devices", (uint64_t)mesh.num_ranks * mesh.rank_size,
                          count) &&
       jpp_py_check(jpp_job_divide_ranks(&mesh, process, &part));
  jpp_free(numbers);
  if (!ok) return NULL;
  PyObject* record = JPP_PY_RECORD(
      JPP_PY_JOB_PART, jpp_py_from_u32s(part.rank_process, part.num_ranks),
      jpp_py_from_u32s(part.places, part.num_places), PyBool_FromLong(part.spans));
  jpp_job_part_free(&part);
  return record;
}

static PyObject* compare(PyObject* args,
                         jpp_status_t* (*compare_texts)(uint32_t process,
                                                        const char* mine, uint32_t other,
                                                        const char* theirs)) {
  uint32_t process = 0, other = 0;
  jpp_py_utf8_t mine = {0}, theirs = {0};
  if (!PyArg_ParseTuple(args, "O&O&O&O&", jpp_py_u32_converter, &process,
                        jpp_py_str_converter, &mine, jpp_py_u32_converter, &other,
                        jpp_py_str_converter, &theirs)) {
    return NULL;
  }
  bool ok = jpp_py_check(compare_texts(process, mine.text, other, theirs.text));
  jpp_py_utf8_release(&mine);
  jpp_py_utf8_release(&theirs);
  return ok ? Py_NewRef(Py_None) : NULL;
}

static PyObject* job_compare_facts(PyObject* module, PyObject* args) {
  (void)module;
  return compare(args, jpp_job_compare_facts);
}

static PyObject* job_compare_programs(PyObject* module, PyObject* args) {
  (void)module;
  return compare(args, jpp_job_compare_programs);
}

PyMethodDef jpp_py_job_methods[] = {
    {"job_compare_facts", job_compare_facts, METH_VARARGS,
     "job_compare_facts($module, process, mine, other, theirs, /)\n--\n\nRaises the "
     "first difference between two texts with one line per fact of a step: its name, a "
     "tab and its value."},
    {"job_compare_programs", job_compare_programs, METH_VARARGS,
     "job_compare_programs($module, process, mine, other, theirs, /)\n--\n\n"
     "The same for two programs, with lines of a place, a tab and code."},
    {"job_divide_ranks", job_divide_ranks, METH_VARARGS,
     "job_divide_ranks($module, owners, num_ranks, process, on_cpu, shares_devices, /)\n"
     "--\n\n"
     "The JobPart of a process; `owners`: of each device of each rank, flat."},
    {"job_join", job_join, METH_VARARGS,
     "job_join($module, process, num_processes, address, port, token, /)\n--\n\n"
     "Makes the job's processes watch each other; returns the port at which process 0 "
     "listens."},
    {"job_check", job_check, METH_NOARGS,
     "job_check($module, /)\n--\n\nRaises if another process of the job has failed."},
    {"job_has_left", job_has_left, METH_VARARGS,
     "job_has_left($module, process, /)\n--\n\nWhether another process has left the "
     "job."},
    {"job_note_absent", job_note_absent, METH_VARARGS,
     "job_note_absent($module, process, text, /)\n--\n\n"
     "In process 0: another process ended before it joined; `text` says why, or is '' if "
     "it did not fail."},
    {"job_fail", job_fail, METH_VARARGS,
     "job_fail($module, text, own, /)\n--\n\n"
     "This process ends with an error that the user has seen; `own`: the error is its "
     "own."},
    {"job_begin_wait", job_begin_wait, METH_VARARGS,
     "job_begin_wait($module, name, processes, /)\n--\n\nReturns an object; while it "
     "exists, the job fails if one of the processes (None: any) leaves."},
    {"job_leave", job_leave, METH_VARARGS,
     "job_leave($module, wait, /)\n--\n\n"
     "This process no longer needs the others. After waiting, returns whether they have "
     "left too."},
    {"job_end", job_end, METH_NOARGS, "job_end($module, /)\n--\n\nStops watching."},
    {"job_await_end", job_await_end, METH_NOARGS,
     "job_await_end($module, /)\n--\n\n"
     "Waits until the process must end; returns the text for the user, or None after "
     "job_end()."},
    {NULL, NULL, 0, NULL},
};
