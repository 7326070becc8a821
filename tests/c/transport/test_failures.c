// The conformance suite of transports that carry bytes, where something is refused, is
// given up, or goes: two transports of one process, as in test_bytes.c.
//
// The driver is the first argument.
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "pair.h"

// --- Refusals -------------------------------------------------------------------------

static void test_what_the_plan_does_not_allow_is_not_sent(void** state) {
  static char data[200];
  pair_t pair;
  bool done = true;
  pair_open(&pair, *state, 1, 2, 100);
  jpp_shard_t shards[3] = {{.data = data, .size = 10}, {.data = data, .size = 101}};
  ASSERT_FAILS(jpp_channel_try_send_bytes(pair.out, 5, shards, 3, NULL, &done),
               JPP_INVALID_ARGUMENT, "expected 2 buffers at most, found 3");
  assert_false(done);
  ASSERT_FAILS(jpp_channel_try_send_bytes(pair.out, 5, shards, 2, NULL, &done),
               JPP_INVALID_ARGUMENT,
               "expected 100 bytes at most in shard 1, found 101 in message 5");
  ASSERT_FAILS(jpp_channel_try_send_bytes(pair.in, 5, shards, 1, NULL, &done),
               JPP_INVALID_ARGUMENT, "channel 5: this is the receiver's end");
  jpp_message_t message = {0};
  ASSERT_FAILS(jpp_channel_try_send(pair.out, &message, &done), JPP_UNSUPPORTED,
               "carries bytes, not handles");
  pair_close(&pair);
}

static void test_ends_of_different_plans_fail(void** state) {
  static const uint64_t kOne[2] = {100, 100}, kOther[2] = {100, 101};
  pair_t pair;
  jpp_status_t* status = NULL;
  bool done = false;
  pair_connect(&pair, *state, 10000);
  jpp_channel_spec_t one = pair_spec(&pair, 3, 2, 2, kOne);
  jpp_channel_spec_t other = pair_spec(&pair, 3, 2, 2, kOther);
  ASSERT_OK(jpp_transport_open_channel(pair.sender, &one, &pair.out));
  ASSERT_OK(jpp_transport_open_channel(pair.receiver, &other, &pair.in));
  PAIR_WAIT(&pair, (status = jpp_channel_try_send_bytes(pair.out, 0, NULL, 0, NULL,
                                                        &done)) != NULL);
  assert_false(done);
  ASSERT_FAILS(status, JPP_PEER_ERROR, "or others in ranks or bytes");
  pair_close(&pair);
}

static void test_options_are_checked(void** state) {
  jpp_transport_t* transport = NULL;
  jpp_transport_options_t options = pair_options(*state, 0, 0);
  options.token_size = 15;
  ASSERT_FAILS(test_transport_create(&options, &transport), JPP_INVALID_ARGUMENT,
               "expected the job's token, of 16 bytes at least; found 15");
  options = pair_options(*state, 0, 0);
  options.address = NULL;
  ASSERT_FAILS(test_transport_create(&options, &transport), JPP_INVALID_ARGUMENT,
               "expected the address of the network interface");
  options = pair_options(*state, 2, 0);
  ASSERT_FAILS(test_transport_create(&options, &transport), JPP_INVALID_ARGUMENT,
               "expected a process below 2");
  options.struct_size = 0;
  ASSERT_FAILS(test_transport_create(&options, &transport), JPP_INVALID_ARGUMENT,
               "set it to sizeof(jpp_transport_options_t)");
  assert_null(transport);
}

