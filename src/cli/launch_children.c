// The processes of a job: their environment, their cores, and their end.
//
// Each process leads a process group, so that the processes that it starts end with it.
// When this process is killed, the kernel ends its children, but not the children of a
// shell. Therefore another process, the guard, waits for the end of this process and
// kills the remaining groups.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/launch.h"

enum { kCanNotRun = 127 };

jpp_status_t* jpp__launch_error(const char* what) {
  return jpp_status_make(JPP_OUT_OF_MEMORY, "jaxpp launch: %s: %s", what,
                         strerror(errno));
}

// --- The guard ------------------------------------------------------------------------

// Reads the groups that start, as positive numbers, and those that have ended, as
// negative numbers, until the writer is gone.
static void guard(int pipe_end, uint32_t count) {
  pid_t* groups = NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(count, &groups);
  if (status) _exit(1);
  for (pid_t change; read(pipe_end, &change, sizeof(change)) == sizeof(change);) {
    for (uint32_t i = 0; i < count; ++i) {
      if (groups[i] != (change > 0 ? 0 : -change)) continue;
      groups[i] = change > 0 ? change : 0;
      break;
    }
  }
  for (uint32_t i = 0; i < count; ++i) {
    if (groups[i]) kill(-groups[i], SIGKILL);
  }
  _exit(0);
}

jpp_status_t* jpp__launch_guard(launch_job_t* job) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) < 0) return jpp__launch_error("a pipe");
  prctl(PR_SET_CHILD_SUBREAPER, 1);  // to wait for processes that shells have started
  fflush(NULL);
  pid_t pid = fork();
  if (pid == 0) {
    setsid();
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    for (int i = 0; i < 1024; ++i) {
      if (i != ends[0]) close(i);
    }
    guard(ends[0], job->count);
  }
  close(ends[0]);
  job->guard = ends[1];
  job->guard_pid = pid > 0 ? pid : 0;
  return pid > 0 ? NULL : jpp__launch_error("a process could not be started");
}

void jpp__launch_dismiss_guard(const launch_job_t* job) {
  if (!job->guard_pid) return;
  close(job->guard);
  waitpid(job->guard_pid, NULL, 0);
}

static void tell_guard(const launch_job_t* job, pid_t change) {
  (void)!write(job->guard, &change, sizeof(change));
}

// --- The environment ------------------------------------------------------------------

static void set_number(const char* name, uint32_t number, bool overwrite) {
  char text[16];
  snprintf(text, sizeof(text), "%u", number);
  setenv(name, text, overwrite);
}

// Sets the variables that jax.distributed.initialize() checks first, before Slurm's,
// whether jaxpp is imported or not.
static void set_numbers_for_jax(const launch_job_t* job, const launch_child_t* child) {
  setenv("OMPI_MCA_orte_hnp_uri", "jaxpp launch", 1);
  set_number("OMPI_COMM_WORLD_SIZE", job->total, true);
  set_number("OMPI_COMM_WORLD_RANK", child->number, true);
  set_number("OMPI_COMM_WORLD_LOCAL_RANK", child->number - job->first, true);
  setenv("JAX_COORDINATOR_ADDRESS", job->coordinator, 1);
  setenv("JAX_COORDINATOR_BIND_ADDRESS", job->coordinator, 1);
}

// Takes an equal part of the cores that this process may use, if there are enough for
// all.
static void take_cores(const launch_job_t* job, const launch_child_t* child) {
  cpu_set_t all, mine;
  uint32_t local = child->number - job->first, seen = 0;
  if (sched_getaffinity(0, sizeof(all), &all) < 0) return;
  uint32_t share = (uint32_t)CPU_COUNT(&all) / job->count;
  static const char* const kPools[] = {"NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
                                       "MKL_NUM_THREADS"};
  for (size_t i = 0; i < sizeof(kPools) / sizeof(*kPools); ++i) {
    set_number(kPools[i], share ? share : 1, false);
  }
  CPU_ZERO(&mine);
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &all)) continue;
    if (share && seen / share == local) CPU_SET(core, &mine);
    ++seen;
  }
  if (share) sched_setaffinity(0, sizeof(mine), &mine);
}

static unsigned long long inode_of(int descriptor) {
  struct stat found = {0};
  fstat(descriptor, &found);
  return found.st_ino;
}

static void set_environment(const launch_job_t* job, const launch_child_t* child) {
  char text[64];
  set_numbers_for_jax(job, child);
  set_number("JPP_NUM_PROCESSES", job->total, true);
  set_number("JPP_PROCESS_ID", child->number, true);
  set_number("JPP_RESTART", job->restart, true);
  snprintf(text, sizeof(text), "%d:%llu", job->report[1], inode_of(job->report[1]));
  setenv("JPP_REPORT", text, 1);
  setenv("PYTHONUNBUFFERED", "1", 0);
  if (job->options->grace > 0) {
    snprintf(text, sizeof(text), "%g", job->options->grace);
    setenv("JPP_GRACE", text, 1);
  }
  if (job->count > 1 && !job->options->share_cores) take_cores(job, child);
}

