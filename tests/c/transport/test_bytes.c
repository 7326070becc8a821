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

static void test_messages_come_in_order_up_to_the_slots(void** state) {
  static const char* const kTexts[] = {"a", "bc", "def"};
  pair_t pair;
  jpp_received_t received;
  pair_open(&pair, *state, 3, 1, 16);
  assert_false(pair_recv(pair.in, &received));
  for (uint64_t round = 0; round < 5; ++round) {
    PAIR_WAIT(&pair, jpp_channel_credits(pair.out) == 3);
    for (uint64_t i = 0; i < 3; ++i) assert_true(pair_send_text(&pair, i, kTexts[i]));
    for (int i = 0; i < 100; ++i) {
      pair_progress(&pair);
      assert_int_equal(jpp_channel_credits(pair.out), 0);
      assert_false(pair_send_text(&pair, 9, "x"));
    }
    for (uint64_t i = 0; i < 3; ++i) pair_expect_text(&pair, i, kTexts[i]);
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
  PAIR_WAIT(&pair, pair_send_text(&pair, 0, "held"));
  PAIR_WAIT(&pair, pair_recv(pair.in, &held));
  for (uint64_t i = 1; i < 6; ++i) {
    PAIR_WAIT(&pair, pair_send_text(&pair, i, "passes"));
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
  PAIR_WAIT(&pair, pair_send_text(&pair, 4, "first"));
  pair_expect_text(&pair, 4, "first");
  pair_close(&pair);
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
    if (strstr(*state, "fake")) {
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
  while (pair->finished < kThreadMessages) {
    bool some = false;
    jpp_transport_progress(pair->sender, &some);
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
  JPP_RETURN_IF_ERROR(test_transport_create(&options, &pair->sender));
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
  ASSERT_OK(test_transport_create(&options, &pair.receiver));
  int failures = 0;
  for (int64_t n = 0; n < 60; ++n) {
    jpp__alloc_fail_after(n);
    jpp_status_t* status = open_all(*state, &pair);
    jpp__alloc_fail_after(-1);
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
    cmocka_unit_test(test_random_schedules),
    cmocka_unit_test(test_two_threads_lose_and_reorder_nothing),
    cmocka_unit_test(test_open_survives_every_failed_allocation),
};

int main(int argc, char** argv) {
  return pair_run_suite("transport_bytes", kTests, sizeof(kTests) / sizeof(*kTests), argc,
                        argv);
}
