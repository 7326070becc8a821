// Reads collectives out of compiled HLO. The module is walked from its entry, so that
// an instruction in a loop counts once per iteration.
#include "device/hlo.h"

#include <stdlib.h>
#include <string.h>

#include "base/null.h"
#include "base/str.h"
#include "device/hlo_read.h"

// Field numbers of xla/service/hlo.proto and xla/xla_data.proto.
enum {
  kConfiguredModule = 1,
  kInstructionShape = 3,
  kInstructionBackendConfig = 43,
  kInstructionGroups = 49,
  kInstructionPairs = 52,
  kInstructionDeviceList = 87,
  kInstructionIota = 92,  // in newer versions, one of these two replaces the device list
  kInstructionMeshAxes = 93,
  kShapeType = 2,
  kShapeDims = 3,
  kShapeTuple = 4,
  kGroupIds = 1,  // of a ReplicaGroup
  kPairSource = 1,
  kPairTarget = 2,
  kDeviceListGroups = 1,
  kDeviceListIota = 2,
  kIotaGroups = 1,
  kIotaGroupSize = 2,
  kIotaDims = 3,
  kIotaPermutation = 4,
  kMeshAxesMesh = 1,
  kMeshAxesRef = 2,
  kMeshAxis = 1,
  kAxisSize = 2,
  kRefAxis = 1,
  kRefPart = 2,  // of an axis that is divided in (before, part, after)
  kPartBefore = 1,
  kPartSize = 2,
};

enum { kMostNested = 64, kMostDims = 16, kMostMembers = 1 << 20 };

// --- Shapes ---------------------------------------------------------------------------

// Bits of an element, by XLA's PrimitiveType; types of 4 bits or fewer take half a byte.
static uint64_t element_bits(uint64_t type) {
  static const uint8_t kBits[] = {
      [1] = 8,   [2] = 8,   [3] = 16,   [4] = 32,  [5] = 64,  [6] = 8,
      [7] = 16,  [8] = 32,  [9] = 64,   [10] = 16, [11] = 32, [12] = 64,
      [15] = 64, [16] = 16, [18] = 128, [19] = 8,  [20] = 8,  [21] = 4,
      [22] = 4,  [23] = 8,  [24] = 8,   [25] = 8,  [26] = 4,  [27] = 4,
      [28] = 8,  [29] = 8,  [30] = 4,   [31] = 4,  [32] = 4,  [33] = 8,
  };
  return type < sizeof(kBits) ? kBits[type] : 0;
}

// The bytes of an array, or of the parts of a tuple from `first` on.
static uint64_t shape_bytes(jpp_protobuf_t shape, uint32_t first, uint32_t depth) {
  uint64_t bits = 0, elements = 1, parts = 0;
  uint32_t part = 0;
  if (depth > kMostNested) return 0;
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&shape, &field);) {
    if (field.number == kShapeType) bits = element_bits(field.value);
    if (field.number == kShapeTuple && part++ >= first) {
      parts += shape_bytes(field.inside, 0, depth + 1);
    }
    if (field.number != kShapeDims) continue;
    if (!field.inside.at) elements *= field.value;
    for (uint64_t dim = 0; jpp__protobuf_read_varint(&field.inside, &dim);)
      elements *= dim;
  }
  return parts + (elements * bits + 7) / 8;
}

// --- Groups ---------------------------------------------------------------------------

// Appends the first group of an iota list: the numbers 0, 1, 2 ... in the shape `dims`,
// transposed, and cut into rows of one group each.
static jpp_status_t* append_iota_group(jpp_protobuf_t iota, jpp_u64_vec_t* members) {
  jpp_u64_vec_t dims = {0}, order = {0};
  uint64_t size = 0;
  jpp_status_t* status = NULL;
  for (jpp_protobuf_field_t field; !status && jpp__protobuf_read_field(&iota, &field);) {
    if (field.number == kIotaGroupSize) size = field.value;
    if (field.number == kIotaDims) status = jpp__protobuf_read_numbers(&field, &dims);
    if (field.number == kIotaPermutation)
      status = jpp__protobuf_read_numbers(&field, &order);
  }
  uint64_t strides[kMostDims] = {0}, stride = 1;
  bool valid = !status && dims.count <= kMostDims && size <= kMostMembers &&
               (!order.count || order.count == dims.count);
  for (size_t d = valid ? dims.count : 0; d-- > 0; stride *= dims.data[d]) {
    strides[d] = stride;
  }
  for (uint64_t i = 0; valid && !status && i < size; ++i) {
    uint64_t rest = i, member = 0;
    for (size_t d = dims.count; d-- > 0;) {
      uint64_t axis = order.count ? order.data[d] : d;
      if (axis >= dims.count || !dims.data[axis]) break;
      member += rest % dims.data[axis] * strides[axis];
      rest /= dims.data[axis];
    }
    status = JPP_VEC_PUSH(members, member);
  }
  jpp_vec_deinit(&dims);
  jpp_vec_deinit(&order);
  return status;
}

