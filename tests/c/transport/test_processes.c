// UCX between two real processes: the test is process 0, and starts this program again as
// process 1 for each case. The addresses go over a pair of sockets.
#include <dlfcn.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "pair.h"

enum { kMostBytes = 3 << 20, kSlots = 2, kMessages = 60 };
static const uint64_t kEnd = 999999;  // tag: the peer may leave

typedef struct process {
  jpp_transport_t* transport;
  jpp_channel_t* out;  // to the other process
  jpp_channel_t* in;
  uint32_t finished;
  pid_t peer;
  int socket;
} process_t;

static void count_finished(void* user, void* cookie) {
  (void)cookie;
  ++((process_t*)user)->finished;
}

// --- Both processes -------------------------------------------------------------------

static bool write_all(int descriptor, const void* data, size_t size) {
  return write(descriptor, data, size) == (ssize_t)size;
}

static bool read_all(int descriptor, void* data, size_t size) {
  for (size_t got = 0; got < size;) {
    ssize_t part = read(descriptor, (char*)data + got, size - got);
    if (part <= 0) return false;
    got += (size_t)part;
  }
  return true;
}

static jpp_status_t* exchange_addresses(process_t* process, uint32_t other) {
  const void* address = NULL;
  size_t size = 0, peer_size = 0;
  static char peer[64 << 10];
  jpp_transport_address(process->transport, &address, &size);
  bool done = write_all(process->socket, &size, sizeof(size)) &&
              write_all(process->socket, address, size) &&
              read_all(process->socket, &peer_size, sizeof(peer_size)) &&
              peer_size <= sizeof(peer) && read_all(process->socket, peer, peer_size);
  if (!done) return jpp_status_make(JPP_INTERNAL_ERROR, "no address from the other");
  return jpp_transport_connect(process->transport, other, peer, peer_size);
}

static jpp_status_t* open_one(process_t* process, uint32_t from, jpp_channel_t** out) {
  static const uint64_t kBytes[2] = {kMostBytes, 100};
  jpp_channel_spec_t spec = {.struct_size = sizeof(spec),
                             .id = from,
                             .src_actor = from,
                             .dst_actor = 1 - from,
                             .src_process = from,
                             .dst_process = 1 - from,
                             .slots = kSlots,
                             .capacity = 2,
                             .bytes = kBytes,
                             .sent = count_finished,
                             .user = process};
  return jpp_transport_open_channel(process->transport, &spec, out);
}

static jpp_status_t* start(process_t* process, uint32_t self, const char* token) {
  jpp_transport_options_t options = pair_options("ucx", self, 4000);
  options.token = token;
  options.token_size = strlen(token);
  JPP_RETURN_IF_ERROR(jpp_transport_create(&options, &process->transport));
  JPP_RETURN_IF_ERROR(exchange_addresses(process, 1 - self));
  JPP_RETURN_IF_ERROR(open_one(process, self, &process->out));
  return open_one(process, 1 - self, &process->in);
}

static void progress(process_t* process) {
  bool some = false, armed = false;
  int descriptor = -1;
  jpp_transport_progress(process->transport, &some);
  if (some) return;
  jpp_status_free(jpp_transport_arm(process->transport, &descriptor, &armed));
  struct pollfd wait = {.fd = descriptor, .events = POLLIN};
  if (armed) poll(&wait, 1, 100);
}

static jpp_status_t* warm_up(process_t* process) {
  bool out = false, in = false;
  while (!out || !in) {
    if (!out) JPP_RETURN_IF_ERROR(jpp_channel_warm_up(process->out, &out));
    if (!in) JPP_RETURN_IF_ERROR(jpp_channel_warm_up(process->in, &in));
    progress(process);
  }
  return NULL;
}

static jpp_status_t* receive(process_t* process, jpp_received_t* received) {
  for (bool done = false; !done;) {
    JPP_RETURN_IF_ERROR(jpp_channel_try_recv_bytes(process->in, received, &done));
    if (!done) progress(process);
  }
  return NULL;
}

static jpp_status_t* deliver(process_t* process, uint64_t tag, const jpp_shard_t* shards,
                             uint32_t count) {
  for (bool done = false; !done;) {
    JPP_RETURN_IF_ERROR(
        jpp_channel_try_send_bytes(process->out, tag, shards, count, NULL, &done));
    if (!done) progress(process);
  }
  return NULL;
}

static void stop(process_t* process) {
  jpp_channel_close(process->out);
  jpp_channel_close(process->in);
  jpp_transport_destroy(process->transport);
}

// --- Process 1 ------------------------------------------------------------------------

// Sends back what it gets, from the slot that it is in.
static jpp_status_t* echo(process_t* process) {
  for (uint32_t returned = 0;; ++returned) {
    jpp_received_t received;
    jpp_shard_t shards[2];
    JPP_RETURN_IF_ERROR(receive(process, &received));
    if (received.tag == kEnd) return NULL;
    for (uint32_t i = 0; i < received.count; ++i) {
      shards[i] = (jpp_shard_t){.data = received.data[i], .size = received.sizes[i]};
    }
    JPP_RETURN_IF_ERROR(deliver(process, received.tag, shards, received.count));
    while (process->finished <= returned) progress(process);
    jpp_channel_release(process->in, received.slot);
  }
}

