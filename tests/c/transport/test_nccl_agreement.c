// Before the driver for NCCL makes a communicator, on the stub of it: what is loaded, and
// what processes must agree on.
#include <stdlib.h>

#include "base/alloc.h"
#include "nccl_tests.h"
#include "transport/nccl.h"
#include "transport/net_channel.h"

// --- Loading --------------------------------------------------------------------------

static void expect_unsupported(const char* text) {
  jpp_transport_t* transport = NULL;
  jpp_transport_options_t options = pair_options("nccl-fake", 0, 100);
  ASSERT_FAILS(test_transport_create(&options, &transport), JPP_UNSUPPORTED, text);
  assert_null(transport);
}

// Before all others: what is loaded stays.
static void test_a_library_that_is_missing_or_too_old_is_named(void** state) {
  (void)state;
  char* stub = strdup(getenv("JPP_NCCL"));
  setenv("JPP_CUDA", "/nowhere/libcuda.so.1", 1);
  expect_unsupported("JPP_CUDA=/nowhere/libcuda.so.1 could not be loaded");
  setenv("JPP_CUDA", stub, 1);
  setenv("JPP_NCCL", "/nowhere/libnccl.so.2", 1);
  expect_unsupported("JPP_NCCL=/nowhere/libnccl.so.2 could not be loaded");
  setenv("JPP_NCCL", "libpthread.so.0", 1);
  expect_unsupported("were found have no nccl");
  setenv("JPP_NCCL", stub, 1);
  stub_set_faults(&(stub_faults_t){.version = 22105});
  expect_unsupported("expected NCCL 2.22 or later, found 2.21.5");
  stub_set_faults(&(stub_faults_t){.version = 2708});
  expect_unsupported("found 2.7.8");
  free(stub);
}

static void test_a_device_that_is_not_there_is_named(void** state) {
  (void)state;
  jpp_transport_t* transport = NULL;
  jpp_transport_options_t options = pair_options("nccl-fake", 0, 100);
  options.device = kStubDevices;
  ASSERT_FAILS(test_transport_create(&options, &transport), JPP_UNSUPPORTED,
               "device 4: cuDeviceGet: invalid device ordinal");
}

static void test_drivers_of_host_memory_refuse_shards_on_devices(void** state) {
  (void)state;
  static const uint64_t kBytes = 8;
  static const bool kOnDevice = true;
  pair_t pair;
  pair_connect(&pair, "fake", 1000);
  jpp_channel_spec_t spec = pair_spec(&pair, 1, 1, 1, &kBytes);
  spec.on_device = &kOnDevice;
  ASSERT_FAILS(jpp_transport_open_channel(pair.sender, &spec, &pair.out), JPP_UNSUPPORTED,
               "transport fake takes shards in host memory");
  pair_close(&pair);
}

// --- Agreement ------------------------------------------------------------------------

static void expect_refused(jpp_transport_t* here, const void* address, size_t size,
                           const char* text) {
  ASSERT_FAILS(jpp_transport_connect(here, 1, address, size), JPP_PEER_ERROR, text);
}

static void test_processes_with_other_releases_are_refused(void** state) {
  (void)state;
  jpp_transport_t *here = NULL, *there = NULL;
  jpp_transport_options_t options = pair_options("nccl-fake", 0, 100);
  ASSERT_OK(test_transport_create(&options, &here));
  options = pair_options("fake", 1, 100);
  ASSERT_OK(test_transport_create(&options, &there));
  const void* address = NULL;
  size_t size = 0;
  jpp_transport_address(there, &address, &size);
  expect_refused(here, address, size,
                 "process 1: expected NCCL 2.28.9, as in process 0, found none");

  jpp_address_t opened;
  void* sealed = NULL;
  ASSERT_OK(jpp__address_open(address, size, kPairToken, sizeof(kPairToken), &opened));
  opened.device_version = 22703;
  ASSERT_OK(jpp__address_seal(&opened, kPairToken, sizeof(kPairToken), &sealed, &size));
  expect_refused(here, sealed, size, "found 2.27.3; install the same release");
  jpp_free(sealed);
  jpp_transport_destroy(there);
  jpp_transport_destroy(here);
}

