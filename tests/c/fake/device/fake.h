// Shared by the files of the fake.
//
// A handle (which public calls take) points to a reference-counted value or completion,
// so that a task keeps its operands after the handle is destroyed. One mutex guards
// everything except the bytes of values: these belong to the task that writes them until
// its completion is done, and are constant afterwards.
#ifndef TESTS_C_FAKE_DEVICE_FAKE_H_
#define TESTS_C_FAKE_DEVICE_FAKE_H_

#include <pthread.h>

#include "device/driver.h"
#include "device/process.h"
#include "fake/device.h"
#include "fake/device/nodes.h"
#include "fake/device/program.h"

typedef struct fake_completion {
  uint32_t refs;
  bool done;
  jpp_status_t* error;          // owned; constant once done
  jpp_event_waiter_t* waiters;  // called once it is done
} fake_completion_t;

typedef struct fake_value {
  uint32_t refs;
  uint32_t device;
  jpp_memory_t memory;  // which memory of the device
  fake_shape_t shape;
  fake_completion_t* completion;  // one reference
  size_t bytes;
  void* data;
  void (*release)(void* memory, void* user);  // not NULL: `data` is foreign memory
  void* user;                                 // passed to `release`
} fake_value_t;

typedef enum fake_kind { FAKE_BUFFER, FAKE_EVENT, FAKE_EXECUTABLE } fake_kind_t;
typedef enum fake_state { FAKE_LIVE, FAKE_DONATED, FAKE_DESTROYED } fake_state_t;

typedef struct fake_handle {
  struct fake_handle* next;  // list of all handles ever made
  fake_kind_t kind;
  fake_state_t state;
  bool accounted;                 // the stats include its bytes
  uint32_t loans;                 // FAKE_BUFFER: how often its contents are lent
  fake_value_t* value;            // FAKE_BUFFER: holds a reference while live
  fake_completion_t* completion;  // FAKE_EVENT: holds a reference while live
  fake_program_t* program;  // FAKE_EXECUTABLE: kept when dead, since tasks may use it
} fake_handle_t;

// One piece of asynchronous work: an execution on one device, or a copy.
struct fake_task {
  struct fake_task* next;
  fake_client_t* client;
  void (*run)(const struct fake_task* task);  // called on any thread without locks
  fake_completion_t* completion;              // holds a reference, as do all values below
  jpp_status_t* failure;                      // owned; the injected failure
  uint32_t latency_us;
  const fake_program_t* program;
  uint32_t device_id;             // executions only
  fake_rendezvous_t* rendezvous;  // for a program with a collective, else NULL
  void* host_data;                // destination of a copy to the host
  uint32_t input_count;
  uint32_t output_count;
  fake_value_t* values[];  // inputs, then outputs
};

struct fake_client {
  jpp_client_t base;
  jpp_fake_options_t options;
  jpp_key_value_store_t store;  // copy of the store in `options`
  jpp_device_info_t devices[JPP_FAKE_MAX_DEVICES];
  jpp_global_device_t* global_devices;
  uint32_t first_id;  // its own devices have consecutive ids from here
  fake_job_t* job;
  pthread_mutex_t mutex;
  pthread_cond_t changed;  // a task was queued or done, or the client stops
  // Guarded by `mutex`:
  fake_handle_t* handles;
  fake_task_t* first_task;  // queued, oldest first
  fake_task_t* last_task;
  uint32_t meeting;  // tasks at a rendezvous, which threads of other clients may complete
  fake_clique_t* cliques;
  bool stopping, held;
  jpp_fake_failure_t failure;
  jpp_fake_stats_t stats;
  // Used only by create and destroy:
  uint32_t thread_count;
  pthread_t* threads;
};

static inline fake_client_t* fake_client(jpp_client_t* client) {
  return (fake_client_t*)client;
}

// Functions named _locked require `mutex`; the others lock it.

// handle.c
jpp_status_t* fake_completion_create(fake_completion_t** out_completion);
void fake_completion_release_locked(fake_completion_t* completion);
// Creates a value in device memory with zeroed bytes, which takes a reference to
// `completion`.
jpp_status_t* fake_value_create_locked(const fake_shape_t* shape, uint32_t device,
                                       fake_completion_t* completion,
                                       fake_value_t** out_value);
void fake_value_release_locked(fake_value_t* value);
// The handle takes a reference to the value or completion.
jpp_status_t* fake_buffer_create_locked(fake_client_t* client, fake_value_t* value,
                                        jpp_buffer_t** out_buffer);
