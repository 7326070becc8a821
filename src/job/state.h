// State: what this process knows of its job, shared by the watching thread and the calls.
#ifndef JPP_JOB_STATE_H_
#define JPP_JOB_STATE_H_

#include <pthread.h>
#include <sys/types.h>

#include "jaxpp/job.h"
#include "job/connection.h"

struct jpp_job_wait {
  jpp_job_wait_t* next;
  bool* awaited;       // [job->count]
  int64_t in_vain_ms;  // since when one of these has left; 0: none has
  char name[kJppJobText / 2];
};

typedef struct jpp_job {
  pthread_mutex_t mutex;  // of all that follows but what join() sets
  pthread_cond_t changed;
  // Set by jpp_job_join().
  pid_t pid;  // that joined; 0: none has
  int32_t process;
  uint32_t count;
  jpp_job_secret_t secret;
  uint32_t peer_timeout_ms, grace_ms;
  int report;
  pthread_t thread;
  int listener;  // of process 0, else -1

  // Process 0 has one for each other process and for unproved callers; every other
  // process has one, to process 0.
  jpp_job_connection_t* connections;
  uint32_t num_connections;
  bool* joined;  // [count], of process 0
  bool* left;    // [count]: has said so
  bool welcome;  // process 0 knows this one
  bool self_left, all_left;
  bool alone;         // process 0 has left, and with it the watch
  int64_t looked_ms;  // when the thread polled last
  int64_t beat_ms;    // when it sent its last beats

  jpp_job_wait_t* waits;  // of threads of this process

  jpp_status_t* failure;  // of the job
  int32_t culprit;        // the process that failed first, or kJppJobUnknown
  int64_t deadline_ms;    // when this process must have ended; 0: no deadline
  bool told;              // the user has seen why
  bool expired;           // the deadline has passed, jpp_job_await_end() returns
  bool lingers;           // in jpp_job_end(), until the others are gone
  bool ended;
} jpp_job_t;

extern jpp_job_t jpp_the_job;

// watch.c. The thread; `unused` is NULL.
void* jpp__job_watch(void* unused);
// With the mutex held: whether a connection to another process is open.
bool jpp__job_is_connected(void);
// With the mutex held, in process 0: to all that have joined.
void jpp__job_send_all(jpp_job_kind_t kind, int32_t process, const char* text);
// With the mutex held, in process 0: decides that the job has failed, and tells all.
void jpp__job_decide(int32_t culprit, const char* text);
// With the mutex held, in process 0: tells all once every process has left.
void jpp__job_note_left(void);

// job.c. With the mutex held: the job has failed, and the time to end begins. Only the
// first call counts.
void jpp__job_set_failure(int32_t culprit, const char* text);

#endif  // JPP_JOB_STATE_H_
