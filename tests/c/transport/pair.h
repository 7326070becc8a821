// Two transports of one process, connected as two processes would be, and both ends of a
// channel between them.
#ifndef TESTS_C_TRANSPORT_PAIR_H_
#define TESTS_C_TRANSPORT_PAIR_H_

#include "base/clock.h"
#include "fake/transport.h"
#include "test_util.h"

enum { kPairMostShards = 4 };

typedef struct pair {
  jpp_transport_t* sender;    // process 0
  jpp_transport_t* receiver;  // process 1
  jpp_channel_t* out;
  jpp_channel_t* in;
  uint32_t finished;       // calls of `sent`
  uintptr_t finished_sum;  // of their cookies
} pair_t;

static const char kPairToken[] = "a token of the tests";

// Options of a transport of bytes; most_ms is its peer_timeout_ms.
jpp_transport_options_t pair_options(const char* driver, uint32_t process,
                                     uint32_t most_ms);
void pair_connect(pair_t* pair, const char* driver, uint32_t most_ms);
// A channel from process 0 to 1 with shards of at most these sizes, in device memory if
// the driver supports that.
jpp_channel_spec_t pair_spec(pair_t* pair, uint32_t id, uint32_t slots, uint32_t capacity,
                             const uint64_t* bytes);
// Both: `capacity` shards of `bytes` each.
void pair_open(pair_t* pair, const char* driver, uint32_t slots, uint32_t capacity,
               uint64_t bytes);
void pair_open_channel(pair_t* pair, uint32_t slots, uint32_t capacity, uint64_t bytes);
// Closes what is open. Both transports leave at the same time, as threads.
void pair_close(pair_t* pair);

// Makes progress at both ends.
void pair_progress(pair_t* pair);
// Makes progress until the condition is true; fails the test if that takes too long.
#define PAIR_WAIT(pair, condition)                                                       \
  do {                                                                                   \
    int64_t pair_until_ = jpp__clock_now_ms() + 20000;                                   \
    while (!(condition)) {                                                               \
      if (jpp__clock_now_ms() > pair_until_) fail_msg("waited in vain for " #condition); \
      pair_progress(pair);                                                               \
    }                                                                                    \
  } while (0)

// Returns true if the message could be sent; its status must be OK.
bool pair_send(jpp_channel_t* channel, uint64_t tag, const jpp_shard_t* shards,
               uint32_t count, uintptr_t cookie);
bool pair_recv(jpp_channel_t* channel, jpp_received_t* out_received);

// Fills in bytes that depend on the message and the shard.
void pair_fill(void* data, size_t size, uint64_t seed);
bool pair_is_filled(const void* data, size_t size, uint64_t seed);

// Sends a message of one shard, with its tag as the cookie; returns true if it could be
// sent.
bool pair_send_text(pair_t* pair, uint64_t tag, const char* text);
// Waits for the message and releases its slot.
void pair_expect_text(pair_t* pair, uint64_t tag, const char* text);

// Runs the tests with the driver that argv[1] names (default "fake") as their state.
// Skips a driver whose library is missing, and prints that.
int pair_run_suite(const char* name, const struct CMUnitTest* tests, size_t count,
                   int argc, char** argv);

#endif  // TESTS_C_TRANSPORT_PAIR_H_
