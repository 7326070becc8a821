// The cost of the transport compared with UCX itself: alternates the same sends between
// two processes with jaxpp/transport.h and with a bare loop over UCX's tag calls. The
// bare loop does what ucx_perftest does (tests tag_bw and tag_lat), with the library that
// the transport uses.
//
//   bench_transport [ADDRESS [any]]     (127.0.0.1)
//
// The bare loop also asks UCX to report dead peers, so that both take the same route;
// with `any` it takes the fastest route without that.
//
// Prints a line per size: MB/s and the ratio to the bare loop for large messages,
// microseconds one way and the ratio for small ones; each the best of its rounds, because
// the machine may have other work.
#include "jaxpp/transport.h"

#include <math.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "transport/ucx_library.h"

enum { kRounds = 25, kWindow = 4, kMostAddress = 64 << 10 };
static const char kToken[] = "a token of the benchmark";

typedef struct size_row {
  size_t bytes;
  int messages;
  bool latency;
} size_row_t;

static const size_row_t kSizes[] = {{8, 1000, true},
                                    {1024, 1000, true},
                                    {1 << 20, 100, false},
                                    {16 << 20, 12, false},
                                    {64 << 20, 6, false}};
enum { kSizeCount = sizeof(kSizes) / sizeof(*kSizes), kMostBytes = 64 << 20 };

typedef struct process {
  uint32_t self;
  int socket;
  bool any_route;  // for the bare loop
  char* data;      // kWindow * kMostBytes
  // Ours
  jpp_transport_t* transport;
  jpp_channel_t *out, *in;
  int finished;
  // Bare
  const jpp_ucx_t* ucx;
  ucp_context_h context;
  ucp_worker_h worker;
  ucp_ep_h endpoint;
} process_t;

static void check(jpp_status_t* status) {
  if (!status) return;
  fprintf(stderr, "%s\n", jpp_status_message(status));
  exit(1);
}

static void check_ucx(const process_t* process, ucs_status_t status) {
  check(jpp__ucx_error(process->ucx, status, "bare UCX"));
}

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static size_t exchange(const process_t* process, const void* mine, size_t size,
                       void* theirs) {
  size_t got = 0, their_size = 0;
  if (write(process->socket, &size, sizeof(size)) != sizeof(size) ||
      write(process->socket, mine, size) != (ssize_t)size ||
      read(process->socket, &their_size, sizeof(their_size)) != sizeof(their_size) ||
      their_size > kMostAddress) {
    exit(1);
  }
  while (got < their_size) {
    ssize_t part = read(process->socket, (char*)theirs + got, their_size - got);
    if (part <= 0) exit(1);
    got += (size_t)part;
  }
  return their_size;
}

// --- Ours -----------------------------------------------------------------------------

static void count_finished(void* user, void* cookie) {
  (void)cookie;
  ++((process_t*)user)->finished;
}

static void progress(const process_t* process) {
  bool some;
  jpp_transport_progress(process->transport, &some);
}

static void open_channel(process_t* process, uint32_t from, jpp_channel_t** out) {
  static const uint64_t kBytes = kMostBytes;
  jpp_channel_spec_t spec = {.struct_size = sizeof(spec),
                             .id = from,
                             .src_process = from,
                             .dst_process = 1 - from,
                             .slots = kWindow,
                             .capacity = 1,
                             .bytes = &kBytes,
                             .sent = count_finished,
                             .user = process};
  check(jpp_transport_open_channel(process->transport, &spec, out));
}

static void start_ours(process_t* process, const char* address) {
  static char peer[kMostAddress];
  jpp_transport_options_t options = {.struct_size = sizeof(options),
                                     .driver = "ucx",
                                     .process = process->self,
                                     .num_processes = 2,
                                     .address = address,
                                     .token = kToken,
                                     .token_size = sizeof(kToken)};
  const void* mine = NULL;
  size_t size = 0;
  check(jpp_transport_create(&options, &process->transport));
  jpp_transport_address(process->transport, &mine, &size);
  size = exchange(process, mine, size, peer);
  check(jpp_transport_connect(process->transport, 1 - process->self, peer, size));
  open_channel(process, process->self, &process->out);
  open_channel(process, 1 - process->self, &process->in);
  for (bool out = false, in = false; !out || !in; progress(process)) {
    if (!out) check(jpp_channel_warm_up(process->out, &out));
    if (!in) check(jpp_channel_warm_up(process->in, &in));
  }
}

static void send_ours(process_t* process, const char* data, size_t size) {
  jpp_shard_t shard = {.data = data, .size = size};
  for (bool done = false; !done;) {
    check(jpp_channel_try_send_bytes(process->out, 0, &shard, 1, NULL, &done));
    if (!done) progress(process);
  }
}

static void receive_ours(process_t* process) {
  jpp_received_t received;
  for (bool done = false; !done;) {
    check(jpp_channel_try_recv_bytes(process->in, &received, &done));
    if (!done) progress(process);
  }
  jpp_channel_release(process->in, received.slot);
}

// Process 0 sends; process 1 answers once at the end, or after each message.
static void run_ours(process_t* process, const size_row_t* row) {
  int first = process->finished;
  for (int i = 0; i < row->messages; ++i) {
    if (process->self == 0) {
      send_ours(process, process->data + (size_t)(i % kWindow) * row->bytes, row->bytes);
      if (row->latency) receive_ours(process);
    } else {
      receive_ours(process);
      if (row->latency) send_ours(process, process->data, row->bytes);
    }
  }
  if (!row->latency && process->self == 0) receive_ours(process);
  if (!row->latency && process->self == 1) send_ours(process, process->data, 0);
  int sent = row->latency ? row->messages : process->self ? 1 : row->messages;
  while (process->finished < first + sent) progress(process);
}

