// Threads of the library. They block all signals, so that the application's threads get
// them.
#ifndef JPP_BASE_THREAD_H_
#define JPP_BASE_THREAD_H_

#include <pthread.h>

#include "jaxpp/status.h"

// JPP_OUT_OF_MEMORY, which `what` precedes, for example "issue thread 1".
jpp_status_t* jpp__thread_start(pthread_t* thread, void* (*run)(void*), void* user,
                                const char* what) JPP_MUST_USE;

#endif  // JPP_BASE_THREAD_H_