// --- Start and end --------------------------------------------------------------------

// Processes that share a terminal cannot read it: they would be stopped, or each would
// take some of the input.
static void leave_terminal(const launch_job_t* job) {
  if (job->count == 1 || !isatty(STDIN_FILENO)) return;
  int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (nothing >= 0) dup2(nothing, STDIN_FILENO);
}

static void become_process(const launch_job_t* job, const launch_child_t* child) {
  set_environment(job, child);
  fcntl(job->report[1], F_SETFD, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  setpgid(0, 0);
  leave_terminal(job);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  execvp(job->options->command[0], job->options->command);
  fprintf(stderr, "%s: %s\n", job->options->command[0], strerror(errno));
  _exit(kCanNotRun);
}

jpp_status_t* jpp__launch_start(launch_job_t* job, launch_child_t* child) {
  int pipes[2][2];
  if (pipe2(pipes[0], O_CLOEXEC) < 0) return jpp__launch_error("a pipe");
  if (pipe2(pipes[1], O_CLOEXEC) < 0) {
    close(pipes[0][0]);
    close(pipes[0][1]);
    return jpp__launch_error("a pipe");
  }
  fflush(NULL);
  pid_t pid = fork();
  if (pid == 0) {
    dup2(pipes[0][1], STDOUT_FILENO);
    dup2(pipes[1][1], STDERR_FILENO);
    become_process(job, child);
  }
  for (int i = 0; i < 2; ++i) {
    close(pipes[i][1]);
    child->outputs[i].read_end = pipes[i][0];
    child->outputs[i].to = i ? stderr : stdout;
    child->outputs[i].length = 0;
  }
  child->ended = false;
  child->stop_signal = 0;
  child->stop_told = false;
  child->pid = child->last_pid = child->group = pid > 0 ? pid : 0;
  if (pid < 0) return jpp__launch_error("a process could not be started");
  setpgid(pid, pid);  // the child does so too; either may come first
  tell_guard(job, pid);
  return NULL;
}

void jpp__launch_check_group(const launch_job_t* job, launch_child_t* child) {
  if (child->pid || !child->group) return;
  while (waitpid(-child->group, NULL, WNOHANG) > 0) {
  }
  if (kill(-child->group, 0) == 0 || errno != ESRCH) return;
  tell_guard(job, -child->group);
  child->group = 0;
}

void jpp__launch_note_end(launch_job_t* job, launch_child_t* child, int wait_status) {
  if (!job->ending) kill(-child->group, SIGKILL);
  jpp__launch_take_terminal(job);
  child->pid = 0;
  child->stop_signal = 0;
  child->ended = true;
  child->wait_status = wait_status;
}

void jpp__launch_signal(const launch_job_t* job, int number) {
  for (uint32_t i = 0; i < job->count; ++i) {
    if (job->children[i].group) kill(-job->children[i].group, number);
  }
}

// --- Stopped processes ----------------------------------------------------------------

// The process group of a stopped process; 0: it is running, or has ended.
static pid_t stopped_group_of(const char* process) {
  char path[300], text[512];
  snprintf(path, sizeof(path), "/proc/%s/stat", process);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t count = read(file, text, sizeof(text) - 1);
  close(file);
  text[count > 0 ? count : 0] = 0;
  const char* name_end = strrchr(text, ')');  // PID (NAME) STATE PARENT GROUP
  char state = 0;
  int parent = 0, group = 0;
  bool read_all =
      name_end && sscanf(name_end + 1, " %c %d %d", &state, &parent, &group) == 3;
  return read_all && state == 'T' ? group : 0;
}

void jpp__launch_look_for_stopped(launch_job_t* job) {
  DIR* folder = opendir("/proc");
  if (!folder) return;
  double now = jpp_cli_now_ms();
  for (uint32_t i = 0; i < job->count; ++i) job->children[i].stopped = false;
  for (struct dirent* entry; (entry = readdir(folder)) != NULL;) {
    if (entry->d_name[0] < '1' || entry->d_name[0] > '9') continue;
    pid_t group = stopped_group_of(entry->d_name);
    for (uint32_t i = 0; i < job->count && group; ++i) {
      if (job->children[i].group == group) job->children[i].stopped = true;
    }
  }
  closedir(folder);
  for (uint32_t i = 0; i < job->count; ++i) {
    launch_child_t* child = &job->children[i];
    if (!child->stopped) child->stopped_ms = 0;
    if (child->stopped && !child->stopped_ms) child->stopped_ms = now;
  }
}
