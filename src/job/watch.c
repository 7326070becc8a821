// The watching thread: heartbeats, silence, lost connections and the deadline.
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "jaxpp/alloc.h"
#include "job/state.h"

enum {
  kBeatsPerTimeout = 10,
  kLookMs = 100,
  kInVainMs = 3000,  // how long a barrier may need to release its processes
  kProofMs = 5000,   // time for a new connection to prove itself
  kCallerMs = 1000,  // time for the caller of jpp_job_await_end() to end the process
  kLastMs = 2500,    // time that process 0 gives the others beyond that
};

void jpp__job_send_all(jpp_job_kind_t kind, int32_t process, const char* text) {
  const jpp_job_t* job = &jpp_the_job;
  for (uint32_t i = 0; i < job->num_connections; ++i) {
    if (job->connections[i].process == kJppJobUnknown) continue;
    jpp__job_send(&job->connections[i], kind, process, text);
  }
}

void jpp__job_decide(int32_t culprit, const char* text) {
  jpp_job_t* job = &jpp_the_job;
  if (job->failure) return;
  jpp__job_send_all(JPP_JOB_VERDICT, culprit, text);
  jpp__job_set_failure(culprit, text);
}

void jpp__job_note_left(void) {
  jpp_job_t* job = &jpp_the_job;
  if (job->all_left || !job->self_left) return;
  for (uint32_t p = 1; p < job->count; ++p) {
    if (!job->left[p]) return;
  }
  job->all_left = true;
  jpp__job_send_all(JPP_JOB_ALL_LEFT, 0, "");
  pthread_cond_broadcast(&job->changed);
}

// --- Arrivals --------------------------------------------------------------------

// Handles a connection that is closed or silent. Once all processes have left, they end
// in any order.
static void note_lost(const jpp_job_connection_t* connection, bool closed,
                      const char* how) {
  jpp_job_t* job = &jpp_the_job;
  char text[kJppJobText];
  if (connection->process == kJppJobUnknown) return;
  if (connection->leaves && (closed || !job->all_left)) {
    job->alone |= job->process != 0;
    pthread_cond_broadcast(&job->changed);
    return;
  }
  snprintf(text, sizeof(text), "process %d at %s: %s", connection->process,
           connection->name, how);
  if (job->process == 0) {
    jpp__job_decide(connection->process, text);
  } else {
    jpp__job_set_failure(connection->process, text);
  }
}

static void welcome(const jpp_job_connection_t* connection) {
  const jpp_job_t* job = &jpp_the_job;
  char text[kJppJobText];
  job->joined[connection->process] = true;
  jpp__job_name_self(text, sizeof(text));
  jpp__job_send(connection, JPP_JOB_WELCOME, 0, text);
  for (uint32_t p = 0; p < job->count; ++p) {
    if (job->left[p]) jpp__job_send(connection, JPP_JOB_LEAVES, (int32_t)p, "");
  }
  if (!job->failure) return;
  jpp__job_send(connection, JPP_JOB_VERDICT, job->culprit,
                jpp_status_message(job->failure));
}

// Process 0 handles a frame; false: the sender does not belong to the job.
static bool take_in_center(jpp_job_connection_t* connection) {
  jpp_job_t* job = &jpp_the_job;
  const jpp_job_frame_t* frame = &connection->frame;
  char text[kJppJobText];
  if (connection->process == kJppJobUnknown) {
    int32_t process = frame->process;
    if (process < 1 || process >= (int32_t)job->count || job->joined[process] ||
        !jpp__job_check_answer(connection, job->secret)) {
      return false;
    }
    welcome(connection);
    return true;
  }
  if (frame->kind == JPP_JOB_FAILED && frame->process == connection->process) {
    snprintf(text, sizeof(text), "process %d at %s has failed: %.200s",
             connection->process, connection->name, frame->text);
    jpp__job_decide(frame->process, text);
  } else if (frame->kind == JPP_JOB_FAILED) {
    jpp__job_decide(frame->process, frame->text);
  } else if (frame->kind == JPP_JOB_LEAVES) {
    connection->leaves = job->left[connection->process] = true;
    jpp__job_send_all(JPP_JOB_LEAVES, connection->process, "");
    jpp__job_note_left();
  } else if (frame->kind == JPP_JOB_ALL_LEFT) {
    connection->knows = true;
    pthread_cond_broadcast(&job->changed);
  }
  return true;
}