static uint64_t number_in(jpp_protobuf_t message, uint32_t number, uint64_t otherwise) {
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&message, &field);) {
    if (field.number == number) return field.value;
  }
  return otherwise;
}

static jpp_status_t* read_mesh(jpp_protobuf_t mesh, jpp_u64_vec_t* sizes) {
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&mesh, &field);) {
    if (field.number != kMeshAxis) continue;
    JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(sizes, number_in(field.inside, kAxisSize, 1)));
  }
  return NULL;
}

// Adds, for each of the members so far, those that differ along an axis or a part of it.
static jpp_status_t* extend_along(const jpp_u64_vec_t* sizes, jpp_protobuf_t ref,
                                  jpp_u64_vec_t* members) {
  uint64_t axis = number_in(ref, kRefAxis, 0), stride = 1;
  if (axis >= sizes->count) return NULL;
  for (size_t a = axis + 1; a < sizes->count; ++a) stride *= sizes->data[a];
  uint64_t size = sizes->data[axis];
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&ref, &field);) {
    if (field.number != kRefPart) continue;
    uint64_t before = number_in(field.inside, kPartBefore, 1);
    uint64_t part = number_in(field.inside, kPartSize, 1);
    if (before && part && part <= size / before) stride *= size / before / part;
    size = part;
  }
  size_t count = members->count;
  for (uint64_t k = 1; k < size && members->count < kMostMembers; ++k) {
    for (size_t i = 0; i < count; ++i) {
      JPP_RETURN_IF_ERROR(JPP_VEC_PUSH(members, members->data[i] + k * stride));
    }
  }
  return NULL;
}

// Appends the group of partition 0 along axes of a mesh.
static jpp_status_t* append_mesh_group(jpp_protobuf_t list, jpp_u64_vec_t* members) {
  jpp_u64_vec_t sizes = {0};
  jpp_status_t* status = JPP_VEC_PUSH(members, 0);
  for (jpp_protobuf_field_t field; !status && jpp__protobuf_read_field(&list, &field);) {
    if (field.number == kMeshAxesMesh) status = read_mesh(field.inside, &sizes);
    if (field.number == kMeshAxesRef)
      status = extend_along(&sizes, field.inside, members);
  }
  jpp_vec_deinit(&sizes);
  return status;
}

// Appends a ReplicaGroup, or a pair of source and target.
static jpp_status_t* append_group(jpp_protobuf_t group, jpp_u64_vec_t* members) {
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&group, &field);) {
    if (field.number == kPairSource || field.number == kPairTarget) {
      JPP_RETURN_IF_ERROR(jpp__protobuf_read_numbers(&field, members));
    }
  }
  return NULL;
}

static jpp_status_t* append_device_list(jpp_protobuf_t list, jpp_u64_vec_t* members) {
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&list, &field);) {
    if (members->count) return NULL;
    if (field.number == kDeviceListGroups) {
      JPP_RETURN_IF_ERROR(append_group(field.inside, members));
    } else if (field.number == kDeviceListIota) {
      JPP_RETURN_IF_ERROR(append_iota_group(field.inside, members));
    }
  }
  return NULL;
}

// --- Instructions ---------------------------------------------------------------------

typedef struct lister {
  jpp_hlo_module_t module;
  JPP_VEC(jpp_collective_t) found;
  jpp_u64_vec_t members;  // of the current instruction
  jpp_arena_t arena;      // allocates the result
} lister_t;

typedef struct instruction {
  jpp_protobuf_t opcode, shape, config;
  jpp_u64_vec_t called;
} instruction_t;

static int compare_members(const void* a, const void* b) {
  uint32_t left = *(const uint32_t*)a, right = *(const uint32_t*)b;
  return (left > right) - (left < right);
}

