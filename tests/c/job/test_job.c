// Jobs of forked processes: each child joins the job and reports by its exit status
// whether it observed what the test expects.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "jaxpp/job.h"
#include "test_util.h"

enum { kProcesses = 3, kTimeoutMs = 1000, kFine = 7, kWrong = 8 };

static const char kToken[] = "the job's secret";

// What a process does once it has joined; returns its exit status.
typedef int (*act_t)(uint32_t process);

typedef struct job {
  pid_t pids[kProcesses];
  uint16_t port;
  int ready[2];  // a pipe to which each process writes its port once it has joined
} job_t;

static void nap(long ms) {
  struct timespec time = {ms / 1000, ms % 1000 * 1000000};
  nanosleep(&time, NULL);
}

static jpp_job_options_t options_of(uint32_t process, uint16_t port, uint32_t grace_ms) {
  return (jpp_job_options_t){.struct_size = sizeof(jpp_job_options_t),
                             .process = process,
                             .num_processes = kProcesses,
                             .address = "127.0.0.1",
                             .port = port,
                             .token = kToken,
                             .token_size = sizeof(kToken),
                             .peer_timeout_ms = kTimeoutMs,
                             .grace_ms = grace_ms};
}

static void start(job_t* job, uint32_t process, uint32_t grace_ms, act_t act) {
  job->pids[process] = fork();
  assert_true(job->pids[process] >= 0);
  if (job->pids[process]) return;
  uint16_t port = 0;
  jpp_job_options_t options = options_of(process, job->port, grace_ms);
  jpp_status_t* status = jpp_job_join(&options, &port);
  if (status) _exit(kWrong);
  (void)!write(job->ready[1], &port, sizeof(port));
  if (process < kProcesses - 1) nap(300);  // until the others have joined
  _exit(act(process));
}

static void start_all(job_t* job, uint32_t grace_ms, act_t act) {
  *job = (job_t){0};
  assert_int_equal(pipe(job->ready), 0);
  for (uint32_t p = 0; p < kProcesses; ++p) {
    uint16_t port = 0;
    start(job, p, grace_ms, act);
    assert_int_equal(read(job->ready[0], &port, sizeof(port)), sizeof(port));
    job->port = port;
  }
}

