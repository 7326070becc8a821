// The public functions: joining, failing, leaving and ending.
#include "jaxpp/job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/null.h"
#include "base/str.h"
#include "base/struct_size.h"
#include "base/thread.h"
#include "job/state.h"

enum {
  kPeerTimeoutMs = 10000,
  kStrangers = 16,
  kExplainMs = 1000,
  kJoinMs = 30000,  // how long process 0 waits at its end for others to join
  kNanoseconds = 1000000000,
};

jpp_job_t jpp_the_job = {.mutex = PTHREAD_MUTEX_INITIALIZER, .listener = -1};

static bool is_joined(void) { return jpp_the_job.pid == getpid(); }

static void lock(void) { pthread_mutex_lock(&jpp_the_job.mutex); }

static void unlock(void) { pthread_mutex_unlock(&jpp_the_job.mutex); }

// With the mutex held; waits a tenth of a second at most.
static void wait_a_while(void) {
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_nsec += kNanoseconds / 10;
  until.tv_sec += until.tv_nsec / kNanoseconds;
  until.tv_nsec %= kNanoseconds;
  pthread_cond_timedwait(&jpp_the_job.changed, &jpp_the_job.mutex, &until);
}

// --- Joining --------------------------------------------------------------------------

// A forked child closes its copies, so that the others notice when the parent ends.
static void close_in_child(void) {
  for (uint32_t i = 0; i < jpp_the_job.num_connections; ++i) {
    jpp__job_close(&jpp_the_job.connections[i]);
  }
  if (jpp_the_job.listener >= 0) close(jpp_the_job.listener);
}

static jpp_status_t* open_connections(const jpp_job_options_t* options,
                                      uint16_t* out_port) {
  jpp_job_t* job = &jpp_the_job;
  bool center = options->process == 0;
  uint32_t count = center ? job->count - 1 + kStrangers : 1;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(count, &job->connections));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(job->count, &job->joined));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(job->count, &job->left));
  for (uint32_t i = 0; i < count; ++i) job->connections[i].descriptor = -1;
  job->num_connections = count;
  *out_port = options->port;
  if (center) return jpp__job_listen(options->address, &job->listener, out_port);
  JPP_RETURN_IF_ERROR(
      jpp__job_connect(options->address, options->port, &job->connections[0]));
  job->connections[0].heard_ms = jpp__clock_now_ms();
  return NULL;
}

static jpp_status_t* join(const jpp_job_options_t* options, uint16_t* out_port) {
  jpp_job_t* job = &jpp_the_job;
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_cond_init(&job->changed, &monotonic);
  pthread_condattr_destroy(&monotonic);
  job->process = (int32_t)options->process;
  job->count = options->num_processes;
  job->peer_timeout_ms =
      options->peer_timeout_ms ? options->peer_timeout_ms : kPeerTimeoutMs;
  job->grace_ms = options->grace_ms;
  job->report = options->report;
  void* token = NULL;
  JPP_RETURN_IF_ERROR(jpp_alloc(options->token_size, &token));
  memcpy(token, options->token, options->token_size);
  jpp_the_job.secret = (jpp_job_secret_t){token, options->token_size};
  JPP_RETURN_IF_ERROR(open_connections(options, out_port));
  pthread_atfork(NULL, NULL, close_in_child);
  job->welcome = job->process == 0;
  JPP_RETURN_IF_ERROR(jpp__thread_start(&job->thread, jpp__job_watch, NULL, "jpp-job"));
  // Process 0 would reject frames sent before the proof.
  int64_t until = jpp__clock_now_ms() + job->peer_timeout_ms;
  lock();
  while (!job->welcome && !job->failure && jpp__clock_now_ms() < until) wait_a_while();
  unlock();
  return NULL;
}

jpp_status_t* jpp_job_join(const jpp_job_options_t* options, uint16_t* out_port) {
  jpp_job_options_t known;
  uint16_t port = 0;
  JPP_RETURN_IF_NULL(options);
  JPP_RETURN_IF_ERROR(JPP_OPTIONS_COPY(jpp_job_options_t, report, options, &known));
  if (!known.address || !known.token || !known.token_size ||
      known.process >= known.num_processes) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "jpp_job_join: expected an address, a token and a process "
                           "below %u, found process %u",
                           known.num_processes, known.process);
  }
  if (jpp_the_job.pid) {
    return jpp_status_make(JPP_INVALID_ARGUMENT,
                           "jpp_job_join: this process has joined a job before");
  }
  JPP_RETURN_IF_ERROR(join(&known, &port));
  jpp_the_job.pid = getpid();
  if (out_port) *out_port = port;
  return NULL;
}

