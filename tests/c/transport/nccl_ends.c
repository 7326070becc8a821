// Two ends that send each other device memory over the transport nccl, in both directions
// at once, and compare what they receive.
//
//   nccl_ends            threads of this process, for the stub
//   nccl_ends processes  two processes on one GPU, with the real NCCL
//   nccl_ends dies       the same, and the second one is killed while it receives
//
// NCCL refuses two ranks on one GPU unless it takes them to be on two hosts, which
// NCCL_HOSTID makes it believe; they then go through sockets. This shows that the driver
// works with the real library, and says nothing about speed.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "jaxpp/transport.h"
#include "transport/nccl.h"

enum {
  kHostBytes = 64,
  kMostBytes = 2 << 20,
  kSlots = 3,
  kRounds = 24,
  kLimitMs = 60000
};
static const char kToken[] = "a token of the tests";

typedef struct end {
  int socket;  // to the other end
  uint32_t self;
  bool dies, expects_death;
  jpp_transport_t* transport;
  jpp_channel_t *out, *in;
  char* memory[kSlots];  // device memory to send from
  bool busy[kSlots];
  uint32_t sent, finished;
  char* host;  // [kMostBytes]
} end_t;

// --- Device memory --------------------------------------------------------------------

typedef jpp_cuda_result_t (*copy_in_t)(jpp_cuda_pointer_t to, const void* from,
                                       size_t size);
typedef jpp_cuda_result_t (*copy_out_t)(void* to, jpp_cuda_pointer_t from, size_t size);

static void* find_cuda(const char* name) {
  const char* path = getenv("JPP_CUDA");
  void* library = dlopen(path ? path : "libcuda.so.1", RTLD_NOW);
  return library ? dlsym(library, name) : NULL;
}

static const jpp_nccl_t* nccl_of(const end_t* end) {
  return ((const jpp_net_t*)end->transport)->device_state;
}

static jpp_status_t* copy(const end_t* end, void* device, void* host, size_t size,
                          bool in) {
  const jpp_nccl_t* nccl = nccl_of(end);
  jpp_cuda_context_t context = NULL;
  copy_in_t copy_in = (copy_in_t)find_cuda("cuMemcpyHtoD_v2");
  copy_out_t copy_out = (copy_out_t)find_cuda("cuMemcpyDtoH_v2");
  nccl->library->cuCtxPushCurrent_v2(nccl->context);
  jpp_cuda_pointer_t pointer = (uintptr_t)device;
  jpp_cuda_result_t result =
      in ? copy_in(pointer, host, size) : copy_out(host, pointer, size);
  nccl->library->cuCtxPopCurrent_v2(&context);
  return jpp__cuda_error(nccl->library, result, "cuMemcpy");
}

// --- Messages -------------------------------------------------------------------------

static size_t size_of(uint32_t round) {
  static const size_t kSizes[] = {1, 63, 4096, 100001, 1 << 20, kMostBytes};
  return kSizes[round % (sizeof(kSizes) / sizeof(*kSizes))];
}

static char byte_of(uint32_t from, uint32_t round, size_t i) {
  return (char)(from * 101 + round * 7 + i * 13 + (i >> 8));
}

static void note_sent(void* user, void* cookie) {
  end_t* end = user;
  end->busy[(uintptr_t)cookie] = false;
  ++end->finished;
}

static jpp_status_t* send_next(end_t* end) {
  uint32_t round = end->sent, slot = round % kSlots;
  bool done = false;
  if (round == kRounds || end->busy[slot] || !jpp_channel_credits(end->out)) return NULL;
  size_t size = size_of(round);
  for (size_t i = 0; i < size; ++i) end->host[i] = byte_of(end->self, round, i);
  JPP_RETURN_IF_ERROR(copy(end, end->memory[slot], end->host, size, true));
  char text[kHostBytes];
  snprintf(text, sizeof(text), "message %u", round);
  jpp_shard_t shards[2] = {{.data = text, .size = sizeof(text)},
                           {.data = end->memory[slot], .size = size}};
  end->busy[slot] = true;
  JPP_RETURN_IF_ERROR(jpp_channel_try_send_bytes(end->out, round, shards, 2,
                                                 (void*)(uintptr_t)slot, &done));
  end->busy[slot] = done;
  end->sent += done;
  return NULL;
}

