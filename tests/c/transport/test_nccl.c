// What is particular to the driver for NCCL, on the stub of it, mostly over the fake
// wire: which communicators are made when, and how they end. That messages arrive, in
// order and within their credits, is in the suites that all drivers pass.
#include <pthread.h>

#include "nccl_tests.h"
#include "transport/net_channel.h"

// --- The order of communicators -------------------------------------------------------

enum { kProcesses = 3, kMostOpen = 16 };

typedef struct job {
  jpp_transport_t* transports[kProcesses];
  jpp_channel_t* channels[kMostOpen];
  size_t count;
} job_t;

static void job_begin(job_t* job) {
  *job = (job_t){0};
  for (uint32_t p = 0; p < kProcesses; ++p) {
    jpp_transport_options_t options = pair_options("nccl-fake", p, 10000);
    options.num_processes = kProcesses;
    options.device = p;
    ASSERT_OK(test_transport_create(&options, &job->transports[p]));
  }
  for (uint32_t p = 0; p < kProcesses; ++p) {
    for (uint32_t q = 0; q < kProcesses; ++q) {
      const void* address = NULL;
      size_t size = 0;
      jpp_transport_address(job->transports[q], &address, &size);
      if (p == q) continue;
      ASSERT_OK(jpp_transport_connect(job->transports[p], q, address, size));
    }
  }
}

static jpp_channel_t* job_open(job_t* job, uint32_t process, uint32_t id, uint32_t src,
                               uint32_t dst) {
  static const uint64_t kBytes = kBig;
  static const bool kOnDevice = true;
  jpp_channel_spec_t spec = pair_spec(NULL, id, 2, 1, &kBytes);
  spec.src_process = src;
  spec.dst_process = dst;
  spec.sent = NULL;
  spec.on_device = &kOnDevice;
  jpp_channel_t** channel = &job->channels[job->count++];
  ASSERT_OK(jpp_transport_open_channel(job->transports[process], &spec, channel));
  return *channel;
}

static void job_progress(job_t* job) {
  for (uint32_t p = 0; p < kProcesses; ++p) {
    bool some = false;
    if (job->transports[p]) jpp_transport_progress(job->transports[p], &some);
  }
}

