// jaxpp launch: the processes of a job on this host.
//
// Each process is a group of its own, so that what it starts ends with it, and gets a
// pipe for each of its outputs, whose lines come out with the process' number in front.
// The first one that fails ends all; what is left after a few seconds is killed. If this
// process is killed itself, the kernel ends the others.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cli/cli.h"

enum { kLineSize = 8192, kGraceMs = 5000, kMostProcesses = 4096, kCanNotRun = 127 };

// One of a process' two outputs.
typedef struct output {
  int read_end;  // -1: closed
  FILE* to;
  size_t length;
  char line[kLineSize];  // what has come of the next line
} output_t;

typedef struct child {
  uint32_t number;
  pid_t pid;  // 0: it has ended
  output_t outputs[2];
} child_t;

typedef struct job {
  uint32_t count;
  child_t* children;
  struct pollfd* polls;  // [2 * count]
  char* const* command;
  uint32_t restart;  // how often it was started again
  int result;        // exit status of the first that failed; 0: none has
  bool ending;       // the others are told to end
  double end_ms;     // when they are killed
} job_t;

static volatile sig_atomic_t g_interrupts;  // Ctrl-C or SIGTERM, how often
static volatile sig_atomic_t g_signal;      // which

static void note_signal(int number) {
  if (number == SIGCHLD) return;
  ++g_interrupts;
  g_signal = number;
}

// --- Start ----------------------------------------------------------------------------

static jpp_status_t* system_error(const char* what) {
  return jpp_status_make(JPP_OUT_OF_MEMORY, "jaxpp launch: %s: %s", what,
                         strerror(errno));
}

// A port of this host that nobody uses at the moment.
static jpp_status_t* find_port(uint16_t* out_port) {
  struct sockaddr_in address = {.sin_family = AF_INET,
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof(address);
  int handle = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (handle < 0) return system_error("a port for the coordinator");
  bool found = bind(handle, (struct sockaddr*)&address, size) == 0 &&
               getsockname(handle, (struct sockaddr*)&address, &size) == 0;
  jpp_status_t* status = found ? NULL : system_error("a port for the coordinator");
  close(handle);
  *out_port = ntohs(address.sin_port);
  return status;
}

static void set_number(const char* name, uint32_t number) {
  char text[16];
  snprintf(text, sizeof(text), "%u", number);
  setenv(name, text, 1);
}

// In the child. What jax.distributed.initialize() finds out by itself then.
static void become_process(const job_t* job, uint32_t number, uint16_t port) {
  char coordinator[32];
  snprintf(coordinator, sizeof(coordinator), "127.0.0.1:%u", port);
  setenv("JAX_COORDINATOR_ADDRESS", coordinator, 1);
  set_number("JPP_NUM_PROCESSES", job->count);
  set_number("JPP_PROCESS_ID", number);
  set_number("JPP_RESTART", job->restart);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  setpgid(0, 0);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, NULL);
  execvp(job->command[0], job->command);
  fprintf(stderr, "%s: %s\n", job->command[0], strerror(errno));
  _exit(kCanNotRun);
}

static jpp_status_t* start_child(const job_t* job, child_t* child, uint16_t port) {
  int pipes[2][2];
  if (pipe2(pipes[0], O_CLOEXEC) < 0) return system_error("a pipe");
  if (pipe2(pipes[1], O_CLOEXEC) < 0) {
    close(pipes[0][0]);
    close(pipes[0][1]);
    return system_error("a pipe");
  }
  fflush(NULL);
  child->pid = fork();
  if (child->pid == 0) {
    dup2(pipes[0][1], STDOUT_FILENO);
    dup2(pipes[1][1], STDERR_FILENO);
    become_process(job, child->number, port);
  }
  for (int i = 0; i < 2; ++i) {
    close(pipes[i][1]);
    child->outputs[i].read_end = pipes[i][0];
    child->outputs[i].to = i ? stderr : stdout;
    child->outputs[i].length = 0;
  }
  if (child->pid > 0) return NULL;
  child->pid = 0;
  return system_error("a process could not be started");
}

// --- Output ---------------------------------------------------------------------------

static void write_line(const child_t* child, output_t* output, size_t length) {
  fprintf(output->to, "[%u] ", child->number);
  fwrite(output->line, 1, length, output->to);
  if (!length || output->line[length - 1] != '\n') fputc('\n', output->to);
  output->length -= length;
  memmove(output->line, output->line + length, output->length);
}

static void write_lines(const child_t* child, output_t* output, bool all) {
  char* end = NULL;
  while ((end = memchr(output->line, '\n', output->length)) != NULL) {
    write_line(child, output, (size_t)(end + 1 - output->line));
  }
  if (output->length && (all || output->length == kLineSize)) {
    write_line(child, output, output->length);
  }
  fflush(output->to);
}

static void read_output(const child_t* child, output_t* output) {
  ssize_t count =
      read(output->read_end, output->line + output->length, kLineSize - output->length);
  if (count < 0 && errno == EINTR) return;
  if (count > 0) output->length += (size_t)count;
  write_lines(child, output, count <= 0);
  if (count > 0) return;
  close(output->read_end);
  output->read_end = -1;
}

// --- The end --------------------------------------------------------------------------

static void signal_all(const job_t* job, int number) {
  for (uint32_t i = 0; i < job->count; ++i) {
    if (job->children[i].pid) kill(-job->children[i].pid, number);
  }
}

