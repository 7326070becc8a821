// Forks. A child has the memory of its parent but none of its threads: work of the
// parent's clients never ends there, and locks that the threads held stay locked.
#ifndef JPP_DEVICE_PROCESS_H_
#define JPP_DEVICE_PROCESS_H_

#include "jaxpp/status.h"

// Whether this process was forked from one that had made a client. Never becomes false
// again.
extern bool jpp_process_is_forked;

// Called before a driver creates a client; returns an error in such a child.
jpp_status_t* jpp__process_begin_client(void) JPP_MUST_USE;

#endif  // JPP_DEVICE_PROCESS_H_
