// The terminal of a job of one process. The process leads a group of its own, which is in
// the background: it is stopped by SIGTTIN or SIGTTOU when it reads the terminal or
// changes its modes, as a debugger does. Then the launcher lends it the foreground, as a
// shell does. From then on Ctrl-C and Ctrl-Z reach the process and not the launcher.
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "cli/launch.h"

void jpp__launch_open_terminal(launch_job_t* job) {
  job->terminal = job->count == 1 ? open("/dev/tty", O_RDWR | O_CLOEXEC) : -1;
}

static bool has_foreground(const launch_job_t* job) {
  return job->terminal >= 0 && tcgetpgrp(job->terminal) == getpgrp();
}

// The launcher blocks SIGTTOU (hold_signals()), which would stop it here.
static void lend_terminal(launch_job_t* job, launch_child_t* child) {
  job->lent = tcsetpgrp(job->terminal, child->group) == 0;
  for (int i = 0; i < 2; ++i) jpp__launch_show_partial(job, child, &child->outputs[i]);
}

void jpp__launch_take_terminal(launch_job_t* job) {
  if (!job->lent) return;
  job->lent = false;
  tcsetpgrp(job->terminal, getpgrp());
}

static bool asks_for_terminal(const launch_child_t* child) {
  return child->stop_signal == SIGTTIN || child->stop_signal == SIGTTOU;
}

const char* jpp__launch_stop_name(const launch_child_t* child) {
  if (asks_for_terminal(child)) {
    return child->stop_signal == SIGTTIN
               ? "SIGTTIN: it reads the terminal, which needs jaxpp launch -n 1 in the "
                 "foreground"
               : "SIGTTOU: it sets up the terminal, which needs jaxpp launch -n 1 in the "
                 "foreground";
  }
  return child->stop_signal == SIGTSTP ? "SIGTSTP" : "SIGSTOP";
}

static void say_that_it_is_stopped(launch_child_t* child) {
  if (child->stop_told) return;
  child->stop_told = true;
  fprintf(stderr, "jaxpp launch: process %u (pid %d) was stopped (%s)", child->number,
          (int)child->last_pid, jpp__launch_stop_name(child));
  if (!asks_for_terminal(child)) {
    fprintf(stderr, "; kill -CONT -%d continues it", (int)child->group);
  }
  fprintf(stderr, "\n");
}

void jpp__launch_answer_stop(launch_job_t* job) {
  launch_child_t* child = &job->children[0];
  if (job->count > 1) return;  // blame_stopped() names it
  if (!child->pid || !child->stop_signal) return;
  if (child->stop_signal == SIGTSTP && job->lent) {  // Ctrl-Z: stop with the process
    jpp__launch_take_terminal(job);
    raise(SIGTSTP);
    if (has_foreground(job)) lend_terminal(job, child);
  } else if (asks_for_terminal(child) && has_foreground(job)) {
    lend_terminal(job, child);
  } else {
    say_that_it_is_stopped(child);
    return;
  }
  child->stop_signal = 0;
  kill(-child->group, SIGCONT);
}
