// Random steps in the form that autodiff produces.
#ifndef TESTS_C_RANDOM_STEP_H_
#define TESTS_C_RANDOM_STEP_H_

#include "plan_util.h"

// Makes a graph and a schedule for each of its loops, to pass to plan_scheduled() with
// *out_slots; the same for the same seed. Free with plan_free(). One thread at a time.
planned_t random_step(uint64_t seed, uint32_t* out_slots);
// The same with `times` as many microbatches.
planned_t random_long_step(uint64_t seed, uint32_t times, uint32_t* out_slots);

#endif  // TESTS_C_RANDOM_STEP_H_
