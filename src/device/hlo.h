// HLO: reads compiled programs, which are protocol buffers of XLA's type HloModuleProto.
#ifndef JPP_DEVICE_HLO_H_
#define JPP_DEVICE_HLO_H_

#include "jaxpp/device.h"

// Lists the collectives that one execution of a module runs on each device. Free the list
// with jpp_collectives_destroy(). JPP_INVALID_ARGUMENT for anything but a module.
jpp_status_t* jpp__hlo_collectives(const void* module, size_t size,
                                   jpp_collectives_t** out_collectives) JPP_MUST_USE;

// Whether data orders a module's collectives across its loops, conditions and calls: what
// runs collectives in one of these, and every other instruction of the same computation
// that runs some, depend on each other. JPP_INVALID_ARGUMENT for anything but a module.
jpp_status_t* jpp__hlo_orders_collectives(const void* module, size_t size,
                                          bool* out_ordered) JPP_MUST_USE;

// Moves the module in a HloModuleProtoWithConfig to the front of its bytes.
jpp_status_t* jpp__hlo_without_config(void* bytes, size_t* size) JPP_MUST_USE;

#endif  // JPP_DEVICE_HLO_H_
