// Reads protocol buffers of XLA's type HloModuleProto.
#include "device/hlo_read.h"

#include <string.h>

// Field numbers of xla/service/hlo.proto.
enum { kModuleComputations = 3, kModuleEntryId = 6, kComputationId = 5 };

// --- Protocol buffers -----------------------------------------------------------------

bool jpp__hlo_read_varint(jpp_hlo_bytes_t* bytes, uint64_t* out_value) {
  *out_value = 0;
  for (unsigned shift = 0; shift < 64 && bytes->at < bytes->end; shift += 7) {
    uint8_t byte = *bytes->at++;
    *out_value |= (uint64_t)(byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

static bool skip(jpp_hlo_bytes_t* bytes, uint64_t count) {
  if (count > (uint64_t)(bytes->end - bytes->at)) return false;
  bytes->at += count;
  return true;
}

bool jpp__hlo_next_field(jpp_hlo_bytes_t* bytes, jpp_hlo_field_t* out) {
  uint64_t tag = 0, size = 0;
  if (!jpp__hlo_read_varint(bytes, &tag)) return false;
  *out = (jpp_hlo_field_t){.number = (uint32_t)(tag >> 3)};
  switch (tag & 7) {
    case 0:
      return jpp__hlo_read_varint(bytes, &out->value);
    case 1:
      return skip(bytes, 8);
    case 2:
      if (!jpp__hlo_read_varint(bytes, &size)) return false;
      out->inside.at = bytes->at;
      if (!skip(bytes, size)) return false;
      out->inside.end = bytes->at;
      return true;
    case 5:
      return skip(bytes, 4);
    default:
      return false;
  }
}

jpp_status_t* jpp__hlo_append_numbers(const jpp_hlo_field_t* field,
                                      jpp_hlo_numbers_t* numbers) {
  if (!field->inside.at) return JPP_VEC_PUSH(numbers, field->value);
  jpp_hlo_bytes_t inside = field->inside;
  for (uint64_t value = 0; jpp__hlo_read_varint(&inside, &value);) {
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(numbers, value));
  }
  return NULL;
}

bool jpp__hlo_is_text(jpp_hlo_bytes_t bytes, const char* text) {
  size_t size = strlen(text);
  return (size_t)(bytes.end - bytes.at) == size && !memcmp(bytes.at, text, size);
}

// --- Modules --------------------------------------------------------------------------

jpp_status_t* jpp__hlo_module_read(jpp_hlo_bytes_t bytes, jpp_hlo_module_t* out_module) {
  *out_module = (jpp_hlo_module_t){.entry = UINT64_MAX};
  for (jpp_hlo_field_t field; jpp__hlo_next_field(&bytes, &field);) {
    if (field.number == kModuleEntryId) out_module->entry = field.value;
    if (field.number != kModuleComputations) continue;
    jpp_hlo_computation_t computation = {.inside = field.inside};
    jpp_hlo_bytes_t inside = field.inside;
    for (jpp_hlo_field_t inner; jpp__hlo_next_field(&inside, &inner);) {
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

bool jpp__hlo_runs_called(jpp_hlo_bytes_t opcode) {
  static const char* const kOpcodes[] = {"while", "call", "conditional", "async-start"};
  for (size_t i = 0; i < sizeof(kOpcodes) / sizeof(*kOpcodes); ++i) {
    if (jpp__hlo_is_text(opcode, kOpcodes[i])) return true;
  }
  return false;
}

const jpp_hlo_collective_t* jpp__hlo_find_collective(jpp_hlo_bytes_t opcode) {
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
    if (jpp__hlo_is_text(opcode, kCollectives[i].opcode)) return &kCollectives[i];
  }
  return NULL;
}
