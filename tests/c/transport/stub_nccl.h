// A library with the functions of NCCL and of the CUDA driver that the transport uses,
// for machines without GPUs. Device memory is host memory, a stream is a list of copies,
// and time passes when somebody queries the progress of something. It is as strict as the
// real ones where that is documented: a call on a communicator that is still busy,
// outside a group or without a current context fails, and a send waits for its receive.
//
// JPP_NCCL and JPP_CUDA name it, and STUB_NCCL_DELAY sets stub_faults_t.delay; tests of
// faults also link it.
#ifndef TESTS_C_TRANSPORT_STUB_NCCL_H_
#define TESTS_C_TRANSPORT_STUB_NCCL_H_

#include <stdbool.h>

enum { kStubMostInits = 64, kStubDevices = 4 };

// Faults to inject; all 0: none.
typedef struct stub_faults {
  int version;      // version of NCCL, instead of 2.28.9
  int delay;        // questions until a communicator is made, a batch issued, data copied
  int fail_init;    // the number of the communicator, from now on, that cannot be made
  int fail_group;   // the number of the batch, from now on, after which NCCL has an error
  int fail_event;   // the number of the event, from now on, that fails when it is asked
  bool slow_abort;  // streams stop some questions after an abort
  bool never_stops;  // streams do not stop after an abort
  bool joint_end;    // a communicator is finalized only once the other end is, too
  bool own_memory;   // only what cuMemAlloc() gave may be sent and received
} stub_faults_t;

void stub_set_faults(const stub_faults_t* faults);

// All that was made and not freed.
typedef struct stub_counts {
  int comms, streams, events, blocks, contexts, current;
} stub_counts_t;

stub_counts_t stub_live(void);

// All communicators have an error from now on, as when a network goes.
void stub_fail_all(void);

// Frees the blocks of memory that nobody freed.
void stub_forget_blocks(void);

// Calls since stub_set_faults().
typedef struct stub_log {
  // The devices of the communicators' ends, in the order in which they were begun, with
  // the number of the other end's id.
  int inits;
  int device[kStubMostInits], id[kStubMostInits], rank[kStubMostInits];
  int most_making;  // ends of one device at a time
  int aborts, finalized;
  int sends, transfers;  // batches that were begun; shards that have arrived
  int least_priority;    // of a stream that was made; lower is more urgent
} stub_log_t;

stub_log_t stub_get_log(void);

#endif  // TESTS_C_TRANSPORT_STUB_NCCL_H_
