// jaxpp launch: the processes of a job on this host.
//
// The first failure ends the job: the other processes are told to end, and those that
// remain after a grace period are killed. Processes that end because of another one
// report it, as in jaxpp/job.h, so that the launcher names the process that failed and
// not a survivor that ended before it.
#include "cli/launch.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "jaxpp/option.h"

enum {
  kMostProcesses = 4096,
  kMostAddress = 256,
  kOutputLost = 2,   // exit status, as of other commands
  kGraceMs = 30000,  // grace period after a signal
  // After a failure: JPP_GRACE, after which processes end themselves, and as much again
  // in which they can report why they end.
  kFailureMs = 10000,
  kSilenceMs = 10000,  // default of JPP_PEER_TIMEOUT
  kLookMs = 2000,      // time between two searches for stopped processes
  kStoppedMs = 3000,   // time after the silence for the others to name a stopped process
  kVerdictMs = 1000,   // time for others to report the failed process
  kLateVerdictMs = 3000,  // time for the reported process to end
  kLastVerdictMs = 5000,  // the same for process 0, which ends after the others
};

static volatile sig_atomic_t g_interrupts;  // number of Ctrl-C and SIGTERM signals
static volatile sig_atomic_t g_signal;      // the last signal

static void note_signal(int number) {
  if (number == SIGCHLD) return;
  ++g_interrupts;
  g_signal = number;
}

// Finds a port of this host that is free at the moment.
static jpp_status_t* find_port(uint16_t* out_port) {
  struct sockaddr_in address = {.sin_family = AF_INET,
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof(address);
  int handle = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (handle < 0) return jpp__launch_error("a port for the coordinator");
  bool found = bind(handle, (struct sockaddr*)&address, size) == 0 &&
               getsockname(handle, (struct sockaddr*)&address, &size) == 0;
  jpp_status_t* status = found ? NULL : jpp__launch_error("a port for the coordinator");
  close(handle);
  *out_port = ntohs(address.sin_port);
  return status;
}

// --- The end --------------------------------------------------------------------------

static void end_all(launch_job_t* job, int number, double grace_ms) {
  jpp__launch_signal(job, number);
  job->ending = true;
  job->end_ms = jpp_cli_now_ms() + grace_ms;
}

static double grace_ms(const launch_job_t* job, double otherwise) {
  return job->options->grace >= 0 ? job->options->grace * 1000 : otherwise;
}

static void pass_interrupts(launch_job_t* job) {
  if (g_interrupts == job->interrupts_passed) return;
  job->result = 128 + g_signal;
  if (job->interrupts_passed) {
    jpp__launch_signal(job, SIGKILL);
  } else {
    end_all(job, g_signal, grace_ms(job, kGraceMs));
  }
  job->interrupts_passed = g_interrupts;
}

static int result_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status)
                                  : WEXITSTATUS(wait_status);
}

static launch_child_t* find_child(const launch_job_t* job, int32_t number) {
  int64_t index = (int64_t)number - job->first;
  return index >= 0 && index < job->count ? &job->children[index] : NULL;
}

static uint32_t count_alive(const launch_job_t* job) {
  uint32_t alive = 0;
  for (uint32_t i = 0; i < job->count; ++i) alive += job->children[i].group != 0;
  return alive;
}

static bool has_failed(const launch_child_t* child) {
  return child->ended && result_of(child->wait_status);
}

// The process that failed first. If no process has named it, a process that was killed by
// a signal is preferred to one that JAX aborted, as JAX does when process 0 is gone.
static launch_child_t* find_culprit(const launch_job_t* job) {
  launch_child_t* culprit = NULL;
  if (job->blamed >= 0) return find_child(job, job->blamed);
  for (uint32_t i = 0; i < job->count; ++i) {
    launch_child_t* child = &job->children[i];
    if (!has_failed(child)) continue;
    bool killed =
        WIFSIGNALED(child->wait_status) && WTERMSIG(child->wait_status) != SIGABRT;
    if (killed) return child;
    if (!culprit || WIFSIGNALED(culprit->wait_status)) culprit = child;
  }
  return culprit;
}

static int result_of_first(const launch_job_t* job) {
  for (uint32_t i = 0; i < job->count; ++i) {
    if (has_failed(&job->children[i])) return result_of(job->children[i].wait_status);
  }
  return 1;
}

