// Peers: how far the ranks of all processes are. Each process tells the others with its
// heartbeats (jaxpp/transport.h has the notes), so that one that waits in vain can say
// whom all of them wait for.
#ifndef JPP_RUNTIME_PEERS_H_
#define JPP_RUNTIME_PEERS_H_

#include "base/str.h"
#include "runtime/actor.h"

typedef struct jpp_peers {
  // [ranks] A process has its ranks in their order; NULL: there are no other processes.
  uint32_t* row_of;
  uint32_t rows;  // the most that a process has
  bool all;       // every process of the job has some
} jpp_peers_t;

// With the network, before the first progress.
jpp_status_t* jpp_peers_open(jpp_runtime_t* runtime) JPP_MUST_USE;
// Whether all processes are known to have begun the step. False where the ranks of some
// processes are not this plan's: these may wait for others that are not known here.
// Issuing thread.
bool jpp_peers_have_begun(jpp_runtime_t* runtime, uint64_t step);
// "rank 0 waits for rank 1, that for rank 2, which ... (process 2 at ...)" for the first
// rank of this process that waits. Issuing thread.
jpp_status_t* jpp_peers_explain(jpp_runtime_t* runtime, jpp_str_t* out) JPP_MUST_USE;

#endif  // JPP_RUNTIME_PEERS_H_
