// The state of arrays, for what runs steps.
//
// One lock guards what changes in all arrays and outcomes of the process: it is held for
// a few instructions at a time, and a step claims many arrays at once.
#ifndef JPP_ARRAY_ARRAY_H_
#define JPP_ARRAY_ARRAY_H_

#include "jaxpp/array.h"

//===-- Outcomes -------------------------------------------------------------------===//

// How a step went, as its results know it. All fields are under the lock.
typedef struct jpp_outcome {
  const void* runtime;  // whose step it is; an identity, not to be used
  uint32_t holders;
  bool issued;    // the results have buffers, unless it failed
  bool finished;  // and all is done
  bool told;      // a caller has been given the failure
  jpp_status_t* failure;
  struct jpp_outcome* cause;  // held: whose failure it is, if an argument had failed
} jpp_outcome_t;

// Held once.
jpp_status_t* jpp__outcome_create(const void* runtime,
                                  jpp_outcome_t** out_outcome) JPP_MUST_USE;
// These two take the lock themselves.
void jpp__outcome_hold(jpp_outcome_t* outcome);
void jpp__outcome_release(jpp_outcome_t* outcome);  // takes NULL
void jpp__outcome_set_issued(jpp_outcome_t* outcome);
// Owns `failure`, which may be NULL.
void jpp__outcome_finish(jpp_outcome_t* outcome, jpp_status_t* failure);
// A copy of the failure for a caller who will see it, or NULL. Takes NULL.
jpp_status_t* jpp__outcome_tell(jpp_outcome_t* outcome) JPP_MUST_USE;

//===-- Arrays ---------------------------------------------------------------------===//

// What an array holds, to compare with what a plan wants.
typedef struct jpp_array_type {
  jpp_dtype_t dtype;  // JPP_DTYPE_INVALID: not known
  uint32_t ndim;
  const int64_t* dims;    // [ndim]
  bool is_whole;          // `dims` are the whole array's; else those of a device's piece
  uint64_t device_bytes;  // of the piece on each device
} jpp_array_type_t;

struct jpp_array {
  jpp_array_layout_t layout;
  jpp_array_type_t type;
  uint32_t* ranks;          // [num_ranks]
  jpp_buffer_t** buffers;   // [num_ranks * devices_per_rank]; NULL once taken
  struct jpp_owner* owner;  // whose the memory is; NULL: this library's
  // Under the lock:
  uint32_t holders;
  uint32_t readers;  // who use the buffers without the lock; they stay meanwhile
  uint32_t* loans;   // [num_ranks * devices_per_rank]; such a buffer stays, too
  bool deleted;
  bool lost;               // donated to a step that failed
  bool dropped;            // its buffers are freed, or are being freed
  jpp_array_t* origin;     // held: the array that donating this copy donates too; has no
                           // origin itself
  jpp_outcome_t* outcome;  // held: of the step that makes it; NULL: no step's result
};

void jpp__arrays_lock(void);
void jpp__arrays_unlock(void);

// An array without buffers, which `outcome` (NULL: the caller) is to fill.
jpp_status_t* jpp__array_promise(const jpp_array_layout_t* layout,
                                 const jpp_array_type_t* type, jpp_outcome_t* outcome,
                                 jpp_array_t** out_array) JPP_MUST_USE;
// The buffers of a rank, or NULL if the array is not there.
jpp_buffer_t** jpp__array_at(const jpp_array_t* array, uint32_t rank);
// Under the lock: jpp_array_deletion_reason().
const char* jpp__array_deletion_reason_of(const jpp_array_t* array);
// Under the lock: whether a write to the buffers of a rank would show elsewhere.
bool jpp__array_is_shared(const jpp_array_t* array, uint32_t rank);
// What a donation of the array deletes.
jpp_array_t* jpp__array_root(jpp_array_t* array);
// Takes the lock; frees the buffers if the array is deleted or its step has failed, and
// no reader is left.
void jpp__array_settle(jpp_array_t* array);
// A reader more, under the lock, and less, without.
void jpp__array_begin_read(jpp_array_t* array);
void jpp__array_end_read(jpp_array_t* array);
// Under the lock, which it gives up meanwhile: until the buffers are there, be they
// promises of the device's, or the step has failed, or the wait is interrupted.
void jpp__array_await_issue(const jpp_array_t* array, const jpp_interrupt_t* interrupt);

#endif  // JPP_ARRAY_ARRAY_H_