#define JOB_WAIT(job, condition)                                                        \
  do {                                                                                  \
    int64_t job_until_ = jpp__clock_now_ms() + 20000;                                   \
    while (!(condition)) {                                                              \
      if (jpp__clock_now_ms() > job_until_) fail_msg("waited in vain for " #condition); \
      job_progress(job);                                                                \
    }                                                                                   \
  } while (0)

static void* destroy_one(void* transport) {
  jpp_transport_destroy(transport);
  return NULL;
}

static void job_end(job_t* job) {
  pthread_t threads[kProcesses];
  for (size_t i = 0; i < job->count; ++i) jpp_channel_close(job->channels[i]);
  for (uint32_t p = 0; p < kProcesses; ++p) {
    assert_int_equal(pthread_create(&threads[p], NULL, destroy_one, job->transports[p]),
                     0);
  }
  for (uint32_t p = 0; p < kProcesses; ++p) pthread_join(threads[p], NULL);
}

// All six ways, two of them twice. In each process the channels are opened in another
// order; each makes its communicators in that of the lowest channel of each, one at a
// time.
static void test_communicators_are_made_in_the_order_of_the_plan(void** state) {
  (void)state;
  enum { kChannels = 8, kWays = 6 };
  static const uint32_t kWay[kChannels][2] = {{2, 0}, {0, 1}, {1, 2}, {1, 0},
                                              {0, 2}, {2, 1}, {2, 0}, {0, 1}};
  job_t job;
  stub_set_faults(&(stub_faults_t){.delay = 3});
  job_begin(&job);
  for (uint32_t p = 0; p < kProcesses; ++p) {
    for (uint32_t i = 0; i < kChannels; ++i) {
      uint32_t id = (7 + p + i * 5) % kChannels;
      if (kWay[id][0] != p && kWay[id][1] != p) continue;
      job_open(&job, p, id, kWay[id][0], kWay[id][1]);
    }
  }
  JOB_WAIT(&job, stub_get_log().inits == 2 * kWays);
  for (int i = 0; i < 100; ++i) job_progress(&job);
  stub_log_t log = stub_get_log();
  assert_int_equal(log.inits, 2 * kWays);
  assert_int_equal(log.most_making, 1);
  int id_of[kWays];
  for (uint32_t way = 0; way < kWays; ++way) id_of[way] = -1;
  for (uint32_t p = 0; p < kProcesses; ++p) {
    int at = 0;
    for (uint32_t way = 0; way < kWays; ++way) {
      if (kWay[way][0] != p && kWay[way][1] != p) continue;
      while (at < log.inits && log.device[at] != (int)p) ++at;
      assert_true(at < log.inits);
      assert_int_equal(log.rank[at], kWay[way][0] == p ? 0 : 1);
      if (id_of[way] >= 0) assert_int_equal(log.id[at], id_of[way]);
      id_of[way] = log.id[at++];
    }
  }
  assert_true(log.least_priority < 0);
  job_end(&job);
  log = stub_get_log();
  assert_int_equal(log.finalized, 2 * kWays);
  assert_int_equal(log.aborts, 0);
}

// Nothing is issued while a communicator of the process is to be made.
static void test_transfers_wait_for_all_communicators(void** state) {
  (void)state;
  static char data[100];
  job_t job;
  job_begin(&job);
  jpp_channel_t* out = job_open(&job, 0, 0, 0, 1);
  job_open(&job, 1, 0, 0, 1);
  job_open(&job, 0, 1, 2, 0);  // whose sender takes its time
  jpp_shard_t shard = {.data = data, .size = sizeof(data)};
  JOB_WAIT(&job, pair_send(out, 1, &shard, 1, 0));
  for (int i = 0; i < 200; ++i) job_progress(&job);
  assert_int_equal(stub_get_log().sends, 0);
  job_open(&job, 2, 1, 2, 0);
  JOB_WAIT(&job, stub_get_log().transfers == 1);
  job_end(&job);
}

// --- Shards ---------------------------------------------------------------------------

// As a runtime's messages: what they are in host memory, then the data.
static void test_shards_in_host_memory_go_over_the_wire(void** state) {
  static const uint64_t kBytes[3] = {16, kBig, kBig};
  static const bool kOnDevice[3] = {false, true, true};
  pair_t pair;
  bool out = false, in = false;
  stub_set_faults(&(stub_faults_t){.own_memory = true, .delay = 2});
  pair_connect(&pair, *state, 10000);
  jpp_channel_spec_t spec = pair_spec(&pair, 3, 2, 3, kBytes);
  spec.on_device = kOnDevice;
  ASSERT_OK(jpp_transport_open_channel(pair.sender, &spec, &pair.out));
  ASSERT_OK(jpp_transport_open_channel(pair.receiver, &spec, &pair.in));
  PAIR_WAIT(&pair, ({
    if (!out) ASSERT_OK(jpp_channel_warm_up(pair.out, &out));
    if (!in) ASSERT_OK(jpp_channel_warm_up(pair.in, &in));
    out&& in;
  }));
  assert_int_equal(stub_get_log().transfers, 2);
  void* memory = NULL;
  jpp_net_t* net = (jpp_net_t*)pair.sender;
  ASSERT_OK(net->device->allocate(net, kBig, &memory));
  for (uint64_t round = 0; round < 5; ++round) {
    char text[16] = "an array";
    jpp_received_t received;
    pair_fill(memory, kBig, round);
    jpp_shard_t shards[3] = {{.data = text, .size = sizeof(text)},
                             {.data = memory, .size = kBig},
                             {.data = NULL, .size = 0}};
    PAIR_WAIT(&pair, pair_send(pair.out, round, shards, 3, 1));
    PAIR_WAIT(&pair, pair_recv(pair.in, &received));
    assert_string_equal(received.data[0], "an array");
    assert_int_equal((uintptr_t)received.data[1] % 64, 0);
    assert_true(pair_is_filled(received.data[1], kBig, round));
    assert_int_equal(received.sizes[2], 0);
    jpp_channel_release(pair.in, received.slot);
    PAIR_WAIT(&pair, pair.finished == round + 1);
  }
  assert_int_equal(stub_get_log().transfers, 2 + 5);
  pair_close(&pair);
}

static void test_no_communicator_is_made_for_channels_that_are_closed(void** state) {
  (void)state;
  pair_t pair;
  pair_open(&pair, "nccl-fake", 1, 1, kBig);
  pair_close(&pair);
  assert_int_equal(stub_get_log().inits, 0);
}

static void test_ends_with_shards_in_other_memory_fail(void** state) {
  (void)state;
  static const uint64_t kBytes = 16;
  pair_t pair;
  jpp_status_t* status = NULL;
  bool done = false;
  pair_connect(&pair, "nccl-fake", 10000);
  jpp_channel_spec_t spec = pair_spec(&pair, 3, 1, 1, &kBytes);
  ASSERT_OK(jpp_transport_open_channel(pair.sender, &spec, &pair.out));
  spec.on_device = NULL;
  ASSERT_OK(jpp_transport_open_channel(pair.receiver, &spec, &pair.in));
  PAIR_WAIT(&pair, (status = jpp_channel_try_send_bytes(pair.out, 0, NULL, 0, NULL,
                                                        &done)) != NULL);
  ASSERT_FAILS(status, JPP_PEER_ERROR, "run the same plan in all processes");
  pair_close(&pair);
}

static void test_channels_of_host_memory_need_no_communicator(void** state) {
  pair_t pair;
  uint64_t bytes = 16;
  pair_connect(&pair, *state, 10000);
  jpp_channel_spec_t spec = pair_spec(&pair, 3, 1, 1, &bytes);
  spec.on_device = NULL;
  ASSERT_OK(jpp_transport_open_channel(pair.sender, &spec, &pair.out));
  ASSERT_OK(jpp_transport_open_channel(pair.receiver, &spec, &pair.in));
  PAIR_WAIT(&pair, pair_send_text(&pair, 1, "text"));
  pair_expect_text(&pair, 1, "text");
  pair_close(&pair);
  assert_int_equal(stub_get_log().inits, 0);
}

// Packets overtake each other; NCCL's sends and receives still match.
static void test_receives_follow_the_order_of_the_sends(void** state) {
  (void)state;
  static char data[4][kBig];
  pair_t pair;
  jpp_channel_t *out[2], *in[2];
  pair_connect(&pair, "nccl-fake", 10000);
  jpp_transport_fake_set_delay(pair.receiver, 40, 7);
  stub_set_faults(&(stub_faults_t){.delay = 1});
  for (uint32_t c = 0; c < 2; ++c) {
    static const uint64_t kBytes = kBig;
    jpp_channel_spec_t spec = pair_spec(&pair, c, 4, 1, &kBytes);
    ASSERT_OK(jpp_transport_open_channel(pair.sender, &spec, &out[c]));
    ASSERT_OK(jpp_transport_open_channel(pair.receiver, &spec, &in[c]));
  }
  for (uint64_t i = 0; i < 400; ++i) {
    // Another size each time: the stub fails where one does not meet its own.
    jpp_shard_t shard = {.data = data[i % 4], .size = 1 + i};
    PAIR_WAIT(&pair, ({
      for (uint32_t c = 0; c < 2; ++c) {
        jpp_received_t received;
        if (pair_recv(in[c], &received)) jpp_channel_release(in[c], received.slot);
      }
      pair_send(out[i % 3 == 0], i, &shard, 1, 0);
    }));
  }
  PAIR_WAIT(&pair, pair.finished == 400);
  ASSERT_OK(jpp_transport_peer_status(pair.receiver, 0));
  jpp_channel_close(out[0]);
  jpp_channel_close(in[0]);
  pair.out = out[1];
  pair.in = in[1];
  pair_close(&pair);
}

// --- Failures -------------------------------------------------------------------------

// What either end knows of the other.
static jpp_status_t* failure_of(const pair_t* pair) {
  jpp_status_t* status = jpp_transport_peer_status(pair->sender, 1);
  return status ? status : jpp_transport_peer_status(pair->receiver, 0);
}

// Sends and receives until an end finds the other failed; then all ends, and every
// message that was sent is accounted for.
static void expect_failure(const stub_faults_t* faults, const char* text) {
  static char data[kBig];
  pair_t pair;
  uint32_t sent = 0;
  jpp_status_t* status = NULL;
  stub_set_faults(faults);
  pair_connect(&pair, "nccl-fake", 1000);
  pair_open_channel(&pair, 2, 1, kBig);
  PAIR_WAIT(&pair, ({
    jpp_shard_t shard = {.data = data, .size = kBig};
    jpp_received_t received;
    bool done = false;
    jpp_status_free(jpp_channel_try_send_bytes(pair.out, 1, &shard, 1, NULL, &done));
    sent += done;
    jpp_status_free(jpp_channel_try_recv_bytes(pair.in, &received, &done));
    if (done) jpp_channel_release(pair.in, received.slot);
    (status = failure_of(&pair)) != NULL;
  }));
  ASSERT_FAILS(jpp_status_clone(status), JPP_PEER_ERROR, "at 127.0.0.1: ");
  ASSERT_FAILS(status, JPP_PEER_ERROR, text);
  pair_close(&pair);
  assert_int_equal(pair.finished, sent);
  assert_true(stub_get_log().aborts > 0);
  expect_nothing_left();
}

static void test_errors_of_nccl_are_the_peers(void** state) {
  (void)state;
  expect_failure(&(stub_faults_t){.fail_init = 1},
                 "ncclCommInitRankConfig: unhandled system error; NCCL says: the stub");
  expect_failure(&(stub_faults_t){.fail_init = 2, .delay = 2}, "ncclCommInitRankConfig");
  expect_failure(&(stub_faults_t){.fail_group = 1},
                 "NCCL failed: unhandled system error");
  expect_failure(&(stub_faults_t){.fail_group = 6, .delay = 3}, "NCCL failed");
  expect_failure(&(stub_faults_t){.fail_event = 1},
                 "cuEventQuery: unspecified launch failure");
  expect_failure(&(stub_faults_t){.fail_event = 8, .slow_abort = true}, "cuEventQuery");
  expect_failure(&(stub_faults_t){.own_memory = true}, "ncclGroupEnd: invalid usage");
}

static void test_errors_are_seen_between_messages(void** state) {
  (void)state;
  pair_t pair;
  jpp_status_t* status = NULL;
  pair_connect(&pair, "nccl-fake", 500);
  pair_open_channel(&pair, 1, 1, kBig);
  PAIR_WAIT(&pair, pair_send_text(&pair, 1, "text"));
  pair_expect_text(&pair, 1, "text");
  PAIR_WAIT(&pair, pair.finished == 1);
  stub_fail_all();
  PAIR_WAIT(&pair, (status = failure_of(&pair)) != NULL);
  ASSERT_FAILS(status, JPP_PEER_ERROR, "NCCL failed: unhandled system error");
  pair_close(&pair);
}

// The communicator would wait for its other end for ever, and others for their turn.
static void test_a_peer_that_leaves_early_is_not_waited_for(void** state) {
  (void)state;
  static const uint64_t kBytes = kBig;
  pair_t pair;
  pthread_t thread;
  pair_connect(&pair, "nccl-fake", 10000);
  jpp_channel_spec_t spec = pair_spec(&pair, 1, 1, 1, &kBytes);
  ASSERT_OK(jpp_transport_open_channel(pair.sender, &spec, &pair.out));
  PAIR_WAIT(&pair, stub_get_log().inits == 1);
  jpp_transport_t* receiver = pair.receiver;
  pair.receiver = NULL;
  assert_int_equal(pthread_create(&thread, NULL, destroy_one, receiver), 0);
  PAIR_WAIT(&pair, stub_get_log().aborts == 1);
  pthread_join(thread, NULL);
  ASSERT_FAILS(jpp_transport_peer_status(pair.sender, 1), JPP_PEER_ERROR,
               "has left the job");
  jpp_channel_close(pair.out);
  jpp_transport_destroy(pair.sender);
}

// The receiver does not go on, so that a send is under way when it dies: a kernel waits
// for it, and reads the memory until it is stopped.
static void open_and_kill(pair_t* pair, uint32_t most_ms, bool* before) {
  static char data[kBig];
  bool some = false;
  pair_connect(pair, "nccl-fake", most_ms);
  pair_open_channel(pair, 2, 1, kBig);
  PAIR_WAIT(pair, pair_send_text(pair, 1, "makes the communicators"));
  pair_expect_text(pair, 1, "makes the communicators");
  jpp_shard_t shard = {.data = data, .size = kBig};
  PAIR_WAIT(pair, jpp_channel_credits(pair->out) == 2 && pair->finished == 1);
  assert_true(pair_send(pair->out, 2, &shard, 1, 0));
  assert_true(pair_send(pair->out, 3, &shard, 1, 0));
  for (int i = 0; i < 20; ++i) jpp_transport_progress(pair->sender, &some);
  *before = pair->finished == 1;
  jpp_transport_fake_kill(pair->receiver);
}

static void test_a_peer_that_dies_is_aborted(void** state) {
  (void)state;
  pair_t pair;
  bool waited = false, some = false;
  jpp_status_t* status = NULL;
  stub_set_faults(&(stub_faults_t){.slow_abort = true});
  open_and_kill(&pair, 10000, &waited);
  assert_true(waited);
  PAIR_WAIT(&pair, (status = jpp_transport_peer_status(pair.sender, 1)) != NULL);
  ASSERT_FAILS(status, JPP_PEER_ERROR, "process 1 at 127.0.0.1: the connection was lost");
  // The memory is the transport's until the stream has stopped.
  jpp_transport_progress(pair.sender, &some);
  assert_int_equal(stub_get_log().aborts, 1);
  assert_int_equal(pair.finished, 1);
  PAIR_WAIT(&pair, pair.finished == 3);
  pair_close(&pair);
}

static void test_a_stream_that_does_not_stop_is_left_behind(void** state) {
  (void)state;
  pair_t pair;
  bool waited = false;
  stub_set_faults(&(stub_faults_t){.never_stops = true});
  open_and_kill(&pair, 300, &waited);
  assert_true(waited);
  jpp_status_t* status = NULL;
  PAIR_WAIT(&pair, (status = jpp_transport_peer_status(pair.sender, 1)) != NULL);
  jpp_status_free(status);
  for (int i = 0; i < 100; ++i) pair_progress(&pair);
  assert_int_equal(pair.finished, 1);
  pair_close(&pair);
  assert_int_equal(pair.finished, 3);
  // The sender's memory, which a kernel may still read; the receiver's slots are freed.
  assert_int_equal(stub_live().blocks, 1);
  stub_forget_blocks();
}

// Process 2 dies. What 0 sends 1 goes on, and the communicators with 2 are aborted when
// nothing else is under way.
static void test_the_others_go_on_when_one_dies(void** state) {
  (void)state;
  static char data[100];
  job_t job;
  stub_set_faults(&(stub_faults_t){.delay = 4});
  job_begin(&job);
  jpp_channel_t* out = job_open(&job, 0, 0, 0, 1);
  jpp_channel_t* in = job_open(&job, 1, 0, 0, 1);
  job_open(&job, 0, 1, 0, 2);
  job_open(&job, 2, 1, 0, 2);
  job_open(&job, 2, 2, 2, 1);
  job_open(&job, 1, 2, 2, 1);
  for (uint64_t i = 0; i < 40; ++i) {
    jpp_received_t received;
    jpp_shard_t shard = {.data = data, .size = sizeof(data)};
    pair_fill(data, sizeof(data), i);
    JOB_WAIT(&job, pair_send(out, i, &shard, 1, 0));
    if (i == 20) {
      jpp_transport_fake_kill(job.transports[2]);
      for (int times = 0; times < 50; ++times) {
        bool some = false;
        jpp_transport_progress(job.transports[0], &some);
      }
      ASSERT_FAILS(jpp_transport_peer_status(job.transports[0], 2), JPP_PEER_ERROR,
                   "process 2 at 127.0.0.1: the connection was lost");
      assert_int_equal(stub_get_log().aborts, 0);  // process 1 has yet to receive
    }
    JOB_WAIT(&job, pair_recv(in, &received));
    assert_true(pair_is_filled(received.data[0], sizeof(data), i));
    jpp_channel_release(in, received.slot);
    ASSERT_OK(jpp_transport_peer_status(job.transports[0], 1));
  }
  JOB_WAIT(&job, stub_get_log().aborts == 2);
  job_end(&job);
}

// An abort of a channel is no failure of the peer: the communicator stays, and what was
// under way is received where nobody reads it.
static void test_an_abort_leaves_the_communicator(void** state) {
  static char data[2][kBig];
  pair_t pair;
  uint32_t sent = 0;
  stub_set_faults(&(stub_faults_t){.delay = 2});
  pair_open(&pair, *state, 2, 1, kBig);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 2; ++i, ++sent) {
      jpp_shard_t shard = {.data = data[i], .size = kBig};
      PAIR_WAIT(&pair, pair_send(pair.out, 1, &shard, 1, 0));
    }
    for (int i = 0; i < round * 3; ++i) pair_progress(&pair);
    jpp_status_t* status = jpp_status_make(JPP_CANCELLED, "stopped");
    jpp_channel_abort(round % 2 ? pair.out : pair.in, status);
    jpp_status_free(status);
    for (int i = 0; i < round; ++i) pair_progress(&pair);
    jpp_channel_reset(pair.out);
    jpp_channel_reset(pair.in);
    PAIR_WAIT(&pair, pair.finished == sent);
  }
  PAIR_WAIT(&pair, pair_send_text(&pair, 7, "afterwards"));
  pair_expect_text(&pair, 7, "afterwards");
  assert_int_equal(stub_get_log().inits, 2);
  assert_int_equal(stub_get_log().aborts, 0);
  pair_close(&pair);
}