static jpp_status_t* check_message(end_t* end, const jpp_received_t* received,
                                   uint32_t round) {
  size_t size = size_of(round), wrong = 0;
  if (received->tag != round || received->count != 2 || received->sizes[1] != size) {
    return jpp_status_make(JPP_PEER_ERROR, "round %u: another message came", round);
  }
  JPP_RETURN_IF_ERROR(copy(end, received->data[1], end->host, size, false));
  for (size_t i = 0; i < size; ++i) {
    wrong += end->host[i] != byte_of(1 - end->self, round, i);
  }
  if (!wrong) return NULL;
  return jpp_status_make(JPP_PEER_ERROR, "round %u: %zu of %zu bytes are wrong", round,
                         wrong, size);
}

static jpp_status_t* exchange_messages(end_t* end) {
  int64_t until = jpp__clock_now_ms() + kLimitMs;
  uint32_t received = 0;
  while (received < kRounds || end->finished < kRounds) {
    bool some = false, done = false;
    jpp_received_t message;
    JPP_RETURN_IF_ERROR(send_next(end));
    jpp_transport_progress(end->transport, &some);
    if (end->dies && received == kRounds / 2) raise(SIGKILL);
    if (jpp__clock_now_ms() > until) {
      return jpp_status_make(JPP_PEER_ERROR, "%u of %d messages came, %u of %u were sent",
                             received, kRounds, end->finished, end->sent);
    }
    if (received == kRounds) continue;
    JPP_RETURN_IF_ERROR(jpp_channel_try_recv_bytes(end->in, &message, &done));
    if (!done) continue;
    JPP_RETURN_IF_ERROR(check_message(end, &message, received++));
    jpp_channel_release(end->in, message.slot);
  }
  return NULL;
}

// --- An end ---------------------------------------------------------------------------

static jpp_status_t* connect_end(end_t* end) {
  const void* address = NULL;
  size_t size = 0, peer_size = 0;
  char* peer = malloc(kJppMostAddressSize);
  jpp_transport_address(end->transport, &address, &size);
  bool done = write(end->socket, &size, sizeof(size)) == (ssize_t)sizeof(size) &&
              write(end->socket, address, size) == (ssize_t)size &&
              recv(end->socket, &peer_size, sizeof(peer_size), MSG_WAITALL) ==
                  (ssize_t)sizeof(peer_size) &&
              peer_size <= kJppMostAddressSize &&
              recv(end->socket, peer, peer_size, MSG_WAITALL) == (ssize_t)peer_size;
  jpp_status_t* status =
      done ? jpp_transport_connect(end->transport, 1 - end->self, peer, peer_size)
           : jpp_status_make(JPP_INTERNAL_ERROR, "no address came");
  free(peer);
  return status;
}

static jpp_status_t* open_way(end_t* end, uint32_t from, jpp_channel_t** out_channel) {
  static const uint64_t kBytes[2] = {kHostBytes, kMostBytes};
  static const bool kOnDevice[2] = {false, true};
  jpp_channel_spec_t spec = {.struct_size = sizeof(spec),
                             .id = from,
                             .src_actor = from,
                             .dst_actor = 1 - from,
                             .src_process = from,
                             .dst_process = 1 - from,
                             .slots = kSlots,
                             .capacity = 2,
                             .bytes = kBytes,
                             .on_device = kOnDevice,
                             .sent = note_sent,
                             .user = end};
  return jpp_transport_open_channel(end->transport, &spec, out_channel);
}