static void test_address_of_another_token_or_process_is_refused(void** state) {
  static const char kOther[] = "a token of strangers";
  jpp_transport_t *here = NULL, *stranger = NULL;
  jpp_transport_options_t options = pair_options(*state, 0, 100);
  ASSERT_OK(test_transport_create(&options, &here));
  options = pair_options(*state, 1, 100);
  options.token = kOther;
  options.token_size = sizeof(kOther);
  ASSERT_OK(test_transport_create(&options, &stranger));
  const void* address = NULL;
  size_t size = 0;
  jpp_transport_address(stranger, &address, &size);
  ASSERT_FAILS(jpp_transport_connect(here, 1, address, size), JPP_PEER_ERROR,
               "process 1: its address was not made with this job's token");
  jpp_transport_destroy(stranger);

  options = pair_options(*state, 1, 100);
  options.num_processes = 3;
  ASSERT_OK(test_transport_create(&options, &stranger));
  jpp_transport_address(stranger, &address, &size);
  ASSERT_FAILS(jpp_transport_connect(here, 1, address, size), JPP_PEER_ERROR,
               "expected the address of process 1 of 2, found that of 1 of 3");
  ASSERT_FAILS(jpp_transport_connect(here, 0, address, size), JPP_INVALID_ARGUMENT,
               "expected another of 2 processes");
  jpp_transport_destroy(stranger);
  jpp_transport_destroy(here);
}

static void test_channel_needs_a_connection_and_an_end_here(void** state) {
  static const uint64_t kBytes = 8;
  jpp_transport_t* transport = NULL;
  jpp_channel_t* channel = NULL;
  jpp_transport_options_t options = pair_options(*state, 0, 100);
  ASSERT_OK(test_transport_create(&options, &transport));
  jpp_channel_spec_t spec = pair_spec(NULL, 0, 1, 1, &kBytes);
  ASSERT_FAILS(jpp_transport_open_channel(transport, &spec, &channel),
               JPP_INVALID_ARGUMENT, "process 1 is not connected yet");
  spec.dst_process = 0;
  ASSERT_FAILS(jpp_transport_open_channel(transport, &spec, &channel),
               JPP_INVALID_ARGUMENT, "expected its ends to be process 0, which opens it");
  jpp_transport_destroy(transport);
}

// --- Abort and reset ------------------------------------------------------------------

static void abort_with(jpp_channel_t* channel, const char* text) {
  jpp_status_t* status = jpp_status_make(JPP_EXECUTION_ERROR, "%s", text);
  jpp_channel_abort(channel, status);
  jpp_status_free(status);
}

static void test_abort_reaches_the_other_process_with_its_name(void** state) {
  pair_t pair;
  jpp_received_t received;
  bool done = false;
  jpp_status_t* status = NULL;
  pair_open(&pair, *state, 2, 1, 16);
  PAIR_WAIT(&pair, pair_send_text(&pair, 1, "waits"));
  abort_with(pair.out, "rank 10 failed");
  abort_with(pair.out, "something else");
  ASSERT_FAILS(jpp_channel_try_send_bytes(pair.out, 2, NULL, 0, NULL, &done),
               JPP_EXECUTION_ERROR, "rank 10 failed");
  PAIR_WAIT(&pair, ({
    jpp_status_free(status);
    status = jpp_channel_try_recv_bytes(pair.in, &received, &done);
    if (done) jpp_channel_release(pair.in, received.slot);
    status != NULL;
  }));
  ASSERT_FAILS(status, JPP_EXECUTION_ERROR, "process 0 at 127.0.0.1");
  ASSERT_FAILS(jpp_channel_try_recv_bytes(pair.in, &received, &done), JPP_EXECUTION_ERROR,
               "rank 10 failed");
  pair_close(&pair);
}

static void test_a_failed_process_is_named_once(void** state) {
  static const char kText[] = "process 2 at 10.0.0.2 has failed: out of data";
  pair_t pair;
  bool done = false;
  pair_open(&pair, *state, 1, 1, 16);
  abort_with(pair.in, kText);
  PAIR_WAIT(&pair, jpp_channel_credits(pair.out) != 0);
  jpp_status_t* status = NULL;
  PAIR_WAIT(&pair, (status = jpp_channel_try_send_bytes(pair.out, 1, NULL, 0, NULL,
                                                        &done)) != NULL);
  assert_string_equal(jpp_status_message(status), kText);
  jpp_status_free(status);
  pair_close(&pair);
}

