// Jobs of several fake clients, each a node, and the rendezvous where the partitions of a
// program with a collective meet.
//
// Clients share a job and its rendezvous. Lock order: a client's mutex, then its job's
// mutex; the thread that completes the tasks of a rendezvous holds neither.
#ifndef TESTS_C_FAKE_DEVICE_NODES_H_
#define TESTS_C_FAKE_DEVICE_NODES_H_

#include <pthread.h>

#include "fake/device.h"

typedef struct fake_task fake_task_t;
typedef struct fake_client fake_client_t;

// One execution of a program with a collective, on all nodes.
typedef struct fake_rendezvous {
  struct fake_rendezvous* next;
  uint64_t number;   // counts executions over these devices
  uint64_t program;  // the first node's fake_program_t.identity
  uint32_t node;     // the first node to come
  uint32_t device_count;
  uint32_t* devices;    // ids, ascending
  fake_task_t** tasks;  // by device; NULL before the task has come and once it is done
  struct fake_value* const** args;  // by partition, once all have come
  uint32_t arrived;
  jpp_status_t* error;  // why it cannot happen; all its tasks fail with this error
} fake_rendezvous_t;

typedef struct fake_job {
  struct fake_job* next;  // list of all jobs; guarded by the list's mutex, as is `refs`
  uint32_t refs;
  uint64_t id;
  uint32_t num_nodes;
  pthread_mutex_t mutex;
  // Guarded by `mutex`:
  bool left[JPP_FAKE_MAX_NODES];
  fake_rendezvous_t* open;
} fake_job_t;

// Counts the executions of programs with collectives over a set of devices.
typedef struct fake_clique {
  struct fake_clique* next;
  uint64_t executions;
  uint32_t device_count;
  uint32_t devices[];  // ids, ascending
} fake_clique_t;

// nodes.c: finds the other nodes through the store and fills in the client's devices.
jpp_status_t* fake_nodes_join(fake_client_t* client);
// From now on the client's part of programs over several nodes fails, and so do the other
// parts.
void fake_nodes_leave(fake_client_t* client);
// Frees the client's share of its job.
void fake_nodes_release(fake_client_t* client);

// rendezvous.c: assigns a rendezvous to the tasks of an execution, linked by `next`.
// Requires the client's mutex.
jpp_status_t* fake_rendezvous_join_locked(fake_client_t* client, fake_task_t* tasks);
// The arguments of a task are done or failed. Takes ownership of the task and `error`.
void fake_rendezvous_arrive(fake_task_t* task, jpp_status_t* error);
// Fails the rendezvous that wait for the client's devices.
void fake_rendezvous_abandon(fake_client_t* client);
void fake_rendezvous_destroy(fake_rendezvous_t* rendezvous);

#endif  // TESTS_C_FAKE_DEVICE_NODES_H_