static void test_both_ends_finalize_together(void** state) {
  pair_t pair;
  stub_set_faults(&(stub_faults_t){.joint_end = true});
  pair_open(&pair, *state, 1, 1, kBig);
  PAIR_WAIT(&pair, pair_send_text(&pair, 1, "text"));
  pair_expect_text(&pair, 1, "text");
  pair_close(&pair);
  assert_int_equal(stub_get_log().finalized, 2);
  assert_int_equal(stub_get_log().aborts, 0);
}

// There is no descriptor for NCCL: who waits for the wire's would sleep too long.
static void test_it_is_armed_only_when_nothing_is_under_way(void** state) {
  (void)state;
  pair_t pair;
  int descriptor = 0;
  bool armed = true;
  pair_open(&pair, "nccl", 1, 1, kBig);
  ASSERT_OK(jpp_transport_arm(pair.sender, &descriptor, &armed));
  assert_false(armed);  // communicators are to be made
  PAIR_WAIT(&pair, pair_send_text(&pair, 1, "text"));
  ASSERT_OK(jpp_transport_arm(pair.sender, &descriptor, &armed));
  assert_false(armed);
  pair_expect_text(&pair, 1, "text");
  PAIR_WAIT(&pair, ({
    ASSERT_OK(jpp_transport_arm(pair.sender, &descriptor, &armed));
    armed;
  }));
  assert_true(descriptor >= 0);
  pair_close(&pair);
}

