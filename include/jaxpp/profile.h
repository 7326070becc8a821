// Profile: steps in the profiles that JAX takes.
//
// While a profile is being taken (`jax.profiler.start_trace`, `trace`, the profile
// server), every step of every runtime is traced, and the profile shows the work of its
// ranks beside JAX's own events: for each rank a line with its tasks, one with its waits
// and one with its sends. JAX collects profiles from PJRT plugins through an extension of
// their API; this library implements that extension and no other part of the API.
//
// Threads: any thread.
#ifndef JAXPP_PROFILE_H_
#define JAXPP_PROFILE_H_

#include "jaxpp/export.h"

// A PJRT_Api that has only a profiler extension, for jaxlib's register_plugin_profiler().
// Every call returns the same object, which lives as long as the process.
JPP_API const void* jpp_profile_plugin(void);

#endif  // JAXPP_PROFILE_H_