static jpp_status_t* run_peer(process_t* process, const char* role) {
  bool stranger = !strcmp(role, "stranger");
  JPP_RETURN_IF_ERROR(start(process, 1, stranger ? "the token of another" : kPairToken));
  if (!strcmp(role, "mute")) pause();
  JPP_RETURN_IF_ERROR(warm_up(process));
  if (!strcmp(role, "echo")) return echo(process);
  if (!strcmp(role, "quit")) return NULL;
  write_all(process->socket, "", 1);  // warm: to be killed
  for (;;) progress(process);
}

static int peer_main(const char* role, int socket) {
  process_t process = {.socket = socket};
  jpp_status_t* status = run_peer(&process, role);
  if (status) fprintf(stderr, "process 1: %s\n", jpp_status_message(status));
  stop(&process);
  int code = jpp_status_code(status) == JPP_OK           ? 0
             : jpp_status_code(status) == JPP_PEER_ERROR ? 3
                                                         : 4;
  jpp_status_free(status);
  return code;
}

// --- Process 0 ------------------------------------------------------------------------

static void spawn(process_t* process, const char* role) {
  int sockets[2];
  char number[16];
  *process = (process_t){0};
  assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, sockets), 0);
  snprintf(number, sizeof(number), "%d", sockets[1]);
  process->peer = fork();
  assert_true(process->peer >= 0);
  if (process->peer == 0) {
    close(sockets[0]);
    execl("/proc/self/exe", "peer", role, number, (char*)NULL);
    _exit(9);
  }
  close(sockets[1]);
  process->socket = sockets[0];
}

static void expect_exit(process_t* process, int expected) {
  int state = 0;
  close(process->socket);
  assert_int_equal(waitpid(process->peer, &state, 0), process->peer);
  assert_true(WIFEXITED(state));
  assert_int_equal(WEXITSTATUS(state), expected);
}

static void test_messages_of_all_sizes_go_there_and_back(void** state) {
  (void)state;
  process_t process;
  char* data = malloc(kMostBytes);
  spawn(&process, "echo");
  ASSERT_OK(start(&process, 0, kPairToken));
  ASSERT_OK(warm_up(&process));
  for (uint64_t i = 0; i < kMessages; ++i) {
    jpp_received_t received;
    size_t size = i < 30 ? i * i * i * i % kMostBytes : (size_t)kMostBytes >> (i % 20);
    jpp_shard_t shards[2] = {{.data = data, .size = size},
                             {.data = "abc", .size = i % 4}};
    pair_fill(data, size, i);
    ASSERT_OK(deliver(&process, i, shards, 2));
    ASSERT_OK(receive(&process, &received));
    assert_int_equal(received.tag, i);
    assert_int_equal(received.count, 2);
    assert_int_equal(received.sizes[0], size);
    assert_true(pair_is_filled(received.data[0], size, i));
    assert_int_equal(received.sizes[1], i % 4);
    assert_memory_equal(received.data[1], "abc", i % 4);
    jpp_channel_release(process.in, received.slot);
    while (process.finished <= i) progress(&process);
  }
  ASSERT_OK(deliver(&process, kEnd, NULL, 0));
  stop(&process);
  expect_exit(&process, 0);
  free(data);
}