static jpp_status_t* add_collective(lister_t* lister, uint8_t kind, uint64_t bytes,
                                    uint64_t times) {
  uint32_t count = (uint32_t)lister->members.count, *members = NULL;
  JPP_RETURN_IF_ERROR(JPP_ARENA_ARRAY(&lister->arena, count, &members));
  for (uint32_t i = 0; i < count; ++i) members[i] = (uint32_t)lister->members.data[i];
  if (count) qsort(members, count, sizeof(*members), compare_members);
  for (size_t i = 0; i < lister->found.count; ++i) {
    jpp_collective_t* known = &lister->found.data[i];
    if (known->kind != kind || known->num_members != count) continue;
    if (count && memcmp(known->members, members, count * sizeof(*members)) != 0) continue;
    known->times += times;
    known->bytes += times * bytes;
    return NULL;
  }
  jpp_collective_t collective = {.kind = kind,
                                 .times = times,
                                 .bytes = times * bytes,
                                 .num_members = count,
                                 .members = members};
  return JPP_VEC_PUSH(&lister->found, collective);
}

// The number of iterations of a while loop, from a backend config such as
// {"known_trip_count":{"n":"3"}}; 1 if unknown.
static uint64_t turns_of(jpp_protobuf_t config) {
  static const char kKey[] = "\"known_trip_count\":{\"n\":\"";
  size_t size = (size_t)(config.end - config.at), length = sizeof(kKey) - 1;
  for (size_t i = 0; i + length < size; ++i) {
    if (memcmp(config.at + i, kKey, length) != 0) continue;
    uint64_t turns = 0;
    for (const uint8_t* at = config.at + i + length; at < config.end; ++at) {
      if (*at < '0' || *at > '9' || turns > UINT32_MAX) break;
      turns = turns * 10 + (uint64_t)(*at - '0');
    }
    return turns;
  }
  return 1;
}

static jpp_status_t* read_instruction(lister_t* lister, jpp_protobuf_t inside,
                                      instruction_t* out) {
  lister->members.count = 0;
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&inside, &field);) {
    jpp_status_t* status = NULL;
    bool first_group = lister->members.count == 0;
    switch (field.number) {
      case kHloOpcode:
        out->opcode = field.inside;
        break;
      case kInstructionShape:
        out->shape = field.inside;
        break;
      case kInstructionBackendConfig:
        out->config = field.inside;
        break;
      case kHloCalled:
        status = jpp__protobuf_read_numbers(&field, &out->called);
        break;
      case kInstructionGroups:
      case kInstructionPairs:
        if (first_group) status = append_group(field.inside, &lister->members);
        break;
      case kInstructionDeviceList:
        if (first_group) status = append_device_list(field.inside, &lister->members);
        break;
      case kInstructionIota:
        if (first_group) status = append_iota_group(field.inside, &lister->members);
        break;
      case kInstructionMeshAxes:
        if (first_group) status = append_mesh_group(field.inside, &lister->members);
        break;
      default:
        break;
    }
    JPP_RETURN_IF_ERROR(status);
  }
  return NULL;
}

static jpp_status_t* list_computation(lister_t* lister, uint64_t id, uint64_t times,
                                      uint32_t depth);

static jpp_status_t* list_instruction(lister_t* lister, const instruction_t* instruction,
                                      uint64_t times, uint32_t depth) {
  const jpp_hlo_collective_t* opcode = jpp__hlo_find_collective(instruction->opcode);
  if (opcode) {
    uint64_t bytes = shape_bytes(instruction->shape, opcode->first_result, 0);
    return add_collective(lister, opcode->kind, bytes, times);
  }
  bool is_loop = jpp__protobuf_is_text(instruction->opcode, "while");
  bool calls = jpp__hlo_runs_called(instruction->opcode);
  if (is_loop) times *= turns_of(instruction->config);
  for (size_t i = 0; calls && i < instruction->called.count; ++i) {
    JPP_RETURN_IF_ERROR(
        list_computation(lister, instruction->called.data[i], times, depth + 1));
  }
  return NULL;
}

static jpp_status_t* list_computation(lister_t* lister, uint64_t id, uint64_t times,
                                      uint32_t depth) {
  size_t at = jpp__hlo_find(&lister->module, id);
  if (at == lister->module.computations.count || depth > kHloMostDepth) return NULL;
  jpp_protobuf_t inside = lister->module.computations.data[at].inside;
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&inside, &field);) {
    if (field.number != kHloInstructions) continue;
    instruction_t instruction = {0};
    jpp_status_t* status = read_instruction(lister, field.inside, &instruction);
    if (!status) status = list_instruction(lister, &instruction, times, depth);
    jpp_vec_deinit(&instruction.called);
    JPP_RETURN_IF_ERROR(status);
  }
  return NULL;
}

// --- Modules --------------------------------------------------------------------------

