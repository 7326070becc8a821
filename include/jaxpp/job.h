// Job: tells which processes of a job are alive, from its start to its end, and what a
// process does when another one has failed.
//
// Every process keeps a connection to process 0, with a thread of the library at each end
// that does not depend on the program: a process that compiles, reads data or writes a
// checkpoint is watched like one in a step. Process 0 decides which process failed first
// and tells all others, so that every error names the same one. A process has failed if
// it reports a failure, is killed, or is silent for too long, but not if it leaves.
//
// A process is in one job at most. In a forked child, every function does nothing.
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
  const char* address;  // of process 0, without a port: "10.0.0.1", "fe80::1"
  uint16_t port;        // of process 0; there 0, and the system chooses it
  const void* token;    // a secret that only the processes of the job know
  size_t token_size;
  uint32_t peer_timeout_ms;  // how long a process may be silent; 0: 10 s
  // How long this process may take to end once the job has failed. Then it is ended with
  // exit status 1, by jpp_job_await_end()'s caller or by the library. 0: for ever.
  uint32_t grace_ms;
  // A descriptor on which `jaxpp launch` learns of other processes' failures; 0: none.
  int report;
} jpp_job_options_t;

// A wait of a thread of this process for other processes.
typedef struct jpp_job_wait jpp_job_wait_t;

// Joins the job. *out_port is the port that process 0 listens at.
JPP_API jpp_status_t* jpp_job_join(const jpp_job_options_t* options,
                                   JPP_OPTIONAL uint16_t* out_port) JPP_MUST_USE;

// Why the job has failed: JPP_PEER_ERROR with the name of the failed process; NULL: no
// known failure. The process that failed first gets its own text.
JPP_API jpp_status_t* jpp_job_failure(void) JPP_MUST_USE;

// Compares the steps of two processes, which must be equal. JPP_MESH_ERROR shows the
// first difference. `mine` and `theirs` are texts with a line for each fact,
// "name<TAB>value", such as a version, an option or the type of an argument; or for each
// operation of the program, "place<TAB>code". Codes are compared; the error names the
// place, which is in the user's source.
JPP_API jpp_status_t* jpp_job_compare_facts(uint32_t process, const char* mine,
                                            uint32_t other,
                                            const char* theirs) JPP_MUST_USE;
JPP_API jpp_status_t* jpp_job_compare_programs(uint32_t process, const char* mine,
                                               uint32_t other,
                                               const char* theirs) JPP_MUST_USE;

// Whether another process has left the job.
JPP_API bool jpp_job_has_left(uint32_t process);

// In process 0: another process has ended and never joined; `text` says why it failed,
// and is empty if it has not.
JPP_API void jpp_job_note_absent(uint32_t process, const char* text);

// Replaces an error that another process caused by the error that names the first failed
// process, and waits up to a second to learn which. Owns `status`; returns any other
// error unchanged.
JPP_API jpp_status_t* jpp_job_explain(JPP_OPTIONAL jpp_status_t* status) JPP_MUST_USE;

// This process has failed with an error that the user has seen; `text` is for the others:
// "ValueError: no such file". Its time to end begins.
JPP_API void jpp_job_fail(const char* text);
// The same if another process was the cause, as the text of the peer error says.
JPP_API void jpp_job_fail_after_another(const char* text);

// This process begins to wait for others in `name`, such as a barrier of a checkpoint:
// for each of `processes`, or for all if that is NULL. The job fails if one of them
// leaves and this process still waits some seconds later. Pass *out_wait to
// jpp_job_end_wait() on every path.
JPP_API jpp_status_t* jpp_job_begin_wait(const char* name,
                                         JPP_OPTIONAL const uint32_t* processes,
                                         uint32_t count,
                                         jpp_job_wait_t** out_wait) JPP_MUST_USE;
JPP_API void jpp_job_end_wait(JPP_OPTIONAL jpp_job_wait_t* wait);

// This process needs nothing more from the others. With `wait`, returns when all
// processes have left, the job has failed, or some have not even joined; true: all have
// left and none has failed.
JPP_API bool jpp_job_leave(bool wait);
// All have left: shortens the timeouts, because the remaining work is short unless a
// process has died since.
JPP_API void jpp_job_hurry(void);
// The end: stops watching. If the job has failed, process 0 first waits until the others
// are gone or their time is over, because JAX ends them with it.
JPP_API void jpp_job_end(void);

// Waits until this process' time to end is over, and gives a text about it for the user,
// NULL if the user has been told already; false: jpp_job_end() was called. The caller has
// a second to end the process. Free the text with jpp_text_free().
JPP_API bool jpp_job_await_end(char** out_text);

#endif  // JAXPP_JOB_H_
