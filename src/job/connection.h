// Connection: frames of one size between a process and process 0, over TCP, in order.
//
// Process 0 first sends a random number. It reads nothing except the answer, until the
// answer has proved that its sender knows the job's token.
#ifndef JPP_JOB_CONNECTION_H_
#define JPP_JOB_CONNECTION_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "jaxpp/status.h"

enum {
  kJppJobText = 504,  // bytes of a frame's text, including the NUL
  kJppJobNonce = 32,
  kJppJobUnknown = -1  // not the number of a process
};

typedef enum jpp_job_kind {
  // Process 0's first frame; `text` is the random number.
  JPP_JOB_NONCE = 0x4a505031,
  // The answer; `text` is the proof, followed by the sender's name.
  JPP_JOB_HELLO,
  JPP_JOB_WELCOME,  // `text` is process 0's name
  JPP_JOB_BEAT,
  JPP_JOB_FAILED,    // the sender reports that `process` has failed
  JPP_JOB_VERDICT,   // process 0 reports that `process` failed first
  JPP_JOB_LEAVES,    // the sender no longer needs the others
  JPP_JOB_ALL_LEFT,  // from process 0; the others send it back
} jpp_job_kind_t;

typedef struct jpp_job_frame {
  uint32_t kind;
  int32_t process;
  char text[kJppJobText];
} jpp_job_frame_t;

typedef struct jpp_job_connection {
  int descriptor;    // -1: closed
  int32_t process;   // the process at the other end; kJppJobUnknown until it is proved
  int64_t heard_ms;  // when data last arrived
  bool leaves;       // it has announced that it leaves
  bool knows;        // both ends know that all processes have left
  char name[256];    // "10.0.0.2 (host node2, process id 2179)"
  uint8_t nonce[kJppJobNonce];
  jpp_job_frame_t frame;  // the frame that is being received
  size_t received;        // bytes of it that have arrived
} jpp_job_connection_t;

typedef struct jpp_job_secret {
  const void* bytes;
  size_t size;
} jpp_job_secret_t;

// Opens a socket that listens at the address, on a port that the system chooses.
jpp_status_t* jpp__job_listen(const char* address, int* out_descriptor,
                              uint16_t* out_port) JPP_MUST_USE;
// Connects to process 0, for ten seconds at most.
jpp_status_t* jpp__job_connect(const char* address, uint16_t port,
                               jpp_job_connection_t* out_connection) JPP_MUST_USE;
// Accepts a new connection and sends the random number. Returns false if there was none.
bool jpp__job_accept(int listener, int64_t now_ms, jpp_job_connection_t* out_connection);
// Answers the random number, as `process`.
void jpp__job_answer(jpp_job_connection_t* connection, jpp_job_secret_t secret,
                     int32_t process);
// Whether a frame is a valid answer; if so, the connection gets the process's number.
bool jpp__job_check_answer(jpp_job_connection_t* connection, jpp_job_secret_t secret);
// Writes "host node2, process id 2179" for this process.
void jpp__job_name_self(char* out_text, size_t size);

// Does not wait: a process that stops reading is detected by its silence.
void jpp__job_send(const jpp_job_connection_t* connection, jpp_job_kind_t kind,
                   int32_t process, const char* text);
typedef enum jpp_job_arrival {
  JPP_JOB_NOTHING,
  JPP_JOB_FRAME,
  JPP_JOB_LOST
} jpp_job_arrival_t;
// Reads the available part of the next frame; JPP_JOB_FRAME: `frame` is complete.
jpp_job_arrival_t jpp__job_receive(jpp_job_connection_t* connection, int64_t now_ms);
void jpp__job_close(jpp_job_connection_t* connection);

#endif  // JPP_JOB_CONNECTION_H_
