// The file of a flight recorder: a head, a row for each rank of the process, the rows'
// instructions and last notes, and texts. Everything is laid out when the file is
// created; afterwards the process only stores to mapped memory, which the kernel writes
// back. Therefore the file of a killed process is as complete as any other.
//
// Numbers have the byte order of the writing machine, which kJppFlightMagic reveals.
#ifndef JPP_FLIGHT_FORMAT_H_
#define JPP_FLIGHT_FORMAT_H_

#include <stdint.h>

#define kJppFlightMagic UINT64_C(0x3159414c46505001)

enum { kJppFlightNotes = 64, kJppFlightHost = 64, kJppFlightFailure = 1000 };

typedef struct jpp_flight_head {
  uint64_t magic;
  uint64_t size;     // size of the file
  int64_t realtime;  // added to a time of this file, gives CLOCK_REALTIME; nanoseconds
  int64_t begun;     // when the file was created; times are CLOCK_MONOTONIC, nanoseconds
  uint32_t process;  // number of the process in the job
  uint32_t pid;
  uint32_t runtime;   // counts the runtimes of its process, from 0
  uint32_t num_rows;  // ranks of this process
  uint64_t texts_size;
  char host[kJppFlightHost];  // NUL-ended
  // The fields from here on change.
  int64_t alive;                    // when a thread of the runtime was last active
  uint64_t submitted, finished;     // steps that were called, and steps that are done
  int64_t ended;                    // when the runtime was destroyed; 0: it was not
  int64_t failed;                   // when the job failed; 0: it did not
  char failure[kJppFlightFailure];  // NUL-ended
} jpp_flight_head_t;

// The part of an instruction that involves another rank.
typedef enum jpp_flight_kind {
  JPP_FLIGHT_LOCAL,
  JPP_FLIGHT_SEND,
  JPP_FLIGHT_RECV,
} jpp_flight_kind_t;

typedef struct jpp_flight_instr {
  uint32_t kind;  // jpp_flight_kind_t
  // SEND, RECV: the other rank, the channel between them and its slots, and numbers that
  // distinguish the message from others of a step; the same at both ends.
  uint32_t peer;
  uint32_t channel;
  uint32_t slots;
  uint64_t tag;
  uint64_t text;  // offset in the texts
} jpp_flight_instr_t;

typedef struct jpp__flight_note {
  int64_t time;
  uint64_t step;
  uint32_t instr;
  uint32_t unused;
} jpp_flight_note_t;

// A rank. Note n is in notes[n % kJppFlightNotes] and is complete once `count` > n.
typedef struct jpp_flight_row {
  uint32_t rank;
  uint32_t num_instrs;
  uint32_t first_instr;  // index among the instructions of all rows
  uint32_t at;           // the next instruction; num_instrs: all are issued
  uint64_t step;         // from 1; 0: none yet
  uint64_t count;
  jpp_flight_note_t notes[kJppFlightNotes];
} jpp_flight_row_t;

// After the head: rows, instructions, texts.

#endif  // JPP_FLIGHT_FORMAT_H_
