// Jobs of several fake clients, each a node, and the rendezvous at which the partitions
// of a program with a collective meet.
//
// A job and its rendezvous are shared by clients. Lock order: a client's mutex, then that
// of its job; whoever completes the tasks of a rendezvous holds neither.
#ifndef TESTS_C_FAKE_DEVICE_NODES_H_
#define TESTS_C_FAKE_DEVICE_NODES_H_

#include <pthread.h>

#include "fake/device.h"

typedef struct fake_task fake_task_t;
typedef struct fake_client fake_client_t;

// One execution of a program with a collective, over all its nodes.
typedef struct fake_rendezvous {
  struct fake_rendezvous* next;
  uint64_t number;   // of the executions over these devices
  uint64_t program;  // the first node's fake_program_t.identity
  uint32_t node;     // the first one
  uint32_t device_count;
  uint32_t* devices;    // ids, ascending
  fake_task_t** tasks;  // of each device, NULL before it has come and once it is done
  struct fake_value* const** args;  // of each partition, once all have come
  uint32_t arrived;
  jpp_status_t* error;  // why it cannot take place; all its tasks fail with that
} fake_rendezvous_t;

typedef struct fake_job {
  struct fake_job* next;  // of all jobs; with `refs` guarded by the list's mutex
  uint32_t refs;
  uint64_t id;
  uint32_t num_nodes;
  pthread_mutex_t mutex;
  // Guarded by `mutex`:
  bool left[JPP_FAKE_MAX_NODES];
  fake_rendezvous_t* open;
} fake_job_t;

// How often programs with a collective were executed over some devices.
typedef struct fake_clique {
  struct fake_clique* next;
  uint64_t executions;
  uint32_t device_count;
  uint32_t devices[];  // ids, ascending
} fake_clique_t;

// nodes.c: meets the other nodes through the store, and fills in the client's devices.
jpp_status_t* fake_nodes_join(fake_client_t* client);
// The client's part of programs over several nodes fails from now on, and with it theirs.
void fake_nodes_leave(fake_client_t* client);
// Frees what the client has of its job.
void fake_nodes_release(fake_client_t* client);

// rendezvous.c: one execution has been issued: its tasks, linked by `next`, get their
// rendezvous. Needs the client's mutex.
jpp_status_t* fake_rendezvous_join_locked(fake_client_t* client, fake_task_t* tasks);
// A task's arguments are there, or failed. Takes the task and `error`.
void fake_rendezvous_arrive(fake_task_t* task, jpp_status_t* error);
// Fails what waits for the client's devices.
void fake_rendezvous_abandon(fake_client_t* client);
void fake_rendezvous_destroy(fake_rendezvous_t* rendezvous);

#endif  // TESTS_C_FAKE_DEVICE_NODES_H_
