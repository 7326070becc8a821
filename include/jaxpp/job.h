// Job: tells which processes of a job are alive, from its start to its end, and handles
// the failure of a process in all others.
//
// Every process keeps a connection to process 0, served at each end by a thread of the
// library that does not depend on the program: a process that compiles, reads data or
// writes a checkpoint is watched like one that runs a step. Process 0 decides which
// process failed first and tells all others, so that every error names the same one. A
// process has failed if it reports a failure, is killed, or is silent for too long, but
// not if it leaves.
//
// A process joins at most one job. In a forked child, every function does nothing.
//
// Threads: any thread.
#ifndef JAXPP_JOB_H_
#define JAXPP_JOB_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "jaxpp/status.h"

typedef struct jpp_job_options {
  size_t struct_size;  // sizeof(jpp_job_options_t)
  uint32_t process, num_processes;
  const char* address;  // address of process 0, without a port: "10.0.0.1", "fe80::1"
  uint16_t port;        // port of process 0; in process 0 itself 0: the system chooses it
  const void* token;    // a secret that only the processes of the job know
  size_t token_size;
  // How long a process may be silent; 0: 10 s.
  uint32_t peer_timeout_ms;
  // How long this process may take to end once the job has failed. Then
  // jpp_job_await_end()'s caller, or else the library, ends it with exit status 1. 0: no
  // limit.
  uint32_t grace_ms;
  // The descriptor on which the process reports other processes' failures to `jaxpp
  // launch`; 0: none.
  int report;
} jpp_job_options_t;

// One thread's wait for other processes.
typedef struct jpp_job_wait jpp_job_wait_t;

// Joins the job. *out_port is the port that process 0 listens at.
JPP_API jpp_status_t* jpp_job_join(const jpp_job_options_t* options,
                                   JPP_OPTIONAL uint16_t* out_port) JPP_MUST_USE;

// Why the job has failed: JPP_PEER_ERROR with the name of the failed process; NULL: no
// known failure. The process that failed first gets the text of its own error.
JPP_API jpp_status_t* jpp_job_failure(void) JPP_MUST_USE;

// Compares the steps of two processes, which must be equal. JPP_MESH_ERROR shows the
// first difference. `mine` and `theirs` are texts with a line for each fact,
// "name<TAB>value", such as a version, an option or the type of an argument; or for each
// operation of the program, "place<TAB>code". Codes are compared; places, which are lines
// of the user's source, only appear in the error.
JPP_API jpp_status_t* jpp_job_compare_facts(uint32_t process, const char* mine,
                                            uint32_t other,
                                            const char* theirs) JPP_MUST_USE;
JPP_API jpp_status_t* jpp_job_compare_programs(uint32_t process, const char* mine,
                                               uint32_t other,
                                               const char* theirs) JPP_MUST_USE;

// Whether another process has left the job.
JPP_API bool jpp_job_has_left(uint32_t process);

// Process 0 calls this when another process has ended without joining; `text` says why it
// failed, and is empty if it did not fail.
JPP_API void jpp_job_note_absent(uint32_t process, const char* text);

// Replaces an error that another process caused with the error that names the process
// that failed first, and waits up to a second to learn which one that is. Owns `status`;
// returns any other error unchanged.
JPP_API jpp_status_t* jpp_job_explain(JPP_OPTIONAL jpp_status_t* status) JPP_MUST_USE;

// Call it when this process has failed with an error that the user has seen; `text` tells
// the others: "ValueError: no such file". The time within which this process must end
// begins.
JPP_API void jpp_job_fail(const char* text);
// The same if another process caused the failure; `text` is the text of the peer error.
JPP_API void jpp_job_fail_after_another(const char* text);

// Announces that this process waits for others in `name`, such as a barrier of a
// checkpoint: for each of `processes`, or for all if that is NULL. The job fails if one
// of them leaves and this process still waits some seconds later. Pass *out_wait to
// jpp_job_end_wait() on every path.
JPP_API jpp_status_t* jpp_job_begin_wait(const char* name,
                                         JPP_OPTIONAL const uint32_t* processes,
                                         uint32_t count,
                                         jpp_job_wait_t** out_wait) JPP_MUST_USE;
JPP_API void jpp_job_end_wait(JPP_OPTIONAL jpp_job_wait_t* wait);

// This process needs nothing more from the others. With `wait`, returns when all
// processes have left, and in process 0 when the others have received that; or when the
// job has failed, or when some processes have not even joined. Returns true if all have
// left and none has failed. A process that leaves without `wait` and calls jpp_job_end()
// at once is taken for silent while process 0 waits.
JPP_API bool jpp_job_leave(bool wait);
// Call it when all processes have left: it shortens the timeouts, because the remaining
// work is short unless a process has died in the meantime.
JPP_API void jpp_job_hurry(void);
// Stops watching. If the job has failed, process 0 first waits until the others have
// ended or their time is over, because JAX ends them when it ends.
JPP_API void jpp_job_end(void);

// Waits until this process must end, and returns a text about the failure for the user,
// NULL if the user has been told already; false: jpp_job_end() was called. The caller has
// a second to end the process. Free the text with jpp_text_free().
JPP_API bool jpp_job_await_end(char** out_text);

#endif  // JAXPP_JOB_H_