static void end_all(job_t* job, int number) {
  signal_all(job, number);
  job->ending = true;
  job->end_ms = jpp_cli_now_ms() + kGraceMs;
}

static void note_end(job_t* job, child_t* child, int wait_status) {
  // Whatever the process has left behind ends with it.
  kill(-child->pid, SIGKILL);
  pid_t pid = child->pid;
  child->pid = 0;
  int result =
      WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
  if (!result || job->ending) return;
  if (WIFSIGNALED(wait_status)) {
    fprintf(stderr, "jaxpp launch: process %u (pid %d) was ended by signal %d (%s)",
            child->number, (int)pid, WTERMSIG(wait_status),
            strsignal(WTERMSIG(wait_status)));
  } else {
    fprintf(stderr, "jaxpp launch: process %u (pid %d) failed with exit status %d",
            child->number, (int)pid, result);
  }
  fprintf(stderr, "; ending the others\n");
  job->result = result;
  end_all(job, SIGTERM);
}

static void collect_ends(job_t* job) {
  for (uint32_t i = 0; i < job->count; ++i) {
    child_t* child = &job->children[i];
    int wait_status = 0;
    if (child->pid && waitpid(child->pid, &wait_status, WNOHANG) == child->pid) {
      note_end(job, child, wait_status);
    }
  }
}

static bool is_over(const job_t* job) {
  for (uint32_t i = 0; i < job->count; ++i) {
    if (job->children[i].pid) return false;
  }
  return true;
}

// --- The loop -------------------------------------------------------------------------

// Reads what has come, or comes within a tenth of a second if it waits; false: nothing.
static bool read_outputs(job_t* job, const sigset_t* waiting_mask, bool wait) {
  struct timespec slice = {.tv_nsec = wait ? 100000000 : 0};
  for (uint32_t i = 0; i < 2 * job->count; ++i) {
    job->polls[i] = (struct pollfd){.fd = job->children[i / 2].outputs[i % 2].read_end,
                                    .events = POLLIN};
  }
  if (ppoll(job->polls, 2 * job->count, &slice, waiting_mask) <= 0) return false;
  for (uint32_t i = 0; i < 2 * job->count; ++i) {
    if (!job->polls[i].revents) continue;
    read_output(&job->children[i / 2], &job->children[i / 2].outputs[i % 2]);
  }
  return true;
}

static void pass_interrupts(job_t* job, int* passed) {
  if (g_interrupts == *passed) return;
  job->result = 128 + g_signal;
  if (*passed) {
    signal_all(job, SIGKILL);
  } else {
    end_all(job, g_signal);
  }
  *passed = g_interrupts;
}

static void follow(job_t* job, const sigset_t* waiting_mask) {
  int passed = 0;
  while (!is_over(job)) {
    read_outputs(job, waiting_mask, true);
    pass_interrupts(job, &passed);
    collect_ends(job);
    if (job->ending && jpp_cli_now_ms() > job->end_ms) signal_all(job, SIGKILL);
  }
  while (read_outputs(job, waiting_mask, false)) {
  }
  for (uint32_t i = 0; i < 2 * job->count; ++i) {
    output_t* output = &job->children[i / 2].outputs[i % 2];
    if (output->read_end < 0) continue;
    write_lines(&job->children[i / 2], output, true);
    close(output->read_end);
  }
}

static jpp_status_t* run_once(job_t* job, const sigset_t* waiting_mask) {
  uint16_t port = 0;
  JPP_RETURN_IF_ERROR(find_port(&port));
  job->result = 0;
  job->ending = false;
  jpp_status_t* status = NULL;
  for (uint32_t i = 0; i < job->count && !status; ++i) {
    job->children[i].number = i;
    status = start_child(job, &job->children[i], port);
  }
  if (status) end_all(job, SIGKILL);
  follow(job, waiting_mask);
  return status;
}

// Signals come in ppoll() alone.
static void hold_signals(sigset_t* out_waiting_mask) {
  static const int kSignals[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP};
  struct sigaction action = {.sa_handler = note_signal};
  sigset_t held;
  sigemptyset(&held);
  for (size_t i = 0; i < sizeof(kSignals) / sizeof(*kSignals); ++i) {
    sigaction(kSignals[i], &action, NULL);
    sigaddset(&held, kSignals[i]);
  }
  sigprocmask(SIG_BLOCK, &held, out_waiting_mask);
}

static jpp_status_t* run_job(job_t* job, uint32_t restarts) {
  sigset_t waiting_mask;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(job->count, &job->children));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(2 * job->count, &job->polls));
  hold_signals(&waiting_mask);
  for (;; ++job->restart) {
    JPP_RETURN_IF_ERROR(run_once(job, &waiting_mask));
    if (!job->result || g_interrupts || job->restart == restarts) return NULL;
    fprintf(stderr, "jaxpp launch: starting all processes again (%u of %u)\n",
            job->restart + 1, restarts);
  }
}

jpp_status_t* jpp_cli_launch(const jpp_cli_options_t* options, jpp_str_t* out) {
  (void)out;
  job_t job = {.count = options->processes ? options->processes : 1,
               .command = options->command};
  if (job.count > kMostProcesses) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "-n: expected at most %d, found %u",
                           kMostProcesses, job.count);
  }
  jpp_status_t* status = run_job(&job, options->restarts);
  jpp_free(job.children);
  jpp_free(job.polls);
  if (!status && job.result) exit(job.result);
  return status;
}
