// The conformance suite of transports that carry bytes: two transports of one process, so
// that it needs no second one. What needs one is in test_processes.c.
//
// The driver is the first argument.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "pair.h"

// --- Order, credits, sizes ------------------------------------------------------------

static void expect_message(pair_t* pair, uint64_t tag, const char* text) {
  jpp_received_t received;
  PAIR_WAIT(pair, pair_recv(pair->in, &received));
  assert_int_equal(received.tag, tag);
  assert_int_equal(received.count, 1);
  assert_int_equal(received.sizes[0], strlen(text));
  assert_memory_equal(received.data[0], text, strlen(text));
  jpp_channel_release(pair->in, received.slot);
}

static bool send_text(pair_t* pair, uint64_t tag, const char* text) {
  jpp_shard_t shard = {.data = text, .size = strlen(text)};
  return pair_send(pair->out, tag, &shard, 1, tag);
}

static void test_messages_come_in_order_up_to_the_slots(void** state) {
  static const char* const kTexts[] = {"a", "bc", "def"};
  pair_t pair;
  jpp_received_t received;
  pair_open(&pair, *state, 3, 1, 16);
  assert_false(pair_recv(pair.in, &received));
  for (uint64_t round = 0; round < 5; ++round) {
    PAIR_WAIT(&pair, jpp_channel_credits(pair.out) == 3);
    for (uint64_t i = 0; i < 3; ++i) assert_true(send_text(&pair, i, kTexts[i]));
    for (int i = 0; i < 100; ++i) {
      pair_progress(&pair);
      assert_int_equal(jpp_channel_credits(pair.out), 0);
      assert_false(send_text(&pair, 9, "x"));
    }
    for (uint64_t i = 0; i < 3; ++i) expect_message(&pair, i, kTexts[i]);
    assert_false(pair_recv(pair.in, &received));
  }
  pair_close(&pair);
  assert_int_equal(pair.finished, 15);
  assert_int_equal(pair.finished_sum, 5 * (0 + 1 + 2));
}

// A slot that is kept does not stand in the way of another one.
static void test_slots_are_released_in_any_order(void** state) {
  pair_t pair;
  jpp_received_t held, received;
  pair_open(&pair, *state, 2, 1, 16);
  PAIR_WAIT(&pair, send_text(&pair, 0, "held"));
  PAIR_WAIT(&pair, pair_recv(pair.in, &held));
  for (uint64_t i = 1; i < 6; ++i) {
    PAIR_WAIT(&pair, send_text(&pair, i, "passes"));
    PAIR_WAIT(&pair, pair_recv(pair.in, &received));
    assert_int_equal(received.tag, i);
    assert_memory_equal(held.data[0], "held", 4);
    jpp_channel_release(pair.in, received.slot);
  }
  jpp_channel_release(pair.in, held.slot);
  PAIR_WAIT(&pair, jpp_channel_credits(pair.out) == 2);
  pair_close(&pair);
}

static void test_every_size_arrives(void** state) {
  static const size_t kSizes[] = {
      0,      1,    7,    63,    64,    65,    511,     1024,   4095,    4096,
      8191,   8192, 8193, 65535, 65536, 65537, 1 << 18, 999999, 1 << 20, (1 << 20) + 1,
      5 << 20};
  const size_t most = 5 << 20;
  pair_t pair;
  pair_open(&pair, *state, 1, 1, most);
  char* data = malloc(most + 3);
  for (size_t i = 0; i < sizeof(kSizes) / sizeof(*kSizes); ++i) {
    size_t odd = i % 4;  // nor does the memory begin where it is convenient
    if (kSizes[i] == most) odd = 0;
    pair_fill(data + odd, kSizes[i], i);
    jpp_shard_t shard = {.data = data + odd, .size = kSizes[i]};
    jpp_received_t received;
    PAIR_WAIT(&pair, pair_send(pair.out, i, &shard, 1, 1));
    PAIR_WAIT(&pair, pair_recv(pair.in, &received));
    assert_int_equal(received.sizes[0], kSizes[i]);
    assert_int_equal((uintptr_t)received.data[0] % 64, 0);
    assert_true(pair_is_filled(received.data[0], kSizes[i], i));
    jpp_channel_release(pair.in, received.slot);
    PAIR_WAIT(&pair, pair.finished == i + 1);
  }
  jpp_channel_stats_t sent, got;
  jpp_channel_get_stats(pair.out, &sent);
  jpp_channel_get_stats(pair.in, &got);
  assert_int_equal(sent.messages_sent, got.messages_received);
  assert_int_equal(sent.bytes_sent, got.bytes_received);
  assert_true(sent.bytes_sent > most);
  pair_close(&pair);
  free(data);
}