// Another process handles a frame from process 0.
static void take_from_center(jpp_job_connection_t* connection) {
  jpp_job_t* job = &jpp_the_job;
  const jpp_job_frame_t* frame = &connection->frame;
  size_t length = strlen(connection->name);
  switch ((jpp_job_kind_t)frame->kind) {
    case JPP_JOB_NONCE:
      jpp__job_answer(connection, job->secret, job->process);
      return;
    case JPP_JOB_WELCOME:
      job->welcome = true;
      pthread_cond_broadcast(&job->changed);
      snprintf(connection->name + length, sizeof(connection->name) - length, " (%.128s)",
               frame->text);
      return;
    case JPP_JOB_VERDICT:
      jpp__job_set_failure(frame->process, frame->text);
      return;
    case JPP_JOB_LEAVES:
      if (frame->process < 0 || frame->process >= (int32_t)job->count) return;
      job->left[frame->process] = true;
      connection->leaves |= frame->process == 0;
      return;
    case JPP_JOB_ALL_LEFT:
      job->all_left = connection->leaves = connection->knows = true;
      jpp__job_send(connection, JPP_JOB_ALL_LEFT, job->process, "");
      pthread_cond_broadcast(&job->changed);
      return;
    case JPP_JOB_HELLO:
    case JPP_JOB_BEAT:
    case JPP_JOB_FAILED:
      return;
  }
}

static void take_arrivals(jpp_job_connection_t* connection, int64_t now) {
  while (connection->descriptor >= 0) {
    jpp_job_arrival_t arrival = jpp__job_receive(connection, now);
    if (arrival == JPP_JOB_NOTHING) return;
    if (arrival == JPP_JOB_LOST) {
      jpp__job_close(connection);
      note_lost(connection, true,
                "the connection was lost: it was killed, has crashed, or ended without "
                "leaving the job");
    } else if (jpp_the_job.process) {
      take_from_center(connection);
    } else if (!take_in_center(connection)) {
      jpp__job_close(connection);
    }
  }
}

static void accept_all(int64_t now) {
  jpp_job_t* job = &jpp_the_job;
  for (uint32_t i = 0; i < job->num_connections && job->listener >= 0; ++i) {
    jpp_job_connection_t* connection = &job->connections[i];
    if (connection->descriptor >= 0) continue;
    if (!jpp__job_accept(job->listener, now, connection)) return;
  }
}

// --- Time -----------------------------------------------------------------------------

static void check_silence(jpp_job_connection_t* connection, int64_t now) {
  jpp_job_t* job = &jpp_the_job;
  bool proved = connection->process != kJppJobUnknown;
  int64_t limit = proved ? (int64_t)job->peer_timeout_ms : kProofMs;
  if (connection->descriptor < 0 || now - connection->heard_ms <= limit) return;
  char how[128];
  snprintf(how, sizeof(how),
           "it has sent nothing for %g s: it was stopped, its machine hangs, or the "
           "network to it is down",
           (double)limit / 1000);
  note_lost(connection, false, how);
  jpp__job_close(connection);
}

// A thread that did not run itself, because its process was stopped, cannot judge the
// silence of others.
static void keep_time(int64_t now) {
  jpp_job_t* job = &jpp_the_job;
  bool looked_away = now - job->looked_ms > job->peer_timeout_ms / 2;
  bool beats = now - job->beat_ms >= job->peer_timeout_ms / kBeatsPerTimeout;
  job->looked_ms = now;
  if (beats) job->beat_ms = now;
  for (uint32_t i = 0; i < job->num_connections; ++i) {
    jpp_job_connection_t* connection = &job->connections[i];
    if (connection->descriptor < 0) continue;
    if (looked_away) connection->heard_ms = now;
    if (beats && connection->process != kJppJobUnknown) {
      jpp__job_send(connection, JPP_JOB_BEAT, 0, "");
    }
    check_silence(connection, now);
  }
}

// The first process that a wait needs and that has left, or kJppJobUnknown.
static int32_t find_absent(const jpp_job_wait_t* wait) {
  for (uint32_t p = 0; p < jpp_the_job.count; ++p) {
    if (wait->awaited[p] && jpp_the_job.left[p]) return (int32_t)p;
  }
  return kJppJobUnknown;
}

