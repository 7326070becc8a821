// What is read before a peer is believed: the hash, sealed addresses, packets. Packets
// are put into a transport as its driver does, without a network.
#include <stdio.h>

#include "base/alloc.h"
#include "base/sha256.h"
#include "pair.h"
#include "transport/net_channel.h"

static void expect_hex(const uint8_t* bytes, const char* hex) {
  char text[2 * kJppSha256Size + 1];
  for (int i = 0; i < kJppSha256Size; ++i) {
    snprintf(text + 2 * (size_t)i, 3, "%02x", bytes[i]);
  }
  assert_string_equal(text, hex);
}

// The examples of FIPS 180-4 (two blocks, a million letters) and RFC 4231 (2, 6).
static void test_sha256_of_published_examples(void** state) {
  (void)state;
  static const char kTwoBlocks[] =
      "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  uint8_t digest[kJppSha256Size], key[131];
  jpp_sha256_t hash;
  jpp__sha256_begin(&hash);
  jpp__sha256_end(&hash, digest);
  expect_hex(digest, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  jpp__sha256_begin(&hash);
  jpp__sha256_add(&hash, kTwoBlocks, 1);
  jpp__sha256_add(&hash, kTwoBlocks + 1, sizeof(kTwoBlocks) - 2);
  jpp__sha256_end(&hash, digest);
  expect_hex(digest, "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  jpp__sha256_begin(&hash);
  for (int i = 0; i < 1000000; ++i) jpp__sha256_add(&hash, "a", 1);
  jpp__sha256_end(&hash, digest);
  expect_hex(digest, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  jpp__hmac_sha256("Jefe", 4, "what do ya want for nothing?", 28, digest);
  expect_hex(digest, "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  memset(key, 0xaa, sizeof(key));
  jpp__hmac_sha256(key, sizeof(key),
                   "Test Using Larger Than Block-Size Key - Hash Key First", 54, digest);
  expect_hex(digest, "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

// --- Addresses ------------------------------------------------------------------------

static void seal(uint8_t** out_bytes, size_t* out_size) {
  jpp_address_t address = {.process = 1,
                           .num_processes = 2,
                           .nonce = "0123456789abcde",
                           .name = "a name",
                           .name_size = 6,
                           .route = "a route",
                           .route_size = 7};
  ASSERT_OK(jpp__address_seal(&address, kPairToken, sizeof(kPairToken), (void**)out_bytes,
                              out_size));
}

static void test_address_is_read_as_it_was_sealed(void** state) {
  (void)state;
  uint8_t* bytes = NULL;
  size_t size = 0;
  jpp_address_t address;
  seal(&bytes, &size);
  ASSERT_OK(jpp__address_open(bytes, size, kPairToken, sizeof(kPairToken), &address));
  assert_int_equal(address.process, 1);
  assert_int_equal(address.num_processes, 2);
  assert_memory_equal(address.nonce, "0123456789abcde", kJppNonceSize);
  assert_int_equal(address.name_size, 6);
  assert_memory_equal(address.name, "a name", 6);
  assert_int_equal(address.route_size, 7);
  assert_memory_equal(address.route, "a route", 7);
  jpp_free(bytes);
}

static void test_every_changed_byte_and_every_cut_breaks_the_seal(void** state) {
  (void)state;
  uint8_t* bytes = NULL;
  size_t size = 0;
  jpp_address_t address;
  seal(&bytes, &size);
  for (size_t i = 0; i < size; ++i) {
    bytes[i] ^= 1;
    ASSERT_FAILS(jpp__address_open(bytes, size, kPairToken, sizeof(kPairToken), &address),
                 JPP_PEER_ERROR, "was not made with this job's token");
    bytes[i] ^= 1;
    ASSERT_FAILS(jpp__address_open(bytes, i, kPairToken, sizeof(kPairToken), &address),
                 JPP_PEER_ERROR, "address");
  }
  ASSERT_FAILS(jpp__address_open(bytes, size, "another token of it", 19, &address),
               JPP_PEER_ERROR, "was not made with this job's token");
  jpp_free(bytes);
}

static void test_lengths_under_the_seal_are_checked_too(void** state) {
  (void)state;
  enum { kVersionAt = 40, kNameSizeAt = 52 };
  uint8_t* bytes = NULL;
  size_t size = 0;
  jpp_address_t address;
  seal(&bytes, &size);
  for (int at = kVersionAt; at <= kNameSizeAt; at += kNameSizeAt - kVersionAt) {
    bytes[at] += 3;
    jpp__hmac_sha256(kPairToken, sizeof(kPairToken), bytes + kJppSha256Size,
                     size - kJppSha256Size, bytes);
    ASSERT_FAILS(jpp__address_open(bytes, size, kPairToken, sizeof(kPairToken), &address),
                 JPP_PEER_ERROR,
                 at == kVersionAt ? "found version 6" : "name and route, found 9 and 7");
    bytes[at] -= 3;
  }
  jpp_free(bytes);
}

// --- Packets --------------------------------------------------------------------------

// Of process 0 for process 1, with the proof that it has.
static jpp_packet_t packet_for(const pair_t* pair, jpp_packet_kind_t kind) {
  const jpp_net_t* net = (const jpp_net_t*)pair->receiver;
  jpp_packet_t packet = {.kind = kind, .channel = 5, .count = 1};
  memcpy(packet.proof, net->peers[0].proof_in, sizeof(packet.proof));
  return packet;
}

static void arrive(const pair_t* pair, const jpp_packet_t* packet, const void* data,
                   size_t size) {
  jpp_net_place_t place;
  jpp__net_arrived((jpp_net_t*)pair->receiver, packet, sizeof(*packet), data, size,
                   &place);
  assert_null(place.data);
}

static void test_packets_without_proof_change_nothing(void** state) {
  (void)state;
  pair_t pair;
  jpp_received_t received;
  pair_open(&pair, "fake", 2, 1, 64);
  const jpp_net_t* net = (const jpp_net_t*)pair.receiver;
  jpp_packet_t packet = packet_for(&pair, JPP_PACKET_DATA);
  packet.size = 1;
  for (int i = 0; i < kJppProofSize; ++i) {
    packet.proof[i] ^= 0x80;
    arrive(&pair, &packet, "x", 1);
    packet.proof[i] ^= 0x80;
  }
  packet.source = 1;
  arrive(&pair, &packet, "x", 1);
  packet.source = UINT32_MAX;
  arrive(&pair, &packet, "x", 1);
  packet.source = 0;
  jpp_net_place_t place;
  jpp__net_arrived((jpp_net_t*)pair.receiver, &packet, sizeof(packet) - 1, "x", 1,
                   &place);
  assert_int_equal(net->refused, kJppProofSize + 3);
  assert_false(pair_recv(pair.in, &received));
  ASSERT_OK(jpp_transport_peer_status(pair.receiver, 0));
  arrive(&pair, &packet, "x", 1);
  assert_true(pair_recv(pair.in, &received));
  jpp_transport_fake_kill(pair.sender);
  pair_close(&pair);
}

typedef struct violation {
  jpp_packet_t packet;
  const char* data;
  const char* text;
} violation_t;

static void test_what_the_plan_does_not_allow_fails_the_peer(void** state) {
  (void)state;
  static const violation_t kViolations[] = {
      {{.kind = 99, .channel = 5}, NULL, "its kind is unknown"},
      {{.kind = JPP_PACKET_GRANT, .channel = 5}, NULL, "same end of the channel"},
      {{.kind = JPP_PACKET_DATA, .channel = 5, .count = 1, .size = 2}, "x", "length"},
      {{.kind = JPP_PACKET_DATA, .channel = 5, .count = 2, .size = 1},
       "x",
       "many shards"},
      {{.kind = JPP_PACKET_DATA, .channel = 5, .count = 1, .size = 1, .shard = 1},
       "x",
       "no such shard"},
      {{.kind = JPP_PACKET_DATA, .channel = 5, .count = 1, .size = 1, .number = 2},
       "x",
       "not granted"},
      {{.kind = JPP_PACKET_DATA, .channel = 5, .count = 1, .size = 1, .epoch = 1},
       "x",
       "not granted"},
      {{.kind = JPP_PACKET_DATA, .channel = 5, .count = 0, .size = 1}, "x", "too large"},
      {{.kind = JPP_PACKET_ABORT, .channel = 5, .number = 9999}, NULL, "no such error"},
      {{.kind = JPP_PACKET_ABORT, .channel = 5, .number = 0}, NULL, "no such error"},
  };
  for (size_t i = 0; i < sizeof(kViolations) / sizeof(*kViolations); ++i) {
    pair_t pair;
    jpp_received_t received;
    bool done = false;
    pair_open(&pair, "fake", 2, 1, 64);
    jpp_packet_t packet = packet_for(&pair, JPP_PACKET_DATA);
    uint8_t proof[kJppProofSize];
    memcpy(proof, packet.proof, sizeof(proof));
    packet = kViolations[i].packet;
    memcpy(packet.proof, proof, sizeof(proof));
    arrive(&pair, &packet, kViolations[i].data, kViolations[i].data ? 1 : 0);
    jpp_status_t* status = jpp_channel_try_recv_bytes(pair.in, &received, &done);
    ASSERT_FAILS(jpp_status_clone(status), JPP_PEER_ERROR, kViolations[i].text);
    ASSERT_FAILS(status, JPP_PEER_ERROR, "process 0 at 127.0.0.1: it sent a packet");
    jpp_transport_fake_kill(pair.sender);
    pair_close(&pair);
  }
}

static void test_data_that_comes_twice_or_too_large_fails_the_peer(void** state) {
  (void)state;
  static char data[65];
  for (int large = 0; large < 2; ++large) {
    pair_t pair;
    pair_open(&pair, "fake", 2, 1, 64);
    jpp_packet_t packet = packet_for(&pair, JPP_PACKET_DATA);
    packet.size = large ? 65 : 64;
    arrive(&pair, &packet, data, packet.size);
    if (!large) {
      ASSERT_OK(jpp_transport_peer_status(pair.receiver, 0));
      arrive(&pair, &packet, data, packet.size);
    }
    ASSERT_FAILS(jpp_transport_peer_status(pair.receiver, 0), JPP_PEER_ERROR,
                 large ? "too large" : "arrived twice");
    jpp_transport_fake_kill(pair.sender);
    pair_close(&pair);
  }
}

static void test_more_credits_than_slots_fail_the_peer(void** state) {
  (void)state;
  for (uint64_t extra = 0; extra < 2; ++extra) {
    pair_t pair;
    pair_open(&pair, "fake", 2, 1, 64);
    PAIR_WAIT(&pair, jpp_channel_credits(pair.out) == 2);
    const jpp_net_t* net = (const jpp_net_t*)pair.sender;
    const jpp_net_channel_t* channel = (const jpp_net_channel_t*)pair.out;
    jpp_packet_t packet = {.source = 1,
                           .kind = JPP_PACKET_GRANT,
                           .channel = 5,
                           .number = 2 + extra,
                           .size = channel->spec_hash};
    memcpy(packet.proof, net->peers[1].proof_in, sizeof(packet.proof));
    jpp_net_place_t place;
    jpp__net_arrived((jpp_net_t*)pair.sender, &packet, sizeof(packet), NULL, 0, &place);
    jpp_status_t* status = jpp_transport_peer_status(pair.sender, 1);
    if (extra) {
      ASSERT_FAILS(status, JPP_PEER_ERROR,
                   "it grants more messages than there are slots");
    } else {
      ASSERT_OK(status);
    }
    jpp_transport_fake_kill(pair.receiver);
    pair_close(&pair);
  }
}

static void test_packets_of_channels_that_are_not_open_are_dropped(void** state) {
  (void)state;
  pair_t pair;
  pair_open(&pair, "fake", 2, 1, 64);
  jpp_packet_t packet = packet_for(&pair, JPP_PACKET_DATA);
  packet.channel = 6;
  packet.size = 1;
  arrive(&pair, &packet, "x", 1);
  ASSERT_OK(jpp_transport_peer_status(pair.receiver, 0));
  pair_close(&pair);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_sha256_of_published_examples),
      cmocka_unit_test(test_address_is_read_as_it_was_sealed),
      cmocka_unit_test(test_every_changed_byte_and_every_cut_breaks_the_seal),
      cmocka_unit_test(test_lengths_under_the_seal_are_checked_too),
      cmocka_unit_test(test_packets_without_proof_change_nothing),
      cmocka_unit_test(test_what_the_plan_does_not_allow_fails_the_peer),
      cmocka_unit_test(test_data_that_comes_twice_or_too_large_fails_the_peer),
      cmocka_unit_test(test_more_credits_than_slots_fail_the_peer),
      cmocka_unit_test(test_packets_of_channels_that_are_not_open_are_dropped),
  };
  return cmocka_run_group_tests_name("transport_handshake", tests, NULL, NULL);
}
