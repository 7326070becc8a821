// What a transport reads from other processes: sealed addresses, and packets with a
// proof. The input is either an address, tried as it is and again with a valid seal, or
// packets for both ends of the channels of a transport on the driver "fake".
#include "base/sha256.h"
#include "fake/transport.h"
#include "fuzz.h"
#include "transport/net.h"

static const char kToken[] = "a token of the fuzzer";
enum { kMostAddress = 4096, kShards = 2, kChannels = 2, kSlots = 3, kNote = 5 };

static void open_address(const uint8_t* bytes, size_t size) {
  jpp_address_t address;
  if (!fuzz_ok(jpp__address_open(bytes, size, kToken, sizeof(kToken), &address))) return;
  FUZZ_CHECK(address.name_size <= kJppMostNameSize);
  FUZZ_CHECK(address.name + address.name_size == (const char*)address.route);
  FUZZ_CHECK((const uint8_t*)address.route + address.route_size == bytes + size);
}

static void try_address(const uint8_t* data, size_t size) {
  uint8_t sealed[kMostAddress];
  if (size > sizeof(sealed)) return;
  open_address(data, size);
  if (size < kJppSha256Size) return;
  memcpy(sealed, data, size);
  jpp__hmac_sha256(kToken, sizeof(kToken), data + kJppSha256Size, size - kJppSha256Size,
                   sealed);
  open_address(sealed, size);
}

// --- Packets --------------------------------------------------------------------------

static jpp_transport_t* make_transport(uint32_t process) {
  jpp_transport_options_t options = {.struct_size = sizeof(options),
                                     .driver = "fake",
                                     .process = process,
                                     .num_processes = 2,
                                     .address = "here",
                                     .token = kToken,
                                     .token_size = sizeof(kToken),
                                     .peer_timeout_ms = 1};
  jpp_transport_t* transport = NULL;
  FUZZ_CHECK(fuzz_ok(test_transport_create(&options, &transport)));
  return transport;
}

// Channel 0 receives from process 1, channel 1 sends to it.
static jpp_channel_t* open_channel(jpp_transport_t* transport, uint32_t id) {
  static const uint64_t kBytes[kShards] = {300, 20};
  jpp_channel_spec_t spec = {.struct_size = sizeof(spec),
                             .id = id,
                             .src_process = 1 - id,
                             .dst_process = id,
                             .slots = kSlots,
                             .capacity = kShards,
                             .bytes = kBytes};
  jpp_channel_t* channel = NULL;
  FUZZ_CHECK(fuzz_ok(jpp_transport_open_channel(transport, &spec, &channel)));
  return channel;
}

// Acts as the caller of a transport does between packets. Errors may have any code,
// because a peer's abort brings its own.
static void use_channels(jpp_channel_t* const* channels, uint8_t what) {
  static char data[300];
  jpp_received_t received;
  jpp_shard_t shard = {.data = data, .size = sizeof(data)};
  bool done = false;
  if (what & 1) {
    jpp_status_free(jpp_channel_try_recv_bytes(channels[0], &received, &done));
    for (uint32_t i = 0; done && i < received.count; ++i) {
      memset(received.data[i], 1, received.sizes[i]);
    }
    if (done && what & 2) jpp_channel_release(channels[0], received.slot);
  }
  if (what & 4) {
    FUZZ_CHECK(jpp_channel_credits(channels[1]) <= kSlots);
    jpp_status_free(jpp_channel_try_send_bytes(channels[1], 0, &shard, 1, NULL, &done));
  }
  if ((what & 24) == 24) jpp_channel_reset(channels[what >> 7]);
}

// Delivers one packet from the input: kHead bytes of header, with a byte or two for each
// number and a byte of flags in place of the proof, then the data. Returns the number of
// bytes used, 0 if too few are left.
static size_t take_packet(jpp_net_t* net, const jpp_net_t* peer, const uint8_t* data,
                          size_t size, bool fetched) {
  enum { kHead = 11 };
  if (size < kHead) return 0;
  jpp_packet_t packet = {.source = 1,
                         .kind = data[0],
                         .channel = data[1],
                         .epoch = data[2],
                         .number = data[3] | (uint64_t)(data[4] & 128) << 56,
                         .tag = data[5],
                         .shard = data[6],
                         .count = data[7],
                         .size = data[8] | (uint64_t)data[9] << 8};
  size_t length = data[8] | (size_t)data[9] << 8;
  if (length > size - kHead) length = size - kHead;
  if (!(data[10] & 1)) packet.size = length;
  memcpy(packet.proof, peer->peers[0].proof_out, sizeof(packet.proof));
  if (data[10] & 2) packet.proof[3] ^= 1;
  jpp_net_place_t place;
  jpp__net_arrived(net, &packet, sizeof(packet), fetched ? NULL : data + kHead, length,
                   &place);
  if (place.data) {
    FUZZ_CHECK(fetched);
    memcpy(place.data, data + kHead, length);
    jpp__net_received(place.shard, !(data[10] & 4));
  }
  return kHead + length;
}

static void write_note(void* user, void* note) {
  (void)user;
  memset(note, 1, kNote);
}

static void connect_transports(jpp_transport_t* from, uint32_t to,
                               const jpp_transport_t* peer) {
  const void* address = NULL;
  size_t size = 0;
  jpp_transport_address(peer, &address, &size);
  FUZZ_CHECK(fuzz_ok(jpp_transport_connect(from, to, address, size)));
}

static void try_packets(const uint8_t* data, size_t size) {
  jpp_transport_t* here = make_transport(0);
  jpp_transport_t* peer = make_transport(1);
  connect_transports(here, 1, peer);
  connect_transports(peer, 0, here);
  jpp_channel_t* channels[kChannels];
  for (uint32_t i = 0; i < kChannels; ++i) channels[i] = open_channel(here, i);
  FUZZ_CHECK(fuzz_ok(jpp_transport_open_notes(here, kNote, write_note, NULL)));
  while (size > 1) {
    bool some = false;
    use_channels(channels, data[0]);
    size_t taken = take_packet((jpp_net_t*)here, (const jpp_net_t*)peer, data + 1,
                               size - 1, data[0] & 32);
    if (data[0] & 64) jpp_transport_progress(here, &some);
    if (!taken) break;
    data += 1 + taken;
    size -= 1 + taken;
  }
  jpp_transport_fake_kill(peer);
  for (uint32_t i = 0; i < kChannels; ++i) jpp_channel_close(channels[i]);
  jpp_transport_destroy(peer);
  jpp_transport_fake_kill(here);
  jpp_transport_destroy(here);
}

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  if (data[0] & 1) {
    try_address(data + 1, size - 1);
  } else {
    try_packets(data + 1, size - 1);
  }
  return 0;
}