jpp_status_t* jpp__hlo_without_config(void* bytes, size_t* size) {
  jpp_protobuf_t all = {bytes, (const uint8_t*)bytes + *size};
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&all, &field);) {
    if (field.number != kConfiguredModule || !field.inside.at) continue;
    *size = (size_t)(field.inside.end - field.inside.at);
    memmove(bytes, field.inside.at, *size);
    return NULL;
  }
  return jpp_status_make(JPP_INVALID_ARGUMENT, "expected an HLO module with a config");
}

typedef struct collectives_storage {
  jpp_collectives_t collectives;  // first member: the caller's struct
  jpp_arena_t arena;
} collectives_storage_t;

static jpp_status_t* hand_over(lister_t* lister, jpp_collectives_t** out_collectives) {
  collectives_storage_t* storage = NULL;
  jpp_collective_t* each = NULL;
  JPP_RETURN_IF_ERROR(jpp__arena_copy(&lister->arena, lister->found.data,
                                      lister->found.count * sizeof(*each),
                                      (void**)&each));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(1, &storage));
  storage->collectives = (jpp_collectives_t){(uint32_t)lister->found.count, each};
  storage->arena = lister->arena;
  lister->arena = (jpp_arena_t){0};
  *out_collectives = &storage->collectives;
  return NULL;
}

jpp_status_t* jpp__hlo_collectives(const void* module, size_t size,
                                   jpp_collectives_t** out_collectives) {
  *out_collectives = NULL;
  lister_t lister = {0};
  jpp__arena_init(&lister.arena);
  jpp_status_t* status = jpp__hlo_module_read(module, size, &lister.module);
  if (!status) status = list_computation(&lister, lister.module.entry, 1, 0);
  if (!status) status = hand_over(&lister, out_collectives);
  jpp__arena_deinit(&lister.arena);
  jpp_vec_deinit(&lister.module.computations);
  jpp_vec_deinit(&lister.found);
  jpp_vec_deinit(&lister.members);
  return status;
}

// --- Reading the result ---------------------------------------------------------------

// Whether the members, or all partitions if there are none, differ along an axis on which
// neighbours have numbers `stride` apart.
static bool goes_along(const jpp_collective_t* collective, uint64_t stride,
                       uint32_t size) {
  for (uint32_t i = 1; i < collective->num_members; ++i) {
    uint64_t first = collective->members[0] / stride % size;
    if (collective->members[i] / stride % size != first) return true;
  }
  return !collective->num_members && size > 1;
}

jpp_status_t* jpp_collective_axes(const jpp_collective_t* collective, uint32_t num_axes,
                                  const char* const* names, const uint32_t* sizes,
                                  char** out_axes) {
  JPP_RETURN_IF_NULL(collective, names, sizes, out_axes);
  *out_axes = NULL;
  uint64_t partitions = 1;
  for (uint32_t a = 0; a < num_axes; ++a) partitions *= sizes[a];
  for (uint32_t i = 0; i < collective->num_members; ++i) {
    if (collective->members[i] < partitions) continue;
    return jpp_status_make(
        JPP_INVALID_ARGUMENT,
        "partition %u: expected one below %llu, the devices of the mesh",
        collective->members[i], (unsigned long long)partitions);
  }
  jpp_str_t text = {0};
  for (uint32_t a = 0; a < num_axes; ++a) {
    partitions /= sizes[a];
    if (!goes_along(collective, partitions, sizes[a])) continue;
    jpp_str_appendf(&text, "%s%s", text.length ? "," : "", names[a]);
  }
  jpp_str_append(&text, "");  // keeps the text non-NULL if there is no axis
  return jpp_str_finish(&text, out_axes);
}

void jpp_collectives_destroy(jpp_collectives_t* collectives) {
  if (!collectives) return;
  collectives_storage_t* storage = (collectives_storage_t*)collectives;
  jpp__arena_deinit(&storage->arena);
  jpp_free(storage);
}

const char* jpp_collective_kind_name(jpp_collective_kind_t kind) {
  static const char* const kNames[] = {
      [JPP_COLLECTIVE_ALL_REDUCE] = "all-reduce",
      [JPP_COLLECTIVE_ALL_GATHER] = "all-gather",
      [JPP_COLLECTIVE_REDUCE_SCATTER] = "reduce-scatter",
      [JPP_COLLECTIVE_ALL_TO_ALL] = "all-to-all",
      [JPP_COLLECTIVE_PERMUTE] = "collective-permute",
      [JPP_COLLECTIVE_BROADCAST] = "collective-broadcast",
  };
  _Static_assert(sizeof(kNames) / sizeof(*kNames) == JPP_COLLECTIVE_KIND_COUNT,
                 "a name a kind");
  return (unsigned)kind < JPP_COLLECTIVE_KIND_COUNT ? kNames[kind] : NULL;
}
