// Sockets, frames and proofs.
#include "job/connection.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/sha256.h"

enum { kConnectMs = 10000, kHostSize = 65 };

static jpp_status_t* find_address(const char* address, uint16_t port,
                                  struct addrinfo** out_found) {
  struct addrinfo hints = {.ai_socktype = SOCK_STREAM};
  char service[8];
  snprintf(service, sizeof(service), "%u", port);
  int error = getaddrinfo(address, service, &hints, out_found);
  if (!error) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT,
                         "the address of process 0, '%s', cannot be used: %s", address,
                         gai_strerror(error));
}

static jpp_status_t* socket_error(const char* what, const char* address, uint16_t port) {
  return jpp_status_make(JPP_PEER_ERROR, "%s %s, port %u: %s", what, address, port,
                         strerror(errno));
}

static bool bind_and_listen(int descriptor, const struct addrinfo* where,
                            uint16_t* out_port) {
  struct sockaddr_storage bound;
  socklen_t size = sizeof(bound);
  if (bind(descriptor, where->ai_addr, where->ai_addrlen) < 0) return false;
  if (listen(descriptor, SOMAXCONN) < 0) return false;
  if (getsockname(descriptor, (struct sockaddr*)&bound, &size) < 0) return false;
  *out_port =
      ntohs(bound.ss_family == AF_INET6 ? ((const struct sockaddr_in6*)&bound)->sin6_port
                                        : ((const struct sockaddr_in*)&bound)->sin_port);
  return true;
}