// --- Bare UCX -------------------------------------------------------------------------

static void start_bare(process_t* process, const char* devices) {
  static char peer[kMostAddress];
  const jpp_ucx_t* ucx = process->ucx;
  ucp_config_t* config = NULL;
  ucp_address_t* mine = NULL;
  size_t size = 0;
  check_ucx(process, ucx->ucp_config_read(NULL, NULL, &config));
  check_ucx(process, ucx->ucp_config_modify(config, "NET_DEVICES", devices));
  check_ucx(process, ucx->ucp_config_modify(config, "MM_ERROR_HANDLING",
                                            process->any_route ? "n" : "y"));
  ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                         .features = UCP_FEATURE_TAG};
  check_ucx(process, ucx->ucp_init_version(1, 13, &params, config, &process->context));
  ucx->ucp_config_release(config);
  ucp_worker_params_t worker = {0};
  check_ucx(process, ucx->ucp_worker_create(process->context, &worker, &process->worker));
  check_ucx(process, ucx->ucp_worker_get_address(process->worker, &mine, &size));
  exchange(process, mine, size, peer);
  ucx->ucp_worker_release_address(process->worker, mine);
  ucp_ep_params_t endpoint = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                            UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE,
                              .address = (const ucp_address_t*)peer,
                              .err_mode = process->any_route
                                              ? UCP_ERR_HANDLING_MODE_NONE
                                              : UCP_ERR_HANDLING_MODE_PEER};
  check_ucx(process, ucx->ucp_ep_create(process->worker, &endpoint, &process->endpoint));
}

static void await_bare(const process_t* process, ucs_status_ptr_t request) {
  if (!request) return;
  if (UCS_PTR_IS_ERR(request)) check_ucx(process, UCS_PTR_STATUS(request));
  while (process->ucx->ucp_request_check_status(request) == UCS_INPROGRESS) {
    process->ucx->ucp_worker_progress(process->worker);
  }
  process->ucx->ucp_request_free(request);
}

static ucs_status_ptr_t post_bare(const process_t* process, bool send, char* data,
                                  size_t size) {
  ucp_request_param_t param = {0};
  return send ? process->ucx->ucp_tag_send_nbx(process->endpoint, data, size, 1, &param)
              : process->ucx->ucp_tag_recv_nbx(process->worker, data, size, 1, UINT64_MAX,
                                               &param);
}

static void run_bare(process_t* process, const size_row_t* row) {
  ucs_status_ptr_t requests[kWindow] = {0};
  bool sends = process->self == 0;
  for (int i = 0; i < row->messages; ++i) {
    char* data = process->data + (size_t)(i % kWindow) * row->bytes;
    if (row->latency) {
      await_bare(process, post_bare(process, sends, data, row->bytes));
      await_bare(process, post_bare(process, !sends, data, row->bytes));
      continue;
    }
    await_bare(process, requests[i % kWindow]);
    requests[i % kWindow] = post_bare(process, sends, data, row->bytes);
  }
  for (int i = 0; i < kWindow; ++i) await_bare(process, requests[i]);
  if (!row->latency) await_bare(process, post_bare(process, !sends, process->data, 0));
}

// --- Both -----------------------------------------------------------------------------

static void measure(process_t* process, const size_row_t* row) {
  double a = 1e9, b = 1e9;                          // seconds per message: ours, bare
  for (int round = -1; round < kRounds; ++round) {  // the first one warms up
    double begin = now();
    run_bare(process, row);
    double middle = now();
    run_ours(process, row);
    double end = now();
    if (round < 0) continue;
    b = fmin(b, (middle - begin) / row->messages);
    a = fmin(a, (end - middle) / row->messages);
  }
  if (process->self) return;
  if (row->latency) {
    printf("%8zu bytes  %9.2f us one way   bare UCX %9.2f us    %.2f of its time\n",
           row->bytes, a * 5e5, b * 5e5, a / b);
  } else {
    printf("%8zu MiB    %9.0f MB/s         bare UCX %9.0f MB/s  %.2f of its speed\n",
           row->bytes >> 20, (double)row->bytes / a * 1e-6, (double)row->bytes / b * 1e-6,
           b / a);
  }
  fflush(stdout);
}

static void run_process(process_t* process, const char* address) {
  char* devices = NULL;
  check(jpp__ucx_find_devices(address, &devices));
  check(jpp__ucx_load(devices, &process->ucx));
  if (process->self == 0) {
    printf("UCX %s, at %s\n", process->ucx->ucp_get_version_string(), address);
  }
  process->data = malloc((size_t)kWindow * kMostBytes);
  memset(process->data, 1, (size_t)kWindow * kMostBytes);
  start_bare(process, devices);
  jpp_text_free(devices);
  start_ours(process, address);
  for (int i = 0; i < kSizeCount; ++i) measure(process, &kSizes[i]);
  jpp_channel_close(process->out);
  jpp_channel_close(process->in);
  jpp_transport_destroy(process->transport);
  free(process->data);
}

int main(int argc, char** argv) {
  const char* address = argc > 1 ? argv[1] : "127.0.0.1";
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets)) return 1;
  pid_t child = fork();
  if (child == 0) prctl(PR_SET_PDEATHSIG, SIGKILL);
  process_t process = {
      .self = child == 0, .socket = sockets[child == 0], .any_route = argc > 2};
  run_process(&process, address);
  if (child > 0) waitpid(child, NULL, 0);
  return 0;
}
