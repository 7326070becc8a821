// The state of arrays, for the code that runs steps.
//
// One lock guards the mutable state of all arrays and outcomes of the process, because it
// is held for a few instructions at a time and a step claims many arrays at once.
#ifndef JPP_ARRAY_ARRAY_H_
#define JPP_ARRAY_ARRAY_H_

#include "jaxpp/array.h"

//===-- Outcomes -------------------------------------------------------------------===//

// The outcome of a step, shared by its results. All fields are under the lock.
typedef struct jpp_outcome {
  const void* runtime;  // the step's runtime; used as an identity only
  uint32_t holders;
  bool issued;    // the results have buffers, unless the step failed
  bool finished;  // issued, and all work is done
  bool told;      // the failure was reported to a caller
  jpp_status_t* failure;
  // Held: the outcome that caused the failure, if an argument had failed.
  struct jpp_outcome* cause;
} jpp_outcome_t;

// The caller holds it once.
jpp_status_t* jpp__outcome_create(const void* runtime,
                                  jpp_outcome_t** out_outcome) JPP_MUST_USE;
// These two functions take the lock.
void jpp__outcome_hold(jpp_outcome_t* outcome);
void jpp__outcome_release(jpp_outcome_t* outcome);  // takes NULL
void jpp__outcome_set_issued(jpp_outcome_t* outcome);
// Owns `failure`, which may be NULL.
void jpp__outcome_finish(jpp_outcome_t* outcome, jpp_status_t* failure);
// A copy of the failure for a caller who will report it, or NULL. Takes NULL.
jpp_status_t* jpp__outcome_tell(jpp_outcome_t* outcome) JPP_MUST_USE;

//===-- Arrays ---------------------------------------------------------------------===//

// The type of an array, to compare with what a plan requires.
typedef struct jpp_array_type {
  jpp_dtype_t dtype;  // JPP_DTYPE_INVALID: unknown
  uint32_t ndim;
  const int64_t* dims;  // [ndim]
  bool is_whole;  // `dims` are those of the whole array; otherwise those of a device's
                  // piece
  uint64_t device_bytes;  // of the piece on each device
} jpp_array_type_t;

struct jpp_array {
  jpp_array_layout_t layout;
  jpp_array_type_t type;
  uint32_t* ranks;         // [num_ranks]
  jpp_buffer_t** buffers;  // [num_ranks * devices_per_rank]; NULL once taken, and
                           // where a rank has no device
  // The owner of foreign memory; NULL: this library owns it.
  struct jpp_owner* owner;
  // The rest is under the lock:
  uint32_t holders;
  uint32_t readers;  // users of the buffers without the lock; the buffers stay meanwhile
  uint32_t* loans;   // [num_ranks * devices_per_rank] a lent buffer stays, too
  bool deleted;
  bool lost;            // donated to a step that failed
  bool dropped;         // its buffers are freed, or are being freed
  jpp_array_t* origin;  // held: the array that a donation of this copy also donates; has
                        // no origin itself
  // Held: the outcome of the step that makes it; NULL: not a step's result.
  jpp_outcome_t* outcome;
};

void jpp__arrays_lock(void);
void jpp__arrays_unlock(void);

// An array without buffers; `outcome`, or the caller if it is NULL, will fill it.
jpp_status_t* jpp__array_promise(const jpp_array_layout_t* layout,
                                 const jpp_array_type_t* type, jpp_outcome_t* outcome,
                                 jpp_array_t** out_array) JPP_MUST_USE;
// The buffers of a rank, or NULL if the array is not on that rank.
jpp_buffer_t** jpp__array_at(const jpp_array_t* array, uint32_t rank);
// Under the lock: jpp_array_deletion_reason().
const char* jpp__array_deletion_reason_of(const jpp_array_t* array);
// Under the lock: whether another reader could see a write to the buffers of a rank.
bool jpp__array_is_shared(const jpp_array_t* array, uint32_t rank);
// The array that a donation of this one deletes.
jpp_array_t* jpp__array_root(jpp_array_t* array);
// Takes the lock; frees the buffers if the array is deleted or its step has failed, and
// no reader is left.
void jpp__array_settle(jpp_array_t* array);
// Adds a reader, under the lock; or removes one, without it.
void jpp__array_begin_read(jpp_array_t* array);
void jpp__array_end_read(jpp_array_t* array);
// Under the lock, which is released meanwhile: waits until the buffers exist (the device
// may still have to fill them), the step has failed, or the wait is interrupted.
void jpp__array_await_issue(const jpp_array_t* array, const jpp_interrupt_t* interrupt);

#endif  // JPP_ARRAY_ARRAY_H_
