// How a simulation is stored: the public struct first, then its arena.
#ifndef JPP_SIMULATE_SIMULATION_H_
#define JPP_SIMULATE_SIMULATION_H_

#include "base/arena.h"
#include "jaxpp/simulate.h"

typedef struct jpp_simulation_storage {
  jpp_simulation_t simulation;
  jpp_arena_t arena;
  bool has_backward;   // the schedule is not forward-only
  double input_share;  // of a stage's input in its activations
} jpp_simulation_storage_t;

// Whether a simulation accepts the time as a cost.
bool jpp__simulation_takes(double time);
// JPP_INVALID_ARGUMENT, which names the first stage with a cost that is not accepted.
jpp_status_t* jpp__simulation_check_costs(const jpp_cost_t* costs,
                                          uint32_t stages) JPP_MUST_USE;

// JPP_INVALID_ARGUMENT unless sizes and bandwidth are those of a simulation's options.
jpp_status_t* jpp__simulation_check_host(uint64_t activation_bytes, uint64_t input_bytes,
                                         double bandwidth) JPP_MUST_USE;

// Fills in everything except the starts of tasks and of moves, which take `move` each;
// stages_of: [ranks].
jpp_status_t* jpp__simulation_sum(jpp_simulation_storage_t* storage,
                                  const jpp_simulate_options_t* options,
                                  const uint32_t* stages_of, double move,
                                  jpp_arena_t* scratch) JPP_MUST_USE;

// The activations that a rank keeps, or those that it has on the host, become more or
// fewer.
typedef struct jpp_kept_event {
  double time;
  uint32_t entry;  // the entry whose start or end causes it
  double change;   // of the number of activations
} jpp_kept_event_t;

// All events of a rank's device by time, with ends before beginnings at the same time. In
// `scratch`.
jpp_status_t* jpp__simulation_kept(const jpp_simulation_t* simulation, uint32_t rank,
                                   jpp_arena_t* scratch, jpp_kept_event_t** out_events,
                                   uint32_t* out_count) JPP_MUST_USE;

#endif  // JPP_SIMULATE_SIMULATION_H_
