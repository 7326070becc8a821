// Reads the computations of compiled HLO.
#include "device/hlo_read.h"

#include <string.h>

// Field numbers of xla/service/hlo.proto.
enum { kModuleComputations = 3, kModuleEntryId = 6, kComputationId = 5 };

jpp_status_t* jpp__hlo_module_read(const void* module, size_t size,
                                   jpp_hlo_module_t* out_module) {
  jpp_protobuf_t bytes = {module, (const uint8_t*)module + size};
  *out_module = (jpp_hlo_module_t){.entry = UINT64_MAX};
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&bytes, &field);) {
    if (field.number == kModuleEntryId) out_module->entry = field.value;
    if (field.number != kModuleComputations) continue;
    jpp_hlo_computation_t computation = {.inside = field.inside};
    jpp_protobuf_t inside = field.inside;
    for (jpp_protobuf_field_t inner; jpp__protobuf_read_field(&inside, &inner);) {
      if (inner.number == kComputationId) computation.id = inner.value;
    }
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(&out_module->computations, computation));
  }
  if (out_module->entry != UINT64_MAX && bytes.at == bytes.end) return NULL;
  return jpp_status_make(JPP_INVALID_ARGUMENT, "expected an HLO module");
}

size_t jpp__hlo_find(const jpp_hlo_module_t* module, uint64_t id) {
  size_t i = 0;
  while (i < module->computations.count && module->computations.data[i].id != id) ++i;
  return i;
}

bool jpp__hlo_runs_called(jpp_protobuf_t opcode) {
  static const char* const kOpcodes[] = {"while", "call", "conditional", "async-start"};
  for (size_t i = 0; i < sizeof(kOpcodes) / sizeof(*kOpcodes); ++i) {
    if (jpp__protobuf_is_text(opcode, kOpcodes[i])) return true;
  }
  return false;
}

const jpp_hlo_collective_t* jpp__hlo_find_collective(jpp_protobuf_t opcode) {
  static const jpp_hlo_collective_t kCollectives[] = {
      {"all-reduce", JPP_COLLECTIVE_ALL_REDUCE, 0},
      {"all-reduce-start", JPP_COLLECTIVE_ALL_REDUCE, 0},
      {"all-gather", JPP_COLLECTIVE_ALL_GATHER, 0},
      {"all-gather-start", JPP_COLLECTIVE_ALL_GATHER, 1},
      {"reduce-scatter", JPP_COLLECTIVE_REDUCE_SCATTER, 0},
      {"all-to-all", JPP_COLLECTIVE_ALL_TO_ALL, 0},
      {"ragged-all-to-all", JPP_COLLECTIVE_ALL_TO_ALL, 0},
      {"collective-permute", JPP_COLLECTIVE_PERMUTE, 0},
      {"collective-permute-start", JPP_COLLECTIVE_PERMUTE, 1},
      {"collective-broadcast", JPP_COLLECTIVE_BROADCAST, 0},
  };
  for (size_t i = 0; i < sizeof(kCollectives) / sizeof(*kCollectives); ++i) {
    if (jpp__protobuf_is_text(opcode, kCollectives[i].opcode)) return &kCollectives[i];
  }
  return NULL;
}