static void test_shards_of_different_size_and_a_message_without(void** state) {
  static char data[4][20000];
  static const uint64_t kMost[4] = {10, 20000, 0, 9000};
  pair_t pair;
  pair_connect(&pair, *state, 10000);
  jpp_channel_spec_t spec = pair_spec(&pair, 7, 2, 4, kMost);
  ASSERT_OK(jpp_transport_open_channel(pair.sender, &spec, &pair.out));
  ASSERT_OK(jpp_transport_open_channel(pair.receiver, &spec, &pair.in));
  for (uint64_t round = 0; round < 20; ++round) {
    jpp_shard_t shards[4];
    jpp_received_t received;
    for (int i = 0; i < 4; ++i) {
      shards[i] = (jpp_shard_t){.data = data[i], .size = kMost[i] * (round % 3) / 2};
      if (shards[i].size > kMost[i]) shards[i].size = kMost[i];
      pair_fill(data[i], shards[i].size, round + (uint64_t)i);
    }
    uint32_t count = round % 5;
    PAIR_WAIT(&pair, pair_send(pair.out, round, shards, count, 0));
    PAIR_WAIT(&pair, pair_recv(pair.in, &received));
    assert_int_equal(received.tag, round);
    assert_int_equal(received.count, count);
    for (uint32_t i = 0; i < count; ++i) {
      assert_int_equal(received.sizes[i], shards[i].size);
      assert_true(pair_is_filled(received.data[i], shards[i].size, round + i));
    }
    jpp_channel_release(pair.in, received.slot);
    PAIR_WAIT(&pair, pair.finished == round + 1);
  }
  pair_close(&pair);
}

static void test_registered_memory_is_sent_from(void** state) {
  const size_t size = 1 << 20;
  pair_t pair;
  jpp_transport_memory_t* memory = NULL;
  jpp_received_t received;
  char* data = malloc(size);
  pair_open(&pair, *state, 1, 1, size);
  ASSERT_OK(jpp_transport_register(pair.sender, data, size, &memory));
  pair_fill(data, size, 3);
  jpp_shard_t shard = {.data = data, .size = size, .memory = memory};
  PAIR_WAIT(&pair, pair_send(pair.out, 1, &shard, 1, 0));
  PAIR_WAIT(&pair, pair_recv(pair.in, &received));
  assert_true(pair_is_filled(received.data[0], size, 3));
  jpp_channel_release(pair.in, received.slot);
  PAIR_WAIT(&pair, pair.finished == 1);
  jpp_transport_unregister(pair.sender, memory);
  pair_close(&pair);
  free(data);
}

static void test_warm_up_needs_both_ends_and_leaves_all_credits(void** state) {
  pair_t pair;
  bool out = false, in = false;
  pair_open(&pair, *state, 3, 2, 100000);
  for (int i = 0; i < 50; ++i) {
    ASSERT_OK(jpp_channel_warm_up(pair.out, &out));
    assert_false(out);
    pair_progress(&pair);
  }
  PAIR_WAIT(&pair, ({
    if (!out) ASSERT_OK(jpp_channel_warm_up(pair.out, &out));
    if (!in) ASSERT_OK(jpp_channel_warm_up(pair.in, &in));
    out&& in;
  }));
  assert_int_equal(jpp_channel_credits(pair.out), 3);
  assert_int_equal(pair.finished, 0);
  PAIR_WAIT(&pair, send_text(&pair, 4, "first"));
  expect_message(&pair, 4, "first");
  pair_close(&pair);
}

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
               "carries bytes, no handles");
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
  ASSERT_FAILS(jpp_transport_create(&options, &transport), JPP_INVALID_ARGUMENT,
               "expected the job's token, of 16 bytes at least; found 15");
  options = pair_options(*state, 0, 0);
  options.address = NULL;
  ASSERT_FAILS(jpp_transport_create(&options, &transport), JPP_INVALID_ARGUMENT,
               "expected the address of the network interface");
  options = pair_options(*state, 2, 0);
  ASSERT_FAILS(jpp_transport_create(&options, &transport), JPP_INVALID_ARGUMENT,
               "expected a process below 2");
  options.struct_size = 0;
  ASSERT_FAILS(jpp_transport_create(&options, &transport), JPP_INVALID_ARGUMENT,
               "set it to sizeof(jpp_transport_options_t)");
  assert_null(transport);
}

