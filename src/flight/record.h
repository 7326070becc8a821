// Record: a runtime's side of the flight recorder.
//
// Threads: a row belongs to the thread that issues for its rank; `alive` belongs to the
// thread that drives the network. Any thread may call failed() and finished().
#ifndef JPP_FLIGHT_RECORD_H_
#define JPP_FLIGHT_RECORD_H_

#include "base/clock.h"
#include "base/str.h"
#include "flight/format.h"
#include "jaxpp/status.h"

typedef struct jpp_flight {
  jpp_flight_head_t* head;  // NULL: not recording
  jpp_flight_row_t* rows;
} jpp_flight_t;

// A rank's description for the recorder; `texts` has one line for each instruction.
typedef struct jpp_flight_rank {
  uint32_t rank;
  uint32_t num_instrs;
  const jpp_flight_instr_t* instrs;  // [num_instrs] `text` is an offset in `texts`
} jpp_flight_rank_t;

// Creates the file of this process' next runtime in the folder, and the folder if needed.
// `texts`: NUL-ended, one after another. JPP_INVALID_ARGUMENT if it cannot be created.
jpp_status_t* jpp__flight_open(const char* folder, uint32_t process,
                               const jpp_flight_rank_t* ranks, uint32_t num_ranks,
                               const char* texts, size_t texts_size,
                               jpp_flight_t* out_flight) JPP_MUST_USE;
// Does not remove the file.
void jpp__flight_close(jpp_flight_t* flight);

void jpp__flight_failed(const jpp_flight_t* flight, const jpp_status_t* status);

static inline void jpp__flight_alive(const jpp_flight_t* flight) {
  if (flight->head) flight->head->alive = jpp__clock_now();
}

// Call it between the reservation of a step and its submission, one caller at a time.
static inline void jpp__flight_submitted(const jpp_flight_t* flight) {
  if (flight->head) ++flight->head->submitted;
}

static inline void jpp__flight_finished(const jpp_flight_t* flight, uint64_t steps) {
  if (flight->head) flight->head->finished = steps;
}

static inline void jpp__flight_begin(jpp_flight_row_t* row, uint64_t step) {
  row->at = 0;
  row->step = step;
}

// Records that `instr` is issued.
static inline void jpp__flight_note(jpp_flight_row_t* row, uint32_t instr) {
  jpp_flight_note_t* note = &row->notes[row->count % kJppFlightNotes];
  note->time = jpp__clock_now();
  note->step = row->step;
  note->instr = instr;
  ++row->count;
  row->at = instr + 1;
}

#endif  // JPP_FLIGHT_RECORD_H_
