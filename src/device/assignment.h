// Changes the devices in compile options.
#ifndef JPP_DEVICE_ASSIGNMENT_H_
#define JPP_DEVICE_ASSIGNMENT_H_

#include "base/str.h"
#include "jaxpp/device.h"

// Appends the request's options, a CompileOptionsProto, with a device assignment for the
// request's devices: one replica, partition i on devices[i].
void jpp__assignment_append(const jpp_client_t* client,
                            const jpp_compile_request_t* request, jpp_str_t* out);

#endif  // JPP_DEVICE_ASSIGNMENT_H_
