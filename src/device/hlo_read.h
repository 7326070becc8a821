// Reads the parts of a serialized HloModuleProto: protocol buffers, computations,
// opcodes.
#ifndef JPP_DEVICE_HLO_READ_H_
#define JPP_DEVICE_HLO_READ_H_

#include "base/vec.h"
#include "jaxpp/device.h"

// --- Protocol buffers -----------------------------------------------------------------

// A part of the module, which owns the memory.
typedef struct jpp_hlo_bytes {
  const uint8_t* at;
  const uint8_t* end;
} jpp_hlo_bytes_t;

typedef struct jpp_hlo_field {
  uint32_t number;
  uint64_t value;          // of a varint
  jpp_hlo_bytes_t inside;  // for a string, a message or packed numbers; else empty
} jpp_hlo_field_t;

typedef JPP_VEC(uint64_t) jpp_hlo_numbers_t;

bool jpp__hlo_read_varint(jpp_hlo_bytes_t* bytes, uint64_t* out_value);

// Returns false at the end of the message, and at the first field that cannot be read.
bool jpp__hlo_next_field(jpp_hlo_bytes_t* bytes, jpp_hlo_field_t* out);

// Appends the numbers of a repeated field: packed, or one of several fields.
jpp_status_t* jpp__hlo_append_numbers(const jpp_hlo_field_t* field,
                                      jpp_hlo_numbers_t* numbers) JPP_MUST_USE;

bool jpp__hlo_is_text(jpp_hlo_bytes_t bytes, const char* text);

// --- Modules --------------------------------------------------------------------------

// Field numbers of xla/service/hlo.proto.
enum {
  kHloInstructions = 2,  // of a computation
  kHloOpcode = 2,        // of an instruction
  kHloCalled = 38,
};

typedef struct jpp_hlo_computation {
  uint64_t id;
  jpp_hlo_bytes_t inside;
} jpp_hlo_computation_t;

typedef struct jpp_hlo_module {
  JPP_VEC(jpp_hlo_computation_t) computations;
  uint64_t entry;  // the id of the computation that the program starts with
} jpp_hlo_module_t;

// Lists the computations. JPP_INVALID_ARGUMENT for anything but a module. Free the list
// with jpp_vec_deinit(), also after an error.
jpp_status_t* jpp__hlo_module_read(jpp_hlo_bytes_t bytes,
                                   jpp_hlo_module_t* out_module) JPP_MUST_USE;

// The index of a computation; their number if there is none with this id.
size_t jpp__hlo_find(const jpp_hlo_module_t* module, uint64_t id);

// Whether an instruction runs the computations that it calls, as a loop does and a fusion
// does not.
bool jpp__hlo_runs_called(jpp_hlo_bytes_t opcode);

typedef struct jpp_hlo_collective {
  const char* opcode;
  uint8_t kind;           // a jpp_collective_kind_t
  uint32_t first_result;  // in its shape, if that is a tuple of operands and results
} jpp_hlo_collective_t;

// NULL for any other opcode.
const jpp_hlo_collective_t* jpp__hlo_find_collective(jpp_hlo_bytes_t opcode);

#endif  // JPP_DEVICE_HLO_READ_H_