static void say_who_failed(const launch_job_t* job, const launch_child_t* culprit) {
  if (!culprit) {
    fprintf(stderr, "jaxpp launch: process %d, on another node, failed first",
            job->blamed);
    return;
  }
  fprintf(stderr, "jaxpp launch: process %u (pid %d) ", culprit->number,
          (int)culprit->last_pid);
  if (culprit->stopped && !culprit->ended) {
    fprintf(stderr, "was stopped (%s) and did not continue",
            jpp__launch_stop_name(culprit));
  } else if (!culprit->ended) {
    fprintf(stderr, "no longer answers, the other processes report");
  } else if (WIFSIGNALED(culprit->wait_status)) {
    fprintf(stderr, "was ended by signal %d (%s)", WTERMSIG(culprit->wait_status),
            strsignal(WTERMSIG(culprit->wait_status)));
  } else if (!WEXITSTATUS(culprit->wait_status)) {
    fprintf(stderr, "ended before the others had finished");
  } else {
    fprintf(stderr, "failed with exit status %d", WEXITSTATUS(culprit->wait_status));
  }
}

// Decides once the failed process is known, or when it is too late for another report.
static void name_culprit(launch_job_t* job) {
  if (!job->failed_ms || job->ending) return;
  const launch_child_t* culprit = find_culprit(job);
  bool told = job->blamed >= 0 && (!culprit || culprit->ended);
  uint32_t others = count_alive(job) - (culprit && !culprit->ended);
  double patience_ms = kVerdictMs;
  if (job->blamed > 0 && others) patience_ms = kLateVerdictMs;
  if (job->blamed == 0) patience_ms = kLastVerdictMs;
  bool late = jpp_cli_now_ms() - job->failed_ms > patience_ms;
  if (!told && !late && count_alive(job)) return;
  jpp__launch_look_for_stopped(job);  // the last search may be older than the failure
  say_who_failed(job, culprit);
  fprintf(stderr, "; ending the others\n");
  job->result = culprit && culprit->ended ? result_of(culprit->wait_status) : 0;
  if (!job->result) {
    job->result = culprit && !culprit->ended ? 128 + SIGKILL : result_of_first(job);
  }
  // A process that does not answer would ignore a request to end.
  if (culprit && culprit->pid) kill(-culprit->pid, SIGKILL);
  end_all(job, SIGTERM, grace_ms(job, kFailureMs));
}

static void note_change(launch_job_t* job, launch_child_t* child, int wait_status) {
  if (WIFSTOPPED(wait_status) || WIFCONTINUED(wait_status)) {
    child->stop_signal = WIFSTOPPED(wait_status) ? WSTOPSIG(wait_status) : 0;
    child->stop_told = false;
    return;
  }
  bool interrupted =
      job->lent && WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGINT;
  jpp__launch_note_end(job, child, wait_status);
  if (interrupted) {  // the Ctrl-C went to the process alone, but it is for the job
    note_signal(SIGINT);
    pass_interrupts(job);
  }
  if (result_of(wait_status) && !job->failed_ms) job->failed_ms = jpp_cli_now_ms();
}

static void collect_ends(launch_job_t* job) {
  for (uint32_t i = 0; i < job->count; ++i) {
    launch_child_t* child = &job->children[i];
    const int kinds = WNOHANG | WUNTRACED | WCONTINUED;
    int wait_status = 0;
    if (child->pid && waitpid(child->pid, &wait_status, kinds) == child->pid) {
      note_change(job, child, wait_status);
    }
    jpp__launch_check_group(job, child);
  }
  // Others may have handled its failure and ended successfully.
  const launch_child_t* blamed = job->blamed < 0 ? NULL : find_child(job, job->blamed);
  bool is_last = blamed && blamed->pid && count_alive(job) == 1;
  if (is_last && !job->failed_ms) job->failed_ms = jpp_cli_now_ms();
}

// The processes of a job watch each other, but not a process that has already left.
static void blame_stopped(launch_job_t* job) {
  double now = jpp_cli_now_ms();
  if (job->total == 1 || job->failed_ms || job->ending) return;
  if (now < job->looked_ms + kLookMs) return;
  job->looked_ms = now;
  jpp__launch_look_for_stopped(job);
  for (uint32_t i = 0; i < job->count && job->blamed < 0; ++i) {
    const launch_child_t* child = &job->children[i];
    if (!child->stopped || now < child->stopped_ms + job->silence_ms + kStoppedMs)
      continue;
    job->blamed = (int32_t)child->number;
    job->failed_ms = now;
  }
}

// --- The loop -------------------------------------------------------------------------

// Parses "2 because of 1"; lines are short enough to be written atomically.
static void read_reports(launch_job_t* job) {
  char text[4096];
  ssize_t count = read(job->report[0], text, sizeof(text) - 1);
  int32_t from = 0, blamed = 0;
  if (count <= 0) return;
  text[count] = 0;
  if (job->blamed >= 0 || sscanf(text, "%d because of %d", &from, &blamed) != 2) return;
  if (blamed >= 0 && blamed < (int32_t)job->total) job->blamed = blamed;
}