// Whether this process has the socket with the inode.
static bool has_socket(unsigned long inode) {
  char path[64], expected[64], found[64];
  snprintf(expected, sizeof(expected), "socket:[%lu]", inode);
  for (int descriptor = 0; descriptor < 1024; ++descriptor) {
    snprintf(path, sizeof(path), "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(path, found, sizeof(found) - 1);
    if (length <= 0) continue;
    found[length] = 0;
    if (!strcmp(found, expected)) return true;
  }
  return false;
}

// Counts this process' TCP sockets that listen, by the kernel's list of all (state 0A);
// and those of them that do so at all addresses.
static void count_listeners(int* out_all, int* out_everywhere) {
  static const char* const kTables[] = {"/proc/self/net/tcp", "/proc/self/net/tcp6"};
  *out_all = *out_everywhere = 0;
  for (int i = 0; i < 2; ++i) {
    char line[512], address[64];
    unsigned state;
    unsigned long inode;
    FILE* file = fopen(kTables[i], "r");
    while (file && fgets(line, sizeof(line), file)) {
      if (sscanf(line, "%*d: %63[0-9A-F]:%*x %*[0-9A-F]:%*x %x %*s %*s %*s %*u %*u %lu",
                 address, &state, &inode) != 3 ||
          state != 0x0a || !has_socket(inode)) {
        continue;
      }
      ++*out_all;
      *out_everywhere += strspn(address, "0") == strlen(address);
    }
    if (file) fclose(file);
  }
}

static void test_it_listens_at_the_given_address_only(void** state) {
  (void)state;
  int all = 0, everywhere = 0;
  jpp_transport_t* transport = NULL;
  jpp_transport_options_t options = pair_options("ucx", 0, 100);
  ASSERT_OK(jpp_transport_create(&options, &transport));
  count_listeners(&all, &everywhere);
  assert_true(all > 0);
  assert_int_equal(everywhere, 0);
  jpp_transport_destroy(transport);
  options.address = "192.0.2.199";
  ASSERT_FAILS(jpp_transport_create(&options, &transport), JPP_INVALID_ARGUMENT,
               "expected an address of this host");
}

// The first bytes of some functions of libc.
typedef struct code {
  char bytes[4][16];
} code_t;

static code_t read_code(void) {
  static const char* const kNames[] = {"mmap", "munmap", "mremap", "madvise"};
  code_t code = {0};
  void* libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
  for (int i = 0; i < 4; ++i) {
    const void* function = dlsym(libc, kNames[i]);
    if (function) memcpy(code.bytes[i], function, sizeof(code.bytes[i]));
  }
  return code;
}

static code_t g_code;  // before UCX was loaded

// UCX would overwrite it under the feet of other threads.
static void test_libc_keeps_its_code(void** state) {
  (void)state;
  const code_t empty = {0}, code = read_code();
  assert_memory_not_equal(&g_code, &empty, sizeof(code));
  assert_memory_equal(&g_code, &code, sizeof(code));
}

static void test_a_stranger_is_refused_by_both(void** state) {
  (void)state;
  process_t process;
  spawn(&process, "stranger");
  ASSERT_FAILS(start(&process, 0, kPairToken), JPP_PEER_ERROR,
               "process 1: its address was not made with this job's token");
  stop(&process);
  expect_exit(&process, 3);
}

// While a message is under way, before any, and with full slots: the survivor hears of it
// within a time that the timeout bounds.
static void test_a_killed_peer_is_an_error_in_bounded_time(void** state) {
  (void)state;
  static char data[kMostBytes];
  for (uint32_t sends = 0; sends < 4; ++sends) {
    process_t process;
    char ready = 0;
    spawn(&process, "killed");
    ASSERT_OK(start(&process, 0, kPairToken));
    ASSERT_OK(warm_up(&process));
    assert_true(read_all(process.socket, &ready, 1));
    jpp_shard_t shard = {.data = data, .size = sizeof(data)};
    for (uint32_t i = 0; i < sends && i < kSlots; ++i) {
      ASSERT_OK(deliver(&process, i, &shard, 1));
    }
    kill(process.peer, SIGKILL);
    waitpid(process.peer, NULL, 0);
    jpp_received_t received;
    jpp_status_t* status = NULL;
    int64_t until = jpp__clock_now_ms() + 60000;
    bool done = false;
    while (!status && jpp__clock_now_ms() < until) {
      progress(&process);
      status = sends % 2
                   ? jpp_channel_try_recv_bytes(process.in, &received, &done)
                   : jpp_channel_try_send_bytes(process.out, 9, NULL, 0, NULL, &done);
    }
    ASSERT_FAILS(status, JPP_PEER_ERROR, "process 1 at 127.0.0.1 (host ");
    close(process.socket);
    stop(&process);
  }
}

static void test_a_peer_that_quits_is_named(void** state) {
  (void)state;
  process_t process;
  jpp_received_t received;
  spawn(&process, "quit");
  ASSERT_OK(start(&process, 0, kPairToken));
  ASSERT_OK(warm_up(&process));
  ASSERT_FAILS(receive(&process, &received), JPP_PEER_ERROR, "has left the job");
  stop(&process);
  expect_exit(&process, 0);
}

static void test_warm_up_of_a_mute_peer_ends(void** state) {
  (void)state;
  process_t process;
  spawn(&process, "mute");
  ASSERT_OK(start(&process, 0, kPairToken));
  ASSERT_FAILS(warm_up(&process), JPP_PEER_ERROR, "has not warmed up within 4000 ms");
  kill(process.peer, SIGKILL);
  waitpid(process.peer, NULL, 0);
  close(process.socket);
  stop(&process);
}

int main(int argc, char** argv) {
  if (argc == 3) return peer_main(argv[1], atoi(argv[2]));
  jpp_transport_t* transport = NULL;
  jpp_transport_options_t options = pair_options("ucx", 0, 1);
  g_code = read_code();
  jpp_status_t* status = jpp_transport_create(&options, &transport);
  if (jpp_status_code(status) == JPP_UNSUPPORTED) {
    printf("1..0 # SKIP %s\n", jpp_status_message(status));
    jpp_status_free(status);
    return 0;
  }
  jpp_transport_destroy(transport);
  const struct CMUnitTest tests[] = {
      cmocka_unit_test(test_messages_of_all_sizes_go_there_and_back),
      cmocka_unit_test(test_it_listens_at_the_given_address_only),
      cmocka_unit_test(test_libc_keeps_its_code),
      cmocka_unit_test(test_a_stranger_is_refused_by_both),
      cmocka_unit_test(test_a_killed_peer_is_an_error_in_bounded_time),
      cmocka_unit_test(test_a_peer_that_quits_is_named),
      cmocka_unit_test(test_warm_up_of_a_mute_peer_ends),
  };
  return cmocka_run_group_tests_name("transport_processes", tests, NULL, NULL);
}
