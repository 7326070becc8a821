// Peer state: how far the ranks of every process have got. Processes send it with their
// heartbeats (notes in jaxpp/transport.h), so that a process whose wait times out can
// name the rank for which all of them wait.
#ifndef JPP_RUNTIME_PEER_STATE_H_
#define JPP_RUNTIME_PEER_STATE_H_

#include "base/str.h"
#include "runtime/step/actor.h"

typedef struct jpp_peers {
  // [ranks] The row of each rank in its process's note; NULL without other processes.
  uint32_t* row_of;
  uint32_t rows;  // rows of a note: the largest number of ranks that any process has
  bool all;       // every process of the job has a rank
} jpp_peer_state_t;

// Called once the network is open, before it is driven for the first time.
jpp_status_t* jpp__peer_state_open(jpp_runtime_t* runtime) JPP_MUST_USE;
// Whether all processes are known to have begun the step. False if a process of the job
// has no rank in this plan, because nothing is known of it. Issuing thread.
bool jpp__peer_state_all_begun(jpp_runtime_t* runtime, uint64_t step);
// Appends the chain of waits that begins at the first waiting rank of this process: "rank
// 0 waits for rank 1, that for rank 2, which ... (process 2 at ...)". Issuing thread.
jpp_status_t* jpp__peer_state_explain(jpp_runtime_t* runtime,
                                      jpp_str_t* out) JPP_MUST_USE;

#endif  // JPP_RUNTIME_PEER_STATE_H_
