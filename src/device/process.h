// Forks. A child has the memory of its parent and none of its threads: whatever a client
// of the parent's was doing never ends there, and a lock that it held stays locked.
#ifndef JPP_DEVICE_PROCESS_H_
#define JPP_DEVICE_PROCESS_H_

#include "jaxpp/status.h"

// This process was forked from one that had made a client. Never becomes false again.
extern bool jpp_process_is_forked;

// A driver is about to make a client; refused in such a child.
jpp_status_t* jpp_process_begin_client(void) JPP_MUST_USE;

#endif  // JPP_DEVICE_PROCESS_H_
