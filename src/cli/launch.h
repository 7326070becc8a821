// jaxpp launch: declarations that its parts share.
#ifndef JPP_CLI_LAUNCH_H_
#define JPP_CLI_LAUNCH_H_

#include <stdio.h>
#include <sys/types.h>

#include "cli/cli.h"

enum { kLaunchLineSize = 8192 };

// One of a process' two outputs.
typedef struct launch_output {
  int read_end;  // -1: closed
  FILE* to;
  size_t length;
  char line[kLaunchLineSize];  // the start of the next line
  double redrawn_ms;           // when a progress bar was last shown
} launch_output_t;

typedef struct launch_child {
  uint32_t number;  // in the job
  pid_t pid;        // 0: it has ended
  pid_t last_pid;
  pid_t group;  // that may have members; 0: none
  bool ended;
  int wait_status;
  bool stopped;       // a process of the group is
  double stopped_ms;  // since when; 0: none is
  FILE* log;          // NULL: none
  launch_output_t outputs[2];
} launch_child_t;

typedef struct launch_job {
  const jpp_cli_options_t* options;
  uint32_t count, first, total;  // processes here, the first one's number, all of them
  char coordinator[300];         // HOST:PORT
  launch_child_t* children;      // [count]
  struct pollfd* polls;          // [2 * count + 1]
  uint32_t restart;              // how often it was started again
  int report[2];                 // a pipe: processes tell that others have failed
  int guard;                     // a pipe to the process that outlives this one
  pid_t guard_pid;               // 0: no guard runs
  uint32_t silence_ms;           // after which a process counts as dead

  // Since the last start or restart:
  int32_t blamed;    // the process that failed first, as the others say; -1: none
  double failed_ms;  // when the first failure was seen; 0: none was
  double looked_ms;  // when the job was last searched for stopped processes
  int result;        // exit status; 0: none has failed
  bool ending;       // all are told to end
  double end_ms;     // when they are killed
} launch_job_t;

// A status with errno's text.
jpp_status_t* jpp__launch_error(const char* what) JPP_MUST_USE;

// --- launch_children.c ----------------------------------------------------------------

// Forks the guard, which kills all children when this process is gone.
jpp_status_t* jpp__launch_guard(launch_job_t* job) JPP_MUST_USE;
// Called when all children have ended; returns when the guard has ended too.
void jpp__launch_dismiss_guard(const launch_job_t* job);
jpp_status_t* jpp__launch_start(launch_job_t* job, launch_child_t* child) JPP_MUST_USE;
// A child has ended. The rest of its process group is killed, unless all are told to end:
// then a shell ends at once, while the processes that it started have the grace period.
void jpp__launch_note_end(launch_job_t* job, launch_child_t* child, int wait_status);
// Forgets the group of a child that has ended when it has no members any more.
void jpp__launch_check_group(const launch_job_t* job, launch_child_t* child);
void jpp__launch_signal(const launch_job_t* job, int number);
// Records for every child whether a process of its group is stopped, as by SIGSTOP.
void jpp__launch_look_for_stopped(launch_job_t* job);

// --- launch_output.c ------------------------------------------------------------------

jpp_status_t* jpp__launch_open_log(const launch_job_t* job,
                                   launch_child_t* child) JPP_MUST_USE;
// Reads available output and writes its lines; closes the output at its end.
void jpp__launch_read(const launch_child_t* child, launch_output_t* output);
// Writes what is left and closes all.
void jpp__launch_close(launch_child_t* child);

#endif  // JPP_CLI_LAUNCH_H_
