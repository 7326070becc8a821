// Memories: where the buffers of a value are. An executable reads and writes device
// memory only; values in other memories are moved there first.
//
// Threads: any thread may call any of these at any time.
#ifndef JAXPP_MEMORY_H_
#define JAXPP_MEMORY_H_

#include <stdint.h>

#include "jaxpp/export.h"

typedef enum jpp_memory {
  JPP_MEMORY_DEVICE = 0,   // the devices' default memory
  JPP_MEMORY_PINNED_HOST,  // host memory that devices copy to and from directly
  JPP_MEMORY_COUNT
} jpp_memory_t;

// "device", "pinned_host": as PJRT and JAX name memory kinds; lifetime static. NULL for
// an unknown memory.
JPP_API const char* jpp_memory_name(jpp_memory_t memory);
// JPP_MEMORY_COUNT for an unknown name.
JPP_API jpp_memory_t jpp_memory_parse(const char* name, uint32_t length);

#endif  // JAXPP_MEMORY_H_
