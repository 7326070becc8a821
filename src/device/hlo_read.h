// Reads the computations of a serialized HloModuleProto, and tells its opcodes apart.
#ifndef JPP_DEVICE_HLO_READ_H_
#define JPP_DEVICE_HLO_READ_H_

#include "base/protobuf.h"
#include "jaxpp/device.h"

// Field numbers of xla/service/hlo.proto.
enum {
  kHloInstructions = 2,  // of a computation
  kHloOpcode = 2,        // of an instruction
  kHloCalled = 38,
};

enum { kHloMostDepth = 64 };  // of calls in calls

typedef struct jpp_hlo_computation {
  uint64_t id;
  jpp_protobuf_t inside;
} jpp_hlo_computation_t;

typedef struct jpp_hlo_module {
  JPP_VEC(jpp_hlo_computation_t) computations;
  uint64_t entry;  // the id of the computation that the program starts with
} jpp_hlo_module_t;

// Lists the computations, which refer to the module's bytes. JPP_INVALID_ARGUMENT for
// anything but a module. Free the list with jpp_vec_deinit(), also after an error.
jpp_status_t* jpp__hlo_module_read(const void* module, size_t size,
                                   jpp_hlo_module_t* out_module) JPP_MUST_USE;

// Returns the index of the computation with this id, or the number of computations if no
// computation has it.
size_t jpp__hlo_find(const jpp_hlo_module_t* module, uint64_t id);

// Returns whether instructions with this opcode run the computations that they call, like
// loops and unlike fusions.
bool jpp__hlo_runs_called(jpp_protobuf_t opcode);

typedef struct jpp_hlo_collective {
  const char* opcode;
  uint8_t kind;           // a jpp_collective_kind_t
  uint32_t first_result;  // in its shape, if that is a tuple of operands and results
} jpp_hlo_collective_t;

// Returns NULL if the opcode is not a collective's.
const jpp_hlo_collective_t* jpp__hlo_find_collective(jpp_protobuf_t opcode);

#endif  // JPP_DEVICE_HLO_READ_H_