// Reads available output, if `wait` for up to a tenth of a second. Returns false if there
// was none.
static bool read_outputs(launch_job_t* job, const sigset_t* waiting_mask, bool wait) {
  struct timespec slice = {.tv_nsec = wait ? 100000000 : 0};
  uint32_t count = 2 * job->count;
  for (uint32_t i = 0; i < count; ++i) {
    job->polls[i] = (struct pollfd){.fd = job->children[i / 2].outputs[i % 2].read_end,
                                    .events = POLLIN};
  }
  job->polls[count] = (struct pollfd){.fd = job->report[0], .events = POLLIN};
  if (ppoll(job->polls, count + 1, &slice, waiting_mask) <= 0) return false;
  for (uint32_t i = 0; i < count; ++i) {
    if (!job->polls[i].revents) continue;
    jpp__launch_read(job, &job->children[i / 2], &job->children[i / 2].outputs[i % 2]);
  }
  if (job->polls[count].revents) read_reports(job);
  return true;
}

static void follow(launch_job_t* job, const sigset_t* waiting_mask) {
  job->interrupts_passed = 0;
  while (count_alive(job)) {
    read_outputs(job, waiting_mask, true);
    pass_interrupts(job);
    collect_ends(job);
    jpp__launch_answer_stop(job);
    blame_stopped(job);
    name_culprit(job);
    if (job->ending && jpp_cli_now_ms() > job->end_ms) jpp__launch_signal(job, SIGKILL);
  }
  while (read_outputs(job, waiting_mask, false)) {
  }
  for (uint32_t i = 0; i < job->count; ++i) jpp__launch_close(job, &job->children[i]);
  name_culprit(job);
}

static jpp_status_t* choose_coordinator(launch_job_t* job) {
  uint16_t port = 0;
  if (job->options->coordinator) {
    snprintf(job->coordinator, sizeof(job->coordinator), "%s", job->options->coordinator);
    return NULL;
  }
  JPP_RETURN_IF_ERROR(find_port(&port));
  snprintf(job->coordinator, sizeof(job->coordinator), "127.0.0.1:%u", port);
  return NULL;
}

static jpp_status_t* run_once(launch_job_t* job, const sigset_t* waiting_mask) {
  JPP_RETURN_IF_ERROR(choose_coordinator(job));
  job->result = 0;
  job->ending = false;
  job->failed_ms = 0;
  job->blamed = -1;
  jpp_status_t* status = NULL;
  for (uint32_t i = 0; i < job->count && !status; ++i) {
    launch_child_t* child = &job->children[i];
    child->number = job->first + i;
    status = jpp__launch_open_log(job, child);
    if (!status) status = jpp__launch_start(job, child);
  }
  if (status) end_all(job, SIGKILL, 0);
  follow(job, waiting_mask);
  return status;
}

// Whether the caller wants it ignored, as nohup does with SIGHUP and a shell script with
// the SIGINT of its background commands.
static bool is_ignored(int number) {
  struct sigaction action;
  bool can_be = number == SIGHUP || number == SIGINT;
  return can_be && sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
}

// Blocks signals, which are then delivered only in ppoll(). Signals that this process
// ignores remain ignored, also in its children.
static void hold_signals(sigset_t* out_waiting_mask) {
  static const int kSignals[] = {SIGCHLD, SIGINT, SIGTERM, SIGHUP};
  struct sigaction action = {.sa_handler = note_signal};
  sigset_t held;
  sigemptyset(&held);
  for (size_t i = 0; i < sizeof(kSignals) / sizeof(*kSignals); ++i) {
    if (is_ignored(kSignals[i])) continue;
    sigaction(kSignals[i], &action, NULL);
    sigaddset(&held, kSignals[i]);
  }
  sigaddset(&held, SIGTTOU);  // to use a terminal that another process has
  sigprocmask(SIG_BLOCK, &held, out_waiting_mask);
}

static void wait_to_restart(double seconds, const sigset_t* waiting_mask) {
  double until = jpp_cli_now_ms() + 1000 * seconds;
  const struct timespec slice = {.tv_nsec = 100000000};
  while (!g_interrupts && jpp_cli_now_ms() < until) {
    ppoll(NULL, 0, &slice, waiting_mask);
  }
}

