// Connects two transports in one thread, which makes progress on them in turns; only
// closing, where they wait for each other, needs a second thread.
#include "pair.h"

#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <time.h>

jpp_transport_options_t pair_options(const char* driver, uint32_t process,
                                     uint32_t most_ms) {
  return (jpp_transport_options_t){.struct_size = sizeof(jpp_transport_options_t),
                                   .driver = driver,
                                   .process = process,
                                   .num_processes = 2,
                                   .address = "127.0.0.1",
                                   .token = kPairToken,
                                   .token_size = sizeof(kPairToken),
                                   .peer_timeout_ms = most_ms};
}

static void connect_one(jpp_transport_t* transport, uint32_t process,
                        const jpp_transport_t* peer) {
  const void* address = NULL;
  size_t size = 0;
  jpp_transport_address(peer, &address, &size);
  ASSERT_OK(jpp_transport_connect(transport, process, address, size));
}

void pair_connect(pair_t* pair, const char* driver, uint32_t most_ms) {
  *pair = (pair_t){0};
  jpp_transport_options_t sender = pair_options(driver, 0, most_ms);
  jpp_transport_options_t receiver = pair_options(driver, 1, most_ms);
  ASSERT_OK(test_transport_create(&sender, &pair->sender));
  ASSERT_OK(test_transport_create(&receiver, &pair->receiver));
  connect_one(pair->sender, 1, pair->receiver);
  connect_one(pair->receiver, 0, pair->sender);
}

static void count_finished(void* user, void* cookie) {
  pair_t* pair = user;
  ++pair->finished;
  pair->finished_sum += (uintptr_t)cookie;
}

jpp_channel_spec_t pair_spec(pair_t* pair, uint32_t id, uint32_t slots, uint32_t capacity,
                             const uint64_t* bytes) {
  static const bool kOnDevice[kPairMostShards] = {true, true, true, true};
  bool on_device = pair && jpp_transport_takes_device_memory(pair->sender);
  return (jpp_channel_spec_t){.struct_size = sizeof(jpp_channel_spec_t),
                              .id = id,
                              .src_actor = 10,
                              .dst_actor = 11,
                              .src_process = 0,
                              .dst_process = 1,
                              .slots = slots,
                              .capacity = capacity,
                              .bytes = bytes,
                              .sent = count_finished,
                              .user = pair,
                              .on_device = on_device ? kOnDevice : NULL};
}

void pair_open_channel(pair_t* pair, uint32_t slots, uint32_t capacity, uint64_t bytes) {
  uint64_t most[kPairMostShards] = {bytes, bytes, bytes, bytes};
  jpp_channel_spec_t spec = pair_spec(pair, 5, slots, capacity, most);
  ASSERT_OK(jpp_transport_open_channel(pair->sender, &spec, &pair->out));
  ASSERT_OK(jpp_transport_open_channel(pair->receiver, &spec, &pair->in));
}

void pair_open(pair_t* pair, const char* driver, uint32_t slots, uint32_t capacity,
               uint64_t bytes) {
  pair_connect(pair, driver, 10000);
  pair_open_channel(pair, slots, capacity, bytes);
}

static void* destroy_transport(void* transport) {
  jpp_transport_destroy(transport);
  return NULL;
}

void pair_close(pair_t* pair) {
  pthread_t thread;
  jpp_channel_close(pair->out);
  jpp_channel_close(pair->in);
  assert_int_equal(pthread_create(&thread, NULL, destroy_transport, pair->sender), 0);
  jpp_transport_destroy(pair->receiver);
  pthread_join(thread, NULL);
  pair->sender = pair->receiver = NULL;
}

void pair_progress(pair_t* pair) {
  bool sender = false, receiver = false;
  if (pair->sender) jpp_transport_progress(pair->sender, &sender);
  if (pair->receiver) jpp_transport_progress(pair->receiver, &receiver);
  if (!sender && !receiver) sched_yield();
}

bool pair_send(jpp_channel_t* channel, uint64_t tag, const jpp_shard_t* shards,
               uint32_t count, uintptr_t cookie) {
  bool done = false;
  ASSERT_OK(
      jpp_channel_try_send_bytes(channel, tag, shards, count, (void*)cookie, &done));
  return done;
}

bool pair_recv(jpp_channel_t* channel, jpp_received_t* out_received) {
  bool done = false;
  ASSERT_OK(jpp_channel_try_recv_bytes(channel, out_received, &done));
  return done;
}

static unsigned char byte_of(uint64_t seed, size_t i) {
  return (unsigned char)(seed * 131 + i * 7 + (i >> 8));
}

void pair_fill(void* data, size_t size, uint64_t seed) {
  for (size_t i = 0; i < size; ++i) ((unsigned char*)data)[i] = byte_of(seed, i);
}

bool pair_is_filled(const void* data, size_t size, uint64_t seed) {
  for (size_t i = 0; i < size; ++i) {
    if (((const unsigned char*)data)[i] != byte_of(seed, i)) return false;
  }
  return true;
}

void pair_expect_text(pair_t* pair, uint64_t tag, const char* text) {
  jpp_received_t received;
  PAIR_WAIT(pair, pair_recv(pair->in, &received));
  assert_int_equal(received.tag, tag);
  assert_int_equal(received.count, 1);
  assert_int_equal(received.sizes[0], strlen(text));
  assert_memory_equal(received.data[0], text, strlen(text));
  jpp_channel_release(pair->in, received.slot);
}

bool pair_send_text(pair_t* pair, uint64_t tag, const char* text) {
  jpp_shard_t shard = {.data = text, .size = strlen(text)};
  return pair_send(pair->out, tag, &shard, 1, tag);
}

// --- Suites ---------------------------------------------------------------------------

// Skips a driver whose library is missing, and prints that.
static bool is_missing(const char* driver) {
  jpp_transport_t* transport = NULL;
  jpp_transport_options_t options = pair_options(driver, 0, 1);
  jpp_status_t* status = test_transport_create(&options, &transport);
  bool missing = jpp_status_code(status) == JPP_UNSUPPORTED;
  if (missing) printf("1..0 # SKIP %s\n", jpp_status_message(status));
  jpp_status_free(status);
  jpp_transport_destroy(transport);
  return missing;
}

enum { kMostTests = 32, kMostName = 128 };

int pair_run_suite(const char* name, const struct CMUnitTest* tests, size_t count,
                   int argc, char** argv) {
  static char names[kMostTests][kMostName];
  struct CMUnitTest run[kMostTests];
  const char* driver = argc > 1 ? argv[1] : "fake";
  assert_true(count <= kMostTests);
  if (is_missing(driver)) return 0;
  for (size_t i = 0; i < count; ++i) {
    run[i] = tests[i];
    snprintf(names[i], kMostName, "%s on %s", tests[i].name, driver);
    run[i].name = names[i];
    run[i].initial_state = (void*)driver;
  }
  return _cmocka_run_group_tests(name, run, count, NULL, NULL);
}