static int status_of(const job_t* job, uint32_t process) {
  int status = 0;
  assert_int_equal(waitpid(job->pids[process], &status, 0), job->pids[process]);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

// Waits for the job to fail; kFine if the message contains all the texts.
static int expect_failure(const char* name, const char* text) {
  for (int i = 0; i < 300; ++i) {
    jpp_status_t* status = jpp_job_failure();
    if (status) {
      bool fine = jpp_status_code(status) == JPP_PEER_ERROR &&
                  strstr(jpp_status_message(status), name) &&
                  strstr(jpp_status_message(status), text);
      jpp_status_free(status);
      return fine ? kFine : kWrong;
    }
    nap(50);
  }
  return kWrong;
}

static int hit(uint32_t process, int number, const char* text) {
  if (process == 1) raise(number);
  return process == 1 ? 0 : expect_failure("process 1 at 127.0.0.1 (host ", text);
}

static int act_killed(uint32_t process) {
  return hit(process, SIGKILL, "the connection was lost");
}

static int act_stopped(uint32_t process) {
  return hit(process, SIGSTOP, "it has sent nothing for 1 s");
}

static int act_failing(uint32_t process) {
  if (process == 1) {
    jpp_job_fail("ValueError: of the user");
    return 1;
  }
  jpp_status_t* own = jpp_status_make(JPP_PEER_ERROR, "process 2 at 10.0.0.1: gone");
  own = jpp_job_explain(own);
  bool fine = strstr(jpp_status_message(own), "has failed: ValueError: of the user");
  jpp_status_free(own);
  return fine ? kFine : kWrong;
}

static int act_failing_at_once(uint32_t process) {
  if (process < 2) return expect_failure("process 2 at 127.0.0.1", "ValueError");
  jpp_job_fail("ValueError: of the user");
  return kFine;
}

static int act_leaving(uint32_t process) {
  nap(process * 200);
  bool all = jpp_job_leave(true);
  jpp_job_end();
  return all && !jpp_job_failure() ? kFine : kWrong;
}

// Process 2 is stopped when it has left, so that it does not receive that all have left.
static int act_stopped_at_its_end(uint32_t process) {
  if (process == 2) {
    jpp_job_leave(false);
    raise(SIGSTOP);
  }
  return act_leaving(0);
}

static bool await_departure(uint32_t process) {
  for (int i = 0; i < 300 && !jpp_job_has_left(process); ++i) nap(50);
  return jpp_job_has_left(process);
}

// Process 2 leaves, then process 0, then process 1.
static int act_leaving_one(uint32_t process) {
  if (process == 2) {
    jpp_job_leave(false);
    return kFine;
  }
  bool fine = await_departure(2);
  fine &= process == 1 ? await_departure(0) : !jpp_job_has_left(1);
  fine &= !jpp_job_failure();
  jpp_job_leave(true);
  return fine ? kFine : kWrong;
}

// Process 1 leaves; the others first wait for each other, then for process 1.
static int act_waiting_in_vain(uint32_t process) {
  static const uint32_t kOthers[] = {0, 2};
  jpp_job_wait_t *in_order = NULL, *in_vain = NULL;
  if (process == 1) {
    jpp_job_leave(false);
    nap(4000);
    return expect_failure("process 1 has ended", "waits for it in 'save'");
  }
  jpp_status_free(jpp_job_begin_wait("step", kOthers, 2, &in_order));
  nap(4000);
  if (!in_order || jpp_job_has_left(1) != true || jpp_job_failure()) return kWrong;
  jpp_job_end_wait(in_order);
  jpp_status_free(jpp_job_begin_wait("save", NULL, 0, &in_vain));
  int result = expect_failure("process 1 has ended", "waits for it in 'save'");
  jpp_job_end_wait(in_vain);
  return result;
}

// No caller asks for the failure, so the library ends the process.
static int act_asleep(uint32_t process) {
  if (process == 1) raise(SIGKILL);
  nap(20000);
  return kWrong;
}

static void check(act_t act, uint32_t grace_ms, int of_first, int of_second) {
  job_t job;
  start_all(&job, grace_ms, act);
  assert_int_equal(status_of(&job, 0), of_first);
  assert_int_equal(status_of(&job, 2), of_first);
  if (of_second == 128 + SIGKILL) kill(job.pids[1], SIGKILL);
  assert_int_equal(status_of(&job, 1), of_second);
  close(job.ready[0]);
  close(job.ready[1]);
}

static void test_a_killed_process_is_named(void** state) {
  (void)state;
  check(act_killed, 0, kFine, 128 + SIGKILL);
}

static void test_a_stopped_process_is_named(void** state) {
  (void)state;
  check(act_stopped, 0, kFine, 128 + SIGKILL);
}

static void test_the_first_failure_is_told_to_all(void** state) {
  (void)state;
  check(act_failing, 0, kFine, 1);
}

static void test_a_failure_right_after_joining(void** state) {
  (void)state;
  check(act_failing_at_once, 0, kFine, kFine);
}

static void test_all_leave_together(void** state) {
  (void)state;
  check(act_leaving, 1000, kFine, kFine);
}

static void test_process_0_ends_when_all_know(void** state) {
  (void)state;
  job_t job;
  int status = 0;
  start_all(&job, 1000, act_stopped_at_its_end);
  assert_int_equal(waitpid(job.pids[2], &status, WUNTRACED), job.pids[2]);
  assert_true(WIFSTOPPED(status));
  nap(500);  // the others leave meanwhile
  pid_t ended = waitpid(job.pids[0], &status, WNOHANG);
  kill(job.pids[2], SIGCONT);
  assert_int_equal(ended, 0);
  for (uint32_t p = 0; p < kProcesses; ++p) assert_int_equal(status_of(&job, p), kFine);
  close(job.ready[0]);
  close(job.ready[1]);
}

static void test_one_that_leaves_has_not_failed(void** state) {
  (void)state;
  check(act_leaving_one, 0, kFine, kFine);
}

static void test_a_wait_for_one_that_has_left(void** state) {
  (void)state;
  check(act_waiting_in_vain, 0, kFine, kFine);
}

static void test_a_process_that_does_not_end_is_ended(void** state) {
  (void)state;
  check(act_asleep, 500, 1, 128 + SIGKILL);
}

// Checks that the job does not fail while a stranger sends noise to process 0.
static int act_beside_a_stranger(uint32_t process) {
  nap(1000);
  bool fine = !jpp_job_failure();
  jpp_job_leave(true);
  return process == 1 || fine ? kFine : kWrong;
}

static void test_a_stranger_changes_nothing(void** state) {
  (void)state;
  job_t job;
  char noise[4096];
  memset(noise, 'x', sizeof(noise));
  start_all(&job, 0, act_beside_a_stranger);
  // All processes report the port of process 0.
  struct sockaddr_in address = {.sin_family = AF_INET,
                                .sin_port = htons(job.port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  for (int i = 0; i < 40; ++i) {
    int stranger = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(connect(stranger, (struct sockaddr*)&address, sizeof(address)), 0);
    (void)!send(stranger, noise, sizeof(noise), MSG_NOSIGNAL);
    if (i % 2) close(stranger);
  }
  for (uint32_t p = 0; p < kProcesses; ++p) assert_int_equal(status_of(&job, p), kFine);
}

// A frame that the system holds back is lost if its process ends.
static int act_with_its_sockets(uint32_t process) {
  (void)process;
  int connections = 0, held_back = 0;
  for (int descriptor = 0; descriptor < 64; ++descriptor) {
    struct sockaddr_in peer;
    socklen_t size = sizeof(peer), of_int = sizeof(int);
    if (getpeername(descriptor, (struct sockaddr*)&peer, &size) < 0) continue;
    if (peer.sin_family != AF_INET) continue;
    int at_once = 0;
    getsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &at_once, &of_int);
    ++connections;
    held_back += !at_once;
  }
  jpp_job_leave(true);
  return connections && !held_back ? kFine : kWrong;
}

static void test_frames_are_sent_at_once(void** state) {
  (void)state;
  check(act_with_its_sockets, 0, kFine, kFine);
}

static void test_wrong_options_are_refused(void** state) {
  (void)state;
  jpp_job_options_t options = options_of(kProcesses, 0, 0);
  ASSERT_FAILS(jpp_job_join(&options, NULL), JPP_INVALID_ARGUMENT, "below 3");
  assert_null(jpp_job_failure());
  assert_false(jpp_job_leave(true));
  jpp_job_end();
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_a_killed_process_is_named),
      cmocka_unit_test(test_a_stopped_process_is_named),
      cmocka_unit_test(test_the_first_failure_is_told_to_all),
      cmocka_unit_test(test_a_failure_right_after_joining),
      cmocka_unit_test(test_all_leave_together),
      cmocka_unit_test(test_process_0_ends_when_all_know),
      cmocka_unit_test(test_one_that_leaves_has_not_failed),
      cmocka_unit_test(test_a_wait_for_one_that_has_left),
      cmocka_unit_test(test_a_process_that_does_not_end_is_ended),
      cmocka_unit_test(test_a_stranger_changes_nothing),
      cmocka_unit_test(test_frames_are_sent_at_once),
      cmocka_unit_test(test_wrong_options_are_refused),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