static void test_address_of_another_token_or_process_is_refused(void** state) {
  static const char kOther[] = "a token of strangers";
  jpp_transport_t *here = NULL, *stranger = NULL;
  jpp_transport_options_t options = pair_options(*state, 0, 100);
  ASSERT_OK(jpp_transport_create(&options, &here));
  options = pair_options(*state, 1, 100);
  options.token = kOther;
  options.token_size = sizeof(kOther);
  ASSERT_OK(jpp_transport_create(&options, &stranger));
  const void* address = NULL;
  size_t size = 0;
  jpp_transport_address(stranger, &address, &size);
  ASSERT_FAILS(jpp_transport_connect(here, 1, address, size), JPP_PEER_ERROR,
               "process 1: its address was not made with this job's token");
  jpp_transport_destroy(stranger);

  options = pair_options(*state, 1, 100);
  options.num_processes = 3;
  ASSERT_OK(jpp_transport_create(&options, &stranger));
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
  ASSERT_OK(jpp_transport_create(&options, &transport));
  jpp_channel_spec_t spec = pair_spec(NULL, 0, 1, 1, &kBytes);
  ASSERT_FAILS(jpp_transport_open_channel(transport, &spec, &channel),
               JPP_INVALID_ARGUMENT, "process 1 is not connected yet");
  spec.dst_process = 0;
  ASSERT_FAILS(jpp_transport_open_channel(transport, &spec, &channel),
               JPP_INVALID_ARGUMENT, "expected process 0, which opens it, and another");
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
  PAIR_WAIT(&pair, send_text(&pair, 1, "waits"));
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

static void test_abort_of_a_full_channel_does_not_wait(void** state) {
  pair_t pair;
  bool done = false;
  pair_open(&pair, *state, 1, 1, 16);
  PAIR_WAIT(&pair, send_text(&pair, 1, "fills it"));
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
    PAIR_WAIT(&pair, send_text(&pair, 1000 + round, "afterwards"));
    ++sent;
    expect_message(&pair, 1000 + round, "afterwards");
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
  PAIR_WAIT(&pair, send_text(&pair, 1, "never taken"));
  jpp_channel_close(pair.in);
  jpp_transport_t* receiver = pair.receiver;
  assert_int_equal(pthread_create(&thread, NULL, destroy_receiver, &pair), 0);
  bool some;
  int64_t until = pair_now() + 20000;
  while (jpp_channel_credits(pair.out) == 0 && pair_now() < until) {
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
  int64_t until = pair_now() + 20000;
  while (!status && pair_now() < until) {
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

// --- Random schedules -----------------------------------------------------------------

enum { kChannels = 5, kMostBytes = 40000, kRandomSlots = 4 };

typedef struct random_channel {
  jpp_channel_t *out, *in;
  uint32_t slots;
  uint64_t sent, received;
  bool held[kRandomSlots];
  char* data;  // of messages sent and not finished, one after another
  bool busy[64];
} random_channel_t;

static void random_finished(void* user, void* cookie) {
  random_channel_t* channel = user;
  uintptr_t place = (uintptr_t)cookie;
  assert_true(channel->busy[place]);
  channel->busy[place] = false;
}

static uint64_t random_size(uint64_t message) {
  uint64_t x = message * UINT64_C(0x9e3779b97f4a7c15);
  return (x >> 40) % 3 ? (x >> 20) % 200 : (x >> 20) % kMostBytes;
}

static void random_send(random_channel_t* channel, uint32_t id) {
  uintptr_t place = channel->sent % kRandomSlots;
  if (channel->busy[place]) return;
  uint64_t seed = channel->sent * 10 + id;
  char* data = channel->data + place * kMostBytes;
  jpp_shard_t shards[2] = {{.data = data, .size = random_size(seed)}, {0}};
  pair_fill(data, shards[0].size, seed);
  uint32_t count = (uint32_t)(seed % 3);
  channel->busy[place] = true;
  if (pair_send(channel->out, seed, shards, count, place)) {
    ++channel->sent;
  } else {
    channel->busy[place] = false;
  }
}

static void random_recv(random_channel_t* channel, uint32_t id) {
  jpp_received_t received;
  if (!pair_recv(channel->in, &received)) return;
  uint64_t seed = channel->received++ * 10 + id;
  assert_int_equal(received.tag, seed);
  assert_int_equal(received.count, seed % 3);
  assert_false(channel->held[received.slot]);
  if (received.count) {
    assert_int_equal(received.sizes[0], random_size(seed));
    assert_true(pair_is_filled(received.data[0], received.sizes[0], seed));
  }
  channel->held[received.slot] = true;
}

static void random_release(random_channel_t* channel, uint32_t slot) {
  if (slot >= channel->slots || !channel->held[slot]) return;
  channel->held[slot] = false;
  jpp_channel_release(channel->in, slot);
}

static void random_open(pair_t* pair, random_channel_t* channels) {
  static const uint64_t kBytes[2] = {kMostBytes, 0};
  for (uint32_t c = 0; c < kChannels; ++c) {
    random_channel_t* channel = &channels[c];
    *channel = (random_channel_t){.slots = 1 + c % kRandomSlots};
    channel->data = malloc(kRandomSlots * kMostBytes);
    jpp_channel_spec_t spec = pair_spec(pair, c, channel->slots, 2, kBytes);
    spec.sent = random_finished;
    spec.user = channel;
    ASSERT_OK(jpp_transport_open_channel(pair->sender, &spec, &channel->out));
    ASSERT_OK(jpp_transport_open_channel(pair->receiver, &spec, &channel->in));
  }
}

static void test_random_schedules(void** state) {
  pair_t pair;
  random_channel_t channels[kChannels];
  for (unsigned seed = 1; seed <= 5; ++seed) {
    unsigned random = seed;
    pair_connect(&pair, *state, 10000);
    if (!strcmp(*state, "fake")) {
      jpp_transport_fake_set_delay(pair.sender, 1 + seed * 2, seed);
      jpp_transport_fake_set_delay(pair.receiver, 1 + seed * 3, seed + 100);
    }
    random_open(&pair, channels);
    uint64_t received = 0;
    for (int step = 0; step < 30000; ++step) {
      uint32_t c = (uint32_t)rand_r(&random) % kChannels;
      switch (rand_r(&random) % 5) {
        case 0:
          random_send(&channels[c], c);
          break;
        case 1:
          random_recv(&channels[c], c);
          break;
        case 2:
          random_release(&channels[c], (uint32_t)rand_r(&random) % kRandomSlots);
          break;
        default:
          pair_progress(&pair);
      }
    }
    for (uint32_t c = 0; c < kChannels; ++c) {
      received += channels[c].received;
      jpp_channel_close(channels[c].out);
      jpp_channel_close(channels[c].in);
    }
    assert_true(received > 200);
    pair_close(&pair);
    for (uint32_t c = 0; c < kChannels; ++c) free(channels[c].data);
  }
}

// --- Threads --------------------------------------------------------------------------

enum { kThreadMessages = 3000 };

static void* send_many(void* user) {
  pair_t* pair = user;
  static char data[8][20000];
  for (uint64_t i = 0; i < kThreadMessages;) {
    bool some = false;
    jpp_transport_progress(pair->sender, &some);
    // At most 4 are under way: two slots, and two that wait for `sent`.
    jpp_shard_t shard = {.data = data[i % 8], .size = i % 50 ? i % 100 : 20000};
    if (pair->finished + 4 <= i) continue;
    pair_fill(data[i % 8], shard.size, i);
    i += pair_send(pair->out, i, &shard, 1, 0);
  }
  return NULL;
}

static void test_two_threads_lose_and_reorder_nothing(void** state) {
  pair_t pair;
  pthread_t thread;
  pair_open(&pair, *state, 2, 1, 20000);
  assert_int_equal(pthread_create(&thread, NULL, send_many, &pair), 0);
  for (uint64_t i = 0; i < kThreadMessages;) {
    bool some = false;
    jpp_received_t received;
    jpp_transport_progress(pair.receiver, &some);
    if (!pair_recv(pair.in, &received)) continue;
    assert_int_equal(received.tag, i);
    assert_true(pair_is_filled(received.data[0], received.sizes[0], i));
    jpp_channel_release(pair.in, received.slot);
    ++i;
  }
  pthread_join(thread, NULL);
  pair_close(&pair);
  assert_int_equal(pair.finished, kThreadMessages);
}

// --- Memory ---------------------------------------------------------------------------

static jpp_status_t* open_all(const char* driver, pair_t* pair) {
  static const uint64_t kBytes[2] = {100, 100};
  jpp_transport_options_t options = pair_options(driver, 0, 1);
  const void* address = NULL;
  size_t size = 0;
  JPP_RETURN_IF_ERROR(jpp_transport_create(&options, &pair->sender));
  jpp_transport_address(pair->receiver, &address, &size);
  JPP_RETURN_IF_ERROR(jpp_transport_connect(pair->sender, 1, address, size));
  jpp_channel_spec_t spec = pair_spec(pair, 1, 2, 2, kBytes);
  JPP_RETURN_IF_ERROR(jpp_transport_open_channel(pair->sender, &spec, &pair->out));
  spec.id = 2;
  spec.src_process = 1;
  spec.dst_process = 0;
  return jpp_transport_open_channel(pair->sender, &spec, &pair->in);
}

static void test_open_survives_every_failed_allocation(void** state) {
  pair_t pair = {0};
  jpp_transport_options_t options = pair_options(*state, 1, 1);
  ASSERT_OK(jpp_transport_create(&options, &pair.receiver));
  int failures = 0;
  for (int64_t n = 0; n < 60; ++n) {
    jpp_alloc_fail_after(n);
    jpp_status_t* status = open_all(*state, &pair);
    jpp_alloc_fail_after(-1);
    jpp_channel_close(pair.out);
    jpp_channel_close(pair.in);
    jpp_transport_destroy(pair.sender);
    pair.out = pair.in = NULL;
    pair.sender = NULL;
    if (!status) continue;
    ++failures;
    ASSERT_FAILS(status, JPP_OUT_OF_MEMORY, "host memory");
  }
  assert_in_range(failures, 20, 59);
  jpp_transport_destroy(pair.receiver);
}

// What every driver of bytes must pass.
static const struct CMUnitTest kTests[] = {
    cmocka_unit_test(test_messages_come_in_order_up_to_the_slots),
    cmocka_unit_test(test_slots_are_released_in_any_order),
    cmocka_unit_test(test_every_size_arrives),
    cmocka_unit_test(test_shards_of_different_size_and_a_message_without),
    cmocka_unit_test(test_registered_memory_is_sent_from),
    cmocka_unit_test(test_warm_up_needs_both_ends_and_leaves_all_credits),
    cmocka_unit_test(test_what_the_plan_does_not_allow_is_not_sent),
    cmocka_unit_test(test_ends_of_different_plans_fail),
    cmocka_unit_test(test_options_are_checked),
    cmocka_unit_test(test_address_of_another_token_or_process_is_refused),
    cmocka_unit_test(test_channel_needs_a_connection_and_an_end_here),
    cmocka_unit_test(test_abort_reaches_the_other_process_with_its_name),
    cmocka_unit_test(test_abort_of_a_full_channel_does_not_wait),
    cmocka_unit_test(test_reset_drops_what_is_under_way),
    cmocka_unit_test(test_abort_from_a_third_thread_ends_a_waiting_receiver),
    cmocka_unit_test(test_a_peer_that_leaves_is_named),
    cmocka_unit_test(test_the_last_messages_of_a_peer_arrive),
    cmocka_unit_test(test_close_with_messages_under_way),
    cmocka_unit_test(test_random_schedules),
    cmocka_unit_test(test_two_threads_lose_and_reorder_nothing),
    cmocka_unit_test(test_open_survives_every_failed_allocation),
};
enum { kCount = sizeof(kTests) / sizeof(*kTests) };

// A driver whose library is missing is skipped, which is said.
static bool is_missing(const char* driver) {
  jpp_transport_t* transport = NULL;
  jpp_transport_options_t options = pair_options(driver, 0, 1);
  jpp_status_t* status = jpp_transport_create(&options, &transport);
  bool missing = jpp_status_code(status) == JPP_UNSUPPORTED;
  if (missing) printf("1..0 # SKIP %s\n", jpp_status_message(status));
  jpp_status_free(status);
  jpp_transport_destroy(transport);
  return missing;
}

int main(int argc, char** argv) {
  static char names[kCount][128];
  struct CMUnitTest tests[kCount];
  const char* driver = argc > 1 ? argv[1] : "fake";
  if (is_missing(driver)) return 0;
  for (size_t i = 0; i < kCount; ++i) {
    tests[i] = kTests[i];
    snprintf(names[i], sizeof(*names), "%s on %s", kTests[i].name, driver);
    tests[i].name = names[i];
    tests[i].initial_state = (void*)driver;
  }
  return _cmocka_run_group_tests("transport_bytes", tests, kCount, NULL, NULL);
}