static void test_abort_of_a_full_channel_does_not_wait(void** state) {
  pair_t pair;
  bool done = false;
  pair_open(&pair, *state, 1, 1, 16);
  PAIR_WAIT(&pair, pair_send_text(&pair, 1, "fills it"));
  assert_int_equal(jpp_channel_credits(pair.out), 0);
  abort_with(pair.in, "the receiver failed");
  PAIR_WAIT(&pair, jpp_channel_credits(pair.out) != 0);
  ASSERT_FAILS(jpp_channel_try_send_bytes(pair.out, 2, NULL, 0, NULL, &done),
               JPP_EXECUTION_ERROR, "the receiver failed");
  pair_close(&pair);
}

// In each round messages are under way in all stages when the ends are reset, one after
// the other, in turns. None of them may be seen later, and no slot may be lost.
static void test_reset_drops_what_is_under_way(void** state) {
  static char data[3][50000];
  pair_t pair;
  jpp_received_t held[2];
  uint32_t sent = 0;
  pair_open(&pair, *state, 3, 1, sizeof(*data));
  for (uint64_t round = 0; round < 30; ++round) {
    PAIR_WAIT(&pair, jpp_channel_credits(pair.out) == 3);
    uint32_t taken = round % 3;
    for (uint64_t i = 0; i < 3; ++i) {
      jpp_shard_t shard = {.data = data[i], .size = i == 1 ? 10 : sizeof(*data)};
      assert_true(pair_send(pair.out, round * 10 + i, &shard, 1, 1));
      ++sent;
      if (i < taken) PAIR_WAIT(&pair, pair_recv(pair.in, &held[i]));
    }
    for (uint64_t i = 0; i < round % 7; ++i) pair_progress(&pair);
    if (round % 4 == 1) abort_with(pair.in, "stopped");
    jpp_channel_reset(round % 2 ? pair.out : pair.in);
    for (uint64_t i = 0; i < round % 5; ++i) pair_progress(&pair);
    jpp_channel_reset(round % 2 ? pair.in : pair.out);
    for (uint32_t i = 0; i < taken; ++i) {
      assert_int_equal(held[i].tag, round * 10 + i);
      jpp_channel_release(pair.in, held[i].slot);
    }
    PAIR_WAIT(&pair, pair.finished == sent && jpp_channel_credits(pair.out) == 3);
    PAIR_WAIT(&pair, pair_send_text(&pair, 1000 + round, "afterwards"));
    ++sent;
    pair_expect_text(&pair, 1000 + round, "afterwards");
  }
  pair_close(&pair);
}

typedef struct until_error {
  pair_t* pair;
  jpp_status_t* status;
} until_error_t;

static void* recv_until_error(void* user) {
  until_error_t* end = user;
  jpp_received_t received;
  bool done = false, some = false;
  while (!end->status) {
    jpp_transport_progress(end->pair->receiver, &some);
    end->status = jpp_channel_try_recv_bytes(end->pair->in, &received, &done);
  }
  return NULL;
}

static void test_abort_from_a_third_thread_ends_a_waiting_receiver(void** state) {
  pair_t pair;
  pthread_t thread;
  pair_open(&pair, *state, 1, 1, 16);
  until_error_t end = {.pair = &pair};
  assert_int_equal(pthread_create(&thread, NULL, recv_until_error, &end), 0);
  abort_with(pair.in, "stopped by a third");
  pthread_join(thread, NULL);
  ASSERT_FAILS(end.status, JPP_EXECUTION_ERROR, "stopped by a third");
  pair_close(&pair);
}

// --- Peers that go --------------------------------------------------------------------

static void* destroy_receiver(void* user) {
  pair_t* pair = user;
  jpp_transport_destroy(pair->receiver);
  pair->receiver = NULL;
  return NULL;
}