static jpp_status_t* open_end(end_t* end) {
  jpp_transport_options_t options = {.struct_size = sizeof(options),
                                     .driver = "nccl",
                                     .process = end->self,
                                     .num_processes = 2,
                                     .address = "127.0.0.1",
                                     .token = kToken,
                                     .token_size = sizeof(kToken),
                                     .peer_timeout_ms = 20000};
  JPP_RETURN_IF_ERROR(jpp_transport_create(&options, &end->transport));
  JPP_RETURN_IF_ERROR(connect_end(end));
  JPP_RETURN_IF_ERROR(open_way(end, end->self, &end->out));
  JPP_RETURN_IF_ERROR(open_way(end, 1 - end->self, &end->in));
  jpp_net_t* net = (jpp_net_t*)end->transport;
  for (int i = 0; i < kSlots; ++i) {
    JPP_RETURN_IF_ERROR(net->device->allocate(net, kMostBytes, (void**)&end->memory[i]));
  }
  for (bool out = false, in = false; !out || !in;) {
    bool some = false;
    if (!out) JPP_RETURN_IF_ERROR(jpp_channel_warm_up(end->out, &out));
    if (!in) JPP_RETURN_IF_ERROR(jpp_channel_warm_up(end->in, &in));
    jpp_transport_progress(end->transport, &some);
  }
  return NULL;
}

static int report(const end_t* end, jpp_status_t* status, int64_t since) {
  char version[kJppNcclVersionSize] = "none";
  bool died = jpp_status_code(status) == JPP_PEER_ERROR && end->expects_death;
  if (end->transport) jpp__nccl_version_text(nccl_of(end)->library->version, version);
  printf("# end %u, NCCL %s, %lld ms: %u messages sent; %s\n", end->self, version,
         (long long)(jpp__clock_now_ms() - since), end->sent,
         status ? jpp_status_message(status) : "all came as they were sent");
  bool failed = end->expects_death ? !died : status != NULL;
  jpp_status_free(status);
  return failed;
}

static int run_end(end_t* end) {
  int64_t since = jpp__clock_now_ms();
  end->host = malloc(kMostBytes);
  jpp_status_t* status = open_end(end);
  if (!status) status = exchange_messages(end);
  int failed = report(end, status, since);
  jpp_channel_close(end->out);
  jpp_channel_close(end->in);
  jpp_transport_destroy(end->transport);
  if (end->finished != end->sent) failed = 1;
  free(end->host);
  close(end->socket);
  fflush(stdout);
  return failed;
}

static void* run_thread(void* end) { return (void*)(intptr_t)run_end(end); }

static int run_threads(end_t ends[2]) {
  pthread_t thread;
  void* other = NULL;
  if (pthread_create(&thread, NULL, run_thread, &ends[1])) return 1;
  int failed = run_end(&ends[0]);
  pthread_join(thread, &other);
  return failed || other;
}

static int run_processes(end_t ends[2]) {
  int other = 0;
  pid_t pid = fork();
  bool second = pid == 0;
  setenv("NCCL_HOSTID", second ? "second" : "first", 1);
  close(ends[!second].socket);
  if (second) exit(run_end(&ends[1]));
  int failed = run_end(&ends[0]);
  waitpid(pid, &other, 0);
  bool killed = WIFSIGNALED(other) && WTERMSIG(other) == SIGKILL;
  return failed || (ends[1].dies ? !killed : other != 0);
}

int main(int argc, char** argv) {
  int sockets[2];
  const char* how = argc > 1 ? argv[1] : "threads";
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) return 1;
  bool dies = !strcmp(how, "dies");
  end_t ends[2] = {{.socket = sockets[0], .expects_death = dies},
                   {.socket = sockets[1], .self = 1, .dies = dies}};
  int failed = !strcmp(how, "threads") ? run_threads(ends) : run_processes(ends);
  printf("1..1\n%s 1 - two ends of nccl as %s\n", failed ? "not ok" : "ok", how);
  return failed;
}
