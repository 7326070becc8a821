// Queue: passes steps from the caller to the thread that issues them, and from there to
// the thread that waits for them.
//
// Step n uses slot n % steps_in_flight, which is free again when the step is finished.
// There are two threads because issuing may wait for other processes: the end of an
// earlier step, or its failure, is still reported at once.
#ifndef JPP_RUNTIME_QUEUE_H_
#define JPP_RUNTIME_QUEUE_H_

#include <pthread.h>
#include <stdatomic.h>

#include "jaxpp/runtime.h"

struct jpp_step;

typedef struct jpp_queue {
  uint32_t count;          // number of slots
  struct jpp_step* slots;  // [count]
  pthread_mutex_t mutex;   // guards the fields below
  // Signalled to the issuing thread, to the finishing thread, and to callers.
  pthread_cond_t to_issue, to_finish, has_finished;
  bool reserved;  // a caller is preparing the next step
  bool stopping;
  // Number of steps; signal handlers read it without the mutex.
  _Atomic uint64_t submitted;
  uint64_t issued, finished;
  uint32_t threads;  // threads that were started
  pthread_t issuer, finisher;
} jpp_queue_t;

void jpp__queue_init(jpp_queue_t* queue);
jpp_status_t* jpp__queue_start(jpp_runtime_t* runtime) JPP_MUST_USE;
// Ends the threads once they have finished all submitted steps.
void jpp__queue_stop(jpp_runtime_t* runtime);
void jpp__queue_deinit(jpp_queue_t* queue);

// Waits for a free slot and reserves it for the caller; NULL: interrupted.
struct jpp_step* jpp__queue_reserve(jpp_runtime_t* runtime,
                                    const jpp_interrupt_t* interrupt);
// Returns the reserved slot unused.
void jpp__queue_give_up(jpp_runtime_t* runtime);
// Submits the step to the issuing thread.
void jpp__queue_submit(jpp_runtime_t* runtime);
// Waits until that many steps are finished; false: interrupted.
bool jpp__queue_await(jpp_runtime_t* runtime, uint64_t steps,
                      const jpp_interrupt_t* interrupt);

#endif  // JPP_RUNTIME_QUEUE_H_