static void test_a_peer_that_leaves_is_named(void** state) {
  pair_t pair;
  pthread_t thread;
  bool done = false;
  pair_open(&pair, *state, 1, 1, 16);
  PAIR_WAIT(&pair, pair_send_text(&pair, 1, "never taken"));
  jpp_channel_close(pair.in);
  jpp_transport_t* receiver = pair.receiver;
  assert_int_equal(pthread_create(&thread, NULL, destroy_receiver, &pair), 0);
  bool some;
  int64_t until = jpp__clock_now_ms() + 20000;
  while (jpp_channel_credits(pair.out) == 0 && jpp__clock_now_ms() < until) {
    jpp_transport_progress(pair.sender, &some);
  }
  pthread_join(thread, NULL);
  (void)receiver;
  ASSERT_FAILS(jpp_channel_try_send_bytes(pair.out, 2, NULL, 0, NULL, &done),
               JPP_PEER_ERROR, "has left the job");
  ASSERT_FAILS(jpp_transport_peer_status(pair.sender, 1), JPP_PEER_ERROR,
               "process 1 at 127.0.0.1");
  jpp_channel_close(pair.out);
  jpp_transport_destroy(pair.sender);
  assert_int_equal(pair.finished, 1);
}

// A peer that is there, and whose program is at a standstill, is not told from a machine
// that hangs. Who looks away itself blames nobody.
static void test_a_silent_peer_is_named(void** state) {
  pair_t pair;
  bool some;
  pair_connect(&pair, *state, 400);
  pair_open_channel(&pair, 1, 1, 16);
  for (int times = 0; times < 3; ++times) {
    int64_t until = jpp__clock_now_ms() + 700;
    while (jpp__clock_now_ms() < until) pair_progress(&pair);
    assert_null(jpp_transport_peer_status(pair.sender, 1));
    nanosleep(&(struct timespec){.tv_nsec = 700000000}, NULL);
  }
  pair_progress(&pair);
  jpp_status_t* status = NULL;
  int64_t until = jpp__clock_now_ms() + 20000;
  while (!status && jpp__clock_now_ms() < until) {
    jpp_transport_progress(pair.sender, &some);
    status = jpp_transport_peer_status(pair.sender, 1);
  }
  ASSERT_FAILS(status, JPP_PEER_ERROR, "it has sent nothing for 0.4 s");
  bool done = false;
  ASSERT_FAILS(jpp_channel_try_send_bytes(pair.out, 2, NULL, 0, NULL, &done),
               JPP_PEER_ERROR, "process 1 at 127.0.0.1");
  pair_close(&pair);
}

static void* destroy_sender(void* user) {
  pair_t* pair = user;
  jpp_channel_close(pair->out);
  jpp_transport_destroy(pair->sender);
  pair->sender = NULL;
  return NULL;
}

// What was sent before the sender left arrives; then there is an error.
static void test_the_last_messages_of_a_peer_arrive(void** state) {
  static char data[2][300000];
  pair_t pair;
  pthread_t thread;
  pair_open(&pair, *state, 2, 1, sizeof(*data));
  PAIR_WAIT(&pair, jpp_channel_credits(pair.out) == 2);
  for (uint64_t i = 0; i < 2; ++i) {
    pair_fill(data[i], sizeof(*data), i);
    jpp_shard_t shard = {.data = data[i], .size = sizeof(*data)};
    assert_true(pair_send(pair.out, i, &shard, 1, 1));
  }
  assert_int_equal(pthread_create(&thread, NULL, destroy_sender, &pair), 0);
  jpp_status_t* status = NULL;
  uint64_t came = 0;
  int64_t until = jpp__clock_now_ms() + 20000;
  while (!status && jpp__clock_now_ms() < until) {
    jpp_received_t received;
    bool some = false, done = false;
    jpp_transport_progress(pair.receiver, &some);
    status = jpp_channel_try_recv_bytes(pair.in, &received, &done);
    if (!done) continue;
    assert_true(pair_is_filled(received.data[0], received.sizes[0], came));
    jpp_channel_release(pair.in, received.slot);
    ++came;
  }
  pthread_join(thread, NULL);
  ASSERT_FAILS(status, JPP_PEER_ERROR, "process 0 at 127.0.0.1");
  assert_int_equal(came, 2);
  assert_int_equal(pair.finished, 2);
  jpp_channel_close(pair.in);
  jpp_transport_destroy(pair.receiver);
}

