// Decides whether data dependences order the collectives of a program. Plugins keep the
// order of collectives within a computation. They may interleave them with the
// collectives that a loop, a condition or a call runs, unless one depends on the other.
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "device/hlo.h"
#include "device/hlo_read.h"

// Field numbers of xla/service/hlo.proto.
enum { kInstructionId = 35, kInstructionOperands = 36 };

typedef struct instruction {
  uint64_t id;
  bool communicates;   // is a collective, or runs one
  bool runs;           // runs the computations that it calls
  size_t first, last;  // operands [first, last) of the body
} instruction_t;

typedef struct place {
  uint64_t id;
  size_t at;
} place_t;

// Instructions follow their operands.
typedef struct body {
  JPP_VEC(instruction_t) instructions;
  jpp_u64_vec_t operands;  // ids, then indices of instructions
  place_t* places;         // [instructions.count], by id
  bool* marked;            // [instructions.count]
} body_t;

typedef enum content { kUnknown, kNoCollectives, kCollectives } content_t;

typedef struct checker {
  jpp_hlo_module_t module;
  uint8_t* contents;  // [module.computations.count] content_t
  bool ordered;
} checker_t;

static jpp_status_t* check_computation(checker_t* checker, uint64_t id, uint32_t depth,
                                       bool* out_communicates);

// --- Reading --------------------------------------------------------------------------

static jpp_status_t* read_called(checker_t* checker, const jpp_u64_vec_t* called,
                                 uint32_t depth, instruction_t* instruction) {
  for (size_t i = 0; instruction->runs && i < called->count; ++i) {
    bool communicates = false;
    JPP_RETURN_IF_ERROR(
        check_computation(checker, called->data[i], depth + 1, &communicates));
    instruction->communicates |= communicates;
  }
  return NULL;
}

static jpp_status_t* read_instruction(checker_t* checker, jpp_protobuf_t inside,
                                      uint32_t depth, body_t* body) {
  instruction_t instruction = {.first = body->operands.count};
  jpp_u64_vec_t called = {0};
  jpp_status_t* status = NULL;
  for (jpp_protobuf_field_t field;
       !status && jpp__protobuf_read_field(&inside, &field);) {
    if (field.number == kInstructionId) instruction.id = field.value;
    if (field.number == kHloOpcode) {
      instruction.communicates = jpp__hlo_find_collective(field.inside) != NULL;
      instruction.runs = jpp__hlo_runs_called(field.inside);
    } else if (field.number == kInstructionOperands) {
      status = jpp__protobuf_read_numbers(&field, &body->operands);
    } else if (field.number == kHloCalled) {
      status = jpp__protobuf_read_numbers(&field, &called);
    }
  }
  instruction.last = body->operands.count;
  if (!status) status = read_called(checker, &called, depth, &instruction);
  if (!status) status = JPP_VEC_PUSH(&body->instructions, instruction);
  jpp_vec_deinit(&called);
  return status;
}

static int compare_places(const void* a, const void* b) {
  uint64_t left = ((const place_t*)a)->id, right = ((const place_t*)b)->id;
  return (left > right) - (left < right);
}

// Replaces the operands' ids by indices. An operand that is not in the computation, which
// is invalid HLO, is replaced by the first instruction.
static jpp_status_t* find_operands(body_t* body) {
  size_t count = body->instructions.count;
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(count, &body->places));
  JPP_RETURN_IF_ERROR(JPP_ALLOC_ARRAY(count, &body->marked));
  for (size_t i = 0; i < count; ++i) {
    body->places[i] = (place_t){body->instructions.data[i].id, i};
  }
  if (count) qsort(body->places, count, sizeof(*body->places), compare_places);
  for (size_t i = 0; i < body->operands.count; ++i) {
    place_t key = {.id = body->operands.data[i]};
    const place_t* place =
        count ? bsearch(&key, body->places, count, sizeof(key), compare_places) : NULL;
    body->operands.data[i] = place ? place->at : 0;
  }
  return NULL;
}

// --- Checking -------------------------------------------------------------------------

// Marks the instruction `one`, its dependents and its dependences.
static void mark_dependent(body_t* body, size_t one) {
  const instruction_t* instructions = body->instructions.data;
  const uint64_t* operands = body->operands.data;
  memset(body->marked, 0, body->instructions.count * sizeof(*body->marked));
  body->marked[one] = true;
  for (size_t i = one + 1; i < body->instructions.count; ++i) {
    for (size_t k = instructions[i].first; k < instructions[i].last; ++k) {
      body->marked[i] |= body->marked[operands[k]];
    }
  }
  for (size_t i = one + 1; i-- > 0;) {
    for (size_t k = instructions[i].first; body->marked[i] && k < instructions[i].last;
         ++k) {
      if (operands[k] < i) body->marked[operands[k]] = true;
    }
  }
}

static bool is_ordered(body_t* body) {
  for (size_t i = 0; i < body->instructions.count; ++i) {
    if (!body->instructions.data[i].communicates || !body->instructions.data[i].runs) {
      continue;
    }
    mark_dependent(body, i);
    for (size_t k = 0; k < body->instructions.count; ++k) {
      if (body->instructions.data[k].communicates && !body->marked[k]) return false;
    }
  }
  return true;
}

static jpp_status_t* check_body(checker_t* checker, jpp_protobuf_t inside, uint32_t depth,
                                body_t* body, bool* out_communicates) {
  for (jpp_protobuf_field_t field; jpp__protobuf_read_field(&inside, &field);) {
    if (field.number != kHloInstructions) continue;
    JPP_RETURN_IF_ERROR(read_instruction(checker, field.inside, depth, body));
  }
  JPP_RETURN_IF_ERROR(find_operands(body));
  for (size_t i = 0; i < body->instructions.count; ++i) {
    *out_communicates |= body->instructions.data[i].communicates;
  }
  checker->ordered &= is_ordered(body);
  return NULL;
}

static jpp_status_t* check_computation(checker_t* checker, uint64_t id, uint32_t depth,
                                       bool* out_communicates) {
  size_t at = jpp__hlo_find(&checker->module, id);
  if (at == checker->module.computations.count || depth > kHloMostDepth) {
    checker->ordered = false;
    return NULL;
  }
  *out_communicates = checker->contents[at] == kCollectives;
  if (checker->contents[at] != kUnknown) return NULL;
  body_t body = {0};
  jpp_status_t* status = check_body(checker, checker->module.computations.data[at].inside,
                                    depth, &body, out_communicates);
  checker->contents[at] = *out_communicates ? kCollectives : kNoCollectives;
  jpp_vec_deinit(&body.instructions);
  jpp_vec_deinit(&body.operands);
  jpp_free(body.places);
  jpp_free(body.marked);
  return status;
}

jpp_status_t* jpp__hlo_orders_collectives(const void* module, size_t size,
                                          bool* out_ordered) {
  checker_t checker = {.ordered = true};
  bool communicates = false;
  jpp_status_t* status = jpp__hlo_module_read(module, size, &checker.module);
  if (!status) {
    status = JPP_ALLOC_ARRAY(checker.module.computations.count, &checker.contents);
  }
  if (!status) {
    status = check_computation(&checker, checker.module.entry, 0, &communicates);
  }
  *out_ordered = !status && checker.ordered;
  jpp_vec_deinit(&checker.module.computations);
  jpp_free(checker.contents);
  return status;
}
