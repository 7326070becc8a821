// How a simulation is stored: the public struct first, its arena behind it.
#ifndef JPP_SCHEDULE_SIMULATION_H_
#define JPP_SCHEDULE_SIMULATION_H_

#include "base/arena.h"
#include "jaxpp/schedule_simulate.h"

typedef struct jpp_simulation_storage {
  jpp_simulation_t simulation;
  jpp_arena_t arena;
} jpp_simulation_storage_t;

#endif  // JPP_SCHEDULE_SIMULATION_H_