static void arrive(pair_t* pair, jpp_packet_t packet, const void* data, size_t size) {
  jpp_net_t* net = (jpp_net_t*)pair->receiver;
  jpp_net_place_t place;
  memcpy(packet.proof, net->peers[0].proof_in, sizeof(packet.proof));
  jpp__net_arrived(net, &packet, sizeof(packet), data, size, &place);
  assert_null(place.data);
}

static void test_an_id_without_proof_of_the_token_is_not_looked_at(void** state) {
  (void)state;
  static const char kId[sizeof(jpp_nccl_id_t)];
  pair_t pair;
  jpp_net_place_t place;
  pair_open(&pair, "nccl-fake", 1, 1, kBig);
  jpp_net_t* net = (jpp_net_t*)pair.receiver;
  const jpp_nccl_comm_t* comm = jpp__nccl_comm_of(&net->peers[0], false);
  jpp_packet_t packet = {.kind = JPP_PACKET_MEET, .size = sizeof(kId)};
  jpp__net_arrived(net, &packet, sizeof(packet), kId, sizeof(kId), &place);
  assert_int_equal(net->refused, 1);
  assert_false(comm->has_id);
  ASSERT_OK(jpp_transport_peer_status(pair.receiver, 0));
  PAIR_WAIT(&pair, pair_send_text(&pair, 1, "works"));
  pair_expect_text(&pair, 1, "works");
  pair_close(&pair);
}

static void test_packets_that_break_the_order_fail_the_peer(void** state) {
  (void)state;
  static const char kId[sizeof(jpp_nccl_id_t)];
  static const struct {
    jpp_packet_t packet;
    size_t size;
    const char* text;
  } kCases[] = {
      {{.kind = JPP_PACKET_MEET, .size = 5}, 5, "not an NCCL id"},
      {{.kind = JPP_PACKET_MEET, .size = sizeof(kId)}, sizeof(kId), "arrived twice"},
      {{.kind = JPP_PACKET_DATA, .channel = 5, .number = 1, .count = 1, .size = 9},
       9,
       "another kind of memory"},
      {{.kind = JPP_PACKET_DATA,
        .channel = 5,
        .number = 1,
        .count = 1,
        .size = 9,
        .turn = 1},
       0,
       "its turn is past"},
      {{.kind = JPP_PACKET_DATA, .channel = 99, .count = 1, .size = kBig + 1, .turn = 2},
       0,
       "it is too large"},
      {{.kind = JPP_PACKET_DATA, .channel = 99, .count = 1, .size = 1, .turn = 1 << 20},
       0,
       "its turn is past"},
  };
  for (size_t i = 0; i < sizeof(kCases) / sizeof(*kCases); ++i) {
    pair_t pair;
    pair_open(&pair, "nccl-fake", 2, 1, kBig);
    PAIR_WAIT(&pair, pair_send_text(&pair, 1, "first"));
    pair_expect_text(&pair, 1, "first");
    arrive(&pair, kCases[i].packet, kCases[i].size ? kId : NULL, kCases[i].size);
    ASSERT_FAILS(jpp_transport_peer_status(pair.receiver, 0), JPP_PEER_ERROR,
                 kCases[i].text);
    jpp_transport_fake_kill(pair.sender);
    pair_close(&pair);
  }
}

int main(void) {
  const struct CMUnitTest tests[] = {
      TEST(test_a_library_that_is_missing_or_too_old_is_named),
      TEST(test_a_device_that_is_not_there_is_named),
      TEST(test_drivers_of_host_memory_refuse_shards_on_devices),
      TEST(test_processes_with_other_releases_are_refused),
      TEST(test_an_id_without_proof_of_the_token_is_not_looked_at),
      TEST(test_packets_that_break_the_order_fail_the_peer),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
