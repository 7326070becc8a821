// Offload: which ranks leave their activations on the host or recompute them, and when
// the tasks of a rank that offloads have room and their activations.
#ifndef JPP_SIMULATE_OFFLOAD_H_
#define JPP_SIMULATE_OFFLOAD_H_

#include "jaxpp/simulate.h"
#include "schedule/index.h"

// The device memory of a rank that offloads, and its links to the host and back.
typedef struct jpp_offload_rank {
  double out_free, back_free;  // when the links are
  double reserved;             // when the latest task had its room
  uint32_t reservations;       // up to the limit; later ones take a place of `freed`
  double* freed;               // when places become free that no task has taken yet
  uint32_t num_freed;
} jpp_offload_rank_t;

typedef struct jpp_offload {
  const jpp_schedule_index_t* index;
  double move;                     // time for the activations of one stage and microbatch
  uint32_t limit;                  // activations on a device; UINT32_MAX: any number
  jpp_activations_t* activations;  // [ranks]
  double** moves;                  // [ranks][row count]; NULL: does not offload
  jpp_offload_rank_t* ranks;
  // The task that can never have room; `full` says whether there is one.
  bool full;
  uint32_t full_rank, full_entry;
} jpp_offload_t;

// JPP_INVALID_ARGUMENT for an invalid size or bandwidth. `activations` and `moves` are
// allocated in `arena`, the rest in `scratch`.
jpp_status_t* jpp__offload_create(const jpp_schedule_index_t* index,
                                  const jpp_simulate_options_t* options,
                                  jpp_arena_t* arena, jpp_arena_t* scratch,
                                  jpp_offload_t* out_offload) JPP_MUST_USE;

// When the entry of a rank that offloads has its room and its activations. Called once a
// task and in the order of the list. Returns false and sets `full` if it never has room.
bool jpp__offload_start(jpp_offload_t* offload, uint32_t rank, uint32_t entry,
                        double* out_ready);
// The entry, started as above, ends then.
void jpp__offload_end(jpp_offload_t* offload, uint32_t rank, uint32_t entry, double end);
// The error about the task that never has room.
jpp_status_t* jpp__offload_refuse(const jpp_offload_t* offload) JPP_MUST_USE;

#endif  // JPP_SIMULATE_OFFLOAD_H_