jpp_status_t* jpp__job_listen(const char* address, int* out_descriptor,
                              uint16_t* out_port) {
  struct addrinfo* where = NULL;
  *out_descriptor = -1;
  *out_port = 0;
  JPP_RETURN_IF_ERROR(find_address(address, 0, &where));
  int descriptor =
      socket(where->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  jpp_status_t* status = NULL;
  if (descriptor < 0 || !bind_and_listen(descriptor, where, out_port)) {
    status = socket_error("process 0 cannot listen at", address, 0);
    if (descriptor >= 0) close(descriptor);
  } else {
    *out_descriptor = descriptor;
  }
  freeaddrinfo(where);
  return status;
}

// Otherwise the system holds a frame back until the one before it is acknowledged, and
// the last frame of a process that ends is lost.
static void send_frames_at_once(int descriptor) {
  setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
}

static bool finish_connecting(int descriptor) {
  struct pollfd poll_one = {.fd = descriptor, .events = POLLOUT};
  int error = ETIMEDOUT;
  socklen_t size = sizeof(error);
  if (poll(&poll_one, 1, kConnectMs) == 1) {
    getsockopt(descriptor, SOL_SOCKET, SO_ERROR, &error, &size);
  }
  errno = error;
  return !error;
}

jpp_status_t* jpp__job_connect(const char* address, uint16_t port,
                               jpp_job_connection_t* out_connection) {
  struct addrinfo* where = NULL;
  *out_connection = (jpp_job_connection_t){.descriptor = -1};
  JPP_RETURN_IF_ERROR(find_address(address, port, &where));
  int descriptor =
      socket(where->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  bool connected =
      descriptor >= 0 && (connect(descriptor, where->ai_addr, where->ai_addrlen) == 0 ||
                          (errno == EINPROGRESS && finish_connecting(descriptor)));
  jpp_status_t* status =
      connected ? NULL : socket_error("cannot connect to process 0 at", address, port);
  freeaddrinfo(where);
  if (status) {
    if (descriptor >= 0) close(descriptor);
    return status;
  }
  send_frames_at_once(descriptor);
  out_connection->descriptor = descriptor;
  snprintf(out_connection->name, sizeof(out_connection->name), "%s", address);
  return NULL;
}

bool jpp__job_accept(int listener, int64_t now_ms, jpp_job_connection_t* out_connection) {
  struct sockaddr_storage from;
  socklen_t size = sizeof(from);
  int descriptor =
      accept4(listener, (struct sockaddr*)&from, &size, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (descriptor < 0) return false;
  send_frames_at_once(descriptor);
  *out_connection = (jpp_job_connection_t){
      .descriptor = descriptor, .process = kJppJobUnknown, .heard_ms = now_ms};
  getnameinfo((struct sockaddr*)&from, size, out_connection->name,
              sizeof(out_connection->name), NULL, 0, NI_NUMERICHOST);
  if (getrandom(out_connection->nonce, kJppJobNonce, 0) != kJppJobNonce) {
    jpp__job_close(out_connection);
    return false;
  }
  jpp_job_frame_t frame = {.kind = JPP_JOB_NONCE};
  memcpy(frame.text, out_connection->nonce, kJppJobNonce);
  if (send(descriptor, &frame, sizeof(frame), MSG_NOSIGNAL) == sizeof(frame)) return true;
  jpp__job_close(out_connection);
  return false;
}

// --- Proofs ---------------------------------------------------------------------------

static void compute_proof(const uint8_t nonce[kJppJobNonce], int32_t process,
                          jpp_job_secret_t secret, uint8_t out_proof[kJppSha256Size]) {
  uint8_t text[kJppJobNonce + sizeof(process)];
  memcpy(text, nonce, kJppJobNonce);
  memcpy(text + kJppJobNonce, &process, sizeof(process));
  jpp__hmac_sha256(secret.bytes, secret.size, text, sizeof(text), out_proof);
}

void jpp__job_name_self(char* out_text, size_t size) {
  char host[kHostSize] = "";
  gethostname(host, sizeof(host) - 1);
  snprintf(out_text, size, "host %s, process id %d", host, (int)getpid());
}

void jpp__job_answer(jpp_job_connection_t* connection, jpp_job_secret_t secret,
                     int32_t process) {
  jpp_job_frame_t frame = {.kind = JPP_JOB_HELLO, .process = process};
  compute_proof((const uint8_t*)connection->frame.text, process, secret,
                (uint8_t*)frame.text);
  jpp__job_name_self(frame.text + kJppSha256Size, sizeof(frame.text) - kJppSha256Size);
  (void)!send(connection->descriptor, &frame, sizeof(frame), MSG_NOSIGNAL);
}

bool jpp__job_check_answer(jpp_job_connection_t* connection, jpp_job_secret_t secret) {
  const jpp_job_frame_t* frame = &connection->frame;
  uint8_t proof[kJppSha256Size];
  compute_proof(connection->nonce, frame->process, secret, proof);
  if (frame->kind != JPP_JOB_HELLO ||
      !jpp__bytes_equal_in_constant_time(proof, frame->text, sizeof(proof))) {
    return false;
  }
  connection->process = frame->process;
  size_t length = strlen(connection->name);
  snprintf(connection->name + length, sizeof(connection->name) - length, " (%.128s)",
           frame->text + kJppSha256Size);
  return true;
}

// --- Frames ---------------------------------------------------------------------------

void jpp__job_send(const jpp_job_connection_t* connection, jpp_job_kind_t kind,
                   int32_t process, const char* text) {
  jpp_job_frame_t frame = {.kind = kind, .process = process};
  snprintf(frame.text, sizeof(frame.text), "%s", text);
  if (connection->descriptor < 0) return;
  ssize_t sent = send(connection->descriptor, &frame, sizeof(frame), MSG_NOSIGNAL);
  // After half a frame, the next frame could not be recognised.
  if (sent > 0 && sent < (ssize_t)sizeof(frame)) {
    shutdown(connection->descriptor, SHUT_RDWR);
  }
}

jpp_job_arrival_t jpp__job_receive(jpp_job_connection_t* connection, int64_t now_ms) {
  jpp_job_frame_t* frame = &connection->frame;
  if (connection->received == sizeof(*frame)) connection->received = 0;
  ssize_t count = recv(connection->descriptor, (char*)frame + connection->received,
                       sizeof(*frame) - connection->received, 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return JPP_JOB_NOTHING;
  if (count <= 0) return JPP_JOB_LOST;
  connection->heard_ms = now_ms;
  connection->received += (size_t)count;
  if (connection->received < sizeof(*frame)) return JPP_JOB_NOTHING;
  frame->text[kJppJobText - 1] = 0;
  return JPP_JOB_FRAME;
}

void jpp__job_close(jpp_job_connection_t* connection) {
  if (connection->descriptor >= 0) close(connection->descriptor);
  connection->descriptor = -1;
}