jpp_status_t* fake_event_create_locked(fake_client_t* client,
                                       fake_completion_t* completion,
                                       jpp_event_t** out_event);
// Takes ownership of the program, also after an error.
jpp_status_t* fake_executable_create_locked(fake_client_t* client,
                                            fake_program_t* program,
                                            jpp_executable_t** out_executable);
// Accepts NULL.
void fake_handle_destroy_locked(fake_client_t* client, void* opaque);
// Adds a new buffer's bytes to the accounts.
void fake_handle_account_locked(fake_client_t* client, fake_handle_t* handle);
void fake_handle_donate_locked(fake_client_t* client, fake_handle_t* handle);
// Checks that the handle is alive and of this kind;  the error names it `what`.
jpp_status_t* fake_handle_check_locked(const void* opaque, fake_kind_t kind,
                                       const char* what);
// Counts a call. Returns an injected synchronous failure; an asynchronous one is passed
// to the caller.
jpp_status_t* fake_count_call_locked(fake_client_t* client, const char* name,
                                     jpp_status_t** out_async_failure);

// queue.c
jpp_status_t* fake_task_create(uint32_t input_count, uint32_t output_count,
                               fake_task_t** out_task);
// Frees a task that was never submitted. Accepts NULL.
void fake_task_discard_locked(fake_task_t* task);
// Takes ownership of the task. Runs it at once if the client has no workers and its
// inputs are done.
void fake_task_submit(fake_client_t* client, fake_task_t* task);
// Ends a task that has run or failed; takes ownership of both arguments. Calls its
// waiters.
void fake_task_complete(fake_task_t* task, jpp_status_t* error);
jpp_status_t* fake_workers_start(fake_client_t* client);
// Waits for all tasks.
void fake_workers_stop(fake_client_t* client);

// compute.c: computes one result from an execution's arguments, except results of
// collectives.
void fake_result_compute(const fake_result_t* result, fake_value_t* const* args,
                         fake_value_t* output);
// Computes the result of a collective from the arguments of each of `count` partitions.
void fake_collective_compute(const fake_result_t* result, uint32_t count,
                             fake_value_t* const* const* args, fake_value_t* output);

// The functions of the driver's table: execute.c, buffer.c, event.c.
jpp_status_t* fake_compile(jpp_client_t* base, const jpp_compile_request_t* request,
                           jpp_executable_t** out_executable);
jpp_status_t* fake_executable_result_count(jpp_client_t* base,
                                           jpp_executable_t* executable,
                                           uint32_t* out_count);
void fake_executable_destroy(jpp_client_t* base, jpp_executable_t* executable);
jpp_status_t* fake_execute(jpp_client_t* base, const jpp_execute_t* execute);
jpp_status_t* fake_buffer_from_host(jpp_client_t* base, const jpp_host_array_t* array,
                                    uint32_t device, jpp_buffer_t** out_buffer);
jpp_status_t* fake_buffer_to_host(jpp_client_t* base, jpp_buffer_t* buffer, void* data,
                                  size_t size, jpp_event_t** out_event);
jpp_status_t* fake_buffer_copy(jpp_client_t* base, jpp_buffer_t* buffer, uint32_t device,
                               jpp_memory_t memory, jpp_buffer_t** out_buffer);
void fake_buffer_destroy(jpp_client_t* base, jpp_buffer_t* buffer);
jpp_status_t* fake_buffer_ready_event(jpp_client_t* base, jpp_buffer_t* buffer,
                                      jpp_event_t** out_event);
jpp_status_t* fake_buffer_shape(jpp_client_t* base, jpp_buffer_t* buffer,
                                jpp_buffer_shape_t* out_shape);
jpp_status_t* fake_buffer_lend(jpp_client_t* base, jpp_buffer_t* buffer,
                               void** out_pointer);
void fake_buffer_reclaim(jpp_client_t* base, jpp_buffer_t* buffer);
jpp_status_t* fake_buffer_borrow(jpp_client_t* base, const jpp_foreign_memory_t* foreign,
                                 jpp_buffer_t** out_buffer);
jpp_status_t* fake_event_await(jpp_client_t* base, jpp_event_t* event);
jpp_status_t* fake_event_is_ready(jpp_client_t* base, jpp_event_t* event,
                                  bool* out_ready);
jpp_status_t* fake_event_on_ready(jpp_client_t* base, jpp_event_t* event,
                                  jpp_event_waiter_t* waiter);
void fake_event_destroy(jpp_client_t* base, jpp_event_t* event);

#endif  // TESTS_C_FAKE_DEVICE_FAKE_H_