static jpp_status_t* run_job(launch_job_t* job) {
  sigset_t waiting_mask;
  uint32_t restarts = job->options->restarts;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(job->count, &job->children));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(2 * job->count + 1, &job->polls));
  for (uint32_t i = 0; i < job->count; ++i) {
    job->children[i].outputs[0].read_end = job->children[i].outputs[1].read_end = -1;
  }
  if (pipe2(job->report, O_CLOEXEC | O_NONBLOCK) < 0) return jpp__launch_error("a pipe");
  JPP_RETURN_IF_ERROR(jpp__launch_guard(job));
  jpp__launch_open_terminal(job);
  jpp__launch_prepare_output(job);
  hold_signals(&waiting_mask);
  for (;; ++job->restart) {
    JPP_RETURN_IF_ERROR(run_once(job, &waiting_mask));
    if (!job->result || g_interrupts || job->restart == restarts) return NULL;
    fprintf(stderr, "jaxpp launch: starting all processes again (%u of %u)\n",
            job->restart + 1, restarts);
    wait_to_restart(job->options->restart_delay, &waiting_mask);
    if (g_interrupts) return NULL;
  }
}

// The host is a name, an IPv4 address, or an IPv6 address in brackets.
static jpp_status_t* check_coordinator(const char* coordinator) {
  const char* colon = strrchr(coordinator, ':');
  size_t host = colon ? (size_t)(colon - coordinator) : 0;
  const char* port = colon ? colon + 1 : "";
  size_t digits = strspn(port, "0123456789");
  long number = digits && digits < 8 && !port[digits] ? strtol(port, NULL, 10) : 0;
  bool bracketed = host > 2 && coordinator[0] == '[' && coordinator[host - 1] == ']';
  const char* unexpected = bracketed ? " \t\n" : " \t\n:";
  bool is_host = host && strcspn(coordinator, unexpected) >= host;
  if (is_host && number >= 1 && number <= UINT16_MAX &&
      strlen(coordinator) < kMostAddress) {
    return NULL;
  }
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "--coordinator: expected HOST:PORT, as in node0:1234, with a "
                         "port from 1 to %d (an IPv6 address in brackets), found '%s'",
                         UINT16_MAX, coordinator);
}

static jpp_status_t* check_nodes(const jpp_cli_options_t* options, uint32_t count) {
  uint32_t nodes = options->nodes ? options->nodes : 1;
  if (count > kMostProcesses / nodes) {
    return jpp_status_make(JPP_INVALID_ARGUMENT, "%s: expected at most %d, found %llu",
                           nodes > 1 ? "-n times --nodes" : "-n", kMostProcesses,
                           (unsigned long long)count * nodes);
  }
  if (options->node >= nodes) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "--node: expected a number below --nodes, %u, found %u", nodes,
                           options->node);
  }
  if (nodes > 1 && !options->coordinator) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "--nodes: expected --coordinator HOST:PORT as well, with an "
                           "address of node 0 and a free port there");
  }
  return options->coordinator ? check_coordinator(options->coordinator) : NULL;
}

// Reads the variables that the processes will read: one with a wrong JPP_GRACE could only
// warn that it cannot detect failures.
static jpp_status_t* read_timeouts(uint32_t* out_silence_ms) {
  static const jpp_option_t kOthers[] = {JPP_OPTION_GRACE, JPP_OPTION_STALL_TIMEOUT,
                                         JPP_OPTION_STEP_TIMEOUT};
  uint32_t ms = 0;
  for (size_t i = 0; i < sizeof(kOthers) / sizeof(*kOthers); ++i) {
    JPP_RETURN_IF_ERROR(jpp_option_get_ms(kOthers[i], &ms));
  }
  JPP_RETURN_IF_ERROR(jpp_option_get_ms(JPP_OPTION_PEER_TIMEOUT, &ms));
  *out_silence_ms = ms ? ms : kSilenceMs;
  return NULL;
}

jpp_status_t* jpp_cli_launch(const jpp_cli_options_t* options, jpp_str_t* out) {
  (void)out;
  launch_job_t job = {.options = options,
                      .count = options->processes ? options->processes : 1};
  JPP_RETURN_IF_ERROR(check_nodes(options, job.count));
  JPP_RETURN_IF_ERROR(read_timeouts(&job.silence_ms));
  job.first = options->node * job.count;
  job.total = (options->nodes ? options->nodes : 1) * job.count;
  jpp_status_t* status = run_job(&job);
  jpp__launch_dismiss_guard(&job);
  jpp_free(job.children);
  jpp_free(job.polls);
  if (!job.result && job.lost_output) job.result = kOutputLost;
  if (!status && job.result) exit(job.result);
  return status;
}
