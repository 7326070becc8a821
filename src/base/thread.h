// Threads of the library. They block all signals, so that the application's threads get
// them.
#ifndef JPP_BASE_THREAD_H_
#define JPP_BASE_THREAD_H_

#include <pthread.h>

#include "jaxpp/status.h"

// `name`: of at most 15 characters, for debuggers and `top -H`. JPP_OUT_OF_MEMORY if the
// system refuses another thread.
jpp_status_t* jpp__thread_start(pthread_t* thread, void* (*run)(void*), void* user,
                                const char* name) JPP_MUST_USE;

#endif  // JPP_BASE_THREAD_H_
