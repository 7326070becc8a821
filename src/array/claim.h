// Claims a call's arguments. The arrays' lock is held in both functions.
#ifndef JPP_ARRAY_CLAIM_H_
#define JPP_ARRAY_CLAIM_H_

#include "array/array.h"

// Marks the roots of the donated arrays as deleted, all or none, once no reader holds
// them. `arrays` are [params->count]; NULL is an argument without an array. Releases the
// lock while it waits. JPP_DONATED_ERROR as jpp_runtime_call(); JPP_CANCELLED if
// interrupted.
jpp_status_t* jpp__claim_donated(const jpp_params_t* params, jpp_array_t* const* arrays,
                                 const jpp_interrupt_t* interrupt) JPP_MUST_USE;
// jpp_arrays_lose().
void jpp__claim_lose(const jpp_params_t* params, jpp_array_t* const* arrays);

#endif  // JPP_ARRAY_CLAIM_H_
