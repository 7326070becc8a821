// jaxpp launch: declarations that its parts share.
#ifndef JPP_CLI_LAUNCH_H_
#define JPP_CLI_LAUNCH_H_

#include <stdio.h>
#include <sys/types.h>

#include "cli/cli.h"

enum { kLaunchLineSize = 8192 };

// One of a process's two outputs.
typedef struct launch_output {
  int read_end;  // -1: closed
  FILE* to;
  size_t length;
  char line[kLaunchLineSize];  // start of a line whose end has not arrived
  double redrawn_ms;           // when a progress bar was last shown
} launch_output_t;

typedef struct launch_child {
  uint32_t number;  // number in the job
  pid_t pid;        // 0: it has ended
  pid_t last_pid;
  pid_t group;  // its group, while it may have members; 0: none
  bool ended;
  int wait_status;
  int stop_signal;    // that stopped the process itself; 0: it runs
  bool stop_told;     // the user knows that it is stopped
  bool stopped;       // a process of the group is stopped
  double stopped_ms;  // since when; 0: none is stopped
  FILE* log;          // NULL: none
  bool log_lost;      // some output could not be written to it
  launch_output_t outputs[2];
} launch_child_t;

typedef struct launch_job {
  const jpp_cli_options_t* options;
  // Number of processes here, number of the first one, number of all.
  uint32_t count, first, total;
  char coordinator[300];     // HOST:PORT
  launch_child_t* children;  // [count]
  struct pollfd* polls;      // [2 * count + 1]
  uint32_t restart;          // number of restarts
  int report[2];             // a pipe on which processes report failures of others
  int guard;                 // a pipe to the guard process, which outlives this one
  pid_t guard_pid;           // 0: no guard runs
  uint32_t silence_ms;       // time after which a silent process counts as dead
  int terminal;              // that the only process may use; -1: none
  bool lent;                 // the only process has its foreground
  bool one_stream;           // standard output and error are the same file
  launch_output_t* open[2];  // which has begun a line of standard output, error; or NULL
  int lost_output;           // why standard output could not be written; 0: it could
  int interrupts_passed;     // number of signals that were handled

  // Since the last start or restart:
  int32_t blamed;    // the process that failed first, according to the others; -1: none
  double failed_ms;  // when the first failure was seen; 0: none
  double looked_ms;  // when the job was last searched for stopped processes
  int result;        // exit status; 0: no failure
  bool ending;       // all processes were told to end
  double end_ms;     // when they will be killed
} launch_job_t;

// A status with the text of errno.
jpp_status_t* jpp__launch_error(const char* what) JPP_MUST_USE;

// --- launch_children.c ----------------------------------------------------------------

// Forks the guard, which kills all children when this process has ended.
jpp_status_t* jpp__launch_guard(launch_job_t* job) JPP_MUST_USE;
// Call it when all children have ended; returns when the guard has ended too.
void jpp__launch_dismiss_guard(const launch_job_t* job);
jpp_status_t* jpp__launch_start(launch_job_t* job, launch_child_t* child) JPP_MUST_USE;
// Handles the end of a child. Kills the rest of its process group, unless all were told
// to end: then a shell ends at once, while the processes that it started have the grace
// period.
void jpp__launch_note_end(launch_job_t* job, launch_child_t* child, int wait_status);
// Forgets the group of a child that has ended if the group has no members any more.
void jpp__launch_check_group(const launch_job_t* job, launch_child_t* child);
void jpp__launch_signal(const launch_job_t* job, int number);
// Records for every child whether a process of its group is stopped, as by SIGSTOP.
void jpp__launch_look_for_stopped(launch_job_t* job);

// --- launch_terminal.c ----------------------------------------------------------------

void jpp__launch_open_terminal(launch_job_t* job);
// Handles that the only process here is stopped: lends it the terminal that it asks for,
// or says that it is stopped.
void jpp__launch_answer_stop(launch_job_t* job);
// Puts the launcher into the foreground again if it has lent the terminal.
void jpp__launch_take_terminal(launch_job_t* job);
// The signal that stopped the child; for the terminal's signals also what they mean.
const char* jpp__launch_stop_name(const launch_child_t* child);

// --- launch_output.c ------------------------------------------------------------------

void jpp__launch_prepare_output(launch_job_t* job);

jpp_status_t* jpp__launch_open_log(const launch_job_t* job,
                                   launch_child_t* child) JPP_MUST_USE;
// Reads available output and writes its complete lines; closes the output at its end.
void jpp__launch_read(launch_job_t* job, launch_child_t* child, launch_output_t* output);
// Writes the start of a line, such as a prompt, if it is no progress bar.
void jpp__launch_show_partial(launch_job_t* job, const launch_child_t* child,
                              launch_output_t* output);
// Writes the remaining output and closes everything.
void jpp__launch_close(launch_job_t* job, launch_child_t* child);

#endif  // JPP_CLI_LAUNCH_H_