// A process that has left the job will not reach a barrier any more. Without this check,
// the processes at the barrier would wait for its own limit, which is minutes.
static void check_waits(int64_t now) {
  jpp_job_t* job = &jpp_the_job;
  for (jpp_job_wait_t* wait = job->waits; wait && !job->failure; wait = wait->next) {
    int32_t absent = find_absent(wait);
    if (absent == kJppJobUnknown) continue;
    if (!wait->in_vain_ms) wait->in_vain_ms = now;
    if (now - wait->in_vain_ms < kInVainMs) continue;
    char text[kJppJobText];
    snprintf(text, sizeof(text),
             "process %d has ended, and process %d waits for it in '%s'", absent,
             job->process, wait->name);
    if (job->process == 0) {
      jpp__job_decide(absent, text);
    } else {
      jpp__job_send(&job->connections[0], JPP_JOB_FAILED, absent, text);
      jpp__job_set_failure(absent, text);
    }
  }
}

bool jpp__job_is_connected(void) {
  for (uint32_t i = 0; i < jpp_the_job.num_connections; ++i) {
    if (jpp_the_job.connections[i].descriptor >= 0) return true;
  }
  return false;
}

// When process 0 ends, JAX ends all others; process 0 is therefore the last.
static void keep_deadline(int64_t now) {
  jpp_job_t* job = &jpp_the_job;
  if (!job->deadline_ms || now < job->deadline_ms) return;
  int64_t late = now - job->deadline_ms;
  bool is_last = job->process == 0 && (job->lingers || jpp__job_is_connected());
  if (is_last && late < kLastMs) return;
  if (!job->expired) {
    job->expired = true;
    job->deadline_ms = now;
    pthread_cond_broadcast(&job->changed);
    if (!job->ended) return;
  }
  if (!job->ended && late < kCallerMs + kLastMs) return;
  if (!job->told && job->failure) {
    const char* message = jpp_status_message(job->failure);
    (void)!write(STDERR_FILENO, "jaxpp: error: ", 14);
    (void)!write(STDERR_FILENO, message, strlen(message));
    (void)!write(STDERR_FILENO, "\n", 1);
  }
  _exit(1);
}

// --- The loop -------------------------------------------------------------------------

// The listener is polled only while there is room for a new connection: poll() returns at
// once as long as one waits.
static uint32_t fill_polls(struct pollfd* polls) {
  const jpp_job_t* job = &jpp_the_job;
  int listener = -1;
  for (uint32_t i = 0; i < job->num_connections; ++i) {
    int descriptor = job->connections[i].descriptor;
    polls[i] = (struct pollfd){.fd = descriptor, .events = POLLIN};
    if (descriptor < 0) listener = job->listener;
  }
  polls[job->num_connections] = (struct pollfd){.fd = listener, .events = POLLIN};
  return job->num_connections + 1;
}

static bool look(struct pollfd* polls) {
  jpp_job_t* job = &jpp_the_job;
  uint32_t count = fill_polls(polls);
  pthread_mutex_unlock(&job->mutex);
  poll(polls, count, kLookMs);
  pthread_mutex_lock(&job->mutex);
  if (job->ended && !job->deadline_ms) return false;
  int64_t now = jpp__clock_now_ms();
  for (uint32_t i = 0; i < job->num_connections; ++i) {
    if (polls[i].fd >= 0 && polls[i].revents) take_arrivals(&job->connections[i], now);
  }
  if (polls[job->num_connections].revents) accept_all(now);
  keep_time(now);
  check_waits(now);
  keep_deadline(now);
  return true;
}

void* jpp__job_watch(void* unused) {
  (void)unused;
  jpp_job_t* job = &jpp_the_job;
  struct pollfd* polls = NULL;
  jpp_status_t* status = JPP_ALLOC_ARRAY(job->num_connections + 1, &polls);
  pthread_mutex_lock(&job->mutex);
  job->looked_ms = jpp__clock_now_ms();
  while (!status && look(polls)) {
  }
  pthread_mutex_unlock(&job->mutex);
  jpp_free(polls);
  jpp_status_free(status);
  return NULL;
}