// --- Failing --------------------------------------------------------------------------

static void begin_deadline(void) {
  jpp_job_t* job = &jpp_the_job;
  if (!job->grace_ms || job->deadline_ms) return;
  job->deadline_ms = jpp__clock_now_ms() + job->grace_ms;
}

// Tells the launcher, which uses the first report that arrives.
static void report(int32_t culprit) {
  const jpp_job_t* job = &jpp_the_job;
  if (!job->report || culprit == job->process) return;
  char line[48];
  int length = snprintf(line, sizeof(line), "%d because of %d\n", job->process, culprit);
  (void)!write(job->report, line, (size_t)length);
}

void jpp__job_set_failure(int32_t culprit, const char* text) {
  jpp_job_t* job = &jpp_the_job;
  if (job->failure || job->ended) return;
  job->failure = jpp_status_make(JPP_PEER_ERROR, "%s", text);
  job->culprit = culprit;
  begin_deadline();
  report(culprit);
  pthread_cond_broadcast(&job->changed);
}

jpp_status_t* jpp_job_failure(void) {
  if (!is_joined()) return NULL;
  lock();
  jpp_status_t* status =
      jpp_the_job.failure ? jpp_status_clone(jpp_the_job.failure) : NULL;
  unlock();
  return status;
}

bool jpp_job_has_left(uint32_t process) {
  if (!is_joined() || process >= jpp_the_job.count) return false;
  lock();
  bool left = jpp_the_job.left[process];
  unlock();
  return left;
}

void jpp_job_note_absent(uint32_t process, const char* text) {
  jpp_job_t* job = &jpp_the_job;
  if (!is_joined() || process >= job->count || job->process) return;
  lock();
  if (job->joined[process]) {
    unlock();
    return;
  }
  if (*text) {
    char named[kJppJobText];
    snprintf(named, sizeof(named), "process %u has failed: %.200s", process, text);
    jpp__job_decide((int32_t)process, named);
  } else {
    job->joined[process] = job->left[process] = true;
    jpp__job_send_all(JPP_JOB_LEAVES, (int32_t)process, "");
    jpp__job_note_left();
  }
  unlock();
}

jpp_status_t* jpp_job_explain(jpp_status_t* status) {
  jpp_job_t* job = &jpp_the_job;
  if (!is_joined() || jpp_status_code(status) != JPP_PEER_ERROR) return status;
  int64_t until = jpp__clock_now_ms() + kExplainMs;
  lock();
  while (!job->failure && !job->ended && jpp__clock_now_ms() < until) wait_a_while();
  jpp_status_t* verdict = job->failure ? jpp_status_clone(job->failure) : NULL;
  unlock();
  if (!verdict) return status;
  jpp_status_free(status);
  return verdict;
}

// The last process that a text blames, as in "process 2 at 10.0.0.2: ..." or "process 2
// has ended".
static int32_t find_culprit(const char* text) {
  static const char kWord[] = "process ";
  int32_t culprit = kJppJobUnknown;
  while ((text = strstr(text, kWord)) != NULL) {
    text += sizeof(kWord) - 1;
    char* end = NULL;
    long number = strtol(text, &end, 10);
    bool blames = !strncmp(end, " at ", 4) || !strncmp(end, " has ended", 10);
    if (end != text && blames) culprit = (int32_t)number;
  }
  return culprit;
}

static void fail(int32_t culprit, const char* text) {
  jpp_job_t* job = &jpp_the_job;
  if (!is_joined()) return;
  lock();
  job->told = true;
  if (job->process == 0 && culprit == 0) {
    char named[kJppJobText], self[128];
    jpp__job_name_self(self, sizeof(self));
    snprintf(named, sizeof(named), "process 0 (%s) has failed: %.200s", self, text);
    jpp__job_decide(culprit, named);
  } else if (job->process == 0) {
    jpp__job_decide(culprit, text);
  } else if (!job->failure) {
    jpp__job_send(&job->connections[0], JPP_JOB_FAILED, culprit, text);
    report(culprit);  // this process may end before process 0 answers
  }
  begin_deadline();
  unlock();
}

void jpp_job_fail(const char* text) { fail(jpp_the_job.process, text); }

void jpp_job_fail_after_another(const char* text) { fail(find_culprit(text), text); }

// --- Waiting for others ---------------------------------------------------------------

