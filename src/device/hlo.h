// HLO: reads compiled programs, which are protocol buffers of XLA's type HloModuleProto.
#ifndef JPP_DEVICE_HLO_H_
#define JPP_DEVICE_HLO_H_

#include "jaxpp/device.h"

// Lists the collectives that one execution of a module runs on each device. Free the list
// with jpp_collectives_destroy(). JPP_INVALID_ARGUMENT for anything but a module.
jpp_status_t* jpp__hlo_collectives(const void* module, size_t size,
                                   jpp_collectives_t** out_collectives) JPP_MUST_USE;

// Decides whether data dependences order a module's collectives: a loop, condition or
// call that runs collectives must depend on each collective beside it, or the reverse.
// JPP_INVALID_ARGUMENT for anything but a module.
jpp_status_t* jpp__hlo_orders_collectives(const void* module, size_t size,
                                          bool* out_ordered) JPP_MUST_USE;

// Moves the module in a HloModuleProtoWithConfig to the front of its bytes.
jpp_status_t* jpp__hlo_without_config(void* bytes, size_t* size) JPP_MUST_USE;

#endif  // JPP_DEVICE_HLO_H_
