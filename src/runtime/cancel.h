// Cancel: waiting that can be given up.
#ifndef JPP_RUNTIME_CANCEL_H_
#define JPP_RUNTIME_CANCEL_H_

#include <pthread.h>
#include <time.h>

#include "jaxpp/runtime.h"

// How a step hears that it is to stop. The step's thread's.
typedef struct jpp_cancel {
  bool (*should_cancel)(void* user);  // NULL: never
  void* user;
  int64_t next_question;    // when to ask next, by jpp_trace_now()
  bool wanted;              // the answer was yes
  struct jpp_alarm* alarm;  // NULL until a step had to wait
} jpp_cancel_t;

// Takes `step_mutex`; false if the step was cancelled while it waited for it.
bool jpp_cancel_lock(jpp_runtime_t* runtime, const jpp_step_io_t* io);
// Asks whether to cancel, at most once a slice. True: the step is to stop.
bool jpp_cancel_poll(jpp_runtime_t* runtime);
// A condition to wait on in slices, and until when to wait before the next poll.
void jpp_cancel_init_condition(pthread_cond_t* condition);
struct timespec jpp_cancel_slice(void);
// Until all events of the step are ready; false: given up, as the step is to stop.
bool jpp_cancel_await(jpp_runtime_t* runtime);
void jpp_cancel_deinit(jpp_runtime_t* runtime);

#endif  // JPP_RUNTIME_CANCEL_H_
