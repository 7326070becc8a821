// State: what this process knows about its job, shared by the watching thread and the
// public functions.
#ifndef JPP_JOB_STATE_H_
#define JPP_JOB_STATE_H_

#include <pthread.h>
#include <sys/types.h>

#include "jaxpp/job.h"
#include "job/connection.h"

struct jpp_job_wait {
  jpp_job_wait_t* next;
  bool* awaited;       // [job->count]
  int64_t in_vain_ms;  // since when one of these has left; 0: none has left
  char name[kJppJobText / 2];
};

typedef struct jpp_job {
  pthread_mutex_t mutex;  // guards everything below that jpp_job_join() does not set
  pthread_cond_t changed;
  // Set by jpp_job_join().
  pid_t pid;  // the process that joined; 0: none
  int32_t process;
  uint32_t count;
  jpp_job_secret_t secret;
  uint32_t peer_timeout_ms, grace_ms;
  int report;
  pthread_t thread;
  int listener;  // in process 0, else -1

  // Process 0 has one for each other process and for unproved callers; every other
  // process has one, to process 0.
  jpp_job_connection_t* connections;
  uint32_t num_connections;
  bool* joined;  // [count] in process 0
  bool* left;    // [count] processes that have announced that they leave
  bool welcome;  // process 0 has accepted this process
  bool self_left, all_left;
  bool alone;         // process 0 has left, so this process is no longer watched
  int64_t looked_ms;  // when the thread last polled
  int64_t beat_ms;    // when it last sent heartbeats

  jpp_job_wait_t* waits;  // waits of threads of this process

  jpp_status_t* failure;  // of the job
  int32_t culprit;        // the process that failed first, or kJppJobUnknown
  int64_t deadline_ms;    // when this process must end; 0: no deadline
  bool told;              // the user has seen the failure
  bool expired;           // the deadline has passed, and jpp_job_await_end() returns
  bool lingers;           // in jpp_job_end(), until the others have ended
  bool ended;
} jpp_job_t;

extern jpp_job_t jpp_the_job;

// watch.c. The thread's function; `unused` is NULL.
void* jpp__job_watch(void* unused);
// With the mutex held: whether a connection to another process is open.
bool jpp__job_is_connected(void);
// With the mutex held, in process 0: sends a frame to all that have joined.
void jpp__job_send_all(jpp_job_kind_t kind, int32_t process, const char* text);
// With the mutex held, in process 0: decides that the job has failed, and tells all.
void jpp__job_decide(int32_t culprit, const char* text);
// With the mutex held, in process 0: tells all once every process has left.
void jpp__job_note_left(void);

// job.c. With the mutex held: records that the job has failed, and starts the deadline.
// Only the first call has an effect.
void jpp__job_set_failure(int32_t culprit, const char* text);

#endif  // JPP_JOB_STATE_H_