// A peer that gives up and leaves before the channel is open here: why is not lost.
static void test_an_abort_before_the_channel_is_open_is_told(void** state) {
  pair_t pair = {0};
  pthread_t thread;
  uint64_t bytes = 16;
  pair_connect(&pair, *state, 20000);
  jpp_channel_spec_t spec = pair_spec(&pair, 7, 1, 1, &bytes);
  ASSERT_OK(jpp_transport_open_channel(pair.sender, &spec, &pair.out));
  abort_with(pair.out, "rank 10 failed");
  for (int i = 0; i < 1000; ++i) pair_progress(&pair);
  assert_int_equal(pthread_create(&thread, NULL, destroy_sender, &pair), 0);
  jpp_status_t* left = NULL;
  int64_t until = jpp__clock_now_ms() + 20000;
  while (!left && jpp__clock_now_ms() < until) {
    bool some = false;
    jpp_transport_progress(pair.receiver, &some);
    left = jpp_transport_peer_status(pair.receiver, 0);
  }
  pthread_join(thread, NULL);
  ASSERT_FAILS(left, JPP_EXECUTION_ERROR, "rank 10 failed");
  ASSERT_OK(jpp_transport_open_channel(pair.receiver, &spec, &pair.in));
  jpp_received_t received;
  bool done = false;
  ASSERT_FAILS(jpp_channel_try_recv_bytes(pair.in, &received, &done), JPP_EXECUTION_ERROR,
               "process 0 at 127.0.0.1");
  jpp_channel_close(pair.in);
  jpp_transport_destroy(pair.receiver);
}

static void test_close_with_messages_under_way(void** state) {
  static char data[3][100000];
  pair_t pair;
  for (int steps = 0; steps < 6; ++steps) {
    pair_open(&pair, *state, 3, 1, sizeof(*data));
    PAIR_WAIT(&pair, jpp_channel_credits(pair.out) == 3);
    for (uint64_t i = 0; i < 3; ++i) {
      jpp_shard_t shard = {.data = data[i], .size = i == 1 ? 10 : sizeof(*data)};
      assert_true(pair_send(pair.out, i, &shard, 1, 1));
    }
    for (int i = 0; i < steps; ++i) pair_progress(&pair);
    pair_close(&pair);
    assert_int_equal(pair.finished, 3);
  }
}

// What every driver of bytes must pass.
static const struct CMUnitTest kTests[] = {
    cmocka_unit_test(test_what_the_plan_does_not_allow_is_not_sent),
    cmocka_unit_test(test_ends_of_different_plans_fail),
    cmocka_unit_test(test_options_are_checked),
    cmocka_unit_test(test_address_of_another_token_or_process_is_refused),
    cmocka_unit_test(test_channel_needs_a_connection_and_an_end_here),
    cmocka_unit_test(test_abort_reaches_the_other_process_with_its_name),
    cmocka_unit_test(test_a_failed_process_is_named_once),
    cmocka_unit_test(test_abort_of_a_full_channel_does_not_wait),
    cmocka_unit_test(test_reset_drops_what_is_under_way),
    cmocka_unit_test(test_abort_from_a_third_thread_ends_a_waiting_receiver),
    cmocka_unit_test(test_a_peer_that_leaves_is_named),
    cmocka_unit_test(test_a_silent_peer_is_named),
    cmocka_unit_test(test_the_last_messages_of_a_peer_arrive),
    cmocka_unit_test(test_an_abort_before_the_channel_is_open_is_told),
    cmocka_unit_test(test_close_with_messages_under_way),
};

int main(int argc, char** argv) {
  return pair_run_suite("transport_failures", kTests, sizeof(kTests) / sizeof(*kTests),
                        argc, argv);
}