jpp_status_t* jpp_job_begin_wait(const char* name, const uint32_t* processes,
                                 uint32_t count, jpp_job_wait_t** out_wait) {
  jpp_job_t* job = &jpp_the_job;
  jpp_job_wait_t* wait = NULL;
  JPP_RETURN_IF_NULL(name, out_wait);
  *out_wait = NULL;
  if (!is_joined()) return NULL;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &wait));
  jpp_status_t* status = JPP_ALLOC_ARRAY(job->count, &wait->awaited);
  if (status) {
    jpp_free(wait);
    return status;
  }
  snprintf(wait->name, sizeof(wait->name), "%s", name);
  for (uint32_t p = 0; p < job->count; ++p) wait->awaited[p] = !processes;
  for (uint32_t i = 0; i < count; ++i) {
    if (processes[i] < job->count) wait->awaited[processes[i]] = true;
  }
  wait->awaited[job->process] = false;
  lock();
  wait->next = job->waits;
  job->waits = wait;
  unlock();
  *out_wait = wait;
  return NULL;
}

void jpp_job_end_wait(jpp_job_wait_t* wait) {
  if (!wait) return;
  lock();
  jpp_job_wait_t** link = &jpp_the_job.waits;
  while (*link != wait) link = &(*link)->next;
  *link = wait->next;
  unlock();
  jpp_free(wait->awaited);
  jpp_free(wait);
}

// --- Leaving --------------------------------------------------------------------------

static bool all_have_joined(void) {
  for (uint32_t p = 1; p < jpp_the_job.count; ++p) {
    if (!jpp_the_job.joined[p]) return false;
  }
  return true;
}

// A system that closes a connection with unread data, such as a heartbeat, may discard
// what was sent last. Process 0 therefore ends after the others have received its last
// frame.
static bool all_know(void) {
  const jpp_job_t* job = &jpp_the_job;
  for (uint32_t i = 0; i < job->num_connections; ++i) {
    const jpp_job_connection_t* connection = &job->connections[i];
    bool awaited = connection->descriptor >= 0 && connection->process != kJppJobUnknown;
    if (awaited && !connection->knows) return false;
  }
  return job->all_left;
}

static void say_that_we_leave(void) {
  jpp_job_t* job = &jpp_the_job;
  if (job->self_left) return;
  job->self_left = job->left[job->process] = true;
  if (job->process) {
    jpp__job_send(&job->connections[0], JPP_JOB_LEAVES, job->process, "");
  } else {
    jpp__job_send_all(JPP_JOB_LEAVES, 0, "");
    jpp__job_note_left();
  }
}

bool jpp_job_leave(bool wait) {
  jpp_job_t* job = &jpp_the_job;
  if (!is_joined()) return false;
  lock();
  say_that_we_leave();
  int64_t until = jpp__clock_now_ms() + kJoinMs;
  while (wait && !all_know() && !job->failure && !job->alone && !job->ended) {
    bool late = job->process == 0 && jpp__clock_now_ms() > until;
    if (late && !all_have_joined()) break;
    wait_a_while();
  }
  bool all = job->all_left && !job->failure;
  unlock();
  return all;
}

void jpp_job_hurry(void) {
  jpp_job_t* job = &jpp_the_job;
  if (!is_joined()) return;
  lock();
  begin_deadline();
  // A silent process must be detected first, so that it can be named.
  if (job->deadline_ms && !job->failure) job->deadline_ms += job->peer_timeout_ms;
  unlock();
}

void jpp_job_end(void) {
  jpp_job_t* job = &jpp_the_job;
  if (!is_joined()) return;
  lock();
  if (job->failure && job->process == 0) {
    job->lingers = true;
    while ((jpp__job_is_connected() || !all_have_joined()) && !job->expired)
      wait_a_while();
  }
  job->ended = true;
  if (!job->failure) job->deadline_ms = 0;
  pthread_cond_broadcast(&job->changed);
  unlock();
  if (!job->failure) pthread_join(job->thread, NULL);
}

bool jpp_job_await_end(char** out_text) {
  jpp_job_t* job = &jpp_the_job;
  *out_text = NULL;
  if (!is_joined()) return false;
  lock();
  while (!job->expired && !job->ended) wait_a_while();
  bool expired = job->expired && !job->ended;
  jpp_str_t str = {0};
  if (expired && !job->told) {
    job->told = true;
    jpp_str_appendf(&str, "jaxpp: error: %s; process %d did not end in %g s after that",
                    job->failure ? jpp_status_message(job->failure)
                                 : "a process died after all processes had finished",
                    job->process, (double)job->grace_ms / 1000);
    jpp_status_free(jpp_str_finish(&str, out_text));
  }
  unlock();
  return expired;
}