// Without UCX there is no "nccl".
static bool has_ucx(void) {
  jpp_transport_t* transport = NULL;
  jpp_transport_options_t options = pair_options("ucx", 0, 100);
  jpp_status_t* status = test_transport_create(&options, &transport);
  bool missing = jpp_status_code(status) == JPP_UNSUPPORTED;
  jpp_status_free(status);
  jpp_transport_destroy(transport);
  return !missing;
}

int main(void) {
  enum { kOnUcx = 5 };
  const struct CMUnitTest tests[] = {
      TEST(test_communicators_are_made_in_the_order_of_the_plan),
      TEST(test_transfers_wait_for_all_communicators),
      TEST_ON(test_shards_in_host_memory_go_over_the_wire, "nccl-fake"),
      TEST_ON(test_channels_of_host_memory_need_no_communicator, "nccl-fake"),
      TEST(test_no_communicator_is_made_for_channels_that_are_closed),
      TEST(test_ends_with_shards_in_other_memory_fail),
      TEST(test_receives_follow_the_order_of_the_sends),
      TEST(test_errors_of_nccl_are_the_peers),
      TEST(test_errors_are_seen_between_messages),
      TEST(test_a_peer_that_leaves_early_is_not_waited_for),
      TEST(test_a_peer_that_dies_is_aborted),
      TEST(test_a_stream_that_does_not_stop_is_left_behind),
      TEST(test_the_others_go_on_when_one_dies),
      TEST_ON(test_an_abort_leaves_the_communicator, "nccl-fake"),
      TEST_ON(test_both_ends_finalize_together, "nccl-fake"),
      TEST_ON(test_shards_in_host_memory_go_over_the_wire, "nccl"),
      TEST_ON(test_channels_of_host_memory_need_no_communicator, "nccl"),
      TEST_ON(test_an_abort_leaves_the_communicator, "nccl"),
      TEST_ON(test_both_ends_finalize_together, "nccl"),
      TEST(test_it_is_armed_only_when_nothing_is_under_way),
  };
  size_t count = sizeof(tests) / sizeof(*tests) - (has_ucx() ? 0 : kOnUcx);
  return _cmocka_run_group_tests("transport_nccl", tests, count, NULL, NULL);
}
